//! Reads that do not wait or outlive their scope: each version is asked for once, and errors are told.

use crate::support::{Checked, NEAR_BYTES, NodesTest, PATIENCE, all_is_free, at, signal_process, stop_process};
use farfield_dsm::{DArc, DBox, DVec, Here, JoinError, NodeId, Owner, ShareError, scope};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

pub(crate) const TESTS: &[NodesTest] = &[
    ("what_is_prefetched_is_asked_for_once", 2, what_is_prefetched_is_asked_for_once),
    ("a_silent_node_holds_up_no_other_reads", 3, a_silent_node_holds_up_no_other_reads),
    ("what_cannot_be_prefetched_is_told_to_its_reader", 3, what_cannot_be_prefetched_is_told_to_its_reader),
    ("prefetched_copies_count_as_near", 2, prefetched_copies_count_as_near),
    ("many_are_awaited_by_one_thread", 2, many_are_awaited_by_one_thread),
    ("what_is_pinned_outlives_its_scope", 2, what_is_pinned_outlives_its_scope),
];

struct Unpark {
    thread: Thread,
    woken: AtomicUsize,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.woken.fetch_add(1, SeqCst);
        self.thread.unpark();
    }
}

/// Polls a future until it is ready. Returns how often it was woken, too.
fn block_on<F: Future>(future: F) -> (F::Output, usize) {
    let unpark = Arc::new(Unpark { thread: std::thread::current(), woken: AtomicUsize::new(0) });
    let (waker, mut future, started) = (Waker::from(unpark.clone()), pin!(future), Instant::now());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return (output, unpark.woken.load(SeqCst));
        }
        assert!(started.elapsed() < PATIENCE, "nobody has woken it");
        std::thread::park_timeout(Duration::from_secs(1));
    }
}

/// Waits until this node has copies of so many bytes.
fn wait_for_copies(here: &Here<'_>, bytes: u64) {
    let started = Instant::now();
    while here.stats().copy_bytes < bytes {
        assert!(started.elapsed() < PATIENCE, "{:?}", here.stats());
        std::thread::yield_now();
    }
}

fn made_there(here: &Here<'_>, count: u64) -> Result<Vec<DBox<[u64; 100]>>, JoinError> {
    let made =
        (0..count).map(|number| Ok(at(here, NodeId(1), (number,), |here, (number,)| here.alloc([number; 100]))??));
    made.collect()
}

fn what_is_prefetched_is_asked_for_once(here: &Here<'_>) -> Checked {
    let boxes = made_there(here, 50)?;
    let local = here.alloc([1u64; 100])?;
    let before = here.stats();
    for _ in 0..3 {
        boxes.iter().for_each(|boxed| boxed.prefetch(here));
        local.prefetch(here);
    }
    // Some are on their way, and are waited for; none is asked for again.
    for (boxed, number) in boxes.iter().zip(0..) {
        assert_eq!(boxed.get(here)?, &[number; 100]);
    }
    assert_eq!(here.stats().fetches - before.fetches, 50);
    // What has arrived is read without a message. Loans and shared owners are fetched as well.
    let shared = at(here, NodeId(1), (), |here, ()| DArc::new(here, [5u64; 100]))??;
    let lent = &made_there(here, 1)?[0];
    let before = here.stats();
    shared.prefetch(here);
    let read = scope(here, |s| {
        let lent = s.lend(lent);
        lent.prefetch(here);
        wait_for_copies(here, before.copy_bytes + 1600);
        assert_eq!((shared.get(here)?, here.stats().fetches - before.fetches), (&[5; 100], 2));
        lent.get(here).map(|values| values[0])
    })?;
    assert_eq!((read, here.stats().fetches - before.fetches), (Ok(0), 2));
    // An iterator asks for the chunk that comes next.
    let vec = at(here, NodeId(1), (), |here, ()| {
        let mut vec = DVec::with_chunk(100);
        vec.extend(here, 0..1000u64).map(|()| vec)
    })??;
    let before = here.stats();
    assert!(vec.iter(here).zip(0..).all(|(value, index)| value == Ok(&index)));
    assert_eq!(here.stats().fetches - before.fetches, 11, "the owners of the chunks, and ten chunks");
    drop((boxes, local, shared, vec));
    Ok(())
}

fn what_cannot_be_prefetched_is_told_to_its_reader(here: &Here<'_>) -> Checked {
    let lost = ShareError::NodeLost { node: NodeId(1) };
    let (boxes, before) = (made_there(here, 3)?, here.stats());
    let died = here.spawn_to(NodeId(1), (), |_, ()| -> () { std::process::abort() });
    boxes[0].prefetch(here);
    // It may die before it says that it has the task.
    assert_eq!(died.map_err(JoinError::from).and_then(|task| task.join(here)), Err(lost.into()));
    boxes[1].prefetch(here);
    boxes[2].prefetch(here);
    assert_eq!((boxes[1].get(here), block_on(boxes[2].fetch(here)).0), (Err(lost), Err(lost)));
    let other = at(here, NodeId(2), (), |here, ()| here.alloc(7u8))??;
    other.prefetch(here);
    assert_eq!((other.get(here)?, here.stats().late_frees), (&7, before.late_frees));
    Ok(())
}

fn a_silent_node_holds_up_no_other_reads(here: &Here<'_>) -> Checked {
    let silent = made_there(here, 20)?;
    let speaks: Vec<_> = (0..20u64)
        .map(|number| at(here, NodeId(2), (number,), |here, (number,)| here.alloc(number)))
        .map(|made| made?.map_err(JoinError::from))
        .collect::<Result<_, _>>()?;
    let process = at(here, NodeId(1), (), |_, ()| std::process::id())?;
    stop_process(process);
    silent.iter().for_each(|boxed| boxed.prefetch(here));
    // None of these waits for the other node.
    let read = block_on(async {
        let mut sum = 0;
        for boxed in &speaks {
            sum += boxed.fetch(here).await?;
        }
        Ok::<_, ShareError>(sum)
    });
    let copy_bytes = here.stats().copy_bytes;
    signal_process(process, "-CONT");
    assert_eq!((read.0, copy_bytes), (Ok(190), 20 * 8), "the other node was silent meanwhile");
    for (boxed, number) in silent.iter().zip(0..) {
        assert_eq!(boxed.get(here)?, &[number; 100]);
    }
    drop((silent, speaks));
    all_is_free(here)
}

fn prefetched_copies_count_as_near(here: &Here<'_>) -> Checked {
    let own = (0..25).map(|_| here.alloc([0u64; 10_000])).collect::<Result<Vec<_>, _>>()?;
    let far: Vec<DBox<[u64; 10_000]>> = (0..30u64)
        .map(|number| at(here, NodeId(1), (number,), |here, (number,)| here.alloc([number; 10_000])))
        .map(|made| made?.map_err(JoinError::from))
        .collect::<Result<_, _>>()?;
    let before = here.stats().fetches;
    far.iter().for_each(|boxed| boxed.prefetch(here));
    let started = Instant::now();
    while here.stats().fetches - before < 30 {
        let stats = here.stats();
        assert!(stats.object_bytes + stats.copy_bytes <= NEAR_BYTES, "{stats:?}");
        assert!(started.elapsed() < PATIENCE, "{stats:?}");
        std::thread::yield_now();
    }
    for (boxed, number) in far.iter().zip(0..) {
        assert_eq!(boxed.get(&here.enter())?[9_999], number);
    }
    let stats = here.stats();
    assert!(stats.object_bytes + stats.copy_bytes <= NEAR_BYTES && stats.copy_bytes > 0, "{stats:?}");
    drop((own, far));
    all_is_free(here)
}

fn many_are_awaited_by_one_thread(here: &Here<'_>) -> Checked {
    let (boxes, local) = (made_there(here, 20)?, here.alloc(3u8)?);
    let before = here.stats();
    let ((), woken) = block_on(async {
        // All of them are on their way before the first one is waited for.
        let mut fetches: Vec<_> = boxes.iter().map(|boxed| boxed.fetch(here)).collect();
        let pending = std::future::poll_fn(|context| {
            let polled = fetches.iter_mut().filter_map(|fetch| match pin!(fetch).poll(context) {
                Poll::Ready(read) => Some(read.expect("it is there")[0]),
                Poll::Pending => None,
            });
            Poll::Ready(polled.count())
        });
        let ready = pending.await;
        assert!(ready <= 20);
        for (boxed, number) in boxes.iter().zip(0..) {
            assert_eq!(boxed.fetch(here).await, Ok(&[number; 100]));
        }
        assert_eq!(local.fetch(here).await, Ok(&3));
    });
    let after = here.stats();
    assert_eq!(after.fetches - before.fetches, 20, "woken {woken} times");
    // One that is given up comes all the same.
    let given_up = &made_there(here, 1)?[0];
    let _ = pin!(given_up.fetch(here)).poll(&mut Context::from_waker(Waker::noop()));
    assert_eq!((given_up.get(here)?, here.stats().fetches - after.fetches), (&[0; 100], 1));
    drop((boxes, local));
    Ok(())
}

fn what_is_pinned_outlives_its_scope(here: &Here<'_>) -> Checked {
    let (mut there, local) = (made_there(here, 1)?.remove(0), here.alloc([8u64; 100])?);
    {
        let mut short = here.enter();
        let (far, near) = (there.pin(&short)?, local.pin(&short)?);
        let again = there.pin(here)?;
        short.renew();
        drop(short);
        // Everything else takes the memory that copies may have.
        let rest = (NEAR_BYTES - here.stats().object_bytes) / 9000;
        let others: Vec<_> = (0..rest).map_while(|_| here.alloc([1u64; 1000]).ok()).collect();
        std::thread::scope(|s| {
            s.spawn(|| assert_eq!((*far, *near), ([0; 100], [8; 100])));
        });
        assert_eq!((*again, others.is_empty()), ([0; 100], false));
    }
    // The owner is borrowed no longer.
    there.get_mut(here)?[0] = 1;
    assert_eq!((there.pin(here)?[0], there.home()), (1, here.id()));
    drop((there, local));
    all_is_free(here)
}
