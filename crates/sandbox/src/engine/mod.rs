//! Runs code, and limits what a guest may do.
//!
//! The tests guard against code that reads or keeps data that is not its own, that runs for ever,
//! or that uses up the server's memory or stack. They also guard against answers of a guest that
//! the host trusts without a check.

#[cfg(feature = "compiled")]
mod compiled;
mod interpreted;
#[cfg(feature = "compiled")]
mod tiers;
#[cfg(not(feature = "compiled"))]
#[path = "one_tier.rs"]
mod tiers;

use crate::abi::{GuestMessage, ROUND_BYTES_MAX, decode};
use farfield_wic::RANGE_BYTES_MAX;
use interpreted::{InterpretedCode, InterpretedGuest};
use serde::Serialize;
use std::sync::Arc;
use tiers::Tiers;
use wasmparser::{Validator, WasmFeatures};

/// Most bytes of memory of an instance, without its tables.
const MEMORY_BYTES_MAX: usize = 4 << 20;
/// Most entries of a table, through which functions are called by pointer.
const TABLE_MAX: usize = 16 * 1024;
/// Most tables.
const TABLES_MAX: usize = 4;
/// Deepest nesting of calls.
const CALLS_DEEP_MAX: usize = 512;

/// Least number of bytes for which room is requested, so that requests are rare.
const ROOM_BYTES_MIN: u32 = 1024;

/// Engine that runs shipped code.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum SandboxEngine {
    /// Code is interpreted until that has taken as long as compiling it would, then it is compiled
    /// beside; without the feature `compiled`, it is interpreted.
    #[default]
    Tiered,
    /// Code is interpreted, and no memory is ever executable that was not so when the process began.
    Interpreted,
    /// Code is compiled when it is called first. The call waits for that, and so do others of its thread.
    #[cfg(feature = "compiled")]
    Compiled,
}

/// Services for a guest while it computes.
pub(crate) trait GuestHost {
    /// Lets others have their turn.
    async fn turn(&self);

    /// Reads bytes of the region into `into`, as many as it has. False if they cannot be read: a request
    /// says why.
    async fn read(&self, offset: u64, into: &mut [u8]) -> bool;
}

/// Bytes of the region that a guest wants at an address of its own.
#[derive(Clone, Copy, Debug)]
struct ReadRequest {
    offset: u64,
    into: u32,
    len: u32,
}

impl ReadRequest {
    /// Reads the bytes. False if they cannot be read at once.
    async fn read(self, host: &impl GuestHost, bytes: &mut Vec<u8>) -> bool {
        bytes.clear();
        let is_short = self.len as usize <= RANGE_BYTES_MAX;
        if is_short {
            bytes.resize(self.len as usize, 0);
        }
        is_short && host.read(self.offset, bytes).await
    }
}

/// Answers of [`abi`](crate::abi)'s `read`.
const READ: i32 = 0;
const NOT_READ: i32 = 1;
const READ_OUTSIDE: &str = "it reads to outside of its memory";

/// Reason why an instance ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct GuestFailure(pub(crate) String);

/// Exported function of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Export {
    Room,
    Begin,
    GoOn,
}

impl Export {
    const fn name(self) -> &'static str {
        match self {
            Export::Room => "ff_sandbox_room",
            Export::Begin => "ff_sandbox_begin",
            Export::GoOn => "ff_sandbox_go_on",
        }
    }
}

/// Code that can run.
#[derive(Clone)]
pub(crate) struct GuestCode {
    interpreted: InterpretedCode,
    tiers: Arc<Tiers>,
    bytes: usize,
}

/// Instance of a guest, for one call.
pub(crate) struct Guest {
    running: RunningGuest,
    tiers: Arc<Tiers>,
    /// Address at which the guest gave room. The next field is its length.
    room_at: u32,
    room_len: u32,
    bytes: Vec<u8>,
}

enum RunningGuest {
    Interpreted(Box<InterpretedGuest>),
    #[cfg(feature = "compiled")]
    Compiled(Box<compiled::CompiledGuest>),
}

impl GuestCode {
    /// Validates code, which anybody may have sent.
    pub(crate) fn new(code: &[u8]) -> Result<GuestCode, GuestFailure> {
        // Invalid code ends here: wasmi 2.0 divides by the number of functions before it has
        // checked whether there are any.
        let mut validator = Validator::new_with_features(WasmFeatures::all());
        validator.validate_all(code).map_err(|error| GuestFailure(error.to_string()))?;
        let interpreted = InterpretedCode::new(code)?;
        // The required exports are checked where they are used.
        InterpretedGuest::new(&interpreted)?;
        Ok(GuestCode { interpreted, tiers: Arc::new(Tiers::new(code)), bytes: code.len() })
    }

    /// Returns the bytes of the code as it was shipped.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Drops what the compiler has made of the code, which is interpreted from now on.
    pub(crate) fn drop_compiled(&self) {
        self.tiers.drop_compiled();
    }
}

/// Checks whether all compiled code of this process takes more memory than it may.
pub(crate) fn is_compiled_full() -> bool {
    tiers::is_full()
}

impl Guest {
    /// Makes an instance that has done nothing yet.
    pub(crate) async fn new(code: &GuestCode, engine: SandboxEngine) -> Result<Guest, GuestFailure> {
        let running = match code.tiers.instantiate(engine).await {
            Some(running) => running,
            None => RunningGuest::Interpreted(Box::new(InterpretedGuest::new(&code.interpreted)?)),
        };
        Ok(Guest { running, tiers: Arc::clone(&code.tiers), room_at: 0, room_len: 0, bytes: Vec::new() })
    }

    /// Sends a message to the guest and returns its answer. When the guest has computed for a while,
    /// lets others go on.
    pub(crate) async fn tell(
        &mut self,
        export: Export,
        message: &impl Serialize,
        host: &impl GuestHost,
    ) -> Result<GuestMessage, GuestFailure> {
        self.bytes.clear();
        self.bytes = postcard::to_extend(message, core::mem::take(&mut self.bytes))
            .map_err(|error| GuestFailure(error.to_string()))?;
        let len = self.bytes.len() as u32;
        if len > self.room_len {
            let wanted = len.max(ROOM_BYTES_MIN);
            self.room_at = self.call(Export::Room, wanted, host).await? as u32;
            self.room_len = wanted;
        }
        let written = match &mut self.running {
            RunningGuest::Interpreted(guest) => guest.write(self.room_at as usize, &self.bytes),
            #[cfg(feature = "compiled")]
            RunningGuest::Compiled(guest) => guest.write(self.room_at as usize, &self.bytes),
        };
        if !written {
            return Err(GuestFailure("it gave room outside of its memory".into()));
        }
        let reply = self.call(export, len, host).await?;
        let (at, len) = ((reply >> 32) as usize, reply as u32 as usize);
        if len > ROUND_BYTES_MAX * 2 {
            return Err(GuestFailure(format!("it said {len} bytes at a time")));
        }
        self.bytes.resize(len, 0);
        let read = match &self.running {
            RunningGuest::Interpreted(guest) => guest.read(at, &mut self.bytes),
            #[cfg(feature = "compiled")]
            RunningGuest::Compiled(guest) => guest.read(at, &mut self.bytes),
        };
        if !read {
            return Err(GuestFailure("it spoke from outside of its memory".into()));
        }
        decode(&self.bytes).ok_or_else(|| GuestFailure("it said what nobody understands".into()))
    }

    async fn call(&mut self, export: Export, argument: u32, host: &impl GuestHost) -> Result<u64, GuestFailure> {
        match &mut self.running {
            RunningGuest::Interpreted(guest) => {
                let result = guest.call(export, argument, host).await;
                self.tiers.count_interpreted(guest.take_worked());
                result
            }
            #[cfg(feature = "compiled")]
            RunningGuest::Compiled(guest) => guest.call(export, argument, host).await,
        }
    }
}
