//! The tests of the CI tier, part by part.

use crate::chores::{self, cargo, farfield};
use anyhow::{Result, bail, ensure};
use std::ffi::OsStr;

/// A part of the tests that can be run by itself.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    /// One test at a time, because it looks at the whole machine or at clocks.
    alone: bool,
}

/// In the order in which they say most, soonest.
pub(crate) const PARTS: [Part; 20] = [
    Part { name: "unit", alone: false },
    Part { name: "models", alone: true },
    Part { name: "fabric", alone: true },
    Part { name: "faults", alone: true },
    Part { name: "heaps", alone: true },
    Part { name: "survival", alone: true },
    Part { name: "tiers", alone: true },
    Part { name: "switch", alone: true },
    Part { name: "offload", alone: false },
    Part { name: "columns", alone: false },
    Part { name: "frames", alone: false },
    Part { name: "sql", alone: false },
    Part { name: "sandbox", alone: false },
    Part { name: "leftovers", alone: true },
    Part { name: "kills", alone: true },
    Part { name: "budget", alone: true },
    Part { name: "users", alone: true },
    Part { name: "examples", alone: false },
    Part { name: "probes", alone: false },
    Part { name: "programs", alone: false },
];

/// What is compiled otherwise, or not at all, without libfabric.
const FABRIC: [&str; 12] = [
    "-p",
    "farfield-fabric",
    "-p",
    "farfield-pool",
    "-p",
    "farfield-server",
    "-p",
    "farfield-cli",
    "--features",
    "farfield-fabric/libfabric,farfield-pool/fabric,farfield-server/fabric,farfield-cli/fabric",
    "--test",
    "fabric",
];

/// Nothing else is built with DataFusion, which takes longer than all of ours.
const SQL: [&str; 8] = [
    "-p",
    "farfield-sql",
    "-p",
    "farfield-tests",
    "-p",
    "farfield-bench",
    "--features",
    "farfield-tests/sql,farfield-bench/sql",
];

impl Part {
    pub(crate) fn run(self, runner_words: &[String], environment: &[(&str, &OsStr)]) -> Result<()> {
        println!("\n== {} ==", self.name);
        if self.name == "unit" {
            chores::check_fuzz()?;
        }
        if self.name == "fabric" && !chores::has_libfabric() {
            ensure!(std::env::var_os("CI").is_none(), "libfabric-dev and pkg-config must be installed");
            println!("skipped: libfabric-dev and pkg-config are not installed");
            return Ok(());
        }
        match self.name {
            "unit" => {
                let of = ["--workspace", "--exclude", "farfield-tests", "--exclude", "farfield-sql"];
                self.test(
                    &[&of[..], &["--features", "farfield/serde,farfield-bench/grpc"]].concat(),
                    runner_words,
                    environment,
                )
            }
            "models" => {
                let of = ["-p", "farfield-pager", "--features", "model", "--test", "model"];
                self.test(&of, runner_words, environment)
            }
            "fabric" => self.test(&FABRIC, runner_words, environment),
            "sql" => {
                self.test(&[&SQL[..], &["--doc"]].concat(), runner_words, environment)?;
                self.test(&[&SQL[..], &["--lib", "--test", "sql"]].concat(), runner_words, environment)
            }
            name => self.test(&["-p", "farfield-tests", "--test", name], runner_words, environment),
        }
    }

    fn test(self, of: &[&str], runner_words: &[String], environment: &[(&str, &OsStr)]) -> Result<()> {
        let mut words: Vec<&str> = vec!["test", "--no-fail-fast"];
        words.extend(of);
        words.push("--");
        if self.alone {
            words.push("--test-threads=1");
        }
        words.extend(runner_words.iter().map(String::as_str));
        cargo(&words, environment)
    }
}

/// The CI tier. The last line is the test runner's, unless something failed.
pub(crate) fn test(words: &[String]) -> Result<()> {
    let (parts, runner_words) = parse(words)?;
    // End-to-end tests use what users get.
    chores::build()?;
    let farfield = farfield();
    let environment = [("FARFIELD_BIN", farfield.as_os_str())];
    let failed: Vec<&str> =
        parts.iter().filter(|part| part.run(&runner_words, &environment).is_err()).map(|part| part.name).collect();
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

fn parse(words: &[String]) -> Result<(Vec<Part>, Vec<String>)> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let mut parts = Vec::new();
    for word in &words[..end] {
        match PARTS.iter().find(|part| part.name == word) {
            Some(part) => parts.push(*part),
            None => bail!("no part of the tests is called {word:?}: {}", PARTS.map(|part| part.name).join(" ")),
        }
    }
    if parts.is_empty() {
        parts.extend(PARTS);
    }
    Ok((parts, words.iter().skip(end + 1).cloned().collect()))
}
