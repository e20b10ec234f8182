//! Prefetcher: decides what to bring near ahead of need, from the pages that one thread faulted on.
//!
//! Three detectors, most certain first:
//!
//! - a fault where a known stream was expected to go on;
//! - a fault that makes a stride with two earlier ones (or sits beside one);
//! - for noisy streams, the majority vote over recent distances (Leap, ATC'20, section 4.1).
//!
//! Each stream's window doubles while its prefetched pages are used and halves when they are not.
//! Streams that keep missing are ignored for a while: useless prefetching stops by itself and is
//! tried again later.
//!
//! The pager does not see the use of a page that was prefetched, because it is mapped. There a
//! stream's window counts as used when the fault after it comes where the stream was expected to go
//! on. If the thread waits for more than a fifth of its time, windows grow further
//! ([`Prefetcher::on_waited`]); and a fault on a page that is still on its way asks for more
//! ([`Prefetcher::on_late_fault`]), so that the link is never idle. The far heap sees the use
//! ([`Prefetcher::on_use`]), asks for more in the middle of the window, and so need not wait at its
//! end. A page that is needed and still on its way widens the window, until it covers what the pool
//! delivers in the time of one answer. The far heap also sees how many of the pages that were
//! brought are passed over: a stream that passes over most of them ends.

use crate::cast::{low_u32, usize_of};

/// Number of streams followed at once.
const STREAMS: usize = 8;
/// Number of faults remembered.
const RECENT: usize = 16;
/// Smallest and largest window, in pages.
const WINDOW_MIN: u32 = 4;
const WINDOW_MAX: u32 = 64;
/// Largest window of a stream whose pages come too late, in pages.
const LATE_MAX: u32 = 512;
/// Largest window of a stream whose uses are not seen, in pages.
const UNSEEN_MAX: u32 = 256;
/// Share of its time, inverse, for which a thread may wait before windows grow further.
const WAITING_SHARE: u64 = 5;
/// Number of pages that a stream may pass over for each that is used. A stream ends above it,
const PASSED_MAX: u32 = 4;
/// once it has passed over this many more. Both counts are halved now and then, so that older ones
/// count less.
const PASSED_MIN: u32 = 16;
const USED_MAX: u32 = 64;
/// Largest stride worth following, in pages.
const STRIDE_MAX: i64 = 1024;
/// Number of windows in a row without use after which new streams are ignored …
const DOUBTS_MAX: u32 = 8;
/// … for this many faults.
const PAUSE_FAULTS: u32 = 512;

/// Pages to bring: `count` pages, `stride` apart, after the faulting one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrefetchBatch {
    /// Distance between pages, never 0 when `count` is not.
    pub stride: i64,
    /// Number of pages.
    pub count: u32,
}

impl PrefetchBatch {
    fn at_most(self, most: u32) -> PrefetchBatch {
        PrefetchBatch { count: self.count.min(most), ..self }
    }
}

/// State in which a page that a stream asked for was found when it was needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrefetchTimeliness {
    /// The page was there.
    InTime,
    /// The page was on its way.
    Late,
    /// The page was not there: there was no room for it, or it was not asked for.
    Missing,
}

#[derive(Clone, Copy)]
struct AccessStream {
    /// Page at which the next fault is expected.
    next: i64,
    stride: i64,
    /// Pages asked for last time.
    window: u32,
    /// Number of faults of the thread when the stream was last used.
    used_at: u64,
    /// Last page of the stream that was needed.
    last: i64,
    /// Pages that were needed, and pages that were brought and passed over.
    used: u32,
    passed: u32,
    /// Pages newly asked for by the last request, and how many of them were brought: others were
    /// near already.
    asked: u32,
    brought: u32,
}

const UNUSED: AccessStream =
    AccessStream { next: 0, stride: 0, window: 0, used_at: 0, last: 0, used: 0, passed: 0, asked: 0, brought: 0 };

impl AccessStream {
    /// Notes that the thread needs a page of the stream, further on. False if the stream passes
    /// over too many pages to be one of this stride.
    fn goes_on(&mut self, page: i64) -> bool {
        let over = low_u32(((page - self.last) / self.stride - 1).clamp(0, i64::from(LATE_MAX)).cast_unsigned());
        self.passed += over * self.brought.min(self.asked) / self.asked.max(1);
        self.used += 1;
        self.last = page;
        let is_one = self.passed <= self.used * PASSED_MAX + PASSED_MIN;
        if self.used >= USED_MAX {
            (self.used, self.passed) = (self.used / 2, self.passed / 2);
        }
        is_one
    }
}

/// Prefetcher of one thread. All-zero bytes are a prefetcher that knows nothing.
pub struct Prefetcher {
    streams: [AccessStream; STREAMS],
    recent: [i64; RECENT],
    faults: u64,
    doubts: u32,
    paused_until: u64,
    hits: u64,
    /// Index of the stream that asked last.
    asker: usize,
    /// Whether the thread waited for its last page for more than a fifth of the time since the page
    /// before.
    is_waiting: bool,
}

impl Default for Prefetcher {
    fn default() -> Self {
        Self::new()
    }
}

impl Prefetcher {
    /// Creates a prefetcher that knows nothing yet.
    pub const fn new() -> Prefetcher {
        Prefetcher {
            streams: [UNUSED; STREAMS],
            recent: [0; RECENT],
            faults: 0,
            doubts: 0,
            paused_until: 0,
            hits: 0,
            asker: 0,
            is_waiting: false,
        }
    }

    /// Returns the number of pages that were [brought](Prefetcher::on_brought) and used, since the
    /// last call.
    pub fn take_hits(&mut self) -> u64 {
        core::mem::take(&mut self.hits)
    }

    /// Takes a fault of the thread on `page`; returns what to bring with it, at most `most` pages.
    pub fn on_fault(&mut self, page: u64, most: u32) -> PrefetchBatch {
        // Shifted, so that the zeros in `recent` are no page's number.
        let page = page.cast_signed() + STRIDE_MAX * 4;
        self.faults += 1;
        let ahead = self.go_on(page, most).or_else(|| self.start(page)).unwrap_or_default();
        self.recent[usize_of(self.faults) % RECENT] = page;
        ahead.at_most(most)
    }

    /// Continues the stream that expected this fault; `None` if none did.
    fn go_on(&mut self, page: i64, most: u32) -> Option<PrefetchBatch> {
        let index = self.streams.iter().position(|s| s.window > 0 && s.next == page)?;
        let stream = &mut self.streams[index];
        self.asker = index;
        stream.last = page;
        // Pages that were near already were not brought, so their use is no hit.
        self.hits += u64::from(core::mem::take(&mut stream.brought).min(stream.window));
        self.doubts = 0;
        let window_max = if self.is_waiting { UNSEEN_MAX } else { WINDOW_MAX.max(stream.window) };
        stream.window = (stream.window * 2).min(window_max).min(most.max(WINDOW_MIN));
        stream.used_at = self.faults;
        stream.next = page + stream.stride * (i64::from(stream.window) + 1);
        stream.asked = stream.window;
        Some(PrefetchBatch { stride: stream.stride, count: stream.window })
    }

    /// Takes the first use of a page since a stream asked for it, or may have. `None` if no stream
    /// expected it; else what to bring, at most `most` pages: more would displace what is in use.
    /// Some of that may be near or on its way already.
    pub fn on_use(&mut self, page: u64, timeliness: PrefetchTimeliness, most: u32) -> Option<PrefetchBatch> {
        let page = page.cast_signed() + STRIDE_MAX * 4;
        let (index, left) = self.asked_for(page)?;
        if !self.streams[index].goes_on(page) {
            self.streams[index] = UNUSED;
            return None;
        }
        Some(self.extend(index, page, left, timeliness, most.min(LATE_MAX)))
    }

    /// Takes a fault of the thread on a page that is on its way, where uses of pages that are there
    /// are not seen. `None` if no stream asked for it; else what to bring, at most `most` pages.
    pub fn on_late_fault(&mut self, page: u64, most: u32) -> Option<PrefetchBatch> {
        let page = page.cast_signed() + STRIDE_MAX * 4;
        let (index, left) = self.asked_for(page)?;
        let stream = &mut self.streams[index];
        stream.last = page;
        // The pages before this one were used. Of the others nothing is known yet.
        let unknown = stream.brought.min(left);
        self.hits += u64::from(stream.brought - unknown);
        let ahead = self.extend(index, page, left, PrefetchTimeliness::Late, most.min(UNSEEN_MAX));
        self.streams[index].brought = unknown;
        Some(ahead.at_most(most))
    }

    /// Notes how long the thread waited for the page of its last fault, and how long it had worked
    /// between the fault before that and this one. Any unit of time.
    pub fn on_waited(&mut self, waited: u64, worked: u64) {
        self.is_waiting = waited.saturating_mul(WAITING_SHARE) > waited.saturating_add(worked);
    }

    /// Returns the stream that asked for a page, and the number of pages asked for after it.
    fn asked_for(&self, page: i64) -> Option<(usize, u32)> {
        let left = |stream: &AccessStream| {
            let steps = (stream.next - page).checked_div(stream.stride)?;
            let is_asked =
                (1..=i64::from(stream.window)).contains(&steps) && page + steps * stream.stride == stream.next;
            is_asked.then(|| low_u32(steps.cast_unsigned()) - 1)
        };
        self.streams.iter().enumerate().find_map(|(index, stream)| Some((index, left(stream)?)))
    }

    /// Moves the end of a stream on from a page that is needed, unless enough is on its way.
    fn extend(
        &mut self,
        index: usize,
        page: i64,
        left: u32,
        timeliness: PrefetchTimeliness,
        most: u32,
    ) -> PrefetchBatch {
        let stream = &mut self.streams[index];
        self.asker = index;
        self.doubts = 0;
        stream.used_at = self.faults;
        let is_half_used = left * 2 <= stream.window;
        stream.window = match timeliness {
            // Pages that were asked for in vain are asked for again.
            PrefetchTimeliness::Missing => stream.window,
            PrefetchTimeliness::Late if is_half_used || stream.window < WINDOW_MAX => stream.window * 2,
            PrefetchTimeliness::InTime if is_half_used => (stream.window * 2).min(WINDOW_MAX).max(stream.window),
            PrefetchTimeliness::Late | PrefetchTimeliness::InTime => return PrefetchBatch::default(),
        };
        stream.window = stream.window.min(most.max(WINDOW_MIN));
        let next = page + stream.stride * (i64::from(stream.window) + 1);
        stream.asked =
            low_u32(((next - stream.next) / stream.stride).clamp(0, i64::from(stream.window)).cast_unsigned());
        stream.brought = 0;
        stream.next = next;
        PrefetchBatch { stride: stream.stride, count: stream.window }
    }

    /// Notes how many of the pages that were to be brought last are on their way now. The others
    /// are near, or there was no room. Without this call a stream is never found to be none.
    pub fn on_brought(&mut self, count: u32) {
        self.streams[self.asker].brought += count;
    }

    fn start(&mut self, page: i64) -> Option<PrefetchBatch> {
        if self.faults < self.paused_until {
            return None;
        }
        let stride = self.stride_to(page).or_else(|| self.majority(page))?;
        // The least recently used stream makes room; if it never went on, that is one doubt more.
        let index = (0..STREAMS).min_by_key(|&i| self.streams[i].used_at)?;
        let old = self.streams[index];
        if old.window == WINDOW_MIN {
            self.doubts += 1;
            if self.doubts > DOUBTS_MAX {
                self.doubts = 0;
                self.paused_until = self.faults + u64::from(PAUSE_FAULTS);
                self.streams = [UNUSED; STREAMS];
                return None;
            }
        }
        let window = WINDOW_MIN;
        self.streams[index] = AccessStream {
            next: page + stride * (i64::from(window) + 1),
            stride,
            window,
            used_at: self.faults,
            last: page,
            asked: window,
            ..UNUSED
        };
        self.asker = index;
        Some(PrefetchBatch { stride, count: window })
    }

    /// Returns the distance to a neighbour among recent faults, or the stride that two of them make
    /// with this one.
    fn stride_to(&self, page: i64) -> Option<i64> {
        let seen = |wanted: i64| self.recent.contains(&wanted);
        if seen(page - 1) {
            return Some(1);
        }
        if seen(page + 1) {
            return Some(-1);
        }
        self.recent
            .iter()
            .map(|&before| page - before)
            .find(|&stride| stride != 0 && stride.abs() <= STRIDE_MAX && seen(page - 2 * stride))
    }

    /// Returns the distance that more than half of the recent faults have to the fault before them
    /// (Boyer and Moore).
    fn majority(&self, page: i64) -> Option<i64> {
        let at = |back: u64| self.recent[usize_of(self.faults - back) % RECENT];
        let steps = (RECENT as u64 - 1).min(self.faults.saturating_sub(1));
        if steps < 4 {
            return None;
        }
        let distance = |back: u64| if back == 0 { page - at(1) } else { at(back) - at(back + 1) };
        let (mut candidate, mut votes) = (0, 0);
        for back in 0..steps {
            match distance(back) {
                _ if votes == 0 => (candidate, votes) = (distance(back), 1),
                d if d == candidate => votes += 1,
                _ => votes -= 1,
            }
        }
        let count = (0..steps).filter(|&back| distance(back) == candidate).count() as u64;
        (candidate != 0 && candidate.abs() <= STRIDE_MAX && 2 * count > steps).then_some(candidate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs accesses through a prefetcher with unlimited near memory; faults and pages brought ahead, and of those
    /// used.
    fn run(accesses: impl Iterator<Item = u64>) -> (u64, u64, u64) {
        let mut near = alloc::collections::BTreeMap::new();
        let (mut faults, mut ahead_count, mut used) = (0, 0, 0);
        let mut prefetcher = Prefetcher::new();
        for page in accesses {
            match near.get_mut(&page) {
                Some(ahead) => used += u64::from(core::mem::replace(ahead, false)),
                None => {
                    faults += 1;
                    near.insert(page, false);
                    let ahead = prefetcher.on_fault(page, u32::MAX);
                    for step in 1..=i64::from(ahead.count) {
                        let Ok(next) = u64::try_from(page.cast_signed() + step * ahead.stride) else { continue };
                        near.entry(next).or_insert_with(|| {
                            ahead_count += 1;
                            true
                        });
                    }
                }
            }
        }
        (faults, ahead_count, used)
    }

    #[test]
    fn a_scan_faults_once_per_window() {
        let (faults, ahead, used) = run(0..10_000);
        assert!(faults < 200, "{faults}");
        assert!(used * 100 >= ahead * 98, "{used} of {ahead}");
    }

    #[test]
    fn a_scan_backwards_and_strides_too() {
        assert!(run((0..10_000).rev()).0 < 200);
        assert!(run((0..5_000).map(|i| i * 7)).0 < 120);
        assert!(run((0..5_000).map(|i| 1_000_000 - i * 3)).0 < 120);
    }

    /// The same with uses seen, and pages that take `delay` accesses to come: demand faults, late
    /// uses, and pages brought in vain.
    fn run_seen(accesses: impl Iterator<Item = u64>, delay: u64) -> (u64, u64, u64) {
        let mut near = alloc::collections::BTreeMap::new();
        let (mut faults, mut late_uses, mut vain) = (0, 0, 0);
        let mut prefetcher = Prefetcher::new();
        for (now, page) in (0u64..).zip(accesses) {
            let seen = near.insert(page, None);
            let ahead = match seen {
                Some(None) => continue,
                Some(Some(due)) => {
                    vain -= 1;
                    late_uses += u64::from(due > now);
                    let timeliness = if due > now { PrefetchTimeliness::Late } else { PrefetchTimeliness::InTime };
                    prefetcher.on_use(page, timeliness, 512).unwrap_or_default()
                }
                None => {
                    faults += 1;
                    prefetcher
                        .on_use(page, PrefetchTimeliness::Missing, 512)
                        .unwrap_or_else(|| prefetcher.on_fault(page, u32::MAX))
                }
            };
            let before = vain;
            for step in 1..=i64::from(ahead.count) {
                let Ok(next) = u64::try_from(page.cast_signed() + step * ahead.stride) else { continue };
                near.entry(next).or_insert_with(|| {
                    vain += 1;
                    Some(now + delay)
                });
            }
            if ahead.count > 0 {
                prefetcher.on_brought((vain - before) as u32);
            }
        }
        (faults, late_uses, vain)
    }

    #[test]
    fn a_scan_whose_uses_are_seen_waits_at_its_beginning_only() {
        for delay in [0, 1, 10, 100, 200] {
            for stride in [1, 3] {
                let (faults, late, vain) = run_seen((0..20_000).map(|i| 1_000_000 + i * stride), delay);
                assert!(faults <= 3, "{faults} faults with delay {delay}");
                assert!(late <= 8 * delay, "{late} pages late with delay {delay}");
                assert!(vain <= 600, "{vain} pages in vain with delay {delay}");
            }
        }
        let backwards = run_seen((0..20_000).map(|i| 1_000_000 - i), 20);
        assert!(backwards.0 <= 3 && backwards.1 <= 160, "{backwards:?}");
    }

    #[test]
    fn a_low_hit_rate_shrinks_the_prefetch_window() {
        // A scan, and then every so manieth page, as long as the stream of the scan goes on by itself.
        for stride in [8, 16, 40] {
            let accesses = (0..200u64).chain((0..2_000).map(|step| 200 + step * stride));
            let (faults, _, vain) = run_seen(accesses, 3);
            assert!(vain <= 500, "{vain} pages in vain, {faults} faults with stride {stride}");
            assert!(faults <= 60, "{faults} faults with stride {stride}");
        }
        // Every other page, or two of three, is no reason to doubt.
        for stride in [2, 3] {
            let accesses = (0..200u64).chain((0..5_000).map(|step| 200 + step * stride));
            assert!(run_seen(accesses, 3).0 <= 10);
        }
    }

    #[test]
    fn a_scan_of_what_is_near_here_and_there_is_brought_the_rest() {
        // Seven of eight runs of 40 pages are near already: nobody hears of their use.
        let far = |page: &u64| (page / 40).is_multiple_of(8);
        let mut prefetcher = Prefetcher::new();
        let mut ahead_of: alloc::collections::BTreeSet<u64> = Default::default();
        let mut faults = 0;
        for page in (0..40_000u64).filter(far) {
            let timeliness =
                if ahead_of.remove(&page) { PrefetchTimeliness::InTime } else { PrefetchTimeliness::Missing };
            let ahead = match prefetcher.on_use(page, timeliness, 512) {
                Some(ahead) => ahead,
                None if timeliness == PrefetchTimeliness::InTime => PrefetchBatch::default(),
                None => {
                    faults += 1;
                    prefetcher.on_fault(page, u32::MAX)
                }
            };
            let wanted = (1..=i64::from(ahead.count)).map(|step| (page.cast_signed() + step * ahead.stride) as u64);
            let brought = wanted.filter(far).filter(|page| ahead_of.insert(*page)).count();
            if ahead.count > 0 {
                prefetcher.on_brought(brought as u32);
            }
        }
        assert!(faults <= 5 * 40_000 / 320, "{faults} faults");
    }

    #[test]
    fn a_scan_that_catches_up_keeps_the_link_busy() {
        // A link brings a page in each unit of time, `latency` units after it was asked for. The thread needs one in
        // each. Uses of pages that are there are not seen.
        for latency in [0u64, 10, 40, 60] {
            let (mut prefetcher, mut due) = (Prefetcher::new(), alloc::collections::BTreeMap::<u64, u64>::new());
            let (mut now, mut link_free, mut worked, mut hits, mut brought) = (0u64, 0u64, 0, 0, 0);
            for page in 0..20_000u64 {
                now += 1;
                worked += 1;
                // Returns when a page comes that is asked for now.
                let mut ask = || {
                    link_free = link_free.max(now) + 1;
                    link_free + latency
                };
                let (ahead, comes) = match due.get(&page).copied() {
                    Some(at) if at <= now => continue,
                    Some(at) => (prefetcher.on_late_fault(page, 512).unwrap_or_default(), at),
                    None => {
                        let (ahead, at) = (prefetcher.on_fault(page, u32::MAX), ask());
                        prefetcher.on_waited(at - now, core::mem::take(&mut worked));
                        (ahead, at)
                    }
                };
                let mut count = 0;
                for step in 1..=u64::from(ahead.count) {
                    due.entry(page + step).or_insert_with(|| {
                        count += 1;
                        ask()
                    });
                }
                now = comes;
                prefetcher.on_brought(count);
                brought += u64::from(count);
                hits += prefetcher.take_hits();
                assert!(hits <= brought);
            }
            assert!(now <= 20_000 * 5 / 4 + 12 * latency, "{now} units with latency {latency}");
            assert!(hits * 100 >= brought * 90, "{hits} of {brought} with latency {latency}");
        }
    }

    #[test]
    fn interleaved_streams_are_followed() {
        let triad = (0..5_000u64).flat_map(|i| [i, 1_000_000 + i, 2_000_000 + i]);
        let (faults, _, _) = run(triad);
        assert!(faults < 400, "{faults}");
    }

    #[test]
    fn random_access_is_left_alone() {
        let mut random = fastrand::Rng::with_seed(88);
        let accesses = (0..20_000).map(move |_| random.u64(..1_000_000));
        let (faults, ahead, _) = run(accesses);
        assert!(ahead * 20 < faults, "{ahead} pages ahead for {faults} faults");
    }

    #[test]
    fn short_runs_at_random_places_lower_the_confidence() {
        let mut random = fastrand::Rng::with_seed(88);
        let accesses = (0..20_000).flat_map(move |_| {
            let start = random.u64(..100_000_000);
            [start, start + 1]
        });
        let (faults, ahead, _) = run(accesses);
        assert!(ahead < faults / 2, "{ahead} pages ahead for {faults} faults");
    }

    #[test]
    fn a_noisy_stride_wins_the_vote() {
        let mut random = fastrand::Rng::with_seed(88);
        let accesses =
            (0..8_000u64).map(move |i| if i % 5 == 4 { 50_000_000 + random.u64(..10_000_000) } else { i * 4 });
        let (faults, _, _) = run(accesses);
        assert!(faults < 3_000, "{faults}");
    }

    #[test]
    fn no_more_hits_are_counted_than_pages_were_brought() {
        for share in [0, 1, 2] {
            let mut prefetcher = Prefetcher::new();
            let (mut page, mut brought, mut last, mut hits) = (100, 0, 0, 0);
            for _ in 0..40 {
                let ahead = prefetcher.on_fault(page, u32::MAX);
                hits += prefetcher.take_hits();
                assert_eq!(hits, brought, "all of it was used");
                // Of the others nothing had to be brought: they are near already.
                last = u64::from(ahead.count) * share / 2;
                prefetcher.on_brought(last as u32);
                brought += last;
                page += u64::from(ahead.count) + 1;
            }
            assert!(last > 0 || share == 0, "a stream was seen");
        }
    }
}
