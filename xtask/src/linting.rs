//! Clippy and API documentation while everything is built: instead of rustc and rustdoc, cargo
//! starts this program.
//!
//! By itself, `cargo clippy` would first check the three hundred libraries that were just built,
//! and then read the whole project a second time. Clippy is a compiler, so it builds the project
//! here. Beside rustdoc, which tests the examples of a library, another one makes its pages. What
//! is found does not end the build: the part `lints` fails at the end, and the tests have been run.

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
/// Extension of the files with what was found in the pages of a library: nothing, mostly.
const NOTE: &str = "txt";
/// Test programs that run for so long that it takes less time to optimise them, as their packages say. All others are
/// not optimised: for them that takes longer than it makes them faster.
const OPTIMISED_TESTS: [&str; 4] = ["dsm", "farfield_pool", "gc", "heap"];

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

/// Result of a build that lints.
#[derive(Default)]
pub(crate) struct Findings {
    /// Warnings, as the compiler prints them.
    warnings: BTreeSet<String>,
    /// Names of the project's libraries.
    libraries: BTreeSet<String>,
}

impl Findings {
    /// Reads what one of cargo's messages says about this project.
    pub(crate) fn read(&mut self, message: &Value) {
        if !message["package_id"].as_str().is_some_and(|id| id.starts_with("path+")) {
            return;
        }
        match message["reason"].as_str() {
            Some("compiler-message") => self.warnings.extend(rendered(message).map(str::to_owned)),
            Some("compiler-artifact") if message["target"]["doctest"] == true => {
                let name = message["target"]["name"].as_str().unwrap_or_default();
                self.libraries.insert(name.replace('-', "_"));
            }
            _ => {}
        }
    }

    /// Prints what was found, in the documentation, too. Returns whether that is nothing.
    pub(crate) fn report(&self) -> Result<bool> {
        let mut is_clean = self.warnings.is_empty();
        self.warnings.iter().for_each(|warning| print!("{warning}"));
        let notes = self.libraries.iter().map(|name| folder().join(name).with_extension(NOTE));
        // Libraries that are not for Rust have no examples.
        let notes: Vec<_> = notes.filter(|note| note.exists()).collect();
        ensure!(!notes.is_empty(), "no library was documented");
        for note in notes {
            let found = std::fs::read_to_string(&note).with_context(|| note.display().to_string())?;
            print!("{found}");
            is_clean &= found.is_empty();
        }
        Ok(is_clean)
    }
}

/// Returns what a message of cargo shows, if it is one of a compiler.
pub(crate) fn rendered(message: &Value) -> Option<&str> {
    message["message"]["rendered"].as_str()
}

/// If this program was started instead of rustc or rustdoc, does what they do.
pub(crate) fn stand_in() -> Option<Result<ExitCode>> {
    let folder = PathBuf::from(std::env::var_os(FOLDER)?);
    let mut words = std::env::args_os();
    let name = PathBuf::from(words.next()?).file_name()?.to_owned();
    let words: Vec<OsString> = words.collect();
    match name.to_str()? {
        RUSTC => Some(compile(&words)),
        RUSTDOC => Some(document(&folder, &words)),
        _ => None,
    }
}

/// `words` begin with the real compiler.
fn compile(words: &[OsString]) -> Result<ExitCode> {
    let (rustc, words) = words.split_first().context("cargo names the compiler")?;
    let mut command = Command::new(Path::new(rustc).with_file_name("clippy-driver"));
    command.arg(rustc).args(words).args(is_plain_test(words).then_some("-Copt-level=0"));
    Ok(exit_code(command.status().with_context(|| format!("{command:?}"))?))
}

/// Returns whether the words of a compiler are those of a test program that is not optimised.
fn is_plain_test(words: &[OsString]) -> bool {
    let is_optimised = |name: &OsString| OPTIMISED_TESTS.iter().any(|optimised| name == optimised);
    let name = words.iter().skip_while(|word| *word != "--crate-name").nth(1);
    words.iter().any(|word| word == "--test") && !name.is_some_and(is_optimised)
}

/// Tests the examples of a library's documentation and makes the documentation, which needs the
/// same libraries.
fn document(folder: &Path, words: &[OsString]) -> Result<ExitCode> {
    let library = Documented::by(words);
    let pages = library.as_ref().map(|library| library.start(folder));
    let status = Command::new("rustdoc").args(words).status().context("rustdoc")?;
    if let (Some(library), Some(pages)) = (library, pages) {
        library.note(folder, pages?.wait_with_output()?)?;
    }
    Ok(exit_code(status))
}

fn exit_code(status: std::process::ExitStatus) -> ExitCode {
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Library whose examples are tested.
struct Documented {
    name: String,
    /// Words that make its pages.
    words: Vec<OsString>,
}

impl Documented {
    /// Returns the library that these words of rustdoc name; `None` if they only ask what it can do.
    fn by(words: &[OsString]) -> Option<Documented> {
        // Words that are followed by their value.
        const OF_TESTS: [&str; 5] = ["--out-dir", "--test-run-directory", "--test-args", "--test-builder", "-o"];
        let (mut name, mut kept) = (None, Vec::new());
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let text = word.to_string_lossy();
            if OF_TESTS.contains(&&*text) {
                words.next();
            } else if text != "--test" && !text.starts_with("--error-format=") {
                kept.push(word.clone());
                if text == "--crate-name" {
                    name = words.next();
                    kept.extend(name.cloned());
                }
            }
        }
        Some(Documented { name: name?.to_string_lossy().into_owned(), words: kept })
    }

    fn start(&self, folder: &Path) -> Result<std::process::Child> {
        let mut command = Command::new("rustdoc");
        command.args(&self.words).arg("-Dwarnings").arg("--out-dir").arg(folder.join(&self.name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().with_context(|| format!("{command:?}"))
    }

    /// Writes down what was found.
    fn note(&self, folder: &Path, output: Output) -> Result<()> {
        let made = folder.join(&self.name);
        if made.exists() {
            std::fs::remove_dir_all(&made).with_context(|| made.display().to_string())?;
        }
        let is_clean = output.status.success();
        let found = if is_clean { &[] } else { &output.stderr[..] };
        ensure!(is_clean || !found.is_empty(), "rustdoc of {} ended with {}", self.name, output.status);
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
    fn pages_are_made_with_the_words_that_test_examples_without_those_about_tests() {
        let library = Documented::by(&words(
            "--crate-name core --edition=2024 --test src/lib.rs --test-run-directory here --error-format=json \
             -L dependency=deps",
        ));
        let library = library.expect("a library");
        let kept = words("--crate-name core --edition=2024 src/lib.rs -L dependency=deps");
        assert_eq!((library.name.as_str(), library.words), ("core", kept));
        assert!(Documented::by(&words("-vV")).is_none());
    }

    #[test]
    fn test_programs_are_optimised_if_they_run_for_long() {
        let is_plain = |text| is_plain_test(&words(text));
        assert!(is_plain("--crate-name farfield src/lib.rs --test -C opt-level=1"));
        assert!(!is_plain("--crate-name farfield src/lib.rs -C opt-level=1"));
        assert!(!is_plain("--crate-name heap tests/heap/main.rs --test -C opt-level=1"));
    }

    #[test]
    fn warnings_and_libraries_of_the_project_are_found() {
        let mut findings = Findings::default();
        for id in ["path+file:///crates/core#farfield-core@0.1.0", "registry+index#serde@1.0.0"] {
            let name = id.rsplit_once('#').expect("a package").1.split('@').next();
            let target = serde_json::json!({"name": name, "doctest": true});
            let artifact = serde_json::json!({"reason": "compiler-artifact", "package_id": id, "target": target});
            findings.read(&artifact);
            findings.read(&serde_json::json!({
                "reason": "compiler-message", "package_id": id, "message": {"rendered": format!("warning: {id}")}
            }));
        }
        assert_eq!(findings.libraries, BTreeSet::from(["farfield_core".to_owned()]));
        assert_eq!(findings.warnings.len(), 1);
    }
}
