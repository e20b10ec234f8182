//! Log of the commands that serve others.

use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Starts the log, to stderr: what `FARFIELD_LOG` says, or all of this level and above.
pub(crate) fn start(level: &str, is_json: bool) {
    let filter = EnvFilter::try_from_env("FARFIELD_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // It fails only if a log was installed already, which is then used.
    let _ = match is_json {
        true => builder.json().flatten_event(true).try_init(),
        false => builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).try_init(),
    };
}
