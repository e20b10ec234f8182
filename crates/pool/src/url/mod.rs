//! Parser for the language of pool URLs, as in
//! `stripe(tcp://10.0.0.7:5555, fault:drop=0.01@shm:/run/far.sock)`.
//!
//! A URL is a *leaf*, which names one member (`SCHEME:WHERE`), or a backend made of backends
//! (`NAME(URL, …)`), or `fault:SPEC@URL`. A leaf that stands alone is the whole text; inside
//! parentheses it ends at the next comma or closing parenthesis. The code that opens a leaf decides
//! what it means. This is pure logic: nothing is looked up and, before there is a [`Tree`], nothing
//! is allocated.

use crate::compose::fault::{FaultPlan, duration, duration_text};
use crate::redundant::members::WRITE_TIMEOUT;
use crate::redundant::scrub;
use core::time::Duration;
use farfield_core::chunk_word::ChunkWord;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::gf256::ErasureCode;
use farfield_core::tier_word::TierWord;
use farfield_core::{Deal, MemberSet};
use std::borrow::Cow;
use std::fmt::{self, Display};

#[cfg(any(test, feature = "conformance"))]
mod check;
pub(crate) mod size;
#[cfg(any(test, feature = "conformance"))]
pub(crate) use check::check_tree;

/// Greatest depth of backends inside backends, those with faults included.
const DEPTH_MAX: usize = 8;
/// Error text: the form of an erasure code.
const EC: &str = "an erasure code has K data and M parity members, as many URLs, and 16 with its spares at most: write \
                  ec(2,1, URL, URL, URL)";
/// Prefix of a spare.
const SPARE: &str = "spare=";
/// Prefix of the period of a scrub.
const SCRUB: &str = "scrub=";
/// Prefix, behind the parenthesis, of the time that a write waits for all members.
const WAIT: &str = "wait=";
/// Prefix, behind the parenthesis, of the size of a stripe's groups.
const GROUP: &str = "group=";
/// Shortest period of a scrub: everything that is stored cannot be read more often.
const SCRUB_MIN: Duration = Duration::from_millis(1);
/// Shortest wait of a write: a shorter one would be none.
const WAIT_MIN: Duration = Duration::from_millis(1);
/// Error text for such an option where it has no meaning.
const NO_OPTION: &str = "only mirrors, erasure codes and stripes have an option behind the parenthesis: \
                         mirror(URL, URL)?wait=5s, stripe(URL, URL)?group=1M";

/// Parsed URL.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Tree {
    /// Leaf: the URL of one member.
    Leaf(String),
    /// Backend that wraps another one with faults.
    Fault(FaultPlan, Box<Tree>),
    /// Stripe over these members, to which groups of so many pages are dealt out.
    Stripe { members: Vec<Tree>, group_pages: u64 },
    /// Mirror: all members hold the same pages, and a spare replaces a failed member. All pages are
    /// checked once in each period `scrub`. A write waits for all members for the time `wait`;
    /// `None` means until the missing ones are known to be gone.
    Mirror { members: Vec<Tree>, spares: Vec<Tree>, scrub: Option<Duration>, wait: Option<Duration> },
    /// Tiered pool: new pages lie in the first tier that has room, old ones in the next.
    Tier(Vec<Tree>),
    /// Erasure code: rows of this code, one page at each member; `scrub` and `wait` as for a
    /// mirror.
    Ec { code: ErasureCode, members: Vec<Tree>, spares: Vec<Tree>, scrub: Option<Duration>, wait: Option<Duration> },
}

impl Tree {
    pub(crate) fn parse(url: &str) -> Result<Tree, UrlError> {
        let mut tokens = Tokens::of(url);
        let tree = item(&mut tokens, 0).and_then(|tree| tokens.end().map(|()| tree));
        // People count characters.
        tree.map_err(|error| UrlError { at: url[..error.at].chars().count(), ..error })
    }

    /// Returns the number of members that the URL names.
    pub(crate) fn leaves(&self) -> usize {
        match self {
            Tree::Leaf(_) => 1,
            Tree::Fault(_, inner) => inner.leaves(),
            Tree::Stripe { members, .. } | Tree::Tier(members) => members.iter().map(Tree::leaves).sum(),
            Tree::Mirror { members, spares, .. } | Tree::Ec { members, spares, .. } => {
                members.iter().chain(spares).map(Tree::leaves).sum()
            }
        }
    }

    /// Returns the bytes for which this backend has room, without its spares.
    fn room_bytes(&self, room_of: &mut dyn FnMut(&str) -> u64) -> u64 {
        match self {
            Tree::Leaf(url) => room_of(url),
            Tree::Fault(_, inner) => inner.room_bytes(room_of),
            Tree::Stripe { members, .. } => least_room(members, room_of).saturating_mul(members.len() as u64),
            Tree::Mirror { members, .. } => least_room(members, room_of),
            Tree::Ec { code, members, .. } => least_room(members, room_of).saturating_mul(code.data() as u64),
            Tree::Tier(tiers) => tiers.iter().fold(0, |sum, tier| sum.saturating_add(tier.room_bytes(room_of))),
        }
    }
}

fn least_room(members: &[Tree], room_of: &mut dyn FnMut(&str) -> u64) -> u64 {
    members.iter().map(|member| member.room_bytes(room_of)).min().unwrap_or(0)
}

/// Returns the bytes of pages for which a pool over these URLs has room, copies and parity counted
/// once, if each of its leaves has room for `room_of(leaf)` bytes. A leaf that is named several times
/// shares its room among them. `None` if one of the URLs cannot be parsed.
pub fn room_bytes(urls: &[String], mut room_of: impl FnMut(&str) -> u64) -> Option<u64> {
    let mut members = urls.iter().map(|url| Tree::parse(url)).collect::<Result<Vec<_>, _>>().ok()?;
    let times = |leaf: &str| urls.iter().flat_map(|url| leaf_urls(url)).filter(|other| *other == leaf).count();
    let mut part_of = |leaf: &str| match room_of(leaf) {
        u64::MAX => u64::MAX,
        bytes => bytes / times(leaf).max(1) as u64,
    };
    let pool = match members.len() {
        1 => members.remove(0),
        _ => Tree::Stripe { members, group_pages: Deal::GROUP_PAGES },
    };
    Some(pool.room_bytes(&mut part_of))
}

/// Writes a URL that means the same.
impl Display for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let none = Some(scrub::PERIOD);
        match self {
            Tree::Leaf(url) => f.write_str(url),
            Tree::Fault(plan, inner) => write!(f, "fault:{plan}@{inner}"),
            Tree::Stripe { members, group_pages } => {
                write!(f, "stripe({}){}", list(members, &[], none), group_text(*group_pages))
            }
            Tree::Tier(tiers) => write!(f, "tier({})", list(tiers, &[], none)),
            Tree::Mirror { members, spares, scrub, wait } => {
                write!(f, "mirror({}){}", list(members, spares, *scrub), wait_text(*wait))
            }
            Tree::Ec { code, members, spares, scrub, wait } => {
                let (list, wait) = (list(members, spares, *scrub), wait_text(*wait));
                write!(f, "ec({},{},{list}){wait}", code.data(), code.parity())
            }
        }
    }
}

/// Returns the option behind the parenthesis; the default wait is left out.
fn wait_text(wait: Option<Duration>) -> String {
    let wait_for = || wait.map_or("all".to_owned(), duration_text);
    if wait == Some(WRITE_TIMEOUT) { String::new() } else { format!("?{WAIT}{}", wait_for()) }
}

/// Returns the option behind the parenthesis of a stripe; the default is left out.
fn group_text(pages: u64) -> String {
    let kibibytes = pages * (PAGE_BYTES as u64 / 1024);
    match (pages, kibibytes % 1024) {
        (Deal::GROUP_PAGES, _) => String::new(),
        (_, 0) => format!("?{GROUP}{}M", kibibytes / 1024),
        _ => format!("?{GROUP}{kibibytes}K"),
    }
}

/// Returns the list in parentheses; the default scrub is left out.
fn list(trees: &[Tree], spares: &[Tree], scrub: Option<Duration>) -> String {
    let spares = spares.iter().map(|spare| format!("{SPARE}{spare}"));
    let period = || scrub.map_or("off".to_owned(), duration_text);
    let scrub = (scrub != Some(scrub::PERIOD)).then(|| format!("{SCRUB}{}", period()));
    trees.iter().map(Tree::to_string).chain(spares).chain(scrub).collect::<Vec<_>>().join(",")
}

/// Error in a URL, and its place.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("at character {}: {why}", at + 1)]
pub(crate) struct UrlError {
    /// Number of bytes before the error while the text is read; number of characters in the end.
    at: usize,
    why: Cow<'static, str>,
}

/// Iterates over the leaves of a URL, in the order of the text. Allocates nothing. Ends at whatever
/// cannot be parsed.
pub fn leaf_urls(url: &str) -> impl Iterator<Item = &str> {
    let mut tokens = Tokens::of(url);
    std::iter::from_fn(move || {
        loop {
            match tokens.next().ok()?? {
                Token::Leaf(leaf) => return Some(leaf),
                Token::Fault(_) | Token::Open(_) | Token::Ec(_) | Token::Option(_) => {}
                Token::Spare | Token::Scrub(_) | Token::Close(_) => {}
            }
        }
    })
}

/// Returns `url` with each of its leaves replaced by the result of `replace`; passes on the first
/// error of `replace`.
pub fn replace_leaves<E>(url: &str, mut replace: impl FnMut(&str) -> Result<String, E>) -> Result<String, E> {
    let (mut replaced, mut copied) = (String::with_capacity(url.len()), 0);
    for leaf in leaf_urls(url) {
        let at = leaf.as_ptr() as usize - url.as_ptr() as usize;
        replaced += &url[copied..at];
        replaced += &replace(leaf)?;
        copied = at + leaf.len();
    }
    Ok(replaced + &url[copied..])
}

/// Parses one URL that stands inside `depth` others.
fn item(tokens: &mut Tokens<'_>, depth: usize) -> Result<Tree, UrlError> {
    let at = tokens.at;
    let wrong = |why: String| UrlError { at, why: why.into() };
    let inside = depth + 1;
    match tokens.next()? {
        Some(Token::Leaf(leaf)) => Ok(Tree::Leaf(leaf.to_owned())),
        Some(Token::Fault(_) | Token::Open(_) | Token::Ec(_)) if inside > DEPTH_MAX => {
            Err(wrong("backends are nested more than 8 deep: remove some of them".to_owned()))
        }
        Some(Token::Fault(spec)) => {
            Ok(Tree::Fault(FaultPlan::parse(spec).map_err(wrong)?, Box::new(item(tokens, inside)?)))
        }
        Some(Token::Open("stripe")) => match items(tokens, inside)? {
            Items { urls, spares, scrub: None, option } if spares.is_empty() => {
                let group_pages = option.parse(group)?.unwrap_or(Deal::GROUP_PAGES);
                Ok(Tree::Stripe { members: urls, group_pages })
            }
            _ => Err(wrong(
                "a stripe has no spares and no scrub: each of its members can be a mirror(URL, URL, spare=URL)"
                    .to_owned(),
            )),
        },
        Some(Token::Open("mirror")) => {
            let Items { urls: members, spares, scrub, option } = items(tokens, inside)?;
            if members.len() < 2 || members.len() + spares.len() > ChunkWord::MEMBERS_MAX {
                return Err(wrong("a mirror has 2 to 8 members, spares included: write mirror(URL, URL)".to_owned()));
            }
            let (scrub, wait) =
                (scrub.unwrap_or(Some(scrub::PERIOD)), option.parse(wait)?.unwrap_or(Some(WRITE_TIMEOUT)));
            Ok(Tree::Mirror { members, spares, scrub, wait })
        }
        Some(Token::Open("tier")) => match items(tokens, inside)? {
            Items { urls, spares, scrub: None, option: BackendOption(None) }
                if spares.is_empty() && (2..=TierWord::TIERS_MAX).contains(&urls.len()) =>
            {
                Ok(Tree::Tier(urls))
            }
            _ => Err(wrong(
                "a tiered pool has 2 to 8 tiers, the nearest first, and no spares or scrub, and no wait: write \
                 tier(lz:?size=1G, ssd:/var/tmp)"
                    .to_owned(),
            )),
        },
        Some(Token::Ec(code)) => {
            let Some(code) = code else { return Err(wrong(EC.to_owned())) };
            let Items { urls: members, spares, scrub, option } = items(tokens, inside)?;
            if members.len() != code.parts() || members.len() + spares.len() > MemberSet::MAX {
                return Err(wrong(EC.to_owned()));
            }
            let (scrub, wait) =
                (scrub.unwrap_or(Some(scrub::PERIOD)), option.parse(wait)?.unwrap_or(Some(WRITE_TIMEOUT)));
            Ok(Tree::Ec { code, members, spares, scrub, wait })
        }
        Some(Token::Open("throttle")) => throttle(tokens, inside),
        Some(Token::Option(_)) => Err(wrong("options come first: throttle(latency=100us,bandwidth=1G,URL)".to_owned())),
        Some(Token::Open(name)) => Err(wrong(format!(
            "no backend is made by {name}(…): known are stripe(URL, URL), mirror(URL, URL), ec(2,1, URL, URL, URL), \
             tier(URL, URL) and throttle(latency=100us, URL)"
        ))),
        Some(Token::Spare) => Err(wrong(
            "spare= comes after the members of a mirror or an erasure code: mirror(URL, URL, spare=URL)".to_owned(),
        )),
        Some(Token::Scrub(_)) => Err(wrong(
            "scrub= is an option of a mirror or an erasure code, after its members: mirror(URL, URL, \
             scrub=1d)"
                .to_owned(),
        )),
        Some(Token::Close(_)) | None => Err(wrong("a URL is missing, as tcp://HOST:PORT or shm:PATH".to_owned())),
    }
}

/// Parses options, a URL, and the closing parenthesis.
fn throttle(tokens: &mut Tokens<'_>, depth: usize) -> Result<Tree, UrlError> {
    let mut plan = FaultPlan::default();
    loop {
        let at = tokens.at;
        let Some(option) = tokens.take_option()? else { break };
        plan.set_throttle(option).map_err(|why| UrlError { at, why: why.into() })?;
    }
    let inner = item(tokens, depth)?;
    if !tokens.closes() {
        return tokens.wrong("a throttle is of one URL: write throttle(latency=100us,stripe(URL, URL))");
    }
    let at = tokens.at;
    match tokens.next()? {
        Some(Token::Close(Some(_))) => Err(UrlError { at, why: NO_OPTION.into() }),
        _ => Ok(Tree::Fault(plan, Box::new(inner))),
    }
}

/// Contents of a pair of parentheses.
#[derive(Default)]
struct Items<'a> {
    urls: Vec<Tree>,
    spares: Vec<Tree>,
    /// Period of the scrub, if it is given; `Some(None)` means that there shall be no scrub.
    scrub: Option<Option<Duration>>,
    option: BackendOption<'a>,
}

/// Option behind a parenthesis, if there is one, and its place.
#[derive(Default)]
struct BackendOption<'a>(Option<(usize, &'a str)>);

impl BackendOption<'_> {
    /// Parses the option, if there is one.
    fn parse<T>(&self, parse: impl FnOnce(&str) -> Result<T, String>) -> Result<Option<T>, UrlError> {
        let parse = |(at, text)| parse(text).map_err(|why| UrlError { at, why: why.into() });
        self.0.map(parse).transpose()
    }
}

/// Parses everything up to the closing parenthesis: URLs, and behind them spares and the period of
/// a scrub.
fn items<'a>(tokens: &mut Tokens<'a>, depth: usize) -> Result<Items<'a>, UrlError> {
    let mut items = Items::default();
    while !tokens.closes() {
        let at = tokens.at;
        if tokens.take_spare() {
            items.spares.push(item(tokens, depth)?);
        } else if let Some(text) = tokens.take_scrub()? {
            let why = match period(text) {
                Ok(_) if items.scrub.is_some() => "scrub= is given twice: remove one of them".into(),
                Ok(_) if items.urls.is_empty() => "scrub= comes after the members: mirror(URL, URL, scrub=1d)".into(),
                Ok(period) => {
                    items.scrub = Some(period);
                    continue;
                }
                Err(why) => why,
            };
            return Err(UrlError { at, why });
        } else if items.spares.is_empty() && items.scrub.is_none() || !tokens.wants_url {
            items.urls.push(item(tokens, depth)?);
        } else {
            return tokens.wrong("spare= and scrub= come after the members: mirror(URL, URL, spare=URL, scrub=1d)");
        }
    }
    if items.urls.is_empty() && items.spares.is_empty() {
        return tokens.wrong("the parentheses are empty: write URLs there");
    }
    let at = tokens.at + 1;
    if let Some(Token::Close(Some(text))) = tokens.next()? {
        items.option = BackendOption(Some((at, text)));
    }
    Ok(items)
}

/// Parses the option behind the parenthesis of a mirror or an erasure code.
fn wait(text: &str) -> Result<Option<Duration>, String> {
    let wrong = || {
        format!(
            "a write waits for all members for a millisecond or more, as in mirror(URL, URL)?wait=5s, or always, with \
             ?wait=all, not ?{text}"
        )
    };
    match text.strip_prefix(WAIT).ok_or_else(wrong)? {
        "all" => Ok(None),
        time => duration(time).filter(|time| *time >= WAIT_MIN).map(Some).ok_or_else(wrong),
    }
}

/// Parses the option behind the parenthesis of a stripe. Returns the number of pages of a group.
fn group(text: &str) -> Result<u64, String> {
    let (least, most) = Deal::GROUP_BYTES;
    let bytes = text.strip_prefix(GROUP).and_then(|size| size::parse(size).ok());
    let bytes = bytes.filter(|bytes| bytes.is_power_of_two() && (least..=most).contains(bytes));
    bytes.map(|bytes| bytes / PAGE_BYTES as u64).ok_or_else(|| {
        format!(
            "pages of a stripe are dealt out in groups of a power of two from 64K to 16M, as in stripe(URL, \
             URL)?group=1M, not ?{text}"
        )
    })
}

/// Parses the period of a scrub; `None` means off.
fn period(text: &str) -> Result<Option<Duration>, Cow<'static, str>> {
    match (text, duration(text)) {
        ("off", _) => Ok(None),
        (_, Some(period)) if period >= SCRUB_MIN => Ok(Some(period)),
        _ => Err(format!(
            "a scrub has a period of a millisecond or more, as in scrub=1d, scrub=12h or scrub=30min, or is off, not \
             {text:?}"
        )
        .into()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Token<'a> {
    Leaf(&'a str),
    /// `fault:SPEC@`
    Fault(&'a str),
    /// `NAME(`
    Open(&'a str),
    /// `ec(K,M,`
    Ec(Option<ErasureCode>),
    /// `NAME=VALUE,`
    Option(&'a str),
    /// `spare=`
    Spare,
    /// `scrub=PERIOD`
    Scrub(&'a str),
    /// `)`, and the text behind it after a question mark.
    Close(Option<&'a str>),
}

/// Text of a URL, read token by token.
#[derive(Clone)]
struct Tokens<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    /// Whether a URL must come next, and not a comma or a parenthesis.
    wants_url: bool,
}

impl<'a> Tokens<'a> {
    fn of(text: &'a str) -> Tokens<'a> {
        Tokens { text, at: 0, depth: 0, wants_url: true }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn wrong<T>(&self, why: &'static str) -> Result<T, UrlError> {
        Err(UrlError { at: self.at, why: why.into() })
    }

    fn skip(&mut self, letters: usize) {
        self.at += letters;
        if self.depth > 0 {
            self.at += self.rest().len() - self.rest().trim_start().len();
        }
    }

    /// Checks whether a closing parenthesis is next. It may stand in the place of a URL only
    /// directly after an opening one.
    fn closes(&self) -> bool {
        self.depth > 0 && self.rest().starts_with(')')
    }

    fn take_spare(&mut self) -> bool {
        let is_spare = self.depth > 0 && self.wants_url && self.rest().starts_with(SPARE);
        if is_spare {
            self.skip(SPARE.len());
        }
        is_spare
    }

    /// Takes `scrub=PERIOD` and the comma behind it, if it is next.
    fn take_scrub(&mut self) -> Result<Option<&'a str>, UrlError> {
        if self.depth == 0 || !self.wants_url || !self.rest().starts_with(SCRUB) {
            return Ok(None);
        }
        let value = &self.rest()[SCRUB.len()..];
        let value = &value[..value.find([',', ')', '(']).unwrap_or(value.len())];
        self.skip(SCRUB.len() + value.len());
        self.wants_url = false;
        self.comma()?;
        Ok(Some(value.trim()))
    }

    /// Takes `NAME=VALUE` and the comma behind it, if it is next.
    fn take_option(&mut self) -> Result<Option<&'a str>, UrlError> {
        let rest = self.rest();
        let name = rest.bytes().take_while(u8::is_ascii_alphanumeric).count();
        if self.depth == 0 || !self.wants_url || name == 0 || !rest[name..].starts_with('=') {
            return Ok(None);
        }
        let end = rest.find([',', ')', '(']).unwrap_or(rest.len());
        if !rest[end..].starts_with(',') {
            return self.wrong("a comma and a URL must follow the option: throttle(latency=100us,URL)");
        }
        self.skip(end + 1);
        Ok(Some(rest[..end].trim_end()))
    }

    /// Takes `K,M,`.
    fn take_code(&mut self) -> Option<ErasureCode> {
        let mut number = || {
            let (text, _) = self.rest().split_once(',')?;
            let number = text.trim_end().parse::<usize>().ok().filter(|number| (1..MemberSet::MAX).contains(number))?;
            self.skip(text.len() + 1);
            Some(number)
        };
        let (data, parity) = (number()?, number()?);
        (data + parity <= MemberSet::MAX).then(|| ErasureCode::new(data, parity))
    }

    /// Checks that nothing is left.
    fn end(&self) -> Result<(), UrlError> {
        if self.rest().is_empty() { Ok(()) } else { self.wrong("the URL ends here: remove the rest") }
    }

    /// Returns the next token; `None` when the text has ended where it may.
    fn next(&mut self) -> Result<Option<Token<'a>>, UrlError> {
        if !self.wants_url {
            return self.behind_url();
        }
        let rest = self.rest();
        if let Some(spec) = rest.strip_prefix("fault:") {
            let Some(end) = spec.find('@') else { return self.wrong("write fault:SPEC@URL") };
            self.skip("fault:@".len() + end);
            return Ok(Some(Token::Fault(&spec[..end])));
        }
        if self.take_spare() {
            return Ok(Some(Token::Spare));
        }
        if let Some(period) = self.take_scrub()? {
            return Ok(Some(Token::Scrub(period)));
        }
        if let Some(option) = self.take_option()? {
            return Ok(Some(Token::Option(option)));
        }
        let name = rest.find(|letter: char| !letter.is_ascii_alphanumeric()).map_or(rest, |end| &rest[..end]);
        if !name.is_empty() && rest[name.len()..].starts_with('(') {
            self.depth += 1;
            self.skip(name.len() + 1);
            return Ok(Some(if name == "ec" { Token::Ec(self.take_code()) } else { Token::Open(name) }));
        }
        let end = if self.depth == 0 { rest.len() } else { rest.find([',', ')', '(']).unwrap_or(rest.len()) };
        let leaf = &rest[..end];
        if rest[end..].starts_with('(') {
            self.at += end;
            return self
                .wrong("a path with a parenthesis or a comma must stand alone: give it a link with another name");
        }
        if leaf.trim_end().is_empty() {
            // The caller refuses `NAME()`; elsewhere something is missing.
            if self.closes() && self.text[..self.at].trim_end().ends_with('(') {
                return self.behind_url();
            }
            return self.wrong("a URL is missing, as tcp://HOST:PORT or shm:PATH");
        }
        let leaf = if self.depth == 0 { leaf } else { leaf.trim_end() };
        self.skip(leaf.len());
        self.wants_url = false;
        // A comma belongs to the token that it ends, so that the next token is visible after it.
        self.comma()?;
        Ok(Some(Token::Leaf(leaf)))
    }

    fn behind_url(&mut self) -> Result<Option<Token<'a>>, UrlError> {
        if self.depth == 0 {
            self.end()?;
            return Ok(None);
        }
        if !self.closes() {
            return self.wrong("a comma or a closing parenthesis is missing");
        }
        self.depth -= 1;
        self.wants_url = false;
        let option = self.rest()[1..].strip_prefix('?');
        let option = option.map(|text| &text[..text.find([',', ')', '(']).unwrap_or(text.len())]);
        self.skip(1 + option.map_or(0, |option| 1 + option.len()));
        self.comma()?;
        Ok(Some(Token::Close(option.map(str::trim_end))))
    }

    fn comma(&mut self) -> Result<(), UrlError> {
        if self.depth > 0 && self.rest().starts_with(',') {
            self.skip(1);
            self.wants_url = true;
            if self.closes() {
                return self.wrong("a URL must follow the comma, as tcp://HOST:PORT or shm:PATH");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a pool that is another one than its URL says, and errors that do not tell what to write instead.
    use super::*;

    fn leaf(text: &str) -> Tree {
        Tree::Leaf(text.to_owned())
    }

    fn stripe(members: Vec<Tree>) -> Tree {
        Tree::Stripe { members, group_pages: 16 }
    }

    fn error(url: &str) -> String {
        Tree::parse(url).expect_err(url).to_string()
    }

    #[test]
    fn a_leaf_alone_is_the_whole_text() {
        for url in ["ram:", "shm:/run/a,b(c) d", "tcp://[::1]:5555", "unix:@far", "10.0.0.7", "shm:/x "] {
            assert_eq!(Tree::parse(url), Ok(leaf(url)));
        }
    }

    #[test]
    fn backends_stand_in_backends() {
        let inner = stripe(vec![leaf("unix:@b"), leaf("tcp://[::1]:9")]);
        assert_eq!(Tree::parse("stripe(ram:)"), Ok(stripe(vec![leaf("ram:")])));
        let tree = stripe(vec![leaf("shm:/a b"), inner, leaf("ram:")]);
        assert_eq!(Tree::parse("stripe( shm:/a b , stripe(unix:@b,tcp://[::1]:9) ,ram: )"), Ok(tree.clone()));
        assert_eq!(tree.leaves(), 4);
    }

    #[test]
    fn throttles_have_options() {
        let throttled = |spec: &str, tree| Tree::Fault(FaultPlan::parse(spec).unwrap(), Box::new(tree));
        let tree = stripe(vec![leaf("a:"), throttled("delay=2us,bandwidth=2097152", leaf("b:"))]);
        assert_eq!(Tree::parse("stripe(a:,throttle( latency=2us , bandwidth=2M, b:))"), Ok(tree));
        assert_eq!(Tree::parse("throttle(a:)"), Ok(throttled("", leaf("a:"))));
        assert_eq!(leaf_urls("throttle(bandwidth=2M,stripe(a:,b:))").collect::<Vec<_>>(), ["a:", "b:"]);
    }

    #[test]
    fn mirrors_have_spares() {
        let (scrub, wait) = (Some(scrub::PERIOD), Some(WRITE_TIMEOUT));
        let mirror = |members: Vec<Tree>, spares: Vec<Tree>| Tree::Mirror { members, spares, scrub, wait };
        assert_eq!(Tree::parse("mirror(a:, b:)"), Ok(mirror(vec![leaf("a:"), leaf("b:")], vec![])));
        let stripe = stripe(vec![leaf("b:"), leaf("c:")]);
        let tree = mirror(vec![leaf("a:"), stripe], vec![leaf("d:"), leaf("e:")]);
        assert_eq!(Tree::parse("mirror(a:, stripe(b:,c:), spare=d:, spare= e:)"), Ok(tree.clone()));
        assert_eq!(tree.leaves(), 5);
        assert_eq!(Tree::parse("spare=a"), Ok(leaf("spare=a")));
    }

    #[test]
    fn tiers_have_an_order() {
        let tree = Tree::Tier(vec![leaf("lz:?size=1G"), stripe(vec![leaf("b:"), leaf("c:")]), leaf("d:")]);
        assert_eq!(Tree::parse("tier(lz:?size=1G, stripe(b:,c:), d:)"), Ok(tree.clone()));
        assert_eq!(tree.leaves(), 4);
        for url in ["tier(a:)", "tier(a:,b:,spare=c:)", "tier(a:,b:,c:,d:,e:,f:,g:,h:,i:)"] {
            assert!(error(url).contains("2 to 8 tiers"), "{url}");
        }
    }

    #[test]
    fn erasure_codes_have_numbers() {
        let members = |names: &[&str]| names.iter().map(|name| leaf(name)).collect::<Vec<_>>();
        let (code, scrub) = (ErasureCode::new(2, 1), Some(scrub::PERIOD));
        let wait = Some(WRITE_TIMEOUT);
        let tree = Tree::Ec { code, members: members(&["a:", "b:", "c:"]), spares: members(&["d:"]), scrub, wait };
        assert_eq!(Tree::parse("ec( 2 , 1, a:, b:, c:, spare=d:)"), Ok(tree.clone()));
        assert_eq!(tree.leaves(), 4);
        assert_eq!(
            leaf_urls("stripe(ec(2,1,a:,b:,c:,spare=d:),e:)").collect::<Vec<_>>(),
            ["a:", "b:", "c:", "d:", "e:"]
        );
    }

    #[test]
    fn room_is_that_of_the_member_that_is_full_first() {
        let room = |urls: &[&str]| {
            let urls: Vec<String> = urls.iter().map(|url| (*url).to_owned()).collect();
            room_bytes(&urls, |leaf| match leaf {
                "ssd:" => u64::MAX,
                _ => leaf.trim_end_matches(':').parse().unwrap(),
            })
        };
        assert_eq!(room(&["10:"]), Some(10));
        assert_eq!(room(&["10:", "30:"]), Some(20));
        assert_eq!(room(&["mirror(10:,30:,spare=1:)"]), Some(10));
        assert_eq!(room(&["ec(2,1,10:,20:,30:)"]), Some(20));
        assert_eq!(room(&["stripe(mirror(10:,11:),throttle(latency=1ms,30:))"]), Some(20));
        assert_eq!(room(&["tier(10:,30:)"]), Some(40));
        assert_eq!(room(&["tier(10:,ssd:)"]), Some(u64::MAX));
        assert_eq!(room(&["ssd:", "ssd:"]), Some(u64::MAX));
        assert_eq!(room(&["mirror(ssd:,5:)"]), Some(5));
        assert_eq!(room(&["stripe(10:,10:)"]), Some(10), "one server, named twice");
        assert_eq!((room(&["stripe("]), room(&["10:", ""])), (None, None));
    }

    #[test]
    fn scrubs_have_a_period() {
        let period = |url: &str| match Tree::parse(url) {
            Ok(Tree::Mirror { scrub, .. } | Tree::Ec { scrub, .. }) => scrub.map(|period| period.as_secs()),
            other => panic!("{url}: {other:?}"),
        };
        assert_eq!(period("mirror(a:,b:)"), Some(86_400));
        assert_eq!(period("mirror(a:,b:,scrub=12h)"), Some(12 * 3600));
        assert_eq!(period("mirror(a:,b:, scrub=7d ,spare=c:)"), Some(7 * 86_400));
        assert_eq!(period("ec(2,1,a:,b:,c:,spare=d:,scrub=30min)"), Some(1800));
        assert_eq!(period("ec(1,1,a:,b:,scrub=off)"), None);
        assert_eq!(
            leaf_urls("stripe(mirror(a:,b:,scrub=1d,spare=c:),d:)").collect::<Vec<_>>(),
            ["a:", "b:", "c:", "d:"]
        );
        assert_eq!(Tree::parse("scrub=a"), Ok(leaf("scrub=a")));
    }

    #[test]
    fn faults_have_commas_of_their_own() {
        let plan = FaultPlan::parse("drop=0.5,seed=3").unwrap();
        let faulty = |tree| Tree::Fault(plan, Box::new(tree));
        assert_eq!(Tree::parse("fault:drop=0.5,seed=3@unix:@a,b"), Ok(faulty(leaf("unix:@a,b"))));
        let of_faulty = stripe(vec![faulty(leaf("unix:@a")), leaf("b:")]);
        assert_eq!(Tree::parse("stripe(fault:drop=0.5,seed=3@unix:@a,b:)"), Ok(of_faulty));
        let wrapped = stripe(vec![leaf("a:"), leaf("b:")]);
        assert_eq!(Tree::parse("fault:drop=0.5,seed=3@stripe(a:,b:)"), Ok(faulty(wrapped)));
    }

    #[test]
    fn errors_say_where_and_what_to_write() {
        for (url, at, what) in [
            ("", 1, "URL is missing"),
            ("stripe(", 8, "URL is missing"),
            ("stripe()", 8, "write URLs there"),
            ("stripe(a:,)", 11, "URL must follow"),
            ("stripe(a:,,b:)", 11, "URL is missing"),
            ("stripe(a:", 10, "closing parenthesis"),
            ("stripe(a:)b:", 11, "remove the rest"),
            ("stripe(a:))", 11, "remove the rest"),
            ("stripe(stripe(a:)b:)", 18, "comma"),
            ("stripe(a:,strip(b:))", 11, "stripe(URL, URL)"),
            ("mirror(a:)", 1, "2 to 8 members"),
            ("throttle(latency=3ms)", 10, "comma and a URL"),
            ("throttle(latency=3,a:)", 10, "no duration"),
            ("throttle(latency=3ms,delay=3ms,a:)", 22, "latency=100us"),
            ("throttle(latency=3ms,a:,b:)", 25, "one URL"),
            ("stripe(a:,bandwidth=1G,b:)", 11, "options come first"),
            ("stripe(a:,mirror(a:,a:,a:,a:,a:,spare=a:,spare=a:,a:))", 51, "after the members"),
            ("mirror(a:,a:,a:,a:,a:,a:,a:,a:,spare=a:)", 1, "2 to 8 members"),
            ("stripe(a:,spare=b:)", 1, "no spares"),
            ("ec(2,1,a:,b:)", 1, "ec(2,1, URL"),
            ("ec(a:,b:)", 1, "ec(2,1, URL"),
            ("ec(2,0,a:,b:)", 1, "ec(2,1, URL"),
            ("ec(15,2,a:,b:)", 1, "ec(2,1, URL"),
            ("stripe(ec(1,1,a:,b:,spare=c:,d:),e:)", 30, "after the members"),
            ("mirror(a:,fault:die=1@spare=b:)", 23, "after the members"),
            ("mirror(a:,b:,scrub=x)", 14, "scrub=1d"),
            ("mirror(a:,b:,scrub=0s)", 14, "a millisecond or more"),
            ("mirror(a:,b:,scrub=)", 14, "scrub=1d"),
            ("mirror(a:,b:,scrub=1d,scrub=2d)", 23, "given twice"),
            ("mirror(scrub=1d,a:,b:)", 8, "after the members"),
            ("mirror(a:,scrub=1d,b:)", 20, "after the members"),
            ("mirror(a:,b:,scrub=1d", 22, "closing parenthesis"),
            ("mirror(a:,fault:die=1@scrub=1d,b:)", 23, "after its members"),
            ("mirror(a:,b:,scrub=99999999999999999d)", 14, "scrub=1d"),
            ("ec(1,1,a:,b:,scrub=1d,)", 23, "URL must follow"),
            ("stripe(a:,b:,scrub=1d)", 1, "no scrub"),
            ("tier(a:,b:,scrub=1d)", 1, "or scrub"),
            ("throttle(scrub=1d,a:)", 10, "latency=100us"),
            ("stripe(shm:/a(b)", 14, "link"),
            ("stripe(a:,fault:die=3)", 11, "fault:SPEC@URL"),
            ("stripe(a:,fault:die=x@b:)", 11, "whole number"),
        ] {
            let error = error(url);
            assert!(error.starts_with(&format!("at character {at}:")) && error.contains(what), "{url}: {error}");
        }
        assert!(Tree::parse(&format!("{}a:{}", "stripe(".repeat(8), ")".repeat(8))).is_ok());
        for (name, at) in [("stripe(", 57), ("fault:@", 57), ("throttle(fault:@", 65), ("ec(1,1,", 57)] {
            let error = error(&name.repeat(100_000));
            assert!(error.contains("8 deep") && error.starts_with(&format!("at character {at}:")), "{name}: {error}");
        }
        assert!(error("stripe(é:,ü:,)").starts_with("at character 14:"), "letters, not bytes");
    }

    #[test]
    fn the_wait_option_follows_the_parenthesis() {
        let wait = |url: &str| match Tree::parse(url).unwrap() {
            Tree::Mirror { wait, .. } | Tree::Ec { wait, .. } => wait,
            other => panic!("{other}"),
        };
        assert_eq!(wait("mirror(a:,b:)"), Some(WRITE_TIMEOUT));
        assert_eq!(wait("mirror(a:,b:,scrub=off)?wait=5s"), Some(Duration::from_secs(5)));
        assert_eq!(wait("ec(1,1,a:,b:)?wait=all"), None);
        for url in ["mirror(a:,b:)?wait=0s", "mirror(a:,b:)?wait", "ec(1,1,a:,b:)?scrub=1d", "mirror(a:,b:)?"] {
            assert!(error(url).contains("?wait=5s"), "{url}: {}", error(url));
        }
        for url in ["stripe(a:,b:)?wait=5s", "tier(a:,b:)?wait=all", "throttle(a:)?wait=5s"] {
            assert!(error(url).contains("wait"), "{url}: {}", error(url));
        }
    }

    #[test]
    fn groups_of_a_stripe_are_powers_of_two() {
        let group = |url: &str| match Tree::parse(url).unwrap() {
            Tree::Stripe { group_pages, .. } => group_pages,
            other => panic!("{other}"),
        };
        for (text, pages) in
            [("", 16), ("?group=64K", 16), ("?group=128k", 32), ("?group=1M", 256), ("?group=16MiB", 4096)]
        {
            assert_eq!(group(&format!("stripe(a:,b:){text}")), pages, "{text}");
        }
        for text in ["group=32K", "group=32M", "group=96K", "group=1", "group=0K", "group=", "group", "", "Group=1M"] {
            let error = error(&format!("stripe(a:,b:)?{text}"));
            assert!(error.starts_with("at character 14:") && error.contains("from 64K to 16M"), "{error}");
            assert!(error.ends_with(&format!("not ?{text}")), "{error}");
        }
        for url in ["mirror(a:,b:)?group=1M", "ec(1,1,a:,b:)?group=1M", "tier(a:,b:)?group=1M", "throttle(a:)?group=1M"]
        {
            assert!(error(url).contains("wait"), "{url}: {}", error(url));
        }
    }

    #[test]
    fn a_url_can_be_said_again() {
        for (url, again) in [
            ("shm:/x ", "shm:/x "),
            ("stripe( a: , tier(b:,c:) )", "stripe(a:,tier(b:,c:))"),
            ("mirror(a:,b:,spare= c:)", "mirror(a:,b:,spare=c:)"),
            ("mirror(a:,b:,scrub= 48h ,spare= c:)", "mirror(a:,b:,spare=c:,scrub=2d)"),
            ("ec( 2 , 1, a:,b:,c:, spare=d:, scrub=off)", "ec(2,1,a:,b:,c:,spare=d:,scrub=off)"),
            ("mirror(a:,b:)?wait=500ms", "mirror(a:,b:)"),
            ("stripe(a:,b:)?group=64K", "stripe(a:,b:)"),
            ("stripe( stripe(a:)?group=1024k , b: )?group=512K", "stripe(stripe(a:)?group=1M,b:)?group=512K"),
            (
                "stripe(mirror(a:,b:)?wait=5000ms , ec(1,1,c:,d:)?wait=all)",
                "stripe(mirror(a:,b:)?wait=5s,ec(1,1,c:,d:)?wait=all)",
            ),
            ("throttle(latency=3000us, bandwidth=1K, a:)", "fault:delay=3ms,bandwidth=1024@a:"),
            ("fault:full=0,seed=7,corrupt=0.001,drop=1,die=3@a:", "fault:drop=1.0,corrupt=0.001,die=3,seed=7@a:"),
        ] {
            assert_eq!(Tree::parse(url).unwrap().to_string(), again);
            crate::check_url(url);
        }
    }

    #[test]
    fn leaves_are_replaced_where_they_stand() {
        let url = "stripe(tcp://a:1, fault:drop=0.5,seed=3@stripe(shm:/b) , ram:)";
        assert_eq!(leaf_urls(url).collect::<Vec<_>>(), ["tcp://a:1", "shm:/b", "ram:"]);
        let replaced = replace_leaves(url, |leaf| Ok::<_, ()>(leaf.to_uppercase())).unwrap();
        assert_eq!(replaced, "stripe(TCP://A:1, fault:drop=0.5,seed=3@stripe(SHM:/B) , RAM:)");
        assert_eq!(replace_leaves(url, |_| Err::<String, _>("no")), Err("no"));
    }

    #[test]
    fn any_text_is_understood_or_refused() {
        let seed = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed_u64);
        println!("FARFIELD_SEED={seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut below = |limit: usize| random.usize(..limit);
        let words = [
            "stripe(",
            "mirror(",
            "throttle(",
            "ec(1,1,",
            "spare=",
            "scrub=1d",
            ")?wait=5s",
            ")?group=1M",
            "?wait=all",
            "latency=3ms",
            "(",
            ")",
            ",",
            " ",
            "ram:",
            "fault:",
            "tier(",
            "die=3",
            "@",
            "shm:/a",
            "=",
            "é",
            "a",
        ];
        let mut understood = 0;
        for _ in 0..100_000 {
            let url: String = (0..below(9)).map(|_| words[below(words.len())]).collect();
            understood += usize::from(crate::check_url(&url));
        }
        assert!(understood > 1000, "{understood}");
    }

    #[test]
    fn a_url_that_is_wrong_somewhere_is_understood_or_refused() {
        let url = "stripe(throttle(latency=3ms,bandwidth=1G,ec(1,1,ram:,tcp://[::1]:9,spare=ssd:/é?size=1G&io=pread)), \
             stripe(tier(lz:?size=1G,numa:0?size=1G), b:)?group=2M, fault:drop=0.5,seed=3@mirror(dax:/a?file=erase,unix:@b,spare=ram:,scrub=3h)?wait=2s)";
        assert!(crate::check_url(url));
        for (at, letter) in url.char_indices() {
            let (before, behind) = (&url[..at], &url[at + letter.len_utf8()..]);
            crate::check_url(before);
            crate::check_url(behind);
            crate::check_url(&format!("{before}{behind}"));
            for other in ["(", ")", ",", "@", "=", " ", "9999999999999999999", "é", "\0", "fault:@", "stripe("] {
                crate::check_url(&format!("{before}{other}{behind}"));
                crate::check_url(&format!("{before}{other}{letter}{behind}"));
            }
        }
    }
}
