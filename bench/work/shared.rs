//! Memory that several processes share (`farfield-dsm`; DRust, OSDI 2024): what a dereference costs, what an object costs that is at
//! another node, and whether a lock is fair.
//!
//! The nodes run this program with the same arguments, so nothing is done before `run`.

use crate::polled::{Polled, now};
use crate::random::{Random, mix};
use crate::{Options, Outcome};
use anyhow::{Context, Result, anyhow, bail, ensure};
use farfield_dsm::{
    DArc, DAtomic, DBox, DMutex, Far, FarGroup, Here, NodeBuilder, NodeId, ShareError, TBox, TaskHandle, scope,
};
use farfield_os::process::now_ns;
use farfield_server::{Config, Server};
use farfield_wic::Registry;
use std::io::{Read, Write};
use std::process::Command;
use std::time::{Duration, Instant};

/// Memory of each node.
const NEAR_BYTES: u64 = 4 << 30;

/// Runs a body at the first of so many nodes.
fn at_nodes<R>(nodes: u16, is_in_place: bool, body: impl FnOnce(&Here<'_>) -> Result<R>) -> Result<R> {
    let config = NodeBuilder::new().nodes(nodes).near(NEAR_BYTES).workers(2).read_in_place(is_in_place);
    farfield_dsm::run(&config, body).context("the nodes do not start")?
}

/// Returns whether the objects are shared; otherwise they are the program's own.
fn is_shared(options: &Options) -> Result<bool> {
    match options.peer.as_deref() {
        None => Ok(false),
        Some("share:") => Ok(true),
        Some(other) => bail!("--peer must be share:, not {other}"),
    }
}

/// Objects of 8 bytes behind owners, read or written in random order (Table 5.2).
pub(crate) fn run_deref(options: &Options) -> Result<Outcome> {
    let count = options.data_bytes() / 8;
    let mut random = Random::new(options.seed);
    // The order is there beforehand, and is read in a row. Of few objects it is short, too, and used more often.
    let (among, steps, ops) = match options.set_kib {
        0 => (count, options.ops.min(1 << 24), options.ops),
        kib => ((kib << 7).min(count), 1 << 11, options.ops * 16),
    };
    let order: Vec<u32> = (0..steps).map(|_| random.below(among) as u32).collect();
    let (rounds, write) = (ops / steps, options.write_percent > 0);
    let steps = || (0..rounds).flat_map(|_| &order).map(|index| *index as usize);
    let mut outcome = Outcome::new();
    let sum = if is_shared(options)? {
        at_nodes(1, false, |here| {
            let fill = || (0..count).map(|index| here.alloc(mix(index))).collect::<Result<Vec<_>, _>>();
            let mut objects: Vec<DBox<u64>> = outcome.phase("fill", count, fill)?;
            let access = || -> Result<u64, ShareError> {
                if write {
                    steps().try_for_each(|index| objects[index].get_mut(here).map(|mut object| *object += 1))?;
                    return Ok(0);
                }
                steps().try_fold(0u64, |sum, index| Ok(sum.wrapping_add(*objects[index].get(here)?)))
            };
            let mut sum = outcome.phase("access", rounds * order.len() as u64, access)?;
            for object in &objects {
                sum = sum.wrapping_add(*object.get(here)?);
            }
            Ok(sum)
        })?
    } else {
        let fill = || (0..count).map(|index| Box::new(mix(index))).collect();
        let mut objects: Vec<Box<u64>> = outcome.phase("fill", count, fill);
        let access = || {
            if write {
                steps().for_each(|index| *objects[index] += 1);
                return 0;
            }
            steps().fold(0u64, |sum, index| sum.wrapping_add(*objects[index]))
        };
        let sum = outcome.phase("access", rounds * order.len() as u64, access);
        objects.iter().fold(sum, |sum, object| sum.wrapping_add(**object))
    };
    outcome.checked(sum, 0);
    Ok(outcome)
}

const OBJECT_WORDS: usize = 64;
type Object = [u64; OBJECT_WORDS];
/// Objects whose owners come in one message.
const BATCH: usize = 1000;

fn object(number: u64, seed: u64) -> Object {
    let mut object = [number; OBJECT_WORDS];
    object[OBJECT_WORDS - 1] = mix(number ^ seed);
    object
}

/// Objects of 512 bytes at another node, each read once, one at a time: beside a polled round trip of as many bytes.
pub(crate) fn run_read(options: &Options) -> Result<Outcome> {
    let count = options.ops.next_multiple_of(BATCH as u64);
    let (mut outcome, mut sum, mut errors) = (Outcome::new(), 0u64, 0u64);
    let mut seen = |number: u64, object: &Object| {
        errors += u64::from(object[0] != number);
        sum = sum.wrapping_add(object[OBJECT_WORDS - 1]);
    };
    match options.peer.as_deref() {
        Some(peer @ ("share:" | "share:place")) => at_nodes(2, peer.ends_with("place"), |here| {
            let mut objects: Vec<DBox<Object>> = Vec::new();
            for first in (0..count).step_by(BATCH) {
                let made = here.spawn_to(NodeId(1), (first, options.seed), |here, (first, seed)| {
                    let made = (first..).take(BATCH).map(|number| here.alloc(object(number, seed)));
                    let made = made.collect::<Result<Vec<_>, ShareError>>()?;
                    Ok::<_, ShareError>(<[DBox<Object>; BATCH]>::try_from(made).expect("so many"))
                })?;
                objects.extend(made.join(here)??);
            }
            let (before, started) = (here.stats(), Instant::now());
            outcome.phase("get", count, || -> Result<(), ShareError> {
                for (number, object) in (0..).zip(&objects) {
                    seen(number, object.get(&here.enter())?);
                }
                Ok(())
            })?;
            outcome.figure("get_ns", started.elapsed().as_nanos() as f64 / count as f64);
            let after = here.stats();
            outcome.figure("messages_per_op", (after.fetches - before.fetches) as f64 / count as f64);
            outcome.figure("bytes_per_op", (after.message_bytes - before.message_bytes) as f64 / count as f64);
            Ok(())
        })?,
        Some("loopback:") => {
            let mut ends = Polled::new()?;
            let seed = options.seed;
            ends.serve(8, move |question, answer| {
                let object = object(u64::from_le_bytes(question[..8].try_into()?), seed);
                answer.extend(object.iter().flat_map(|word| word.to_le_bytes()));
                Ok(())
            })?;
            outcome.phase("get", count, || -> Result<()> {
                let mut bytes = [0; OBJECT_WORDS * 8];
                for number in 0..count {
                    ends.stream.write_all(&number.to_le_bytes())?;
                    let mut filled = 0;
                    while filled < bytes.len() {
                        filled += now(ends.stream.read(&mut bytes[filled..]))?;
                    }
                    let (words, _) = bytes.as_chunks::<8>();
                    seen(number, &std::array::from_fn(|at| u64::from_le_bytes(words[at])));
                }
                Ok(())
            })?;
        }
        _ => bail!("--peer must be share:, share:place or loopback:"),
    }
    outcome.checked(sum, errors);
    Ok(outcome)
}

/// Links of a list.
const LINKS: u64 = 1000;

/// Link that owns the next one, wherever that is.
#[derive(Far)]
struct FreeLink {
    words: [u64; 3],
    next: Option<DBox<FreeLink>>,
}

/// Link to which the next one is tied.
#[derive(FarGroup)]
struct TiedLink {
    words: [u64; 3],
    next: Option<TBox<TiedLink>>,
}

fn words(link: u64, list: u64) -> [u64; 3] {
    [link, list, mix(link ^ list)]
}

fn make_free(here: &Here<'_>, list: u64) -> Result<DBox<FreeLink>, ShareError> {
    let mut next = None;
    for link in (1..LINKS).rev() {
        next = Some(here.alloc(FreeLink { words: words(link, list), next })?);
    }
    here.alloc(FreeLink { words: words(0, list), next })
}

fn make_tied(here: &Here<'_>, list: u64) -> Result<DBox<TiedLink>, ShareError> {
    let mut next = None;
    for link in (1..LINKS).rev() {
        next = Some(here.tie(TiedLink { words: words(link, list), next })?);
    }
    here.alloc(TiedLink { words: words(0, list), next })
}

fn visit_free(here: &Here<'_>, first: &FreeLink) -> Result<u64, ShareError> {
    let (mut sum, mut link) = (first.words[2], first);
    while let Some(next) = &link.next {
        link = next.get(here)?;
        sum = sum.wrapping_add(link.words[2]);
    }
    Ok(sum)
}

fn visit_tied(first: &TiedLink) -> u64 {
    let links = std::iter::successors(Some(first), |link| link.next.as_deref());
    links.fold(0, |sum, link| sum.wrapping_add(link.words[2]))
}

/// Lists of 1,000 links, every other one at the other node, each visited once: link by link or as a group, by a task here, by
/// tasks at the nodes in turn, or by tasks beside their lists.
pub(crate) fn run_affinity(options: &Options) -> Result<Outcome> {
    let way = options.peer.as_deref().and_then(|peer| peer.strip_prefix("share:"));
    let way = way.filter(|way| ["", "tied", "anywhere", "beside"].contains(way)).map(str::to_owned);
    let way = way.context("--peer must be share:, share:tied, share:anywhere or share:beside")?;
    let (lists, seed, mut outcome) = ((options.ops / LINKS).max(2), options.seed, Outcome::new());
    let sum = at_nodes(2, false, |here| {
        // Lists change their node in pairs, tasks with each list: so tasks anywhere are beside every other list.
        let places: Vec<(NodeId, u64)> =
            (0..lists).map(|list| (NodeId((list / 2 % 2) as u16), list ^ seed << 32)).collect();
        let (mut free, mut tied) = (Vec::new(), Vec::new());
        for (node, list) in &places {
            if way == "tied" {
                tied.push(here.spawn_to(*node, (*list,), |here, (list,)| make_tied(here, list))?.join(here)??);
            } else {
                free.push(here.spawn_to(*node, (*list,), |here, (list,)| make_free(here, list))?.join(here)??);
            }
        }
        let (before, mut sum) = (here.stats().fetches, 0u64);
        outcome.phase("visit", lists * LINKS, || -> Result<()> {
            for list in &tied {
                sum = sum.wrapping_add(visit_tied(list.get(&here.enter())?));
            }
            for (index, list) in (0..).zip(&free) {
                let node = match &*way {
                    "beside" => list.home(),
                    "anywhere" => NodeId(index % 2),
                    _ => {
                        let here = here.enter();
                        sum = sum.wrapping_add(visit_free(&here, list.get(&here)?)?);
                        continue;
                    }
                };
                let visited = scope(here, |s| {
                    let task = s.spawn_to(node, (s.lend(list),), |here, (list,)| visit_free(here, list.get(here)?))?;
                    task.join()
                })??;
                sum = sum.wrapping_add(visited?);
            }
            Ok(())
        })?;
        // Of those at the other node, which are half of them.
        let fetches = (here.stats().fetches - before) as f64;
        outcome.figure("fetches_per_far_list", fetches / places.iter().filter(|(node, _)| node.0 > 0).count() as f64);
        Ok(sum)
    })?;
    outcome.checked(sum, 0);
    Ok(outcome)
}

/// A lock over 200 bytes that a task at each of three nodes takes as often as it can, and keeps for a while.
pub(crate) fn run_lock(options: &Options) -> Result<Outcome> {
    ensure!(is_shared(options)?, "--peer share: is missing");
    let mut outcome = Outcome::new();
    let (taken, last) = at_nodes(3, false, |here| {
        let lock =
            DArc::new(here, (DMutex::new(here, [0u64; 25])?, options.ops, Duration::from_nanos(options.busy_ns)))?;
        let taken = outcome.phase("lock", options.ops, || {
            let tasks = here.nodes().map(|node| {
                here.spawn_to(node, lock.try_clone(here)?, |here, lock| {
                    let (lock, all, busy) = lock.get(here)?;
                    let mut taken = 0u64;
                    loop {
                        let mut value = lock.lock(here)?;
                        if value[0] == *all {
                            return Ok::<_, ShareError>(taken);
                        }
                        value.iter_mut().for_each(|word| *word += 1);
                        taken += 1;
                        let began = Instant::now();
                        while began.elapsed() < *busy {
                            std::hint::spin_loop();
                        }
                    }
                })
            });
            let tasks: Vec<_> = tasks.collect::<Result<_, ShareError>>()?;
            tasks.into_iter().map(|task| Ok(task.join(here)??)).collect::<Result<Vec<u64>>>()
        })?;
        Ok((taken, *lock.get(here)?.0.lock(here)?))
    })?;
    let sum = taken.iter().sum::<u64>() as f64;
    let squares: f64 = taken.iter().map(|taken| (*taken as f64).powi(2)).sum();
    outcome.figure("unfairness", 1.0 - sum * sum / (squares * taken.len() as f64));
    outcome.figure("share_of_home_percent", 100.0 * taken[0] as f64 / sum);
    outcome.checked(last[0], last.iter().filter(|word| **word != options.ops).count() as u64);
    Ok(outcome)
}

/// Words of an object that outlives its node: 64 KiB.
const KEPT_WORDS: usize = 8192;
type Kept = [u64; KEPT_WORDS];

fn kept(number: u64, seed: u64) -> Kept {
    let mut object = [number; KEPT_WORDS];
    object[KEPT_WORDS - 1] = mix(number ^ seed);
    object
}

/// Objects that one node makes and hands over, while a task of another node changes a number there: with a backup or without. Then
/// the node is killed, and with a backup all of them are read.
pub(crate) fn run_recover(options: &Options) -> Result<Outcome> {
    let has_backup = match options.peer.as_deref() {
        Some("share:") => false,
        Some("share:backup") => true,
        _ => bail!("--peer must be share: or share:backup"),
    };
    let server = Server::start(Config {
        listen: vec!["tcp://127.0.0.1:0".parse().map_err(|error| anyhow!("{error}"))?],
        functions: Registry::standard(),
        ..Config::default()
    })?;
    let (count, seed) = ((options.data_bytes() / size_of::<Kept>() as u64).max(1), options.seed);
    let near_bytes = 2 * options.data_bytes() + (64 << 20);
    let config = NodeBuilder::new().nodes(3).near(near_bytes).workers(2).read_in_place(false);
    let config = if has_backup { config.backup(&*server.endpoints()[0]) } else { config };
    let (mut outcome, mut errors) = (Outcome::new(), 0u64);
    let dies = NodeId(1);
    farfield_dsm::run(&config, |here| -> Result<()> {
        let process = here.spawn_to(dies, (), |_, ()| std::process::id())?.join(here)?;
        let number = here.spawn_to(dies, (), |here, ()| DArc::new(here, DAtomic::new(here, 0u64)?))?.join(here)??;
        let counts = here.spawn_to(NodeId(2), (number.try_clone(here)?,), |here, (number,)| {
            let number = number.get(here)?;
            let steps = (0u64..).find(|_| number.fetch_add(here, 1).is_err());
            Ok::<_, ShareError>(steps.unwrap_or(u64::MAX))
        })?;
        let objects = outcome.phase("hand over", count, || -> Result<Vec<DBox<Kept>>> {
            let make = |number| -> Result<DBox<Kept>> {
                let made =
                    here.spawn_to(dies, (number, seed), |here, (number, seed)| here.alloc(kept(number, seed)))?;
                Ok(made.join(here)??)
            };
            (0..count).map(make).collect()
        })?;
        let stored = here.spawn_to(dies, (), |here, ()| (here.stats().backup_batches, here.stats().backup_bytes))?;
        let (batches, bytes) = stored.join(here)?;
        outcome.figure("stored_bytes_per_op", bytes as f64 / count as f64);
        outcome.figure("batches", batches as f64);
        let killed = Instant::now();
        ensure!(
            Command::new("kill").args(["-KILL", &process.to_string()]).status()?.success(),
            "the node is not killed"
        );
        let first = objects[0].get(here).copied();
        if !has_backup {
            errors += u64::from(first.is_ok());
            counts.join(here)??;
            return Ok(());
        }
        outcome.figure("recover_ms", killed.elapsed().as_secs_f64() * 1e3);
        for (at, object) in (0..).zip(&objects) {
            let short = here.enter();
            let object = object.get(&short)?;
            errors += u64::from(*object != kept(at, seed));
        }
        let answered = counts.join(here)??;
        errors += u64::from(number.get(here)?.load(here)? < answered);
        outcome.figure("kept_mib", here.stats().promoted_bytes as f64 / f64::from(1 << 20));
        Ok(())
    })
    .context("the nodes do not start")??;
    outcome.checked(count, errors);
    Ok(outcome)
}

/// Runs until a number is not 0, and keeps its worker busy meanwhile. Returns when it ended.
fn blocks(here: &Here<'_>, end: &DAtomic<u64>) -> Result<u64, ShareError> {
    while end.load(here)? == 0 {
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(now_ns())
}

type Blocker = TaskHandle<Result<u64, ShareError>>;

/// Starts a task that keeps a worker of a node busy, and the number that ends it.
fn start_blocker(here: &Here<'_>, node: NodeId) -> Result<(DArc<DAtomic<u64>>, Blocker)> {
    let end = here.spawn_to(node, (), |here, ()| DArc::new(here, DAtomic::new(here, 0u64)?))?.join(here)??;
    let task = here.spawn_to(node, (end.try_clone(here)?,), |here, (end,)| blocks(here, end.get(here)?))?;
    Ok((end, task))
}

/// Tasks that find no room at their node, and begin at another one: at once, or when it has room.
pub(crate) fn run_steal(options: &Options) -> Result<Outcome> {
    ensure!(is_shared(options)?, "--peer share: is missing");
    let mut outcome = Outcome::new();
    let ops = options.ops;
    let (placed, given, wrong) = at_nodes(2, false, |here| {
        let [first, other] = [NodeId(0), NodeId(1)];
        let mut busy = vec![start_blocker(here, first)?, start_blocker(here, first)?];
        let (mut placed, mut given, mut wrong) = (Vec::new(), Vec::new(), 0);
        outcome.phase("placed", ops, || -> Result<()> {
            for _ in 0..ops {
                let (spawned, task) = (now_ns(), here.spawn((), |_, ()| now_ns())?);
                wrong += u64::from(task.node() != other);
                placed.push(task.join(here)?.saturating_sub(spawned));
            }
            Ok(())
        })?;
        busy.push(start_blocker(here, other)?);
        outcome.phase("given", ops, || -> Result<()> {
            for _ in 0..ops {
                let (end, blocker) = start_blocker(here, other)?;
                let task = here.spawn((), |_, ()| now_ns())?;
                end.get(here)?.store(here, 1)?;
                let (ended, began) = (blocker.join(here)??, task.join(here)?);
                wrong += u64::from(began < ended);
                given.push(began.saturating_sub(ended));
            }
            Ok(())
        })?;
        for (end, task) in busy {
            end.get(here)?.store(here, 1)?;
            task.join(here)??;
        }
        Ok((placed, given, wrong))
    })?;
    for (name, mut times) in [("placed", placed), ("given", given)] {
        times.sort_unstable();
        outcome.figure(&format!("{name}_p50_us"), times[times.len() / 2] as f64 / 1e3);
        outcome.figure(&format!("{name}_p90_us"), times[times.len() * 9 / 10] as f64 / 1e3);
    }
    outcome.checked(2 * ops, wrong);
    Ok(outcome)
}
