//! Programs of one to five processes.
//!
//! The processes run this program, so it has a `main`: a started process serves tasks at the first
//! `run`. An argument names the tests that are run, by a part of their names.

/// An example that compares its answers with those of threads.
#[path = "../../examples/key_value.rs"]
mod key_value;

mod groups;
mod handover;
mod history;
mod linear;
mod litmus;
mod names;
mod owners;
mod placement;
mod reads;
mod support;
mod survival;
mod sync;
mod vectors;

use farfield_dsm::{DBox, NodeBuilder};
use std::iter::repeat;
use std::process::Command;
use std::time::Instant;
use support::is_deep;

fn main() {
    assert_eq!(size_of::<Option<DBox<[u8; 500]>>>(), 8);
    let wanted = std::env::args().nth(1).filter(|argument| !argument.starts_with('-')).unwrap_or_default();
    let started = Instant::now();
    let mut passed = 0;
    // The threads of a litmus test wait for each other, so all of them must run.
    let (_server, backup) = survival::memory_server();
    let (_other, other) = survival::memory_server();
    let mirror = format!("mirror({backup},{other})");
    let all = [
        (survival::TESTS, 2),
        (linear::SURVIVAL_TESTS, 2),
        (names::SURVIVAL_TESTS, 2),
        (owners::TESTS, 2),
        (sync::TESTS, 2),
        (vectors::TESTS, 2),
        (groups::TESTS, 2),
        (reads::TESTS, 2),
        (placement::TESTS, 2),
        (names::TESTS, 2),
        (&[("a_store_of_three_nodes_counts_as_threads_do", 3, key_value::compare)], 2),
        (litmus::TESTS, 4),
        (linear::TESTS, 4),
        (handover::TESTS, 2),
    ];
    for ((name, nodes, test), workers) in all.iter().flat_map(|(tests, workers)| tests.iter().zip(repeat(*workers))) {
        if !name.contains(&wanted) {
            continue;
        }
        // Copies come by messages, or objects are read in place: the deep tier tries both.
        let modes = [
            (false, true),
            (
                true,
                *nodes > 1
                    && !support::COPIES_ONLY.contains(name)
                    && (is_deep() || name.contains("random") || name.contains("in_place")),
            ),
        ];
        for (is_in_place, _) in modes.iter().filter(|(_, is_run)| *is_run) {
            let config = NodeBuilder::new().nodes(*nodes).near(support::NEAR_BYTES).workers(workers);
            let mut with_backup = survival::TESTS.iter().chain(linear::SURVIVAL_TESTS).chain(names::SURVIVAL_TESTS);
            let has_backup = with_backup.any(|(other, ..)| other == name);
            // The deep tier tries one memory server, and two.
            let backup = if *is_in_place { &mirror } else { &backup };
            let config = if has_backup { config.backup(&**backup) } else { config };
            let config = config.read_in_place(*is_in_place);
            let begun = Instant::now();
            let ended = farfield_dsm::run(&config, test).expect("the nodes start");
            ended.unwrap_or_else(|error| panic!("{name}: {error}"));
            let mode = if *is_in_place { ", in place" } else { "" };
            println!("test {name} ({nodes} nodes{mode}) ... ok in {:.2}s", begun.elapsed().as_secs_f64());
            passed += 1;
        }
    }
    if is_deep() {
        let killed = all.iter().flat_map(|(tests, _)| tests.iter()).map(|(name, ..)| *name);
        killed.filter(|name| name.contains("killed") && name.contains(&wanted)).for_each(kill_again);
    }
    if "wrong_histories_are_told_from_right_ones".contains(&wanted) {
        history::wrong_histories_are_told_from_right_ones();
        println!("test wrong_histories_are_told_from_right_ones ... ok");
        passed += 1;
    }
    if wanted.is_empty() {
        owners::owners_that_outlive_their_program_lead_to_nothing();
        println!("test owners_that_outlive_their_program_lead_to_nothing ... ok");
        groups::tied_objects_outlive_their_program();
        println!("test tied_objects_outlive_their_program ... ok");
        survival::backups_that_cannot_be_kept_are_refused();
        println!("test backups_that_cannot_be_kept_are_refused ... ok");
        survival::nodes_go_on_without_their_backups();
        println!("test nodes_go_on_without_their_backups ... ok");
        survival::what_was_handed_over_outlives_a_node_and_a_server();
        println!("test what_was_handed_over_outlives_a_node_and_a_server ... ok");
        survival::a_memory_server_that_comes_back_keeps_backups_again();
        println!("test a_memory_server_that_comes_back_keeps_backups_again ... ok");
        passed += 6;
    }
    println!("\ntest result: ok. {passed} passed; 0 failed; finished in {:.2}s", started.elapsed().as_secs_f64());
}

/// Runs a short program in which a node is killed a hundred times in each mode, each time at another moment.
fn kill_again(name: &str) {
    let program = std::env::current_exe().expect("it has a name");
    for _ in 0..100 {
        let mut command = Command::new(&program);
        let run = command.arg(name).env_remove("FARFIELD_DEEP").output().expect("it starts");
        let said = [run.stdout, run.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        assert!(run.status.success(), "{}", said.concat());
    }
    println!("test {name}, a hundred times ... ok");
}
