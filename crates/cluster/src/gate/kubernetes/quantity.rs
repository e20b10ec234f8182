//! Quantities of Kubernetes: `1500m` of a processor, `4Gi` of memory.

/// Digits of a quantity that are read. Kubernetes writes fewer.
const DIGITS_MAX: usize = 18;

/// Reads an amount in whole units, such as bytes, rounded up. `None` for what is no quantity, is
/// negative, or is more than 2^64 - 1.
pub fn units(text: &str) -> Option<u64> {
    u64::try_from(milli_units(text)?.div_ceil(1000)).ok()
}

/// Reads an amount in thousandths, such as those of a processor, rounded up. Fails as [`units`] does.
pub fn thousandths(text: &str) -> Option<u64> {
    u64::try_from(milli_units(text)?).ok()
}

fn milli_units(text: &str) -> Option<u128> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let fraction = fraction.trim_end_matches('0');
    let digits = whole.len() + fraction.len();
    if number.is_empty() || number == "." || fraction.contains('.') || digits > DIGITS_MAX {
        return None;
    }
    let mantissa: u128 = if digits == 0 { 0 } else { format!("{whole}{fraction}").parse().ok()? };
    let (factor, divisor) = scale(suffix)?;
    let divisor = divisor.checked_mul(10u128.pow(u32::try_from(fraction.len()).ok()?))?;
    Some(mantissa.checked_mul(factor)?.checked_mul(1000)?.div_ceil(divisor))
}

/// Returns factor and divisor of a suffix.
fn scale(suffix: &str) -> Option<(u128, u128)> {
    const DECIMAL: [&str; 6] = ["k", "M", "G", "T", "P", "E"];
    if let Some(binary) = suffix.strip_suffix('i') {
        let power = ["K", "M", "G", "T", "P", "E"].iter().position(|name| *name == binary)?;
        return Some((1 << (10 * (power + 1)), 1));
    }
    let decimal = |power: usize| 1000u128.pow(u32::try_from(power).unwrap_or(0));
    if let Some(power) = DECIMAL.iter().position(|name| *name == suffix) {
        return Some((decimal(power + 1), 1));
    }
    if let Some(power) = ["", "m", "u", "n"].iter().position(|name| *name == suffix) {
        return Some((1, decimal(power)));
    }
    let exponent: i8 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    let power = 10u128.checked_pow(u32::from(exponent.unsigned_abs()))?;
    Some(if exponent < 0 { (1, power) } else { (power, 1) })
}

#[cfg(test)]
mod tests {
    //! Guards against a job or a node that is taken for smaller than it is.
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        let bytes = [
            ("0", 0),
            ("1", 1),
            ("128974848", 128_974_848),
            ("129e6", 129_000_000),
            ("129M", 129_000_000),
            ("123Mi", 123 << 20),
            ("1.5Gi", 3 << 29),
            ("0.1Ki", 103),
            (".5Gi", 1 << 29),
            ("2.", 2),
            ("+4Ti", 4 << 40),
            ("1E3", 1000),
            ("1e-3", 1),
            ("1E", 1_000_000_000_000_000_000),
            ("7Ei", 7 << 60),
            ("128974848000m", 128_974_848),
            ("1m", 1),
            ("1n", 1),
        ];
        for (text, expected) in bytes {
            assert_eq!(units(text), Some(expected), "{text}");
        }
        for (text, expected) in [("1500m", 1500), ("48", 48_000), ("0.0001", 1), ("1u", 1), ("1.5", 1500)] {
            assert_eq!(thousandths(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_quantity_is_none() {
        for text in [
            "",
            ".",
            "-1",
            "1..2",
            "1.2.3",
            "1gi",
            "1KiB",
            "Gi",
            "1 Gi",
            "1e",
            "1e99",
            "16Ei",
            "0x10",
            "²",
            "1i",
            "9999999999999999999",
            "1e400",
            "NaN",
            "1m1",
        ] {
            assert_eq!(units(text), None, "{text}");
        }
        assert_eq!(thousandths("7Ei"), None, "more than fits");
    }

    #[test]
    fn any_text_is_read_or_refused_and_larger_numbers_are_not_smaller() {
        let mut random = fastrand::Rng::with_seed(7);
        let alphabet: Vec<char> = "0123456789.eE+-kKmMgGtTpPiun ".chars().collect();
        for _ in 0..100_000 {
            let text: String = (0..random.usize(..12)).map(|_| alphabet[random.usize(..alphabet.len())]).collect();
            let _ = (units(&text), thousandths(&text));
        }
        for _ in 0..10_000 {
            let (number, suffix) = (random.u64(..1 << 20), ["", "m", "Ki", "M", "Gi", "e3"][random.usize(..6)]);
            let read = |number: u64| units(&format!("{number}{suffix}")).unwrap();
            assert!(read(number) <= read(number + 1), "{number}{suffix}");
        }
    }
}
