//! A bucket of the far hash map in all interleavings, with loom: who looks while entries move does not miss what is there all the
//! time. The steps are those of `crates/farfield/src/collections/map/index.rs`, with the same orderings.

use farfield_core::heap::buckets::{BucketWord, bucket_of, has, low_bits};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Two entries, which are in bucket 0 of a table of one, and of which the second goes to bucket 1 of a table of two.
const HASHES: [u32; 2] = [2, 1];

struct Model {
    count: AtomicU32,
    words: [AtomicU32; 2],
    /// Two places in each bucket: an entry's hash plus one, or 0.
    slots: [[AtomicU64; 2]; 2],
}

impl Model {
    fn new() -> Arc<Model> {
        let slot = |hash: u32| AtomicU64::new(u64::from(hash) + 1);
        Arc::new(Model {
            count: AtomicU32::new(1),
            words: [AtomicU32::new(BucketWord::new(0).0), AtomicU32::new(0)],
            slots: [[slot(HASHES[0]), slot(HASHES[1])], [AtomicU64::new(0), AtomicU64::new(0)]],
        })
    }

    fn home(&self, hash: u32) -> (usize, BucketWord) {
        let mut number = bucket_of(hash, self.count.load(Ordering::Acquire));
        loop {
            let word = BucketWord(self.words[number as usize].load(Ordering::Acquire));
            if has(number, word.depth(), hash) {
                return (number as usize, word);
            }
            let again = bucket_of(hash, self.count.load(Ordering::Acquire));
            number = if again == number { low_bits(hash, word.depth()) } else { again };
        }
    }

    /// True if the entry is found, false if it is proven absent; `None` if the search must be repeated.
    fn find(&self, hash: u32) -> Option<bool> {
        let (bucket, before) = self.home(hash);
        if self.slots[bucket].iter().any(|slot| slot.load(Ordering::Acquire) == u64::from(hash) + 1) {
            return Some(true);
        }
        fence(Ordering::Acquire);
        before.proves_absence(BucketWord(self.words[bucket].load(Ordering::Relaxed))).then_some(false)
    }

    fn lock(&self) -> Option<BucketWord> {
        let seen = BucketWord(self.words[0].load(Ordering::Acquire));
        let word = seen.lock()?;
        let locked = self.words[0].compare_exchange(seen.0, word.0, Ordering::Acquire, Ordering::Relaxed);
        locked.is_ok().then_some(word)
    }

    /// Splits bucket 0. `marks`: as it must be done; without, the model has to fail.
    fn split(&self, marks: bool) {
        let Some(mut word) = self.lock() else { return };
        word = word.moving();
        if marks {
            self.words[0].store(word.0, Ordering::Relaxed);
            fence(Ordering::Release);
        }
        self.slots[1][0].store(u64::from(HASHES[1]) + 1, Ordering::Release);
        self.words[1].store(BucketWord::new(1).0, Ordering::Release);
        // What stays is written anew too.
        self.slots[0][0].store(u64::from(HASHES[0]) + 1, Ordering::Release);
        self.slots[0][1].store(0, Ordering::Release);
        self.words[0].store(word.moved(1, false).unlock().0, Ordering::Release);
        self.count.store(2, Ordering::Release);
    }
}

fn look_while_split(marks: bool) {
    loom::model(move || {
        let model = Model::new();
        let other = model.clone();
        let splitter = loom::thread::spawn(move || other.split(marks));
        for hash in HASHES {
            assert_ne!(model.find(hash), Some(false), "hash {hash} was there all the time");
        }
        splitter.join().unwrap();
        assert_eq!(HASHES.map(|hash| model.find(hash)), [Some(true); 2]);
        assert_eq!(model.find(5), Some(false));
    });
}

#[test]
fn lookups_find_every_entry_while_a_bucket_is_split() {
    look_while_split(true);
}

#[test]
#[should_panic(expected = "was there all the time")]
fn without_the_mark_something_is_missed() {
    look_while_split(false);
}
