//! Shipped code answers as the same source does natively, at each place, with every kind of access.
//!
//! Danger: an access that a guest makes and that does something else than a native one, answers that reach the wrong access, code that is not the one that
//! was shipped.

use crate::guest::*;
use farfield_bench_functions::{List, ListStart};
use farfield_guest::{Echo, Gather, Increment, Reverse};
use farfield_sandbox::{Code, SandboxError};
use farfield_tests::PATIENCE;
use farfield_wic::{
    CallError, Caller, Fault, Function, Number, Place, RANGE_BYTES_MAX, Range, Registry, Totals, Wanted, Where,
};
use std::fmt::Debug;
use std::ops::Bound;

/// Stores bytes from offset 0 on.
struct Store;

impl Function for Store {
    const NAME: &'static str = "test.store";
    const VERSION: u32 = 1;
    type Argument = (u64, Vec<u8>);
    type Answer = ();

    async fn run<P: Place>(place: &P, (offset, bytes): (u64, Vec<u8>)) -> Result<(), Fault> {
        place.write(offset, &bytes).await
    }
}

fn store(caller: &mut Caller, bytes: &[u8]) {
    for (index, piece) in bytes.chunks(32 * 1024).enumerate() {
        let argument = (index as u64 * 32 * 1024, piece.to_vec());
        caller.call::<Store>(argument).at(Where::Client).run().unwrap();
    }
}

fn words(words: impl Iterator<Item = u64>) -> Vec<u8> {
    words.flat_map(u64::to_le_bytes).collect()
}

/// At the client natively, at the server in the sandbox, and where that is faster: what `seen` makes of the answers is the same.
fn everywhere<F: Function, S: PartialEq + Debug>(
    code: &Code,
    caller: &mut Caller,
    argument: F::Argument,
    seen: impl Fn(F::Answer) -> S,
) -> S {
    let [here, there, chosen] = [Where::Client, Where::Server, Where::Auto]
        .map(|place| seen(code.call::<F>(caller, argument.clone()).at(place).within(PATIENCE).run().unwrap()));
    assert_eq!(here, there, "{}", F::NAME);
    assert_eq!(here, chosen, "{}", F::NAME);
    here
}

/// Number, sum, smallest and largest of numbers.
type Seen<N> = (u64, <N as Number>::Sum, Option<N>, Option<N>);

fn totals<N: Number<Sum: PartialEq + Debug>>(
    code: &Code,
    caller: &mut Caller,
    offset: u64,
    count: u64,
    least: Bound<N>,
) -> Seen<N> {
    let wanted = Wanted { pieces: vec![Range { offset, count }], values: (least, Bound::Unbounded) };
    everywhere::<Totals<N>, _>(code, caller, wanted, |part| (part.count(), part.sum(), part.min(), part.max()))
}

#[test]
fn shipped_code_answers_as_native_code() {
    let Some(code) = code() else { return };
    let server = sandbox();
    let mut caller = caller(&server);
    // A list of 64 nodes of two words, each pointing at one 37 places on.
    let next = |node: u64| (node + 37) % 64 * 16;
    store(&mut caller, &words((0..64).flat_map(|node| [next(node), node * node])));
    for hops in [0, 1, 5, 63, 64, 1000] {
        let end = everywhere::<List, _>(&code, &mut caller, ListStart { node: 0, hops }, |end| end);
        assert_eq!(end.value, (u64::from(hops) * 37 % 64).pow(2));
    }
    let offsets: Vec<u64> = (0..2000).map(|index| (index * 7 % 64) * 16 + 8).collect();
    let sum = everywhere::<Gather, _>(&code, &mut caller, offsets, |sum| sum);
    assert_eq!(sum, (0..2000).map(|index| (index * 7 % 64u64).pow(2)).sum::<u64>());
    let squares = (0..64u64).flat_map(|node| [next(node), node * node]).filter(|word| *word >= 100);
    let seen = totals::<u64>(&code, &mut caller, 0, 128, Bound::Included(100));
    assert_eq!(seen.1, squares.map(u128::from).sum::<u128>());
    totals::<f64>(&code, &mut caller, 8, 100, Bound::Unbounded);
    let text = "über".repeat(2000);
    assert_eq!(everywhere::<Echo, _>(&code, &mut caller, text.clone(), |text| text), text);
}

#[test]
fn measured_costs_belong_to_one_function_at_one_place() {
    let Some(code) = code() else { return };
    let server = sandbox();
    let mut caller = caller(&server);
    let text = || "text".to_owned();
    // The server does not run it natively: it runs here, and the sandbox is another matter.
    for _ in 0..64 {
        assert_eq!(caller.call::<Echo>(text()).at(Where::Auto).run().unwrap(), "text");
        assert_eq!(code.call::<Echo>(&mut caller, text()).at(Where::Auto).run().unwrap(), "text");
        code.call::<Increment>(&mut caller, 1).at(Where::Auto).run().unwrap();
    }
    let seen: Vec<_> = caller.choices().map(|(name, choice)| (name, choice.is_bound)).collect();
    assert_eq!(seen, [(Echo::NAME, false), (Echo::NAME, true), (Increment::NAME, false)]);
}

#[test]
fn long_ranges_are_read_and_written_whole() {
    let Some(code) = code() else { return };
    let server = sandbox();
    let mut caller = caller(&server);
    let bytes: Vec<u8> = (0..RANGE_BYTES_MAX as u32).map(|index| (index % 251) as u8).collect();
    store(&mut caller, &bytes);
    let all = RANGE_BYTES_MAX as u32;
    code.call::<Reverse>(&mut caller, (0, all)).run().unwrap();
    let sum =
        |bytes: &[u8]| bytes.as_chunks::<8>().0.iter().map(|word| u128::from(u64::from_le_bytes(*word))).sum::<u128>();
    let turned: Vec<u8> = bytes.iter().rev().copied().collect();
    let seen = totals::<u64>(&code, &mut caller, 0, u64::from(all / 8), Bound::Unbounded);
    assert_eq!(seen.1, sum(&turned));
    // Turned around twice it is as it was.
    for _ in 0..2 {
        code.call::<Reverse>(&mut caller, (3, all - 3)).run().unwrap();
    }
    assert_eq!(totals::<u64>(&code, &mut caller, 0, u64::from(all / 8), Bound::Unbounded), seen);
    let error = code.call::<Reverse>(&mut caller, (0, all + 1)).run().unwrap_err();
    assert_eq!(error, SandboxError::Call(CallError::Fault(Fault::TooLong { bytes: u64::from(all) + 1 })));
}

/// Natively at the client, natively at the server and in the sandbox, all at once: one lock, and no word is lost.
#[test]
fn shipped_and_native_code_stand_in_one_line() {
    const TIMES: u32 = 25;
    let Some(code) = code() else { return };
    let server = serve(with_sandbox(Registry::standard().with::<Increment>()));
    let owner = region(&server);
    let secret = owner.share().unwrap();
    std::thread::scope(|scope| {
        for worker in 0..6 {
            let (code, secret) = (&code, &secret);
            let url = server.endpoints()[0].clone();
            scope.spawn(move || {
                let joined = farfield_pool::PoolBuilder::new().url(&url).pages(PAGES).attach(secret).unwrap();
                let mut caller = Caller::new(joined);
                match worker % 3 {
                    0 => caller.call::<Increment>(TIMES).at(Where::Client).within(PATIENCE).run().unwrap(),
                    1 => caller.call::<Increment>(TIMES).at(Where::Server).within(PATIENCE).run().unwrap(),
                    _ => code.call::<Increment>(&mut caller, TIMES).at(Where::Server).within(PATIENCE).run().unwrap(),
                };
            });
        }
    });
    let mut caller = Caller::new(owner);
    for offset in [64, 72] {
        assert_eq!(totals::<u64>(&code, &mut caller, offset, 1, Bound::Unbounded).1, (6 * TIMES).into(), "{offset}");
    }
}

#[test]
fn missing_functions_and_other_versions_are_named() {
    let Some(code) = code() else { return };
    let server = sandbox();
    let mut caller = caller(&server);

    struct Absent;
    impl Function for Absent {
        const NAME: &'static str = "guest.absent";
        const VERSION: u32 = 1;
        type Argument = ();
        type Answer = ();
        async fn run<P: Place>(_place: &P, _nothing: ()) -> Result<(), Fault> {
            Ok(())
        }
    }
    assert_eq!(code.call::<Absent>(&mut caller, ()).run(), Err(SandboxError::NoFunction { name: "guest.absent" }));

    struct Older;
    impl Function for Older {
        const NAME: &'static str = Echo::NAME;
        const VERSION: u32 = 2;
        type Argument = String;
        type Answer = String;
        async fn run<P: Place>(_place: &P, text: String) -> Result<String, Fault> {
            Ok(text)
        }
    }
    let error = code.call::<Older>(&mut caller, String::new()).run();
    assert_eq!(error, Err(SandboxError::OtherVersion { name: Echo::NAME, ours: 2, theirs: 3 }));

    struct Numbered;
    impl Function for Numbered {
        const NAME: &'static str = Echo::NAME;
        const VERSION: u32 = 3;
        type Argument = Vec<u64>;
        type Answer = String;
        async fn run<P: Place>(_place: &P, _numbers: Vec<u64>) -> Result<String, Fault> {
            Ok(String::new())
        }
    }
    assert_eq!(
        code.call::<Numbered>(&mut caller, vec![u64::MAX; 40]).run(),
        Err(SandboxError::Call(CallError::Argument))
    );

    let plain = serve(Registry::standard());
    let mut caller = Caller::new(region(&plain));
    assert_eq!(code.call::<Echo>(&mut caller, "x".into()).run(), Err(SandboxError::NoSandbox));
}
