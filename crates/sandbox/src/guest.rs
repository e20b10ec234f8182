//! The guest's side: a place that sends requests to the host, and an executor for the one function
//! that an instance runs.
//!
//! Only the macro [`export!`](crate::export) depends on WebAssembly: the rest runs natively in
//! tests.

use crate::abi::{Begin, GiveBack, GuestMessage, HostReply, PlaceRequest, ROUND_BYTES_MAX, decode};
use core::cell::RefCell;
use core::future::{Future, poll_fn};
use core::ops::Deref;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use farfield_core::lock;
use farfield_wic::access::{Answer, Ask, Bytes};
use farfield_wic::{Fault, Fence, Function, Place, RANGE_BYTES_MAX};
use std::collections::{BTreeMap, VecDeque};

/// Reads bytes of the region, as many as the slice has. False if they cannot be read: a request says why.
pub type ReadNow = fn(u64, &mut [u8]) -> bool;

/// The place of a function in a sandbox.
#[derive(Debug)]
pub struct GuestPlace {
    region_bytes: u64,
    read_now: ReadNow,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    now: Duration,
    next: u32,
    /// Requests that were not yet sent.
    requests: VecDeque<(u32, PlaceRequest)>,
    /// Answers to the requests; `None` until an answer has come. A request that was given up has no
    /// entry.
    answers: BTreeMap<u32, Option<Result<Answer, Fault>>>,
}

/// Number of a request, which is given up when dropped.
struct RequestTicket<'p> {
    place: &'p GuestPlace,
    number: u32,
}

impl Drop for RequestTicket<'_> {
    fn drop(&mut self) {
        let mut state = self.place.state.borrow_mut();
        state.answers.remove(&self.number);
    }
}

impl GuestPlace {
    fn new(region_bytes: u64, read_now: ReadNow) -> GuestPlace {
        GuestPlace { region_bytes, read_now, state: RefCell::default() }
    }

    fn say(&self, request: PlaceRequest) -> u32 {
        let mut state = self.state.borrow_mut();
        let number = state.next;
        state.next = number.wrapping_add(1);
        state.requests.push_back((number, request));
        number
    }

    async fn ask(&self, request: PlaceRequest) -> Result<Answer, Fault> {
        let ticket = RequestTicket { place: self, number: self.say(request) };
        self.state.borrow_mut().answers.insert(ticket.number, None);
        poll_fn(|_| {
            let mut state = self.state.borrow_mut();
            match state.answers.get_mut(&ticket.number).and_then(Option::take) {
                Some(answer) => Poll::Ready(answer),
                None => Poll::Pending,
            }
        })
        .await
    }

    async fn bytes(&self, offset: u64, len: usize) -> Result<Bytes, Fault> {
        let Ok(len) = u32::try_from(len) else { return Err(Fault::TooLong { bytes: len as u64 }) };
        match self.ask(PlaceRequest::Access(Ask::Read { offset, len })).await? {
            Answer::Bytes(bytes) if bytes.0.len() == len as usize => Ok(bytes),
            _ => Err(Fault::Internal),
        }
    }

    async fn done(&self, request: PlaceRequest) -> Result<(), Fault> {
        match self.ask(request).await? {
            Answer::Done => Ok(()),
            _ => Err(Fault::Internal),
        }
    }

    async fn word(&self, ask: Ask) -> Result<u64, Fault> {
        match self.ask(PlaceRequest::Access(ask)).await? {
            Answer::Word(word) => Ok(word),
            _ => Err(Fault::Internal),
        }
    }

    /// Removes requests to send, as many as fit in a message; the others are sent with the next one.
    fn requests(&self) -> Vec<(u32, PlaceRequest)> {
        let mut state = self.state.borrow_mut();
        let (mut bytes, mut requests) = (0, Vec::new());
        while let Some((_, request)) = state.requests.front() {
            bytes += bytes_of(request);
            if bytes > ROUND_BYTES_MAX && !requests.is_empty() {
                break;
            }
            requests.extend(state.requests.pop_front());
        }
        requests
    }

    fn given_back(&self) -> Vec<GiveBack> {
        let given_back = |(_, request)| match request {
            PlaceRequest::GiveBack(given_back) => Some(given_back),
            _ => None,
        };
        self.state.borrow_mut().requests.drain(..).filter_map(given_back).collect()
    }

    fn tell(&self, reply: HostReply) {
        let mut state = self.state.borrow_mut();
        state.now = reply.now;
        for (number, answer) in reply.answers {
            if let Some(slot) = state.answers.get_mut(&number) {
                *slot = Some(answer);
            }
        }
    }
}

/// Returns the most bytes that go one way or the other for this request.
fn bytes_of(request: &PlaceRequest) -> usize {
    const AROUND: usize = 64;
    AROUND
        + match request {
            PlaceRequest::Access(Ask::Read { len, .. }) => *len as usize,
            PlaceRequest::Access(Ask::Write { bytes, .. } | Ask::Fenced { bytes, .. }) => bytes.0.len(),
            _ => 0,
        }
}

/// Bytes that were read.
#[derive(Debug)]
pub struct GuestBytes(Vec<u8>);

impl Deref for GuestBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Refuses more than [`RANGE_BYTES_MAX`] bytes, before anything is copied.
fn check(bytes: &[u8]) -> Result<(), Fault> {
    if bytes.len() > RANGE_BYTES_MAX { Err(Fault::TooLong { bytes: bytes.len() as u64 }) } else { Ok(()) }
}

impl Place for GuestPlace {
    type Bytes<'p> = GuestBytes;

    fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    async fn read<const N: usize>(&self, offset: u64) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        if (self.read_now)(offset, &mut bytes) {
            return Ok(bytes);
        }
        let bytes = self.bytes(offset, N).await?;
        bytes.0.try_into().map_err(|_| Fault::Internal)
    }

    async fn read_range(&self, offset: u64, len: usize) -> Result<GuestBytes, Fault> {
        if len <= RANGE_BYTES_MAX {
            let mut bytes = vec![0; len];
            if (self.read_now)(offset, &mut bytes) {
                return Ok(GuestBytes(bytes));
            }
        }
        Ok(GuestBytes(self.bytes(offset, len).await?.0))
    }

    async fn read_many<const N: usize>(&self, offsets: &[u64], into: &mut [[u8; N]]) -> Result<(), Fault> {
        // All requests are made before the first is waited for, so they go in one message.
        let mut reads: Vec<_> =
            offsets.iter().zip(&*into).map(|(offset, _)| Box::pin(self.read::<N>(*offset))).collect();
        let mut first: Vec<_> = reads.iter_mut().map(|read| poll_once(read.as_mut())).collect();
        for (index, read) in reads.into_iter().enumerate() {
            into[index] = match first[index].take() {
                Some(ended) => ended?,
                None => read.await?,
            };
        }
        Ok(())
    }

    async fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        check(bytes)?;
        self.done(PlaceRequest::Access(Ask::Write { offset, bytes: Bytes(bytes.to_vec()) })).await
    }

    async fn compare_exchange(&self, offset: u64, current: u64, new: u64) -> Result<u64, Fault> {
        self.word(Ask::Exchange { offset, current, new }).await
    }

    async fn fetch_add(&self, offset: u64, add: u64) -> Result<u64, Fault> {
        self.word(Ask::Add { offset, add }).await
    }

    async fn write_fenced(&self, fence: Fence, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        check(bytes)?;
        self.done(PlaceRequest::Access(Ask::Fenced { fence, offset, bytes: Bytes(bytes.to_vec()) })).await
    }

    async fn lock_step(&self, lock: u64, ask: lock::LockRequest) -> Result<lock::LockReply, Fault> {
        match self.ask(PlaceRequest::Access(Ask::Lock { lock, ask })).await? {
            Answer::Lock(reply) => Ok(reply),
            _ => Err(Fault::Internal),
        }
    }

    fn give_back(&self, lock: u64, ask: lock::LockRequest) {
        self.say(PlaceRequest::GiveBack(GiveBack { lock, ask }));
    }

    async fn pause(&self, time: Duration) {
        let _ = self.ask(PlaceRequest::Pause(time)).await;
    }

    /// Returns the time of the host's last message.
    fn now(&self) -> Duration {
        self.state.borrow().now
    }

    async fn yield_now(&self) {
        let _ = self.ask(PlaceRequest::Turn).await;
    }
}

fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

type Ended = Result<Bytes, Fault>;

/// A function that runs.
pub struct GuestTask {
    place: &'static GuestPlace,
    future: Pin<Box<dyn Future<Output = Ended>>>,
}

impl core::fmt::Debug for GuestTask {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Running").field("place", self.place).finish_non_exhaustive()
    }
}

/// Result of matching an exported function with a [`Begin`].
#[derive(Debug)]
pub enum FunctionMatch {
    /// The message names another function.
    Not,
    /// The function has this name and another version.
    OtherVersion(u32),
    /// The function cannot read the argument.
    Argument,
    /// The function runs.
    Runs(GuestTask),
}

/// Begins this function if it is the one that is meant.
pub fn find<F: Function>(begin: &Begin, read_now: ReadNow) -> FunctionMatch {
    if begin.name != F::NAME {
        return FunctionMatch::Not;
    }
    if begin.version != F::VERSION {
        return FunctionMatch::OtherVersion(F::VERSION);
    }
    let Some(argument) = decode::<F::Argument>(&begin.argument.0) else { return FunctionMatch::Argument };
    // An instance runs one call, and ends with everything in it.
    let place: &'static GuestPlace = Box::leak(Box::new(GuestPlace::new(begin.region_bytes, read_now)));
    let future = Box::pin(async move {
        let answer = F::run(place, argument).await?;
        postcard::to_stdvec(&answer).map(Bytes).map_err(|_| Fault::Internal)
    });
    FunctionMatch::Runs(GuestTask { place, future })
}

impl GuestTask {
    /// Runs the function as far as possible.
    fn step(&mut self) -> GuestMessage {
        match poll_once(self.future.as_mut()) {
            Some(result) => GuestMessage::Ended { result, given_back: self.place.given_back() },
            None => GuestMessage::Wants(self.place.requests()),
        }
    }
}

/// State of the one instance: its function, and the memory for its messages.
#[derive(Debug, Default)]
struct Instance {
    running: Option<GuestTask>,
    heard: Vec<u8>,
    message: Vec<u8>,
}

std::thread_local! {
    static INSTANCE: RefCell<Instance> = RefCell::default();
}

/// Makes room for a message of `len` bytes, and returns its address ([`abi`](crate::abi)).
pub fn room(len: u32) -> u32 {
    INSTANCE.with_borrow_mut(|instance| {
        instance.heard.clear();
        instance.heard.resize(len as usize, 0);
        instance.heard.as_mut_ptr().expose_provenance() as u32
    })
}

/// Begins the function that `find` finds for the message, and returns the guest's answer
/// ([`abi`](crate::abi)).
pub fn begin(len: u32, find: impl Fn(&Begin) -> FunctionMatch) -> u64 {
    speak(|instance| {
        let begin = decode::<Begin>(instance.heard.get(..len as usize)?)?;
        Some(match find(&begin) {
            FunctionMatch::Not => GuestMessage::NoFunction,
            FunctionMatch::OtherVersion(newest) => GuestMessage::OtherVersion { newest },
            FunctionMatch::Argument => GuestMessage::Argument,
            FunctionMatch::Runs(running) => instance.running.insert(running).step(),
        })
    })
}

/// Continues the function with the answers in the message, and returns the guest's answer
/// ([`abi`](crate::abi)).
pub fn go_on(len: u32) -> u64 {
    speak(|instance| {
        let reply = decode::<HostReply>(instance.heard.get(..len as usize)?)?;
        let running = instance.running.as_mut()?;
        running.place.tell(reply);
        Some(running.step())
    })
}

fn speak(make: impl FnOnce(&mut Instance) -> Option<GuestMessage>) -> u64 {
    INSTANCE.with_borrow_mut(|instance| {
        let message = make(instance).unwrap_or(GuestMessage::Confused);
        instance.message.clear();
        instance.message = postcard::to_extend(&message, core::mem::take(&mut instance.message)).unwrap_or_default();
        (instance.message.as_ptr().expose_provenance() as u64) << 32 | instance.message.len() as u64
    })
}

/// Makes a crate of type `cdylib` a guest with these functions.
///
/// ```ignore
/// farfield_sandbox::export!(Behind, Largest);
/// ```
#[macro_export]
macro_rules! export {
    ($($function:ty),+ $(,)?) => {
        #[cfg(target_family = "wasm")]
        fn read_now(offset: u64, into: &mut [u8]) -> bool {
            #[link(wasm_import_module = "farfield")]
            unsafe extern "C" {
                fn read(offset: u64, into: *mut u8, len: usize) -> u32;
            }
            // SAFETY: the host writes these bytes, all or none, and nothing else.
            unsafe { read(offset, into.as_mut_ptr(), into.len()) == 0 }
        }

        #[cfg(not(target_family = "wasm"))]
        fn read_now(_: u64, _: &mut [u8]) -> bool {
            false
        }

        #[unsafe(no_mangle)]
        extern "C" fn ff_sandbox_room(len: u32) -> u32 {
            $crate::guest::room(len)
        }

        #[unsafe(no_mangle)]
        extern "C" fn ff_sandbox_begin(len: u32) -> u64 {
            $crate::guest::begin(len, |begin| {
                let mut newest = $crate::guest::FunctionMatch::Not;
                $(match $crate::guest::find::<$function>(begin, read_now) {
                    $crate::guest::FunctionMatch::Not => {}
                    other @ $crate::guest::FunctionMatch::OtherVersion(_) => newest = other,
                    found => return found,
                })+
                newest
            })
        }

        #[unsafe(no_mangle)]
        extern "C" fn ff_sandbox_go_on(len: u32) -> u64 {
            $crate::guest::go_on(len)
        }
    };
}
