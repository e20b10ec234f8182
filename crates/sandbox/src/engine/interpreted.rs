//! Code that is interpreted by wasmi.

use super::{
    CALLS_DEEP_MAX, Export, GuestFailure, GuestHost, MEMORY_BYTES_MAX, NOT_READ, READ, READ_OUTSIDE, ReadRequest,
    TABLE_MAX, TABLES_MAX,
};
use crate::abi::IMPORT;
use core::fmt;
use core::time::Duration;
use std::sync::LazyLock;
use std::time::Instant;
use wasmi::{
    Caller, CompilationMode, Config, EnforcedLimits, Engine, Error, Instance, Linker, Memory, Module, Store,
    StoreLimits, StoreLimitsBuilder, TypedFunc, TypedResumableCall, Val, WasmResults, errors::HostError,
};

/// Approximate number of instructions before others have their turn: some 0.1 ms.
const FUEL: u64 = 40_000;
/// Number of instructions that no guest needs at a time; growing memory costs by its size.
const FUEL_MAX: u64 = 4 << 20;

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

/// Functions that guests may import. A read leaves the guest, and goes on when there are bytes.
static LINKER: LazyLock<Result<Linker<StoreLimits>, GuestFailure>> = LazyLock::new(|| {
    let mut linker = Linker::new(&ENGINE);
    let read = |_: Caller<'_, StoreLimits>, offset: u64, into: u32, len: u32| -> Result<i32, Error> {
        Err(Error::host(ReadRequest { offset, into, len }))
    };
    match linker.func_wrap(IMPORT.0, IMPORT.1, read) {
        Ok(_) => Ok(linker),
        Err(error) => Err(GuestFailure(error.to_string())),
    }
});

impl fmt::Display for ReadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a read of {} bytes at {}", self.len, self.offset)
    }
}

impl HostError for ReadRequest {}

impl From<Error> for GuestFailure {
    fn from(error: Error) -> GuestFailure {
        GuestFailure(error.to_string())
    }
}

/// Code as the interpreter has it.
#[derive(Clone)]
pub(super) struct InterpretedCode(Module);

impl InterpretedCode {
    /// Translates valid code, and checks that it imports nothing else than it may.
    pub(super) fn new(code: &[u8]) -> Result<InterpretedCode, GuestFailure> {
        let module = Module::new(&ENGINE, code)?;
        match module.imports().find(|import| (import.module(), import.name()) != IMPORT) {
            Some(import) => Err(GuestFailure(format!(
                "it imports {:?} from {:?}, and may import nothing but {:?} from {:?}",
                import.name(),
                import.module(),
                IMPORT.1,
                IMPORT.0
            ))),
            None => Ok(InterpretedCode(module)),
        }
    }
}

/// Instance that is interpreted.
pub(super) struct InterpretedGuest {
    store: Store<StoreLimits>,
    memory: Memory,
    room: TypedFunc<u32, u32>,
    begin: TypedFunc<u32, u64>,
    go_on: TypedFunc<u32, u64>,
    /// Bytes that are read for it.
    bytes: Vec<u8>,
    /// Time for which it has computed and nobody was told.
    worked: Duration,
}

impl InterpretedGuest {
    /// Makes an instance that has done nothing yet.
    pub(super) fn new(code: &InterpretedCode) -> Result<InterpretedGuest, GuestFailure> {
        let limits = StoreLimitsBuilder::new()
            .memory_size(MEMORY_BYTES_MAX)
            .table_elements(TABLE_MAX)
            .instances(1)
            .memories(1)
            .tables(TABLES_MAX)
            .build();
        let mut store = Store::new(&ENGINE, limits);
        store.limiter(|limits| limits);
        store.set_fuel(FUEL_MAX)?;
        let linker = LINKER.as_ref().map_err(GuestFailure::clone)?;
        let instance: Instance = linker.instantiate_and_start(&mut store, &code.0)?;
        let memory =
            instance.get_memory(&store, "memory").ok_or_else(|| GuestFailure("it exports no memory".into()))?;
        let room = instance.get_typed_func(&store, Export::Room.name())?;
        let begin = instance.get_typed_func(&store, Export::Begin.name())?;
        let go_on = instance.get_typed_func(&store, Export::GoOn.name())?;
        store.set_fuel(FUEL)?;
        Ok(InterpretedGuest { store, memory, room, begin, go_on, bytes: Vec::new(), worked: Duration::ZERO })
    }

    /// Calls an exported function. When the fuel is used up, lets others go on.
    pub(super) async fn call(
        &mut self,
        export: Export,
        argument: u32,
        host: &impl GuestHost,
    ) -> Result<u64, GuestFailure> {
        match export {
            Export::Room => self.run(self.room, argument, host).await.map(u64::from),
            Export::Begin => self.run(self.begin, argument, host).await,
            Export::GoOn => self.run(self.go_on, argument, host).await,
        }
    }

    async fn run<R: WasmResults>(
        &mut self,
        function: TypedFunc<u32, R>,
        argument: u32,
        host: &impl GuestHost,
    ) -> Result<R, GuestFailure> {
        let mut begun = Instant::now();
        let mut call = function.call_resumable(&mut self.store, argument)?;
        loop {
            self.worked += begun.elapsed();
            call = match call {
                TypedResumableCall::Finished(result) => return Ok(result),
                TypedResumableCall::OutOfFuel(paused) => {
                    let needs = paused.required_fuel();
                    if needs > FUEL_MAX {
                        return Err(GuestFailure("it wants too much at a time".into()));
                    }
                    host.turn().await;
                    self.store.set_fuel(needs.max(FUEL))?;
                    begun = Instant::now();
                    paused.resume(&mut self.store)?
                }
                TypedResumableCall::HostTrap(paused) => {
                    let Some(request) = paused.host_error().downcast_ref::<ReadRequest>().copied() else {
                        return Err(GuestFailure("it calls what it does not have".into()));
                    };
                    let is_read = request.read(host, &mut self.bytes).await;
                    if is_read && self.memory.write(&mut self.store, request.into as usize, &self.bytes).is_err() {
                        return Err(GuestFailure(READ_OUTSIDE.into()));
                    }
                    begun = Instant::now();
                    paused.resume(&mut self.store, &[Val::from(if is_read { READ } else { NOT_READ })])?
                }
            };
        }
    }

    /// Returns the time for which it has computed since this was asked last.
    pub(super) fn take_worked(&mut self) -> Duration {
        core::mem::take(&mut self.worked)
    }

    /// Writes into the guest's memory. False if these bytes are not all in it.
    pub(super) fn write(&mut self, at: usize, bytes: &[u8]) -> bool {
        self.memory.write(&mut self.store, at, bytes).is_ok()
    }

    /// Reads the guest's memory. False if these bytes are not all in it.
    pub(super) fn read(&self, at: usize, bytes: &mut [u8]) -> bool {
        self.memory.read(&self.store, at, bytes).is_ok()
    }
}
