//! A thread of ours for work that opens something, or takes long. It moves far memory to another
//! pool (`switching`) and takes back servers that were lost. It also restores what parts of the
//! pool lack, and checks what they hold, while the program does not.
//!
//! The monitor starts it, once, when there is work of that kind: the monitor evicts, and must not
//! wait for servers.

use super::arm::with_descriptors;
use super::runtime::{Phase, RUNTIME, Runtime};
use super::{own_code, signal, switching, sync};
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_os::{process, signals};
use farfield_pool::Backend;

/// Interval between two looks for work; `REPAIR_LOOK` is that between two looks for answers, while
/// a pool is repaired.
const LOOK: Duration = Duration::from_millis(32);
const REPAIR_LOOK: Duration = Duration::from_micros(500);
/// Number of looks without anything repaired after which there is nothing to repair with: a server
/// stays away.
const VAIN_LOOKS: u32 = 100;

/// Starts the maintenance thread if there is work for it and it does not run yet. Called by the
/// monitor while armed.
pub fn start_if_needed(runtime: &Runtime) {
    let is_wanted = switching::is_due(runtime) || is_degraded(runtime) || runtime.slot().scrubbed().is_some();
    if is_wanted && runtime.maintenance_running.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        // SAFETY: `run_maintenance` never returns and keeps to the laws of this module.
        if unsafe { sync::spawn(run_maintenance) }.is_err() {
            // The start is tried again at the next look.
            runtime.maintenance_running.store(0, Ordering::Release);
        }
    }
}

/// Checks whether a part of the pool is lost, or lacks something.
fn is_degraded(runtime: &Runtime) -> bool {
    runtime.slot().pool_degraded.load(Ordering::Relaxed) != 0
}

extern "C" fn run_maintenance(_: usize) -> ! {
    signals::set_mask(!signal::OURS);
    let runtime = &RUNTIME;
    own_code::begin_thread();
    let (mut restored, mut vain) = (0, 0u32);
    loop {
        let mut pause = LOOK;
        if runtime.phase() == Phase::Armed {
            let store = &runtime.armed().store;
            switching::follow(runtime);
            take_back(runtime);
            store.take_answers();
            let now = store.protection().map_or(0, |protection| protection.restored_pages);
            vain = if now == restored { vain.saturating_add(1) } else { 0 };
            restored = now;
            if is_degraded(runtime) && vain < VAIN_LOOKS {
                pause = REPAIR_LOOK;
            }
        }
        process::sleep(pause);
    }
}

/// Takes back servers that were lost and are there again.
fn take_back(runtime: &Runtime) {
    let backend = runtime.armed().store.backend();
    if backend.is_rejoin_due() {
        // A fork meanwhile would take connections along that nobody knows of yet.
        let _still = backend.hold_still();
        open(runtime, || backend.rejoin());
    }
}

/// Calls `open`, which opens descriptors. Waits for borrowers that would lack them.
pub fn open(runtime: &Runtime, open: impl FnMut()) {
    runtime.vm_sharing.open_descriptors_for_good(|| with_descriptors(open));
}
