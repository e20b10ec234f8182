//! Tasks: code that waits for far values without a thread, so that one core keeps many misses in
//! flight.
//!
//! All async functions of this crate run in any executor. Ours polls the pool when it has nothing
//! else to do. In another one, tokio's for instance, a thread of the heap polls.
//! (`examples/with_tokio.rs` is a tokio program.)
//!
//! # Which tasks may hold scopes
//!
//! A scope belongs to its thread, so a task that holds one while it waits stays on its thread. The
//! compiler ensures this as follows:
//!
//! | where the task runs | with scopes over `.await` | without |
//! |---|---|---|
//! | [`Executor`] | yes | yes |
//! | tokio: `block_on`, `spawn_local`, `LocalSet` | yes | yes |
//! | tokio: `tokio::spawn`, on any runtime | does not compile | yes |
//!
//! With a scope, tasks use [`FarBox::fetch`](crate::FarBox::fetch) and the `fetch` methods of
//! collections, which give references that live as long as the scope. Without one, they use
//! [`FarBox::fetch_pinned`](crate::FarBox::fetch_pinned) for a value that is used over an `.await`,
//! and [`Heap::fetch_with`](crate::Heap::fetch_with) for whatever a closure can look up.
//!
//! ```
//! # use farfield::{FarMap, Heap};
//! fn may_change_its_thread<F: Future + Send>(task: F) {}
//!
//! # let heap = Heap::builder().build()?;
//! # let map = FarMap::<u64, u64>::new(&heap)?;
//! # let value = heap.alloc(7)?;
//! may_change_its_thread(async {
//!     heap.write_back_async(heap.far_range(&value)).await?;
//!     let pinned = value.fetch_pinned().await?;
//!     heap.fetch_with(|scope| Ok(map.get(scope, &*pinned)?.copied())).await
//! });
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Without the last line this compiles:
//!
//! ```
//! # use farfield::Heap;
//! # let heap = Heap::builder().near(4 << 20).build().unwrap();
//! # let value = heap.alloc(7u64).unwrap();
//! let task = async {
//!     let scope = heap.enter();
//!     value.fetch(&scope).await.copied()
//! };
//! fn may_change_its_thread<F: Future + Send>(task: F) {}
//! ```
//!
//! ```compile_fail
//! # use farfield::Heap;
//! # let heap = Heap::builder().near(4 << 20).build().unwrap();
//! # let value = heap.alloc(7u64).unwrap();
//! let task = async {
//!     let scope = heap.enter();
//!     value.fetch(&scope).await.copied()
//! };
//! fn may_change_its_thread<F: Future + Send>(task: F) {}
//! may_change_its_thread(task); // error: future cannot be sent between threads safely
//! ```
//!
//! A reference that a closure has found cannot leave it:
//!
//! ```
//! # use farfield::{FarMap, Heap};
//! # let heap = Heap::builder().near(4 << 20).build().unwrap();
//! # let map = FarMap::<u64, u64>::new(&heap).unwrap();
//! let found = heap.fetch_with(|scope| Ok(map.get(scope, &7)?.copied()));
//! ```
//!
//! ```compile_fail
//! # use farfield::{FarMap, Heap};
//! # let heap = Heap::builder().near(4 << 20).build().unwrap();
//! # let map = FarMap::<u64, u64>::new(&heap).unwrap();
//! let found = heap.fetch_with(|scope| map.get(scope, &7)); // error: lifetime may not live long enough
//! ```

mod executor;
mod join;

pub(crate) use executor::is_polled;
pub use executor::{Executor, spawn};
pub use join::{JoinHandle, Panicked};
