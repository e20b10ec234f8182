//! Random numbers from the kernel, fit for secrets.

use farfield_os::{Errno, serving};

/// Returns 64 random bits.
pub(crate) fn random_u64() -> Result<u64, Errno> {
    let mut bytes = [0; 8];
    serving::fill_random(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Returns 128 random bits that are not zero, because zero means "none" on the wire.
pub(crate) fn random_nonzero_u128() -> Result<u128, Errno> {
    let mut bytes = [0; 16];
    while bytes == [0; 16] {
        serving::fill_random(&mut bytes)?;
    }
    Ok(u128::from_le_bytes(bytes))
}
