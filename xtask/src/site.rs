//! The documents as a site with search, by mdBook.
//!
//! Pages keep their paths, and notebooks become pages. Links to files that are no pages lead to the project's repository.

use crate::chores;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// Where files are that are no pages.
const FILES: &str = "https://github.com/farfield/farfield/blob/main/";
/// The list of pages, with links as they are in its own folder.
const SUMMARY: &str = "docs/site/SUMMARY.md";

/// Builds the site in `target/site/book`, and follows each of its links.
pub(crate) fn site() -> Result<()> {
    let root = chores::project();
    let read = |path: &str| read_page(root, path);
    let folder = chores::target().join("site");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    let summary = read(SUMMARY)?;
    let pages = pages(&summary);
    let exists = |path: &str| root.join(path).exists();
    let from_root = summary.replace("](../../", "](").replace("](../", "](docs/");
    write(&folder.join("src/SUMMARY.md"), &from_root.replace(NOTEBOOK, ".md"))?;
    for page in &pages {
        write(
            &folder.join("src").join(page.replace(NOTEBOOK, ".md")),
            &with_links(&read(page)?, page, &pages, exists)?,
        )?;
    }
    write(&folder.join("book.toml"), &read("docs/site/book.toml")?)?;
    let built = Command::new("mdbook").arg("build").arg(&folder).status();
    ensure!(
        built.is_ok_and(|status| status.success()),
        "mdBook found something, or it is absent: cargo install mdbook --no-default-features --features search"
    );
    let book = folder.join("book");
    let count = follow_links(&book)?;
    println!("{} pages, {count} links between them: {}", pages.len(), book.join("index.html").display());
    Ok(())
}

/// How the name of a notebook ends.
const NOTEBOOK: &str = ".ipynb";

/// Reads a page; of a notebook, what it is as a page.
fn read_page(root: &Path, path: &str) -> Result<String> {
    let text = std::fs::read_to_string(root.join(path)).with_context(|| path.to_owned())?;
    if path.ends_with(NOTEBOOK) { notebook(&text, path).with_context(|| path.to_owned()) } else { Ok(text) }
}

/// Returns the cells of a notebook as a page that leads to the notebook itself.
fn notebook(text: &str, path: &str) -> Result<String> {
    let notebook: serde_json::Value = serde_json::from_str(text)?;
    let mut page = String::new();
    for cell in notebook["cells"].as_array().context("a notebook has cells")? {
        let lines = cell["source"].as_array().context("a cell has lines")?;
        let source: String = lines.iter().filter_map(serde_json::Value::as_str).collect();
        match cell["cell_type"].as_str() {
            Some("markdown") => page.push_str(&format!("{source}\n\n")),
            _ => page.push_str(&format!("```python\n{source}\n```\n\n")),
        }
    }
    page.push_str(&format!("This page is a notebook: [{path}]({FILES}{path}).\n"));
    Ok(page)
}

fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().context("a file is in a folder")?;
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// Returns the pages that the summary names, as paths from the root of the project on.
fn pages(summary: &str) -> BTreeSet<String> {
    links(summary).filter_map(|(_, link)| resolve(SUMMARY, link)).collect()
}

/// Returns the links of a page that are no addresses, each with its place in the text.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.match_indices("](").filter_map(|(at, _)| {
        let (link, _) = text[at + 2..].split_once(')')?;
        let is_ours = !link.is_empty() && !link.contains([':', ' ', '\n']) && !link.starts_with('#');
        is_ours.then_some((at + 2, link))
    })
}

/// Returns the path, from the root of the project on, to which a link on a page leads. None if that is outside.
fn resolve(page: &str, link: &str) -> Option<String> {
    let link = link.split('#').next().unwrap_or(link);
    let mut path = PathBuf::from(page);
    path.pop();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => path.pop().then_some(())?,
            Component::CurDir => {}
            part => path.push(part),
        }
    }
    Some(path.display().to_string())
}

/// Returns a page as it is for mdBook: links to files that are no pages lead to the repository, and those to a `README.md`
/// to the `index.md` that mdBook makes of it.
fn with_links(text: &str, page: &str, pages: &BTreeSet<String>, exists: impl Fn(&str) -> bool) -> Result<String> {
    let mut placed = String::with_capacity(text.len());
    let mut done = 0;
    for (at, link) in links(text) {
        let leads_to = resolve(page, link).filter(|path| exists(path));
        let Some(path) = leads_to else { bail!("{page}: {link} leads nowhere") };
        let link_there = match pages.contains(&path) {
            true => link.replace("README.md", "index.md").replace(NOTEBOOK, ".md"),
            false => format!("{FILES}{path}"),
        };
        placed.push_str(&text[done..at]);
        placed.push_str(&link_there);
        done = at + link.len();
    }
    placed.push_str(&text[done..]);
    Ok(placed)
}

/// Checks that each link in the site leads to a file of it. Returns how many there are.
fn follow_links(book: &Path) -> Result<usize> {
    let (mut folders, mut count, mut broken) = (vec![book.to_owned()], 0, Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "html") {
                let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                for link in text.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
                    let file = link.split(['#', '?']).next().unwrap_or(link);
                    if file.is_empty() || file.contains(':') {
                        continue;
                    }
                    count += 1;
                    if !folder.join(file).exists() {
                        broken.push(format!("{}: {link}", path.display()));
                    }
                }
            }
        }
    }
    ensure!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
    Ok(count)
}

#[cfg(test)]
mod tests {
    //! Danger: a page that the site lacks, or a link that works in the repository only.
    use super::*;

    #[test]
    fn links_to_pages_stay_and_others_lead_to_the_repository() {
        let pages = BTreeSet::from(["README.md".to_owned(), "docs/cli.md".to_owned()]);
        let text = "[a](../cli.md#x), [b](../../README.md), [c](../../examples), [d](https://e.x/y), [e](#here)";
        let placed = with_links(text, "docs/design/pool.md", &pages, |_| true).unwrap();
        let examples = format!("{FILES}examples");
        assert_eq!(placed, text.replace("../../examples", &examples).replace("README", "index"));
        let error = with_links("[a](b.md)", "docs/cli.md", &pages, |path| path != "docs/b.md").unwrap_err();
        assert_eq!(error.to_string(), "docs/cli.md: b.md leads nowhere");
        assert!(with_links("[a](../../../b.md)", "docs/cli.md", &pages, |_| true).is_err());
    }

    #[test]
    fn a_notebook_becomes_a_page() {
        let cells = r##"{"cells": [{"cell_type": "markdown", "source": ["# A\n", "b [c](../d.md)"]},
            {"cell_type": "code", "source": ["import x"]}]}"##;
        let page = notebook(cells, "e/f.ipynb").unwrap();
        let end = format!("This page is a notebook: [e/f.ipynb]({FILES}e/f.ipynb).\n");
        assert_eq!(page, format!("# A\nb [c](../d.md)\n\n```python\nimport x\n```\n\n{end}"));
        let pages = BTreeSet::from(["e/f.ipynb".to_owned()]);
        assert_eq!(with_links("[f](e/f.ipynb)", "README.md", &pages, |_| true).unwrap(), "[f](e/f.md)");
        assert!(notebook("{}", "e/f.ipynb").is_err());
    }

    #[test]
    fn the_summary_names_each_document_once_and_links_lead_somewhere() {
        let root = chores::project();
        let summary = std::fs::read_to_string(root.join(SUMMARY)).unwrap();
        let named = pages(&summary);
        assert_eq!(named.len(), links(&summary).count());
        for page in &named {
            let text = read_page(root, page).unwrap();
            with_links(&text, page, &named, |path| root.join(path).exists()).unwrap();
        }
        let mut missing = Vec::new();
        for folder in ["docs", "docs/design", "docs/guide", "docs/decisions"] {
            for entry in std::fs::read_dir(root.join(folder)).unwrap() {
                let path = format!("{folder}/{}", entry.unwrap().file_name().to_string_lossy());
                if path.ends_with(".md") && !named.contains(&path) {
                    missing.push(path);
                }
            }
        }
        assert!(missing.is_empty(), "{SUMMARY} lacks {missing:?}");
    }
}
