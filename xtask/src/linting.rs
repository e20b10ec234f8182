//! Clippy and API documentation while everything is built: instead of rustc and rustdoc, cargo
//! starts this program, which starts them and, beside each, what looks at the same unit with
//! warnings as errors.
//!
//! By itself, `cargo clippy` would first check the three hundred libraries that were just built,
//! and so would `cargo doc`. What is found does not end the build: the part `lints` fails at the
//! end, and the tests have been run.

use crate::chores;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};

/// Tells the copies of this program where to leave what they find.
const FOLDER: &str = "FARFIELD_LINTS";
/// Names of the copies. Each does what the program of its name does.
const RUSTC: &str = "linting-rustc";
const RUSTDOC: &str = "linting-rustdoc";
/// Extension of the files with what was found in a unit: nothing, mostly.
const NOTE: &str = "txt";

/// Prepares a build that lints. Returns what the environment of each call of cargo must have.
pub(crate) fn environment() -> Result<Vec<(&'static str, OsString)>> {
    let folder = folder();
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    // Cargo replaces this program while it builds.
    let this = std::env::current_exe().context("this program has no path")?;
    let copies = [RUSTC, RUSTDOC].map(|name| folder.join(name));
    for copy in &copies {
        // One that still runs cannot be written to.
        let _ = std::fs::remove_file(copy);
        std::fs::copy(&this, copy).with_context(|| copy.display().to_string())?;
    }
    let [rustc, rustdoc] = copies.map(PathBuf::into_os_string);
    Ok(vec![("RUSTC_WORKSPACE_WRAPPER", rustc), ("RUSTDOC", rustdoc), (FOLDER, folder.into_os_string())])
}

fn folder() -> PathBuf {
    chores::target().join("lints")
}

/// Returns the names of the units that one of cargo's messages says to be built, of this project
/// and told from others by cargo.
pub(crate) fn units_of_message(message: &Value) -> Vec<String> {
    let is_ours = message["package_id"].as_str().is_some_and(|id| id.starts_with("path+"));
    let files = message["filenames"].as_array().filter(|_| is_ours && message["reason"] == "compiler-artifact");
    let names = files.into_iter().flatten().filter_map(|file| {
        let path = Path::new(file.as_str()?);
        let name = path.file_stem()?.to_str()?;
        let is_named = path.parent()?.file_name()? == "deps" && name.contains('-');
        let name = if path.extension().is_some() { name.strip_prefix("lib").unwrap_or(name) } else { name };
        is_named.then(|| name.to_owned())
    });
    names.collect()
}

/// Prints what was found in `units`, which builds with [`environment`] have made, and in the
/// documentation. Returns whether that is nothing.
pub(crate) fn report(units: &BTreeSet<String>) -> Result<bool> {
    let mut is_clean = true;
    let crates: BTreeSet<_> = units.iter().filter_map(|unit| unit.rsplit_once('-')).map(|(name, _)| name).collect();
    let mut documented = 0;
    for name in units.iter().map(String::as_str).chain(crates) {
        let path = folder().join(name).with_extension(NOTE);
        let is_documentation = !name.contains('-');
        if !path.exists() && is_documentation {
            continue;
        }
        let found = std::fs::read_to_string(&path).with_context(|| format!("nothing has linted {name}"))?;
        print!("{found}");
        is_clean &= found.is_empty();
        documented += usize::from(is_documentation);
    }
    ensure!(!units.is_empty() && documented > 0, "nothing was built, or no documentation");
    Ok(is_clean)
}

/// If this program was started instead of rustc or rustdoc, does what they do.
pub(crate) fn stand_in() -> Option<Result<ExitCode>> {
    let folder = PathBuf::from(std::env::var_os(FOLDER)?);
    let mut words = std::env::args_os();
    let name = PathBuf::from(words.next()?).file_name()?.to_owned();
    let words: Vec<OsString> = words.collect();
    match name.to_str()? {
        RUSTC => Some(compile(&folder, &words)),
        RUSTDOC => Some(document(&folder, &words)),
        _ => None,
    }
}

/// `words` begin with the real compiler.
fn compile(folder: &Path, words: &[OsString]) -> Result<ExitCode> {
    let (rustc, words) = words.split_first().context("cargo names the compiler")?;
    let rustc = Path::new(rustc);
    let unit = Unit::of(words);
    // Not while cargo asks what the compiler can do.
    let clippy = unit.as_ref().map(|unit| {
        let mut command = Command::new(rustc.with_file_name("clippy-driver"));
        command.arg(rustc).args(&unit.words).arg("--emit=metadata");
        unit.start(folder, &mut command)
    });
    let status = Command::new(rustc).args(words).status().with_context(|| rustc.display().to_string())?;
    // Whoever cannot be compiled has said why.
    if let (Some(unit), Some(clippy), true) = (unit, clippy, status.success()) {
        unit.note(folder, clippy?.wait_with_output()?)?;
    }
    Ok(exit_code(status))
}

/// Tests the examples of a library's documentation and makes the documentation, which needs the
/// same libraries.
fn document(folder: &Path, words: &[OsString]) -> Result<ExitCode> {
    let unit = Unit::of(words);
    let pages = unit.as_ref().map(|unit| unit.start(folder, Command::new("rustdoc").args(&unit.words)));
    let status = Command::new("rustdoc").args(words).status().context("rustdoc")?;
    if let (Some(unit), Some(pages)) = (unit, pages) {
        unit.note(folder, pages?.wait_with_output()?)?;
    }
    Ok(exit_code(status))
}

fn exit_code(status: std::process::ExitStatus) -> ExitCode {
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// A unit of compilation.
struct Unit {
    /// Its crate and, where cargo gives one, what tells it from the crate's other units.
    name: String,
    /// The words of its compiler, without those about output.
    words: Vec<OsString>,
}

impl Unit {
    fn of(words: &[OsString]) -> Option<Unit> {
        // Words that are followed by their value, and words that have it.
        const OUTPUT: [&str; 5] = ["--out-dir", "--test-run-directory", "--test-args", "--test-builder", "-o"];
        const FORMAT: [&str; 3] = ["--emit=", "--json=", "--error-format="];
        let is_documented = words.iter().any(|word| word == "--test-run-directory");
        let (mut name, mut kept) = (String::new(), Vec::new());
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let text = word.to_string_lossy();
            if OUTPUT.contains(&&*text) {
                words.next();
                continue;
            }
            if FORMAT.iter().any(|format| text.starts_with(format)) || (is_documented && text == "--test") {
                continue;
            }
            kept.push(word.clone());
            if text == "--crate-name" {
                let crate_name = words.next()?;
                name.insert_str(0, &crate_name.to_string_lossy());
                kept.push(crate_name.clone());
            } else if let Some(suffix) = text.strip_prefix("extra-filename=") {
                name += suffix;
            }
        }
        (!name.is_empty() && !name.starts_with("___")).then_some(Unit { name, words: kept })
    }

    fn start(&self, folder: &Path, command: &mut Command) -> Result<std::process::Child> {
        command.arg("-Dwarnings").arg("--out-dir").arg(folder.join(&self.name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().with_context(|| format!("{command:?}"))
    }

    /// Writes down what was found.
    fn note(&self, folder: &Path, output: Output) -> Result<()> {
        let made = folder.join(&self.name);
        if made.exists() {
            std::fs::remove_dir_all(&made).with_context(|| made.display().to_string())?;
        }
        let found = if output.status.success() { &[] } else { &output.stderr[..] };
        ensure!(
            output.status.success() || !found.is_empty(),
            "the linter of {} ended with {}",
            self.name,
            output.status
        );
        let path = folder.join(&self.name).with_extension(NOTE);
        std::fs::write(&path, found).with_context(|| path.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn a_linter_gets_the_words_of_the_compiler_without_those_about_output() {
        let unit = Unit::of(&words(
            "--crate-name core --edition=2024 src/lib.rs --error-format=json --json=artifacts --emit=dep-info,link --test \
             -C extra-filename=-0f --out-dir deps -L dependency=deps",
        ));
        let unit = unit.expect("a unit");
        assert_eq!(unit.name, "core-0f");
        let kept = "--crate-name core --edition=2024 src/lib.rs --test -C extra-filename=-0f -L dependency=deps";
        assert_eq!(unit.words, words(kept));
        let documented =
            Unit::of(&words("--crate-name core --test src/lib.rs --test-run-directory here")).expect("a unit");
        assert_eq!((documented.name.as_str(), documented.words), ("core", words("--crate-name core src/lib.rs")));
    }

    #[test]
    fn questions_to_the_compiler_are_no_units() {
        assert!(Unit::of(&words("-vV")).is_none());
        assert!(Unit::of(&words("- --crate-name ___ --print=file-names")).is_none());
    }

    #[test]
    fn units_are_what_was_built_here() {
        let message = |id: &str, file: &str| {
            let message = serde_json::json!({"reason": "compiler-artifact", "package_id": id, "filenames": [file]});
            units_of_message(&message)
        };
        assert_eq!(message("path+file:///core#0.1.0", "target/debug/deps/libcore-0f.rlib"), ["core-0f"]);
        assert_eq!(message("path+file:///core#0.1.0", "target/debug/deps/library-0f"), ["library-0f"]);
        assert!(message("path+file:///core#0.1.0", "target/debug/farfield").is_empty());
        assert!(message("registry+index#serde@1.0.0", "target/debug/deps/libserde-0f.rlib").is_empty());
    }
}
