//! Programs and heaps whose far memory has tiers: several servers, the first of which is too small.
//!
//! Danger: a byte that is lost on its way from one tier to the next; a death that takes more than what was there.

use farfield::{FarBox, FarError, Health, Heap, PoolError};
use farfield_tests::{FarRun, MIB, PATIENCE, Scratch, Server, compile, seeded, tier, wait_until};

const WORDS: usize = 512;
type Value = FarBox<[u64; WORDS]>;

#[test]
fn programs_use_tiers() {
    let scratch = Scratch::new("tiers-run");
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let hog = hog.to_str().expect("an ASCII path");
    for round in 0..tier(2, 20) {
        let small = ["--capacity", ["16M", "40M"][round / 2 % 2]];
        let first = Server::start(&scratch, &format!("first-{round}"), small);
        let second = Server::start_tcp(&scratch, &format!("second-{round}"), ["--capacity", "1G"]);
        let far = format!("tier({},{})", first.url(), second.url());
        let mode = ["signal", "thread"][round % 2];
        // Two processes, one of which the other has forked; each checks every word of its memory, again and again.
        let options = ["--near", "16M", "--mode", mode, "--far", &far];
        let ended = FarRun::new(&scratch, options, [hog, "48", "4", "2", "2"]).start().wait();
        assert!(ended.code == 0 && ended.text().contains("0 wrong"), "{mode}: {}\n{}", ended.text(), ended.errors);
    }
}

#[test]
fn heaps_keep_what_lies_in_the_tier_that_lives() {
    const VALUES: usize = 6144;
    let value = |index: usize, round: u64| [(index as u64) << 32 | round; WORDS];
    for killed in 0..2 {
        let scratch = Scratch::new("tiers-heap");
        let first = Server::start(&scratch, "first", ["--capacity", "8M"]);
        let second = Server::start_tcp(&scratch, "second", ["--capacity", "8M"]);
        // What leaves when one of the others is gone needs a place.
        let last = Server::start(&scratch, "last", ["--capacity", "1G"]);
        let heap = Heap::builder().near(2 * MIB).near_max(2 * MIB).far(1 << 30);
        let heap = heap.pool(format!("tier({},{},{})", first.url(), second.url(), last.url())).patience(PATIENCE);
        let heap = heap.build().expect("the servers accept");
        let mut values: Vec<(Value, u64)> =
            (0..VALUES).map(|index| (heap.alloc(value(index, 0)).expect("there is room"), 0)).collect();
        let mut random = seeded(7);
        for _ in 0..3 * VALUES {
            let index = random.usize(..VALUES);
            let scope = heap.enter();
            let (held, round) = &mut values[index];
            let held = held.get_mut(&scope).expect("all live");
            assert!(held[..] == value(index, *round), "value {index} is not of round {round}");
            *round += 1;
            *held = value(index, *round);
        }
        assert_eq!(heap.health(), Health::Good);
        let mut servers = vec![first, second];
        servers.remove(killed).kill();
        wait_until("the death is noticed", || heap.health() == Health::Degraded);
        let (mut kept, mut lost) = (0, 0);
        for (index, (held, round)) in values.iter().enumerate() {
            let scope = heap.enter();
            match held.get(&scope) {
                Ok(held) => {
                    assert!(held[..] == value(index, *round), "value {index} after the death");
                    kept += 1;
                }
                Err(FarError::Pool(PoolError::ServerGone { server, .. })) if usize::from(server) == killed => lost += 1,
                Err(error) => panic!("value {index}: {error}"),
            }
        }
        println!("{kept} values were kept, {lost} lost");
        assert!(kept >= 500 && lost >= 500, "{kept} values were kept, {lost} lost");
    }
}
