//! What happened since the server started. Connections count for themselves and add up once per batch.

use farfield_core::wire::Kind;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Shared by all connections.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $($(#[$doc])* pub(crate) $name: AtomicU64,)*
            /// Requests by kind; index is the kind's number.
            pub(crate) requests: [AtomicU64; KINDS],
        }

        /// Counted by one connection since it last added up.
        #[derive(Debug, Default)]
        pub(crate) struct Tally {
            $(pub(crate) $name: u64,)*
            pub(crate) requests: [u64; KINDS],
        }

        impl Counters {
            /// Adds the tally and leaves it as it is.
            pub(crate) fn copy(&self, tally: &Tally) {
                $(add(&self.$name, &mut { tally.$name });)*
            }

            /// Adds the tally and clears it.
            pub(crate) fn add(&self, tally: &mut Tally) {
                $(add(&self.$name, &mut tally.$name);)*
                for (total, part) in self.requests.iter().zip(&mut tally.requests) {
                    add(total, part);
                }
            }
        }
    };
}

fn add(total: &AtomicU64, part: &mut u64) {
    if *part > 0 {
        total.fetch_add(core::mem::take(part), Ordering::Relaxed);
    }
}

/// Numbers of kinds are below this.
pub(crate) const KINDS: usize = Kind::ALL.len() + 1;

counters! {
    /// Pages that readers were given.
    read_pages,
    /// Pages asked for that were absent.
    absent_pages,
    /// Pages stored.
    written_pages,
    /// Pages forgotten.
    discarded_pages,
    /// Bytes that arrived.
    received_bytes,
    /// Bytes that were sent.
    sent_bytes,
    /// Requests answered with an error.
    failed_requests,
    /// Of these, because capacity or a quota was used up.
    full_requests,
    /// Of these, because a page did not match its checksum.
    corrupt_requests,
    /// Of these, because the deadline had passed.
    late_requests,
    /// Connections that gave up their places before they had said who they are.
    evicted_connections,
    /// Connections that were refused.
    refused_connections,
    /// Connections ended because their bytes were no conversation.
    broken_connections,
    /// Sessions whose lease ran out.
    expired_sessions,
    /// Times that a connection went to sleep because no request came.
    sleeps,
}

impl Tally {
    /// Counts a request.
    pub(crate) fn request(&mut self, kind: Kind) {
        if let Some(count) = self.requests.get_mut(usize::from(kind as u8)) {
            *count += 1;
        }
    }
}

impl Counters {
    pub(crate) fn get(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }
}
