//! What the documents name is there: files, folders, links, tests.
//!
//! Danger: a document that leads nowhere, or that calls something guarded by a test that is gone.

use std::path::Path;

/// Every file and folder below this one, named from the root of the project on.
fn collect(root: &Path, folder: &Path, paths: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder of the project").flatten() {
        let path = entry.path();
        if entry.file_name() != "target" && entry.file_name() != ".git" {
            paths.push(path.strip_prefix(root).expect("inside").display().to_string());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                collect(root, &path, paths);
            }
        }
    }
}

/// `space.rs`, `pager/space.rs` and `crates/pager/src/space.rs` all name the last one; of `a/{b,c}.rs`, the folder is looked at.
fn names(word: &str, path: &str) -> bool {
    let word = word.split_once("/{").map_or(word, |(folder, _)| folder).trim_end_matches('/');
    let mut parts = path.split('/');
    path.ends_with(word.rsplit('/').next().unwrap_or(word)) && word.split('/').all(|part| parts.any(|is| is == part))
}

/// The rows of a page's tables about promises: which promise, and the cell that names its tests.
fn promises(page: &str) -> impl Iterator<Item = (&str, &str)> {
    let rows = page.lines().filter(|line| line.starts_with('|'));
    let mut is_about_promises = false;
    rows.filter_map(move |row| {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let last = *cells.last()?;
        if cells[0] == "who" || cells[0] == "word" {
            is_about_promises = last == "test";
            return None;
        }
        (is_about_promises && !last.starts_with("---")).then(|| (cells[0], last))
    })
}

#[test]
fn every_promise_of_the_page_about_trust_has_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask/ has a parent");
    let page = std::fs::read_to_string(root.join("docs/design/trust.md")).expect("the page");
    let mut paths = Vec::new();
    collect(root, root, &mut paths);
    let read = |path: &String| std::fs::read_to_string(root.join(path)).expect("text");
    let source: String = paths.iter().filter(|path| path.ends_with(".rs")).map(read).collect();
    // Test programs with a `main` of their own list their tests: name, processes, function.
    let is_listed = |name: &str| {
        let forms = [format!("(\"{name}\", "), format!("\"test {name} ... ok\"")];
        forms.iter().any(|form| source.contains(form)) && source.contains(&format!("fn {name}("))
    };
    let is_test = |name: &str| {
        let forms = [format!("#[test]\n    fn {name}("), format!("#[test]\nfn {name}(")];
        forms.iter().any(|form| source.contains(form)) || is_listed(name)
    };
    let mut missing = Vec::new();
    assert!(promises(&page).count() > 10, "the tables are read");
    for (who, tests) in promises(&page) {
        let mut names = tests.split('`').skip(1).step_by(2).peekable();
        if names.peek().is_none() && !tests.starts_with("open: ") {
            missing.push(format!("{who}: no test"));
        }
        missing.extend(names.filter(|name| !is_test(name)).map(|name| format!("{who}: {name}")));
    }
    assert!(missing.is_empty(), "promises without a test:\n{}", missing.join("\n"));
}

#[test]
fn files_that_pages_name_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask/ has a parent");
    let mut paths = Vec::new();
    collect(root, root, &mut paths);
    let read = |path: &String| std::fs::read_to_string(root.join(path)).expect("text");
    let source: String = paths.iter().filter(|path| path.ends_with(".rs")).map(read).collect();
    // A test, or a figure of an experiment.
    let is_in_source = |word: &str| {
        source.contains(&format!("fn {}", word.trim_end_matches('…'))) || source.contains(&format!("\"{word}\""))
    };
    let mut missing = Vec::new();
    // Decisions and the changelog tell what was, too.
    let is_now = |path: &&String| path.ends_with(".md") && !path.contains("decisions/") && *path != "CHANGELOG.md";
    for document in paths.iter().filter(is_now) {
        let text = read(document);
        let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        let is_dead = |link: &&str| !link.contains("://") && !root.join(document).with_file_name(link).exists();
        missing.extend(links.filter(|link| !link.is_empty()).filter(is_dead).map(|link| format!("{document}: {link}")));
        for word in text.split('`').skip(1).step_by(2) {
            let folders = ["crates/", "docs/", "bench/", "tests/", "fuzz/", "xtask/"];
            let is_path = word.ends_with(".rs") || folders.iter().any(|folder| word.starts_with(folder));
            let is_test =
                word.matches('_').count() > 3 && word.chars().all(|c| "_…".contains(c) || c.is_ascii_lowercase());
            // Capitals and stars stand for what the reader chooses.
            let is_plain = !word.contains(|c: char| c.is_whitespace() || c.is_uppercase() || c == '*');
            let is_wrong =
                is_path && is_plain && !paths.iter().any(|path| names(word, path)) || is_test && !is_in_source(word);
            missing.extend(is_wrong.then(|| format!("{document}: {word}")));
        }
    }
    assert!(missing.is_empty(), "not there:\n{}", missing.join("\n"));
}
