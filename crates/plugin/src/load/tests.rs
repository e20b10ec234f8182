//! Guards against a library that answers other than the same function compiled with the server,
//! and against one that takes the server with it: by a panic, by a result too many or too few, by an
//! access outside of its region or beyond its budget, or by a wrong description of itself.

use super::*;
use crate::abi::{MemoryTable, Run};
use crate::export::entry;
use core::cell::RefCell;
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_wic::{Budget, Fault, Function, Place, run_row};

const REGION_BYTES: usize = 2 * PAGE_BYTES;

/// A region without checksums.
struct Plain(RefCell<Vec<u8>>);

impl Plain {
    fn new(seed: u64) -> Plain {
        let mut random = fastrand::Rng::with_seed(seed);
        Plain(RefCell::new(core::iter::repeat_with(|| random.u8(..)).take(REGION_BYTES).collect()))
    }
}

impl Memory for Plain {
    fn region_bytes(&self) -> u64 {
        self.0.borrow().len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
        into.copy_from_slice(&self.0.borrow()[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.0.borrow_mut()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault> {
        work()
    }

    fn clock(&self) -> u64 {
        7
    }
}

/// Does what its argument says, word by word: reads, adds, fails.
struct Steps;

impl Function for Steps {
    const NAME: &'static str = "test.steps";
    const VERSION: u32 = 3;
    type Argument = Vec<(u8, u64)>;
    type Answer = Vec<u64>;

    async fn run<P: Place>(place: &P, steps: Vec<(u8, u64)>) -> Result<Vec<u64>, Fault> {
        let mut answer = Vec::new();
        for (step, number) in steps {
            let word = number % (REGION_BYTES as u64 / 8) * 8;
            match step % 16 {
                0..6 => answer.push(place.read_u64(word).await?),
                6..10 => answer.push(place.fetch_add(word, number).await?),
                10..12 => answer.push(place.compare_exchange(word, number, 0).await?),
                12 => place.write(word, &number.to_le_bytes()).await?,
                13 => {
                    let mut words = [[0; 8]; 3];
                    place.read_many(&[word, 0, 8], &mut words).await?;
                    answer.extend(words.map(u64::from_le_bytes));
                }
                14 => place.yield_now().await,
                _ if number % 7 == 0 => panic!("the test wants it"),
                _ if number % 5 == 0 => {
                    place.read_u64(number << 20 | 1 << 40).await?;
                }
                _ if number % 3 == 0 => answer.extend(core::iter::repeat_n(0, CallBody::ANSWER_BYTES_MAX)),
                _ => answer.push(place.region_bytes()),
            }
        }
        Ok(answer)
    }
}

type Outcome = (usize, Result<Vec<u8>, Stop>, u64);

fn outcomes(run: impl FnOnce(RowSink<'_>)) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    run(&mut |index, result, steps| outcomes.push((index, result.map(<[u8]>::to_vec), steps)));
    outcomes
}

fn task(argument: &[u8], steps_max: u64) -> Task<'_> {
    Task { argument, budget: Budget { steps_max, until: None } }
}

/// Encodes steps as postcard does, which writes small numbers as they are.
fn encoded(steps: &[(u8, u64)]) -> Vec<u8> {
    let varint = |mut number: u64, bytes: &mut Vec<u8>| {
        while number >= 128 {
            bytes.push(number as u8 | 128);
            number >>= 7;
        }
        bytes.push(number as u8);
    };
    let mut bytes = Vec::new();
    varint(steps.len() as u64, &mut bytes);
    for (step, number) in steps {
        bytes.push(*step);
        varint(*number, &mut bytes);
    }
    bytes
}

#[test]
fn functions_of_a_library_do_what_they_do_in_the_server() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut stops = [0; 5];
    for seed in 0..120 {
        let arguments: Vec<_> = (0..random.usize(1..24))
            .map(|_| {
                let steps: Vec<_> = (0..random.usize(0..12)).map(|_| (random.u8(..), random.u64(..1 << 20))).collect();
                let mut bytes = encoded(&steps);
                if random.u8(..16) == 0 {
                    bytes.push(0);
                }
                bytes
            })
            .collect();
        let tasks: Vec<_> = arguments.iter().map(|argument| task(argument, random.u64(1..24))).collect();
        let (here, there) = (Plain::new(seed), Plain::new(seed));
        let expected = outcomes(|ended| run_row::<Steps>(&here, &tasks, ended));
        let found = outcomes(|ended| Plugin(entry::<Steps>()).run(&there, &tasks, ended));
        assert_eq!(found, expected, "seed {seed}");
        assert_eq!(*there.0.borrow(), *here.0.borrow(), "seed {seed}");
        for (_, result, _) in found {
            stops[match result {
                Ok(_) => 0,
                Err(Stop::Panicked) => 1,
                Err(Stop::Fault(_)) => 2,
                Err(Stop::Argument) => 3,
                Err(_) => 4,
            }] += 1;
        }
    }
    assert!(stops.iter().all(|count| *count > 5), "the steps met everything: {stops:?}");
}

/// A function as a careless library has it.
fn careless(run: Run, tasks: &[Task<'_>]) -> Vec<Outcome> {
    let entry = FunctionEntry { name: ByteSlice::new(b"test.careless"), version: 1, reserved: 0, run };
    outcomes(|ended| Plugin(entry).run(&Plain::new(0), tasks, ended))
}

macro_rules! careless {
    ($tasks:expr, |$memory:ident, $results:ident| $body:block) => {{
        unsafe extern "C" fn run(
            memory: *const MemoryTable,
            _: *const CallTable,
            _: usize,
            results: *const ResultTable,
        ) {
            // SAFETY: the server's tables live as long as the call.
            let ($memory, $results) = unsafe { (&*memory, &*results) };
            let _ = ($memory, $results);
            $body
        }
        careless(run, $tasks)
    }};
}

#[test]
fn each_call_has_one_result() {
    let tasks = [task(b"", 10), task(b"", 10)];
    let none = careless!(&tasks, |memory, results| {});
    let panicked = |index| (index, Err(Stop::Panicked), 0);
    assert_eq!(none, [panicked(0), panicked(1)]);
    let many = careless!(&tasks, |memory, results| {
        for (index, answer) in [(1, b"a"), (1, b"b"), (7, b"c"), (usize::MAX, b"d")] {
            // SAFETY: the receiver gets its context.
            unsafe { (results.ended)(results.context, index, Status::OK, ByteSlice::new(answer), 4) };
        }
    });
    assert_eq!(many, [(1, Ok(b"a".to_vec()), 4), panicked(0)]);
    let long = careless!(&tasks[..1], |memory, results| {
        let answer = [0; CallBody::ANSWER_BYTES_MAX + 1];
        // SAFETY: the receiver gets its context.
        unsafe { (results.ended)(results.context, 0, Status::OK, ByteSlice::new(&answer), 4) };
    });
    assert_eq!(long, [(0, Err(Stop::AnswerTooLong), 4)]);
    let unknown = careless!(&tasks[..1], |memory, results| {
        let status = Status { code: 12345, ..Status::OK };
        // SAFETY: the receiver gets its context.
        unsafe { (results.ended)(results.context, 0, status, ByteSlice::EMPTY, 0) };
    });
    assert_eq!(unknown, [(0, Err(Stop::Fault(Fault::Internal)), 0)]);
}

#[test]
fn accesses_outside_of_the_region_are_refused() {
    let codes = careless!(&[task(b"", 1 << 20)], |memory, results| {
        let end = memory.region_bytes;
        let (mut bytes, mut words, mut matches) = ([0; 64], [0; 4], 7);
        let context = memory.context;
        // SAFETY: each access gets its context, and room for what it may write.
        let statuses = unsafe {
            [
                (memory.read)(context, end - 4, bytes.as_mut_ptr(), 8),
                (memory.read)(context, u64::MAX, bytes.as_mut_ptr(), 8),
                (memory.read)(context, 0, bytes.as_mut_ptr(), usize::MAX),
                (memory.write)(context, end - 1, bytes.as_ptr(), 2),
                (memory.load)(context, [end - 4].as_ptr(), 1, 8, bytes.as_mut_ptr()),
                (memory.load)(context, [4092].as_ptr(), 1, 8, bytes.as_mut_ptr()),
                (memory.load)(context, [0].as_ptr(), 1, 3, bytes.as_mut_ptr()),
                (memory.load)(context, [0].as_ptr(), usize::MAX, 8, bytes.as_mut_ptr()),
                (memory.sums)(context, end, words.as_mut_ptr(), 1),
                (memory.sums)(context, 0, words.as_mut_ptr(), usize::MAX),
                (memory.matches)(context, end - 1, words.as_ptr(), 2, &raw mut matches),
                (memory.read)(context, end, bytes.as_mut_ptr(), 0),
            ]
        };
        let answer: Vec<u8> = statuses.iter().map(|status| status.code as u8).chain([matches as u8]).collect();
        // SAFETY: the receiver gets its context.
        unsafe { (results.ended)(results.context, 0, Status::OK, ByteSlice::new(&answer), 0) };
    });
    let code = |fault: Fault| Stop::Fault(fault).code().0.number() as u8;
    let outside = code(Fault::OutOfRange { offset: 0 });
    let (long, unaligned) = (code(Fault::TooLong { bytes: 0 }), code(Fault::Unaligned { offset: 0 }));
    let expected =
        [outside, outside, long, outside, outside, unaligned, long, long, outside, outside, outside, 0, 7].to_vec();
    assert_eq!(codes, [(0, Ok(expected), 0)]);
}

/// Reads for ever, or until it is refused.
unsafe extern "C" fn read_on(memory: *const MemoryTable, _: *const CallTable, _: usize, results: *const ResultTable) {
    let mut word = [0; 8];
    // SAFETY: the server's tables live as long as the call, and accesses get their context.
    unsafe {
        while ((*memory).read)((*memory).context, 0, word.as_mut_ptr(), word.len()) == Status::OK {}
        ((*results).ended)((*results).context, 0, Status::OK, ByteSlice::EMPTY, 1);
    }
}

#[test]
fn a_function_that_does_not_count_its_steps_ends_all_the_same() {
    let ended = careless(read_on, &[task(b"", 1000)]);
    assert_eq!(ended, [(0, Err(Stop::Overrun { steps: 1000 }), 1)], "and what it says does not count");
    let until = Instant::now().checked_add(Duration::from_millis(20));
    let budget = Budget { steps_max: u64::MAX, until };
    assert_eq!(careless(read_on, &[Task { argument: b"", budget }]), [(0, Err(Stop::TimedOut), 1)]);
}

#[test]
fn a_wrong_description_is_refused_and_says_what_is_wrong() {
    let described = |name: &'static [u8]| {
        let entries = Box::leak(Box::new([FunctionEntry { name: ByteSlice::new(name), ..entry::<Steps>() }]));
        // SAFETY: the table has this one entry.
        unsafe { functions(&raw const *Box::leak(Box::new(FunctionTable::new(entries)))) }
    };
    let names = described(b"mine.sum").unwrap().into_iter().map(|(name, entry)| (name, entry.version));
    assert_eq!(names.collect::<Vec<_>>(), [("mine.sum", 3)]);
    for (name, part) in
        [(&b""[..], "0 bytes"), (&[b'a'; 65], "65 bytes"), (b"\xff", "UTF-8"), (b"ff.copy", "a name of the server")]
    {
        match described(name) {
            Err(Wrong::Description(reason)) => assert!(reason.contains(part), "{reason}"),
            other => panic!("{name:?}: {other:?}"),
        }
    }
    let table = FunctionTable::new(&[]);
    // SAFETY: no entry is promised.
    let of = |table: FunctionTable| unsafe { functions(&raw const table) }.unwrap_err();
    assert_eq!(of(FunctionTable { abi_version: 2, ..table }), Wrong::Version(2));
    assert!(matches!(of(table), Wrong::Description(_)));
    assert!(matches!(of(FunctionTable { count: usize::MAX, ..table }), Wrong::Description(_)));
    assert!(matches!(of(FunctionTable { functions: core::ptr::null(), count: 1, ..table }), Wrong::Description(_)));
    // SAFETY: null is allowed.
    assert!(matches!(unsafe { functions(core::ptr::null()) }, Err(Wrong::Description(_))));
}
