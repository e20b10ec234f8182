//! Vectors in chunks and strings: they do what those of one process do, wherever their parts are.

use crate::support::{Checked, NodesTest, PATIENCE, all_is_free, at, is_deep, last_of, seeded};
use farfield_dsm::{
    DArc, DBox, DMutex, DString, DVec, Far, Here, JoinError, Lent, LentMut, NodeId, ShareError, channel, scope,
};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

pub(crate) const TESTS: &[NodesTest] = &[
    ("random_vectors_are_those_of_one_process", 1, random_vectors_are_those_of_one_process),
    ("random_vectors_of_two_nodes_are_those_of_one_process", 2, random_vectors_are_those_of_one_process),
    ("random_vectors_of_three_nodes_are_those_of_one_process", 3, random_vectors_are_those_of_one_process),
    ("random_strings_are_those_of_one_process", 2, random_strings_are_those_of_one_process),
    ("random_strings_of_three_nodes_are_those_of_one_process", 3, random_strings_are_those_of_one_process),
    ("vectors_lie_in_other_objects", 3, vectors_lie_in_other_objects),
    ("chunks_are_changed_at_several_nodes_at_once", 3, chunks_are_changed_at_several_nodes_at_once),
    ("what_is_appended_costs_no_version", 2, what_is_appended_costs_no_version),
    ("a_vector_that_does_not_fit_stays_as_it_was", 2, a_vector_that_does_not_fit_stays_as_it_was),
    ("a_node_that_dies_takes_its_chunks_only", 3, a_node_that_dies_takes_its_chunks_only),
    ("values_of_a_vector_are_dropped_once", 2, values_of_a_vector_are_dropped_once),
    ("slices_are_appended_as_values_are", 2, slices_are_appended_as_values_are),
];

/// Value that owns another.
type Owning = (u64, DBox<u64>);

fn same(here: &Here<'_>, vec: &DVec<Owning>, twin: &[u64]) -> Result<bool, ShareError> {
    let mut found = Vec::new();
    for value in vec.iter(here) {
        let (value, owned) = value?;
        assert_eq!(*value, *owned.get(here)?);
        found.push(*value);
    }
    let chunks: usize = vec.chunks(here)?.map(DBox::len).sum();
    Ok(found == twin && chunks == vec.len() && vec.is_empty() == twin.is_empty())
}

fn slices_are_appended_as_values_are(here: &Here<'_>) -> Checked {
    let mut random = seeded(5);
    for chunk_len in [1, 3, 64] {
        let (mut vec, mut twin) = (DVec::with_chunk(chunk_len), Vec::new());
        while twin.len() < 500 {
            let values: Vec<u64> = (0..random.usize(..2 * chunk_len + 2)).map(|_| random.u64(..)).collect();
            // Those that are there come from another node each other time.
            let (appended, back) = if random.bool() {
                (vec.extend_from_slice(here, &values), vec)
            } else {
                let values =
                    here.alloc((values.len(), std::array::from_fn::<u64, 130, _>(|at| *values.get(at).unwrap_or(&0))))?;
                at(here, NodeId(1), (vec, values), |here, (mut vec, values)| {
                    let appended = values.get(here).and_then(|(len, all)| vec.extend_from_slice(here, &all[..*len]));
                    (appended, vec)
                })?
            };
            appended?;
            vec = back;
            twin.extend(values);
            let chunks = twin.chunks(chunk_len);
            for (number, expected) in chunks.enumerate() {
                assert_eq!(vec.chunk(here, number)?.map(|chunk| chunk.get(here)).transpose()?, Some(expected));
            }
            assert!(vec.chunk(here, twin.len().div_ceil(chunk_len))?.is_none());
        }
        assert_eq!(vec.len(), twin.len());
    }
    all_is_free(here)
}

/// One random step, which `Vec` does as well: its outcome by bytes.
fn vec_step(here: &Here<'_>, vec: &mut DVec<Owning>, seed: u64) -> Result<Option<u64>, ShareError> {
    let mut random = fastrand::Rng::with_seed(seed);
    let make = |value: u64| Ok::<_, ShareError>((value, here.alloc(value)?));
    Ok(match random.u8(..9) {
        0..3 => {
            for _ in 0..random.usize(..12) {
                vec.push(here, make(random.u64(..))?)?;
            }
            None
        }
        3 => {
            let values: Vec<_> = (0..random.usize(..30)).map(|_| make(random.u64(..))).collect::<Result<_, _>>()?;
            vec.extend(here, values)?;
            None
        }
        4 => vec.pop(here)?.map(|(value, _)| value),
        5 => {
            vec.truncate(here, random.usize(..=vec.len() + 3))?;
            None
        }
        6 if random.u8(..4) == 0 => {
            vec.clear();
            None
        }
        6 | 7 => {
            let index = random.usize(..=vec.len() + 1);
            vec.get(here, index)?.map(|(value, _)| *value)
        }
        _ => {
            let (index, more) = (random.usize(..=vec.len() + 1), random.u64(..));
            match vec.get_mut(here, index)? {
                Some((value, owned)) => {
                    *value ^= more;
                    *owned.get_mut(here)? ^= more;
                    Some(*value)
                }
                None => None,
            }
        }
    })
}

fn twin_step(vec: &mut Vec<u64>, seed: u64) -> Option<u64> {
    let mut random = fastrand::Rng::with_seed(seed);
    match random.u8(..9) {
        0..3 => {
            vec.extend((0..random.usize(..12)).map(|_| random.u64(..)).collect::<Vec<_>>());
            None
        }
        3 => {
            vec.extend((0..random.usize(..30)).map(|_| random.u64(..)).collect::<Vec<_>>());
            None
        }
        4 => vec.pop(),
        5 => {
            vec.truncate(random.usize(..=vec.len() + 3));
            None
        }
        6 if random.u8(..4) == 0 => {
            vec.clear();
            None
        }
        6 | 7 => vec.get(random.usize(..=vec.len() + 1)).copied(),
        _ => {
            let (index, more) = (random.usize(..=vec.len() + 1), random.u64(..));
            vec.get_mut(index).map(|value| {
                *value ^= more;
                *value
            })
        }
    }
}

fn random_vectors_are_those_of_one_process(here: &Here<'_>) -> Checked {
    let (mut random, steps) = (seeded(11), if is_deep() { 3000 } else { 80 });
    let nodes = here.nodes().count() as u16;
    for chunk in [1, 4] {
        let (mut vec, mut twin) = (DVec::with_chunk(chunk), Vec::new());
        for step in 0..steps {
            let (node, seed) = (NodeId(random.u16(..nodes)), random.u64(..));
            let (done, back) = at(here, node, (vec, seed), |here, (mut vec, seed)| {
                let done = vec_step(here, &mut vec, seed);
                (done, vec)
            })?;
            vec = back;
            assert_eq!(done, Ok(twin_step(&mut twin, seed)), "chunks of {chunk}, step {step}");
            assert_eq!(same(&here.enter(), &vec, &twin), Ok(true), "chunks of {chunk}, step {step}");
        }
    }
    all_is_free(here)
}

fn random_strings_are_those_of_one_process(here: &Here<'_>) -> Checked {
    let (mut random, steps) = (seeded(12), if is_deep() { 10_000 } else { 150 });
    let nodes = here.nodes().count() as u16;
    let (mut text, mut twin) = (DString::new(), String::new());
    for step in 0..steps {
        let more: String = (0..random.usize(..9)).map(|_| random.char(..)).collect();
        if random.u8(..20) == 0 {
            text.clear();
            twin.clear();
        }
        twin.push_str(&more);
        let mut bytes = [0u8; 40];
        bytes[..more.len()].copy_from_slice(more.as_bytes());
        let node = NodeId(random.u16(..nodes));
        let (done, back) = at(here, node, (text, bytes, more.len()), |here, (mut text, bytes, len)| {
            let more = std::str::from_utf8(&bytes[..len]).expect("it was a string");
            (text.push_str(here, more), text)
        })?;
        done?;
        text = back;
        let here = here.enter();
        assert_eq!((text.as_str(&here)?, text.len(), text.is_empty()), (&*twin, twin.len(), twin.is_empty()), "{step}");
    }
    let made = at(here, NodeId(nodes - 1), (), |here, ()| DString::from_str(here, "Größe"))??;
    assert_eq!(made.as_str(here)?, "Größe");
    drop((text, made));
    all_is_free(here)
}

fn vectors_lie_in_other_objects(here: &Here<'_>) -> Checked {
    let locked = DMutex::new(here, (DVec::<u64>::with_chunk(16), DString::new()))?;
    let shared = DArc::new(here, locked)?;
    let tasks = here.nodes().map(|node| {
        here.spawn_to(node, (shared.try_clone(here)?,), |here, (shared,)| {
            for round in 0..20 {
                let mut guard = shared.get(here)?.lock(here)?;
                let (numbers, text) = &mut *guard;
                numbers.push(here, round)?;
                text.push_str(here, "ab")?;
            }
            Ok::<_, ShareError>(())
        })
    });
    let tasks: Vec<_> = tasks.collect::<Result<_, ShareError>>()?;
    tasks.into_iter().try_for_each(|task| Ok::<_, JoinError>(task.join(here)??))?;
    {
        let guard = shared.get(here)?.lock(here)?;
        let sum = guard.0.iter(here).try_fold(0, |sum, number| number.map(|number| sum + number))?;
        assert_eq!((sum, guard.0.len(), guard.1.as_str(here)?), (3 * 190, 60, &*"ab".repeat(60)));
    }
    // A vector of strings is handed over, with all that it owns.
    let (sender, receiver) = channel::<DVec<DString>>(here, 1)?;
    let sent = at(here, NodeId(1), (sender,), |here, (sender,)| {
        let mut texts = DVec::with_chunk(2);
        for text in ["a", "bc", "def"] {
            texts.push(here, DString::from_str(here, text)?)?;
        }
        Ok::<_, ShareError>(sender.send(here, texts).is_ok())
    })?;
    let texts = receiver.recv(here).expect("one was sent");
    let read: String = texts.iter(here).map(|text| text?.as_str(here)).collect::<Result<_, ShareError>>()?;
    assert_eq!((sent, &*read, texts.get(here, 3)?.is_none()), (Ok(true), "abcdef", true));
    drop((shared, receiver, texts));
    all_is_free(here)
}

fn chunks_are_changed_at_several_nodes_at_once(here: &Here<'_>) -> Checked {
    const LEN: u64 = 25_000;
    // Two full chunks of 80,000 bytes, which come in pieces, and one that is not full.
    let mut vec = DVec::with_chunk(10_000);
    vec.extend(here, 0..LEN)?;
    assert_eq!((vec.len(), vec.chunk_len()), (LEN as usize, 10_000));
    for round in 1..4 {
        let mut chunks: Vec<_> = vec.chunks_mut(here)?.collect();
        scope(here, |s| {
            let mut tasks = Vec::new();
            for (chunk, node) in chunks.iter_mut().zip(here.nodes()) {
                tasks.push(s.spawn_to(node, (s.lend_mut(chunk),), |here, (mut chunk,): (LentMut<'_, [u64]>,)| {
                    chunk.get_mut(here).map(|mut values| values.iter_mut().for_each(|value| *value += 1))
                })?);
            }
            tasks.into_iter().try_for_each(|task| Ok::<_, JoinError>(task.join()??))
        })??;
        assert!(chunks.iter().map(|chunk| chunk.home()).eq(here.nodes()));
        assert_eq!(chunks.iter().map(|chunk| chunk.len()).collect::<Vec<_>>(), [10_000, 10_000, 5_000]);
        // All of them read all.
        let sum = |here: &Here<'_>, chunks: [Lent<'_, [u64]>; 3]| {
            chunks.iter().try_fold(0, |sum, chunk| Ok::<_, ShareError>(sum + chunk.get(here)?.iter().sum::<u64>()))
        };
        scope(here, |s| {
            let lent: Vec<_> = vec.chunks(here)?.map(|chunk| s.lend(chunk)).collect();
            let lent: [_; 3] = lent.try_into().expect("three chunks");
            for node in here.nodes() {
                let read = s.spawn_to(node, lent, sum)?.join()?;
                assert_eq!(read, Ok(LEN * (LEN - 1) / 2 + LEN * round));
            }
            Ok::<_, JoinError>(())
        })??;
    }
    // What was appended elsewhere meanwhile is behind.
    let (pushed, vec) = at(here, NodeId(1), (vec,), |here, (mut vec,)| (vec.push(here, 7), vec))?;
    pushed?;
    assert_eq!(vec.get(here, 25_000)?, Some(&7));
    assert_eq!(vec.get(here, 25_001)?, None);
    drop(vec);
    all_is_free(here)
}

fn what_is_appended_costs_no_version(here: &Here<'_>) -> Checked {
    let mut vec = DVec::with_chunk(1 << 17);
    for value in 0..200_000u32 {
        vec.push(here, value)?;
    }
    // No block has used up its colours: blocks double, and full ones stay.
    let stats = here.stats();
    assert!(stats.moved_objects < 40 && stats.object_bytes < 1_700_000, "{stats:?}");
    // Each length is read elsewhere as it is then, in new copies.
    let mut short = DVec::<u64>::new();
    for len in 1..60u64 {
        short.push(here, len)?;
        let (read, back) = at(here, NodeId(1), (short,), |here, (vec,)| {
            let sum = vec.iter(here).try_fold(0, |sum, value| value.map(|value| sum + value));
            (sum, vec)
        })?;
        (short, _) = (back, assert_eq!(read, Ok(len * (len + 1) / 2)));
        if len % 10 == 0 {
            // The last one is another one from now on, at the same place.
            assert_eq!(short.pop(here)?, Some(len));
            short.push(here, len + 1)?;
            let (read, back) = at(here, NodeId(1), (short,), |here, (vec,)| {
                (vec.get(here, vec.len() - 1).map(|value| value.copied()), vec)
            })?;
            assert_eq!(read, Ok(Some(len + 1)));
            short = back;
            *short.get_mut(here, len as usize - 1)?.expect("it is there") = len;
        }
    }
    drop((vec, short));
    all_is_free(here)
}

fn a_vector_that_does_not_fit_stays_as_it_was(here: &Here<'_>) -> Checked {
    let mut vec = DVec::with_chunk(1000);
    let error = loop {
        let len = vec.len() as u64;
        if let Err(error) = here.alloc(1u8).and_then(|owned| vec.push(here, (len, owned))) {
            break error;
        }
    };
    assert!(matches!(error, ShareError::Full { .. }), "{error}");
    let len = vec.len();
    assert!(len > 10_000, "{len}");
    // Somewhere else there is room.
    let (pushed, vec) = at(here, NodeId(1), (vec,), |here, (mut vec,)| {
        (here.alloc(1u8).and_then(|owned| vec.push(here, (vec.len() as u64, owned))), vec)
    })?;
    assert_eq!((pushed, vec.len()), (Ok(()), len + 1));
    assert!(vec.iter(here).zip(0..).all(|(value, index)| value.is_ok_and(|value| value.0 == index)));
    drop(vec);
    all_is_free(here)
}

fn a_node_that_dies_takes_its_chunks_only(here: &Here<'_>) -> Checked {
    let lost = ShareError::NodeLost { node: NodeId(1) };
    let mut vec = DVec::with_chunk(10);
    vec.extend(here, 0..35u64)?;
    {
        let mut chunks: Vec<_> = vec.chunks_mut(here)?.collect();
        // The second chunk goes to the node that dies; the third one is lent to it then.
        scope(here, |s| {
            let task = s.spawn_to(NodeId(1), (s.lend_mut(&mut chunks[1]),), |here, (mut chunk,)| {
                chunk.get_mut(here).map(drop)
            })?;
            task.join()?.map_err(JoinError::from)
        })??;
        let ended = scope(here, |s| {
            let task = s.spawn_to(NodeId(1), (s.lend_mut(&mut chunks[2]),), |here, (mut chunk,)| {
                chunk.get_mut(here).map(|mut values| values.fill(0))?;
                std::process::abort();
                #[allow(unreachable_code, reason = "the type of the result")]
                Ok::<(), ShareError>(())
            })?;
            task.join()
        });
        assert_eq!(last_of(ended), Err(lost.into()));
    }
    let read: Vec<_> = vec.chunks(here)?.map(|chunk| chunk.get(here).map(|values| values[0])).collect();
    assert_eq!(read, [Ok(0), Err(lost), Ok(20), Ok(30)]);
    assert_eq!((vec.get(here, 9)?, vec.get(here, 12), vec.get(here, 34)?), (Some(&9), Err(lost), Some(&34)));
    assert_eq!(vec.iter(here).filter_map(Result::err).count(), 1);
    assert_eq!((vec.get_mut(here, 12).map(drop), vec.pop(here)), (Err(lost), Ok(Some(34))));
    vec.truncate(here, 25)?;
    assert_eq!((vec.len(), vec.truncate(here, 15)), (25, Err(lost)));
    assert_eq!((vec.len(), vec.pop(here)), (20, Err(lost)));
    // Whole chunks that are gone are counted, and no more.
    let before = here.stats().orphans;
    vec.truncate(here, 10)?;
    let started = Instant::now();
    while here.stats().orphans == before {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    assert_eq!((vec.pop(here)?, here.stats().orphans, here.stats().late_frees), (Some(9), before + 1, 0));
    Ok(())
}

/// Value whose destructor is counted, and panics if it is asked to.
#[derive(Far)]
struct Counted {
    panics: bool,
    owned: DBox<u64>,
}

static DROPPED: AtomicUsize = AtomicUsize::new(0);

impl Drop for Counted {
    fn drop(&mut self) {
        DROPPED.fetch_add(1, SeqCst);
        assert!(!self.panics, "a destructor that fails");
    }
}

fn values_of_a_vector_are_dropped_once(here: &Here<'_>) -> Checked {
    DROPPED.store(0, SeqCst);
    let mut vec = DVec::with_chunk(8);
    for number in 0..30u64 {
        vec.push(here, Counted { panics: number == 13 || number == 27, owned: here.alloc(number)? })?;
    }
    // One of them fails within a chunk that stays, while the others of it are dropped.
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| vec.truncate(here, 26)));
    assert!(panicked.is_err());
    assert_eq!((vec.len(), DROPPED.load(SeqCst)), (26, 4));
    assert_eq!(vec.pop(here)?.map(|value| value.owned.get(here).copied()), Some(Ok(25)));
    // The others at their node, by its own thread.
    let (there, vec) = at(here, NodeId(1), (vec,), |here, (mut vec,)| (vec.truncate(here, 18), vec))?;
    there?;
    drop(vec);
    let started = Instant::now();
    while DROPPED.load(SeqCst) < 4 + 1 + 16 {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    all_is_free(here)?;
    // Those of the chunk that was brought to the other node were dropped there.
    assert_eq!(DROPPED.load(SeqCst) + at(here, NodeId(1), (), |_, ()| DROPPED.load(SeqCst))?, 30);
    Ok(())
}
