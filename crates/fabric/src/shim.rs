//! Functions of `shim.c`. Those that can fail return a negative number on failure. Domains and
//! endpoints may be used by several threads at a time.

use core::ffi::{c_char, c_int, c_void};

#[repr(C)]
pub(crate) struct RawDomain {
    opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct RawEndpoint {
    opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct RawMemory {
    opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct RawCompletion {
    pub(crate) context: u64,
    pub(crate) error: i32,
}

/// Part of a transfer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawTransferPart {
    pub(crate) into: *mut c_void,
    pub(crate) bytes: usize,
    pub(crate) remote: u64,
    pub(crate) key: u64,
}

unsafe extern "C" {
    pub(crate) fn ff_domain_open(
        provider: *const c_char,
        node: *const c_char,
        is_own: c_int,
        out: *mut *mut RawDomain,
    ) -> c_int;
    pub(crate) fn ff_domain_close(domain: *mut RawDomain);
    pub(crate) fn ff_domain_provider(domain: *const RawDomain) -> *const c_char;
    pub(crate) fn ff_memory_register(
        domain: *mut RawDomain,
        start: *mut c_void,
        bytes: usize,
        is_remote: c_int,
        wanted_key: u64,
        out: *mut *mut RawMemory,
        key: *mut u64,
        base: *mut u64,
    ) -> c_int;
    pub(crate) fn ff_memory_close(memory: *mut RawMemory) -> c_int;
    pub(crate) fn ff_endpoint_open(domain: *mut RawDomain, out: *mut *mut RawEndpoint) -> c_int;
    pub(crate) fn ff_endpoint_close(endpoint: *mut RawEndpoint) -> c_int;
    pub(crate) fn ff_endpoint_address(endpoint: *mut RawEndpoint, bytes: *mut c_void, length: *mut usize) -> c_int;
    pub(crate) fn ff_endpoint_peer(endpoint: *mut RawEndpoint, address: *const c_void, peer: *mut u64) -> c_int;
    pub(crate) fn ff_endpoint_read(
        endpoint: *mut RawEndpoint,
        parts: *const RawTransferPart,
        count: usize,
        local: *mut RawMemory,
        peer: u64,
        context: u64,
    ) -> c_int;
    pub(crate) fn ff_endpoint_parts_max(endpoint: *const RawEndpoint) -> c_int;
    pub(crate) fn ff_endpoint_poll(endpoint: *mut RawEndpoint, out: *mut RawCompletion, room: usize) -> c_int;
    pub(crate) fn ff_endpoint_descriptor(endpoint: *mut RawEndpoint) -> c_int;
    pub(crate) fn ff_endpoint_may_sleep(endpoint: *mut RawEndpoint) -> c_int;
    pub(crate) fn ff_error_text(error: c_int) -> *const c_char;
}
