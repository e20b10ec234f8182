//! What messages, bytes, locks and tasks of shared memory cost on this machine: two processes over TCP.

use super::engine::Network;
use anyhow::{Context, Result};
use farfield_dsm::{DArc, DAtomic, DBox, DMutex, DVec, Here, JoinError, NodeBuilder, NodeId, ShareError};
use std::sync::Mutex;
use std::time::Instant;

const NEAR_BYTES: u64 = 1 << 30;
/// Messages one after the other.
const MESSAGES: usize = 2000;
/// Tasks that ask at the same time.
const ASKERS: usize = 8;
const LARGE_BYTES: usize = 1 << 20;
const LARGE_OBJECTS: usize = 64;
const LOCKS: usize = 200_000;
const TASKS: usize = 2000;

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}

fn timed<E>(mut body: impl FnMut() -> Result<(), E>) -> Result<u64, E> {
    let started = Instant::now();
    body()?;
    Ok(started.elapsed().as_nanos() as u64)
}

/// Returns the network of this machine, and the costs of the runtime. The other node runs this program, too, and comes no
/// further than here.
pub(super) fn calibrate() -> Result<Network> {
    let config = NodeBuilder::new().nodes(2).near(NEAR_BYTES).workers(ASKERS).read_in_place(false);
    let measured = farfield_dsm::run(&config, measure).context("the nodes do not start")?;
    Ok(measured?)
}

fn measure(here: &Here<'_>) -> Result<Network, JoinError> {
    let number = here.spawn_to(NodeId(1), (), |here, ()| DArc::new(here, DAtomic::new(here, 0u64)?))?.join(here)??;
    let load = || number.get(here)?.load(here).map(drop);
    let round_trip_ns = median((0..MESSAGES).map(|_| timed(load)).collect::<Result<_, _>>()?);
    // As many messages as both sides can handle: each side has a processor's worth of the time.
    let asking_ns = timed(|| -> Result<(), JoinError> {
        let asker = |here: &Here<'_>, (number,): (DArc<DAtomic<u64>>,)| {
            (0..MESSAGES).try_for_each(|_| number.get(here)?.load(here).map(drop))
        };
        let tasks = (0..ASKERS).map(|_| here.spawn_to(here.id(), (number.try_clone(here)?,), asker));
        let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
        tasks.into_iter().try_for_each(|task| Ok(task.join(here)??))
    })?;
    let handle_ns = (asking_ns / (MESSAGES * ASKERS) as u64).clamp(1, round_trip_ns / 2);
    Ok(Network {
        one_way_ns: (round_trip_ns - 2 * handle_ns) / 2,
        bytes_per_us: bytes_per_us(here, round_trip_ns)?,
        handle_ns,
        lock_ns: lock_ns(here)?,
        task_ns: task_ns(here)?,
        takes_processors: true,
    })
}

fn bytes_per_us(here: &Here<'_>, round_trip_ns: u64) -> Result<u64, JoinError> {
    let made = here.spawn_to(NodeId(1), (), |here, ()| {
        let mut chunks = DVec::with_chunk(LARGE_BYTES);
        let zeros = vec![0u8; LARGE_BYTES];
        (0..LARGE_OBJECTS).try_for_each(|_| chunks.extend_from_slice(here, &zeros))?;
        Ok::<_, ShareError>(chunks)
    })?;
    let chunks: DVec<u8> = made.join(here)??;
    let read = |chunk: &DBox<[u8]>| timed(|| chunk.get(&here.enter()).map(drop));
    let large_ns = median(chunks.chunks(here)?.map(read).collect::<Result<_, _>>()?);
    Ok((LARGE_BYTES as u64 * 1000 / large_ns.saturating_sub(round_trip_ns).max(1)).max(1))
}

fn lock_ns(here: &Here<'_>) -> Result<u64, JoinError> {
    let (mutex, plain) = (DMutex::new(here, 0u64)?, Mutex::new(0u64));
    let shared_ns = timed(|| (0..LOCKS).try_for_each(|_| mutex.lock(here).map(|mut value| *value += 1)))?;
    let plain_ns = timed(|| {
        (0..LOCKS).for_each(|_| *std::hint::black_box(&plain).lock().expect("no thread panics") += 1);
        Ok::<_, ShareError>(())
    })?;
    Ok(shared_ns.saturating_sub(plain_ns) / LOCKS as u64)
}

fn task_ns(here: &Here<'_>) -> Result<u64, JoinError> {
    let all_ns = timed(|| -> Result<(), JoinError> {
        let tasks = (0..TASKS).map(|_| here.spawn_to(here.id(), (), |_, ()| ()));
        let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
        tasks.into_iter().try_for_each(|task| task.join(here))
    })?;
    Ok(all_ns / TASKS as u64)
}
