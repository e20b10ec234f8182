//! Domain: the state that endpoints share with the memory that they move.

use crate::provider::Provider;
use crate::shim;
use core::ffi::CStr;
use core::ptr::{NonNull, null_mut};
use std::ffi::CString;
use std::net::IpAddr;

/// Error of libfabric.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("libfabric: {}", text(*.0))]
pub struct FabricError(pub(crate) i32);

impl core::fmt::Debug for FabricError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FabricError({}: {})", self.0, text(self.0))
    }
}

fn text(error: i32) -> String {
    // SAFETY: any number will do; the answer is a text that lives as long as the process.
    unsafe { CStr::from_ptr(shim::ff_error_text(error)) }.to_string_lossy().into_owned()
}

/// Returns the number, or the error that it stands for.
pub(crate) fn check(result: i32) -> Result<usize, FabricError> {
    usize::try_from(result).map_err(|_| FabricError(-result))
}

#[derive(Debug)]
pub(crate) struct FabricDomain(NonNull<shim::RawDomain>);

// SAFETY: opened with FI_THREAD_SAFE: any thread may use it, several at a time.
unsafe impl Send for FabricDomain {}
// SAFETY: as above.
unsafe impl Sync for FabricDomain {}

impl FabricDomain {
    /// Opens a domain. With `is_own`, `node` is an address of this machine, or without one the
    /// provider chooses; else the domain is on the way to `node`.
    pub(crate) fn open(provider: Provider, node: Option<IpAddr>, is_own: bool) -> Result<FabricDomain, FabricError> {
        let provider = CString::new(provider.name()).expect("a name without zero bytes");
        let node = node.map(|node| CString::new(node.to_string()).expect("an address without zero bytes"));
        let node = node.as_ref().map_or(core::ptr::null(), |node| node.as_ptr());
        let mut domain = null_mut();
        // SAFETY: both texts end with zero and live until the call is over, and there is room for
        // the answer.
        check(unsafe { shim::ff_domain_open(provider.as_ptr(), node, i32::from(is_own), &mut domain) })?;
        Ok(FabricDomain(NonNull::new(domain).expect("an open domain")))
    }

    pub(crate) fn as_ptr(&self) -> *mut shim::RawDomain {
        self.0.as_ptr()
    }

    /// Returns the name of the provider as libfabric resolved it.
    pub(crate) fn provider(&self) -> String {
        // SAFETY: the domain is open and its text ends with zero.
        unsafe { CStr::from_ptr(shim::ff_domain_provider(self.as_ptr())) }.to_string_lossy().into_owned()
    }
}

impl Drop for FabricDomain {
    fn drop(&mut self) {
        // SAFETY: open, and endpoints and registrations keep it alive (`Arc`), so none is left.
        unsafe { shim::ff_domain_close(self.as_ptr()) }
    }
}

/// Use of registered memory: by transfers of this side or of others.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Memory in which our own transfers end.
    Landing,
    /// Memory that others read.
    Window,
}

/// Registration of memory that transfers may touch.
#[derive(Debug)]
pub(crate) struct Registration {
    memory: NonNull<shim::RawMemory>,
    pub(crate) key: u64,
    pub(crate) base: u64,
    _domain: std::sync::Arc<FabricDomain>,
}

// SAFETY: as for the domain that it is part of.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// # Safety
    /// The memory stays mapped until this is dropped and no endpoint of the domain has a transfer
    /// under way that touches it.
    pub(crate) unsafe fn new(
        domain: &std::sync::Arc<FabricDomain>,
        start: *mut u8,
        bytes: usize,
        wanted_key: u64,
        used_as: Use,
    ) -> Result<Registration, FabricError> {
        let (mut memory, mut key, mut base) = (null_mut(), 0, 0);
        let is_remote = i32::from(used_as == Use::Window);
        // SAFETY: the domain is open, the memory is there (above), and there is room for the
        // answers.
        check(unsafe {
            let start = start.cast();
            shim::ff_memory_register(
                domain.as_ptr(),
                start,
                bytes,
                is_remote,
                wanted_key,
                &mut memory,
                &mut key,
                &mut base,
            )
        })?;
        let memory = NonNull::new(memory).expect("a registration");
        Ok(Registration { memory, key, base, _domain: domain.clone() })
    }

    pub(crate) fn as_ptr(&self) -> *mut shim::RawMemory {
        self.memory.as_ptr()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: open until here.
        unsafe { shim::ff_memory_close(self.as_ptr()) };
    }
}
