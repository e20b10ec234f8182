//! Danger: a simulation that is wrong looks like any other.

use super::engine::{Network, ReplayReport};
use super::recorder::{self, DArc, DAtomic, DBox, DMutex, DVec, Here, NodeBuilder, NodeId, Owner, measured, scope};
use super::trace::{Action, TaskTrace, Trace};
use super::{CoherenceName, record};
use crate::Options;
use clap::Parser;

const NETWORK: Network = Network {
    one_way_ns: 1_000,
    bytes_per_us: 1_000,
    handle_ns: 100,
    lock_ns: 10,
    task_ns: 50,
    takes_processors: false,
};
const ONE_PROCESSOR: usize = 1;
const THERE: NodeId = NodeId(1);
/// Bytes of the objects below.
const BYTES: usize = 1024;
type Bytes = [u8; BYTES];

/// Records what a program does after its preparation, without the time of its work.
fn trace_of<T>(nodes: u16, prepare: impl FnOnce(&Here<'_>) -> T, body: impl FnOnce(&Here<'_>, T)) -> Trace {
    let done = recorder::run(&NodeBuilder::new().nodes(nodes), |here| {
        let prepared = prepare(here);
        measured(|| body(here, prepared));
    });
    done.unwrap();
    let mut trace = recorder::take();
    trace.tasks.iter_mut().flat_map(|task| &mut task.steps).for_each(|step| step.work_ns = 0);
    trace
}

fn replay(name: CoherenceName, trace: &Trace) -> ReplayReport {
    name.replay(trace, NETWORK, ONE_PROCESSOR)
}

fn messages(name: CoherenceName, trace: &Trace) -> u64 {
    replay(name, trace).messages
}

fn made_at<T: std::fmt::Debug>(here: &Here<'_>, node: NodeId, make: fn(&Here<'_>) -> T) -> T {
    here.spawn_to(node, (), move |here, ()| make(here)).unwrap().join(here).unwrap()
}

fn object_at(here: &Here<'_>, node: NodeId) -> DBox<Bytes> {
    made_at(here, node, |here| here.alloc([0; BYTES]).unwrap())
}

/// The numbers of `share/counts`, where real nodes are counted.
#[test]
fn owners_send_as_many_messages_as_real_nodes() {
    let count = |nodes, body: fn(&Here<'_>, DBox<Bytes>)| {
        messages(CoherenceName::Ownership, &trace_of(nodes, |here| object_at(here, THERE), body))
    };
    assert_eq!(count(2, |_, object| drop(object)), 1, "a free");
    let read = |here: &Here<'_>, object: DBox<Bytes>| {
        object.get(here).unwrap();
        object.get(here).unwrap();
        std::mem::forget(object);
    };
    assert_eq!(count(2, read), 1, "a read, and one of the copy");
    let write = |here: &Here<'_>, mut object: DBox<Bytes>| {
        object.get_mut(here).unwrap();
        object.get_mut(here).unwrap();
        std::mem::forget(object);
    };
    assert_eq!(count(2, write), 2, "a write, and one of what is here");
    let read_elsewhere = |here: &Here<'_>, object: DBox<Bytes>| {
        object.get(here).unwrap();
        let again = here.spawn_to(NodeId(2), (object,), |here, (mut object,)| {
            object.get_mut(here).unwrap();
            object
        });
        let object = again.unwrap().join(here).unwrap();
        object.get(here).unwrap();
        std::mem::forget(object);
    };
    assert_eq!(count(3, read_elsewhere), 1 + 2 + 2 + 1, "a read, a task, its write, and a read of what it wrote");
    let locks = trace_of(
        2,
        |here| (DMutex::new(here, 0u64).unwrap(), made_at(here, THERE, |here| DMutex::new(here, 0u64).unwrap())),
        |here, (near, far)| {
            *near.lock(here).unwrap() += 1;
            *far.lock(here).unwrap() += 1;
        },
    );
    assert_eq!(messages(CoherenceName::Ownership, &locks), 2, "a lock comes, and goes back");
    let steps = trace_of(
        2,
        |here| made_at(here, THERE, |here| DArc::new(here, DAtomic::new(here, 0).unwrap()).unwrap()),
        |here, number| {
            let number = number.get(here).unwrap();
            assert_eq!((0..5).map(|_| number.fetch_add(here, 1).unwrap()).sum::<u64>(), 10);
        },
    );
    assert_eq!(messages(CoherenceName::Ownership, &steps), 1 + 5, "the number's object, and its steps");
    let owner = |here: &Here<'_>| here.alloc([1u64, 2].map(|number| here.alloc(number).unwrap())).unwrap();
    let owned = trace_of(
        2,
        |here| (made_at(here, THERE, owner), object_at(here, THERE)),
        |here, (owner, object)| {
            drop(owner);
            object.get(here).unwrap();
            std::mem::forget(object);
        },
    );
    assert_eq!(messages(CoherenceName::Ownership, &owned), 1 + 1, "what is owned is dropped at its node");
}

#[test]
fn a_body_is_applied_by_one_message_if_the_lock_is_free() {
    let mutex_at = |here: &Here<'_>| made_at(here, THERE, |here| DMutex::new(here, [0u64; 16]).unwrap());
    let trace = trace_of(2, mutex_at, |here, mutex| mutex.apply(here, 3, |value, more| value[0] += more).unwrap());
    for (name, count) in [
        (CoherenceName::Ownership, 1),
        (CoherenceName::Delegation, 1),
        // The value is 128 bytes long, in one block of 512.
        (CoherenceName::DirectoryOfMany, 1),
    ] {
        assert_eq!(messages(name, &trace), count, "{name:?}");
    }
    // The second one finds the lock taken, is refused, and comes as a task.
    let trace = trace_of(
        2,
        |here| DArc::new(here, mutex_at(here)).unwrap(),
        |here, mutex| {
            scope(here, |s| {
                for _ in 0..2 {
                    let body = |here: &Here<'_>, (mutex,): (recorder::Lent<'_, DMutex<[u64; 16]>>,)| {
                        mutex.get(here).unwrap().apply(here, 3, |value, more| value[0] += more).unwrap();
                    };
                    s.spawn_to(NodeId(0), (s.lend(&mutex),), body).unwrap();
                }
            })
            .unwrap();
            std::mem::forget(mutex);
        },
    );
    let with_work = |work_ns| {
        let mut tasks = Vec::new();
        for task in &trace.tasks {
            let (node, argument_bytes, result_bytes) = (task.node, task.argument_bytes, task.result_bytes);
            let mut steps = task.steps.clone();
            let leaves = steps.iter_mut().filter(|step| matches!(step.action, Action::Leave(..)));
            leaves.for_each(|step| step.work_ns = work_ns);
            tasks.push(TaskTrace { node, argument_bytes, result_bytes, steps });
        }
        Trace { nodes: trace.nodes, objects: trace.objects.clone(), tasks }
    };
    let count = |name: CoherenceName| name.replay(&with_work(1_000_000), NETWORK, 8).messages;
    assert_eq!(count(CoherenceName::Ownership), 2 + 2);
    assert_eq!(count(CoherenceName::Delegation), 2);
    let long = CoherenceName::Ownership.replay(&with_work(1_000_000), NETWORK, 8).elapsed_ns;
    assert!((2_000_000..2_100_000).contains(&long), "one after the other: {long}");
}

#[test]
fn what_was_read_before_is_not_fetched() {
    let trace = trace_of(
        2,
        |here| {
            let object = object_at(here, THERE);
            object.get(here).unwrap();
            object
        },
        |here, object| {
            object.get(here).unwrap();
            std::mem::forget(object);
        },
    );
    for name in [CoherenceName::Ownership, CoherenceName::Directory, CoherenceName::DirectoryOfMany] {
        assert_eq!(messages(name, &trace), 0, "{name:?}");
    }
    assert_eq!(messages(CoherenceName::Delegation, &trace), 1);
}

#[test]
fn a_read_takes_the_time_of_its_way() {
    let trace = trace_of(
        2,
        |here| object_at(here, THERE),
        |here, object| {
            object.get(here).unwrap();
            std::mem::forget(object);
        },
    );
    let [header, object] = [64, 64 + BYTES as u64];
    // The message and the object take the links, the home handles the message, and so does who has asked.
    let way = header + 1_000 + 100 + object + 1_000 + 100;
    assert_eq!(replay(CoherenceName::Ownership, &trace).elapsed_ns, way);
}

/// A receiver's link is taken in the order in which letters arrive: one that waits in its sender's link holds nobody up.
#[test]
fn what_a_busy_node_sends_does_not_delay_what_comes_from_others() {
    const LARGE: usize = 100 * BYTES;
    let large = |here: &Here<'_>| here.alloc([0u8; LARGE]).unwrap();
    let trace = trace_of(
        4,
        |here| {
            let busy: [DBox<[u8; LARGE]>; 8] = std::array::from_fn(|_| made_at(here, THERE, large));
            (here.alloc(busy).unwrap(), object_at(here, NodeId(2)))
        },
        |here, (busy, object)| {
            // Node 1 has much to send to node 3 before what this node asks for.
            let ask = |here: &Here<'_>, (busy,): (recorder::Lent<'_, [DBox<[u8; LARGE]>; 8]>,)| {
                busy.get(here).unwrap()[..7].iter().for_each(|object| object.prefetch(here));
            };
            scope(here, |s| s.spawn_to(NodeId(3), (s.lend(&busy),), ask).unwrap().join().unwrap()).unwrap();
            busy.get(here).unwrap()[7].prefetch(here);
            object.get(here).unwrap();
            std::mem::forget((busy, object));
        },
    );
    let elapsed = replay(CoherenceName::Ownership, &trace).elapsed_ns;
    assert!(elapsed < 2 * LARGE as u64, "{elapsed} ns, and the busy node sends for {}", 8 * LARGE);
}

#[test]
fn a_directory_asks_for_each_block_and_tells_who_has_a_copy() {
    let program = |here: &Here<'_>, mut object: DBox<Bytes>| {
        object.get(here).unwrap();
        let read = here.spawn_to(NodeId(2), (object,), |here, (object,)| {
            object.get(here).unwrap();
            object
        });
        object = read.unwrap().join(here).unwrap();
        object.get_mut(here).unwrap();
        std::mem::forget(object);
    };
    let trace = trace_of(3, |here| object_at(here, THERE), program);
    // With its header the object touches three blocks. Two nodes read them. The first one asks to write, and the home tells the other.
    let task = 2;
    assert_eq!(messages(CoherenceName::Directory, &trace), 3 + task + 3 + 3 + 3);
    assert_eq!(messages(CoherenceName::DirectoryOfMany, &trace), 1 + task + 1 + 1 + 1);
    // Owners tell nobody: the object comes, and its old block is freed.
    assert_eq!(messages(CoherenceName::Ownership, &trace), 1 + task + 1 + 2);
}

#[test]
fn a_delegated_lock_is_one_message_with_all_that_is_done_under_it() {
    let trace = trace_of(
        2,
        |here| made_at(here, THERE, |here| (DMutex::new(here, 0u64).unwrap(), here.alloc([0u8; BYTES]).unwrap())),
        |here, (mutex, object)| {
            let held = mutex.lock(here).unwrap();
            object.get(here).unwrap();
            drop(held);
            object.get(here).unwrap();
            std::mem::forget(object);
        },
    );
    assert_eq!(messages(CoherenceName::Delegation, &trace), 1 + 1);
    assert_eq!(messages(CoherenceName::Ownership, &trace), 2 + 1);
}

/// Tasks at both nodes that add to a number under a lock, each for so long.
fn contended(work_ns: u32) -> Trace {
    let mut trace = trace_of(
        2,
        |here| DArc::new(here, DMutex::new(here, 0u64).unwrap()).unwrap(),
        |here, mutex| {
            scope(here, |s| {
                for task in 0..6u16 {
                    let body = |here: &Here<'_>, (mutex,): (recorder::Lent<'_, DMutex<u64>>,)| {
                        *mutex.get(here).unwrap().lock(here).unwrap() += 1;
                    };
                    s.spawn_to(NodeId(task % 2), (s.lend(&mutex),), body).unwrap();
                }
            })
            .unwrap();
        },
    );
    let unlocks = trace.tasks.iter_mut().flat_map(|task| &mut task.steps);
    unlocks.filter(|step| matches!(step.action, Action::Unlock(_))).for_each(|step| step.work_ns = work_ns);
    trace
}

#[test]
fn nobody_holds_a_lock_at_the_same_time() {
    let work_ns = 1_000_000;
    for name in [CoherenceName::Ownership, CoherenceName::Directory, CoherenceName::Delegation] {
        let report = name.replay(&contended(work_ns), NETWORK, 8);
        assert!(report.elapsed_ns >= 6 * u64::from(work_ns), "{name:?}: {report:?}");
        assert!(report.elapsed_ns < 7 * u64::from(work_ns), "{name:?}: {report:?}");
    }
}

#[test]
fn a_node_has_so_many_processors() {
    let mut trace = trace_of(
        1,
        |_| (),
        |here, ()| {
            let tasks: Vec<_> = (0..8).map(|_| here.spawn_to(NodeId(0), (), |_, ()| ()).unwrap()).collect();
            tasks.into_iter().for_each(|task| task.join(here).unwrap());
        },
    );
    trace.tasks[1..].iter_mut().for_each(|task| task.steps[0].work_ns = 1_000_000);
    for (processors, rounds) in [(1, 8), (4, 2), (8, 1), (100, 1)] {
        let report = CoherenceName::Ownership.replay(&trace, NETWORK, processors);
        assert_eq!(report.elapsed_ns / 1_000_000, rounds, "{processors}");
    }
}

/// On one machine a message to a node takes time of the task that runs there, and so do its bytes.
#[test]
fn messages_take_the_processor_of_a_busy_node() {
    let mut trace = trace_of(
        2,
        |here| (object_at(here, THERE), object_at(here, THERE)),
        |here, (own, object)| {
            let task = here.spawn_to(THERE, (own,), |here, (own,)| {
                own.get(here).unwrap();
                std::mem::forget(own);
            });
            object.get(here).unwrap();
            task.unwrap().join(here).unwrap();
            std::mem::forget(object);
        },
    );
    trace.tasks[1].steps.iter_mut().for_each(|step| step.work_ns = 1_000_000);
    let elapsed = |takes_processors| {
        CoherenceName::Ownership.replay(&trace, Network { takes_processors, ..NETWORK }, ONE_PROCESSOR).elapsed_ns
    };
    let [header, object] = [64, 64 + BYTES as u64];
    // It says that the task is there, and takes and answers a request.
    assert_eq!(elapsed(true) - elapsed(false), header / 2 + (header / 2 + 100) + object / 2);
}

#[test]
fn a_large_object_comes_in_pieces() {
    const LARGE: usize = 3 * farfield_dsm::VALUE_BYTES_MAX - 1;
    let trace = trace_of(
        2,
        |here| made_at(here, THERE, |here| here.alloc([0u8; LARGE]).unwrap()),
        |here, object| {
            object.get(here).unwrap();
            std::mem::forget(object);
        },
    );
    assert_eq!(messages(CoherenceName::Ownership, &trace), 3);
}

/// Workers of `farfield-dsm` begin nothing while a task that has waited can go on.
#[test]
fn a_task_that_has_begun_goes_on_before_others_begin() {
    let mut trace = trace_of(
        2,
        |here| made_at(here, THERE, |here| DArc::new(here, [0u8; BYTES]).unwrap()),
        |here, object| {
            let read = |here: &Here<'_>, (object,): (DArc<Bytes>,)| {
                object.get(here).unwrap();
            };
            let first = here.spawn_to(NodeId(0), (object,), read).unwrap();
            let others = [(); 2].map(|()| here.spawn_to(NodeId(0), (), |_, ()| ()).unwrap());
            first.join(here).unwrap();
            others.into_iter().for_each(|other| other.join(here).unwrap());
        },
    );
    let ends = trace.tasks[1..].iter_mut().filter_map(|task| task.steps.last_mut());
    ends.for_each(|end| end.work_ns = 1_000_000);
    let steps = &mut trace.tasks[0].steps;
    let join = steps.iter().position(|step| matches!(step.action, Action::Join(_))).unwrap();
    // Nobody waits for the others.
    steps.drain(join + 1..steps.len() - 1);
    assert_eq!(replay(CoherenceName::Ownership, &trace).elapsed_ns / 1_000_000, 2);
}

#[test]
fn all_tasks_of_a_node_wait_for_one_copy() {
    let trace = trace_of(
        2,
        |here| made_at(here, THERE, |here| DArc::new(here, [0u8; BYTES]).unwrap()),
        |here, object| {
            scope(here, |s| {
                for _ in 0..5 {
                    let body = |here: &Here<'_>, (object,): (recorder::Lent<'_, Bytes>,)| {
                        object.get(here).unwrap();
                    };
                    s.spawn_to(NodeId(0), (s.lend(&object),), body).unwrap();
                }
            })
            .unwrap();
            object.prefetch(here);
        },
    );
    assert_eq!(CoherenceName::Ownership.replay(&trace, NETWORK, 8).messages, 1);
    assert_eq!(CoherenceName::Delegation.replay(&trace, NETWORK, 8).messages, 5);
}

#[test]
fn a_part_of_an_object_takes_its_blocks_only() {
    let trace = trace_of(
        2,
        |here| {
            made_at(here, THERE, |here| {
                let mut values = DVec::<u64>::with_chunk(10_000);
                values.extend_from_slice(here, &[7; 10_000]).unwrap();
                values
            })
        },
        |here, values| {
            assert_eq!(values.get(here, 5_000).unwrap(), Some(&7));
            std::mem::forget(values);
        },
    );
    let [owner, directory] =
        [CoherenceName::Ownership, CoherenceName::Directory].map(|name| replay(name, &trace).bytes);
    assert!(owner > 80_000, "{owner}");
    assert!(directory < 1_000, "{directory}");
}

fn options(workload: &str, arguments: &str) -> Options {
    Options::parse_from(["farfield-work", workload].into_iter().chain(arguments.split_whitespace()))
}

/// Checksum of what an application printed.
fn checksum(line: &str) -> String {
    farfield_bench::workload::Output::parse(line).unwrap().checksum
}

#[test]
fn recorded_applications_find_what_plain_ones_find() {
    let small = "--data-mib 3 --object-bytes 8192 --ops 100 --write-percent 10 --zipf-percent 99";
    for workload in ["share-gemm", "share-frame", "share-kv", "share-social"] {
        let options = options(workload, small);
        let expected = crate::run(&options).unwrap();
        for nodes in [1, 3] {
            let (trace, outcome, phase) = record(&options, nodes).unwrap();
            assert!(outcome.is_right() && expected.is_right(), "{workload}");
            assert_eq!(checksum(&outcome.line()), checksum(&expected.line()), "{workload}");
            assert!(outcome.ops(phase) > 0 && trace.work_ns() > 0, "{workload}");
            for name in [
                CoherenceName::Ownership,
                CoherenceName::Directory,
                CoherenceName::DirectoryOfMany,
                CoherenceName::Delegation,
            ] {
                let report = name.replay(&trace, NETWORK, 4);
                assert!(report.elapsed_ns > 0, "{workload} {name:?}");
                assert_eq!(report.messages > 0, nodes > 1, "{workload} {name:?} {report:?}");
            }
        }
    }
}

/// Each of two nodes reads the half of the left factor that the other one has filled, and of the right one what is its own.
/// The program looks at all tiles afterwards, which changes nothing.
#[test]
fn a_product_fetches_each_tile_of_other_nodes_once() {
    const TILE_BYTES: u64 = 32 << 10;
    let options = options("share-gemm", "--data-mib 6 --object-bytes 32768");
    let (trace, ..) = record(&options, 2).unwrap();
    assert_eq!(replay(CoherenceName::Ownership, &trace).bytes / TILE_BYTES, 2 * 32);
}
