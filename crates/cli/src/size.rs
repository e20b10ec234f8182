//! Sizes as people write them: `512M`, `1.5G`, `4GiB`, `25%`.

use std::str::FromStr;

/// A size on the command line.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Size {
    /// Absolute size in bytes.
    Bytes(u64),
    /// Percentage of the memory of this machine, or of the container.
    Percent(f64),
}

impl Size {
    /// Returns the size in bytes, rounded down to whole pages. `memory_bytes` stands for 100 %.
    pub(crate) fn bytes(self, memory_bytes: u64) -> u64 {
        let bytes = match self {
            Size::Bytes(bytes) => bytes,
            Size::Percent(percent) => (memory_bytes as f64 * percent / 100.0) as u64,
        };
        bytes & !4095
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        if text.starts_with('-') {
            return Err("a size cannot be negative".into());
        }
        if text.contains(char::is_whitespace) {
            let together: String = text.split_whitespace().collect();
            return Err(format!("a size has no space in it: {together}"));
        }
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let value = parse_number(number).ok_or_else(|| format!("a size is a number and a unit, like {FORMS}"))?;
        if unit == "%" {
            let percent = value.0 as f64 + value.1;
            return match percent {
                p if p > 0.0 && p <= 100.0 => Ok(Size::Percent(p)),
                _ => Err("a percentage must be above 0 and at most 100".into()),
            };
        }
        let shift = match unit.to_ascii_uppercase().as_str() {
            "" if number == "0" => 0,
            "" => return Err(format!("{text} what? Give a unit: {text}M or {text}G, or {text}B for bytes")),
            "B" => 0,
            "K" | "KB" | "KIB" => 10,
            "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            "T" | "TB" | "TIB" => 40,
            _ => return Err(format!("unknown unit {unit:?}; sizes look like {FORMS} (K, M, G, T are powers of 1024)")),
        };
        if shift == 0 && value.1 != 0.0 {
            return Err("a size is a whole number of bytes".into());
        }
        // The whole part is computed exactly, so that 16777216T overflows and 1023G does not lose a
        // bit.
        let whole = value.0.checked_shl(shift).filter(|whole| whole >> shift == value.0);
        let part = (value.1 * (1u64 << shift) as f64) as u64;
        match whole.and_then(|whole| whole.checked_add(part)) {
            Some(0) => Err("a size must be above zero".into()),
            Some(bytes) if bytes <= i64::MAX as u64 => Ok(Size::Bytes(bytes)),
            _ => Err(format!("{text} is more than any machine has")),
        }
    }
}

const FORMS: &str = "512M, 1.5G, 4GiB or 25%";

/// Parses the whole part and the fraction of a decimal number. Signs and exponents are refused.
fn parse_number(text: &str) -> Option<(u64, f64)> {
    let (whole, fraction) = match text.split_once('.') {
        None => (text, None),
        Some((whole, fraction)) => (whole, Some(fraction)),
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || fraction.is_some_and(|fraction| !digits(fraction)) {
        return None;
    }
    let fraction = fraction.map_or(Some(0.0), |fraction| format!("0.{fraction}").parse().ok())?;
    Some((whole.parse().ok()?, fraction))
}

#[cfg(test)]
mod tests {
    //! Danger: a budget a thousand times too small or too large.
    use super::*;

    #[test]
    fn sizes_are_what_people_mean() {
        let check = |text: &str, bytes: u64| assert_eq!(text.parse(), Ok(Size::Bytes(bytes)), "{text}");
        check("512M", 512 << 20);
        check("4G", 4 << 30);
        check("4g", 4 << 30);
        check("4GiB", 4 << 30);
        check("4GB", 4 << 30);
        check("1.5G", 3 << 29);
        check("0.5M", 1 << 19);
        check("64KiB", 64 << 10);
        check("100k", 100 << 10);
        check("2T", 2 << 40);
        check("4096B", 4096);
        assert_eq!("25%".parse(), Ok(Size::Percent(25.0)));
        assert_eq!("12.5%".parse(), Ok(Size::Percent(12.5)));
        assert_eq!("25%".parse::<Size>().unwrap().bytes(8 << 30), 2 << 30);
        assert_eq!("5000B".parse::<Size>().unwrap().bytes(0), 4096, "whole pages");
    }

    #[test]
    fn text_that_is_no_size_is_refused_with_a_hint() {
        let check = |text: &str, part: &str| {
            let error = text.parse::<Size>().expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        };
        check("", "a number and a unit");
        check("G", "a number and a unit");
        check("-1G", "cannot be negative");
        check("1..5G", "a number and a unit");
        check("1.G", "a number and a unit");
        check(".5G", "a number and a unit");
        check("4096", "unit");
        check("1e9", "unknown unit");
        check("4 G", "no space in it: 4G");
        check("4Gb/s", "unknown unit");
        check("4GG", "unknown unit");
        check("1.5B", "whole number of bytes");
        check("0", "zero");
        check("0.0G", "zero");
        check("0%", "above 0");
        check("101%", "at most 100");
        check("99999999T", "more than any");
        check("99999999999999999999G", "a number and a unit");
    }
}
