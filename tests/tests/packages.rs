//! The Debian package, its units, and the container: made anew, examined by the tools of Debian and systemd, installed into a root of
//! its own, and used there.
//!
//! Danger: a package that installs and does not work, an upgrade that takes the memory of running jobs along, files that stay for
//! ever, and units that may do more, or less, than they need.

use farfield_tests::{Command, Ended, MIB, Report, Running, Scratch, farfield, program, project, skip, wait_until};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// A release build takes minutes.
const BUILD_DEADLINE: Duration = Duration::from_secs(3600);
const TOKEN: &str = "a-token-of-the-tests";
/// Version to which the tests upgrade.
const NEXT: &str = "99.0";
/// Largest exposure of each unit by `systemd-analyze security`, in tenths.
const EXPOSURE_MAX: [(&str, &str); 2] = [("farfield-serve.service", "12"), ("farfield-metrics.service", "20")];
/// Allocates more than the budget of [`run_words`], writes all of it, and reads it back.
const PROGRAM: [&str; 3] =
    ["perl", "-e", "$x = join '', map { chr(65 + $_ % 26) x 4096 } 0 .. 9999; print unpack '%32C*', $x"];
const SUM: &str = "3174072320";

fn run(folder: &Path, words: &[&OsStr]) -> Ended {
    Command::new(folder, words).within(BUILD_DEADLINE).run()
}

/// Runs a command that must succeed, and gives its output.
fn output(words: &[&str]) -> String {
    let scratch = Scratch::new("tool");
    let words: Vec<&OsStr> = words.iter().map(OsStr::new).collect();
    let ended = run(&scratch.folder("run"), &words);
    assert_eq!(ended.code, 0, "{words:?}: {}{}", ended.text(), ended.errors);
    ended.text()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("an ASCII path")
}

/// Makes the package in `folder`, a copy of the project or the project itself, and gives its path.
fn package(folder: &Path, target: Option<&Path>, version: &[&str]) -> PathBuf {
    let scratch = Scratch::new("package");
    let words = ["sh", "-c", "cd \"$0\" && exec cargo x package \"$@\"", text(folder)];
    let mut command = Command::new(&scratch.folder("run"), [&words, version].concat()).within(BUILD_DEADLINE);
    // The time of the sources, which a copy without its history does not know.
    let time = output(&["git", "-C", text(project()), "log", "-1", "--format=%ct"]);
    command = command.env("SOURCE_DATE_EPOCH", time.trim());
    command = target.into_iter().fold(command, |command, target| command.env("CARGO_TARGET_DIR", target));
    let ended = command.run();
    assert_eq!(ended.code, 0, "{}", ended.errors);
    let path = PathBuf::from(ended.text().lines().last().expect("it says where").to_owned());
    assert!(path.is_file(), "{}", path.display());
    path
}

/// The package of this build, made once.
fn made() -> Option<&'static Path> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let has_tools = ["dpkg-deb", "dpkg-shlibdeps", "git"].into_iter().all(|tool| program(tool).is_some());
        has_tools.then(|| package(project(), None, &[]))
    });
    made.as_deref()
}

fn is_root() -> bool {
    // SAFETY: no arguments.
    let is_root = unsafe { libc::geteuid() } == 0;
    if !is_root {
        skip("not root: no chroot, no other users");
    }
    is_root
}

/// A Debian in a folder, in which commands run with a `/proc` and devices of their own.
struct Root {
    scratch: Scratch,
}

/// The folder of a Debian with systemd, made by debootstrap from the mirror of this machine and kept for the next time, until `cargo x
/// clean`. `None`, with a reason, where that is impossible.
fn debian() -> Option<PathBuf> {
    for needed in ["debootstrap", "apt-get", "unshare", "chroot"] {
        program(needed)?;
    }
    if !is_root() {
        return None;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (root, made) = (folder.join("debian"), folder.join("debian-is-made"));
    if made.exists() {
        return Some(root);
    }
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let suite = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME=")).unwrap_or("stable");
    let codename = format!("Codename: {suite}");
    let mirrors = output(&["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", &codename]);
    let Some(mirror) = mirrors.lines().next() else {
        skip("apt knows no mirror of this Debian");
        return None;
    };
    // What an earlier try left.
    let _ = std::fs::remove_dir_all(&root);
    let include = "--include=systemd,systemd-sysv";
    let words = ["debootstrap", "--variant=minbase", include, suite, text(&root), mirror].map(OsStr::new);
    let scratch = Scratch::new("debootstrap");
    let ended = run(&scratch.folder("run"), &words);
    if ended.code != 0 {
        skip(&format!("debootstrap cannot make a root here: {}", ended.text().lines().last().unwrap_or_default()));
        return None;
    }
    std::fs::write(made, "").expect("room");
    Some(root)
}

impl Root {
    /// A copy of [`debian`].
    fn new(name: &str) -> Option<Root> {
        let debian = debian()?;
        let root = Root { scratch: Scratch::new(name) };
        output(&["cp", "--archive", text(&debian), text(&root.path())]);
        Some(root)
    }

    fn path(&self) -> PathBuf {
        self.scratch.path().join("root")
    }

    fn command(&self, words: &[&str]) -> Command {
        let script = "mount -t proc proc \"$0/proc\" && mount --rbind /dev \"$0/dev\" && exec chroot \"$0\" \"$@\"";
        let root = self.path();
        let before = ["unshare", "--mount", "sh", "-c", script, text(&root)];
        Command::new(&self.scratch.folder("run"), [&before, words].concat()).within(Duration::from_secs(1800))
    }

    fn run(&self, words: &[&str]) -> String {
        let ended = self.command(words).run();
        assert_eq!(ended.code, 0, "{words:?}: {}{}", ended.text(), ended.errors);
        ended.text()
    }

    /// Puts a package into the root, and gives its path there.
    fn put(&self, package: &Path) -> String {
        let name = package.file_name().expect("a file").to_str().expect("ASCII");
        std::fs::copy(package, self.path().join("root").join(name)).expect("room");
        format!("/root/{name}")
    }

    /// All files and folders but those of dpkg itself, and logs.
    fn files(&self) -> BTreeSet<PathBuf> {
        fn collect(root: &Path, folder: &Path, files: &mut BTreeSet<PathBuf>) {
            for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
                let path = entry.path();
                let inside = path.strip_prefix(root).expect("inside").to_owned();
                let is_left_out = ["proc", "dev", "root", "var/log", "var/lib/dpkg", "var/cache"];
                if is_left_out.iter().any(|left_out| inside == Path::new(left_out)) {
                    continue;
                }
                if entry.file_type().expect("it exists").is_dir() {
                    collect(root, &path, files);
                }
                files.insert(inside);
            }
        }
        let mut files = BTreeSet::new();
        collect(&self.path(), &self.path(), &mut files);
        files
    }
}

/// Words that run [`PROGRAM`] with less near than it needs.
fn run_words<'a>(farfield: &'a str, options: &[&'a str]) -> Vec<&'a str> {
    [&[farfield, "run", "--quiet", "--near", "16M"], options, &["--"], &PROGRAM[..]].concat()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("bound").port()
}

/// What is answered at `/metrics`, or nothing if nobody listens.
fn scrape(port: u16) -> String {
    let mut text = String::new();
    if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
        let asked = stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n");
        let _ = asked.and_then(|()| stream.read_to_string(&mut text));
    }
    text
}

#[test]
fn the_same_sources_give_the_same_bytes_in_another_folder() {
    let Some(first) = made() else { return };
    let scratch = Scratch::new("package-again");
    let copy = scratch.folder("a copy").join("of the project");
    std::fs::create_dir_all(&copy).expect("room");
    let script = "cd \"$0\" && git ls-files -z --cached --others --exclude-standard \
                  | tar --create --null --files-from=- --ignore-failed-read | tar --extract --directory=\"$1\"";
    output(&["sh", "-c", script, text(project()), text(&copy)]);
    let second = package(&copy, Some(&scratch.path().join("elsewhere")), &[]);
    let [first, second] = [first, &second].map(|path| std::fs::read(path).expect("a package"));
    assert!(first == second, "{} and {} bytes that differ", first.len(), second.len());
}

#[test]
fn the_package_is_as_debian_wants_it() {
    let Some(package) = made() else { return };
    let listing = output(&["dpkg-deb", "--contents", text(package)]);
    let entries: Vec<Vec<&str>> = listing.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(entries.iter().all(|entry| entry[1] == "root/root"), "{listing}");
    let has = |mode: &str, path: &str| entries.iter().any(|entry| entry[0] == mode && entry[5] == path);
    assert!(has("-rwxr-xr-x", "./usr/bin/farfield"), "{listing}");
    for path in [
        "usr/lib/farfield/libfarfield_preload.so",
        "usr/lib/systemd/system/farfield-serve.service",
        "usr/lib/systemd/system/farfield-metrics.service",
        "usr/share/man/man1/farfield.1.gz",
        "usr/share/man/man1/farfield-run.1.gz",
        "usr/share/man/man1/farfield-pool-switch.1.gz",
        "usr/share/bash-completion/completions/farfield",
        "usr/share/zsh/vendor-completions/_farfield",
        "usr/share/fish/vendor_completions.d/farfield.fish",
        "usr/share/farfield/seccomp.json",
        "usr/share/doc/farfield/copyright",
        "etc/default/farfield",
    ] {
        assert!(has("-rw-r--r--", &format!("./{path}")), "{path} in {listing}");
    }
    let depends = output(&["dpkg-deb", "--field", text(package), "Depends"]);
    assert!(depends.contains("libc6 (>= ") && depends.contains("libgcc-s1"), "{depends}");

    let scratch = Scratch::new("unpacked");
    let unpacked = scratch.folder("root");
    output(&["dpkg-deb", "--extract", text(package), text(&unpacked)]);
    let home = std::env::var("HOME").expect("a home");
    for file in ["usr/bin/farfield", "usr/lib/farfield/libfarfield_preload.so"] {
        let bytes = std::fs::read(unpacked.join(file)).expect("unpacked");
        for path in [text(project()), &format!("{home}/.cargo"), &format!("{home}/.rustup")] {
            assert!(!bytes.windows(path.len()).any(|at| at == path.as_bytes()), "{file} has {path}");
        }
    }
    let page = unpacked.join("usr/share/man/man1/farfield-serve.1.gz");
    if program("man").is_some() {
        let shown = output(&["man", "--warnings", text(&page)]);
        assert!(shown.contains("--drain-timeout") && shown.contains("EXAMPLES"), "{shown}");
    }
    if program("lintian").is_some() {
        output(&["lintian", "--allow-root", "--fail-on", "error,warning", text(package)]);
    }
}

#[test]
fn units_pass_the_examination_of_systemd() {
    let (Some(package), Some(_)) = (made(), program("systemd-analyze")) else { return };
    let scratch = Scratch::new("units");
    let unpacked = scratch.folder("root");
    output(&["dpkg-deb", "--extract", text(package), text(&unpacked)]);
    // The units of the system, on which ours depend.
    let system = unpacked.join("usr/lib/systemd/system");
    output(&["sh", "-c", "cp -n /usr/lib/systemd/system/*.target \"$0\"", text(&system)]);
    for (unit, exposure) in EXPOSURE_MAX {
        let path = system.join(unit);
        let root = format!("--root={}", text(&unpacked));
        let found = output(&["systemd-analyze", "verify", "--man=no", "--recursive-errors=one", &root, unit]);
        assert_eq!(found, "", "{unit}");
        let threshold = format!("--threshold={exposure}");
        output(&["systemd-analyze", "security", "--offline=true", &threshold, text(&path)]);
    }
}

/// Starts a memory server in the root, and gives it with its port.
fn serve(root: &Root) -> (Running, u16) {
    let tokens = root.path().join("root/tokens");
    std::fs::write(&tokens, format!("tests {TOKEN} 1G\n")).expect("room");
    std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(0o600)).expect("ours");
    let port = free_port();
    let url = format!("tcp://127.0.0.1:{port}");
    let words = ["farfield", "serve", "--listen", &url, "--capacity", "1G", "--token-file", "/root/tokens"];
    let server = root.command(&words).start();
    wait_until("the server accepts", || server.output().ends_with('\n'));
    (server, port)
}

#[test]
fn it_is_installed_upgraded_while_a_server_serves_removed_and_purged() {
    let Some(package) = made() else { return };
    let Some(root) = Root::new("chroot") else { return };
    let next = self::package(project(), None, &[NEXT]);
    let before = root.files();
    let said = root.run(&["dpkg", "--install", &root.put(package)]);
    assert_eq!(said.matches("\nfarfield: nothing was started").count(), 1, "{said}");
    assert!(root.run(&["farfield", "--version"]).starts_with("farfield "));
    let found = root.command(&["farfield", "doctor"]).run();
    assert!(found.text().contains("/usr/lib/farfield/libfarfield_preload.so"), "{}", found.text());
    assert_eq!(root.run(&run_words("farfield", &[])), SUM);

    let (server, port) = serve(&root);
    let url = format!("tcp://127.0.0.1:{port}");
    let script = PROGRAM[2].replace("; print", "; $| = 1; print qq(full\\n); <STDIN>; print");
    let go = root.path().join("root/go");
    output(&["mkfifo", text(&go)]);
    let run = "exec farfield run --quiet --near 16M --far \"$0\" -- perl -e \"$1\" < /root/go";
    let words = ["sh", "-c", run, &url, &script];
    let job = root.command(&words).env("FARFIELD_TOKEN", TOKEN).start();
    let mut writer = std::fs::File::options().write(true).open(&go).expect("the job reads it");
    wait_until("the job's memory is far", || job.output().contains("full\n"));
    std::fs::write(root.path().join("etc/default/farfield"), "FARFIELD_CAPACITY=1G\n").expect("room");
    root.run(&["dpkg", "--install", "--force-confdef", &root.put(&next)]);
    assert!(root.run(&["dpkg", "--status", "farfield"]).contains(&format!("Version: {NEXT}")));
    let settings = std::fs::read_to_string(root.path().join("etc/default/farfield")).expect("it stays");
    assert_eq!(settings, "FARFIELD_CAPACITY=1G\n", "what the administrator wrote");
    assert!(!server.is_over() && !job.is_over());
    writer.write_all(b"\n").expect("the job reads it");
    let ended = job.wait();
    assert_eq!((ended.code, ended.text().as_str()), (0, format!("full\n{SUM}").as_str()), "{}", ended.errors);
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code, 0, "it was drained");

    root.run(&["dpkg", "--remove", "farfield"]);
    // What was enabled is recorded until a purge, as for all packages with units.
    let is_record = |path: &&PathBuf| path.starts_with("var/lib/systemd/deb-systemd-helper-enabled");
    let left: Vec<PathBuf> = root.files().difference(&before).filter(|path| !is_record(path)).cloned().collect();
    assert_eq!(left, [Path::new("etc/default/farfield")], "settings stay until a purge");
    std::fs::create_dir_all(root.path().join("etc/farfield")).expect("room");
    std::fs::write(root.path().join("etc/farfield/tokens"), TOKEN).expect("room");
    root.run(&["dpkg", "--purge", "farfield"]);
    assert_eq!(root.files(), before);
}

/// A job of root, which another user with these capabilities looks for. Gives whether its numbers are in the metrics.
fn is_seen_with(capabilities: &str) -> bool {
    let scratch = Scratch::new("capabilities");
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let set = if capabilities.is_empty() { "-all".to_owned() } else { format!("-all,{capabilities}") };
    let [ambient, inherited] = ["--ambient-caps", "--inh-caps"].map(|option| format!("{option}={set}"));
    let identity = ["setpriv", "--reuid=7411", "--regid=7411", "--clear-groups", &inherited, &ambient];
    let farfield = farfield();
    let words = [&identity[..], &[text(&farfield), "top", "--metrics", &address]].concat();
    let exporter = Command::new(&scratch.folder("run"), words).start();
    wait_until("the exporter listens", || {
        assert!(!exporter.is_over(), "{}", exporter.errors());
        exporter.output().ends_with('\n')
    });
    scrape(port).contains("farfield_job_near_limit_bytes{")
}

#[test]
fn the_exporter_needs_both_of_its_capabilities() {
    if !is_root() || program("setpriv").is_none() {
        return;
    }
    let scratch = Scratch::new("exporter-job");
    let farfield = farfield();
    let words = [text(&farfield), "run", "--quiet", "--near", "16M", "--", "sh", "-c", "echo started; exec sleep 1000"];
    let job = Command::new(&scratch.folder("run"), words).start();
    wait_until("the job runs", || job.output().contains("started"));
    for (capabilities, is_seen) in
        [("+sys_ptrace,+dac_read_search", true), ("+sys_ptrace", false), ("+dac_read_search", false), ("", false)]
    {
        assert_eq!(is_seen_with(capabilities), is_seen, "{capabilities:?}");
    }
}

/// A systemd that was booted in a root, ended when dropped.
struct Machine {
    root: Root,
    leader: u32,
    _nspawn: Running,
}

impl Machine {
    /// `None`, with a reason, where systemd does not boot in a container.
    fn boot(root: Root) -> Option<Machine> {
        program("systemd-nspawn")?;
        let path = root.path();
        let words = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot", "--directory", text(&path)];
        let nspawn = Command::new(&root.scratch.folder("nspawn"), words).within(Duration::from_secs(1800)).start();
        let leader = || {
            let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", nspawn.pid())).ok()?;
            children.split_whitespace().next()?.parse().ok()
        };
        let is_up = || {
            let leader: Option<u32> = leader();
            nspawn.is_over()
                || leader.is_some_and(|leader| {
                    let words = ["nsenter", "--target", &leader.to_string(), "--all", "systemctl", "is-system-running"];
                    let state = std::process::Command::new(words[0]).args(&words[1..]).output();
                    state.is_ok_and(|state| matches!(state.stdout.trim_ascii(), b"running" | b"degraded"))
                })
        };
        wait_until("systemd has booted", is_up);
        if nspawn.is_over() {
            skip(&format!("systemd does not boot in a container here: {}", nspawn.errors()));
            return None;
        }
        let leader = leader().expect("it lives");
        Some(Machine { root, leader, _nspawn: nspawn })
    }

    fn command(&self, words: &[&str]) -> Command {
        let leader = self.leader.to_string();
        let before = ["nsenter", "--target", &leader, "--all"];
        Command::new(&self.root.scratch.folder("inside"), [&before[..], words].concat())
    }

    fn run(&self, words: &[&str]) -> String {
        let ended = self.command(words).run();
        let status = || self.command(&["journalctl", "--no-pager", "--lines=30"]).run().text();
        assert_eq!(ended.code, 0, "{words:?}: {}{}{}", ended.text(), ended.errors, status());
        ended.text()
    }
}

#[test]
fn the_units_serve_and_show_jobs_and_an_upgrade_leaves_them_running() {
    let Some(package) = made() else { return };
    let Some(root) = Root::new("booted") else { return };
    let before = root.files();
    let next = self::package(project(), None, &[NEXT]);
    let (here, there) = (root.put(package), root.put(&next));
    let Some(machine) = Machine::boot(root) else { return };
    machine.run(&["dpkg", "--install", &here]);
    let is_active = |unit: &str| machine.command(&["systemctl", "is-active", unit]).run().text().trim() == "active";
    assert!(!is_active("farfield-serve") && !is_active("farfield-metrics"), "nothing is started by itself");
    let refused = machine.command(&["systemctl", "start", "farfield-serve"]).run();
    assert!(refused.code != 0, "there are no tokens");

    let ports = [free_port(), free_port()];
    let settings = format!(
        "FARFIELD_LISTEN=tcp://127.0.0.1:{}\nFARFIELD_CAPACITY=1G\nFARFIELD_METRICS_LISTEN=127.0.0.1:{}\n",
        ports[0], ports[1]
    );
    let etc = machine.root.path().join("etc");
    std::fs::write(etc.join("default/farfield"), settings).expect("room");
    std::fs::create_dir_all(etc.join("farfield")).expect("room");
    let tokens = etc.join("farfield/tokens");
    std::fs::write(&tokens, format!("tests {TOKEN} 1G\n")).expect("room");
    std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(0o600)).expect("ours");
    machine.run(&["systemctl", "enable", "--now", "farfield-serve", "farfield-metrics"]);
    let pid = || machine.run(&["systemctl", "show", "--property=MainPID", "--value", "farfield-serve"]);
    let first = pid();
    wait_until("both listen", || ports.iter().all(|port| TcpStream::connect(("127.0.0.1", *port)).is_ok()));

    let url = format!("tcp://127.0.0.1:{}", ports[0]);
    let job = machine.command(&run_words("farfield", &["--far", &url])).env("FARFIELD_TOKEN", TOKEN).run();
    assert_eq!((job.code, job.text().as_str()), (0, SUM), "{}", job.errors);
    let sleeper = machine.command(&["farfield", "run", "--quiet", "--near", "16M", "--", "sleep", "1000"]).start();
    wait_until("the metrics show the job of another user", || {
        scrape(ports[1]).contains("farfield_job_near_limit_bytes{")
    });
    drop(sleeper);

    machine.run(&["dpkg", "--install", "--force-confold", &there]);
    assert_eq!(pid(), first, "an upgrade does not restart the server");
    machine.run(&["systemctl", "stop", "farfield-serve"]);
    let result = machine.run(&["systemctl", "show", "--property=Result", "--value", "farfield-serve"]);
    assert_eq!(result.trim(), "success");
    machine.run(&["dpkg", "--purge", "farfield"]);
    assert!(!is_active("farfield-metrics"));
    let left: Vec<_> =
        machine.root.files().difference(&before).filter(|path| text(path).contains("farfield")).cloned().collect();
    assert_eq!(left, Vec::<PathBuf>::new());
}

/// Capabilities of a container, by the default of engines.
const CONTAINER: &str = "-all,+chown,+dac_override,+fsetid,+fowner,+setgid,+setuid,+setpcap,+net_bind_service,+sys_chroot,\
                         +kill,+setfcap,+audit_write";

/// Runs a job as in a container with this profile. `None`, with a reason, where libseccomp's Python is not installed.
fn run_under_profile(scratch: &Scratch, profile: &str) -> Option<Ended> {
    const PYTHON: &str = "/usr/bin/python3";
    let words = [PYTHON, "-c", "import seccomp"].map(OsStr::new);
    if !Path::new(PYTHON).exists() || run(&scratch.folder("python"), &words).code != 0 {
        skip("python3-seccomp is not installed");
        return None;
    }
    let profile = scratch.file("profile.json", profile);
    let report = scratch.path().join("report.json");
    let (farfield, helper) = (farfield(), project().join("tests/programs/under_profile.py"));
    let mut words: Vec<OsString> = Vec::new();
    if is_root() {
        words.extend(["setpriv", "--inh-caps=-all", "--bounding-set", CONTAINER, "--"].map(OsString::from));
    }
    words.extend([PYTHON.into(), helper.into(), profile.into()]);
    words.extend(run_words(text(&farfield), &["--report", text(&report)]).into_iter().map(OsString::from));
    Some(Command::new(&scratch.folder("run"), words).run())
}

#[test]
fn jobs_run_under_the_container_profile_and_without_its_additions_say_what_is_missing() {
    let whole = std::fs::read_to_string(project().join("packaging/seccomp.json")).expect("the profile");
    let scratch = Scratch::new("profile");
    let Some(ended) = run_under_profile(&scratch, &whole) else { return };
    assert_eq!((ended.code, ended.text().as_str()), (0, SUM), "{}", ended.errors);
    assert!(Report::read(&scratch.path().join("report.json")).number("far_peak_bytes") > 16 * MIB);

    let parsed: serde_json::Value = serde_json::from_str(&whole).expect("JSON");
    let is_ours =
        |rule: &serde_json::Value| rule["comment"].as_str().is_some_and(|text| text.starts_with("farfield: "));
    let rules = parsed["syscalls"].as_array().expect("rules");
    let ours: Vec<&str> =
        rules.iter().filter(|rule| is_ours(rule)).filter_map(|rule| rule["names"][0].as_str()).collect();
    assert_eq!(ours, ["userfaultfd", "vmsplice", "process_madvise"]);
    for call in ours {
        let mut without = parsed.clone();
        without["syscalls"].as_array_mut().expect("rules").retain(|rule| rule["names"][0] != call || !is_ours(rule));
        let ended = run_under_profile(&scratch, &without.to_string()).expect("it ran before");
        match call {
            "process_madvise" => assert_eq!((ended.code, ended.text().as_str()), (0, SUM), "{}", ended.errors),
            call => {
                let advice = format!("seccomp profile must let {call} through");
                assert!(ended.code == 97 && ended.errors.contains(&advice), "{}: {}", ended.code, ended.errors);
            }
        }
    }
}

/// What an engine's own default allows without capabilities.
fn allowed(profile: &str) -> BTreeSet<String> {
    let parsed: serde_json::Value = serde_json::from_str(profile).expect("JSON");
    let rules = parsed["syscalls"].as_array().expect("rules").iter();
    let allows = rules.filter(|rule| {
        let is_empty = |name: &str| rule[name].as_object().is_none_or(serde_json::Map::is_empty);
        rule["action"] == "SCMP_ACT_ALLOW" && is_empty("includes") && is_empty("excludes")
    });
    allows
        .flat_map(|rule| rule["names"].as_array().expect("names"))
        .filter_map(|name| Some(name.as_str()?.to_owned()))
        .collect()
}

#[test]
fn the_profile_allows_nothing_else_that_the_engine_forbids() {
    let Ok(engine) = std::fs::read_to_string("/usr/share/containers/seccomp.json") else {
        return skip("no container engine with a profile in a file (Debian: golang-github-containers-common)");
    };
    let ours = std::fs::read_to_string(project().join("packaging/seccomp.json")).expect("the profile");
    let more: Vec<String> = allowed(&ours).difference(&allowed(&engine)).cloned().collect();
    assert_eq!(more, ["process_madvise", "userfaultfd", "vmsplice"]);
}

/// Podman with images and containers of this test alone.
struct Podman<'a> {
    scratch: &'a Scratch,
}

impl Podman<'_> {
    fn command(&self, tool: &str, words: &[&str]) -> Command {
        let at = |name: &str| self.scratch.folder("storage").join(name).display().to_string();
        let (graph, state) = (at("graph"), at("run"));
        let own = [tool, "--storage-driver=vfs", "--root", &graph, "--runroot", &state];
        Command::new(&self.scratch.folder("tool"), [&own, words].concat()).within(Duration::from_secs(1800))
    }

    fn run(&self, tool: &str, words: &[&str]) {
        let ended = self.command(tool, words).run();
        assert_eq!(ended.code, 0, "{words:?}: {}{}", ended.text(), ended.errors);
    }

    /// A container of the image, with limits that a machine without privileges can give.
    fn container(&self, options: &[&str], words: &[&str]) -> Command {
        let before = ["--runtime=runc", "--cgroup-manager=cgroupfs", "run", "--rm", "--network=host"];
        let limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000"];
        self.command("podman", &[&before[..], &limits, options, &["localhost/farfield"], words].concat())
    }
}

#[test]
fn the_container_serves_and_runs_jobs_under_its_profile_and_no_other() {
    for needed in ["buildah", "podman", "runc"] {
        if program(needed).is_none() {
            return;
        }
    }
    let Some(package) = made() else { return };
    let Some(root) = Root::new("container") else { return };
    let podman = Podman { scratch: &root.scratch };
    let archive = root.scratch.path().join("base.tar");
    output(&["tar", "--create", "--one-file-system", "--directory", text(&root.path()), "--file", text(&archive), "."]);
    podman.run("podman", &["import", "--quiet", text(&archive), "localhost/base"]);
    let context = root.scratch.folder("context");
    std::fs::copy(package, context.join(package.file_name().expect("a file"))).expect("room");
    let file = project().join("packaging/Containerfile");
    let base = ["build", "--isolation=chroot", "--build-arg=BASE=localhost/base", "--tag", "farfield"];
    podman.run("buildah", &[&base[..], &["--file", text(&file), text(&context)]].concat());

    if podman.container(&[], &["--version"]).run().code != 0 {
        return skip("containers do not run here");
    }
    let profile = format!("--security-opt=seccomp={}", text(&project().join("packaging/seccomp.json")));
    let words = &run_words("farfield", &[])[1..];
    let job = podman.container(&[&profile], words).run();
    assert_eq!((job.code, job.text().as_str()), (0, SUM), "{}", job.errors);
    let refused = podman.container(&[], words).run();
    assert!(refused.code == 97 && refused.errors.contains("seccomp profile must let"), "{}", refused.errors);

    let tokens = root.scratch.file("tokens", format!("tests {TOKEN} 1G\n"));
    std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(0o600)).expect("ours");
    std::os::unix::fs::chown(&tokens, Some(7400), Some(7400)).expect("root may");
    let (mount, url) = (format!("--volume={}:/tokens:ro", text(&tokens)), format!("tcp://127.0.0.1:{}", free_port()));
    let words = ["serve", "--listen", &url, "--capacity", "1G", "--token-file", "/tokens"];
    let server = podman.container(&["--name=server", &mount], &words).start();
    wait_until("the server accepts", || {
        assert!(!server.is_over(), "{}", server.errors());
        server.output().contains("\"ready\":true")
    });
    let farfield = farfield();
    let job = Command::new(&root.scratch.folder("job"), run_words(text(&farfield), &["--far", &url]));
    let job = job.env("FARFIELD_TOKEN", TOKEN).run();
    assert_eq!((job.code, job.text().as_str()), (0, SUM), "{}", job.errors);
    podman.run("podman", &["--runtime=runc", "--cgroup-manager=cgroupfs", "stop", "--time=60", "server"]);
    assert_eq!(server.wait().code, 0, "it was drained");
}
