//! Commands of Slurm, with a deadline.

use super::SlurmError;
use std::io::Read;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Interval between two looks whether a command has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Runs a command and returns its standard output.
pub(super) fn run(program: &str, arguments: &[&str], within: Duration) -> Result<String, SlurmError> {
    let line = || [&[program], arguments].concat().join(" ");
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Nobody's habits: times are numbers, and the fields are those that were asked for.
    for (name, _) in std::env::vars_os() {
        if ["SQUEUE_", "SCONTROL_"].iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.env("SLURM_TIME_FORMAT", "%s").env("LC_ALL", "C");
    let mut child = command.spawn().map_err(|error| SlurmError::NotStarted { program: program.to_owned(), error })?;
    let reader = |mut stream: Box<dyn Read + Send>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            // What cannot be read is missing, and the exit code says so.
            let _ = stream.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let output = child.stdout.take().map(|stream| reader(Box::new(stream)));
    let errors = child.stderr.take().map(|stream| reader(Box::new(stream)));
    let started = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if started.elapsed() < within => thread::sleep(LOOK_EVERY),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(SlurmError::Silent { command: line() });
            }
        }
    };
    let text = |reader: Option<thread::JoinHandle<String>>| reader.and_then(|it| it.join().ok()).unwrap_or_default();
    let (output, errors) = (text(output), text(errors));
    if status.success() {
        return Ok(output);
    }
    let answer = errors.trim().replace('\n', "; ");
    let answer = if answer.is_empty() { status.to_string() } else { answer };
    Err(SlurmError::Failed { command: line(), answer })
}

#[cfg(test)]
mod tests {
    //! Guards against a gate that hangs when Slurm does.
    use super::*;

    #[test]
    fn commands_answer_fail_or_are_ended() {
        let patience = Duration::from_secs(60);
        assert_eq!(run("sh", &["-c", "echo $SLURM_TIME_FORMAT"], patience).unwrap(), "%s\n");
        let long = run("sh", &["-c", "head -c 300000 /dev/zero"], patience).unwrap();
        assert_eq!(long.len(), 300_000, "more than a pipe holds");
        let failed = run("sh", &["-c", "echo no >&2; exit 3"], patience).unwrap_err();
        assert_eq!(failed.to_string(), "sh -c echo no >&2; exit 3: no");
        assert!(matches!(run("/no/such/program", &[], patience), Err(SlurmError::NotStarted { .. })));
        let silent = run("sleep", &["1000"], Duration::from_millis(50)).unwrap_err();
        assert!(matches!(silent, SlurmError::Silent { .. }), "{silent}");
    }
}
