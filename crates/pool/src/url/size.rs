//! Sizes in URLs: `8G`, `512M`, `64KiB`.

/// Parses a size in bytes; K, M, G and T are powers of 1024. The unit is mandatory.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("a size is a whole number and a unit, as in 512M or 8G, not {text:?}");
    let split = text.find(|letter: char| !letter.is_ascii_digit()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(split);
    let shift = match unit.to_ascii_uppercase().as_str() {
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0 && *bytes <= i64::MAX as u64).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_what_people_mean() {
        assert_eq!(parse("8G"), Ok(8 << 30));
        assert_eq!(parse("512MiB"), Ok(512 << 20));
        assert_eq!(parse("1t"), Ok(1 << 40));
        for wrong in ["", "8", "G", "8X", "0G", "1.5G", "-1G", "99999999T"] {
            assert!(parse(wrong).is_err_and(|why| why.contains("unit")), "{wrong}");
        }
    }
}
