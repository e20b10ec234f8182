//! Tells the user when far memory is not protected as its pool promises, and when it is protected
//! again.
//!
//! A server that is slow for a moment is no news: a lapse is reported when it has lasted for
//! [`LASTS`], and so is its end. The report counts every second of a lapse.

use super::{ByteSize, PoolStatus};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::Protection;
use std::time::Instant;

/// Time that a lapse, or its end, has to last before it is reported.
const LASTS: Duration = Duration::from_secs(2);
/// Interval between two looks at the protection.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Protection that the pool of a job gave to what it held, for the report.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
#[allow(missing_docs, reason = "docs/cli.md describes each field")]
pub struct ProtectionReport {
    /// True if the pool was whole at the end of the job.
    pub is_whole: bool,
    pub lapses: u32,
    pub unprotected_s: f64,
    /// Largest number of missing members at a time.
    pub missing_legs_max: u64,
    pub shared_legs: u64,
    pub exposed_bytes_max: u64,
}

/// Watch over the protection of one job's far memory.
pub(super) struct ProtectionWatch {
    /// Protection so far; `None` until a process of the job says that its pool promises protection.
    seen: Option<ProtectionReport>,
    last_look: Instant,
    /// Result of the last look; `since` is the time since when it has been so.
    is_whole: bool,
    since: Instant,
    is_said: bool,
}

impl ProtectionWatch {
    pub(super) fn new(now: Instant) -> ProtectionWatch {
        ProtectionWatch { seen: None, last_look: now, is_whole: true, since: now, is_said: false }
    }

    /// Looks at the protection every [`LOOK_EVERY`], and returns a line for the user if there is
    /// news.
    pub(super) fn update(&mut self, now: Instant, status: impl FnOnce() -> PoolStatus) -> Option<String> {
        if now - self.last_look < LOOK_EVERY {
            return None;
        }
        self.look(now, combine(&status()))
    }

    /// Takes what was found at this moment. Each process has a pool of its own: what holds for one
    /// holds for all, at most.
    pub(super) fn look(&mut self, now: Instant, found: Option<Protection>) -> Option<String> {
        let passed = now - self.last_look;
        self.last_look = now;
        let found = found?;
        let nothing = ProtectionReport {
            is_whole: true,
            lapses: 0,
            unprotected_s: 0.0,
            missing_legs_max: 0,
            shared_legs: 0,
            exposed_bytes_max: 0,
        };
        let seen = self.seen.get_or_insert(nothing);
        if found.is_whole() != self.is_whole {
            (self.is_whole, self.since) = (found.is_whole(), now);
            seen.lapses += u32::from(!found.is_whole());
        }
        seen.is_whole = found.is_whole();
        if !found.is_whole() {
            seen.unprotected_s += passed.as_secs_f64();
            seen.missing_legs_max = seen.missing_legs_max.max(found.missing_legs);
            seen.shared_legs = seen.shared_legs.max(found.shared_legs);
            seen.exposed_bytes_max = seen.exposed_bytes_max.max(found.exposed_pages * PAGE_BYTES as u64);
        }
        // Two members at one server are a state that does not pass by itself.
        let is_news = self.is_said == self.is_whole && (now - self.since >= LASTS || found.shared_legs > 0);
        if !is_news {
            return None;
        }
        self.is_said = !self.is_whole;
        Some(match self.is_whole {
            true => "far memory is protected again".to_owned(),
            false => unprotected(found),
        })
    }

    /// Returns the protection so far, for the report; `None` if the pool promises nothing.
    pub(super) fn report(&self) -> Option<ProtectionReport> {
        self.seen
    }
}

/// Returns a line about a pool that does not protect as it should.
fn unprotected(found: Protection) -> String {
    let pages = found.exposed_pages * PAGE_BYTES as u64;
    let at_stake = if pages > 0 { format!("; up to {} are at stake", ByteSize(pages)) } else { String::new() };
    format!("far memory is not protected as its pool promises: {}{at_stake}", found.what_is_missing())
}

fn combine(status: &PoolStatus) -> Option<Protection> {
    status.protection.iter().map(|(_, protection)| *protection).reduce(|one, other| Protection {
        missing_legs: one.missing_legs.max(other.missing_legs),
        shared_legs: one.shared_legs.max(other.shared_legs),
        exposed_pages: one.exposed_pages + other.exposed_pages,
        restored_pages: one.restored_pages + other.restored_pages,
    })
}

#[cfg(test)]
mod tests {
    //! Danger: a job that runs for days on its last server, and nobody knows; a line for every hiccup.
    use super::*;

    fn with(missing_legs: u64, shared_legs: u64) -> Option<Protection> {
        Some(Protection {
            missing_legs,
            shared_legs,
            exposed_pages: 256 * (missing_legs + shared_legs),
            restored_pages: 0,
        })
    }

    /// What is said in each of these seconds, of which five looks are made.
    fn said(seconds: &[Option<Protection>]) -> (Vec<(usize, String)>, Option<ProtectionReport>) {
        let start = Instant::now();
        let mut watch = ProtectionWatch::new(start);
        let mut said = Vec::new();
        for (second, found) in seconds.iter().enumerate() {
            for look in 1..=5 {
                let now = start + Duration::from_millis(1000 * second as u64 + 200 * look);
                said.extend(watch.look(now, *found).map(|text| (second, text)));
            }
        }
        (said, watch.report())
    }

    #[test]
    fn a_lapse_is_said_once_and_so_is_its_end() {
        let (lost, whole) = (with(1, 0), with(0, 0));
        let (said, seen) = said(&[None, whole, lost, lost, lost, lost, lost, whole, whole, whole, whole]);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].0 == 4 && said[0].1.contains("a server is lost") && said[0].1.contains("1.0 MiB"), "{said:?}");
        assert!(said[1].0 == 9 && said[1].1.contains("again"), "{said:?}");
        let seen = seen.unwrap();
        assert!(seen.is_whole && seen.lapses == 1 && seen.missing_legs_max == 1, "{seen:?}");
        assert!((4.5..5.5).contains(&seen.unprotected_s), "{seen:?}");
    }

    #[test]
    fn a_moment_is_counted_and_not_said() {
        let (lost, whole) = (with(1, 0), with(0, 0));
        let (said, seen) = said(&[whole, lost, whole, lost, whole]);
        assert!(said.is_empty(), "{said:?}");
        assert_eq!(seen.unwrap().lapses, 2);
    }

    #[test]
    fn one_server_that_is_two_legs_is_said_at_once() {
        let (said, seen) = said(&[with(0, 1), with(0, 1)]);
        assert_eq!((said.len(), said[0].0), (1, 0));
        assert!(said[0].1.contains("one server is 2 of the members"), "{said:?}");
        assert!(!seen.unwrap().is_whole);
    }

    #[test]
    fn a_pool_without_a_promise_says_nothing() {
        assert_eq!(said(&[None, None, None]), (vec![], None));
    }
}
