//! The functions of a server, by name and version.
//!
//! The list is written by hand, not collected by the linker: registered functions are there in
//! every build, and one that is not registered is reported by name ([decision
//! 10](../../../docs/decisions/0010-functions-are-registered-by-hand.md)).

use crate::access::Access;
use crate::columns::{Compute, ComputeColumn, CopyBytes, Find, Group, Merge, Ranks, Sort, Take, Tally};
use crate::evacuate::Evacuate;
use crate::executor::{self, Budget, NewTask};
use crate::lookup::Lookup;
use crate::server::{Pace, ServerPlace};
use crate::trace::Trace;
use crate::{Aggregate, Function, Memory, Number, Stop, Totals};
use core::cell::{Cell, RefCell};
use core::pin::pin;
use farfield_core::wire::CallBody;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A call, as it arrived.
#[derive(Clone, Copy, Debug)]
pub struct Task<'a> {
    /// Bytes of the argument.
    pub argument: &'a [u8],
    /// Limits of the call in steps and time.
    pub budget: Budget,
}

/// Reason why a call finds no function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unknown {
    /// There is no function of this name.
    Name,
    /// There are other versions of the function.
    Version {
        /// The newest version.
        newest: u32,
    },
}

/// Receiver of the results: called with the index of each call, its result, and its number of
/// steps. The bytes of the answer are gone afterwards.
pub type RowSink<'s> = &'s mut dyn FnMut(usize, Result<&[u8], Stop>, u64);
type RunRow = fn(&dyn Memory, &[Task<'_>], RowSink<'_>);

/// Function whose code was not compiled with the server. It runs rows of calls by itself.
pub trait ForeignFunction: Send + Sync {
    /// Runs calls over a region, and passes one result for each of them to `ended`, in any order.
    /// It keeps to the budgets of the calls, and does not panic.
    fn run(&self, memory: &dyn Memory, tasks: &[Task<'_>], ended: RowSink<'_>);
}

/// Error: a registry has a function of this name and version already.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is a function {name:?} of version {version} already")]
pub struct NameTaken {
    /// Name of the function.
    pub name: &'static str,
    /// Version of the function.
    pub version: u32,
}

/// Function with the state of the process that serves it. It does not see the region through which
/// it is called.
pub trait Handler: Send + Sync {
    /// Answers a call. `answer` is empty. The function runs in the thread of its caller's connection,
    /// so it must not wait. If it panics, its call ends and nothing else.
    fn answer(&self, argument: &[u8], answer: &mut Vec<u8>) -> Result<(), Stop>;
}

/// Code of a function.
#[derive(Clone)]
enum RegisteredCode {
    /// A where-independent function over the region.
    Function(RunRow),
    /// A where-independent function that was compiled apart.
    Foreign(Arc<dyn ForeignFunction>),
    /// A function of the process.
    Handler(Arc<dyn Handler>),
}

/// The functions of a server.
#[derive(Clone, Default)]
pub struct Registry {
    /// By name, then by version.
    functions: BTreeMap<&'static str, BTreeMap<u32, RegisteredCode>>,
}

impl core::fmt::Debug for Registry {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_set().entries(self.functions()).finish()
    }
}

impl Registry {
    /// Makes a registry without functions.
    pub fn new() -> Registry {
        Registry::default()
    }

    /// Makes a registry of the functions that every server has. Without them, functions at the
    /// client have no atomics, and the parts of pages that they write are not safe from functions
    /// at the server.
    pub fn standard() -> Registry {
        let words = Registry::new().with::<Access>().with::<Aggregate>();
        let bytes = words.with::<CopyBytes>().with::<Take<1>>().with::<Take<2>>().with::<Take<4>>().with::<Take<8>>();
        let unsigned = bytes.with_numbers::<u8>().with_numbers::<u16>().with_numbers::<u32>().with_numbers::<u64>();
        let signed = unsigned.with_numbers::<i8>().with_numbers::<i16>().with_numbers::<i32>().with_numbers::<i64>();
        signed
            .with_numbers::<f32>()
            .with_numbers::<f64>()
            .with::<Tally>()
            .with::<Sort>()
            .with::<Merge>()
            .with::<Trace>()
            .with::<Evacuate>()
            .with::<Lookup>()
    }

    /// Adds the functions that exist for each type of number.
    fn with_numbers<N: Number>(self) -> Registry {
        let totals = self.with::<Totals<N>>().with::<Group<N>>().with::<Compute<N>>().with::<ComputeColumn<N>>();
        totals.with::<Ranks<N>>().with::<Find<N>>()
    }

    /// Adds a function.
    ///
    /// # Panics
    /// If there is one of this name and version, or if the name is empty or too long.
    pub fn with<F: Function>(self) -> Registry {
        self.with_code(F::NAME, F::VERSION, RegisteredCode::Function(run_row::<F>))
    }

    /// Adds a function of this process.
    ///
    /// # Panics
    /// If there is one of this name and version, or if the name is empty or too long.
    pub fn with_handler(self, name: &'static str, version: u32, handler: Arc<dyn Handler>) -> Registry {
        self.with_code(name, version, RegisteredCode::Handler(handler))
    }

    /// Adds a function that was compiled apart. Fails if there is one of this name and version.
    ///
    /// # Panics
    /// If the name is empty or too long.
    pub fn with_foreign(
        self,
        name: &'static str,
        version: u32,
        function: Arc<dyn ForeignFunction>,
    ) -> Result<Registry, NameTaken> {
        self.try_with_code(name, version, RegisteredCode::Foreign(function))
    }

    fn with_code(self, name: &'static str, version: u32, code: RegisteredCode) -> Registry {
        self.try_with_code(name, version, code).unwrap_or_else(|taken| panic!("{taken}"))
    }

    fn try_with_code(mut self, name: &'static str, version: u32, code: RegisteredCode) -> Result<Registry, NameTaken> {
        assert!((1..=CallBody::NAME_BYTES_MAX).contains(&name.len()), "a name has 1 to 64 bytes: {name:?}");
        match self.functions.entry(name).or_default().insert(version, code) {
            None => Ok(self),
            Some(_) => Err(NameTaken { name, version }),
        }
    }

    /// Returns the names and versions of the functions.
    pub fn functions(&self) -> impl Iterator<Item = (&'static str, u32)> {
        self.functions.iter().flat_map(|(name, versions)| versions.keys().map(|version| (*name, *version)))
    }

    /// Runs calls of one function over a region, in turns, and passes each result to `ended`, in
    /// any order. Fails if there is no such function.
    pub fn run(
        &self,
        name: &str,
        version: u32,
        memory: &dyn Memory,
        tasks: &[Task<'_>],
        ended: RowSink<'_>,
    ) -> Result<(), Unknown> {
        let versions = self.functions.get(name).ok_or(Unknown::Name)?;
        match versions.get(&version) {
            Some(RegisteredCode::Function(run)) => {
                run(memory, tasks, ended);
                Ok(())
            }
            Some(RegisteredCode::Foreign(function)) => {
                function.run(memory, tasks, ended);
                Ok(())
            }
            Some(RegisteredCode::Handler(handler)) => {
                answer_all(&**handler, tasks, ended);
                Ok(())
            }
            None => Err(versions.keys().last().map_or(Unknown::Name, |newest| Unknown::Version { newest: *newest })),
        }
    }
}

thread_local! {
    /// Buffer for the bytes of an answer, empty.
    static ANSWER: Cell<Vec<u8>> = Cell::default();
}

fn answer_all(handler: &dyn Handler, tasks: &[Task<'_>], ended: RowSink<'_>) {
    let mut bytes = ANSWER.take();
    for (index, task) in tasks.iter().enumerate() {
        bytes.clear();
        match caught(|| handler.answer(task.argument, &mut bytes)) {
            Ok(()) if bytes.len() > CallBody::ANSWER_BYTES_MAX => ended(index, Err(Stop::AnswerTooLong), 0),
            Ok(()) => ended(index, Ok(&bytes), 0),
            Err(stop) => ended(index, Err(stop), 0),
        }
    }
    ANSWER.set(bytes);
}

/// Runs calls of a function over a region, in turns, and passes each result to `ended`, in any
/// order.
pub fn run_row<F: Function>(memory: &dyn Memory, tasks: &[Task<'_>], ended: RowSink<'_>) {
    let place = ServerPlace::new(memory, if tasks.len() > 1 { Pace::Prefetched } else { Pace::Immediate });
    let ended = RefCell::new(ended);
    let mut waiting = tasks.iter().enumerate();
    let mut bytes = ANSWER.take();
    let next = || {
        for (id, task) in waiting.by_ref() {
            let begun = caught(|| {
                let argument = decode::<F::Argument>(task.argument).ok_or(Stop::Argument)?;
                Ok(F::run(&place, argument))
            });
            match begun {
                Ok(future) => return Some(NewTask { id, future, budget: task.budget }),
                Err(stop) => ended.borrow_mut()(id, Err(stop), 0),
            }
        }
        None
    };
    let end = |id, result: Result<F::Answer, Stop>, steps| {
        let result = result.and_then(|answer| caught(|| encode(&{ answer }, core::mem::take(&mut bytes))));
        match result {
            Ok(answer) => {
                ended.borrow_mut()(id, Ok(&answer), steps);
                bytes = answer;
            }
            Err(stop) => ended.borrow_mut()(id, Err(stop), steps),
        }
    };
    match tasks.len() {
        1 => executor::run(&place, &mut [pin!(None)], next, end),
        _ => {
            // As many slots as tasks take turns.
            let mut slots = [
                [pin!(None), pin!(None), pin!(None), pin!(None)],
                [pin!(None), pin!(None), pin!(None), pin!(None)],
                [pin!(None), pin!(None), pin!(None), pin!(None)],
                [pin!(None), pin!(None), pin!(None), pin!(None)],
            ];
            executor::run(&place, slots.as_flattened_mut(), next, end);
        }
    }
    ANSWER.set(bytes);
}

/// Runs code that belongs to a function beside its future: reading its argument and writing its
/// answer. A panic in it ends its call and nothing else.
fn caught<T>(code: impl FnOnce() -> Result<T, Stop>) -> Result<T, Stop> {
    catch_unwind(AssertUnwindSafe(code)).unwrap_or(Err(Stop::Panicked))
}

/// Decodes a value; `None` if the bytes are not exactly one.
pub(crate) fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (value, rest) = postcard::take_from_bytes(bytes).ok()?;
    rest.is_empty().then_some(value)
}

/// Bytes of an answer, up to the longest that is allowed.
struct Bounded(Vec<u8>);

impl postcard::ser_flavors::Flavor for Bounded {
    type Output = Vec<u8>;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        if self.0.len() + bytes.len() > CallBody::ANSWER_BYTES_MAX {
            return Err(postcard::Error::SerializeBufferFull);
        }
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Vec<u8>> {
        Ok(self.0)
    }
}

fn encode<T: serde::Serialize>(answer: &T, mut room: Vec<u8>) -> Result<Vec<u8>, Stop> {
    room.clear();
    postcard::serialize_with_flavor(answer, Bounded(room)).map_err(|_| Stop::AnswerTooLong)
}
