//! Runs test programs, several at a time where they allow it, and says what became of each.

use crate::chores;
use crate::measured::{self, Measured};
use crate::passed::{self, Inputs};
use anyhow::{Context, Result};
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::Mutex;
use std::time::Duration;

/// Pause between two looks at what others do.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A command of a part of the tests.
pub(crate) struct Run {
    pub(crate) part: &'static str,
    /// Package and program, and what else tells it from the part's other runs.
    pub(crate) name: String,
    pub(crate) command: Command,
    /// Whether cargo builds something first: two of these would wait for each other.
    pub(crate) is_cargo: bool,
    /// What its result depends on, where that is known.
    pub(crate) inputs: Option<Inputs>,
}

/// Runs that have not begun.
struct Queue {
    runs: Vec<Run>,
    /// Whether a run of cargo is under way.
    has_cargo: bool,
}

impl Queue {
    /// Returns whether runs are left, and the next one that may begin.
    fn next(&mut self) -> (bool, Option<Run>) {
        let found = self.runs.iter().position(|run| !(run.is_cargo && self.has_cargo));
        let run = found.map(|at| self.runs.remove(at));
        self.has_cargo |= run.as_ref().is_some_and(|run| run.is_cargo);
        (run.is_some() || !self.runs.is_empty(), run)
    }
}

/// What became of a [`Run`].
pub(crate) struct Outcome {
    pub(crate) part: &'static str,
    pub(crate) name: String,
    pub(crate) seconds: f64,
    /// Processor time of the command and of all processes that it has waited for, in seconds.
    pub(crate) cpu: f64,
    pub(crate) verdict: Verdict,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    /// It was not run: it has passed before, and nothing has changed since.
    Unchanged,
    Failed,
    /// It ran for longer than a test program may, and was killed.
    Hung,
}

/// Runs all of them in this order, up to `at_once` at a time, each for at most `patience`. With
/// several at a time, what a program prints is shown when it has ended.
pub(crate) fn all(runs: Vec<Run>, at_once: usize, patience: Duration) -> Result<Vec<Outcome>> {
    let folder = chores::target().join("test-output");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let (queue, outcomes) = (Mutex::new(Queue { runs, has_cargo: false }), Mutex::new(Vec::new()));
    let begin = |command: &mut Command, output: &Path| -> Result<Measured> {
        if at_once > 1 {
            let file = File::create(output).with_context(|| output.display().to_string())?;
            command.stdout(file.try_clone()?).stderr(file);
        }
        measured::run_for(command, patience)
    };
    let work = || -> Result<()> {
        loop {
            let (is_left, run) = lock(&queue).next();
            let Some(Run { part, name, mut command, is_cargo, inputs }) = run else {
                if !is_left {
                    return Ok(());
                }
                std::thread::sleep(LOOK_EVERY);
                continue;
            };
            println!("== {name} ==");
            passed::forget(&name)?;
            let output = folder.join(name.replace(['/', ' '], "-")).with_extension("txt");
            let ran = begin(&mut command, &output);
            if is_cargo {
                lock(&queue).has_cargo = false;
            }
            let (seconds, cpu, verdict) = match ran {
                Ok(ran) => (ran.wall.as_secs_f64(), ran.cpu, Verdict::of(ran.status)),
                Err(error) => {
                    println!("cannot run {command:?}: {error:#}");
                    (0.0, 0.0, Verdict::Failed)
                }
            };
            if let (Verdict::Passed, Some(inputs)) = (verdict, &inputs) {
                passed::keep(&name, inputs)?;
            }
            let mut outcomes = lock(&outcomes);
            if at_once > 1 {
                println!("\n{}", String::from_utf8_lossy(&std::fs::read(&output)?));
            }
            println!("== {name}: {}, {seconds:.0} s ==", verdict.text());
            outcomes.push(Outcome { part, name, seconds, cpu, verdict });
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    Ok(outcomes.into_inner().expect("no worker panics"))
}

impl Verdict {
    fn of(status: Option<ExitStatus>) -> Verdict {
        match status {
            Some(status) if status.success() => Verdict::Passed,
            Some(_) => Verdict::Failed,
            None => Verdict::Hung,
        }
    }

    pub(crate) fn is_failure(self) -> bool {
        matches!(self, Verdict::Failed | Verdict::Hung)
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Verdict::Passed => "ok",
            Verdict::Unchanged => "ok (unchanged: not run again)",
            Verdict::Failed => "FAILED",
            Verdict::Hung => "FAILED: it did not end in time",
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().expect("no worker panics")
}
