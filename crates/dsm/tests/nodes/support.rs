//! What the tests have in common.

use farfield_dsm::{Far, FarGroup, Here, JoinError, LentMut, NodeId, NodeStats, ShareError, scope};
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

/// Longest wait for something that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Near memory of each node.
pub(crate) const NEAR_BYTES: u64 = 4 << 20;

/// Tests that count what copies cost, and one that reads no objects.
pub(crate) const COPIES_ONLY: &[&str] = &[
    "each_version_is_asked_for_once",
    "clones_send_few_messages",
    "no_more_messages_are_sent_than_must_be",
    "a_group_comes_by_one_message",
    "what_is_prefetched_is_asked_for_once",
    "prefetched_copies_count_as_near",
    "many_are_awaited_by_one_thread",
    "a_silent_node_holds_up_no_other_reads",
    "copies_make_room",
    "a_scope_that_reads_too_much_is_told",
    "who_dies_is_named_and_the_others_go_on",
    "random_programs_see_some_interleaving",
    "given_tasks_of_a_dead_node_are_lost",
];

pub(crate) type Checked = Result<(), JoinError>;
/// Name of a test, number of its nodes, and what the first of them runs.
pub(crate) type NodesTest = (&'static str, u16, fn(&Here<'_>) -> Checked);

/// Returns random numbers, with the seed that was asked for.
pub(crate) fn seeded(usual: u64) -> fastrand::Rng {
    let seed = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok());
    fastrand::Rng::with_seed(seed.unwrap_or(usual))
}

/// Returns whether this is the deep tier.
pub(crate) fn is_deep() -> bool {
    std::env::var_os("FARFIELD_DEEP").is_some()
}

/// Runs a body at a node and returns what it returns.
pub(crate) fn at<A, R, F>(here: &Here<'_>, node: NodeId, arguments: A, body: F) -> Result<R, JoinError>
where
    A: Far,
    R: Far,
    F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy + 'static,
{
    here.spawn_to(node, arguments, body)?.join(here)
}

/// Returns the end of a task of a scope that ends its node. The node may die before it has said that it has
/// the task, for which the scope waits then.
pub(crate) fn last_of<R>(scope: Result<Result<R, JoinError>, JoinError>) -> Result<R, JoinError> {
    scope.and_then(|joined| joined)
}

/// Counts of a node that can travel.
pub(crate) fn counts(here: &Here<'_>, node: NodeId) -> Result<[u64; 4], JoinError> {
    at(here, node, (), |here, ()| {
        let NodeStats { object_bytes, late_frees, orphans, fetches, .. } = here.stats();
        [object_bytes, late_frees, orphans, fetches]
    })
}

/// No node has objects any more, and nobody has freed one twice.
pub(crate) fn all_is_free(here: &Here<'_>) -> Checked {
    for node in here.nodes() {
        let started = Instant::now();
        loop {
            let [object_bytes, late_frees, orphans, _] = counts(here, node)?;
            assert_eq!((late_frees, orphans), (0, 0), "node {node}");
            if object_bytes == 0 {
                break;
            }
            assert!(started.elapsed() < PATIENCE, "node {node} keeps {object_bytes} bytes");
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// Tries something again until it is so.
pub(crate) fn until(mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

/// Sends a signal to a process.
pub(crate) fn signal_process(process: u32, name: &str) {
    let sent = std::process::Command::new("kill").args([name, &process.to_string()]).status();
    assert!(sent.expect("kill starts").success());
}

/// Stops a process, and waits until it has stopped: a signal is sent before.
pub(crate) fn stop_process(process: u32) {
    signal_process(process, "-STOP");
    let stat = || std::fs::read_to_string(format!("/proc/{process}/stat")).expect("it is there");
    until(|| stat().rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T')));
}

/// Object that random steps change, beside a twin of plain Rust.
pub(crate) trait Played: FarGroup + Sized {
    /// The twin.
    type Plain;

    /// Does a random step.
    fn step(&mut self, here: &Here<'_>, seed: u64) -> Result<(), ShareError>;

    /// Does the same step with the twin.
    fn plain_step(plain: &mut Self::Plain, seed: u64);

    /// Reads all of it.
    fn read(&self) {}
}

/// Random things with a loan: read, write, lend further, keep or forget.
pub(crate) fn play<T: Played>(
    here: &Here<'_>,
    mut lent: LentMut<'_, T>,
    seed: u64,
    depth: u64,
) -> Result<(), JoinError> {
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..random.usize(..4) {
        if random.bool() {
            lent.get_mut(here)?.step(here, random.u64(..))?;
        }
        if depth > 0 && random.bool() {
            let (node, seed) = (NodeId(random.u16(..here.nodes().count() as u16)), random.u64(..));
            scope(here, |s| {
                let task =
                    s.spawn_to(node, (s.lend_mut(&mut lent), seed, depth - 1), |here, (lent, seed, depth)| {
                        play(here, lent, seed, depth).map_err(|_| ShareError::Lost)
                    })?;
                task.join()?.map_err(JoinError::from)
            })??;
        }
        if random.bool() {
            lent.get(here)?.read();
        }
    }
    if random.bool() {
        let _ = ManuallyDrop::new(lent);
    }
    Ok(())
}

/// The same with a plain reference.
pub(crate) fn play_plain<T: Played>(plain: &mut T::Plain, nodes: u16, seed: u64, depth: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..random.usize(..4) {
        if random.bool() {
            T::plain_step(plain, random.u64(..));
        }
        if depth > 0 && random.bool() {
            let (_, seed) = (random.u16(..nodes), random.u64(..));
            play_plain::<T>(plain, nodes, seed, depth - 1);
        }
        random.bool();
    }
    random.bool();
}
