//! What the names and comments of `crates/` cost a reader, counted.
//!
//! Danger: a type name that stands for several ideas, and a comment that can be read only by those who wrote it, come back
//! one by one. docs/style.md has the rules.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Type names that are defined in more than one file.
const SHARED_NAMES_MAX: usize = 20;
/// One in so many doc comments may begin without a subject: what clap prints as help is in the imperative.
const SUBJECTLESS_ONE_IN: usize = 100;
const COLUMNS_MAX: usize = 120;

/// Openings of a sentence that say nothing without the lines around it.
const OPENINGS: [&str; 21] = [
    "The same", "So many", "As many", "See ", "It ", "Of ", "Who", "What ", "How ", "Those", "These", "Its ", "Is ",
    "Has ", "Does ", "Nobody", "Somebody", "One ", "Another", "There ", "As ",
];

/// The Rust files of the crates, without their tests, each with its text up to its module of unit tests.
fn sources() -> Vec<(PathBuf, String)> {
    fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).expect("a folder of the project").flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let is_left_out =
                ["target", "tests", "examples", "benches", "fuzz"].iter().any(|left_out| name == *left_out);
            if path.is_dir() && !is_left_out {
                collect(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") && name != "tests.rs" {
                files.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask/ has a parent");
    let mut files = Vec::new();
    collect(&root.join("crates"), &mut files);
    files.sort();
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).expect("Rust is text");
        let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned();
        (path.strip_prefix(root).expect("inside").to_owned(), product)
    };
    files.into_iter().map(read).collect()
}

/// The name of the type that a line defines.
fn defined(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => line,
    };
    let line = line.strip_prefix("unsafe ").unwrap_or(line);
    let name = ["struct ", "enum ", "trait "].iter().find_map(|kind| line.strip_prefix(kind))?;
    let end = name.find(|it: char| !it.is_alphanumeric() && it != '_').unwrap_or(name.len());
    name.starts_with(char::is_uppercase).then_some(&name[..end])
}

#[test]
fn type_names_stand_for_one_type_each() {
    assert_eq!(defined("    pub(crate) struct Lane<'a> {"), Some("Lane"));
    assert_eq!(defined("enum State {"), Some("State"));
    assert_eq!(defined("let structure = 1;"), None);
    let mut definitions: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for (path, text) in sources() {
        for name in text.lines().filter_map(defined) {
            definitions.entry(name.to_owned()).or_default().insert(path.clone());
        }
    }
    assert!(definitions.len() > 500, "only {} types were found", definitions.len());
    let shared: BTreeMap<_, _> = definitions.iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(shared.len() <= SHARED_NAMES_MAX, "{} names stand for several types: {shared:#?}", shared.len());
}

#[test]
fn doc_comments_begin_with_a_subject() {
    let (mut count, mut subjectless) = (0, Vec::new());
    for (path, text) in sources() {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (index, line) in lines.iter().enumerate() {
            let is_first = index == 0 || !lines[index - 1].starts_with("///");
            let Some(sentence) = line.strip_prefix("/// ").filter(|_| is_first) else { continue };
            count += 1;
            if OPENINGS.iter().any(|opening| sentence.starts_with(opening)) {
                subjectless.push(format!("{}:{}: {sentence}", path.display(), index + 1));
            }
        }
    }
    assert!(count > 5000, "only {count} comments were found");
    let most = count / SUBJECTLESS_ONE_IN;
    assert!(subjectless.len() <= most, "{} of {count}, at most {most}: {subjectless:#?}", subjectless.len());
}

#[test]
fn lines_are_not_too_long() {
    let too_long: Vec<String> = sources()
        .iter()
        .flat_map(|(path, text)| {
            let lines = text.lines().enumerate().filter(|(_, line)| line.chars().count() > COLUMNS_MAX);
            lines.map(|(index, _)| format!("{}:{}", path.display(), index + 1)).collect::<Vec<_>>()
        })
        .collect();
    assert!(too_long.is_empty(), "longer than {COLUMNS_MAX}: {too_long:#?}");
}
