//! Functions of a shared library that `farfield serve` loads answer as the same source does elsewhere.
//!
//! Danger: a library that a server loads other than it was built, an error that is another one behind the library's tables, a library that takes the server
//! with it, a file that is no library.

use crate::guest::PAGES;
use farfield_bench_functions::{List, ListStart};
use farfield_guest::{Beyond, Echo, Gather, Increment, Panics, Reach, Reverse};
use farfield_pool::PoolBuilder;
use farfield_tests::{Command, PATIENCE, Scratch, Server, farfield};
use farfield_wic::{CallError, Caller, Fault, Function, Place, Where};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// The library of this workspace, which is built with the tests.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a program has a path");
    let folders = program.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("libfarfield_guest.so")).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("no libfarfield_guest.so beside {}: build farfield-guest", program.display()))
}

fn caller(server: &Server) -> Caller {
    let pool = PoolBuilder::new().url(server.url()).pages(PAGES).client_name("library").open();
    Caller::new(pool.expect("the server lives"))
}

/// Calls the function at the client and at the server, and returns both results.
fn both<F: Function>(caller: &mut Caller, argument: F::Argument) -> [Result<F::Answer, CallError>; 2] {
    [Where::Client, Where::Server].map(|place| caller.call::<F>(argument.clone()).at(place).within(PATIENCE).run())
}

/// Words at the beginning of the region.
struct Fill;

impl Function for Fill {
    const NAME: &'static str = "test.fill";
    const VERSION: u32 = 1;
    type Argument = Vec<u64>;
    type Answer = ();

    async fn run<P: Place>(place: &P, words: Vec<u64>) -> Result<(), Fault> {
        for (index, word) in words.iter().enumerate() {
            place.write_u64(index as u64 * 8, *word).await?;
        }
        Ok(())
    }
}

#[test]
fn functions_of_a_loaded_library_answer_as_their_source_does_at_the_client() {
    let scratch = Scratch::new("library");
    let path = library();
    let server = Server::start_tcp(&scratch, "server", [&"--functions".into(), &path]);
    let mut caller = caller(&server);
    // A list of 64 nodes of two words, each pointing at one 37 places on.
    let words: Vec<_> = (0..64).flat_map(|node: u64| [(node + 37) % 64 * 16, node * node]).collect();
    caller.call::<Fill>(words).at(Where::Client).run().unwrap();
    for hops in [0, 1, 5, 63, 64, 1000] {
        let [here, there] = both::<List>(&mut caller, ListStart { node: 0, hops }).map(|end| end.unwrap().value);
        assert_eq!((here, there), (there, (u64::from(hops) * 37 % 64).pow(2)));
    }
    // Many at a time, which take turns there.
    let starts: Vec<_> = (0..64).map(|node| ListStart { node: node * 16, hops: 100 }).collect();
    let ends = |caller: &mut Caller, place| {
        let answers = caller.calls::<List>(starts.clone()).at(place).within(PATIENCE).run();
        answers.into_iter().map(|end| end.unwrap().value).collect::<Vec<_>>()
    };
    assert_eq!(ends(&mut caller, Where::Server), ends(&mut caller, Where::Client));
    let [here, there] = both::<Gather>(&mut caller, (0..200).map(|word| word * 8 % 1024).collect());
    assert_eq!(here, there);
    let [here, there] = both::<Echo>(&mut caller, "the answer has a length of its own".repeat(100));
    assert_eq!(here, there);
    for result in both::<Reverse>(&mut caller, (100, 5000)) {
        result.unwrap();
    }
    // Locks and words, which clients and the library share.
    caller.call::<Fill>(vec![0; 16]).at(Where::Client).run().unwrap();
    let [here, there] = both::<Increment>(&mut caller, 20).map(Result::unwrap);
    assert_eq!((here, there), (20, 40));
}

#[test]
fn a_function_of_a_library_that_fails_harms_nobody_else() {
    let scratch = Scratch::new("library-faults");
    let server = Server::start_tcp(&scratch, "server", [&"--functions".into(), &library()]);
    let mut caller = caller(&server);
    for _ in 0..3 {
        assert_eq!(caller.call::<Panics>(1).at(Where::Server).run(), Err(CallError::Panicked));
        let [here, there] = both::<Reach>(&mut caller, Beyond::Read(1 << 40));
        assert_eq!((here, here), (there, Err(CallError::Fault(Fault::OutOfRange { offset: 1 << 40 }))));
        assert_eq!(caller.call::<Echo>("still here".into()).at(Where::Server).run().unwrap(), "still here");
    }
    let unknown = caller.call::<Fill>(vec![1]).at(Where::Server).run();
    assert_eq!(unknown, Err(CallError::NoFunction { name: Fill::NAME }));
}

#[test]
fn a_file_that_is_no_library_is_refused_with_a_reason() {
    let scratch = Scratch::new("no-library");
    let library = library();
    let copy = scratch.path().join("copy.so");
    std::fs::copy(&library, &copy).unwrap();
    std::fs::set_permissions(&copy, Permissions::from_mode(0o777)).unwrap();
    let text = scratch.file("text.so", "no code");
    let twice = [&library, &library];
    let libc = PathBuf::from("/lib/x86_64-linux-gnu/libc.so.6");
    for (libraries, part) in [
        (&[&copy][..], "chmod go-w"),
        (&[&text], "cannot load the function library"),
        (&[&scratch.path().join("absent.so")], "cannot read the function library"),
        (&[&libc], "exports no symbol farfield_functions"),
        (&twice, "there is a function \"bench.list\" of version"),
    ] {
        if !part.contains("symbol") || libc.exists() {
            let mut words = vec![farfield().into(), "serve".into(), "--listen".into(), "tcp://127.0.0.1:0".into()];
            words.extend(libraries.iter().flat_map(|path| ["--functions".into(), path.as_os_str().to_owned()]));
            let ended = Command::new(scratch.path(), words).run();
            assert_ne!(ended.code, 0, "{part}");
            assert!(ended.errors.contains(part), "{part:?} is not in {:?}", ended.errors);
        }
    }
}
