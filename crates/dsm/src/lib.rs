//! Shared memory of several processes, guided by ownership.
//!
//! A program runs in several processes, its *nodes*, which share one heap. An object has one owner,
//! a [`DBox`], as in plain Rust: one writer or many readers. So no protocol has to find out who may
//! read or write what: a mutable borrow brings the object to the borrower's node and gives it a new
//! version; a shared borrow elsewhere reads a copy of the version that the owner names. After DRust
//! (OSDI 2024); `docs/design/dsm.md` says what is promised.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = farfield_dsm::NodeBuilder::new().nodes(2);
//! farfield_dsm::run(&config, |here| {
//!     let numbers = here.alloc([1u64; 100])?;
//!     let other = here.nodes().last().expect("two nodes");
//!     let sum = here.spawn_to(other, (numbers, 3u64), |here, (numbers, factor)| {
//!         numbers.get(here).map(|numbers| factor * numbers.iter().sum::<u64>())
//!     })?;
//!     assert_eq!(sum.join(here)??, 300);
//!     Ok(())
//! })?
//! # }
//! ```
//!
//! Types of a program's own say by a derive that they can lie in shared memory:
//!
//! ```
//! use farfield_dsm::{DBox, Far};
//!
//! #[derive(Far)]
//! struct Article {
//!     words: [u32; 400],
//!     next: Option<DBox<Article>>,
//! }
//! ```
//!
//! What holds an address of one process is refused when it is compiled. So are bodies of tasks that
//! capture something:
//!
//! ```compile_fail,E0277
//! #[derive(farfield_dsm::Far)]
//! struct Article {
//!     words: String,
//! }
//! ```
//! ```compile_fail,E0277
//! fn shared(here: &farfield_dsm::Here<'_>, counter: std::sync::Arc<u64>) {
//!     let _ = here.alloc(counter);
//! }
//! ```
//! ```compile_fail,E0080
//! fn more(here: &farfield_dsm::Here<'_>, much: u64) {
//!     let _ = here.spawn_to(here.id(), (1u64,), move |_, (one,)| one + much);
//! }
//! # fn main() {
//! #     farfield_dsm::run(&farfield_dsm::NodeBuilder::new(), |here| more(here, 1)).unwrap();
//! # }
//! ```
//! ```compile_fail,E0382
//! fn twice(here: &farfield_dsm::Here<'_>, number: farfield_dsm::DBox<u64>) {
//!     let _ = here.spawn_to(here.id(), (number,), |here, (number,)| number.get(here).copied());
//!     let _ = number.get(here);
//! }
//! ```
//! ```compile_fail,E0505
//! fn reads(here: &farfield_dsm::Here<'_>, number: farfield_dsm::DBox<u64>) -> u64 {
//!     let read = number.get(here).unwrap();
//!     drop(number);
//!     *read
//! }
//! ```
//! ```compile_fail,E0502
//! fn renews(here: &mut farfield_dsm::Here<'_>, number: &farfield_dsm::DBox<u64>) -> u64 {
//!     let read = number.get(here).unwrap();
//!     here.renew();
//!     *read
//! }
//! ```
//! What is tied to an object by a [`TBox`] is sent with that object only:
//!
//! ```compile_fail,E0277
//! fn sends(here: &farfield_dsm::Here<'_>, tied: farfield_dsm::TBox<u64>) {
//!     let _ = here.spawn_to(here.id(), (tied,), |_, (tied,)| *tied);
//! }
//! ```
//! ```compile_fail,E0277
//! fn locks(here: &farfield_dsm::Here<'_>, tied: farfield_dsm::TBox<u64>) {
//!     let _ = farfield_dsm::DMutex::new(here, Some(tied));
//! }
//! ```
//! ```compile_fail,E0277
//! fn pushes(here: &farfield_dsm::Here<'_>, tied: farfield_dsm::TBox<u64>) {
//!     let _ = farfield_dsm::DVec::new().push(here, tied);
//! }
//! ```
//! ```compile_fail,E0277
//! #[derive(farfield_dsm::Far)]
//! struct Link {
//!     next: Option<farfield_dsm::TBox<Link>>,
//! }
//! ```
//! ```compile_fail,E0502
//! fn changes(here: &farfield_dsm::Here<'_>, pair: &mut farfield_dsm::DBox<(u8, farfield_dsm::TBox<u8>)>) -> u8 {
//!     let member: &u8 = &pair.get(here).unwrap().1;
//!     pair.get_mut(here).unwrap().0 = 1;
//!     *member
//! }
//! ```
//! ```compile_fail,E0505
//! fn pins(here: &farfield_dsm::Here<'_>, number: farfield_dsm::DBox<u64>) -> u64 {
//!     let pinned = farfield_dsm::Owner::pin(&number, here).unwrap();
//!     drop(number);
//!     *pinned
//! }
//! ```
//! ```compile_fail,E0499
//! fn grows(here: &farfield_dsm::Here<'_>, numbers: &mut farfield_dsm::DVec<u64>) {
//!     let mut chunks = numbers.chunks_mut(here).unwrap();
//!     numbers.push(here, 1).unwrap();
//!     let _ = chunks.next();
//! }
//! ```
#![deny(unsafe_code)]

mod arena;
mod backup;
mod collections;
mod copies;
mod error;
mod far;
mod member;
mod message;
mod node;
mod object;
mod primitives;
mod ptr;
mod stats;
mod sync;
mod task;
mod thin;

pub use collections::{ChunkMut, DString, DVec, DVecIter};
pub use error::{JoinError, NameError, NodeStartError, ShareError};
pub use far::{Far, FarGroup, Portable};
pub use farfield_core::dsm::{Expulsion, LossCause};
pub use farfield_derive::{Far, FarGroup};
pub use message::VALUE_BYTES_MAX;
#[cfg(any(test, feature = "conformance"))]
pub use message::check_message;
pub use node::{Here, NodeBuilder, NodeId, run};
pub use object::{Object, OwnedObject};
pub use ptr::{DArc, DBox, Mut, ObjectFetch, PinnedObject, TBox, Tie};
pub use stats::NodeStats;
pub use sync::{AtomicValue, DAtomic, DMutex, DMutexGuard, DReadGuard, DRwLock};
pub use sync::{Receiver, RecvError, SendError, Sender, channel};
pub use task::{Lent, LentMut, Owner, OwnerMut, ScopedHandle, TaskHandle, TaskScope, scope};

/// Compiles the code examples of the guide.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/shared-memory.md")]
mod guide {}
