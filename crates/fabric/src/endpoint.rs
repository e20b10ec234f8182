//! Endpoint: the object where transfers begin and end.

use crate::ADDRESS_BYTES_MAX;
use crate::domain::{FabricDomain, FabricError, Registration, check};
use crate::shim;
use core::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Most completions that one poll returns.
pub(crate) const COMPLETIONS_MAX: usize = 16;

#[derive(Debug)]
pub(crate) struct FabricEndpoint {
    endpoint: NonNull<shim::RawEndpoint>,
    domain: Arc<FabricDomain>,
    descriptor: i32,
}

// SAFETY: opened in a domain with FI_THREAD_SAFE: any thread may use it, several at a time.
unsafe impl Send for FabricEndpoint {}
// SAFETY: as above.
unsafe impl Sync for FabricEndpoint {}

impl FabricEndpoint {
    pub(crate) fn open(domain: Arc<FabricDomain>) -> Result<FabricEndpoint, FabricError> {
        let mut endpoint = null_mut();
        // SAFETY: the domain is open, and stays so as long as this lives.
        check(unsafe { shim::ff_endpoint_open(domain.as_ptr(), &mut endpoint) })?;
        let endpoint = NonNull::new(endpoint).expect("an endpoint");
        let mut endpoint = FabricEndpoint { endpoint, domain, descriptor: -1 };
        // SAFETY: the endpoint is open.
        let descriptor = check(unsafe { shim::ff_endpoint_descriptor(endpoint.as_ptr()) })?;
        endpoint.descriptor = i32::try_from(descriptor).unwrap_or(-1);
        Ok(endpoint)
    }

    fn as_ptr(&self) -> *mut shim::RawEndpoint {
        self.endpoint.as_ptr()
    }

    pub(crate) fn domain(&self) -> &Arc<FabricDomain> {
        &self.domain
    }

    pub(crate) fn address(&self) -> Result<Vec<u8>, FabricError> {
        let mut bytes = vec![0; ADDRESS_BYTES_MAX];
        let mut length = bytes.len();
        // SAFETY: the endpoint is open, and there is so much room.
        check(unsafe { shim::ff_endpoint_address(self.as_ptr(), bytes.as_mut_ptr().cast(), &mut length) })?;
        bytes.truncate(length);
        Ok(bytes)
    }

    pub(crate) fn peer(&self, address: &[u8]) -> Result<u64, FabricError> {
        // Addresses of one provider and family have one length; libfabric reads as many bytes as
        // ours have.
        if address.len() != self.address()?.len() {
            return Err(FabricError(libc::EADDRNOTAVAIL));
        }
        let mut peer = 0;
        // SAFETY: the endpoint is open, and the address is as long as it must be.
        check(unsafe { shim::ff_endpoint_peer(self.as_ptr(), address.as_ptr().cast(), &mut peer) })?;
        Ok(peer)
    }

    /// Returns the most parts that one transfer may have.
    pub(crate) fn parts_max(&self) -> usize {
        // SAFETY: the endpoint is open.
        let most = unsafe { shim::ff_endpoint_parts_max(self.as_ptr()) };
        usize::try_from(most).expect("the shim returns 1 to PARTS_MAX")
    }

    /// # Safety
    /// The parts are read into memory in `local`, which stays registered until the transfer or this
    /// endpoint has ended.
    pub(crate) unsafe fn read(
        &self,
        parts: &[shim::RawTransferPart],
        local: &Registration,
        peer: u64,
        context: u64,
    ) -> Result<(), FabricError> {
        // SAFETY: the endpoint is open; the caller promises the rest.
        let result = unsafe {
            shim::ff_endpoint_read(self.as_ptr(), parts.as_ptr(), parts.len(), local.as_ptr(), peer, context)
        };
        check(result).map(|_| ())
    }

    pub(crate) fn poll(&self, out: &mut [shim::RawCompletion; COMPLETIONS_MAX]) -> Result<usize, FabricError> {
        // SAFETY: the endpoint is open, and there is so much room.
        check(unsafe { shim::ff_endpoint_poll(self.as_ptr(), out.as_mut_ptr(), out.len()) })
    }

    /// Returns the descriptor to wait for; `None` if something waits to be polled already.
    pub(crate) fn sleeps_on(&self) -> Option<i32> {
        // SAFETY: the endpoint is open.
        (unsafe { shim::ff_endpoint_may_sleep(self.as_ptr()) } != 0).then_some(self.descriptor)
    }
}

impl Drop for FabricEndpoint {
    fn drop(&mut self) {
        // SAFETY: open until here. It fails only while something is bound to the endpoint, and
        // nothing is.
        let closed = check(unsafe { shim::ff_endpoint_close(self.as_ptr()) });
        // Memory that its transfers touch is freed after this line.
        closed.expect("an endpoint can be closed");
    }
}
