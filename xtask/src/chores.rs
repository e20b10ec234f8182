//! The small chores: each is one cargo command.

use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the project.
pub(crate) fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask/ has a parent")
}

/// Where cargo puts what it builds.
pub(crate) fn target() -> PathBuf {
    let chosen = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    project().join(chosen.unwrap_or_else(|| "target".into()))
}

/// The `farfield` binary of the release build.
pub(crate) fn farfield() -> PathBuf {
    target().join("release/farfield")
}

/// What [`build`] makes for users: the command, and the library beside it.
pub(crate) const PRODUCT: [&str; 2] = ["farfield", "libfarfield_preload.so"];
/// What [`build_python`] makes for users of Python.
const PYTHON_MODULE: &str = "libfarfield_native.so";
const PACKAGES: [&str; 4] = ["-p", "farfield-cli", "-p", "farfield-preload"];

/// Runs cargo in the project, with these additions to the environment.
pub(crate) fn cargo(words: &[impl AsRef<OsStr>], environment: &[(&str, &OsStr)]) -> Result<()> {
    let status = cargo_command(words, environment).status().context("cannot start cargo")?;
    let text: Vec<_> = words.iter().map(|word| word.as_ref().to_string_lossy()).collect();
    ensure!(status.success(), "failed: cargo {}", text.join(" "));
    Ok(())
}

/// Cargo in the project, not started yet.
pub(crate) fn cargo_command(words: &[impl AsRef<OsStr>], environment: &[(&str, &OsStr)]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(project()).args(words).envs(environment.iter().copied());
    command
}

/// What users get: the command and the library, optimised.
pub(crate) fn build() -> Result<()> {
    cargo(&[&["build", "--release"], &PACKAGES[..]].concat(), &[])?;
    for name in PRODUCT {
        let path = target().join("release").join(name);
        ensure!(path.is_file(), "the build made no {}", path.display());
    }
    Ok(())
}

/// Heaps and frames for Python, with SQL or without, optimised.
pub(crate) fn build_python(has_sql: bool) -> Result<()> {
    let features: &[&str] = if has_sql { &["--features", "sql"] } else { &[] };
    cargo(&[&["build", "--release", "-p", "farfield-python"], features].concat(), &[])
}

/// Makes the wheel of the Python package from a release build.
pub(crate) fn wheel(words: &[String]) -> Result<()> {
    let has_sql = match words {
        [] => false,
        [word] if word == "--sql" => true,
        _ => bail!("cargo x wheel [--sql]"),
    };
    build()?;
    build_python(has_sql)?;
    let mut command = Command::new("python3");
    command.current_dir(project()).arg("python/make_wheel.py");
    command.args([target().join("release"), target().join("wheels")]).arg(env!("CARGO_PKG_VERSION"));
    let status = command.status().context("cannot start python3")?;
    ensure!(status.success(), "the wheel could not be made: it needs pip, setuptools and wheel for python3");
    Ok(())
}

/// Keeps what the tests run: the same with assertions, which was built with the test programs. Returns where its `farfield` is, in a
/// folder of its own, because later builds have other features.
pub(crate) fn keep_checked() -> Result<PathBuf> {
    let folder = target().join("checked");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    for name in PRODUCT.into_iter().chain([PYTHON_MODULE]) {
        let (from, to) = (target().join("debug").join(name), folder.join(name));
        // One that still runs cannot be written to; it keeps what it has.
        if to.exists() {
            std::fs::remove_file(&to).with_context(|| to.display().to_string())?;
        }
        // Frames are built in few parts.
        if name != PYTHON_MODULE || from.exists() {
            std::fs::copy(&from, &to).with_context(|| format!("{} to {}", from.display(), to.display()))?;
        }
    }
    Ok(folder.join("farfield"))
}

/// Can the member `fabric` be built here?
pub(crate) fn has_libfabric() -> bool {
    let found = Command::new("pkg-config").args(["--exists", "libfabric >= 1.17"]).status();
    found.is_ok_and(|status| status.success())
}

pub(crate) fn fmt(rest: &[String]) -> Result<()> {
    let mut words = vec!["fmt".to_owned(), "--all".into()];
    words.extend(rest.iter().cloned());
    cargo(&words, &[])
}

/// Clippy on these packages, with warnings as errors.
pub(crate) fn lint(words: &[&str]) -> Result<()> {
    cargo(&[&["clippy", "--all-targets"], words, &["--", "-D", "warnings"]].concat(), &[])
}

/// API documentation of these packages, with warnings as errors.
pub(crate) fn doc(words: &[&str]) -> Result<()> {
    cargo(&[&["doc", "--no-deps"], words].concat(), &[("RUSTDOCFLAGS", OsStr::new("-D warnings"))])
}

pub(crate) fn bench(rest: &[String]) -> Result<()> {
    build()?;
    let of = ["--release", "--quiet", "-p", "farfield-bench", "--features", "grpc,collectors"];
    cargo(&[&["build"], &of[..]].concat(), &[])?;
    let mut words: Vec<String> = [&["run"], &of[..], &["--"]].concat().into_iter().map(String::from).collect();
    words.extend(rest.iter().cloned());
    cargo(&words, &[])
}

/// Licences, sources and advisories of all dependencies, by `deny.toml`.
pub(crate) fn deny() -> Result<()> {
    println!("\n== deny ==");
    let status = cargo_command(&["deny", "check"], &[]).status().context("cannot start cargo")?;
    ensure!(
        status.success(),
        "a dependency is not allowed, the advisories cannot be fetched, or cargo-deny is absent (cargo install cargo-deny)"
    );
    Ok(())
}

/// The fuzz targets that exist, by name.
pub(crate) fn fuzz_targets() -> Vec<String> {
    let folder = project().join("fuzz/fuzz_targets");
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let rust = entries.map(|entry| entry.path()).filter(|path| path.extension() == Some(OsStr::new("rs")));
    let mut names: Vec<String> = rust.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort();
    names
}

pub(crate) fn fuzz(rest: &[String]) -> Result<()> {
    let targets = fuzz_targets();
    let (names, seconds) = match rest {
        [] => (targets.clone(), 60),
        [one] if one.parse::<u64>().is_ok() => (targets.clone(), one.parse()?),
        [one] => (vec![one.clone()], 60),
        [one, seconds] => (vec![one.clone()], seconds.parse().context("the second word is a number of seconds")?),
        _ => bail!("cargo x fuzz [TARGET] [SECONDS]"),
    };
    ensure!(!targets.is_empty(), "there are no fuzz targets (fuzz/fuzz_targets/*.rs)");
    for name in &names {
        ensure!(targets.contains(name), "no fuzz target is called {name}; there are: {}", targets.join(" "));
        fuzz_one(name, seconds)?;
    }
    Ok(())
}

/// Do the fuzz targets still fit the code? They are a workspace of their own.
pub(crate) fn fuzz_check() -> Command {
    let target = target().join("fuzz-check");
    let words = ["check", "--locked", "--manifest-path", "fuzz/Cargo.toml", "--target-dir"].map(OsStr::new);
    // Nothing is linked, so the fuzzer itself need not be compiled.
    let environment = [("CUSTOM_LIBFUZZER_PATH", OsStr::new("not-linked/libfuzzer.a"))];
    cargo_command(&[&words[..], &[target.as_os_str()]].concat(), &environment)
}

/// Fuzzes one target for a while.
pub(crate) fn fuzz_one(name: &str, seconds: u64) -> Result<()> {
    let time = format!("-max_total_time={seconds}");
    let status = nightly("cargo").args(["fuzz", "run", name, "--", &time]).status().context("cannot start rustup")?;
    ensure!(
        status.success(),
        "fuzz target {name} failed, or cargo-fuzz is absent (rustup toolchain install nightly; cargo install cargo-fuzz)"
    );
    Ok(())
}

/// A tool of the nightly toolchain, through rustup: the toolchain that runs `cargo x` is a stable one.
pub(crate) fn nightly(tool: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", tool]).current_dir(project());
    command.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
    command
}
