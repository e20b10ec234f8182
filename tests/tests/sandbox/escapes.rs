//! Code that means harm: everything that it tries ends it, by name, and nothing and nobody else suffers.
//!
//! Danger: bytes of another tenant, time and memory of the server, a server that dies, answers that only look like answers.

use crate::guest::*;
use farfield_bench_functions::{List, ListStart, with_workloads};
use farfield_guest::{Beyond, Deep, Endless, Flood, Hoard, Increment, Panics, Reach, Stray};
use farfield_pool::PoolBuilder;
use farfield_sandbox::{Code, SandboxError};
use farfield_server::Server;
use farfield_tests::{PATIENCE, Scratch, Server as Process, wait_until};
use farfield_wic::{CallError, Caller, Fault, Function, RANGE_BYTES_MAX, Registry, Where};
use std::sync::mpsc;
use std::time::Duration;

const REGION_BYTES: u64 = PAGES * 4096;

/// A server whose calls end soon.
fn hasty() -> Server {
    serve_within(with_sandbox(with_workloads(Registry::standard())), Duration::from_millis(300))
}

/// It goes on as before.
fn is_well(server: &Server, code: &Code) {
    let mut caller = caller(server);
    let start = ListStart { node: 0, hops: 0 };
    // Its time is short, and the machine may be busy.
    wait_until("shipped code answers", || code.call::<List>(&mut caller, start).run().is_ok_and(|end| end.value == 0));
    wait_until("native code answers", || {
        caller.call::<List>(start).at(Where::Server).run().is_ok_and(|end| end.value == 0)
    });
}

fn broken<F: Function<Answer: std::fmt::Debug>>(code: &Code, caller: &mut Caller, argument: F::Argument) -> String {
    match code.call::<F>(caller, argument).run() {
        Err(SandboxError::Broken { reason }) => reason,
        other => panic!("{}: {other:?}", F::NAME),
    }
}

#[test]
fn no_byte_outside_of_the_region_is_to_be_had() {
    let Some(code) = code() else { return };
    let server = sandbox();
    // The neighbour has something to hide.
    let mut neighbour = caller(&server);
    neighbour.call::<Increment>(3).at(Where::Client).run().unwrap();
    let mut caller = caller(&server);
    for offset in [REGION_BYTES, REGION_BYTES - 7, REGION_BYTES + 4096, u64::MAX - 7, u64::MAX, 1 << 63, 1 << 40] {
        for beyond in [Beyond::Read(offset), Beyond::Write(offset)] {
            let error = code.call::<Reach>(&mut caller, beyond).run().unwrap_err();
            assert_eq!(error, SandboxError::Call(CallError::Fault(Fault::OutOfRange { offset })), "{beyond:?}");
        }
    }
    // Its own is empty, and stays its own.
    assert_eq!(code.call::<Reach>(&mut caller, Beyond::Read(64)).run(), Ok(0));
    assert_eq!(code.call::<Reach>(&mut caller, Beyond::Write(64)).run(), Ok(7));
    assert_eq!(code.call::<Reach>(&mut neighbour, Beyond::Read(64)).run(), Ok(3));
}

#[test]
fn endless_guests_are_ended_in_time() {
    let Some(code) = code() else { return };
    let server = hasty();
    let mut caller = caller(&server);
    let timed_out = |result| match result {
        Err(SandboxError::Call(CallError::TimedOut { .. })) => {}
        other => panic!("{other:?}"),
    };
    timed_out(code.call::<Endless>(&mut caller, 1).run());
    // Where there is time, however busy the machine is: what waits for nobody, and by steps: computing takes them, too. Calls
    // that end go on beside one that does not.
    let server = sandbox();
    let mut caller = Caller::new(region(&server));
    let stray = code.call::<Stray>(&mut caller, ()).within(PATIENCE).run();
    assert_eq!(stray, Err(SandboxError::Call(CallError::Stuck)));
    match code.call::<Endless>(&mut caller, 1).steps(5).within(PATIENCE).run() {
        Err(SandboxError::Call(CallError::Overrun { steps })) => assert!(steps <= 5, "{steps}"),
        other => panic!("{other:?}"),
    }
    std::thread::scope(|scope| {
        let endless = scope.spawn(|| code.call::<Endless>(&mut caller, 1).within(Duration::from_secs(1)).run());
        is_well(&server, &code);
        timed_out(endless.join().unwrap());
    });
    is_well(&server, &code);
}

#[test]
fn memory_and_stack_have_ends() {
    let Some(code) = code() else { return };
    let server = sandbox();
    let mut caller = caller(&server);
    for bytes in [64, 100_000, 3 << 20, 1 << 30] {
        broken::<Hoard>(&code, &mut caller, bytes);
    }
    assert_eq!(code.call::<Deep>(&mut caller, 20).run(), Ok(20));
    broken::<Deep>(&code, &mut caller, 1 << 40);
    broken::<Panics>(&code, &mut caller, 5);
    // Far more is read than an instance could keep, in turns.
    let read = code.call::<Flood>(&mut caller, 200).within(PATIENCE).run();
    assert_eq!(read, Ok(200 * RANGE_BYTES_MAX as u64));
    is_well(&server, &code);
}

/// A process of its own, killed while code runs there again and again: the caller is told.
#[test]
fn a_server_that_dies_under_a_call_is_lost_by_name() {
    let Some(code) = code() else { return };
    let scratch = Scratch::new("sandbox");
    let connect = |server: &Process| Caller::new(PoolBuilder::new().url(server.url()).pages(PAGES).open().unwrap());
    let server = Process::start_tcp(&scratch, "server", ["--sandbox", "--capacity", "64M"]);
    let mut caller = connect(&server);
    let (counted, so_far) = mpsc::channel();
    let error = std::thread::scope(|scope| {
        let code = &code;
        let counting = scope.spawn(move || {
            loop {
                match code.call::<Increment>(&mut caller, 10).within(PATIENCE).run() {
                    Ok(last) => counted.send(last).unwrap(),
                    Err(error) => return error,
                }
            }
        });
        assert_eq!(so_far.iter().take(5).last(), Some(50));
        server.running().signal(libc::SIGKILL);
        so_far.iter().for_each(drop);
        counting.join().unwrap()
    });
    assert!(matches!(error, SandboxError::Call(CallError::Fault(Fault::Lost(_)))), "{error:?}");
    let plain = Process::start_tcp(&scratch, "plain", ["--capacity", "64M"]);
    assert_eq!(code.call::<Increment>(&mut connect(&plain), 1).run(), Err(SandboxError::NoSandbox));
}

/// A guest by hand, with these parts.
fn by_hand(memory: &str, room: &str, begin: &str, go_on: &str) -> Vec<u8> {
    let text = format!(
        r#"(module {memory}
            (func (export "ff_sandbox_room") (param i32) (result i32) {room})
            (func (export "ff_sandbox_begin") (param i32) (result i64) {begin})
            (func (export "ff_sandbox_go_on") (param i32) (result i64) {go_on}))"#
    );
    wat::parse_str(text).unwrap()
}

const MEMORY: &str = r#"(memory (export "memory") 1)"#;

#[test]
fn code_that_is_none_is_not_shipped() {
    let refused = |bytes: Vec<u8>| match Code::new(bytes) {
        Err(SandboxError::Code { reason }) => reason,
        other => panic!("{other:?}"),
    };
    refused(Vec::new());
    refused(b"#!/bin/sh\n".to_vec());
    refused(vec![0; 3 << 20]);
    // A code section of many bytes and no functions.
    let mut empty = b"\0asm\x01\0\0\0\x0a\xe5\x28\0".to_vec();
    empty.resize(8 + 3 + 5221, 0);
    refused(empty);
    refused(wat::parse_str("(module)").unwrap());
    let wasi = r#"(module (import "wasi_snapshot_preview1" "fd_write" (func)) (memory (export "memory") 1))"#;
    assert!(refused(wat::parse_str(wasi).unwrap()).contains("fd_write"));
    // A start function, a huge memory from the start, exports of another type.
    let started = r#"(module (memory (export "memory") 1) (func $f (loop br 0)) (start $f))"#;
    refused(wat::parse_str(started).unwrap());
    refused(by_hand(r#"(memory (export "memory") 65536)"#, "i32.const 0", "i64.const 0", "i64.const 0"));
    refused(wat::parse_str(r#"(module (memory (export "memory") 1) (func (export "ff_sandbox_room")))"#).unwrap());
    refused(by_hand("", "i32.const 0", "i64.const 0", "i64.const 0"));
}

/// The one import that a guest may have, and two messages: it is confused, or cannot read its argument.
const READS: &str = r#"(import "farfield" "read" (func $read (param i64 i32 i32) (result i32)))
    (memory (export "memory") 2) (data (i32.const 4096) "\05\04")"#;

/// A guest that reads, and says that it is confused where it could, that its argument cannot be read where not.
fn reader(offset: i64, into: i32, len: i32) -> Vec<u8> {
    let begin = format!(
        r"(i64.extend_i32_u (call $read (i64.const {offset}) (i32.const {into}) (i32.const {len})))
          (i64.const 4096) (i64.add) (i64.const 32) (i64.shl) (i64.const 1) (i64.or)"
    );
    by_hand(READS, "i32.const 0", &begin, "i64.const 0")
}

#[test]
fn reads_of_guests_stay_inside() {
    let server = sandbox();
    let mut caller = Caller::new(region(&server));
    let start = ListStart { node: 0, hops: 1 };
    let mut run = |offset: i64, into, len| {
        let code = Code::new(reader(offset, into, len)).unwrap();
        code.call::<List>(&mut caller, start).within(PATIENCE).run().unwrap_err()
    };
    let region_bytes = REGION_BYTES as i64;
    for (offset, len) in [(0, 0), (0, 1), (8, 4096), (region_bytes - 1, 1), (0, RANGE_BYTES_MAX as i32)] {
        let read = run(offset, 8192, len);
        assert!(
            matches!(&read, SandboxError::Broken { reason } if reason.contains("understand")),
            "{offset}: {read:?}"
        );
    }
    for (offset, len) in
        [(region_bytes, 1), (region_bytes - 1, 2), (-1, 8), (1 << 40, 8), (0, -1), (0, RANGE_BYTES_MAX as i32 + 1)]
    {
        assert_eq!(run(offset, 8192, len), SandboxError::Call(CallError::Argument), "{offset}, {len}");
    }
    for into in [131_000, -1, i32::MIN] {
        let outside = run(0, into, 100);
        assert!(matches!(&outside, SandboxError::Broken { reason } if reason.contains("outside")), "{outside:?}");
    }
    let other = by_hand(
        r#"(import "farfield" "read" (func (param i32) (result i32))) (memory (export "memory") 1)"#,
        "i32.const 0",
        "i64.const 0",
        "i64.const 0",
    );
    assert!(Code::new(other).is_err(), "an import of another type");
}

#[test]
fn requests_of_guests_are_validated() {
    let (server, hasty) = (sandbox(), hasty());
    let mut hasty_caller = caller(&hasty);
    let mut caller = Caller::new(region(&server));
    let start = ListStart { node: 0, hops: 1 };
    // A busy machine may take long to look at it.
    let mut run = |bytes: Vec<u8>| Code::new(bytes).unwrap().call::<List>(&mut caller, start).within(PATIENCE).run();
    let mut ends_in_time = |bytes| match Code::new(bytes).unwrap().call::<List>(&mut hasty_caller, start).run() {
        Err(SandboxError::Call(CallError::TimedOut { .. } | CallError::Overrun { .. })) => {}
        other => panic!("{other:?}"),
    };
    let says_broken = |result: Result<_, SandboxError>| match result {
        Err(SandboxError::Broken { reason }) => reason,
        other => panic!("{other:?}"),
    };
    // Room outside of its memory; words from outside of it, too many, or none that mean anything.
    says_broken(run(by_hand(MEMORY, "i32.const -4", "i64.const 0", "i64.const 0")));
    says_broken(run(by_hand(MEMORY, "i32.const 0", "i64.const -1", "i64.const 0")));
    says_broken(run(by_hand(MEMORY, "i32.const 0", "i64.const 0x7fffffff", "i64.const 0")));
    says_broken(run(by_hand(MEMORY, "i32.const 0", "i64.const 0xfff000000ff", "i64.const 0")));
    let said = |bytes: &str, len: u32| {
        let memory = format!(r#"{MEMORY} (data (i32.const 4096) "{bytes}")"#);
        let speaks = format!("i64.const {}", 4096u64 << 32 | u64::from(len));
        by_hand(&memory, "i32.const 0", &speaks, &speaks)
    };
    says_broken(run(said("\\ff\\ff\\ff", 3)));
    // Wants nothing and has not ended.
    assert_eq!(run(said("\\00\\00", 2)), Err(SandboxError::Call(CallError::Stuck)));
    // Wants a turn again and again: time ends it.
    ends_in_time(said("\\00\\01\\05\\02", 4));
    // Says that there are four thousand million wants.
    says_broken(run(said("\\00\\ff\\ff\\ff\\ff\\0f", 6)));
    // An answer that is none of this function.
    assert_eq!(run(said("\\01\\00\\01\\ff\\00", 5)), Err(SandboxError::Call(CallError::Answer)));
    says_broken(run(by_hand(MEMORY, "unreachable", "i64.const 0", "i64.const 0")));
    ends_in_time(by_hand(MEMORY, "(loop br 0) i32.const 0", "i64.const 0", "i64.const 0"));
}
