//! Input data: real text where this machine has it, generated text everywhere.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

/// Lines of random keys and numbers, about `bytes` in all.
pub fn random_lines(bytes: usize, seed: u64) -> String {
    let mut numbers = fastrand::Rng::with_seed(seed);
    let mut text = String::with_capacity(bytes + 100);
    while text.len() < bytes {
        let (a, b) = (numbers.u64(..), numbers.u64(..));
        let _ = writeln!(text, "{a:016x} {} {:05}", b >> 40, b % 100_000);
    }
    text
}

/// Text of words that come as often as words do (few very often, many rarely), about `bytes` in all: it compresses like text.
pub fn random_words(bytes: usize, seed: u64) -> String {
    let mut numbers = fastrand::Rng::with_seed(seed);
    let syllables =
        ["ka", "ri", "no", "tem", "sol", "ve", "da", "mi", "ur", "est", "lo", "pan", "gri", "fe", "os", "qua"];
    let words: Vec<String> = (0..20_000)
        .map(|_| {
            let mut word = String::new();
            for _ in 0..numbers.u32(1..=4) {
                word += syllables[numbers.usize(..syllables.len())];
            }
            word
        })
        .collect();
    let mut text = String::with_capacity(bytes + 100);
    let mut column = 0;
    while text.len() < bytes {
        // The product of two fractions is small most of the time.
        let (a, b) = (u64::from(numbers.u32(..)), u64::from(numbers.u32(..)));
        let word = &words[(((a * b) >> 32) as usize * words.len()) >> 32];
        text += word;
        column += word.len() + 1;
        text.push(if column > 80 { '\n' } else { ' ' });
        if column > 80 {
            column = 0;
        }
    }
    text.push('\n');
    text
}

/// The first `bytes` of a real text (`NAME.zst` of the text data set), if it is there; else the caller generates.
pub fn shared_text(name: &str, bytes: usize) -> Option<Vec<u8>> {
    let mut text = shared_data(&format!("text/{name}"))?;
    text.truncate(bytes);
    // A whole last line.
    let end = text.iter().rposition(|&byte| byte == b'\n').map_or(text.len(), |at| at + 1);
    text.truncate(end);
    Some(text)
}

/// A data set, if it lies beside the project (`../shared/data/NAME.zst`) and zstd is installed; else says so.
pub fn shared_data(name: &str) -> Option<Vec<u8>> {
    let path: PathBuf = super::project().join("../shared/data").join(format!("{name}.zst"));
    if !path.is_file() {
        println!("{} is absent: done without", path.display());
        return None;
    }
    match Command::new("zstd").args(["-dcq"]).arg(&path).output() {
        Ok(output) if output.status.success() => Some(output.stdout),
        _ => {
            println!("zstd cannot read {}: done without", path.display());
            None
        }
    }
}
