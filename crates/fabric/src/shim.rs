//! Functions of `shim.c`. Those that can fail return a negative number on failure. Domains and
//! endpoints may be used by several threads at a time.

use core::ffi::{c_char, c_int, c_void};

#[repr(C)]
pub(crate) struct Domain {
    opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Endpoint {
    opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Memory {
    opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Completion {
    pub(crate) context: u64,
    pub(crate) error: i32,
}

/// Part of a transfer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Part {
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
        out: *mut *mut Domain,
    ) -> c_int;
    pub(crate) fn ff_domain_close(domain: *mut Domain);
    pub(crate) fn ff_domain_provider(domain: *const Domain) -> *const c_char;
    pub(crate) fn ff_memory_register(
        domain: *mut Domain,
        start: *mut c_void,
        bytes: usize,
        is_remote: c_int,
        wanted_key: u64,
        out: *mut *mut Memory,
        key: *mut u64,
        base: *mut u64,
    ) -> c_int;
    pub(crate) fn ff_memory_close(memory: *mut Memory) -> c_int;
    pub(crate) fn ff_endpoint_open(domain: *mut Domain, out: *mut *mut Endpoint) -> c_int;
    pub(crate) fn ff_endpoint_close(endpoint: *mut Endpoint) -> c_int;
    pub(crate) fn ff_endpoint_address(endpoint: *mut Endpoint, bytes: *mut c_void, length: *mut usize) -> c_int;
    pub(crate) fn ff_endpoint_peer(endpoint: *mut Endpoint, address: *const c_void, peer: *mut u64) -> c_int;
    pub(crate) fn ff_endpoint_read(
        endpoint: *mut Endpoint,
        parts: *const Part,
        count: usize,
        local: *mut Memory,
        peer: u64,
        context: u64,
    ) -> c_int;
    pub(crate) fn ff_endpoint_parts_max(endpoint: *const Endpoint) -> c_int;
    pub(crate) fn ff_endpoint_poll(endpoint: *mut Endpoint, out: *mut Completion, room: usize) -> c_int;
    pub(crate) fn ff_endpoint_descriptor(endpoint: *mut Endpoint) -> c_int;
    pub(crate) fn ff_endpoint_may_sleep(endpoint: *mut Endpoint) -> c_int;
    pub(crate) fn ff_error_text(error: c_int) -> *const c_char;
}
