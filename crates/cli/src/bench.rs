//! `farfield bench`: starts `farfield-bench`, which lies beside this program, as cargo does with
//! its commands.
//!
//! The experiments and their workloads are a separate program, so that users who run jobs do not
//! have to build them.

use anyhow::{Context, Result, bail};
use clap::Args;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Measure Farfield against Linux swap and against memory that is all near (by farfield-bench).
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub(crate) struct BenchArgs {
    /// Arguments of farfield-bench; `farfield bench --help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// Replaces this process by `farfield-bench`. Returns only if that is impossible.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let own = std::env::current_exe().context("cannot find out where this program is")?;
    let path = own.with_file_name("farfield-bench");
    if !path.is_file() {
        bail!("there is no {}; build it: cargo build --release -p farfield-bench", path.display());
    }
    Err(Command::new(&path).args(&args.words).exec()).with_context(|| format!("cannot start {}", path.display()))
}
