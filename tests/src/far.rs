//! `farfield run` and `farfield serve` as a user types them, for tests that compare with nothing.

use crate::process::{Command, Ended, Running};
use crate::{Report, Scratch, farfield, wait_until};
use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// One `farfield run`.
#[derive(Debug)]
pub struct FarRun {
    command: Command,
    report: PathBuf,
}

impl FarRun {
    /// `farfield run --quiet --report … OPTIONS -- WORDS`.
    pub fn new<O: AsRef<OsStr>, W: AsRef<OsStr>>(
        scratch: &Scratch,
        options: impl IntoIterator<Item = O>,
        words: impl IntoIterator<Item = W>,
    ) -> FarRun {
        let report = scratch.path().join("report.json");
        let _ = std::fs::remove_file(&report);
        let mut all: Vec<OsString> = vec![farfield().into(), "run".into(), "--quiet".into()];
        all.extend(["--report".into(), report.clone().into_os_string()]);
        all.extend(options.into_iter().map(|word| word.as_ref().to_owned()));
        all.push("--".into());
        all.extend(words.into_iter().map(|word| word.as_ref().to_owned()));
        FarRun { command: Command::new(&scratch.folder("run"), all), report }
    }

    /// Given up after this time.
    pub fn within(mut self, deadline: Duration) -> FarRun {
        self.command = self.command.within(deadline);
        self
    }

    /// With a variable of the environment.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> FarRun {
        self.command = self.command.env(name, value);
        self
    }

    /// Runs it to its end.
    pub fn run(&self) -> Ended {
        self.command.run()
    }

    /// Starts it.
    pub fn start(&self) -> Running {
        self.command.start()
    }

    /// What it reported.
    pub fn report(&self) -> Report {
        Report::read(&self.report)
    }
}

/// A running `farfield serve`, killed when dropped.
#[derive(Debug)]
pub struct Server {
    running: Running,
    url: String,
    metrics: Option<String>,
}

impl Server {
    /// Starts one on a Unix socket in `scratch` and waits until it accepts.
    pub fn start<O: AsRef<OsStr>>(scratch: &Scratch, name: &str, options: impl IntoIterator<Item = O>) -> Server {
        let socket = scratch.path().join(format!("{name}.sock"));
        let url = format!("unix:{}", socket.display());
        Server::start_at(scratch, name, url, options)
    }

    /// Starts one on a free TCP port.
    pub fn start_tcp<O: AsRef<OsStr>>(scratch: &Scratch, name: &str, options: impl IntoIterator<Item = O>) -> Server {
        Server::start_at(scratch, name, "tcp://127.0.0.1:0".to_owned(), options)
    }

    /// Starts one at this URL: where another one was, for example.
    pub fn start_at<O: AsRef<OsStr>>(
        scratch: &Scratch,
        name: &str,
        listen: String,
        options: impl IntoIterator<Item = O>,
    ) -> Server {
        let mut words: Vec<OsString> = vec![farfield().into(), "serve".into(), "--listen".into(), listen.into()];
        words.extend(options.into_iter().map(|word| word.as_ref().to_owned()));
        let folder = scratch.folder(name);
        let running = Command::new(&folder, words).within(Duration::from_secs(1800)).start();
        // One line says that it accepts, and where.
        wait_until("the server accepts", || {
            assert!(!running.is_over(), "the server has ended: {}", running.errors());
            running.output().ends_with('\n')
        });
        let ready: serde_json::Value = serde_json::from_str(&running.output()).expect("one line of JSON");
        let url = ready["endpoints"][0].as_str().expect("a place where it listens").to_owned();
        Server { running, url, metrics: ready["metrics"].as_str().map(str::to_owned) }
    }

    /// Clients reach it at another URL than the one that it says: with options.
    pub(crate) fn reached_at(self, url: String) -> Server {
        Server { url, ..self }
    }

    /// For `--far`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The process.
    pub fn running(&self) -> &Running {
        &self.running
    }

    /// What its metrics say now, of a server started with `--metrics`.
    pub fn metric(&self, name: &str) -> u64 {
        let url = self.metrics.as_deref().expect("started with --metrics");
        let address = url.trim_start_matches("http://").trim_end_matches("/metrics");
        let mut stream = TcpStream::connect(address).expect("the server lives");
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("it listens");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers");
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in: {text}"))
    }

    /// Kills it at once, as a crash of its machine would.
    pub fn kill(self) {
        drop(self);
    }
}

/// A file with a token in it.
impl Scratch {
    /// Writes `token` to a file that only this user can read.
    pub fn token(&self, name: &str, token: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path: PathBuf = self.file(name, format!("{token}\n"));
        std::fs::set_permissions(Path::new(&path), std::fs::Permissions::from_mode(0o600)).expect("the file is ours");
        path
    }
}
