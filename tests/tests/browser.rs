//! The page of `farfield top --serve` in a real browser without a screen: Debian's Chromium, driven by Playwright from PyPI.
//!
//! Danger: a page that shows old numbers, runs names as code, asks strangers, or needs a mouse, a wide window or daylight.

use farfield_tests::{Command, Scratch, farfield, program, project, skip, soak_time};
use std::path::PathBuf;
use std::time::Duration;

/// Variable that names a Python in which Playwright is installed, if `python3` is not one.
const PYTHON: &str = "FARFIELD_PLAYWRIGHT_PYTHON";

#[test]
fn the_page_shows_what_happens_and_can_be_used_by_everybody() {
    look(Duration::from_secs(600), &[]);
}

/// In the deep tier for half an hour.
#[test]
fn five_browsers_look_for_long() {
    let Some(time) = soak_time(Duration::from_secs(1800)) else { return };
    look(time + Duration::from_secs(600), &[&time.as_secs().to_string()]);
}

fn look(deadline: Duration, words: &[&str]) {
    let Some(chromium) = program("chromium") else { return };
    let scratch = Scratch::new("browser");
    let python = std::env::var(PYTHON).unwrap_or_else(|_| "python3".to_owned());
    let command = |words: &[&str]| Command::new(scratch.path(), words).within(deadline);
    if command(&[&python, "-c", "import playwright"]).run().code != 0 {
        skip("Playwright is not there: PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD=1 pip install playwright");
        return;
    }
    let paths = [project().join("tests/programs/dashboard.py"), farfield(), chromium, pictures()];
    let paths = paths.each_ref().map(|path| path.to_str().expect("UTF-8"));
    let ended = command(&[&[python.as_str()], &paths[..], words].concat()).run();
    assert_eq!(ended.code, 0, "{}{}", ended.text(), ended.errors);
    assert!(ended.text().ends_with("ok\n"), "{}", ended.text());
    println!("{}pictures are in {}", ended.text(), paths[3]);
}

/// The folder in which the pictures are kept.
fn pictures() -> PathBuf {
    let folder = project().join("target/browser");
    std::fs::create_dir_all(&folder).expect("target/ can be written");
    folder
}
