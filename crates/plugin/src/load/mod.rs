//! The server's side: loads libraries and runs their functions.

use crate::abi::{
    ABI_VERSION, ByteSlice, CallTable, Describe, FunctionEntry, FunctionTable, ResultTable, SYMBOL, Status,
};
use crate::memory::HostMemory;
use core::ffi::c_void;
use farfield_core::wire::CallBody;
use farfield_wic::{ForeignFunction, Memory, NameTaken, Registry, RowSink, Stop, Task};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Prefix of names that belong to functions of the server.
const RESERVED: &str = "ff.";
/// Most functions of a library.
const FUNCTIONS_MAX: usize = 4096;

/// Reason why a library could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The file cannot be read.
    #[error("cannot read the function library {}: {error}", path.display())]
    File {
        /// Path of the library.
        path: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// Others could replace the code.
    #[error(
        "the function library {} could be changed by others, and its code runs in this server: let it belong to root \
         or to the user of the server, and let nobody else write it (chmod go-w)",
        path.display()
    )]
    Writable {
        /// Path of the library.
        path: PathBuf,
    },
    /// The dynamic linker refuses the file.
    #[error("cannot load the function library {}: {reason}", path.display())]
    Linker {
        /// Path of the library.
        path: PathBuf,
        /// Reason, as the dynamic linker says it.
        reason: String,
    },
    /// The library exports no functions.
    #[error(
        "{} is no function library: it exports no symbol {SYMBOL}. A library in Rust needs `farfield_plugin::export!` \
         and crate-type = [\"cdylib\"], one in C includes farfield_functions.h",
        path.display()
    )]
    NoFunctions {
        /// Path of the library.
        path: PathBuf,
    },
    /// The library was built for another interface.
    #[error(
        "the function library {} was built for version {theirs} of the interface, and this server has version \
         {ABI_VERSION}: build it with the farfield_plugin of this release",
        path.display()
    )]
    OtherInterface {
        /// Path of the library.
        path: PathBuf,
        /// Version of the library.
        theirs: u32,
    },
    /// The library's description of itself is not valid.
    #[error("the function library {} describes itself wrongly: {reason}", path.display())]
    Description {
        /// Path of the library.
        path: PathBuf,
        /// Reason, in words.
        reason: String,
    },
    /// The server has a function of this name already.
    #[error("the function library {} cannot be added: {taken}", path.display())]
    Taken {
        /// Path of the library.
        path: PathBuf,
        /// Name and version.
        taken: NameTaken,
    },
}

/// Loads a function library, and adds its functions to a registry. The library stays loaded until
/// the process ends.
///
/// Its initialisers run now, and its functions run in this process: the caller trusts its code.
pub fn with_library(registry: Registry, path: &Path) -> Result<Registry, PluginError> {
    check_owner(path)?;
    let functions = open(path)?;
    functions.into_iter().try_fold(registry, |registry, (name, entry)| {
        registry
            .with_foreign(name, entry.version, Arc::new(Plugin(entry)))
            .map_err(|taken| PluginError::Taken { path: path.to_owned(), taken })
    })
}

/// Checks that nobody but root and this user can change the file.
fn check_owner(path: &Path) -> Result<(), PluginError> {
    let metadata = std::fs::metadata(path).map_err(|error| PluginError::File { path: path.to_owned(), error })?;
    let is_ours = [0, farfield_os::serving::effective_uid()].contains(&metadata.uid());
    if is_ours && metadata.mode() & 0o022 == 0 { Ok(()) } else { Err(PluginError::Writable { path: path.to_owned() }) }
}

/// Opens the library for as long as the process lives. Returns its functions by name.
fn open(path: &Path) -> Result<Vec<(&'static str, FunctionEntry)>, PluginError> {
    let path = &path.canonicalize().map_err(|error| PluginError::File { path: path.to_owned(), error })?;
    // SAFETY: the operator of the server trusts the library's initialisers, as the documentation
    // says.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    let library = library.map_err(|error| PluginError::Linker { path: path.clone(), reason: error.to_string() })?;
    // SAFETY: a symbol of this name is a function of this type.
    let describe = unsafe { library.get::<Describe>(SYMBOL.as_bytes()) }
        .map(|symbol| *symbol)
        .map_err(|_| PluginError::NoFunctions { path: path.clone() })?;
    // Its code and its tables are used from now on.
    core::mem::forget(library);
    // SAFETY: the symbol is that of a library which stays.
    let table = unsafe { describe() };
    // SAFETY: the table is a constant of the library, or null.
    unsafe { functions(table) }.map_err(|wrong| match wrong {
        Wrong::Version(theirs) => PluginError::OtherInterface { path: path.clone(), theirs },
        Wrong::Description(reason) => PluginError::Description { path: path.clone(), reason },
    })
}

/// Reason why a description is not valid.
#[derive(PartialEq, Eq, Debug)]
enum Wrong {
    Version(u32),
    Description(String),
}

/// Reads the functions that a table describes.
///
/// # Safety
/// `table` is null or a table that lives as long as the process, with as many entries as it says if
/// it has the version of this interface.
unsafe fn functions(table: *const FunctionTable) -> Result<Vec<(&'static str, FunctionEntry)>, Wrong> {
    let wrong = |reason: &str| Wrong::Description(reason.to_owned());
    if table.is_null() {
        return Err(wrong("it has no table"));
    }
    // SAFETY: each version of a table begins with its version.
    let version = unsafe { (&raw const (*table).abi_version).read() };
    if version != ABI_VERSION {
        return Err(Wrong::Version(version));
    }
    // SAFETY: a table of this version.
    let table = unsafe { &*table };
    match table.count {
        0 => return Err(wrong("it has no function")),
        count if count > FUNCTIONS_MAX || table.functions.is_null() => {
            return Err(Wrong::Description(format!("it has {count} functions at {:?}", table.functions)));
        }
        _ => {}
    }
    // SAFETY: the caller promises as many entries.
    let entries = unsafe { core::slice::from_raw_parts(table.functions, table.count) };
    // SAFETY: names live as long as the table.
    entries.iter().map(|entry| unsafe { name(entry.name) }.map(|name| (name, *entry))).collect()
}

/// Reads and checks the name of a function.
///
/// # Safety
/// The bytes live as long as the process.
unsafe fn name(name: ByteSlice) -> Result<&'static str, Wrong> {
    if !(1..=CallBody::NAME_BYTES_MAX).contains(&name.len) || name.data.is_null() {
        return Err(Wrong::Description(format!("a name has {} bytes, and may have 1 to 64", name.len)));
    }
    // SAFETY: the caller promises it.
    let name = core::str::from_utf8(unsafe { name.as_slice() })
        .map_err(|_| Wrong::Description("a name is not UTF-8".to_owned()))?;
    if name.starts_with(RESERVED) {
        return Err(Wrong::Description(format!("{name:?} is a name of the server: no other begins with {RESERVED:?}")));
    }
    Ok(name)
}

/// A function of a library.
struct Plugin(FunctionEntry);

// SAFETY: an entry is a constant, and its code may be called by any thread, as the interface says.
unsafe impl Send for Plugin {}

impl ForeignFunction for Plugin {
    fn run(&self, memory: &dyn Memory, tasks: &[Task<'_>], ended: RowSink<'_>) {
        let host = HostMemory::new(memory, tasks);
        let now = Instant::now();
        let calls: Vec<_> = tasks.iter().map(|task| call(task, now)).collect();
        let mut receiver = ResultSink { host: &host, ended, has_ended: vec![false; tasks.len()] };
        let results = ResultTable { context: (&raw mut receiver).cast(), ended: take_result };
        let table = host.table();
        // SAFETY: all tables live until the function returns, and this thread uses them alone.
        unsafe { (self.0.run)(&raw const table, calls.as_ptr(), calls.len(), &raw const results) };
        receiver.end_others();
    }
}

fn call(task: &Task<'_>, now: Instant) -> CallTable {
    let left = |until: Instant| u64::try_from(until.saturating_duration_since(now).as_nanos()).unwrap_or(u64::MAX - 1);
    CallTable {
        argument: ByteSlice::new(task.argument),
        steps_max: task.budget.steps_max,
        time_left_ns: task.budget.until.map_or(u64::MAX, left),
    }
}

/// Takes the results of calls.
struct ResultSink<'c> {
    host: &'c HostMemory<'c>,
    ended: RowSink<'c>,
    has_ended: Vec<bool>,
}

impl ResultSink<'_> {
    /// Takes the first result of a call. Whatever the function says, budgets count.
    fn take(&mut self, index: usize, result: Result<&[u8], Stop>, steps: u64) {
        match self.has_ended.get_mut(index) {
            Some(has_ended) if !*has_ended => *has_ended = true,
            _ => return,
        }
        let result = match (self.host.stop(), result) {
            (Some(stop), _) => Err(stop),
            (None, Ok(answer)) if answer.len() > CallBody::ANSWER_BYTES_MAX => Err(Stop::AnswerTooLong),
            (None, result) => result,
        };
        (self.ended)(index, result, steps);
    }

    /// Ends the calls that have no result.
    fn end_others(&mut self) {
        (0..self.has_ended.len()).for_each(|index| self.take(index, Err(Stop::Panicked), 0));
    }
}

unsafe extern "C" fn take_result(context: *mut c_void, index: usize, status: Status, answer: ByteSlice, steps: u64) {
    // SAFETY: the function passes the context of its call, in the thread of the call.
    let receiver = unsafe { &mut *context.cast::<ResultSink<'_>>() };
    // SAFETY: the answer lives as long as this call; it is not read if there was an error.
    let result = status.stop().map(|()| unsafe { answer.as_slice() });
    // A panic of the server ends this call, and is none of the library's.
    let _ = catch_unwind(AssertUnwindSafe(|| receiver.take(index, result, steps)));
}

#[cfg(test)]
mod tests;
