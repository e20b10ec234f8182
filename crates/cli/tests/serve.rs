//! Guards against a server that cannot be stopped, stops too early, or stays behind when its parent is gone.

use farfield_pool::{Backend, PoolBuilder};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

struct Serve {
    child: Child,
    stdout: BufReader<ChildStdout>,
    ready: serde_json::Value,
    socket: PathBuf,
}

impl Serve {
    fn start(name: &str, arguments: &[&str]) -> Serve {
        Serve::start_with(name, arguments, ("FARFIELD_TOKEN", None))
    }

    /// Starts one with a variable of its environment.
    fn start_with(name: &str, arguments: &[&str], (variable, value): (&str, Option<&str>)) -> Serve {
        let socket = std::env::temp_dir().join(format!("farfield-{name}-{}.sock", std::process::id()));
        let mut command = Command::new(env!("CARGO_BIN_EXE_farfield"));
        command.env_remove("FARFIELD_TOKEN").envs(value.map(|value| (variable, value)));
        let mut child = command
            .arg("serve")
            .arg("--listen")
            .arg(format!("unix:{}", socket.display()))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let ready = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        Serve { child, stdout, ready, socket }
    }

    fn region(&self) -> Arc<dyn Backend> {
        PoolBuilder::new().url(self.ready["endpoints"][0].as_str().unwrap()).pages(1000).open().unwrap()
    }

    fn signal(&self, number: i32) {
        // SAFETY: no memory is involved; the child was not waited for, so its number is still its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, number) }, 0);
    }

    fn end(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < PATIENCE, "the server does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

#[test]
fn an_idle_server_ends_well_on_the_first_signal_and_cleans_up() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut server = Serve::start("idle", &["--drain-timeout", "1m"]);
        assert_eq!(server.ready["ready"], true);
        assert!(server.socket.exists());
        server.signal(signal);
        assert_eq!(server.end().code(), Some(0));
        assert!(!server.socket.exists());
        let mut rest = String::new();
        assert_eq!(server.stdout.read_line(&mut rest).unwrap(), 0, "{rest:?}: one line is all that stdout gets");
    }
}

#[test]
fn a_service_manager_is_told_of_the_start_and_of_the_stop() {
    let manager_at = std::env::temp_dir().join(format!("farfield-manager-{}.sock", std::process::id()));
    let manager = std::os::unix::net::UnixDatagram::bind(&manager_at).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let said = || {
        let mut bytes = [0; 512];
        let len = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..len].to_vec()).unwrap()
    };
    let mut server = Serve::start_with("managed", &[], ("NOTIFY_SOCKET", Some(manager_at.to_str().unwrap())));
    let ready = said();
    let url = server.ready["endpoints"][0].as_str().unwrap();
    assert!(ready.contains("READY=1\n") && ready.contains(&format!("STATUS=listening at {url}\n")), "{ready}");
    server.signal(libc::SIGTERM);
    assert!(said().contains("STOPPING=1\n"));
    assert_eq!(server.end().code(), Some(0));
    std::fs::remove_file(&manager_at).unwrap();

    // Where it listened, nobody does: the server says so in its log and serves.
    let mut server = Serve::start_with("unmanaged", &[], ("NOTIFY_SOCKET", Some(manager_at.to_str().unwrap())));
    server.signal(libc::SIGTERM);
    assert_eq!(server.end().code(), Some(0));
}

#[test]
fn a_server_in_use_waits_for_its_clients_and_a_second_signal_ends_it_at_once() {
    let mut server = Serve::start("busy", &["--drain-timeout", "1m"]);
    let region = server.region();
    server.signal(libc::SIGTERM);
    // It is draining when it takes nobody any more.
    let url = server.ready["endpoints"][0].as_str().unwrap().to_owned();
    let start = Instant::now();
    while PoolBuilder::new().url(&url).pages(1000).open().is_ok() {
        assert!(start.elapsed() < PATIENCE);
    }
    assert!(server.child.try_wait().unwrap().is_none(), "it waits for its client");
    server.signal(libc::SIGTERM);
    assert!(server.end().code() == Some(0));
    drop(region);

    let mut server = Serve::start("leaving", &["--drain-timeout", "1m"]);
    let region = server.region();
    server.signal(libc::SIGTERM);
    assert!(server.child.try_wait().unwrap().is_none());
    drop(region);
    assert_eq!(server.end().code(), Some(0), "its last client has gone");
}

#[test]
fn a_private_server_does_not_outlive_its_parent() {
    // A shell starts the server in the background and is replaced by a process that we can kill.
    let socket = std::env::temp_dir().join(format!("farfield-orphan-{}.sock", std::process::id()));
    let script = format!(
        "{} serve --private --parent-pid $$ --listen unix:{} & exec sleep 60",
        env!("CARGO_BIN_EXE_farfield"),
        socket.display()
    );
    let mut parent = Command::new("sh").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
    let pid = ready["pid"].as_i64().unwrap() as i32;
    parent.kill().unwrap();
    parent.wait().unwrap();
    let start = Instant::now();
    while is_running(pid) {
        assert!(start.elapsed() < PATIENCE, "the server outlives its parent");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(!socket.exists());
}

#[test]
fn a_private_server_asks_for_the_token_of_its_job() {
    let server = Serve::start_with("token", &["--private"], ("FARFIELD_TOKEN", Some("of-the-job")));
    let open = |token: &str| {
        let url = server.ready["endpoints"][0].as_str().unwrap();
        PoolBuilder::new().url(url).token(token).pages(1000).open().map(drop)
    };
    assert!(open("").is_err());
    assert!(open("of-another-job").is_err());
    assert_eq!(open("of-the-job"), Ok(()));
}

/// Does this process exist, and has it not ended? (Nobody may ever wait for an orphan in a container.)
fn is_running(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[test]
fn mistakes_on_the_command_line_are_explained() {
    let refused = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_farfield")).arg("serve").args(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused(&["--listen", "http://x"]).contains("tcp://HOST:PORT"));
    assert!(refused(&["--capacity", "much"]).contains("512M"));
    assert!(refused(&["--capacity", "5"]).contains("5M"), "a number without a unit");
    assert!(refused(&["--capacity", "100000T"]).contains("give less"));
    assert!(refused(&["--max-connections", "0"]).contains("at least 1"));
    let open = refused(&["--listen", "tcp://0.0.0.0:0"]);
    assert!(open.contains("--token-file") && open.contains("--insecure"), "{open}");
    let insisted = Serve::start("insecure", &["--insecure", "--listen", "tcp://0.0.0.0:0"]);
    assert_eq!(insisted.ready["ready"], true);
    assert!(refused(&["--lease", "10"]).contains("500ms"));
    assert!(refused(&["--token-file", "/nowhere/tokens"]).contains("/nowhere/tokens"));
    let server = Serve::start("taken", &[]);
    let taken = format!("unix:{}", server.socket.display());
    assert!(refused(&["--listen", &taken]).contains("in use"));
}

#[test]
fn tokens_are_exchanged_on_sighup_while_jobs_go_on() {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::temp_dir().join(format!("farfield-tokens-of-serve-{}", std::process::id()));
    let write = |text: &str| {
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    };
    write("alice one 1M\nbob two -\n");
    let mut server = Serve::start("tokens", &["--token-file", path.to_str().unwrap(), "--drain-timeout", "30s"]);
    let url = server.ready["endpoints"][0].as_str().unwrap().to_owned();
    let open = |token: &str| PoolBuilder::new().url(&url).pages(100).token(token).open();
    let kept = open("one").unwrap();
    write("alice uno 1M\ncarol three -\n");
    server.signal(libc::SIGHUP);
    let begun = Instant::now();
    while let Err(error) = open("uno") {
        assert!(begun.elapsed() < PATIENCE, "{error}");
    }
    open("three").unwrap();
    for token in ["one", "two"] {
        let error = open(token).map(drop).unwrap_err().to_string();
        assert!(error.contains("wrong token"), "{error}");
    }
    // The job of before goes on, with new connections, too.
    kept.open_lane().unwrap();
    write("alice dos\n");
    server.signal(libc::SIGHUP);
    open("uno").unwrap();
    server.signal(libc::SIGTERM);
    // It drains: new tokens do not stop it.
    write("alice tres 1M\n");
    server.signal(libc::SIGHUP);
    kept.open_lane().unwrap();
    drop(kept);
    assert!(server.end().success());
    std::fs::remove_file(&path).unwrap();
}

/// Runs `farfield cert`, which succeeds or not; returns what it says.
fn cert(arguments: &[&str], succeeds: bool) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_farfield")).arg("cert").args(arguments).output().unwrap();
    let all = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(all).unwrap();
    assert_eq!(output.status.success(), succeeds, "{text}");
    text
}

#[test]
fn certificates_made_here_encrypt_and_are_exchanged_on_sighup() {
    use std::os::unix::fs::PermissionsExt;
    let folder = std::env::temp_dir().join(format!("farfield-certs-of-serve-{}", std::process::id()));
    let at = folder.to_str().unwrap();
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    assert!(cert(&["server", at, "127.0.0.1"], false).contains("farfield cert init"));
    cert(&["init", at], true);
    assert!(cert(&["init", at], false).contains("there already"), "an authority is not replaced by mistake");
    let told = cert(&["server", at, "127.0.0.1", "far.test"], true);
    let pin = cert(&["pin", &path("127.0.0.1.pem")], true).trim().to_owned();
    assert!(told.contains(&pin) && pin.len() == 64, "{told}");
    cert(&["client", at, "alice"], true);
    assert!(cert(&["client", at, "alice"], false).contains("alice.pem is there already"));
    for (name, mode) in [("ca.key", 0o600), ("alice.key", 0o600), ("alice.pem", 0o644)] {
        let found = std::fs::metadata(path(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!(found & !mode, 0, "{name} is for its user");
    }
    std::fs::write(path("tokens"), "alice - 1M\n").unwrap();
    std::fs::set_permissions(path("tokens"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let files = [path("127.0.0.1.pem"), path("127.0.0.1.key"), path("ca.pem"), path("tokens")];
    let mut server = Serve::start(
        "certificates",
        &[
            &["--listen", "tls://127.0.0.1:0"][..],
            &["--tls-cert", &files[0], "--tls-key", &files[1], "--tls-client-ca", &files[2]],
            &["--token-file", &files[3]],
        ]
        .concat(),
    );
    let endpoint = server.ready["endpoints"][1].as_str().unwrap().to_owned();
    let own = format!("cert={}&key={}", path("alice.pem"), path("alice.key"));
    let open = |trust: &str| PoolBuilder::new().url(format!("{endpoint}?{trust}&{own}")).pages(100).open();
    let (by_ca, by_pin) = (format!("ca={}", files[2]), format!("pin={pin}"));
    let kept = open(&by_ca).unwrap();
    open(&by_pin).unwrap();
    cert(&["server", at, "127.0.0.1", "--replace"], true);
    server.signal(libc::SIGHUP);
    let begun = Instant::now();
    let error = loop {
        match open(&by_pin) {
            Ok(_) => assert!(begun.elapsed() < PATIENCE, "the old certificate stays"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("not the one in pin="), "{error}");
    open(&by_ca).unwrap();
    kept.open_lane().unwrap();
    drop(kept);
    server.signal(libc::SIGTERM);
    assert!(server.end().success());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_server_with_tls_says_what_is_missing() {
    let refused = |arguments: &[&str]| {
        let all = [&["serve", "--listen", "tls://127.0.0.1:0"][..], arguments].concat();
        let output = Command::new(env!("CARGO_BIN_EXE_farfield")).args(all).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused(&[]).contains("--tls-cert and --tls-key"));
    assert!(refused(&["--tls-cert", "/no/cert"]).contains("--tls-key"));
    assert!(refused(&["--tls-cert", "/no/cert", "--tls-key", "/no/key"]).contains("--tls-client-ca is missing"));
    let all = ["--tls-cert", "/no/cert", "--tls-key", "/no/key", "--tls-client-ca", "/no/ca"];
    assert!(refused(&all).contains("cannot read /no/"));
    let open = ["--listen", "tls://0.0.0.0:0", "--tls-cert", "/c", "--tls-key", "/k", "--tls-client-ca", "none"];
    assert!(refused(&open).contains("--token-file"), "without certificates of clients there must be tokens");
}
