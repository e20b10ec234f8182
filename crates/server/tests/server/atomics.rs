//! Guards against updates that are lost between functions at the server and at clients, of words and of bytes beside them, and against orders of
//! accesses that no order of the functions explains.

use crate::common::functions::*;
use crate::common::*;
use farfield_pool::Backend;
use farfield_server::{Config, Server};
use farfield_wic::{CallError, Caller, Fault, Function, Place, Registry, Sim, Stop, Where};
use fastrand::Rng;
use std::sync::{Arc, Barrier};

/// Changes of a word by each thread.
const TIMES: u64 = 150;

function!(
    /// So many increments of a word, and after each one of a word of its own in the same page, by a plain write.
    Count: (u64, u64, u64) => Vec<u64>, |place, given| {
        let (word, own, times) = given;
        let mut seen = Vec::new();
        for _ in 0..times {
            seen.push(place.fetch_add(word, 1).await?);
            let before = place.read_u64(own).await?;
            place.write_u64(own, before + 1).await?;
        }
        Ok(seen)
    }
);

function!(
    /// Increments by exchange, until it has.
    Exchange: (u64, u64) => u64, |place, given| {
        let (word, times) = given;
        let mut failed = 0;
        let mut expected = 0;
        for _ in 0..times {
            loop {
                let before = place.compare_exchange(word, expected, expected + 1).await?;
                if before == expected {
                    break;
                }
                (failed, expected) = (failed + 1, before);
            }
            expected += 1;
        }
        Ok(failed)
    }
);

function!(
    Add: (u64, u64) => u64, |place, given| { place.fetch_add(given.0, given.1).await }
);

function!(
    Swap: (u64, u64, u64) => u64, |place, given| { place.compare_exchange(given.0, given.1, given.2).await }
);

function!(
    /// Writes a word, then raises a flag.
    Publish: (u64, u64, u64) => (), |place, given| {
        let (word, flag, round) = given;
        place.write_u64(word, round).await?;
        place.fetch_add(flag, 1).await.map(drop)
    }
);

function!(
    /// What the flag is, and then the word.
    Look: (u64, u64) => (u64, u64), |place, given| {
        let (word, flag) = given;
        let flag = place.fetch_add(flag, 0).await?;
        Ok((flag, place.read_u64(word).await?))
    }
);

function!(
    /// Marks one word, and says whether the other is marked.
    Mark: (u64, u64) => u64, |place, given| {
        place.fetch_add(given.0, 1).await?;
        place.fetch_add(given.1, 0).await
    }
);

fn server() -> Server {
    let functions = Registry::standard()
        .with::<Count>()
        .with::<Exchange>()
        .with::<Add>()
        .with::<Swap>()
        .with::<Publish>()
        .with::<Look>()
        .with::<Mark>();
    serve(Config { functions, ..config() })
}

/// Runs `each` in threads with callers of their own, half of them with functions at the client, half at the server.
fn on_both_sides<T: Send>(
    backend: &Arc<dyn Backend>,
    threads: u64,
    each: impl Fn(u64, Where, &mut Caller) -> T + Sync,
) -> Vec<T> {
    let barrier = Barrier::new(threads as usize);
    std::thread::scope(|scope| {
        let spawned: Vec<_> = (0..threads)
            .map(|thread| {
                let (each, barrier) = (&each, &barrier);
                let mut caller = Caller::new(backend.clone());
                scope.spawn(move || {
                    barrier.wait();
                    each(thread, EVERYWHERE[thread as usize % 2], &mut caller)
                })
            })
            .collect();
        spawned.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn no_update_is_lost_between_client_and_server() {
    let server = server();
    for url in [tcp(&server), unix(&server)] {
        let backend = open(url);
        // All in one page: the word that is shared, and one of each thread's own.
        let seen = on_both_sides(&backend, 4, |thread, place, caller| {
            let answer = caller.call::<Count>((0, 8 + thread * 8, TIMES)).at(place).within(PATIENCE).run();
            answer.unwrap()
        });
        let bytes = contents(&*backend);
        assert_eq!(word(&bytes, 0), Some(4 * TIMES));
        (0..4).for_each(|thread| assert_eq!(word(&bytes, 8 + thread * 8), Some(TIMES), "thread {thread} at {url}"));
        // Each value was there once, and each thread saw them rise.
        assert!(seen.iter().all(|of_thread| of_thread.is_sorted()));
        let mut all = seen.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..4 * TIMES));
    }
}

#[test]
fn an_exchange_has_one_winner() {
    let server = server();
    for url in [tcp(&server), unix(&server)] {
        let backend = open(url);
        on_both_sides(&backend, 4, |_, place, caller| {
            caller.call::<Exchange>((16, TIMES)).at(place).within(PATIENCE).run().unwrap()
        });
        assert_eq!(word(&contents(&*backend), 16), Some(4 * TIMES));
        for round in 0..20 {
            let offset = 4096 + round * 8;
            let before = on_both_sides(&backend, 4, |thread, place, caller| {
                caller.call::<Swap>((offset, 0, thread + 1)).at(place).run().unwrap()
            });
            let winners: Vec<_> = before.iter().enumerate().filter(|(_, before)| **before == 0).collect();
            let [(winner, _)] = winners[..] else { panic!("{} winners", winners.len()) };
            assert!(before.iter().all(|word| [0, winner as u64 + 1].contains(word)), "{before:?}");
        }
    }
}

#[test]
fn writes_before_a_flag_are_visible_after_it() {
    let server = server();
    for url in [tcp(&server), unix(&server)] {
        let backend = open(url);
        for writer in [0, 1] {
            // In the same page as the flag, and in another one.
            for (word, flag) in [(64 + writer * 16, 72 + writer * 16), (8192 + writer * 8, 128 + writer * 8)] {
                on_both_sides(&backend, 2, |thread, place, caller| {
                    for round in 1..=TIMES {
                        if thread == writer {
                            caller.call::<Publish>((word, flag, round)).at(place).run().unwrap();
                        } else {
                            let (flag, word) = caller.call::<Look>((word, flag)).at(place).run().unwrap();
                            assert!(word >= flag, "{word} after {flag} at {url}");
                        }
                    }
                });
            }
        }
    }
}

#[test]
fn of_two_that_mark_and_look_one_sees_the_other() {
    let server = server();
    for url in [tcp(&server), unix(&server)] {
        let backend = open(url);
        for round in 0..60 {
            let words = [4096 + round * 8, 12288 + round * 8];
            let seen = on_both_sides(&backend, 2, |thread, place, caller| {
                let [own, other] = [words[thread as usize], words[1 - thread as usize]];
                caller.call::<Mark>((own, other)).at(place).run().unwrap()
            });
            assert_ne!(seen, [0, 0], "round {round} at {url}");
        }
    }
}

#[test]
fn words_are_the_same_wherever_they_are_changed() {
    let server = server();
    let mut dice = Rng::with_seed(0xa70);
    for url in [tcp(&server), unix(&server)] {
        let backend = open(url);
        let mut caller = Caller::new(backend.clone());
        let sim = Sim::new(7, vec![0; BYTES as usize]);
        let mut model = vec![0; BYTES as usize];
        for step in 0..200 {
            let offset = [dice.u64(..4) * 8, dice.u64(..64), BYTES - dice.u64(..16), u64::MAX - dice.u64(..9)];
            let offset = offset[dice.usize(..4)];
            let add = [1, u64::MAX, dice.u64(..9)][dice.usize(..3)];
            let before = word(&model, offset);
            let wanted = match before {
                None => Err(Fault::OutOfRange { offset }),
                Some(_) if !offset.is_multiple_of(8) => Err(Fault::Unaligned { offset }),
                Some(before) => Ok(before),
            };
            let place = EVERYWHERE[dice.usize(..2)];
            let (answer, simulated, after) = if dice.u64(..2) == 0 {
                let given = (offset, add);
                let after = before.unwrap_or(0).wrapping_add(add);
                (caller.call::<Add>(given).at(place).run(), sim.run_one::<Add>(given), after)
            } else {
                // Of which some expect the right word.
                let current = if dice.u64(..2) == 0 { before.unwrap_or(0) } else { add };
                let given = (offset, current, step);
                let after = if before == Some(current) { step } else { before.unwrap_or(0) };
                (caller.call::<Swap>(given).at(place).run(), sim.run_one::<Swap>(given), after)
            };
            assert_eq!(answer, wanted.map_err(CallError::Fault), "step {step} {place:?} at {offset}");
            assert_eq!(simulated, wanted.map_err(Stop::Fault));
            if wanted.is_ok() {
                put(&mut model, offset, after);
            }
        }
        assert!(contents(&*backend) == model && sim.bytes() == model);
    }
}

#[test]
fn atomics_need_one_server_that_keeps_the_pages() {
    let (one, other) = (server(), server());
    let without = serve(Config { functions: Registry::new(), ..config() });
    // Functions, and none of those that every server has.
    let stranger = serve(Config { functions: Registry::new().with::<Add>(), ..config() });
    let stripe = format!("stripe({},{})", tcp(&one), tcp(&other));
    for url in ["ram:", &stripe, tcp(&without), tcp(&stranger)] {
        let mut caller = Caller::new(open(url));
        assert_eq!(caller.call::<Add>((8, 1)).run(), Err(CallError::Fault(Fault::NotHere)), "{url}");
        assert_eq!(caller.call::<Swap>((8, 0, 1)).run(), Err(CallError::Fault(Fault::NotHere)), "{url}");
        // A function may know what to do without.
        assert_eq!(caller.call::<Add>((12, 1)).run(), Err(CallError::Fault(Fault::Unaligned { offset: 12 })), "{url}");
    }
    let mut caller = Caller::new(open(tcp(&stranger)));
    assert_eq!(caller.call::<Add>((8, 1)).at(Where::Server).run(), Ok(0), "at the server it has them all the same");
}
