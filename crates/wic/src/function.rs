//! Functions that can be called.

use crate::{Fault, Place};
use core::future::Future;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An async function over the bytes of a region that runs wherever there is a [`Place`]. It waits
/// for nothing but its place.
///
/// ```
/// use farfield_wic::{Fault, Function, Place};
///
/// /// The word behind a pointer.
/// struct Behind;
///
/// impl Function for Behind {
///     const NAME: &'static str = "example.behind";
///     const VERSION: u32 = 1;
///     type Argument = u64;
///     type Answer = u64;
///
///     async fn run<P: Place>(place: &P, pointer: u64) -> Result<u64, Fault> {
///         let behind = place.read_u64(pointer).await?;
///         place.read_u64(behind).await
///     }
/// }
/// # let region = vec![8, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0];
/// # assert_eq!(farfield_wic::Sim::new(1, region).run_one::<Behind>(0), Ok(7));
/// ```
pub trait Function: 'static {
    /// Name of the function at servers, at most 64 bytes; names of functions that every server has
    /// begin with `ff.`.
    const NAME: &'static str;
    /// Version, which changes when arguments, answers or their meaning change.
    const VERSION: u32;
    /// Whether the function changes nothing. Then it may run at any of several servers with equal
    /// pages, and again at another one when its server is lost. If it wrote all the same, its
    /// writes would be at one of them only.
    const ONLY_READS: bool = false;
    /// Whether the function may run once more after it ran, wholly or in part. Then it continues at
    /// the client by itself if a server pushes it back, or has too long an answer for it, where the
    /// place is [`crate::Where::Auto`].
    const REPEATABLE: bool = Self::ONLY_READS;
    /// Argument; encoded, at most 64 KiB at a server.
    type Argument: Clone + Serialize + DeserializeOwned + Send;
    /// Answer; encoded, at most 64 KiB at a server.
    type Answer: Serialize + DeserializeOwned + Send;

    /// Runs the function. It may pass on faults of its accesses; errors of its own belong into the
    /// answer.
    fn run<P: Place>(place: &P, argument: Self::Argument) -> impl Future<Output = Result<Self::Answer, Fault>>;
}
