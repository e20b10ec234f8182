//! The binary protocol: a head of 24 bytes, then extras, key and value.

use super::request::{KEY_MAX, Parsed, Request, Verb, Wrong};

/// First byte of a request, and of an answer.
pub(crate) const REQUEST: u8 = 0x80;
const ANSWER: u8 = 0x81;
const HEAD_BYTES: usize = 24;

/// What an answer repeats of its request, and how much of it is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Head {
    pub(crate) opcode: u8,
    pub(crate) opaque: [u8; 4],
    /// Good news (of a `Get`: bad news) is not told.
    pub(crate) quiet: bool,
    /// Answers to `Get` name the key.
    pub(crate) with_key: bool,
}

/// How a request went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub(crate) enum Status {
    Fine = 0,
    NotFound = 1,
    Exists = 2,
    TooLarge = 3,
    Invalid = 4,
    NotStored = 5,
    NotNumber = 6,
    Unknown = 0x81,
    OutOfMemory = 0x82,
    Failed = 0x84,
}

impl Status {
    fn text(self) -> &'static [u8] {
        match self {
            Status::Fine => b"",
            Status::NotFound => b"Not found",
            Status::Exists => b"Data exists for key.",
            Status::TooLarge => b"Too large.",
            Status::Invalid => b"Invalid arguments",
            Status::NotStored => b"Not stored.",
            Status::NotNumber => b"Non-numeric server-side value for incr or decr",
            Status::Unknown => b"Unknown command",
            Status::OutOfMemory => b"Out of memory",
            Status::Failed => b"Internal error",
        }
    }
}

/// The request at the beginning of a buffer. The head is there even if the rest is wrong.
pub(crate) fn parse(buffer: &[u8], value_max: usize) -> (Option<Head>, Parsed<Request<'_>>) {
    let Some(head) = buffer.get(..HEAD_BYTES) else { return (None, Parsed::More) };
    if head[0] != REQUEST {
        return (None, Parsed::Wrong(Wrong::Lost, buffer.len()));
    }
    let (opcode, opaque) = (head[1], [head[12], head[13], head[14], head[15]]);
    let (base, quiet) = base_of(opcode);
    let answer = Head { opcode, opaque, quiet, with_key: matches!(opcode, 0x0C | 0x0D | 0x23 | 0x24) };
    let key_bytes = usize::from(u16::from_be_bytes([head[2], head[3]]));
    let extra_bytes = usize::from(head[4]);
    let body_bytes = u32::from_be_bytes([head[8], head[9], head[10], head[11]]) as usize;
    let whole = HEAD_BYTES + body_bytes;
    let wrong = |wrong| (Some(answer), Parsed::Wrong(wrong, whole));
    if key_bytes > KEY_MAX || key_bytes + extra_bytes > body_bytes {
        return wrong(Wrong::Format);
    }
    if body_bytes - key_bytes - extra_bytes > value_max {
        return wrong(Wrong::TooLarge);
    }
    let Some(body) = buffer.get(HEAD_BYTES..whole) else { return (Some(answer), Parsed::More) };
    let (extras, body) = body.split_at(extra_bytes);
    let (key, data) = body.split_at(key_bytes);
    let cas = number(&head[16..]);
    match request(base, extras, key, data, cas) {
        Ok(request) => (Some(answer), Parsed::Whole(request, whole)),
        Err(why) => wrong(why),
    }
}

/// The opcode without its quiet form.
fn base_of(opcode: u8) -> (u8, bool) {
    match opcode {
        0x09 => (0x00, true),
        0x0C => (0x00, false),
        0x0D => (0x00, true),
        0x11..=0x16 => (opcode - 0x10, true),
        0x17 | 0x18 => (opcode - 0x10, true),
        0x19 | 0x1A => (opcode - 0x0B, true),
        0x1E => (0x1D, true),
        0x23 => (0x1D, false),
        0x24 => (0x1D, true),
        _ => (opcode, false),
    }
}

fn request<'a>(base: u8, extras: &[u8], key: &'a [u8], data: &'a [u8], cas: u64) -> Result<Request<'a>, Wrong> {
    let verb = match base {
        0x02 => Verb::Add,
        0x03 => Verb::Replace,
        0x0E => Verb::Append,
        0x0F => Verb::Prepend,
        _ => Verb::Set,
    };
    match (base, extras, !key.is_empty(), data) {
        (0x00, [], true, []) => Ok(Request::Get { keys: vec![key], with_cas: true, touch: None }),
        (0x01..=0x03, [_, _, _, _, _, _, _, _], true, _) => {
            let (flags, expires) = (number(&extras[..4]) as u32, expires(&extras[4..]));
            Ok(Request::Store { verb, key, flags, expires, data, cas })
        }
        (0x0E | 0x0F, [], true, _) => Ok(Request::Store { verb, key, flags: 0, expires: 0, data, cas }),
        (0x04, [], true, []) => Ok(Request::Delete { key, cas }),
        (0x05 | 0x06, _, true, []) if extras.len() == 20 => {
            let (delta, first) = (number(&extras[..8]), number(&extras[8..16]));
            let initial = (extras[16..] != [0xFF; 4]).then(|| (first, expires(&extras[16..])));
            Ok(Request::Count { key, up: base == 0x05, delta, initial, cas })
        }
        (0x07, [], false, []) => Ok(Request::Quit),
        (0x08, [], false, []) => Ok(Request::Flush { delay: 0 }),
        (0x08, [_, _, _, _], false, []) => Ok(Request::Flush { delay: expires(extras) }),
        (0x0A, [], false, []) => Ok(Request::Nothing),
        (0x0B, [], false, []) => Ok(Request::Version),
        (0x10, [], _, []) => Ok(Request::Stats { what: key }),
        (0x1B, [_, _, _, _], false, []) => Ok(Request::Verbosity),
        (0x1C, [_, _, _, _], true, []) => Ok(Request::Touch { key, expires: expires(extras) }),
        (0x1D, [_, _, _, _], true, []) => {
            Ok(Request::Get { keys: vec![key], with_cas: true, touch: Some(expires(extras)) })
        }
        (0x00..=0x10 | 0x1B..=0x1D, ..) => Err(Wrong::Format),
        _ => Err(Wrong::Unknown),
    }
}

/// Big-endian.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Times are 32 bits, and negative ones are in the past.
fn expires(bytes: &[u8]) -> i64 {
    i64::from(number(bytes) as u32 as i32)
}

/// Writes an answer.
pub(crate) fn answer(out: &mut Vec<u8>, head: Head, cas: u64, extras: &[u8], key: &[u8], value: &[u8]) {
    write(out, head, Status::Fine, cas, extras, key, value);
}

/// Writes an answer that says what went wrong.
pub(crate) fn refuse(out: &mut Vec<u8>, head: Head, status: Status) {
    write(out, head, status, 0, b"", b"", status.text());
}

fn write(out: &mut Vec<u8>, head: Head, status: Status, cas: u64, extras: &[u8], key: &[u8], value: &[u8]) {
    let body_bytes = (extras.len() + key.len() + value.len()) as u32;
    out.extend([ANSWER, head.opcode]);
    out.extend((key.len() as u16).to_be_bytes());
    out.extend([extras.len() as u8, 0]);
    out.extend((status as u16).to_be_bytes());
    out.extend(body_bytes.to_be_bytes());
    out.extend(head.opaque);
    out.extend(cas.to_be_bytes());
    out.extend(extras);
    out.extend(key);
    out.extend(value);
}
