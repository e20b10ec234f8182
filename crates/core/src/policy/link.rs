//! How many pages, or other requests, to have under way on a link: twice its bandwidth-delay
//! product.
//!
//! With less, the link idles. With more, requests queue, and a page that is needed at once queues
//! behind them. Both factors are measured, as in BBR (Cardwell and others, 2016): the delay is the
//! least that an answer takes, the bandwidth the most that arrives in a round. The thread that
//! looks may be late, because it computes or has no processor. That makes answers slower and rounds
//! poorer, but changes neither the least nor the most. At first the window itself limits a round,
//! so it doubles from round to round until the link is the limit.
//!
//! If the path becomes longer, the least delay is that of another path. So it is measured again now
//! and then, with few pages under way.

/// Pages under way that do not slow each other down, and number of answers that are measured like
/// that.
const PROBE_PAGES: u32 = 4;
const PROBE_FOR: u32 = 8;
/// Rounds from one such measurement to the next.
const PROBE_EVERY: u32 = 128;
/// Least length of a round, as a multiple of the delay, and least number of pages in it.
const ROUND_DELAYS: u64 = 2;
const ROUND_PAGES: u64 = 32;
/// Number of rounds of which the best counts.
const ROUNDS: usize = 10;

/// Window controller of one link. Times are those of any clock, in ns.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    least: u32,
    most: u32,
    window: u32,
    /// Least delay of an answer since the last measurement began; 0: there was none.
    delay_ns: u64,
    /// Answers still to come before the delay is known.
    probes: u32,
    /// Pages per second, in rounds in which the window was full.
    rates: [u64; ROUNDS],
    rounds: u32,
    /// Time at which the round began, and pages that have come since.
    began_at: u64,
    pages: u64,
    /// Whether the window was full at each look of the round.
    is_full: bool,
}

impl Link {
    /// Creates a controller that knows nothing yet. Between `least` and `most` pages may be under
    /// way.
    pub const fn new(least: u32, most: u32) -> Link {
        assert!(PROBE_PAGES <= least && least <= most);
        Link {
            least,
            most,
            window: least,
            delay_ns: 0,
            probes: PROBE_FOR,
            rates: [0; ROUNDS],
            rounds: 0,
            began_at: 0,
            pages: 0,
            is_full: false,
        }
    }

    /// Returns the number of pages that may be under way before another one is asked for that
    /// nobody waits for.
    #[inline]
    pub fn window(&self) -> u32 {
        if self.probes > 0 { PROBE_PAGES } else { self.window }
    }

    /// Returns the least delay of an answer lately, in ns; 0: there was none.
    pub fn delay_ns(&self) -> u64 {
        self.delay_ns
    }

    /// Returns the greatest rate lately, in pages per second; 0: it is not known.
    pub fn rate(&self) -> u64 {
        self.rates.iter().copied().fold(0, u64::max)
    }

    /// Takes the observations of a look at time `now`. `pages` had come, the fastest `fastest_ns`
    /// after it was asked for. Before that `under_way` were under way, and more were wanted if
    /// `waiting`.
    pub fn on_look(&mut self, now: u64, pages: u32, fastest_ns: u64, under_way: u32, waiting: bool) {
        let fastest_ns = fastest_ns.max(1);
        if self.delay_ns == 0 || fastest_ns < self.delay_ns {
            self.delay_ns = fastest_ns;
        }
        if self.probes > 0 {
            self.probes = self.probes.saturating_sub(pages);
            return self.begin(now);
        }
        self.pages += u64::from(pages);
        self.is_full &= waiting || under_way >= self.window;
        let took = now.saturating_sub(self.began_at);
        if took >= self.delay_ns * ROUND_DELAYS && self.pages >= ROUND_PAGES {
            self.end(took, under_way - pages.min(under_way));
            self.begin(now);
        }
    }

    fn begin(&mut self, now: u64) {
        (self.began_at, self.pages, self.is_full) = (now, 0, true);
    }

    fn end(&mut self, took: u64, under_way: u32) {
        let rate = u64::try_from(u128::from(self.pages) * 1_000_000_000 / u128::from(took)).unwrap_or(u64::MAX);
        // A round in which nobody wanted more does not show what the link could have given.
        if self.is_full || rate > self.rate() {
            self.rates[self.rounds as usize % ROUNDS] = rate;
            self.rounds = self.rounds.wrapping_add(1);
            let product = u128::from(self.rate()) * u128::from(self.delay_ns) / 1_000_000_000;
            self.window = u32::try_from(product * 2 + 1).unwrap_or(u32::MAX).clamp(self.least, self.most);
        }
        if self.rounds >= PROBE_EVERY {
            // Pages that are under way already are not alone, so their answers do not count.
            (self.rounds, self.delay_ns, self.probes) = (0, 0, under_way + PROBE_FOR);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a window that lets the link idle, or that fills it with what nobody needs yet.
    use super::*;
    use crate::policy::prefetch::{PrefetchTimeliness, Prefetcher};
    use alloc::collections::{BTreeMap, VecDeque};

    const LEAST: u32 = 32;
    const MOST: u32 = 240;

    /// A link, and a walk over pages that are all far, as the far heap does it: with a stream that
    /// asks ahead, a queue in front of the link, and looks when something is asked for or waited
    /// for. In virtual time.
    struct Walk {
        link: Link,
        stream: Prefetcher,
        now: u64,
        page_ns: u64,
        delay_ns: u64,
        /// When the link has passed all that was asked for.
        free_at: u64,
        /// Asked for by the stream, and not by the link yet.
        queued: VecDeque<u64>,
        /// When each was asked for, and comes.
        under_way: BTreeMap<u64, (u64, u64)>,
        come: BTreeMap<u64, bool>,
        most: u32,
    }

    impl Walk {
        fn new(page_ns: u64, delay_ns: u64) -> Walk {
            Walk {
                link: Link::new(LEAST, MOST),
                stream: Prefetcher::new(),
                now: 0,
                page_ns,
                delay_ns,
                free_at: 0,
                queued: VecDeque::new(),
                under_way: BTreeMap::new(),
                come: BTreeMap::new(),
                most: 0,
            }
        }

        fn ask(&mut self, page: u64) {
            self.free_at = self.free_at.max(self.now) + self.page_ns;
            self.under_way.insert(page, (self.now, self.free_at + self.delay_ns));
        }

        fn look(&mut self) {
            let before = self.under_way.len() as u32;
            let now = self.now;
            let come: alloc::vec::Vec<(u64, u64)> = self
                .under_way
                .iter()
                .filter(|(_, (_, at))| *at <= now)
                .map(|(page, (asked, _))| (*page, *asked))
                .collect();
            for (page, _) in &come {
                self.under_way.remove(page);
                self.come.insert(*page, true);
            }
            if let Some(fastest) = come.iter().map(|(_, asked)| now - asked).min() {
                self.link.on_look(now, come.len() as u32, fastest, before, !self.queued.is_empty());
            }
            while (self.under_way.len() as u32) < self.link.window()
                && let Some(page) = self.queued.pop_front()
            {
                self.ask(page);
            }
            self.most = self.most.max(self.under_way.len() as u32);
        }

        /// Uses this page, and computes for so long.
        fn step(&mut self, page: u64, busy_ns: u64) {
            let timeliness = match self.come.get(&page) {
                Some(false) => unreachable!("a walk that goes on"),
                Some(true) => PrefetchTimeliness::InTime,
                None if self.under_way.contains_key(&page) || self.queued.contains(&page) => PrefetchTimeliness::Late,
                None => PrefetchTimeliness::Missing,
            };
            let ahead = match self.stream.on_use(page, timeliness, 512) {
                None if timeliness != PrefetchTimeliness::InTime => self.stream.on_fault(page, u32::MAX),
                ahead => ahead.unwrap_or_default(),
            };
            let wanted = (1..=ahead.count.into()).map(|step| page + step);
            let is_new = |page: &u64| {
                !self.come.contains_key(page) && !self.under_way.contains_key(page) && !self.queued.contains(page)
            };
            let wanted: alloc::vec::Vec<u64> = wanted.filter(is_new).collect();
            if !wanted.is_empty() {
                self.queued.extend(wanted);
                self.look();
            }
            while !self.come.contains_key(&page) {
                if let Some(at) = self.queued.iter().position(|queued| *queued == page) {
                    self.queued.remove(at);
                }
                if !self.under_way.contains_key(&page) {
                    self.ask(page);
                }
                self.now = self.now.max(self.under_way.values().map(|(_, at)| *at).min().unwrap_or(0));
                self.look();
            }
            self.come.insert(page, false);
            self.now += busy_ns;
        }
    }

    /// Of what the link could pass, or the walk could use, per mille, after a beginning; and the
    /// most that was under way.
    fn walk(page_ns: u64, delay_ns: u64, busy_ns: u64) -> (u64, u32) {
        let mut walk = Walk::new(page_ns, delay_ns);
        (0..2000).for_each(|page| walk.step(page, busy_ns));
        let began_at = walk.now;
        (walk.most, walk.come) = (0, BTreeMap::from_iter(walk.come.into_iter().skip(1500)));
        (2000..10_000).for_each(|page| walk.step(page, busy_ns));
        (8000 * page_ns.max(busy_ns) * 1000 / (walk.now - began_at), walk.most)
    }

    #[test]
    fn a_link_is_filled_by_what_it_delivers_in_the_time_of_an_answer() {
        for page_ns in [4000, 8000, 32_000] {
            for delay_ns in [20_000, 100_000, 400_000] {
                for busy_ns in [100, 2000, 10_000] {
                    let product = (delay_ns / page_ns + 1) as u32;
                    let (share, most) = walk(page_ns, delay_ns, busy_ns);
                    let what = alloc::format!(
                        "{page_ns} ns a page, {delay_ns} ns away, {busy_ns} ns of work: {share} of 1000, {most} of {product}"
                    );
                    assert!(share >= 900, "{what}");
                    // One is asked for that somebody waits for; and what is more than twice the
                    // product may be that of a richer round.
                    assert!(most <= (product * 3).max(LEAST) + 2, "{what}");
                }
            }
        }
    }

    /// Always as much is wanted as may be under way. Looks come when a page comes, but sometimes
    /// (per cent of looks) so late.
    fn windows(ways: &[(u64, u64)], late: (u64, u64)) -> alloc::vec::Vec<u32> {
        let mut link = Link::new(LEAST, MOST);
        let (mut now, mut free_at, mut random) = (0u64, 0u64, fastrand::Rng::with_seed(1));
        let mut under_way: VecDeque<(u64, u64)> = VecDeque::new();
        let mut found = alloc::vec::Vec::new();
        for (page_ns, delay_ns) in ways {
            for _ in 0..30_000 {
                while (under_way.len() as u32) < link.window() {
                    free_at = free_at.max(now) + page_ns;
                    under_way.push_back((now, free_at + delay_ns));
                }
                now = now.max(under_way[0].1);
                if random.u64(..100) < late.0 {
                    now += late.1;
                }
                let before = under_way.len() as u32;
                let come = under_way.iter().take_while(|(_, at)| *at <= now).count();
                let fastest = under_way.drain(..come).map(|(asked, _)| now - asked).min().unwrap_or(0);
                link.on_look(now, come as u32, fastest, before, true);
            }
            found.push(link.window.max(if link.probes > 0 { LEAST } else { 0 }));
        }
        found
    }

    #[test]
    fn late_looks_do_not_make_it_smaller_nor_larger() {
        for late in [(0, 0), (1, 4_000_000), (10, 500_000), (50, 50_000)] {
            // 50 pages, and 5.
            let found = windows(&[(8000, 400_000)], late);
            assert!((75..=125).contains(&found[0]), "{found:?} with looks late by {late:?}");
            assert_eq!(windows(&[(8000, 40_000)], late), [LEAST], "late by {late:?}");
        }
    }

    #[test]
    fn a_way_that_changes_is_measured_again() {
        let found = windows(&[(8000, 100_000), (8000, 600_000), (2000, 100_000), (8000, 400_000)], (0, 0));
        let expected = [LEAST, 150, 100, 100];
        for (found, expected) in found.iter().zip(expected) {
            assert!((expected * 3 / 4..=expected * 5 / 4).contains(found), "{found}, expected {expected}");
        }
    }
}
