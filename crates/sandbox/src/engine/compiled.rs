//! Code that is compiled by Cranelift, and runs in wasmtime.
//!
//! A guest is stopped by the clock: an *epoch* begins each millisecond while there are instances, and
//! code looks at it at each loop and call. A guest that computes for longer yields from a stack of its
//! own, so others have their turn, and it goes on later. Nothing here uses signals: bounds are checked
//! by instructions, and a process's handlers stay its own.

use super::{
    Export, GuestFailure, GuestHost, MEMORY_BYTES_MAX, NOT_READ, READ, READ_OUTSIDE, ReadRequest, TABLE_MAX, TABLES_MAX,
};
use crate::abi::IMPORT;
use core::future::{Future, poll_fn};
use core::pin::pin;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use wasmtime::{
    Caller, Config, Engine, Error, InstanceAllocationStrategy, InstancePre, Linker, Memory, Module, ModuleExport,
    PoolingAllocationConfig, Store, StoreLimits, StoreLimitsBuilder, TypedFunc, WasmResults,
};

/// Most instances at a time. Who asks for more is interpreted.
const INSTANCES_MAX: u32 = 256;
/// Bytes of stack that a guest's calls may take; and of the stack that they are in.
const STACK_BYTES: (usize, usize) = (256 << 10, 512 << 10);
/// Bytes of a memory or table that stay the process's, zeroed, when an instance ends. To give pages back and to get
/// them again takes longer than clearing this much.
const KEPT_BYTES: usize = 256 << 10;
/// Longest time that a guest computes before others have their turn.
const EPOCH: Duration = Duration::from_millis(1);
/// Epochs without instances after which the clock rests.
const IDLE_EPOCHS: u32 = 100;

static ENGINE: LazyLock<Result<Engine, GuestFailure>> = LazyLock::new(|| {
    let mut slots = PoolingAllocationConfig::new();
    slots
        .total_core_instances(INSTANCES_MAX)
        .total_memories(INSTANCES_MAX)
        .total_tables(INSTANCES_MAX * TABLES_MAX as u32)
        .total_stacks(INSTANCES_MAX)
        .max_tables_per_module(TABLES_MAX as u32)
        .table_elements(TABLE_MAX)
        .max_memory_size(MEMORY_BYTES_MAX)
        .linear_memory_keep_resident(KEPT_BYTES)
        .table_keep_resident(KEPT_BYTES);
    let mut config = Config::new();
    config
        .allocation_strategy(InstanceAllocationStrategy::Pooling(slots))
        .async_support(true)
        .max_wasm_stack(STACK_BYTES.0)
        .async_stack_size(STACK_BYTES.1)
        .epoch_interruption(true)
        .signals_based_traps(false)
        .memory_reservation(MEMORY_BYTES_MAX as u64)
        .memory_guard_size(0)
        // What a memory begins with is copied: pages of an image would have to be mapped anew.
        .memory_init_cow(false)
        .generate_address_map(false)
        .native_unwind_info(false)
        .wasm_backtrace(false);
    Engine::new(&config).map_err(GuestFailure::from)
});

impl From<Error> for GuestFailure {
    fn from(error: Error) -> GuestFailure {
        GuestFailure(error.root_cause().to_string())
    }
}

/// Data of an instance's store.
struct GuestState {
    limits: StoreLimits,
    /// The guest's memory, once there is one.
    memory: Option<Memory>,
    reading: Arc<Mutex<GuestRead>>,
}

/// A read between the guest, which wants it, and whoever polls the guest, and makes it.
#[derive(Default)]
struct GuestRead {
    wanted: Option<ReadRequest>,
    bytes: Vec<u8>,
    is_read: bool,
}

fn lock(reading: &Mutex<GuestRead>) -> MutexGuard<'_, GuestRead> {
    reading.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads for a guest: leaves it, and goes on when there are bytes.
async fn read(mut caller: Caller<'_, GuestState>, wanted: ReadRequest) -> wasmtime::Result<i32> {
    let reading = Arc::clone(&caller.data().reading);
    lock(&reading).wanted = Some(wanted);
    poll_fn(|_| if lock(&reading).wanted.is_some() { Poll::Pending } else { Poll::Ready(()) }).await;
    let reading = lock(&reading);
    if !reading.is_read {
        return Ok(NOT_READ);
    }
    let memory = caller.data().memory;
    match memory.map(|memory| memory.write(&mut caller, wanted.into as usize, &reading.bytes)) {
        Some(Ok(())) => Ok(READ),
        _ => Err(Error::msg(READ_OUTSIDE)),
    }
}

/// Functions that guests may import.
static LINKER: LazyLock<Result<Linker<GuestState>, GuestFailure>> = LazyLock::new(|| {
    let mut linker = Linker::new(ENGINE.as_ref().map_err(GuestFailure::clone)?);
    linker.func_wrap_async(IMPORT.0, IMPORT.1, |caller, (offset, into, len): (u64, u32, u32)| {
        Box::new(read(caller, ReadRequest { offset, into, len }))
    })?;
    Ok(linker)
});

/// Instances there are.
static INSTANCES: AtomicUsize = AtomicUsize::new(0);
/// Whether the clock rests, or is about to.
static RESTS: AtomicBool = AtomicBool::new(false);

/// Thread that begins an epoch each millisecond while there are instances.
static CLOCK: LazyLock<Option<Thread>> = LazyLock::new(|| {
    let engine = ENGINE.as_ref().ok()?;
    let body = || {
        let mut idle = 0;
        loop {
            std::thread::sleep(EPOCH);
            engine.increment_epoch();
            idle = if INSTANCES.load(Ordering::SeqCst) == 0 { idle + 1 } else { 0 };
            if idle > IDLE_EPOCHS {
                RESTS.store(true, Ordering::SeqCst);
                // Whoever comes after this look sees that it rests, and wakes it.
                while INSTANCES.load(Ordering::SeqCst) == 0 {
                    std::thread::park();
                }
                RESTS.store(false, Ordering::SeqCst);
                idle = 0;
            }
        }
    };
    let thread = std::thread::Builder::new().name("farfield-epochs".into()).spawn(body).ok()?;
    Some(thread.thread().clone())
});

/// Checks whether the clock rests.
#[cfg(test)]
pub(super) fn is_clock_at_rest() -> bool {
    RESTS.load(Ordering::SeqCst)
}

/// Share of an instance in the clock's work.
struct ClockUse(());

impl ClockUse {
    /// Lets the clock go; `None` if there is none.
    fn new() -> Option<ClockUse> {
        let clock = CLOCK.as_ref()?;
        INSTANCES.fetch_add(1, Ordering::SeqCst);
        if RESTS.load(Ordering::SeqCst) {
            clock.unpark();
        }
        Some(ClockUse(()))
    }
}

impl Drop for ClockUse {
    fn drop(&mut self) {
        INSTANCES.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Bytes of all compiled code of this process.
static NATIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Returns the bytes that all compiled code of this process takes.
pub(super) fn native_bytes() -> usize {
    NATIVE_BYTES.load(Ordering::Relaxed)
}

/// Compiled code, with its exports looked up.
pub(super) struct CompiledCode {
    instance: InstancePre<GuestState>,
    memory: ModuleExport,
    room: ModuleExport,
    begin: ModuleExport,
    go_on: ModuleExport,
    bytes: usize,
}

impl CompiledCode {
    /// Compiles code that the interpreter has taken. This takes about a microsecond for each byte.
    pub(super) fn new(code: &[u8]) -> Result<CompiledCode, GuestFailure> {
        let engine = ENGINE.as_ref().map_err(GuestFailure::clone)?;
        let module = Module::new(engine, code)?;
        let export =
            |name| module.get_export_index(name).ok_or_else(|| GuestFailure(format!("it exports no {name:?}")));
        let image = module.image_range();
        let bytes = image.end.addr() - image.start.addr();
        let compiled = CompiledCode {
            instance: LINKER.as_ref().map_err(GuestFailure::clone)?.instantiate_pre(&module)?,
            memory: export("memory")?,
            room: export(Export::Room.name())?,
            begin: export(Export::Begin.name())?,
            go_on: export(Export::GoOn.name())?,
            bytes,
        };
        NATIVE_BYTES.fetch_add(bytes, Ordering::Relaxed);
        Ok(compiled)
    }
}

impl Drop for CompiledCode {
    fn drop(&mut self) {
        NATIVE_BYTES.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Instance of compiled code.
pub(super) struct CompiledGuest {
    store: Store<GuestState>,
    memory: Memory,
    reading: Arc<Mutex<GuestRead>>,
    room: TypedFunc<u32, u32>,
    begin: TypedFunc<u32, u64>,
    go_on: TypedFunc<u32, u64>,
    _clock: ClockUse,
}

impl CompiledGuest {
    /// Makes an instance that has done nothing yet. Fails if there are too many.
    pub(super) async fn new(code: &CompiledCode) -> Result<CompiledGuest, GuestFailure> {
        let clock = ClockUse::new().ok_or_else(|| GuestFailure("no thread can be had".into()))?;
        let limits = StoreLimitsBuilder::new()
            .memory_size(MEMORY_BYTES_MAX)
            .table_elements(TABLE_MAX)
            .instances(1)
            .memories(1)
            .tables(TABLES_MAX)
            .build();
        let reading = Arc::<Mutex<GuestRead>>::default();
        let state = GuestState { limits, memory: None, reading: Arc::clone(&reading) };
        let mut store = Store::new(code.instance.module().engine(), state);
        store.limiter(|state| &mut state.limits);
        store.epoch_deadline_async_yield_and_update(1);
        let instance = code.instance.instantiate_async(&mut store).await?;
        let mut find = |export| instance.get_module_export(&mut store, export);
        let (memory, room, begin, go_on) = (find(&code.memory), find(&code.room), find(&code.begin), find(&code.go_on));
        let of_another_kind = || GuestFailure("an export is of another kind".into());
        let memory = memory.and_then(|it| it.into_memory()).ok_or_else(of_another_kind)?;
        let [room, begin, go_on] = [room, begin, go_on].map(|it| it.and_then(|it| it.into_func()));
        let room = room.ok_or_else(of_another_kind)?.typed(&store)?;
        let begin = begin.ok_or_else(of_another_kind)?.typed(&store)?;
        let go_on = go_on.ok_or_else(of_another_kind)?.typed(&store)?;
        store.data_mut().memory = Some(memory);
        Ok(CompiledGuest { store, memory, reading, room, begin, go_on, _clock: clock })
    }

    /// Calls an exported function. At the end of each epoch, lets others go on.
    pub(super) async fn call(
        &mut self,
        export: Export,
        argument: u32,
        host: &impl GuestHost,
    ) -> Result<u64, GuestFailure> {
        let CompiledGuest { store, reading, room, begin, go_on, .. } = self;
        match export {
            Export::Room => run(store, reading, room, argument, host).await.map(u64::from),
            Export::Begin => run(store, reading, begin, argument, host).await,
            Export::GoOn => run(store, reading, go_on, argument, host).await,
        }
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

async fn run<R: WasmResults + Sync>(
    store: &mut Store<GuestState>,
    reading: &Mutex<GuestRead>,
    function: &TypedFunc<u32, R>,
    argument: u32,
    host: &impl GuestHost,
) -> Result<R, GuestFailure> {
    store.set_epoch_deadline(1);
    let mut call = pin!(function.call_async(&mut *store, argument));
    loop {
        // It waits for nothing but a read or its next turn, and nobody has to wake it.
        if let Poll::Ready(result) = call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return Ok(result?);
        }
        let (wanted, mut bytes) = {
            let reading = &mut *lock(reading);
            (reading.wanted, core::mem::take(&mut reading.bytes))
        };
        match wanted {
            Some(wanted) => {
                let is_read = wanted.read(host, &mut bytes).await;
                *lock(reading) = GuestRead { wanted: None, bytes, is_read };
            }
            None => host.turn().await,
        }
    }
}
