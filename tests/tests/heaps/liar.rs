//! A connection whose other end lies: each message is as the protocol wants it, and what it says is not true.

use super::NEAR;
use farfield::{FarBox, FarError, Heap, Plane, PoolError};
use farfield_server::{Config, Server};
use farfield_tests::{MIB, PATIENCE, seeded, tier};
use fastrand::Rng;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What is done to one message in fifty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lie {
    /// A write is acknowledged, and nobody hears of it.
    LoseWrite,
    /// A read gets what the same read got before.
    OldAnswer,
    /// A read gets what another one got.
    OtherAnswer,
    /// The same, under its own head.
    OtherBody,
    /// A page is said not to be there.
    Absent,
    /// A bit of a head or a body is another one.
    Flip,
}

const LIES: [Lie; 6] = [Lie::LoseWrite, Lie::OldAnswer, Lie::OtherAnswer, Lie::OtherBody, Lie::Absent, Lie::Flip];

const HEAD: usize = 40;
const READ: u8 = 0x04;
const WRITE: u8 = 0x05;
const READ_PART: u8 = 0x0f;
const ANSWER: u8 = 0x80;

/// A message: head and body.
struct Frame(Vec<u8>);

impl Frame {
    fn read(from: &mut TcpStream) -> Option<Frame> {
        let mut bytes = vec![0; HEAD];
        from.read_exact(&mut bytes).ok()?;
        let body = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
        bytes.resize(HEAD + body as usize, 0);
        from.read_exact(&mut bytes[HEAD..]).ok()?;
        Some(Frame(bytes))
    }

    fn kind(&self) -> u8 {
        self.0[4]
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }

    fn tag(&self) -> u64 {
        self.word(8)
    }

    fn count(&self) -> u32 {
        (self.word(16) >> 32) as u32
    }

    /// What is asked: kind, page and count.
    fn question(&self) -> (u8, u64, u32) {
        (self.kind(), self.word(32), self.count())
    }

    /// The answer to another request.
    fn with_tag(&self, tag: u64) -> Frame {
        let mut bytes = self.0.clone();
        bytes[8..16].copy_from_slice(&tag.to_le_bytes());
        Frame(bytes)
    }
}

/// What was asked by the requests under way: kind, page and count, by their tags.
type Asked = Mutex<HashMap<u64, (u8, u64, u32)>>;

struct Liar {
    lie: Lie,
    /// From now on.
    lies: AtomicBool,
    told: AtomicU64,
    random: Mutex<Rng>,
    /// First answers to reads.
    first: Mutex<HashMap<(u8, u64, u32), Vec<u8>>>,
    /// The last answers to reads of each kind and length.
    last: Mutex<HashMap<(u8, u32), Vec<u8>>>,
}

impl Liar {
    /// The liar, and the address at which it stands for the server.
    fn before(server: &Server, lie: Lie) -> (Arc<Liar>, String) {
        let far = server.endpoints()[0].trim_start_matches("tcp://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it has one");
        let (lies, told, random) = (AtomicBool::new(false), AtomicU64::new(0), Mutex::new(seeded(5)));
        let liar = Arc::new(Liar { lie, lies, told, random, first: Mutex::default(), last: Mutex::default() });
        std::thread::spawn({
            let liar = liar.clone();
            move || {
                for near in listener.incoming().flatten() {
                    let Ok(far) = TcpStream::connect(&far) else { continue };
                    let _ = (near.set_nodelay(true), far.set_nodelay(true));
                    let asked: Arc<Asked> = Arc::default();
                    let copy = |end: &TcpStream| end.try_clone().expect("a descriptor");
                    // Both directions answer to the client.
                    let answers = Arc::new(Mutex::new(copy(&near)));
                    let (up, down) = ((copy(&near), copy(&far)), (copy(&far), copy(&near)));
                    let (one, known, to) = (liar.clone(), asked.clone(), answers.clone());
                    std::thread::spawn(move || one.pass_requests(up, &known, &to));
                    let one = liar.clone();
                    std::thread::spawn(move || one.pass_answers(down, &asked, &answers));
                }
            }
        });
        (liar, format!("tcp://{address}"))
    }

    fn lies_now(&self) -> bool {
        self.lies.load(Ordering::Relaxed) && self.random.lock().expect("nobody panics").usize(..50) == 0
    }

    fn pass_requests(&self, (mut from, mut to): (TcpStream, TcpStream), asked: &Asked, answers: &Mutex<TcpStream>) {
        while let Some(frame) = Frame::read(&mut from) {
            if matches!(frame.kind(), READ | READ_PART) {
                asked.lock().expect("nobody panics").insert(frame.tag(), frame.question());
            }
            let is_sent = if frame.kind() == WRITE && self.lie == Lie::LoseWrite && self.lies_now() {
                self.told.fetch_add(1, Ordering::Relaxed);
                let mut done = [0; HEAD];
                done[4] = WRITE | ANSWER;
                done[8..16].copy_from_slice(&frame.0[8..16]);
                answers.lock().expect("nobody panics").write_all(&done)
            } else {
                to.write_all(&frame.0)
            };
            if is_sent.is_err() {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }

    fn pass_answers(&self, (mut from, to): (TcpStream, TcpStream), asked: &Asked, answers: &Mutex<TcpStream>) {
        while let Some(mut frame) = Frame::read(&mut from) {
            if matches!(frame.kind(), kind if kind == READ | ANSWER || kind == READ_PART | ANSWER) {
                let question = asked.lock().expect("nobody panics").remove(&frame.tag());
                frame = self.change(frame, question.expect("it was asked for"));
            }
            if answers.lock().expect("nobody panics").write_all(&frame.0).is_err() {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }

    /// What the client gets for this answer.
    fn change(&self, frame: Frame, question: (u8, u64, u32)) -> Frame {
        let (tag, len) = (frame.tag(), frame.0.len() as u32);
        let first = self.first.lock().expect("nobody panics").entry(question).or_insert(frame.0.clone()).clone();
        let other = self.last.lock().expect("nobody panics").insert((question.0, question.2 ^ len), frame.0.clone());
        if !self.lies_now() {
            return frame;
        }
        let changed = match (self.lie, other) {
            (Lie::OldAnswer, _) => Frame(first).with_tag(tag),
            (Lie::OtherAnswer, Some(other)) => Frame(other).with_tag(tag),
            (Lie::OtherBody, Some(other)) => Frame([&frame.0[..HEAD], &other[HEAD..]].concat()),
            (Lie::Absent, _) if question.0 == READ && question.2 == 1 => {
                let mut bytes = frame.0[..HEAD].to_vec();
                bytes[..4].copy_from_slice(&8u32.to_le_bytes());
                bytes.extend([0; 8]);
                Frame(bytes)
            }
            (Lie::Flip, _) => {
                // Not in what says how long things are: that ends the connection.
                let from = if question.0 == READ { HEAD + 8 } else { HEAD - 8 };
                let mut bytes = frame.0.clone();
                if bytes.len() > from {
                    let at = self.random.lock().expect("nobody panics").usize(..bytes.len() - from);
                    bytes[from + at] ^= 4;
                }
                Frame(bytes)
            }
            _ => return frame,
        };
        self.told.fetch_add(u64::from(changed.0 != frame.0), Ordering::Relaxed);
        changed
    }
}

/// Something that a wrong byte would make dangerous: it has a pointer.
struct Value {
    index: u64,
    version: u64,
    name: String,
    body: [u64; 60],
}

impl Value {
    fn new(index: u64, version: u64) -> Value {
        let name = format!("version {version} of {index}");
        Value { index, version, name, body: core::array::from_fn(|at| index * 31 + version * 7 + at as u64) }
    }

    fn is(&self, index: u64, version: u64) -> bool {
        // The numbers first: where they are wrong the name must not be looked at.
        (self.index, self.version) == (index, version)
            && self.body == Value::new(index, version).body
            && self.name == format!("version {version} of {index}")
    }
}

/// How many lies were told, and how many errors say so.
fn hear(lie: Lie, plane: Plane) -> [u64; 2] {
    let listen = vec!["tcp://127.0.0.1:0".parse().expect("an address")];
    let server = Server::start(Config { listen, ..Config::default() }).expect("a free port");
    let (liar, url) = Liar::before(&server, lie);
    let builder = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).plane(plane).pool(url);
    let heap = builder.patience(PATIENCE).build().expect("the server accepts");
    let count = 4 * MIB / size_of::<Value>() as u64;
    let mut values: Vec<FarBox<Value>> = (0..count).map(|at| heap.alloc(Value::new(at, 0)).unwrap()).collect();
    let mut versions = vec![0; values.len()];
    let (mut random, mut right, mut corrupt) = (seeded(11), 0, 0);
    let mut rounds = tier(3_000, 400_000);
    // Some versions before the first lie, so that there is something old.
    while rounds > 0 {
        rounds -= 1;
        if rounds == tier(2_000, 395_000) {
            liar.lies.store(true, Ordering::Relaxed);
        }
        let at = random.usize(..values.len());
        let scope = heap.enter();
        let found = if random.usize(..3) == 0 {
            values[at].get_mut(&scope).map(|value| {
                assert!(value.is(at as u64, versions[at]), "{lie:?}, {plane:?}: value {at} is another one");
                versions[at] += 1;
                *value = Value::new(at as u64, versions[at]);
            })
        } else {
            values[at].get(&scope).map(|value| {
                assert!(value.is(at as u64, versions[at]), "{lie:?}, {plane:?}: value {at} is another one");
            })
        };
        match found {
            Ok(()) => right += 1,
            Err(FarError::Pool(PoolError::Corrupt { .. })) => corrupt += 1,
            Err(error) => panic!("{lie:?}, {plane:?}: {error:?}"),
        }
    }
    let told = liar.told.load(Ordering::Relaxed);
    println!("{lie:?}, {plane:?}: {told} lies, {right} right, {corrupt} corrupt");
    assert!(right > 1000, "{lie:?}, {plane:?}");
    drop(values);
    heap.verify();
    [told, corrupt as u64]
}

/// Each lie on each plane: every value is right, or its page is called corrupt; no value is one that never was.
#[test]
fn answers_of_a_lying_server_are_never_taken_for_values() {
    // The hybrid plane is made of the other two.
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid].into_iter().take(tier(2, 3)) {
        // Some lies are rare on some planes: values that come alone do not come by pages.
        let heard = LIES.map(|lie| hear(lie, plane));
        let [told, corrupt] = [0, 1].map(|of| heard.iter().map(|counts| counts[of]).sum::<u64>());
        assert!(told > 0, "{plane:?}: the test needs lies");
        assert!(corrupt > 0, "{plane:?}: {told} lies were believed");
    }
}
