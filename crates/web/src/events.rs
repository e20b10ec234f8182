//! Server-sent events (WHATWG HTML, section 9.2): a snapshot for who comes, then changes for all.
//!
//! What is sent is computed once for all readers and shared by them. The channel keeps the newest
//! snapshot and a few changes, and nothing per reader but a number. A reader that falls behind by
//! more than these changes continues with a snapshot, so slow readers cost no memory.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Changes that the channel keeps for readers that are a little late.
const CHANGES_KEPT: usize = 4;

/// Channel from one publisher to any number of readers.
#[derive(Default)]
pub struct EventChannel {
    published: Mutex<PublishedEvents>,
    news: Condvar,
    readers: AtomicUsize,
    arrival: Condvar,
}

#[derive(Default)]
struct PublishedEvents {
    /// Number of events so far. The snapshot is the state after all of them.
    count: u64,
    snapshot: Arc<str>,
    /// Newest changes, framed; the last one has number `count`.
    changes: VecDeque<Arc<[u8]>>,
}

impl EventChannel {
    /// Publishes a change, and the snapshot that it leads to. Readers get them as the events
    /// `change` and `snapshot`.
    pub fn publish(&self, snapshot: String, change: &str) {
        let mut published = self.lock();
        published.count += 1;
        published.snapshot = snapshot.into();
        let change = frame("change", published.count, change).into();
        published.changes.push_back(change);
        if published.changes.len() > CHANGES_KEPT {
            published.changes.pop_front();
        }
        self.news.notify_all();
    }

    /// Returns the number of readers now.
    pub fn readers(&self) -> usize {
        self.readers.load(Ordering::Relaxed)
    }

    /// Waits until there is a reader, for `within` at most.
    pub fn wait_for_reader(&self, within: Duration) {
        drop(self.arrival.wait_timeout_while(self.lock(), within, |_| self.readers() == 0));
    }

    pub(crate) fn subscribe(&self) -> EventReader<'_> {
        // Under the lock: a publisher between its look and its sleep would miss the arrival.
        let published = self.lock();
        self.readers.fetch_add(1, Ordering::Relaxed);
        drop(published);
        self.arrival.notify_all();
        EventReader { channel: self, seen: None }
    }

    fn lock(&self) -> MutexGuard<'_, PublishedEvents> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reader of a channel.
pub(crate) struct EventReader<'a> {
    channel: &'a EventChannel,
    /// Number of the last event that the reader has got.
    seen: Option<u64>,
}

impl EventReader<'_> {
    /// Waits for the next event and returns it, framed. Returns `None` if none comes `within` that
    /// time.
    pub(crate) fn next(&mut self, within: Duration) -> Option<Arc<[u8]>> {
        let until = Instant::now() + within;
        let mut published = self.channel.lock();
        while published.count == self.seen.unwrap_or(0) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            published = self.channel.news.wait_timeout(published, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let behind = self.seen.map(|seen| published.count - seen);
        let kept = published.changes.len() as u64;
        match behind.filter(|behind| *behind <= kept) {
            Some(behind) => {
                let index = usize::try_from(kept - behind).ok()?;
                self.seen = Some(published.count - behind + 1);
                published.changes.get(index).cloned()
            }
            None => {
                self.seen = Some(published.count);
                Some(frame("snapshot", published.count, &published.snapshot).into())
            }
        }
    }
}

impl Drop for EventReader<'_> {
    fn drop(&mut self) {
        self.channel.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Frames an event. Each line of the data has a field of its own, because a line break ends one.
fn frame(name: &str, number: u64, data: &str) -> Vec<u8> {
    let mut framed = format!("event: {name}\nid: {number}\n");
    for line in data.split(['\n', '\r']) {
        framed.push_str("data: ");
        framed.push_str(line);
        framed.push('\n');
    }
    framed.push('\n');
    framed.into_bytes()
}

#[cfg(test)]
mod tests {
    //! Guards against readers that miss a change, and against data that end an event early.
    use super::*;

    fn next(reader: &mut EventReader<'_>) -> String {
        reader.next(Duration::ZERO).map_or(String::new(), |event| String::from_utf8(event.to_vec()).unwrap())
    }

    #[test]
    fn a_line_break_in_the_data_does_not_end_the_event() {
        let framed = frame("change", 7, "a\n\nevent: evil\rb");
        let framed = String::from_utf8(framed).unwrap();
        assert_eq!(framed, "event: change\nid: 7\ndata: a\ndata: \ndata: event: evil\ndata: b\n\n");
    }

    #[test]
    fn a_reader_gets_a_snapshot_then_each_change_and_a_snapshot_when_it_fell_behind() {
        let channel = EventChannel::default();
        let mut reader = channel.subscribe();
        assert_eq!((next(&mut reader), channel.readers()), (String::new(), 1));
        channel.publish("state 1".into(), "to 1");
        assert_eq!(next(&mut reader), "event: snapshot\nid: 1\ndata: state 1\n\n");
        assert_eq!(next(&mut reader), "");
        for number in 2..=3 {
            channel.publish(format!("state {number}"), &format!("to {number}"));
        }
        assert_eq!(next(&mut reader), "event: change\nid: 2\ndata: to 2\n\n");
        assert_eq!(next(&mut reader), "event: change\nid: 3\ndata: to 3\n\n");
        for number in 4..=20 {
            channel.publish(format!("state {number}"), &format!("to {number}"));
        }
        assert_eq!(next(&mut reader), "event: snapshot\nid: 20\ndata: state 20\n\n");
        drop(reader);
        assert_eq!(channel.readers(), 0);
    }
}
