//! The server, as clients see it. Dangers: an answer too many or too few, after which a client reads the wrong ones; a
//! request that ends the server; a capacity that is not one.

use super::cache::Cache;
use super::connections::{accept, converse_on};
use super::request::{Parsed, Request, Verb, Wrong};
use super::{binary, text, trial_cache};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

struct Client {
    cache: Arc<Cache>,
    clock: Arc<AtomicU64>,
}

impl Client {
    fn new(capacity: u64, evict: bool) -> Client {
        let clock = Arc::new(AtomicU64::new(1_000_000_000));
        let ticks = clock.clone();
        Client { cache: Arc::new(trial_cache(capacity, evict, move || ticks.load(Ordering::Relaxed))), clock }
    }

    /// Says something, in pieces of so many bytes; what comes back.
    fn say(&self, request: &[u8], piece: usize) -> Vec<u8> {
        let (mut buffer, mut skip, mut out) = (Vec::new(), 0, Vec::new());
        for piece in request.chunks(piece) {
            buffer.extend_from_slice(piece);
            if converse_on(&self.cache, &mut buffer, &mut skip, &mut out) {
                out.extend(b"<closed>");
                break;
            }
        }
        out
    }

    #[track_caller]
    fn check(&self, request: &str, answer: &str) {
        let said = self.say(request.as_bytes(), 1 << 20);
        assert_eq!(String::from_utf8_lossy(&said), answer, "to {request:?}");
    }
}

#[test]
fn text_as_the_protocol_says() {
    let client = Client::new(1 << 20, true);
    client.check("get a\r\n", "END\r\n");
    client.check("set a 7 0 5\r\nhello\r\nget a\r\n", "STORED\r\nVALUE a 7 5\r\nhello\r\nEND\r\n");
    client.check(
        "set b 0 0 2 noreply\r\n\r\n\r\nget a b c\r\n",
        "VALUE a 7 5\r\nhello\r\nVALUE b 0 2\r\n\r\n\r\nEND\r\n",
    );
    client.check("add a 0 0 1\r\nx\r\nadd c 1 0 1\r\nx\r\n", "NOT_STORED\r\nSTORED\r\n");
    client.check("replace d 0 0 1\r\nx\r\nreplace c 2 0 1\r\ny\r\n", "NOT_STORED\r\nSTORED\r\n");
    client.check(
        "append c 9 9 2\r\nzz\r\nprepend c 9 9 1\r\n(\r\nget c\r\n",
        "STORED\r\nSTORED\r\nVALUE c 2 4\r\n(yzz\r\nEND\r\n",
    );
    client.check("append d 0 0 1\r\nx\r\n", "NOT_STORED\r\n");
    client.check(
        "delete c\r\ndelete c\r\ndelete a 0\r\ndelete b 5\r\n",
        "DELETED\r\nNOT_FOUND\r\nDELETED\r\nCLIENT_ERROR bad command line format\r\n",
    );
    client.check(
        "set n 0 0 2\r\n10\r\nincr n 5\r\ndecr n 100\r\nincr n 18446744073709551615\r\nincr n 2\r\n",
        "STORED\r\n15\r\n0\r\n18446744073709551615\r\n1\r\n",
    );
    client.check("incr n x\r\nincr nope 1\r\nincr b 1\r\n", "CLIENT_ERROR invalid numeric delta argument\r\nNOT_FOUND\r\nCLIENT_ERROR cannot increment or decrement non-numeric value\r\n");
    client.check("verbosity 1\r\nverbosity 1 noreply\r\n", "OK\r\n");
    client.check("nonsense\r\n\r\nget\r\nset a 0 0\r\n", "ERROR\r\nERROR\r\nERROR\r\nERROR\r\n");
    client.check(
        "set a 0 0 -1\r\nset a 0 0 x\r\n",
        "CLIENT_ERROR bad data chunk\r\nCLIENT_ERROR bad command line format\r\n",
    );
    client.check("set a 0 0 2\r\nabcd\r\nget a\r\n", "CLIENT_ERROR bad data chunk\r\nERROR\r\nEND\r\n");
    client.check(&format!("get {}\r\n", "k".repeat(251)), "CLIENT_ERROR bad command line format\r\n");
    client.check(
        &format!("set big 0 0 200000\r\n{}\r\nget big\r\n", "x".repeat(200_000)),
        "SERVER_ERROR object too large for cache\r\nEND\r\n",
    );
    assert!(client.say(b"version\r\n", 100).starts_with(b"VERSION "));
    let stats = String::from_utf8(client.say(b"stats\r\n", 100)).unwrap();
    assert!(stats.contains("STAT curr_items 2\r\n") && stats.ends_with("END\r\n"), "{stats}");
    client.check("quit\r\n", "<closed>");
    assert!(client.say(&vec![b'x'; 70_000], 1 << 20).ends_with(b"<closed>"));
}

#[test]
fn versions_are_compared() {
    let client = Client::new(1 << 20, true);
    client.check("cas a 0 0 1 5\r\nx\r\n", "NOT_FOUND\r\n");
    client.check("set a 0 0 1\r\nx\r\n", "STORED\r\n");
    let gets = String::from_utf8(client.say(b"gets a\r\n", 100)).unwrap();
    let version: u64 = gets.split_whitespace().nth(4).unwrap().parse().unwrap();
    client.check(&format!("cas a 0 0 1 {}\r\ny\r\n", version + 1), "EXISTS\r\n");
    client.check("cas a 0 0 1 0\r\ny\r\n", "EXISTS\r\n");
    client.check(&format!("cas a 0 0 1 {version}\r\ny\r\nget a\r\n"), "STORED\r\nVALUE a 0 1\r\ny\r\nEND\r\n");
    client.check(&format!("cas a 0 0 1 {version} noreply\r\nz\r\nget a\r\n"), "VALUE a 0 1\r\ny\r\nEND\r\n");
}

#[test]
fn records_go_when_their_time_has_come() {
    let client = Client::new(1 << 20, true);
    let pass = |seconds| client.clock.fetch_add(seconds, Ordering::Relaxed);
    client.check(
        "set a 0 10 1\r\nx\r\nset b 0 -1 1\r\nx\r\nset c 0 1000000060 1\r\nx\r\nset d 0 5 1\r\nx\r\n",
        &"STORED\r\n".repeat(4),
    );
    client.check("get b\r\n", "END\r\n");
    client.check("touch d 100\r\ntouch b 100\r\ngat 100 a\r\n", "TOUCHED\r\nNOT_FOUND\r\nVALUE a 0 1\r\nx\r\nEND\r\n");
    pass(59);
    client.check("get a b c d\r\n", "VALUE a 0 1\r\nx\r\nVALUE c 0 1\r\nx\r\nVALUE d 0 1\r\nx\r\nEND\r\n");
    pass(1);
    client.check("get c\r\nadd c 0 0 1\r\ny\r\nget c\r\n", "END\r\nSTORED\r\nVALUE c 0 1\r\ny\r\nEND\r\n");
    pass(40);
    client.check("get a d\r\nincr a 1\r\n", "END\r\nNOT_FOUND\r\n");
    client.check("flush_all 10\r\nget c\r\n", "OK\r\nVALUE c 0 1\r\ny\r\nEND\r\n");
    pass(10);
    client.check("get c\r\nset c 0 0 1\r\nz\r\nget c\r\n", "END\r\nSTORED\r\nVALUE c 0 1\r\nz\r\nEND\r\n");
    client.check("flush_all noreply\r\nget c\r\n", "END\r\n");
}

#[test]
fn the_capacity_is_one() {
    let value = "v".repeat(5_000);
    for evict in [true, false] {
        let client = Client::new(400_000, evict);
        let (mut stored, mut refused) = (0, 0);
        for number in 0..2_000 {
            match &client.say(format!("set k{number} 0 0 5000\r\n{value}\r\n").as_bytes(), 1 << 20)[..] {
                b"STORED\r\n" => stored += 1,
                b"SERVER_ERROR out of memory storing object\r\n" => refused += 1,
                other => panic!("{}", String::from_utf8_lossy(other)),
            }
            let stats = client.cache.stats();
            let stat = |name| stats.iter().find(|(known, _)| *known == name).unwrap().1;
            assert!(stat("bytes") <= 400_000 && stat("near_bytes") <= 2 << 20, "{stats:?}");
        }
        assert_eq!((stored, refused), if evict { (2_000, 0) } else { (78, 1_922) });
        let gets: Vec<u8> =
            (0..2_000).flat_map(|number| client.say(format!("get k{number}\r\n").as_bytes(), 100)).collect();
        assert_eq!(gets.windows(6).filter(|window| window == b"VALUE ").count(), 78);
        assert!(client.say(b"flush_all\r\nset a 0 0 1\r\nx\r\n", 100).starts_with(b"OK\r\n"));
    }
}

fn packet(opcode: u8, extras: &[u8], key: &str, value: &str, cas: u64) -> Vec<u8> {
    let mut packet = vec![0x80, opcode];
    packet.extend((key.len() as u16).to_be_bytes());
    packet.extend([extras.len() as u8, 0, 0, 0]);
    packet.extend(((extras.len() + key.len() + value.len()) as u32).to_be_bytes());
    packet.extend([1, 2, 3, 4]);
    packet.extend(cas.to_be_bytes());
    packet.extend(extras);
    packet.extend(key.bytes());
    packet.extend(value.bytes());
    packet
}

/// Status, version, extras, key and value of an answer, which is taken off.
fn take_answer(said: &mut Vec<u8>) -> (u16, u64, Vec<u8>, String, String) {
    assert_eq!((said[0], &said[12..16]), (0x81, &[1, 2, 3, 4][..]));
    let key = usize::from(u16::from_be_bytes([said[2], said[3]]));
    let extras = usize::from(said[4]);
    let body = u32::from_be_bytes(said[8..12].try_into().unwrap()) as usize;
    let answer: Vec<u8> = said.drain(..24 + body).collect();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap_or_else(|_| format!("{bytes:?}"));
    let (at_key, at_value) = (24 + extras, 24 + extras + key);
    let status = u16::from_be_bytes([answer[6], answer[7]]);
    let cas = u64::from_be_bytes(answer[16..24].try_into().unwrap());
    (status, cas, answer[24..at_key].to_vec(), text(&answer[at_key..at_value]), text(&answer[at_value..]))
}

#[test]
fn binary_as_the_protocol_says() {
    let client = Client::new(1 << 20, true);
    let ask = |packet: Vec<u8>| {
        let mut said = client.say(&packet, 7);
        let answer = take_answer(&mut said);
        assert!(said.is_empty());
        answer
    };
    let flags = [0, 0, 0, 9, 0, 0, 0, 0];
    assert_eq!(ask(packet(0x00, b"", "a", "", 0)).0, 1);
    let (status, cas, ..) = ask(packet(0x01, &flags, "a", "one", 0));
    assert_eq!(status, 0);
    assert_eq!(ask(packet(0x00, b"", "a", "", 0)), (0, cas, vec![0, 0, 0, 9], String::new(), "one".into()));
    assert_eq!(ask(packet(0x0C, b"", "a", "", 0)).3, "a");
    assert_eq!(ask(packet(0x02, &flags, "a", "two", 0)).0, 2);
    assert_eq!(ask(packet(0x03, &flags, "b", "two", 0)).0, 1);
    assert_eq!(ask(packet(0x01, &flags, "a", "two", cas + 9)).0, 2);
    assert_eq!(ask(packet(0x01, &flags, "a", "two", cas)).0, 0);
    assert_eq!(ask(packet(0x0E, b"", "a", "!", 0)).0, 0);
    assert_eq!(ask(packet(0x0F, b"", "nope", "!", 0)).0, 5);
    assert_eq!(ask(packet(0x05, &[0; 20], "a", "", 0)).0, 6);
    let mut first = [0; 20];
    (first[7], first[15]) = (3, 40);
    assert_eq!(ask(packet(0x05, &first, "n", "", 0)).4.as_bytes(), &[0, 0, 0, 0, 0, 0, 0, 40]);
    assert_eq!(ask(packet(0x06, &first, "n", "", 0)).4.as_bytes(), &[0, 0, 0, 0, 0, 0, 0, 37]);
    first[16..].fill(0xFF);
    assert_eq!(ask(packet(0x05, &first, "m", "", 0)).0, 1);
    assert_eq!(ask(packet(0x1C, &[0, 0, 0, 50], "a", "", 0)).0, 0);
    assert_eq!(ask(packet(0x1D, &[0, 0, 0, 50], "a", "", 0)).4, "two!");
    assert_eq!(ask(packet(0x04, b"", "a", "", 0)).0, 0);
    assert_eq!(ask(packet(0x04, b"", "a", "", 0)).0, 1);
    assert_eq!(ask(packet(0x77, b"", "", "", 0)).0, 0x81);
    assert_eq!(ask(packet(0x01, b"", "a", "no extras", 0)).0, 4);
    assert_eq!(ask(packet(0x01, &flags, "a", &"x".repeat(200_000), 0)).0, 3);
    assert_eq!(ask(packet(0x08, b"", "", "", 0)).0, 0);
    assert_eq!(ask(packet(0x00, b"", "n", "", 0)).0, 1);
    // Quiet ones say only what is not expected; the last one shows where they end.
    let quiet = [
        packet(0x11, &flags, "q", "1", 0),
        packet(0x12, &flags, "q", "2", 0),
        packet(0x09, b"", "absent", "", 0),
        packet(0x0D, b"", "q", "", 0),
        packet(0x14, b"", "q", "", 0),
        packet(0x0A, b"", "", "", 0),
    ];
    let mut said = client.say(&quiet.concat(), 5);
    assert_eq!(take_answer(&mut said).0, 2);
    assert_eq!(take_answer(&mut said).4, "1");
    assert_eq!(take_answer(&mut said), (0, 0, vec![], String::new(), String::new()));
    assert!(said.is_empty());
    let mut said = client.say(&packet(0x10, b"", "", "", 0), 100);
    let mut names = Vec::new();
    while !said.is_empty() {
        names.push(take_answer(&mut said).3);
    }
    assert!(names.len() > 5 && names.last().unwrap().is_empty());
    assert!(client.say(&packet(0x17, b"", "", "", 0), 100) == b"<closed>");
}

/// However a conversation is cut into pieces, it is the same.
#[test]
fn random_requests_are_answered_alike_in_one_piece_and_in_many() {
    const WORDS: [&str; 34] = [
        "get",
        "gets",
        "gat",
        "gats",
        "set",
        "add",
        "replace",
        "append",
        "prepend",
        "cas",
        "incr",
        "decr",
        "touch",
        "delete",
        "flush_all",
        "verbosity",
        "a",
        "b",
        "key",
        "0",
        "1",
        "5",
        "-1",
        "100",
        "4294967296",
        "noreply",
        "\r\n",
        "\r\n",
        "\r\n",
        "x\r\n",
        "hello\r\n",
        "\n",
        "99999999999999999999",
        "stats x",
    ];
    let seed = std::env::var("FARFIELD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    println!("seed {seed} (FARFIELD_SEED={seed})");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..300 {
        let mut request = Vec::new();
        for _ in 0..random.usize(..60) {
            match random.usize(..20) {
                0 => request.extend((0..random.usize(..40)).map(|_| random.u8(..))),
                1 => {
                    let extras = vec![0; [0, 4, 8, 20][random.usize(..4)]];
                    request.extend(b"\r\n");
                    request.extend(packet(
                        random.usize(..0x25) as u8,
                        &extras,
                        ["", "a", "b"][random.usize(..3)],
                        "5",
                        0,
                    ));
                }
                _ => {
                    request.extend(WORDS[random.usize(..WORDS.len())].bytes());
                    request.push(b' ');
                }
            }
        }
        let whole = Client::new(1 << 20, true).say(&request, usize::MAX);
        let pieces = Client::new(1 << 20, true).say(&request, 1 + random.usize(..9));
        assert_eq!(
            String::from_utf8_lossy(&whole),
            String::from_utf8_lossy(&pieces),
            "{:?}",
            String::from_utf8_lossy(&request)
        );
    }
}

#[test]
fn parsers_use_no_more_than_there_is() {
    let mut random = fastrand::Rng::with_seed(77);
    let store = text::parse(b"set a 1 2 3\r\nabc\r\nget", 10);
    let request = Request::Store { verb: Verb::Set, key: b"a", flags: 1, expires: 2, data: b"abc", cas: 0 };
    assert_eq!(store, Parsed::Whole((request, false), 18));
    assert_eq!(text::parse(b"set a 1 2 11\r\n", 10), Parsed::Wrong(Wrong::TooLarge, 27));
    for _ in 0..20_000 {
        let bytes: Vec<u8> = (0..random.usize(..80)).map(|_| random.u8(..)).collect();
        for start in [&b""[..], b"\x80", b"set a 0 0 ", b"get "] {
            let input = [start, &bytes].concat();
            if let Parsed::Whole(_, used) = text::parse(&input, 1_000) {
                assert!(used > 0 && used <= input.len());
            }
            if let (_, Parsed::Whole(_, used)) = binary::parse(&input, 1_000) {
                assert!(used >= 24 && used <= input.len());
            }
        }
    }
}

/// A server on a port of its own, for as long as the test process lives.
fn serve() -> u16 {
    serve_cache(Client::new(64 << 20, true).cache)
}

fn serve_cache(cache: Arc<Cache>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || accept(&listener, &cache));
    port
}

fn run(program: &str, arguments: &[&str]) -> Option<(bool, String)> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    let text = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

/// At home a test whose client is not installed is skipped; in CI it fails.
fn skip(client: &str, package: &str) {
    assert!(std::env::var_os("CI").is_none(), "there is no {client}: install {package}");
    println!("skipped: there is no {client} (Debian: {package})");
}

/// libmemcached's load: several connections that get what was set, in either protocol.
#[test]
fn memcslap_finds_what_it_set() {
    for protocol in [None, Some("--binary")] {
        let cache = Client::new(64 << 20, true).cache;
        let server = format!("--servers=127.0.0.1:{}", serve_cache(Arc::clone(&cache)));
        let load = ["--test=get", "--concurrency=8", "--execute-number=500", "--initial-load=500"];
        let arguments: Vec<&str> = [&*server].into_iter().chain(load).chain(protocol).collect();
        let Some((fine, text)) = run("memcslap", &arguments) else {
            return skip("memcslap", "libmemcached-tools");
        };
        assert!(fine, "{text}");
        let hits = cache.stats().iter().find(|(name, _)| *name == "get_hits").unwrap().1;
        assert_eq!(hits, 8 * 500, "{text}");
    }
}

/// libmemcached's test of servers.
#[test]
fn memcapable_is_content() {
    let port = serve().to_string();
    let arguments = ["-h", "127.0.0.1", "-p", &port, "-t", "10"];
    // Debian calls it so.
    let Some((fine, text)) = run("memccapable", &arguments).or_else(|| run("memcapable", &arguments)) else {
        return skip("memcapable", "libmemcached-tools");
    };
    assert!(fine && text.contains("All tests passed"), "{text}");
}

#[test]
fn a_client_library_is_content() {
    const SCRIPT: &str = r#"
import sys
from pymemcache.client.base import Client
client = Client(("127.0.0.1", int(sys.argv[1])), connect_timeout=10, timeout=10)
for number in range(2000):
    assert client.set(f"key{number}", b"%d" % number * (number % 50), expire=0)
found = client.get_many([f"key{number}" for number in range(0, 2500, 7)])
assert len(found) == len(range(0, 2000, 7)), len(found)
for key, value in found.items():
    number = int(key[3:])
    assert value == b"%d" % number * (number % 50)
assert client.add("key1", b"x", noreply=False) is False
assert client.set("n", b"5") and client.incr("n", 3) == 8 and client.decr("n", 10) == 0
value, version = client.gets("n")
assert client.cas("n", b"7", version) is True and client.cas("n", b"8", version) is False
assert client.append("n", b"1") and client.get("n") == b"71"
assert client.touch("n", 100, noreply=False) and client.delete("n", noreply=False)
assert client.get("n") is None and client.version() and client.stats()
client.flush_all(noreply=False)
assert client.get("key1") is None
client.quit()
"#;
    // Where Debian's modules are.
    const PYTHON: &str = "/usr/bin/python3";
    if !matches!(run(PYTHON, &["-c", "import pymemcache"]), Some((true, _))) {
        return skip("pymemcache", "python3-pymemcache");
    }
    let (fine, text) = run(PYTHON, &["-c", SCRIPT, &serve().to_string()]).unwrap();
    assert!(fine, "{text}");
}
