//! `farfield serve`: keeps far memory for others.

use clap::Args;

/// Keep far memory for programs on this or other machines.
#[derive(Args, Debug)]
pub struct ServeArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    rest: Vec<String>,
}

/// Runs the server until it is told to stop.
pub fn run(_args: ServeArgs) -> anyhow::Result<()> {
    anyhow::bail!("this build has no memory server")
}
