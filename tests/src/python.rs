//! A Python in which the package is installed.

use crate::{Command, Running, Scratch, farfield, project, skip, wait_until};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

const DEBIAN_PYTHON: &str = "/usr/bin/python3";
/// The environment variable that names another interpreter, whose modules are used instead of Debian's.
const OTHER_PYTHON: &str = "FARFIELD_PYTHON";
const DEADLINE: Duration = Duration::from_secs(180);

/// The interpreter of an environment with a wheel of the programs under test. Returns `None`, and says what is missing, if this
/// machine has not what that takes.
pub fn python() -> Option<&'static Path> {
    static PYTHON: OnceLock<Option<(Scratch, PathBuf)>> = OnceLock::new();
    let made = PYTHON.get_or_init(|| {
        let scratch = Scratch::new("python");
        let run = |words: &[&str]| Command::new(scratch.path(), words).within(DEADLINE).run();
        let other = std::env::var(OTHER_PYTHON).ok();
        let base = other.as_deref().unwrap_or(DEBIAN_PYTHON);
        let modules = "import setuptools, wheel, venv, pip, numpy, pandas, sklearn";
        if !Path::new(base).exists() || run(&[base, "-c", modules]).code != 0 {
            return None;
        }
        let checked = |words: &[&str]| {
            let ended = run(words);
            assert_eq!(ended.code, 0, "{words:?}: {}", ended.errors);
            ended.text()
        };
        let programs = farfield().parent().expect("a folder").to_str().expect("UTF-8").to_owned();
        let make_wheel = project().join("python/make_wheel.py");
        let wheels = scratch.path().join("wheels");
        let environment = scratch.path().join("venv");
        let [make_wheel, wheels_, venv] =
            [&make_wheel, &wheels, &environment].map(|path| path.to_str().expect("UTF-8"));
        checked(&[base, make_wheel, &programs, wheels_, env!("CARGO_PKG_VERSION")]);
        checked(&[base, "-m", "venv", "--system-site-packages", "--without-pip", venv]);
        let interpreter = environment.join("bin/python");
        let wheel = std::fs::read_dir(&wheels).expect("made").next().expect("one wheel").expect("readable").path();
        let (interpreter_, wheel) = (interpreter.to_str().expect("UTF-8"), wheel.to_str().expect("UTF-8"));
        if other.is_some() {
            // Modules of an environment are not those of the system that a new one sees.
            let folder = |python: &str| {
                let script = "import sysconfig; print(sysconfig.get_path('purelib'))";
                checked(&[python, "-c", script]).trim_end().to_owned()
            };
            let file = Path::new(&folder(interpreter_)).join("base.pth");
            std::fs::write(file, folder(base) + "\n").expect("written");
        }
        checked(&[interpreter_, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]);
        Some((scratch, interpreter))
    });
    if made.is_none() {
        skip("python3 with venv, pip, setuptools, wheel, numpy, pandas and sklearn is not there");
    }
    made.as_ref().map(|(_, interpreter)| interpreter.as_path())
}

/// The path of a program of `tests/programs/python`.
pub fn python_program(name: &str) -> String {
    project().join("tests/programs/python").join(name).to_str().expect("UTF-8").to_owned()
}

/// A run of that interpreter with these words.
///
/// # Panics
/// Panics if there is none.
pub fn python_command(scratch: &Scratch, words: &[&str]) -> Command {
    let interpreter = python().and_then(Path::to_str).expect("there is a Python, in a path of UTF-8");
    Command::new(scratch.path(), [&[interpreter], words].concat()).within(DEADLINE)
}

/// Starts the situation `servers` of a program, which fills far memory at `url`, and waits until it has. It goes on when a line is
/// written to the file `go` of the folder.
pub fn python_filled(scratch: &Scratch, program: &str, url: &str) -> Running {
    let fifo = scratch.path().join("go");
    let (fifo, program) = (fifo.to_str().expect("UTF-8"), python_program(program));
    let interpreter = python().and_then(Path::to_str).expect("there is a Python, in a path of UTF-8");
    let script = format!("mkfifo {fifo} && exec {interpreter} {program} servers '{url}' <> {fifo}");
    let running = Command::new(scratch.path(), ["sh", "-c", &script]).within(DEADLINE).start();
    wait_until("far memory is filled", || running.output().contains("filled") || running.is_over());
    running
}
