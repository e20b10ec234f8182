//! Real data: files of the folder that the environment variable `FARFIELD_DATA` names, unpacked.

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use farfield_bench::workload::NO_REAL_DATA;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek};
use std::path::Path;

/// German federal law.
pub(crate) const TEXT: &str = "text/gesetze-de.txt";
/// A real graph.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum GraphName {
    /// Links between the pages of an Italian site (LAW, Milano).
    #[value(name = "cnr-2000")]
    Cnr,
    /// Authors who have written together, in both directions (LAW, Milano).
    #[value(name = "dblp-2010")]
    Dblp,
    /// Links between pages of British sites (LAW, Milano).
    #[value(name = "uk-2007")]
    Uk,
    /// Links between the pages of a university (Barabási and others).
    #[value(name = "notre-dame")]
    NotreDame,
    /// Words of German federal law, each of which leads to the three after it.
    #[value(name = "statutes")]
    Statutes,
}

impl GraphName {
    /// Returns the file of its edges, from and to; `None` if it is made of a text.
    fn file(self) -> Option<&'static str> {
        match self {
            GraphName::Cnr => Some("graphs/cnr-2000.edges.txt"),
            GraphName::Dblp => Some("graphs/dblp-2010.edges.txt"),
            GraphName::Uk => Some("graphs/uk-2007-05-100000.edges.txt"),
            GraphName::NotreDame => Some("graphs/web-NotreDame.txt"),
            GraphName::Statutes => None,
        }
    }
}

/// Words after a word to which it leads.
const WORD_WINDOW: usize = 3;
/// What the visitors of a shop looked at (Scarab Research): numbers of eight bytes, the highest first.
pub(crate) const VIEWS: &str = "cache-traces/caffeine/scarab/scarab-recs.trace";
/// Blocks that a virtual machine read (CloudPhysics, w106): numbers of four bytes, the lowest first.
pub(crate) const REQUESTS: &str = "cache-traces/caffeine/cloud_physics/w106.trace";
/// Friends at a university (Facebook100, Princeton): the numbers of users and of pairs, then pairs, from 1 on.
pub(crate) const FRIENDS: &str = "social-graphs/socfb-Princeton12.mtx";
/// Trips of the green taxis of New York.
pub(crate) const TRIPS: &str = "nyc-green-taxi/green_tripdata_2020-04_2022-02.csv";
/// Of these: miles, fare, and all that was paid.
pub(crate) const TRIP_NUMBERS: [usize; 3] = [8, 9, 16];

/// Of these: vendor, start and end (in seconds), passengers, miles, fare, tip, and all that was paid.
pub(crate) const TRIP_COLUMNS: [usize; 8] = [0, 1, 2, 7, 8, 9, 12, 16];

/// Of these: vendor, start (in seconds), places of start and end, passengers, miles, fare and tip.
#[cfg(feature = "sql")]
pub(crate) const TRIP_PLACES: [usize; 8] = [0, 1, 5, 6, 7, 8, 9, 12];
/// Places of New York: number, borough, name.
pub(crate) const PLACES: &str = "nyc-green-taxi/taxi_zone_centroids.csv";

/// Answers that others found in these files.
pub(crate) const ANSWERS: &str = "reference_answers.json";

/// Dollars and miles as whole cents and hundredths, so that sums are exact in any order. (0.0 takes the sign of a zero away.)
pub(crate) fn in_hundredths(numbers: &mut [f64]) {
    numbers.iter_mut().for_each(|number| *number = (*number * 100.0).round() + 0.0);
}

pub(crate) fn open(name: &str) -> Result<BufReader<File>> {
    let folder = std::env::var_os("FARFIELD_DATA")
        .with_context(|| format!("{NO_REAL_DATA}: set FARFIELD_DATA to its folder"))?;
    let file = File::open(Path::new(&folder).join(name));
    Ok(BufReader::new(file.with_context(|| format!("{NO_REAL_DATA}: {name} in the folder of FARFIELD_DATA"))?))
}

/// The edges of a graph in the order of its file, and how many vertices it has.
pub(crate) fn graph(name: GraphName) -> Result<(Vec<[u32; 2]>, usize)> {
    match name.file() {
        Some(file) => links(open(file)?),
        None => neighbours_in(open(TEXT)?),
    }
}

/// Returns the pairs of words of a text of which one is shortly before the other, each once, in order of their numbers. Words
/// are runs of letters, whose case does not matter, and have numbers in the order in which they come.
fn neighbours_in(mut text: impl BufRead) -> Result<(Vec<[u32; 2]>, usize)> {
    let (mut numbers, mut pairs) = (HashMap::new(), HashSet::new());
    let (mut before, mut line) = (VecDeque::with_capacity(WORD_WINDOW + 1), String::new());
    while text.read_line(&mut line)? > 0 {
        let is_letter = |letter: char| letter.is_alphanumeric() && !letter.is_ascii_digit();
        for word in line.to_lowercase().split(|letter| !is_letter(letter)).filter(|word| !word.is_empty()) {
            let next = numbers.len() as u32;
            let word = match numbers.get(word) {
                Some(number) => *number,
                None => *numbers.entry(word.to_owned()).or_insert(next),
            };
            pairs.extend(before.iter().map(|earlier| [*earlier, word]));
            before.push_back(word);
            if before.len() > WORD_WINDOW {
                before.pop_front();
            }
        }
        line.clear();
    }
    let mut pairs: Vec<[u32; 2]> = pairs.into_iter().collect();
    pairs.sort_unstable();
    Ok((pairs, numbers.len()))
}

/// The pairs of friends of a social network, and how many users it has.
pub(crate) fn friends() -> Result<(Vec<[u32; 2]>, usize)> {
    let (mut file, mut first) = (open(FRIENDS)?, String::new());
    file.read_line(&mut first)?;
    let users: usize =
        first.split_ascii_whitespace().next().and_then(|users| users.parse().ok()).context("no users")?;
    let (mut pairs, _) = links(file)?;
    for end in pairs.iter_mut().flatten() {
        *end =
            end.checked_sub(1).filter(|end| (*end as usize) < users).context("a pair has a user that is not there")?;
    }
    Ok((pairs, users))
}

fn links(mut file: impl BufRead) -> Result<(Vec<[u32; 2]>, usize)> {
    let (mut links, mut line) = (Vec::new(), String::new());
    while file.read_line(&mut line)? > 0 {
        if line.starts_with('#') {
            line.clear();
            continue;
        }
        let mut ends = line.split_ascii_whitespace().map(str::parse);
        let (Some(Ok(from)), Some(Ok(to)), None) = (ends.next(), ends.next(), ends.next()) else {
            anyhow::bail!("no link: {line:?}");
        };
        links.push([from, to]);
        line.clear();
    }
    let vertices = links.iter().flatten().max().map_or(0, |last| *last as usize + 1);
    Ok((links, vertices))
}

/// Numbers of `N` bytes in a file that begins again when it ends.
pub(crate) struct Numbers<F, const N: usize> {
    file: F,
    decode: fn([u8; N]) -> u64,
}

impl<F: Read + Seek, const N: usize> Numbers<F, N> {
    pub(crate) fn new(file: F, decode: fn([u8; N]) -> u64) -> Numbers<F, N> {
        Numbers { file, decode }
    }

    pub(crate) fn next(&mut self) -> Result<u64> {
        let mut bytes = [0; N];
        if let Err(error) = self.file.read_exact(&mut bytes) {
            ensure!(error.kind() == ErrorKind::UnexpectedEof, error);
            self.file.rewind()?;
            self.file.read_exact(&mut bytes).context("there is no number in the file")?;
        }
        Ok((self.decode)(bytes))
    }
}

/// These columns of a table, row by row; what is missing in it is 0, and it begins again when it ends.
pub(crate) struct Rows<F, const N: usize> {
    file: F,
    columns: [usize; N],
    line: String,
}

impl<F: BufRead + Seek, const N: usize> Rows<F, N> {
    pub(crate) fn new(file: F, columns: [usize; N]) -> Rows<F, N> {
        Rows { file, columns, line: String::new() }
    }

    pub(crate) fn next(&mut self) -> Result<[f64; N]> {
        if self.line.is_empty() {
            self.file.read_line(&mut self.line)?; // The names of the columns.
        }
        self.line.clear();
        if self.file.read_line(&mut self.line)? == 0 {
            self.file.rewind()?;
            (0..2).try_for_each(|_| {
                self.line.clear();
                self.file.read_line(&mut self.line).map(drop)
            })?;
            ensure!(!self.line.is_empty(), "there is no row in the file");
        }
        let field = |column| self.line.trim_end().split(',').nth(column).and_then(number);
        Ok(self.columns.map(|column| field(column).unwrap_or(0.0)))
    }
}

/// A number, or the seconds until a moment like `2020-04-01 00:44:02`.
pub(crate) fn number(text: &str) -> Option<f64> {
    text.parse().ok().or_else(|| {
        let mut parts = text.split(['-', ' ', ':']).map(|part| part.parse::<i64>().ok());
        let mut next = || parts.next().flatten();
        let (year, month, day) = (next()?, next()?, next()?);
        let (hours, minutes, seconds) = (next()?, next()?, next()?);
        // Years begin in March, so that leap days end them.
        let (years, months) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
        let days = years * 365 + years / 4 - years / 100 + years / 400 + (153 * months + 2) / 5 + day - 719_469;
        Some((((days * 24 + hours) * 60 + minutes) * 60 + seconds) as f64)
    })
}

#[cfg(test)]
mod tests {
    //! Danger: real data that is read wrong looks like any other.
    use super::*;
    use std::io::Cursor;

    #[test]
    fn links_are_read_and_what_is_none_is_said() {
        let (links, vertices) = links("# from to\r\n0\t5\r\n3 2\n".as_bytes()).unwrap();
        assert_eq!((links, vertices), (vec![[0, 5], [3, 2]], 6));
        for text in ["1\n", "1 2 3\n", "1 x\n", "1 # 2\n"] {
            assert!(self::links(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn words_lead_to_the_three_after_them_in_any_line() {
        let (pairs, words) = neighbours_in("Der §1 *Der*\nÄmter-der_2b\n\n".as_bytes()).unwrap();
        // der der ämter der b
        assert_eq!((pairs, words), (vec![[0, 0], [0, 1], [0, 2], [1, 0], [1, 2]], 3));
    }

    #[test]
    fn numbers_begin_again() {
        let mut numbers = Numbers::new(Cursor::new([0, 1, 0, 2, 9]), |bytes| u16::from_be_bytes(bytes).into());
        let found: Vec<u64> = (0..5).map(|_| numbers.next().unwrap()).collect();
        assert_eq!(found, [1, 2, 1, 2, 1]);
        assert!(Numbers::new(Cursor::new([1]), |bytes| u16::from_be_bytes(bytes).into()).next().is_err());
    }

    #[test]
    fn moments_are_seconds() {
        let moments = ["1970-01-01 00:00:00", "2000-03-01 00:00:01", "2020-02-29 23:59:59", "2021-12-31 12:00:00"];
        let seconds = moments.map(|text| number(text).unwrap());
        assert_eq!(seconds, [0.0, 951_868_801.0, 1_583_020_799.0, 1_640_952_000.0]);
        assert_eq!(
            (number("2.5"), number("-3"), number("N"), number("2020-01-01")),
            (Some(2.5), Some(-3.0), None, None)
        );
    }

    #[test]
    fn rows_begin_again_and_gaps_are_zero() {
        let mut rows = Rows::new(Cursor::new("a,b,c\n1.5,x,3\n,,4\n"), [0, 2]);
        let found: Vec<_> = (0..4).map(|_| rows.next().unwrap()).collect();
        assert_eq!(found, [[1.5, 3.0], [0.0, 4.0], [1.5, 3.0], [0.0, 4.0]]);
        assert!(Rows::new(Cursor::new("a,b\n"), [0]).next().is_err());
    }
}
