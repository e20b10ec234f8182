//! Carrying requests out and answering them: what the protocols have in common, and how each says it.

use super::binary::{self, Head, Status};
use super::cache::{Cache, Failure, Record};
use super::request::{Outcome, Parsed, Request, Wrong};
use super::text;
use std::fmt::Write as _;

/// What becomes of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// This many bytes of the buffer were used; there may be more in it, or not (0).
    Used(usize),
    /// The client said goodbye, or cannot be understood any more.
    Close,
}

/// Answers the request at the beginning of a buffer.
pub(crate) fn answer(cache: &Cache, buffer: &[u8], out: &mut Vec<u8>) -> Next {
    if buffer.first() == Some(&binary::REQUEST) {
        answer_binary(cache, buffer, out)
    } else {
        answer_text(cache, buffer, out)
    }
}

/// What a request that changes something did.
fn change(cache: &Cache, request: &Request<'_>) -> Result<Outcome, Failure> {
    match *request {
        Request::Store { verb, key, flags, expires, data, cas } => cache.store(verb, key, flags, expires, data, cas),
        Request::Delete { key, cas } => cache.delete(key, cas),
        Request::Count { key, up, delta, initial, cas } => cache.count(key, up, delta, initial, cas),
        Request::Touch { key, expires } => cache.touch(key, expires),
        Request::Flush { delay } => {
            cache.flush(delay);
            Ok(Outcome::Done(0))
        }
        Request::Get { .. } | Request::Stats { .. } | Request::Version => unreachable!("answered before"),
        Request::Verbosity | Request::Nothing | Request::Quit => Ok(Outcome::Done(0)),
    }
}

/// The protocols are those of memcached 1.6; clients look at the numbers.
const VERSION: &str = concat!("1.6.0-farfield-", env!("CARGO_PKG_VERSION"));

fn answer_text(cache: &Cache, buffer: &[u8], out: &mut Vec<u8>) -> Next {
    let (request, quiet, used) = match text::parse(buffer, cache.limits.value_max) {
        Parsed::More => return Next::Used(0),
        Parsed::Whole((request, quiet), used) => (request, quiet, used),
        Parsed::Wrong(wrong, used) => {
            out.extend(match wrong {
                Wrong::Unknown => &b"ERROR\r\n"[..],
                Wrong::Format => b"CLIENT_ERROR bad command line format\r\n",
                Wrong::Chunk => b"CLIENT_ERROR bad data chunk\r\n",
                Wrong::Delta => b"CLIENT_ERROR invalid numeric delta argument\r\n",
                Wrong::Exptime => b"CLIENT_ERROR invalid exptime argument\r\n",
                Wrong::TooLarge => b"SERVER_ERROR object too large for cache\r\n",
                Wrong::Lost => b"CLIENT_ERROR line too long\r\n",
            });
            return if wrong == Wrong::Lost { Next::Close } else { Next::Used(used) };
        }
    };
    let start = out.len();
    match &request {
        Request::Quit => return Next::Close,
        Request::Version => out.extend(format!("VERSION {VERSION}\r\n").bytes()),
        Request::Stats { what: b"" } => {
            cache.stats().iter().for_each(|(name, value)| out.extend(format!("STAT {name} {value}\r\n").bytes()));
            out.extend(format!("STAT version {VERSION}\r\nEND\r\n").bytes());
        }
        Request::Stats { what: b"reset" } => out.extend(b"RESET\r\n"),
        Request::Stats { .. } => out.extend(b"END\r\n"),
        Request::Get { keys, with_cas, touch } => match get_text(cache, keys, *with_cas, *touch, out) {
            Ok(()) => out.extend(b"END\r\n"),
            Err(failure) => {
                out.truncate(start);
                refuse_text(out, failure);
            }
        },
        _ => match change(cache, &request) {
            Ok(outcome) => say(&request, outcome, out),
            Err(failure) => refuse_text(out, failure),
        },
    }
    if quiet {
        out.truncate(start);
    }
    Next::Used(used)
}

fn get_text(
    cache: &Cache,
    keys: &[&[u8]],
    with_cas: bool,
    touch: Option<i64>,
    out: &mut Vec<u8>,
) -> Result<(), Failure> {
    let mut tell = |key: &[u8], record: Record<'_>| {
        let mut head = format!(" {} {}", record.flags, record.data.len());
        if with_cas {
            // Writing to a string does not fail.
            let _ = write!(head, " {}", record.cas);
        }
        out.extend(b"VALUE ");
        out.extend(key);
        out.extend(head.as_bytes());
        out.extend(b"\r\n");
        out.extend(record.data);
        out.extend(b"\r\n");
    };
    let Some(expires) = touch else { return cache.get_many(keys, tell) };
    for key in keys {
        if cache.touch(key, expires)? != Outcome::NotFound {
            cache.get(key, |record| tell(key, record))?;
        }
    }
    Ok(())
}

fn say(request: &Request<'_>, outcome: Outcome, out: &mut Vec<u8>) {
    let text: &[u8] = match (outcome, request) {
        (Outcome::Done(_), Request::Store { .. }) => b"STORED\r\n",
        (Outcome::Done(_), Request::Delete { .. }) => b"DELETED\r\n",
        (Outcome::Done(_), Request::Touch { .. }) => b"TOUCHED\r\n",
        (Outcome::Done(_), _) => b"OK\r\n",
        (Outcome::Number(number, _), _) => return out.extend(format!("{number}\r\n").bytes()),
        (Outcome::NotStored, _) => b"NOT_STORED\r\n",
        (Outcome::NotFound, _) => b"NOT_FOUND\r\n",
        (Outcome::Exists, _) => b"EXISTS\r\n",
        (Outcome::NotNumber, _) => b"CLIENT_ERROR cannot increment or decrement non-numeric value\r\n",
    };
    out.extend(text);
}

fn refuse_text(out: &mut Vec<u8>, failure: Failure) {
    match failure {
        Failure::Full => out.extend(b"SERVER_ERROR out of memory storing object\r\n"),
        Failure::Far(error) => out.extend(format!("SERVER_ERROR {error}\r\n").bytes()),
    }
}

fn answer_binary(cache: &Cache, buffer: &[u8], out: &mut Vec<u8>) -> Next {
    let (head, parsed) = binary::parse(buffer, cache.limits.value_max);
    let (Some(head), (request, used)) = (
        head,
        match parsed {
            Parsed::More => return Next::Used(0),
            Parsed::Whole(request, used) => (request, used),
            Parsed::Wrong(Wrong::Lost, _) => return Next::Close,
            Parsed::Wrong(wrong, used) => {
                let Some(head) = head else { return Next::Close };
                binary::refuse(
                    out,
                    head,
                    match wrong {
                        Wrong::Unknown => Status::Unknown,
                        Wrong::TooLarge => Status::TooLarge,
                        _ => Status::Invalid,
                    },
                );
                return Next::Used(used);
            }
        },
    ) else {
        return Next::Close;
    };
    let start = out.len();
    match &request {
        Request::Quit => {
            if !head.quiet {
                binary::answer(out, head, 0, b"", b"", b"");
            }
            return Next::Close;
        }
        Request::Version => binary::answer(out, head, 0, b"", b"", VERSION.as_bytes()),
        Request::Stats { what } => {
            let stats = if what.is_empty() { cache.stats() } else { Vec::new() };
            for (name, value) in stats {
                binary::answer(out, head, 0, b"", name.as_bytes(), value.to_string().as_bytes());
            }
            // An empty one is the end.
            binary::answer(out, head, 0, b"", b"", b"");
        }
        Request::Get { keys, touch, .. } => get_binary(cache, head, keys[0], *touch, out),
        _ => {
            let result = change(cache, &request);
            let is_fine = matches!(result, Ok(Outcome::Done(_) | Outcome::Number(..)));
            say_binary(out, head, result);
            if head.quiet && is_fine {
                out.truncate(start);
            }
        }
    }
    Next::Used(used)
}

fn get_binary(cache: &Cache, head: Head, key: &[u8], touch: Option<i64>, out: &mut Vec<u8>) {
    let name: &[u8] = if head.with_key { key } else { b"" };
    let found = match touch.map(|expires| cache.touch(key, expires)) {
        Some(Ok(Outcome::NotFound)) => Ok(false),
        Some(Err(failure)) => Err(failure),
        _ => cache.get(key, |record| {
            binary::answer(out, head, record.cas, &record.flags.to_be_bytes(), name, record.data);
        }),
    };
    match found {
        Ok(true) => {}
        Ok(false) if head.quiet => {}
        Ok(false) => binary::refuse(out, head, Status::NotFound),
        Err(failure) => say_binary(out, head, Err(failure)),
    }
}

fn say_binary(out: &mut Vec<u8>, head: Head, result: Result<Outcome, Failure>) {
    let status = match result {
        Ok(Outcome::Done(cas)) => return binary::answer(out, head, cas, b"", b"", b""),
        Ok(Outcome::Number(number, cas)) => return binary::answer(out, head, cas, b"", b"", &number.to_be_bytes()),
        // The binary protocol says which of the two it was.
        Ok(Outcome::NotStored) => match head.opcode {
            0x02 | 0x12 => Status::Exists,
            0x03 | 0x13 => Status::NotFound,
            _ => Status::NotStored,
        },
        Ok(Outcome::NotFound) => Status::NotFound,
        Ok(Outcome::Exists) => Status::Exists,
        Ok(Outcome::NotNumber) => Status::NotNumber,
        Err(Failure::Full) => Status::OutOfMemory,
        Err(Failure::Far(_)) => Status::Failed,
    };
    binary::refuse(out, head, status);
}
