//! `cargo x`: every chore of the project by one command.

mod cgroup;
mod chores;
mod deep;
mod demo;
mod linting;
mod measured;
mod package;
mod passed;
mod runs;
mod site;
mod tests;
mod text;

use anyhow::{Result, bail};
use std::process::ExitCode;

const HELP: &str = "\
cargo x CHORE

  demo               build, then run GNU sort and awk with a quarter of their memory near; compare with runs without us, and
                     with Linux under the same limit where that is allowed (a minute or two)
  wheel [--sql]      release build, then the wheel of the Python package, in target/wheels; with SQL it takes long
  package [VERSION]  the Debian package, in target/package; the same sources give the same bytes
  site               the documents as a site with search, in target/site (needs mdbook)
  build              release build: farfield and libfarfield_preload.so, in target/release
  test [--again | PART...]
                     every test of the CI tier: what must pass before a change goes in; or only: unit lints doctests faults heaps survival tiers switch offload python sandbox leftovers kills budget users examples situations probes programs,
                     or columns, frames, python_frames, slurm, kubernetes, packages, browser, experiments, models, fabric, sql or fuzz-build, which belong to the deep tier: they take long, need Slurm, Kubernetes or a browser, or build libraries anew;
                     the end-to-end tests run a build with assertions (deep: the release build);
                     without PARTs, what has passed and has not changed since is not run again (--again: it is)
                     after --: words for the test runner, such as part of a name (cargo x test probes -- fork)
  deep [MINUTES] [PART]...
                     the second tier: larger jobs, sanitizers, Miri, fuzzing and soaking for MINUTES each (default 10), and a summary;
                     PARTs are those of the tests, sanitize, miri, deny, fuzz and soak
  fmt [--check]      format all Rust code
  lints [--without-grpc]
                     fmt --check, then clippy and API documentation with warnings as errors: a part of the tests, too
  fuzz [TARGET] [S]  fuzz one target, or all, for S seconds each (default 60; needs cargo-fuzz and a nightly toolchain)
  sanitize [address|thread] [CRATE]...
                     tests of pool, server and library under sanitizers (needs a nightly toolchain with rust-src)
  soak [MINUTES]     random memory histories with a new seed each time (default 10 minutes)
  bench ...          the experiments: cargo x bench --help
  clean              remove what builds, demos and tests left in target
  help               this text";

fn main() -> ExitCode {
    let done = linting::stand_in().unwrap_or_else(|| {
        let words: Vec<String> = std::env::args().skip(1).collect();
        dispatch(&words).map(|()| ExitCode::SUCCESS)
    });
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cargo x: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(words: &[String]) -> Result<()> {
    let (chore, rest) = match words.split_first() {
        Some((chore, rest)) => (chore.as_str(), rest),
        None => ("help", words),
    };
    if rest.iter().take_while(|word| *word != "--").any(|word| word == "--help" || word == "-h") && chore != "bench" {
        println!("{HELP}");
        return Ok(());
    }
    match chore {
        "build" => chores::build(),
        "wheel" => chores::wheel(rest),
        "package" => package::package(rest),
        "site" => site::site(),
        "demo" => demo::run(),
        "test" => tests::test(rest),
        "deep" => deep::deep(rest),
        "fmt" => chores::fmt(rest),
        "lints" => tests::lints(rest),
        "fuzz" => chores::fuzz(rest),
        "sanitize" => deep::sanitize(rest),
        "soak" => deep::soak(rest),
        "bench" => chores::bench(rest),
        "clean" => chores::cargo(&["clean"], &[]),
        "help" | "--help" | "-h" => {
            println!("{HELP}");
            Ok(())
        }
        other => bail!("no chore is called {other:?}\n\n{HELP}"),
    }
}
