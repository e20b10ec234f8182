//! ServerCounters of events since the server started. Each connection counts by itself and adds its
//! counts once per batch.

use farfield_core::wire::MessageKind;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// ServerCounters that all connections share.
        #[derive(Debug, Default)]
        pub(crate) struct ServerCounters {
            $($(#[$doc])* pub(crate) $name: AtomicU64,)*
            /// Requests by kind, indexed by the kind's number.
            pub(crate) requests: [AtomicU64; KINDS],
        }

        /// Counts of one connection since it last added them to the shared counters.
        #[derive(Debug, Default)]
        pub(crate) struct ConnectionTally {
            $(pub(crate) $name: u64,)*
            pub(crate) requests: [u64; KINDS],
        }

        impl ServerCounters {
            /// Adds the tally to these counters, without its requests by kind, and leaves the tally
            /// as it is.
            pub(crate) fn copy(&self, tally: &ConnectionTally) {
                $(add(&self.$name, &mut { tally.$name });)*
            }

            /// Adds the tally to these counters and clears it.
            pub(crate) fn add(&self, tally: &mut ConnectionTally) {
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

/// Exclusive upper bound of the numbers of kinds.
pub(crate) const KINDS: usize = MessageKind::ALL.len() + 1;

counters! {
    /// Pages sent to readers.
    read_pages,
    /// Pages that readers asked for and that were absent.
    absent_pages,
    /// Pages stored.
    written_pages,
    /// Pages discarded.
    discarded_pages,
    /// Bytes received.
    received_bytes,
    /// Bytes sent.
    sent_bytes,
    /// Requests answered with an error.
    failed_requests,
    /// Failed requests for which capacity or a quota was used up.
    full_requests,
    /// Failed requests for which a page did not match its checksum.
    corrupt_requests,
    /// Failed requests whose deadline had passed.
    late_requests,
    /// Connections that lost their slots before they had authenticated.
    evicted_connections,
    /// Connections that were refused.
    refused_connections,
    /// Connections ended because their bytes did not follow the protocol, or did not come in time.
    broken_connections,
    /// Sessions whose lease ran out.
    expired_sessions,
    /// Times that a connection went to sleep because no request came.
    sleeps,
}

impl ConnectionTally {
    /// Counts a request of this kind.
    pub(crate) fn request(&mut self, kind: MessageKind) {
        if let Some(count) = self.requests.get_mut(usize::from(kind as u8)) {
            *count += 1;
        }
    }
}

impl ServerCounters {
    pub(crate) fn get(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }
}
