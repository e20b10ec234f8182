//! `ff.sandbox.ship`: accepts code, piece by piece.

use crate::store::{Digest, ShipReply, take_piece};
use farfield_wic::access::Bytes;
use farfield_wic::{Fault, Function, Place};
use serde::{Deserialize, Serialize};

/// Accepts a piece of code.
#[derive(Debug)]
pub(crate) struct Ship;

/// A piece of code.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Parcel {
    pub(crate) digest: Digest,
    /// Bytes of the whole code.
    pub(crate) len: u32,
    pub(crate) at: u32,
    pub(crate) bytes: Bytes,
}

impl Parcel {
    /// Most bytes of a piece. With its header it fits into an argument.
    pub(crate) const BYTES_MAX: usize = 48 * 1024;
}

impl Function for Ship {
    const NAME: &'static str = "ff.sandbox.ship";
    const VERSION: u32 = 1;
    type Argument = Parcel;
    type Answer = ShipReply;

    async fn run<P: Place>(_place: &P, parcel: Parcel) -> Result<ShipReply, Fault> {
        Ok(take_piece(parcel.digest, parcel.len, parcel.at, &parcel.bytes.0))
    }
}
