//! The map and the country agree: ARCHITECTURE.md's table of crates against the manifests.
//!
//! Danger: an arrow between crates that nobody decided, a crate that the map does not show, a dependency without a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const PREFIX: &str = "farfield-";

fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask/ has a parent")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What the map says of one crate.
struct Row {
    /// `None`: anything.
    may_use: Option<BTreeSet<String>>,
    exists: bool,
}

/// The rows of the table whose head is `| crate | may use | … | today |`.
fn map() -> BTreeMap<String, Row> {
    let text = read(&project().join("ARCHITECTURE.md"));
    let cells =
        |line: &str| line.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let mut lines = text
        .lines()
        .skip_while(|line| !(line.starts_with('|') && cells(line).starts_with(&["crate".into(), "may use".into()])));
    let head = cells(lines.next().expect("ARCHITECTURE.md has a table `| crate | may use | … |`"));
    let today = head.iter().position(|cell| cell == "today").expect("the table has a column `today`");
    let mut rows = BTreeMap::new();
    for line in lines.skip(1).take_while(|line| line.starts_with('|')) {
        let row = cells(line);
        let may_use = match row[1].as_str() {
            "anything" => None,
            "none of ours" => Some(BTreeSet::new()),
            list => Some(list.split(',').map(|name| name.trim().to_owned()).collect()),
        };
        let exists = match row[today].as_str() {
            "planned" => false,
            "yes" | "in part" => true,
            other => panic!("column `today` says {other:?}; it can say yes, in part or planned"),
        };
        for name in row[0].split(',') {
            let row = Row { may_use: may_use.clone(), exists };
            assert!(rows.insert(name.trim().to_owned(), row).is_none(), "{name} is in the table twice");
        }
    }
    rows
}

/// Folder name and manifest of every crate of the workspace.
fn manifests() -> BTreeMap<String, toml::Table> {
    let crates = std::fs::read_dir(project().join("crates")).expect("crates/ is there");
    let mut folders: Vec<PathBuf> = crates.flatten().map(|entry| entry.path()).collect();
    folders.extend(["bench", "tests", "xtask", "python", "fuzz"].map(|name| project().join(name)));
    let found = folders.into_iter().filter(|folder| folder.join("Cargo.toml").is_file());
    found
        .map(|folder| {
            let name =
                folder.file_name().and_then(|name| name.to_str()).expect("a folder with a plain name").to_owned();
            let text = read(&folder.join("Cargo.toml"));
            (name, text.parse().unwrap_or_else(|error| panic!("{}: {error}", folder.display())))
        })
        .collect()
}

/// The names in these sections of a manifest, also of sections for one platform.
fn dependencies(manifest: &toml::Table, sections: &[&str]) -> BTreeSet<String> {
    let mut tables = vec![manifest];
    if let Some(toml::Value::Table(targets)) = manifest.get("target") {
        tables.extend(targets.values().filter_map(toml::Value::as_table));
    }
    let mut names = BTreeSet::new();
    for table in tables {
        for section in sections {
            for (name, value) in table.get(*section).and_then(toml::Value::as_table).into_iter().flatten() {
                // `alias = { package = "name" }` is a dependency on `name`.
                let package = value.as_table().and_then(|table| table.get("package")).and_then(toml::Value::as_str);
                names.insert(package.unwrap_or(name).to_owned());
            }
        }
    }
    names
}

/// Ours among them, by folder name.
fn ours(names: &BTreeSet<String>) -> BTreeSet<String> {
    names
        .iter()
        .filter_map(|name| if name == "farfield" { Some("farfield") } else { name.strip_prefix(PREFIX) })
        .map(str::to_owned)
        .collect()
}

const ALL: [&str; 3] = ["dependencies", "build-dependencies", "dev-dependencies"];

#[test]
fn no_arrow_is_missing_from_the_map() {
    let map = map();
    let mut wrong = Vec::new();
    for (name, manifest) in manifests() {
        let Some(row) = map.get(&name) else {
            wrong.push(format!("{name}: not in the table"));
            continue;
        };
        // Tests of a crate obey its arrows too: what only a test uses is still something to know about.
        for used in ours(&dependencies(&manifest, &ALL)) {
            // A crate that depends on itself only turns on features for its tests.
            if used != name && row.may_use.as_ref().is_some_and(|allowed| !allowed.contains(&used)) {
                wrong.push(format!("{name} uses {used}, which the table does not allow"));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "ARCHITECTURE.md and the manifests disagree; decide, then change one of them:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn no_crate_depends_on_an_end() {
    let ends: BTreeSet<String> =
        map().into_iter().filter(|(_, row)| row.may_use.is_none()).map(|(name, _)| name).collect();
    for (name, manifest) in manifests() {
        let used = ours(&dependencies(&manifest, &ALL));
        // The command line wires up everything, the experiments too.
        let allowed = if name == "cli" { BTreeSet::from(["bench".to_owned()]) } else { BTreeSet::new() };
        let wrong: Vec<_> = used.intersection(&ends).filter(|end| !allowed.contains(*end)).collect();
        assert!(wrong.is_empty(), "{name} depends on {wrong:?}, on which nobody may depend");
    }
}

#[test]
fn the_map_shows_what_exists() {
    let manifests = manifests();
    let mut wrong = Vec::new();
    for (name, row) in map() {
        if row.exists != manifests.contains_key(&name) {
            let really = if row.exists { "is not there" } else { "is there" };
            wrong.push(format!("{name} {really}"));
        }
    }
    assert!(wrong.is_empty(), "column `today` of ARCHITECTURE.md is out of date:\n{}", wrong.join("\n"));
}

#[test]
fn the_map_has_no_circle() {
    let map = map();
    fn reach(map: &BTreeMap<String, Row>, from: &str, path: &mut Vec<String>) {
        assert!(!path.iter().any(|name| name == from), "a circle: {} → {from}", path.join(" → "));
        path.push(from.to_owned());
        for next in map.get(from).and_then(|row| row.may_use.as_ref()).into_iter().flatten() {
            assert!(map.contains_key(next), "{from} may use {next}, which has no row");
            reach(map, next, path);
        }
        path.pop();
    }
    for name in map.keys() {
        reach(&map, name, &mut Vec::new());
    }
}

/// The table of folders in `docs/design/pool.md`: what each of them may use.
fn folders_of_the_pool() -> BTreeMap<String, BTreeSet<String>> {
    let text = read(&project().join("docs/design/pool.md"));
    let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
    let rows = text.lines().skip_while(|line| !line.starts_with("| folder |")).skip(2);
    rows.take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<_> = line.trim_matches('|').split('|').collect();
            (names(cells[0]).pop_first().expect("a folder"), names(cells[2]))
        })
        .collect()
}

/// The folders of which a file names something: by path, or by a name that `lib.rs` exports.
fn folders_used(code: &str, exports: &str) -> BTreeSet<String> {
    let words = |text: &str| -> Vec<String> {
        text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').map(str::to_owned).collect()
    };
    let owner = |name: &str| {
        let line = exports.split(';').find(|line| words(line).iter().skip(3).any(|word| word == name));
        line.and_then(|line| line.split("pub use ").nth(1)?.split("::").next())
    };
    let mut used = BTreeSet::new();
    for path in code.split("crate::").skip(1) {
        // `{A, B}`, `Name` or `folder::…`.
        let names = if path.starts_with('{') { path.split('}').next() } else { words(path).first().map(|_| path) };
        let names = words(names.unwrap_or_default());
        let names = if path.starts_with('{') { &names[..] } else { &names[..1] };
        used.extend(names.iter().map(|name| owner(name).unwrap_or(name).to_owned()));
    }
    used
}

#[test]
fn folders_of_the_pool_use_what_their_table_says() {
    let root = project().join("crates/pool/src");
    let exports = read(&root.join("lib.rs"));
    let folders = folders_of_the_pool();
    assert!(folders["contract"].is_empty() && folders.len() == 5, "{folders:?}");
    let mut wrong = Vec::new();
    for (folder, may_use) in &folders {
        let mut open = vec![root.join(folder)];
        while let Some(path) = open.pop() {
            if path.is_dir() {
                open.extend(std::fs::read_dir(&path).expect("a folder").flatten().map(|entry| entry.path()));
                continue;
            }
            // Tests may use everything.
            if path.ends_with("tests.rs") {
                continue;
            }
            let text = read(&path);
            let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
            let code = code.split("#[cfg(test)]mod tests {").next().unwrap_or_default();
            let used = folders_used(code, &exports);
            let of_table = used.iter().filter(|used| folders.contains_key(*used) && *used != folder);
            wrong.extend(of_table.filter(|used| !may_use.contains(*used)).map(|used| format!("{path:?} uses {used}")));
        }
    }
    assert!(wrong.is_empty(), "docs/design/pool.md and the pool disagree:\n{}", wrong.join("\n"));
}

/// One `Instant::now()` in core, and simulation lies.
#[test]
fn core_has_no_world() {
    let text = read(&project().join("crates/core/src/lib.rs"));
    assert!(text.contains("#![no_std]") || text.contains("#![cfg_attr(not(test), no_std)]"), "core is no_std");
    assert!(text.contains("#![forbid(unsafe_code)]"), "core forbids unsafe code");
}

#[test]
fn every_dependency_has_a_reason() {
    let path = project().join("docs/decisions/dependencies.md");
    let reasons = read(&path);
    let mut missing = BTreeSet::new();
    for (folder, manifest) in manifests() {
        let all = dependencies(&manifest, &ALL);
        for name in all.iter().filter(|name| !name.starts_with("farfield")) {
            if !reasons.contains(&format!("- **{name}**")) {
                missing.insert(format!("{name} (used by {folder})"));
            }
        }
    }
    assert!(missing.is_empty(), "no line `- **name** (crate): why` in docs/decisions/dependencies.md for: {missing:?}");
}

#[test]
fn every_crate_is_part_of_the_house() {
    for (name, manifest) in manifests() {
        if name == "fuzz" {
            continue; // A workspace of its own, because it needs another toolchain.
        }
        let package = manifest["package"].as_table().expect("a package");
        for key in ["version", "edition", "rust-version", "license", "repository"] {
            let inherited = package.get(key).and_then(toml::Value::as_table).and_then(|table| table.get("workspace"));
            assert_eq!(inherited.and_then(toml::Value::as_bool), Some(true), "{name}: {key}.workspace = true");
        }
        let lints = manifest.get("lints").and_then(toml::Value::as_table).and_then(|table| table.get("workspace"));
        assert_eq!(lints.and_then(toml::Value::as_bool), Some(true), "{name}: [lints] workspace = true");
        assert!(package.get("description").is_some(), "{name}: a description");
    }
}
