//! Compiles and runs code, and limits what a guest may do.
//!
//! The tests guard against code that reads or keeps data that is not its own, that runs for ever,
//! or that uses up the server's memory or stack. They also guard against answers of a guest that
//! the host trusts without a check.

use crate::abi::{GuestMessage, ROUND_BYTES_MAX, decode};
use core::future::Future;
use serde::Serialize;
use std::sync::LazyLock;
use wasmi::{
    CompilationMode, Config, EnforcedLimits, Engine, Error, Instance, Linker, Memory, Module, Store, StoreLimits,
    StoreLimitsBuilder, TypedFunc, TypedResumableCall,
};
use wasmparser::{Validator, WasmFeatures};

/// Most bytes of memory of an instance, without its tables.
const MEMORY_BYTES_MAX: usize = 4 << 20;
/// Most entries of a table, through which functions are called by pointer.
const TABLE_MAX: usize = 16 * 1024;
/// Deepest nesting of calls.
const CALLS_DEEP_MAX: usize = 512;
/// Approximate number of instructions before others have their turn: some 0.1 ms.
const FUEL: u64 = 40_000;
/// Number of instructions that no guest needs at a time; growing memory costs by its size.
const FUEL_MAX: u64 = 4 << 20;

/// Least number of bytes for which room is requested, so that requests are rare.
const ROOM_BYTES_MIN: u32 = 1024;

static ENGINE: LazyLock<Engine> = LazyLock::new(|| {
    let mut config = Config::default();
    config
        .consume_fuel(true)
        .compilation_mode(CompilationMode::Eager)
        .allow_start_fn(false)
        .ignore_custom_sections(true)
        .set_max_recursion_depth(CALLS_DEEP_MAX)
        .enforced_limits(EnforcedLimits::strict());
    Engine::new(&config)
});

/// Reason why an instance ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct GuestFailure(pub(crate) String);

impl From<Error> for GuestFailure {
    fn from(error: Error) -> GuestFailure {
        GuestFailure(error.to_string())
    }
}

/// Compiled code.
#[derive(Clone)]
pub(crate) struct Compiled(Module);

/// Exported function of the guest that is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Entry {
    Begin,
    GoOn,
}

/// Instance of a guest, for one call.
pub(crate) struct Guest {
    store: Store<StoreLimits>,
    memory: Memory,
    room: TypedFunc<u32, u32>,
    begin: TypedFunc<u32, u64>,
    go_on: TypedFunc<u32, u64>,
    /// Address at which the guest gave room. The next field is its length.
    room_at: u32,
    room_len: u32,
    bytes: Vec<u8>,
}

impl Compiled {
    /// Validates and compiles code, which anybody may have sent.
    pub(crate) fn new(code: &[u8]) -> Result<Compiled, GuestFailure> {
        // Invalid code ends here: wasmi 2.0 divides by the number of functions before it has
        // checked whether there are any.
        let mut validator = Validator::new_with_features(WasmFeatures::all());
        validator.validate_all(code).map_err(|error| GuestFailure(error.to_string()))?;
        let module = Module::new(&ENGINE, code)?;
        if let Some(import) = module.imports().next() {
            return Err(GuestFailure(format!(
                "it imports {:?} from {:?}, and may import nothing",
                import.name(),
                import.module()
            )));
        }
        let compiled = Compiled(module);
        // The required exports are checked where they are used.
        Guest::new(&compiled)?;
        Ok(compiled)
    }
}

impl Guest {
    /// Makes an instance that has done nothing yet.
    pub(crate) fn new(code: &Compiled) -> Result<Guest, GuestFailure> {
        let limits = StoreLimitsBuilder::new()
            .memory_size(MEMORY_BYTES_MAX)
            .table_elements(TABLE_MAX)
            .instances(1)
            .memories(1)
            .tables(4)
            .build();
        let mut store = Store::new(&ENGINE, limits);
        store.limiter(|limits| limits);
        store.set_fuel(FUEL_MAX)?;
        let instance: Instance = Linker::new(&ENGINE).instantiate_and_start(&mut store, &code.0)?;
        let memory =
            instance.get_memory(&store, "memory").ok_or_else(|| GuestFailure("it exports no memory".into()))?;
        let room = instance.get_typed_func(&store, "ff_sandbox_room")?;
        let begin = instance.get_typed_func(&store, "ff_sandbox_begin")?;
        let go_on = instance.get_typed_func(&store, "ff_sandbox_go_on")?;
        store.set_fuel(FUEL)?;
        Ok(Guest { store, memory, room, begin, go_on, room_at: 0, room_len: 0, bytes: Vec::new() })
    }

    /// Sends a message to the guest and returns its answer. When the guest has used up its fuel,
    /// lets others go on by `turn`.
    pub(crate) async fn tell<F: Future<Output = ()>>(
        &mut self,
        entry: Entry,
        message: &impl Serialize,
        mut turn: impl FnMut() -> F,
    ) -> Result<GuestMessage, GuestFailure> {
        self.bytes.clear();
        self.bytes = postcard::to_extend(message, core::mem::take(&mut self.bytes))
            .map_err(|error| GuestFailure(error.to_string()))?;
        let len = self.bytes.len() as u32;
        if len > self.room_len {
            let wanted = len.max(ROOM_BYTES_MIN);
            self.room_at = self.call(self.room, wanted, &mut turn).await?;
            self.room_len = wanted;
        }
        let outside = |_| GuestFailure("it gave room outside of its memory".into());
        self.memory.write(&mut self.store, self.room_at as usize, &self.bytes).map_err(outside)?;
        let entry = match entry {
            Entry::Begin => self.begin,
            Entry::GoOn => self.go_on,
        };
        let reply = self.call(entry, len, &mut turn).await?;
        let (at, len) = ((reply >> 32) as usize, reply as u32 as usize);
        if len > ROUND_BYTES_MAX * 2 {
            return Err(GuestFailure(format!("it said {len} bytes at a time")));
        }
        self.bytes.resize(len, 0);
        let outside = |_| GuestFailure("it spoke from outside of its memory".into());
        self.memory.read(&self.store, at, &mut self.bytes).map_err(outside)?;
        decode(&self.bytes).ok_or_else(|| GuestFailure("it said what nobody understands".into()))
    }

    async fn call<R: wasmi::WasmResults, F: Future<Output = ()>>(
        &mut self,
        function: TypedFunc<u32, R>,
        argument: u32,
        turn: &mut impl FnMut() -> F,
    ) -> Result<R, GuestFailure> {
        let mut call = function.call_resumable(&mut self.store, argument)?;
        loop {
            call = match call {
                TypedResumableCall::Finished(result) => return Ok(result),
                TypedResumableCall::OutOfFuel(paused) => {
                    let needs = paused.required_fuel();
                    if needs > FUEL_MAX {
                        return Err(GuestFailure("it wants too much at a time".into()));
                    }
                    turn().await;
                    self.store.set_fuel(needs.max(FUEL))?;
                    paused.resume(&mut self.store)?
                }
                TypedResumableCall::HostTrap(_) => return Err(GuestFailure("it calls what it does not have".into())),
            };
        }
    }
}
