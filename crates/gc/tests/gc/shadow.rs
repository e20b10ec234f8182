//! Random operations on a graph, and on a model of it outside of the heap.
//!
//! Danger: an object that is freed while something leads to it, kept though nothing does, or that is not what it was.

use crate::common::{far_heap, is_deep};
use crate::graph::{Cycles, Size, run_in};
use farfield_gc::{FarTracing, GcStats};

fn run(near_mib: u64, limit_mib: u64, size: Size, threads: u64, operations: u64) -> GcStats {
    run_by(FarTracing::default(), near_mib, limit_mib, size, threads, operations)
}

fn run_by(tracing: FarTracing, near_mib: u64, limit_mib: u64, size: Size, threads: u64, operations: u64) -> GcStats {
    let cycles = Cycles { tracing, evacuate_at_servers: false };
    run_in(far_heap(near_mib), cycles, limit_mib, size, threads, operations)
}

fn operations(few: u64) -> u64 {
    if is_deep() { 1_000_000 } else { few }
}

#[test]
fn everything_near_on_one_thread() {
    let stats = run(16, 4, Size { roots: 300, bytes: 1500 }, 1, operations(40_000));
    assert!(stats.moved_objects > 1000 && stats.moves_given_up == 0);
}

#[test]
fn a_quarter_near_on_one_thread() {
    let stats = run(1, 4, Size { roots: 1500, bytes: 1500 }, 1, operations(30_000));
    assert!(stats.moved_objects > 1000 && stats.moves_given_up == 0);
    assert!(stats.read_pages > 100, "far objects are looked at in copies");
}

#[test]
fn a_quarter_near_on_many_threads() {
    run(2, 6, Size { roots: 2000, bytes: 3000 }, if is_deep() { 8 } else { 4 }, operations(28_000));
}

#[test]
fn a_twentieth_near_on_two_threads() {
    run(1, 20, Size { roots: 6000, bytes: 10_000 }, 2, operations(34_000));
}

#[test]
fn a_quarter_near_through_the_frames() {
    let stats = run_by(FarTracing::Frames, 1, 3, Size { roots: 800, bytes: 1500 }, 2, operations(30_000));
    assert_eq!(stats.read_pages, 0);
}

#[test]
fn a_quarter_near_as_the_program_brings_it() {
    run_by(FarTracing::Arrivals, 1, 3, Size { roots: 800, bytes: 1500 }, 2, operations(30_000));
}

#[test]
fn a_quarter_near_where_no_server_can_be_asked() {
    let cycles = Cycles { tracing: FarTracing::Servers, evacuate_at_servers: true };
    let stats = run_in(far_heap(1), cycles, 3, Size { roots: 800, bytes: 1500 }, 2, operations(30_000));
    assert_eq!((stats.traced_at_servers, stats.moved_at_servers, stats.server_moves_given_up), (0, 0, 0));
    assert!(stats.moved_objects > 1000);
}
