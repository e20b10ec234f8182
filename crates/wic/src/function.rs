//! What can be called.

use crate::{Fault, Place};
use core::future::Future;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An async function over the bytes of a region that runs wherever there is a [`Place`]. It waits for nothing but its place.
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
/// # assert_eq!(farfield_wic::Sim::new(1, vec![8, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]).run_one::<Behind>(0), Ok(7));
/// ```
pub trait Function: 'static {
    /// Its name at servers, at most 64 bytes; `ff.` begins those that every server has.
    const NAME: &'static str;
    /// Changes when arguments, answers or what they mean change.
    const VERSION: u32;
    /// Does it change nothing? Then it may run at any of several servers that keep the same, and anew at another one when its server is lost. What it wrote all the
    /// same would be at one of them only.
    const ONLY_READS: bool = false;
    /// May it run once more after it ran, or after it ran in part? Then what a server pushes back, or has too long an answer for, goes on at the client by itself, where the place
    /// is [`crate::Where::Auto`].
    const REPEATABLE: bool = Self::ONLY_READS;
    /// What it is given; encoded, at most 64 KiB at a server.
    type Argument: Clone + Serialize + DeserializeOwned + Send;
    /// What it answers; encoded, at most 64 KiB at a server.
    type Answer: Serialize + DeserializeOwned + Send;

    /// Runs it. What the accesses report it may pass on; errors of its own belong into the answer.
    fn run<P: Place>(place: &P, argument: Self::Argument) -> impl Future<Output = Result<Self::Answer, Fault>>;
}
