//! Code of this program that others run: shipped when it is first called, identified by its digest
//! from then on.

use crate::abi::decode;
use crate::engine::{GuestCode, GuestFailure};
use crate::error::SandboxError;
use crate::run::{SandboxFunction, SandboxReply, SandboxRequest};
use crate::ship::{Parcel, Ship};
use crate::store::{CODE_BYTES_MAX, Digest, ShipReply, with_store};
use core::marker::PhantomData;
use core::time::Duration;
use farfield_wic::access::Bytes;
use farfield_wic::{CallError, Caller, Function, Where};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Default time limit of calls.
const WITHIN: Duration = Duration::from_secs(10);

/// Functions compiled to WebAssembly.
///
/// ```no_run
/// use farfield_sandbox::Code;
/// use farfield_wic::{Aggregate, Caller, Range, Where};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let code = Code::load("guest.wasm")?;
/// let backend = farfield_pool::PoolBuilder::new().url("tcp://127.0.0.1:7400").pages(1 << 20).open()?;
/// let mut caller = Caller::new(backend);
/// let words = Range { offset: 0, count: 512 };
/// let summary = code.call::<Aggregate>(&mut caller, words).at(Where::Server).run()?;
/// println!("the sum of {} words is {}", summary.count, summary.sum);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Code {
    bytes: Arc<[u8]>,
    digest: Digest,
}

impl core::fmt::Debug for Code {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Code({:?}, {} bytes)", self.digest, self.bytes.len())
    }
}

impl Code {
    /// Takes code, as built by `cargo build --target wasm32-unknown-unknown`. It is validated here
    /// first. Fails if it is longer than 2 MiB or not valid for a sandbox.
    pub fn new(bytes: impl Into<Arc<[u8]>>) -> Result<Code, SandboxError> {
        let bytes = bytes.into();
        if bytes.len() > CODE_BYTES_MAX {
            let reason =
                format!("it has {} bytes, and may have {CODE_BYTES_MAX}; build it with `--release`", bytes.len());
            return Err(SandboxError::Code { reason });
        }
        let digest = Digest::of(&bytes);
        let ready = GuestCode::new(&bytes).map_err(|GuestFailure(reason)| SandboxError::Code { reason })?;
        with_store(|store| store.keep(digest, ready));
        Ok(Code { bytes, digest })
    }

    /// Reads code from a file.
    pub fn load(path: impl AsRef<Path>) -> Result<Code, SandboxError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path)
            .map_err(|error| SandboxError::Code { reason: format!("{} cannot be read: {error}", path.display()) })?;
        Code::new(bytes)
    }

    /// Prepares a call of one of the code's functions.
    pub fn call<'c, F: Function>(&'c self, caller: &'c mut Caller, argument: F::Argument) -> SandboxedCall<'c, F> {
        SandboxedCall(self.calls(caller, vec![argument]))
    }

    /// Prepares calls of one of the code's functions, one for each of the arguments; many are in
    /// flight at a time.
    pub fn calls<'c, F: Function>(
        &'c self,
        caller: &'c mut Caller,
        arguments: Vec<F::Argument>,
    ) -> SandboxedCalls<'c, F> {
        SandboxedCalls {
            code: self,
            caller,
            arguments,
            place: Where::Server,
            within: WITHIN,
            steps: None,
            function: PhantomData,
        }
    }

    /// Ships the code to the server of this caller, unless the server has it.
    fn ship(&self, caller: &mut Caller, until: Instant) -> Result<(), SandboxError> {
        let mut at = 0;
        loop {
            let rest = &self.bytes[at as usize..];
            let bytes = Bytes(rest[..rest.len().min(Parcel::BYTES_MAX)].to_vec());
            let parcel = Parcel { digest: self.digest, len: self.bytes.len() as u32, at, bytes };
            let left = until.saturating_duration_since(Instant::now());
            at = match caller.call::<Ship>(parcel).at(Where::Server).within(left).run().map_err(of_call)? {
                ShipReply::Next(next) if next as usize <= self.bytes.len() => next,
                ShipReply::Next(_) => return Err(SandboxError::Call(CallError::Answer)),
                ShipReply::Whole => return Ok(()),
                ShipReply::Refused(reason) => return Err(SandboxError::Refused { reason }),
            };
        }
    }
}

fn of_call(error: CallError) -> SandboxError {
    match error {
        CallError::NoFunction { name } if name == <SandboxFunction>::NAME || name == Ship::NAME => {
            SandboxError::NoSandbox
        }
        error => SandboxError::Call(error),
    }
}

/// Calls of one function of shipped code, about to run.
#[must_use = "nothing runs before `run`"]
pub struct SandboxedCalls<'c, F: Function> {
    code: &'c Code,
    caller: &'c mut Caller,
    arguments: Vec<F::Argument>,
    place: Where,
    within: Duration,
    steps: Option<u64>,
    function: PhantomData<F>,
}

impl<F: Function> core::fmt::Debug for SandboxedCalls<'_, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "SandboxedCalls({} of {:?} at {:?})", self.arguments.len(), F::NAME, self.place)
    }
}

impl<F: Function> SandboxedCalls<'_, F> {
    /// Sets the place where the calls run. Default: the server. At [`Where::Client`], the function
    /// runs natively, as this program has it.
    pub fn at(mut self, place: Where) -> Self {
        self.place = place;
        self
    }

    /// Sets how long all of them may take together, shipping included. Default: 10 s. A server has
    /// a limit of its own for each.
    pub fn within(mut self, time: Duration) -> Self {
        self.within = time;
        self
    }

    /// Sets the most steps that each may take. A step is an access, each whole 4 KiB of one, and
    /// each forty thousand instructions.
    pub fn steps(mut self, most: u64) -> Self {
        self.steps = Some(most);
        self
    }

    /// Runs the calls, and waits for the answers, which are in the order of the arguments.
    pub fn run(self) -> Vec<Result<F::Answer, SandboxError>> {
        let SandboxedCalls { code, caller, arguments, place, within, steps, .. } = self;
        if place == Where::Client {
            let calls = caller.calls::<F>(arguments).at(place).within(within);
            let calls = steps.into_iter().fold(calls, |calls, most| calls.steps(most));
            return calls.run().into_iter().map(|answer| answer.map_err(SandboxError::Call)).collect();
        }
        let until = Instant::now() + within;
        let runs: Vec<_> = arguments.iter().map(|argument| code.run_of::<F>(argument)).collect();
        let mut missing: Vec<usize> = Vec::new();
        let mut answers: Vec<Result<F::Answer, SandboxError>> = Vec::with_capacity(runs.len());
        for (index, outcome) in call_all::<F>(caller, &runs, place, within, steps).into_iter().enumerate() {
            if outcome == Ok(SandboxReply::NoCode) {
                missing.push(index);
            }
            answers.push(outcome.and_then(|outcome| answer_of::<F>(outcome)));
        }
        if missing.is_empty() {
            return answers;
        }
        let shipped = code.ship(caller, until);
        let left = until.saturating_duration_since(Instant::now());
        let again: Vec<_> = missing.iter().map(|index| runs[*index].clone()).collect();
        let outcomes = match shipped {
            Ok(()) => call_all::<F>(caller, &again, place, left, steps),
            Err(error) => missing.iter().map(|_| Err(error.clone())).collect(),
        };
        for (index, outcome) in missing.into_iter().zip(outcomes) {
            answers[index] = outcome.and_then(|outcome| answer_of::<F>(outcome));
        }
        answers
    }
}

impl Code {
    fn run_of<F: Function>(&self, argument: &F::Argument) -> Result<SandboxRequest, SandboxError> {
        let argument = postcard::to_stdvec(argument).map_err(|_| SandboxError::Call(CallError::Argument))?;
        Ok(SandboxRequest { code: self.digest, name: F::NAME.into(), version: F::VERSION, argument: Bytes(argument) })
    }
}

fn call_all<F: Function>(
    caller: &mut Caller,
    runs: &[Result<SandboxRequest, SandboxError>],
    place: Where,
    within: Duration,
    steps: Option<u64>,
) -> Vec<Result<SandboxReply, SandboxError>> {
    let sent = runs.iter().flatten().cloned().collect();
    let calls = caller.calls::<SandboxFunction>(sent).on_behalf_of::<F>().at(place).within(within);
    let calls = steps.into_iter().fold(calls, |calls, most| calls.steps(most));
    let mut outcomes = calls.run().into_iter();
    let mut next = || outcomes.next().map_or(Err(SandboxError::Call(CallError::Stuck)), |end| end.map_err(of_call));
    runs.iter().map(|run| run.as_ref().map_err(SandboxError::clone).and_then(|_| next())).collect()
}

fn answer_of<F: Function>(outcome: SandboxReply) -> Result<F::Answer, SandboxError> {
    match outcome {
        SandboxReply::Answer(bytes) => decode(&bytes.0).ok_or(SandboxError::Call(CallError::Answer)),
        SandboxReply::NoCode => Err(SandboxError::Refused { reason: "it has no room for it".into() }),
        SandboxReply::NoFunction => Err(SandboxError::NoFunction { name: F::NAME }),
        SandboxReply::OtherVersion { newest } => {
            Err(SandboxError::OtherVersion { name: F::NAME, ours: F::VERSION, theirs: newest })
        }
        SandboxReply::Argument => Err(SandboxError::Call(CallError::Argument)),
        SandboxReply::Broken(reason) => Err(SandboxError::Broken { reason }),
    }
}

/// A call of one function of shipped code, about to run.
#[must_use = "nothing runs before `run`"]
#[derive(Debug)]
pub struct SandboxedCall<'c, F: Function>(SandboxedCalls<'c, F>);

impl<F: Function> SandboxedCall<'_, F> {
    /// Sets the place where the call runs. Default: the server. At [`Where::Client`], the function
    /// runs natively, as this program has it.
    pub fn at(self, place: Where) -> Self {
        SandboxedCall(self.0.at(place))
    }

    /// Sets how long the call may take, shipping included. Default: 10 s. A server has a limit of
    /// its own.
    pub fn within(self, time: Duration) -> Self {
        SandboxedCall(self.0.within(time))
    }

    /// Sets the most steps that the call may take. A step is an access, each whole 4 KiB of one,
    /// and each forty thousand instructions.
    pub fn steps(self, most: u64) -> Self {
        SandboxedCall(self.0.steps(most))
    }

    /// Runs the call and waits for the answer.
    pub fn run(self) -> Result<F::Answer, SandboxError> {
        self.0.run().pop().expect("one answer for each argument")
    }
}
