//! The heap as users see it: the door to `heap/`, `fault/` and `ptr/`.

use crate::call::{AtServer, CallCounts, FarFunction, FarRef, FarTraversal, HeapCall, HeapFold};
use crate::config::{Builder, Config, NEAR_MIN};
use crate::error::{AllocError, BuildError, FarError};
use crate::fault::AHEAD_MAX;
use crate::heap::{FarRange, HeapInner, PoolSwitch, Scope};
use crate::ptr::{FarArc, FarBox, FarPtr, FarWeak, Init, Uninit};
use crate::stats::Stats;
use core::ptr::NonNull;
use farfield_core::heap::CARD_BYTES;
use farfield_core::policy::call_placement::{CallPlacementDecision, Side};
use farfield_pool::{Backend, Health};

/// A budget of near memory, a pool of far memory, and the values that are in one or the other.
///
/// Values keep the heap's memory alive: a heap that is dropped before its values is freed with the
/// last of them.
pub struct Heap {
    core: NonNull<HeapInner>,
}

// SAFETY: a heap is a reference to its `HeapInner`, which is made to be shared. The reference count
// decides when that is freed.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

impl Heap {
    /// Returns a builder with the default configuration.
    pub fn builder() -> Builder {
        Builder::new()
    }

    pub(crate) fn from_config(mut config: Config) -> Result<Heap, BuildError> {
        let (name, plane) = (config.name.take(), config.plane);
        let heap = Heap { core: HeapInner::open(config)? };
        heap.core().start(name.as_deref(), plane)?;
        Ok(heap)
    }

    #[inline]
    pub(crate) fn core(&self) -> &HeapInner {
        // SAFETY: the reference that this heap counts as keeps the `HeapInner`.
        unsafe { self.core.as_ref() }
    }

    /// Begins a scope: as long as it lasts, values that are dereferenced with it stay where they
    /// are.
    ///
    /// Scopes nest. A scope can bring at least a sixteenth of the near memory near (8 MiB if that
    /// is less), and mostly a quarter. After that, [`FarError::NearFull`] says to end it or to
    /// [renew](Scope::renew) it. Scopes that bring much near at the same time share that quarter.
    #[inline]
    pub fn enter(&self) -> Scope<'_> {
        Scope::new(self.core())
    }

    /// Puts a value into the heap. The value may be evicted to far memory as soon as no scope uses
    /// it.
    ///
    /// A value with pointers to memory outside of the heap (`String`, `Vec`) takes along only its
    /// own bytes.
    pub fn alloc<T: Send + 'static>(&self, value: T) -> Result<FarBox<T>, AllocError<T>> {
        FarBox::new_in(self.core(), value)
    }

    /// Puts a value that lies in a `Box` into the heap. Its bytes are copied from there, and do not
    /// pass the stack: the value may be larger than the stack. The box is freed.
    ///
    /// The argument of [`Heap::alloc`] is moved through the stack, several times in builds without
    /// optimization. Until the call, the box is memory outside of the near budget;
    /// [`Heap::alloc_with`] needs none. [`FarBox::into_boxed`] is the way back.
    ///
    /// ```
    /// # let heap = farfield::Heap::builder().near(16 << 20).build()?;
    /// // A vector is made on the heap, and its elements can become those of an array there.
    /// let numbers: Box<[u64; 400_000]> = vec![7; 400_000].into_boxed_slice().try_into().unwrap();
    /// let far = heap.alloc_boxed(numbers)?;
    /// assert_eq!(far.read(|numbers| numbers[399_999])?, 7);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn alloc_boxed<T: Send + 'static>(&self, value: Box<T>) -> Result<FarBox<T>, AllocError<Box<T>>> {
        FarBox::from_boxed(self.core(), value)
    }

    /// Makes an array in the heap, in its place: `make` is called with each index, in order, and its
    /// result becomes that element. Only one element at a time passes the stack, so the array may be
    /// larger than the stack. If `make` panics, the elements that it has made are dropped.
    ///
    /// Elements that may fail, or are large themselves, are built by [`Heap::alloc_with`]. The length of
    /// an array is part of its type; [`FarVec`](crate::FarVec) and [`FarArray`](crate::FarArray) have any
    /// length, come by the page and may exceed near memory.
    ///
    /// ```
    /// # let heap = farfield::Heap::builder().near(16 << 20).build()?;
    /// // A stack of 256 KiB, and 3 MiB of numbers, into the heap, out and in again.
    /// let work = move || -> Result<u64, farfield::FarError> {
    ///     let squares = heap.alloc_array_with::<u64, 400_000>(|index| (index * index) as u64)?;
    ///     let near = squares.into_boxed().map_err(|(_, error)| error)?;
    ///     heap.alloc_boxed(near)?.read(|squares| squares[399_999])
    /// };
    /// let last = std::thread::Builder::new().stack_size(256 << 10).spawn(work)?.join().unwrap()?;
    /// assert_eq!(last, 159_999_200_001);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn alloc_array_with<T: Send + 'static, const N: usize>(
        &self,
        mut make: impl FnMut(usize) -> T,
    ) -> Result<FarBox<[T; N]>, FarError> {
        self.alloc_with(|place| place.each(|index, place| Ok(place.write(make(index)))))
    }

    /// Builds a value in the heap, in its place: `build` is given the empty place, and returns the filled
    /// one. Only what it [writes](Uninit::write) at a time passes the stack, so the value may be larger
    /// than the stack.
    ///
    /// A struct is built field by field ([`fields!`](crate::fields)), an array element by element
    /// ([`Uninit::each`]), in each other as deep as types go:
    ///
    /// ```
    /// use farfield::{FarBox, Heap, fields};
    ///
    /// struct Grid {
    ///     name: FarBox<String>,
    ///     rows: [[f32; 1024]; 768], // 3 MiB
    /// }
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let grid = heap.alloc_with(|place| {
    ///     fields!(place, Grid {
    ///         name: |place| Ok(place.write(heap.alloc(String::from("heights"))?)),
    ///         rows: |place| place.each(|row, place| Ok(place.write([row as f32; 1024]))),
    ///     })
    /// })?;
    /// assert_eq!(grid.read(|grid| grid.rows[767][1023])?, 767.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The value is near while it is built, as a [pinned](FarBox::pin) one, and no scope is open for it.
    /// So `build` may use the heap for anything, and at most half of the near memory can be built at a
    /// time. It is not called if there is no room. If it fails or panics, what it has built is dropped,
    /// and the place is free again.
    ///
    /// The filled place is that of this value, and no other one:
    ///
    /// ```compile_fail
    /// # let heap = farfield::Heap::builder().build().unwrap();
    /// let two = heap.alloc_with::<[u64; 2]>(|place| {
    ///     heap.alloc_with::<[u64; 2]>(|_| Ok(place.write([1, 2])))?; // error: lifetime may not live long enough
    ///     todo!()
    /// });
    /// ```
    pub fn alloc_with<T: Send + 'static>(
        &self,
        build: impl for<'p> FnOnce(Uninit<'p, T>) -> Result<Init<'p, T>, FarError>,
    ) -> Result<FarBox<T>, FarError> {
        FarBox::build_in(self.core(), build)
    }

    /// Puts a value that may have several owners into the heap.
    pub fn alloc_shared<T: Send + Sync + 'static>(&self, value: T) -> Result<FarArc<T>, AllocError<T>> {
        self.alloc(value).map(FarArc::from)
    }

    /// Puts a value that may have several owners into the heap. `make` is given a weak pointer to
    /// the value, which leads nowhere until the value is in the heap.
    ///
    /// ```
    /// use farfield::{FarArc, FarWeak, Heap};
    ///
    /// struct Account {
    ///     me: FarWeak<Account>,
    /// }
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let account = heap.alloc_cyclic(|me| Account { me: me.clone() })?;
    /// let again: Option<FarArc<Account>> = account.read(|account| account.me.upgrade())?;
    /// assert!(account.ptr_eq(&again.unwrap()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn alloc_cyclic<T: Send + Sync + 'static>(
        &self,
        make: impl FnOnce(&FarWeak<T>) -> T,
    ) -> Result<FarArc<T>, AllocError<T>> {
        FarWeak::make_cyclic(self.core(), make)
    }

    /// Starts to fetch these values without waiting: for values that will be needed soon.
    ///
    /// Returns the number of pages (or large values, or small values on the [object
    /// plane](crate::Plane::Object)) whose fetch was started. The call is a hint: values that are
    /// near, belong to another heap, or find no free frame are skipped.
    pub fn prefetch<'a, P: FarPtr + 'a>(&self, values: impl IntoIterator<Item = &'a P>) -> usize {
        let core = self.core();
        let mut numbers = values.into_iter().filter_map(|value| value.pointer().number_in(core));
        let mut begun = 0;
        loop {
            // Before anything begins: the iterator is a user's, and may use the values itself, or panic.
            let some: Vec<u32> = numbers.by_ref().take(AHEAD_MAX).collect();
            if some.is_empty() {
                return begun;
            }
            begun += core.prefetch(core.record(), some) as usize;
            if !core.may_go_ahead(core.record()) {
                return begun;
            }
        }
    }

    /// Changes the near budget, in bytes. A smaller budget is reached as pages are evicted, which
    /// takes longer the more of them are in use.
    pub fn set_near(&self, bytes: u64) {
        self.core().set_near(bytes.max(NEAR_MIN));
    }

    /// Returns a snapshot of the heap's counters and sizes.
    pub fn stats(&self) -> Stats {
        self.core().stats()
    }

    /// Returns the state of the pool: degraded while a server of a stripe is gone, or while a
    /// member of a mirror lacks something.
    pub fn health(&self) -> Health {
        self.core().backend.health()
    }

    /// Starts to move all far data to another pool while the heap is used. Returns when the move
    /// has begun, not when it is over.
    ///
    /// `url` has the form that [`Builder::pool`](crate::Builder::pool) takes. Until the move is
    /// over, the present pool holds everything: if the new pool fails, nothing is lost but the
    /// move. During the move both pools need the memory, and each page that is evicted is written
    /// to both. If the new pool is full or dies, the move ends and the present pool stays.
    pub fn switch_pool(&self, url: impl Into<String>) -> Result<PoolSwitch, BuildError> {
        self.core().switch_pool(url.into())
    }

    /// Returns the far address range of a value.
    ///
    /// Returns `None` for a value of another heap, and for a value that can move because it can be
    /// fetched alone. Small values can: all on the object plane, and on the hybrid plane those
    /// [above a size](crate::Builder::alone_above).
    pub fn far_range<P: FarPtr>(&self, value: &P) -> Option<FarRange> {
        let (page, card) = value.pointer().far_place(self.core())?;
        Some(FarRange::in_page(page, usize::from(card) * CARD_BYTES, size_of::<P::Value>()))
    }

    /// Evicts the pages of these ranges, so that the pool has their bytes as they were at some
    /// moment since the call. Pages that are far or clean are not written.
    ///
    /// Blocks. The calling thread must be in no scope of this heap, else this fails with
    /// [`FarError::NearFull`]. It waits for scopes of other threads that began before. It fails
    /// with [`FarError::Stalled`] if they last too long, or if values are pinned or in use all the
    /// time.
    pub fn write_back(&self, ranges: impl IntoIterator<Item = FarRange>) -> Result<(), FarError> {
        self.core().write_back(ranges)
    }

    /// Writes these ranges to the pool as [`Heap::write_back`] does, without blocking the thread.
    ///
    /// Waits for all scopes that began before, also those of other tasks of the thread. A task that
    /// is in a scope itself waits for itself: it gets [`FarError::Stalled`] when the heap's
    /// patience is over. If the future is dropped before its end, some pages may have been written.
    pub async fn write_back_async(&self, ranges: impl IntoIterator<Item = FarRange>) -> Result<(), FarError> {
        self.core().await_write_back(ranges).await
    }

    /// Prepares a call of a function that follows far pointers from this value on. It runs at the
    /// client, or at the memory server beside the values ([`HeapCall::at`]).
    ///
    /// `root` is a reference to a [`FarBox`] or a [`FarArc`], or to a near value with
    /// [`FarView`](crate::FarView) such as a collection. It is borrowed during the call. So
    /// what the function can reach stays as it is meanwhile, and its answer is the same at both
    /// sides.
    pub fn call<'h, F: FarFunction>(
        &'h self,
        root: impl Into<FarRef<'h, F::Root>>,
        argument: F::Argument,
    ) -> HeapCall<'h, F> {
        HeapCall::new(self.core(), root.into(), argument)
    }

    /// Prepares a fold over a collection, an element at a time: a [`FarFold`](crate::FarFold), or a
    /// [`FarTraversal`] that follows pointers. It runs at the client, or at the memory server beside the
    /// elements ([`HeapFold::at`]).
    pub fn fold<'h, F: FarTraversal>(&'h self, over: &'h F::Over, argument: F::Argument) -> HeapFold<'h, F> {
        HeapFold::new(self.core(), over, argument)
    }

    /// Returns where calls of this function with [`Where::Auto`](crate::Where::Auto) run now, and
    /// the estimates behind it.
    pub fn call_choice<F: FarFunction>(&self) -> CallPlacementDecision {
        let choice = self.core().with_placement::<AtServer<F>, _>(|placement| placement.choice());
        match self.core().call_refusal::<AtServer<F>>() {
            Some(_) => CallPlacementDecision { side: Side::Client, is_bound: true, ..choice },
            None => choice,
        }
    }

    /// Returns how many calls of this function ran at a memory server, how many at the client, and why
    /// they did. [`Stats`] has the sums of all functions.
    ///
    /// ```
    /// # use farfield::{ClientReason, FarFunction, FarPlace, FarRef, FarView, Fault, Heap};
    /// # #[derive(FarView)]
    /// # struct Leaf { number: u64 }
    /// # struct Look;
    /// # impl FarFunction for Look {
    /// #     const NAME: &'static str = "example.look";
    /// #     const VERSION: u32 = 1;
    /// #     type Root = Leaf;
    /// #     type Argument = ();
    /// #     type Answer = u64;
    /// #     async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Leaf>, _: ()) -> Result<u64, Fault> {
    /// #         Ok(far.follow(root).await?.number)
    /// #     }
    /// # }
    /// let heap = Heap::builder().near(4 << 20).build()?; // no memory server
    /// let leaf = heap.alloc(Leaf { number: 3 })?;
    /// assert_eq!(heap.call::<Look>(&leaf, ()).run()?, 3);
    /// assert_eq!(heap.call_counts::<Look>().at_client_by(ClientReason::PoolKind), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn call_counts<F: FarFunction>(&self) -> CallCounts {
        self.core().call_counts::<AtServer<F>>()
    }

    /// Checks the invariants of the heap, for tests, and panics if one is violated. No other thread
    /// may use the heap meanwhile (join those that did), and the calling thread must be in no
    /// scope.
    pub fn verify(&self) {
        self.core().verify();
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        let panics = self.core().close();
        // SAFETY: not used afterwards.
        unsafe { HeapInner::unreference(self.core.as_ptr()) };
        panics.resume();
    }
}

impl core::fmt::Debug for Heap {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Heap({:?})", self.stats())
    }
}
