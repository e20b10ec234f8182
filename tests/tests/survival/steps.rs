//! Members of a mirror are killed at each step of collections: before and after each message, and at each stop.
//!
//! Danger: an object that is lost, or found where it is no more, because the collector goes on with half an answer.

use super::collected::Graph;
use super::{Load, Made, NEAR, SPARES, Way};
use farfield::{Health, Heap, Plane};
use farfield_gc::{BrokenRule, CycleStep, FarTracing, GcHeap};
use farfield_tests::{Over, PATIENCE, Scratch, Server, seeded, tier, wait_until};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Kills of one heap: when all spares have come in, one member more.
const KILLS: usize = SPARES + 1;

/// Member that is killed when collections reach a step.
struct Condemned {
    step: CycleStep,
    /// Number of times that the step passes before.
    passes: usize,
    /// The member, which is killed when this is dropped.
    _server: Server,
}

/// Kills members of one heap, each at the next of these steps.
fn outlive_at(steps: [CycleStep; KILLS], pool: u64, way: Way) {
    let mut random = seeded(1000 + pool);
    let scratch = Scratch::new("survival-steps");
    let mut servers: Vec<_> = (0..2 + SPARES).map(|number| way.start(&scratch, number)).collect();
    let heap = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).plane(Plane::Page);
    let heap = heap.pool(Made::Mirror.url(&servers)).patience(PATIENCE).build().expect("the servers accept");
    let condemned: Arc<Mutex<Option<Condemned>>> = Arc::default();
    let of_hook = Arc::clone(&condemned);
    let hook = move |step| {
        let mut condemned = of_hook.lock().expect("nobody panics with it");
        if let Some(next) = condemned.as_mut().filter(|next| next.step == step) {
            match next.passes.checked_sub(1) {
                Some(left) => next.passes = left,
                None => *condemned = None,
            }
        }
    };
    // Servers trace whatever they can.
    let builder = GcHeap::in_heap(&heap).far_tracing(FarTracing::Servers).broken(BrokenRule::ServersAreFaster);
    let mut load = Graph::<true>::build(builder.at_steps(hook));
    let choices = steps.map(|step| (step, random.usize(..2), random.usize(..3)));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            // Ends the load also when something panics here.
            let _over = Over(&is_over);
            for (step, member, passes) in choices {
                wait_until("both members hold everything", || heap.health() == Health::Good);
                *condemned.lock().expect("nobody panics with it") =
                    Some(Condemned { step, passes, _server: servers.remove(member) });
                wait_until(&format!("{step:?}"), || condemned.lock().expect("nobody panics with it").is_none());
            }
            wait_until("the death is noticed", || heap.health() == Health::Degraded);
        });
        while !is_over.load(Ordering::Relaxed) {
            load.step(&heap, &mut random);
        }
        killer.join().expect("it kills and ends");
    });
    load.compare();
    heap.verify();
}

/// In the deep tier a thousand: each step some fifty times.
#[test]
fn collected_heaps_outlive_servers_that_are_killed_at_any_step() {
    let messages = [
        CycleStep::AskingServers,
        CycleStep::ServersAnswered,
        CycleStep::AskingToCopy,
        CycleStep::ServerCopied,
        CycleStep::Publishing,
    ];
    let pools = tier(1, 1000 / KILLS);
    let all = CycleStep::ALL;
    for pool in 0..pools {
        let steps =
            if pools == 1 { messages } else { std::array::from_fn(|kill| all[(pool * KILLS + kill) % all.len()]) };
        outlive_at(steps, pool as u64, [Way::Both, Way::Tcp, Way::Shm][pool % 3]);
    }
    println!("{} servers were killed at steps of collections, and nothing was lost", pools * KILLS);
}
