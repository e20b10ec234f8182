//! What clients ask for, in either protocol, and what became of it.

/// How a value is put in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verb {
    /// In any case.
    Set,
    /// If there is none.
    Add,
    /// If there is one.
    Replace,
    /// Behind the one that is there.
    Append,
    /// Before the one that is there.
    Prepend,
}

/// One request. `cas` is 0 if any version will do; `quiet` requests are answered only in part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Request<'a> {
    /// Values of keys; with `touch`, they get a new time to live.
    Get {
        keys: Vec<&'a [u8]>,
        with_cas: bool,
        touch: Option<i64>,
    },
    Store {
        verb: Verb,
        key: &'a [u8],
        flags: u32,
        expires: i64,
        data: &'a [u8],
        cas: u64,
    },
    Delete {
        key: &'a [u8],
        cas: u64,
    },
    /// Adds to a number, or begins with `initial` and its time to live.
    Count {
        key: &'a [u8],
        up: bool,
        delta: u64,
        initial: Option<(u64, i64)>,
        cas: u64,
    },
    Touch {
        key: &'a [u8],
        expires: i64,
    },
    Flush {
        delay: i64,
    },
    Stats {
        what: &'a [u8],
    },
    Version,
    Verbosity,
    Nothing,
    Quit,
}

/// How a change went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Done; the version.
    Done(u64),
    /// Done; the number.
    Number(u64, u64),
    NotStored,
    NotFound,
    /// It has another version.
    Exists,
    NotNumber,
}

/// What the beginning of a buffer is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Parsed<R> {
    /// Not yet a whole request.
    More,
    /// A request, and how many bytes it is.
    Whole(R, usize),
    /// None: what to say, and how many bytes to skip, of which some may not have come yet.
    Wrong(Wrong, usize),
}

/// Why it is no request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wrong {
    Unknown,
    Format,
    Chunk,
    Delta,
    Exptime,
    TooLarge,
    /// The rest cannot be understood either.
    Lost,
}

/// Longest key.
pub(crate) const KEY_MAX: usize = 250;
