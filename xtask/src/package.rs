//! `cargo x package`: the Debian package.
//!
//! The same sources and the same compiler give the same bytes (<https://reproducible-builds.org>): paths of this machine are
//! replaced while compiling, all times are that of the commit, and `dpkg-deb` sorts what it packs.

use crate::chores::{cargo, project, target};
use anyhow::{Context, Result, bail, ensure};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// Profile of cargo in whose folder the programs of packages are built.
const PROFILE: &str = "dist";
const MAINTAINER: &str = "The Farfield authors <farfield@users.noreply.github.com>";
const DOC: &str = "usr/share/doc/farfield";

/// Files of the project that are installed as they are, each with where.
const PLAIN_FILES: [(&str, &str); 7] = [
    ("packaging/systemd/farfield-serve.service", "usr/lib/systemd/system/farfield-serve.service"),
    ("packaging/systemd/farfield-metrics.service", "usr/lib/systemd/system/farfield-metrics.service"),
    ("packaging/debian/farfield.default", "etc/default/farfield"),
    ("packaging/debian/copyright", "usr/share/doc/farfield/copyright"),
    ("packaging/seccomp.json", "usr/share/farfield/seccomp.json"),
    ("README.md", "usr/share/doc/farfield/README.md"),
    ("docs/design/packages.md", "usr/share/doc/farfield/packages.md"),
];

/// Names of completions, as their generator gives them, each with where they are installed.
const COMPLETIONS: [(&str, &str); 3] = [
    ("farfield.bash", "usr/share/bash-completion/completions/farfield"),
    ("_farfield", "usr/share/zsh/vendor-completions/_farfield"),
    ("farfield.fish", "usr/share/fish/vendor_completions.d/farfield.fish"),
];

/// Makes `target/package/farfield_VERSION_ARCHITECTURE.deb`. The version is the project's unless one is given.
pub(crate) fn package(words: &[String]) -> Result<()> {
    let version = match words {
        [] => env!("CARGO_PKG_VERSION"),
        [version] => version,
        _ => bail!("cargo x package [VERSION]"),
    };
    let is_version = |text: &str| {
        let rest = text.strip_prefix(|first: char| first.is_ascii_digit());
        rest.is_some_and(|rest| rest.chars().all(|c| c.is_ascii_alphanumeric() || ".+~".contains(c)))
    };
    ensure!(is_version(version), "a version begins with a digit, like 0.2.0 or 0.2.0~rc1, and not like {version:?}");
    let time = Epoch::of_sources()?;
    let folder = target().join("package");
    let root = folder.join("root");
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| root.display().to_string())?;
    }
    let pages = folder.join("pages");
    build(&pages)?;
    let tree = Tree { root };
    tree.add_programs()?;
    tree.add_pages(&pages)?;
    for (from, to) in PLAIN_FILES {
        tree.add(to, 0o644, &read(&project().join(from))?)?;
    }
    tree.add_packed(&format!("{DOC}/CHANGELOG.md.gz"), &read(&project().join("CHANGELOG.md"))?)?;
    tree.add_packed(&format!("{DOC}/changelog.gz"), changelog(version, &time)?.as_bytes())?;
    let architecture = output_of(Command::new("dpkg").arg("--print-architecture"))?;
    tree.add_control(version, &architecture, &folder)?;
    tree.set_times(&tree.root, &time)?;
    let package = folder.join(format!("farfield_{version}_{architecture}.deb"));
    let mut command = Command::new("dpkg-deb");
    // Packed by one thread: several cut the archive elsewhere.
    command.args(["--root-owner-group", "-Zxz", "--threads-max=1", "--build"]).arg(&tree.root).arg(&package);
    output_of(command.env("SOURCE_DATE_EPOCH", time.seconds.to_string()))?;
    println!("{}", package.display());
    Ok(())
}

/// Time of the last commit, which all files of the package have.
struct Epoch {
    seconds: u64,
}

impl Epoch {
    /// Takes it from `SOURCE_DATE_EPOCH` or from git.
    fn of_sources() -> Result<Epoch> {
        let text = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(text) => text,
            Err(_) => output_of(Command::new("git").current_dir(project()).args(["log", "-1", "--format=%ct"]))
                .context("outside of a git repository, SOURCE_DATE_EPOCH must say of when the sources are")?,
        };
        let seconds = text.parse().with_context(|| format!("{text:?} is not a number of seconds since 1970"))?;
        Ok(Epoch { seconds })
    }

    fn time(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(self.seconds)
    }
}

/// Builds the programs, and writes man pages and completions into a folder. Both builds have the same packages, so that they
/// differ in nothing but the command.
fn build(pages: &Path) -> Result<()> {
    let registry = registry()?;
    let flags = remapped(&registry);
    let environment = [
        ("CARGO_ENCODED_RUSTFLAGS", flags.as_os_str()),
        ("CARGO_INCREMENTAL", OsStr::new("0")),
        // C compilers ask it for the date. With that of the commit, C code would be compiled anew for each commit.
        ("SOURCE_DATE_EPOCH", OsStr::new("0")),
    ];
    let words = ["build", "--locked", "--profile", PROFILE, "-p", "farfield-cli", "-p", "farfield-preload"];
    cargo(&[&words[..], &["--features", "farfield-cli/pages"]].concat(), &environment)?;
    if pages.exists() {
        fs::remove_dir_all(pages).with_context(|| pages.display().to_string())?;
    }
    output_of(Command::new(built("farfield")).arg("pages").arg(pages))?;
    cargo(&words, &environment)
}

fn built(name: &str) -> PathBuf {
    target().join(PROFILE).join(name)
}

/// The folders of libraries' sources, which cargo downloads first.
fn registry() -> Result<Vec<PathBuf>> {
    cargo(&["fetch", "--locked"], &[])?;
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let sources = home.context("neither CARGO_HOME nor HOME is set")?.join("registry/src");
    let entries = fs::read_dir(&sources).with_context(|| sources.display().to_string())?;
    let mut folders: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    folders.sort();
    Ok(folders)
}

/// Flags by which the compiler writes no path of this machine. They replace all others, so that the environment decides nothing.
fn remapped(registry: &[PathBuf]) -> OsString {
    let remap = |from: &Path, to: &str| {
        let mut flag = OsString::from("--remap-path-prefix=");
        flag.push(from);
        flag.push(to);
        flag
    };
    // The last one that fits counts, and the target may be inside the project.
    let mut flags = vec![remap(project(), "=/farfield"), remap(&target(), "=/target")];
    flags.extend(registry.iter().map(|folder| remap(folder, "=/registry")));
    flags.join(OsStr::new("\x1f"))
}

/// What will be installed, with the folder `DEBIAN` beside it.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn add(&self, at: &str, mode: u32, content: &[u8]) -> Result<()> {
        let path = self.root.join(at);
        let folder = path.parent().context("a file is in a folder")?;
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        fs::write(&path, content).with_context(|| path.display().to_string())?;
        Ok(fs::set_permissions(&path, fs::Permissions::from_mode(mode))?)
    }

    /// Adds a file that is packed by gzip, without its name and time.
    fn add_packed(&self, at: &str, content: &[u8]) -> Result<()> {
        let raw = at.strip_suffix(".gz").context("a packed file ends with .gz")?;
        self.add(raw, 0o644, content)?;
        output_of(Command::new("gzip").arg("-9n").arg(self.root.join(raw))).map(drop)
    }

    fn add_programs(&self) -> Result<()> {
        self.add("usr/bin/farfield", 0o755, &read(&built("farfield"))?)?;
        let library = "libfarfield_preload.so";
        self.add(&format!("usr/lib/farfield/{library}"), 0o644, &read(&built(library))?)
    }

    fn add_pages(&self, pages: &Path) -> Result<()> {
        for (name, at) in COMPLETIONS {
            self.add(at, 0o644, &read(&pages.join(name))?)?;
        }
        for entry in fs::read_dir(pages).with_context(|| pages.display().to_string())? {
            let name = entry?.file_name().into_string().ok().context("a man page has a plain name")?;
            if name.ends_with(".1") {
                self.add_packed(&format!("usr/share/man/man1/{name}.gz"), &read(&pages.join(&name))?)?;
            }
        }
        Ok(())
    }

    /// Adds what `dpkg` must know of the package. Everything else must be there before.
    fn add_control(&self, version: &str, architecture: &str, folder: &Path) -> Result<()> {
        let mut files = Vec::new();
        self.collect(&self.root, &mut files)?;
        let mut installed_bytes = 0;
        for file in &files {
            installed_bytes += fs::metadata(self.root.join(file))?.len();
        }
        let of = |text: &str| -> Result<String> {
            let text = text.replace("@VERSION@", version).replace("@ARCHITECTURE@", architecture);
            let text = text.replace("@MAINTAINER@", MAINTAINER);
            let text = text.replace("@INSTALLED_KIB@", &installed_bytes.div_ceil(1024).to_string());
            Ok(text.replace("@DEPENDS@", &self.depends(folder)?))
        };
        let packaging = project().join("packaging/debian");
        let control = of(&fs::read_to_string(packaging.join("control"))?)?;
        let sums = output_of(Command::new("md5sum").current_dir(&self.root).args(&files))?;
        self.add("DEBIAN/control", 0o644, control.as_bytes())?;
        self.add("DEBIAN/conffiles", 0o644, b"/etc/default/farfield\n")?;
        self.add("DEBIAN/md5sums", 0o644, format!("{sums}\n").as_bytes())?;
        for script in ["postinst", "prerm", "postrm"] {
            self.add(&format!("DEBIAN/{script}"), 0o755, &read(&packaging.join(script))?)?;
        }
        Ok(())
    }

    /// The packages whose libraries the programs need, by the versions of their symbols.
    fn depends(&self, folder: &Path) -> Result<String> {
        // The tool looks for a source package around it.
        let debian = folder.join("source/debian");
        fs::create_dir_all(&debian).with_context(|| debian.display().to_string())?;
        fs::write(debian.join("control"), "Source: farfield\n\nPackage: farfield\nArchitecture: any\n")?;
        let mut command = Command::new("dpkg-shlibdeps");
        command.current_dir(folder.join("source")).arg("-O");
        command.args(["usr/bin/farfield", "usr/lib/farfield/libfarfield_preload.so"].map(|file| self.root.join(file)));
        let answer = output_of(&mut command).context("dpkg-dev must be installed")?;
        let depends = answer.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
        depends.map(str::to_owned).with_context(|| format!("dpkg-shlibdeps answers {answer:?}"))
    }

    /// Collects the files below a folder, sorted, by their paths in the package.
    fn collect(&self, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
        for path in sorted(folder)? {
            if path.is_dir() {
                self.collect(&path, files)?;
            } else {
                files.push(path.strip_prefix(&self.root)?.to_owned());
            }
        }
        Ok(())
    }

    /// Gives everything the same time, and folders the usual mode.
    fn set_times(&self, folder: &Path, time: &Epoch) -> Result<()> {
        for path in sorted(folder)? {
            if path.is_dir() {
                self.set_times(&path, time)?;
            } else {
                File::options().append(true).open(&path)?.set_modified(time.time())?;
            }
        }
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
        Ok(File::open(folder)?.set_modified(time.time())?)
    }
}

fn sorted(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.sort();
    Ok(paths)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| path.display().to_string())
}

/// Debian's changelog, which leads to ours.
fn changelog(version: &str, time: &Epoch) -> Result<String> {
    let at = format!("@{}", time.seconds);
    let date = output_of(Command::new("date").args(["-u", "-R", "-d", &at]).env("LC_ALL", "C"))?;
    Ok(format!(
        "farfield ({version}) unstable; urgency=medium\n\n  * What users notice is in /{DOC}/CHANGELOG.md.gz.\n\n -- \
         {MAINTAINER}  {date}\n"
    ))
}

/// What a command prints, without the last line end. Fails with what it says if it fails.
fn output_of(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {name}"))?;
    ensure!(output.status.success(), "{name} failed: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}
