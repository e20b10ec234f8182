//! The text protocol: lines of words, and data after some of them.

use super::request::{KEY_MAX, Parsed, Request, Verb, Wrong};

/// A request, and whether it wants no answer.
pub(crate) type Line<'a> = (Request<'a>, bool);

/// Longest line; long ones name many keys.
const LINE_MAX: usize = 64 << 10;

/// The request at the beginning of a buffer.
pub(crate) fn parse(buffer: &[u8], value_max: usize) -> Parsed<Line<'_>> {
    let Some(end) = buffer.iter().take(LINE_MAX).position(|byte| *byte == b'\n') else {
        return if buffer.len() >= LINE_MAX { Parsed::Wrong(Wrong::Lost, buffer.len()) } else { Parsed::More };
    };
    let line = buffer[..end].strip_suffix(b"\r").unwrap_or(&buffer[..end]);
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty()).collect();
    let used = end + 1;
    let Some((verb, words)) = words.split_first() else { return Parsed::Wrong(Wrong::Unknown, used) };
    let store = match *verb {
        b"set" | b"cas" => Some(Verb::Set),
        b"add" => Some(Verb::Add),
        b"replace" => Some(Verb::Replace),
        b"append" => Some(Verb::Append),
        b"prepend" => Some(Verb::Prepend),
        _ => None,
    };
    if let Some(store) = store {
        return parse_store(buffer, used, store, *verb == b"cas", words, value_max);
    }
    let (words, quiet) = match words.split_last() {
        Some((&b"noreply", words)) => (words, true),
        _ => (words, false),
    };
    match parse_line(verb, words, quiet) {
        Ok(request) => {
            let quiet = quiet && request != Request::Version;
            Parsed::Whole((request, quiet), used)
        }
        Err(wrong) => Parsed::Wrong(wrong, used),
    }
}

fn parse_line<'a>(verb: &[u8], words: &[&'a [u8]], quiet: bool) -> Result<Request<'a>, Wrong> {
    match (verb, words) {
        // These always answer.
        (b"get" | b"gets" | b"gat" | b"gats" | b"stats", _) if quiet => Err(Wrong::Format),
        (b"get" | b"gets", [_, ..]) => Ok(Request::Get { keys: keys(words)?, with_cas: verb == b"gets", touch: None }),
        (b"gat" | b"gats", [expires, keys_after @ ..]) if !keys_after.is_empty() => {
            let touch = Some(number(expires).ok_or(Wrong::Exptime)?);
            Ok(Request::Get { keys: keys(keys_after)?, with_cas: verb == b"gats", touch })
        }
        // Some clients send the time that deletion once had.
        (b"delete", [name] | [name, b"0"]) => Ok(Request::Delete { key: key(name)?, cas: 0 }),
        (b"incr" | b"decr", [name, delta]) => {
            let delta = number(delta).ok_or(Wrong::Delta)?;
            Ok(Request::Count { key: key(name)?, up: verb == b"incr", delta, initial: None, cas: 0 })
        }
        (b"touch", [name, expires]) => {
            Ok(Request::Touch { key: key(name)?, expires: number(expires).ok_or(Wrong::Exptime)? })
        }
        (b"flush_all", []) => Ok(Request::Flush { delay: 0 }),
        (b"flush_all", [delay]) => Ok(Request::Flush { delay: number(delay).ok_or(Wrong::Format)? }),
        (b"stats", []) => Ok(Request::Stats { what: b"" }),
        (b"stats", [what, ..]) => Ok(Request::Stats { what }),
        // What follows is nobody's business.
        (b"version", _) => Ok(Request::Version),
        (b"quit", _) => Ok(Request::Quit),
        (b"verbosity", [_]) => Ok(Request::Verbosity),
        (b"verbosity", []) if quiet => Ok(Request::Verbosity),
        (b"delete" | b"gat" | b"gats", [_, ..]) => Err(Wrong::Format),
        _ => Err(Wrong::Unknown),
    }
}

/// `KEY FLAGS EXPTIME BYTES [CAS] [noreply]`, then the data.
fn parse_store<'a>(
    buffer: &'a [u8],
    line: usize,
    verb: Verb,
    with_cas: bool,
    words: &[&'a [u8]],
    value_max: usize,
) -> Parsed<Line<'a>> {
    let (words, cas) = match (words, with_cas) {
        ([words @ .., cas], true) if words.len() == 4 => (words, Some(*cas)),
        ([words @ .., cas, b"noreply"], true) if words.len() == 4 => (words, Some(*cas)),
        (words, false) if words.len() >= 4 => (words, None),
        _ => return Parsed::Wrong(Wrong::Unknown, line),
    };
    let quiet = buffer[..line].trim_ascii_end().ends_with(b" noreply");
    if words.len() > 5 || words.len() == 5 && words[4] != b"noreply" {
        return Parsed::Wrong(Wrong::Unknown, line);
    }
    let [name, flags, expires, bytes] = [words[0], words[1], words[2], words[3]];
    let Some(bytes) = number::<i64>(bytes) else { return Parsed::Wrong(Wrong::Format, line) };
    let Ok(bytes) = usize::try_from(bytes) else { return Parsed::Wrong(Wrong::Chunk, line) };
    let Some(whole) = bytes.checked_add(line + 2) else { return Parsed::Wrong(Wrong::Lost, line) };
    // From here on the data is skipped if something is wrong, as if it had been understood.
    if bytes > value_max {
        return Parsed::Wrong(Wrong::TooLarge, whole);
    }
    let (Ok(key), Some(flags), Some(expires)) = (key(name), number(flags), number(expires)) else {
        return Parsed::Wrong(Wrong::Format, whole);
    };
    let cas = match cas.map(number::<u64>) {
        None => 0,
        // No version has this number, which means any.
        Some(Some(0)) => u64::MAX,
        Some(Some(cas)) => cas,
        Some(None) => return Parsed::Wrong(Wrong::Format, whole),
    };
    let Some(data) = buffer.get(line..whole) else { return Parsed::More };
    let Some(data) = data.strip_suffix(b"\r\n") else { return Parsed::Wrong(Wrong::Chunk, whole) };
    Parsed::Whole((Request::Store { verb, key, flags, expires, data, cas }, quiet), whole)
}

fn key(word: &[u8]) -> Result<&[u8], Wrong> {
    let fits = word.len() <= KEY_MAX && word.iter().all(|byte| *byte > b' ' && *byte != 0x7F);
    if fits { Ok(word) } else { Err(Wrong::Format) }
}

fn keys<'a>(words: &[&'a [u8]]) -> Result<Vec<&'a [u8]>, Wrong> {
    words.iter().map(|word| key(word)).collect()
}

pub(crate) fn number<N: std::str::FromStr>(word: &[u8]) -> Option<N> {
    std::str::from_utf8(word).ok().filter(|word| !word.starts_with('+')).and_then(|word| word.parse().ok())
}
