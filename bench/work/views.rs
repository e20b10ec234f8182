//! Page-view count by map and reduce (Atlas, Figure 1: Metis). *Map*: views of pages, in no order, go to the bucket of their page; *reduce*:
//! buckets are read one after the other, and the users of each page counted.
//!
//! Buckets are lists like those of a graph. *Skewed*: pages by Zipf's law, so that some buckets are long, or with `real = 1` those of a shop
//! ([`real`]), by made-up users; *uniform*: all pages alike.

use crate::graph::{BYTES_PER_EDGE, Edge, Far, Lists, Near, neighbours, stamp, vertex};
use crate::random::{Random, mix};
use crate::real::{self, Numbers};
use crate::zipf::Zipf;
use crate::{Options, Outcome, course, figures_since};
use anyhow::Result;
use farfield::FarError;
use std::fs::File;
use std::io::BufReader;

/// How pages are chosen.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Input {
    Skewed,
    Uniform,
}

const EXPONENT: f64 = 0.9;
/// Of all buckets: 21 views each, if they are alike.
const BYTES_PER_BUCKET: u64 = 1024;
const VIEWS_PER_PAGE: u64 = 8;
const USERS: u64 = 100_000;
/// Views of a full list.
const FULL: usize = 32;

pub(crate) fn run(options: &Options, input: Input) -> Result<Outcome> {
    let buckets = (options.data_bytes() / BYTES_PER_BUCKET) as usize;
    let views = Views::new(options, input, buckets)?;
    let all = views.count;
    match options.heap(0)? {
        None => count(views, &mut Near::new(buckets, FULL), near),
        Some(heap) => course::followed(options, &heap, || {
            let before = heap.stats();
            let mut outcome = count(views, &mut Far::new(&heap, buckets, FULL)?, far)?;
            figures_since(&mut outcome, &before, &heap.stats(), all, 0);
            Ok(outcome)
        }),
    }
}

/// The input.
struct Views {
    count: u64,
    buckets: usize,
    pages: Pages,
    random: Random,
    seed: u64,
}

/// Which page is viewed next.
enum Pages {
    /// Any of so many.
    Alike(u64),
    Zipf(Zipf),
    Real(Numbers<BufReader<File>, 8>),
}

impl Views {
    fn new(options: &Options, input: Input, buckets: usize) -> Result<Views> {
        let count = (options.data_bytes() - buckets as u64 * 32) / BYTES_PER_EDGE;
        let pages = match input {
            Input::Uniform => Pages::Alike(count / VIEWS_PER_PAGE),
            Input::Skewed if options.real == 1 => {
                Pages::Real(Numbers::new(real::open(real::VIEWS)?, u64::from_be_bytes))
            }
            Input::Skewed => Pages::Zipf(Zipf::new(count / VIEWS_PER_PAGE, EXPONENT)),
        };
        Ok(Views { count, buckets, pages, random: Random::new(options.seed), seed: options.seed })
    }

    fn bucket(&self, page: u32) -> u32 {
        (mix(u64::from(page) ^ self.seed) % self.buckets as u64) as u32
    }

    /// The next one.
    fn next(&mut self) -> Result<Edge> {
        let page = match &mut self.pages {
            Pages::Alike(pages) => self.random.below(*pages) as u32,
            Pages::Zipf(zipf) => zipf.sample(&mut self.random) as u32,
            Pages::Real(numbers) => numbers.next()? as u32,
        };
        Ok(Edge { from: self.bucket(page), to: page, time: self.random.below(USERS) })
    }
}

/// What is known of pages in the end.
#[derive(Default)]
struct Totals {
    views: u64,
    checksum: u64,
    /// Of a bucket: page and user.
    seen: Vec<(u32, u64)>,
}

impl Totals {
    /// A bucket has been read to its end.
    fn bucket(&mut self) {
        self.seen.sort_unstable();
        for of_one in self.seen.chunk_by(|one, next| one.0 == next.0) {
            let users = of_one.chunk_by(|one, next| one.1 == next.1).count() as u64;
            self.views += of_one.len() as u64;
            self.checksum = mix(self.checksum ^ mix(u64::from(of_one[0].0) << 32 | users));
        }
        self.seen.clear();
    }
}

fn count<L: Lists>(
    mut views: Views,
    lists: &mut L,
    reduce: impl Fn(&L, usize, &mut Totals) -> Result<(), FarError>,
) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let totals = outcome.phase("count", views.count, || -> Result<Totals> {
        for _ in 0..views.count {
            let view = views.next()?;
            lists.append(view.from as usize, &[view.neighbour()])?;
        }
        let mut totals = Totals::default();
        reduce(lists, views.buckets, &mut totals)?;
        Ok(totals)
    })?;
    outcome.checked(totals.checksum, views.count.abs_diff(totals.views));
    Ok(outcome)
}

fn near(lists: &Near, buckets: usize, totals: &mut Totals) -> Result<(), FarError> {
    for at in 0..buckets {
        let mut next = Some(at);
        while let Some(at) = next {
            let list = &lists.lists[at];
            totals.seen.extend(list.newest.iter().map(|view| (vertex(view) as u32, stamp(view))));
            next = list.before.map(|before| before.get() as usize);
        }
        totals.bucket();
    }
    Ok(())
}

fn far(lists: &Far<'_>, buckets: usize, totals: &mut Totals) -> Result<(), FarError> {
    let mut scope = lists.heap.enter();
    for at in 0..buckets {
        let mut next = Some(at);
        while let Some(at) = next {
            scope.renew();
            let list = lists.lists.at(&scope, at)?;
            let views = neighbours(list.newest.get(&scope)?).iter();
            totals.seen.extend(views.map(|view| (vertex(view) as u32, stamp(view))));
            next = list.before.map(|before| before.get() as usize);
        }
        totals.bucket();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_counted_once_a_page() {
        let mut totals = Totals { seen: vec![(1, 5), (2, 5), (1, 5), (1, 6)], ..Totals::default() };
        totals.bucket();
        assert_eq!(totals.views, 4);
        assert_eq!(totals.checksum, mix(mix(mix(1 << 32 | 2)) ^ mix(2 << 32 | 1)));
    }
}
