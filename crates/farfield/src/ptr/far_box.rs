//! `FarBox`: one owner, eight bytes.

use super::in_place::build_at;
use super::{FarPtr, Follow, Init, Pinned, PinnedMut, Pointer, Uninit};
use crate::error::{AllocError, FarError};
use crate::heap::{AccessMode, HeapInner, Scope, StreamingHint, drop_far, take, take_with};
use core::marker::PhantomData;
use core::mem::{MaybeUninit, forget};

/// Owns a value of a [`Heap`](crate::Heap), near or far: the far counterpart of `Box`.
///
/// A pointer takes eight bytes, also as an `Option`. It may lie anywhere, inside other far values
/// too. Dropping it drops the value, once: a far value with a destructor is brought near for that.
/// If that is not possible now, the value is dropped later. If its bytes are lost, it is never
/// dropped ([`Stats::lost_values`](crate::Stats::lost_values)).
///
/// A reference ends with its scope. While there is a reference, the value is neither changed nor
/// dropped:
///
/// ```compile_fail,E0505
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let value = heap.alloc(7).unwrap();
/// let scope = heap.enter();
/// let seven = value.get(&scope).unwrap();
/// drop(value); // error: cannot move out of `value` because it is borrowed
/// println!("{seven}");
/// ```
///
/// ```compile_fail,E0502
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let mut value = heap.alloc(7).unwrap();
/// let scope = heap.enter();
/// let seven = value.get(&scope).unwrap();
/// *value.get_mut(&scope).unwrap() = 8; // error: cannot borrow `value` as mutable
/// println!("{seven}");
/// ```
///
/// Values must be `Send + 'static`: they may be dropped on another thread, and live as long as
/// their box:
///
/// ```compile_fail,E0277
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let value = heap.alloc(std::rc::Rc::new(7)); // error: `Rc<i32>` cannot be sent between threads safely
/// ```
#[repr(transparent)]
pub struct FarBox<T: Send + 'static> {
    pointer: Pointer,
    owns: PhantomData<T>,
}

const _: () = assert!(size_of::<FarBox<u8>>() == 8 && size_of::<Option<FarBox<u8>>>() == 8);

impl<T: Send + 'static> FarBox<T> {
    pub(crate) fn new_in(core: &HeapInner, value: T) -> Result<FarBox<T>, AllocError<T>> {
        match core.put_in(value) {
            Ok((number, place)) => Ok(FarBox { pointer: Pointer::new(core, number, place), owns: PhantomData }),
            Err((error, value)) => Err(AllocError { error, value }),
        }
    }

    pub(crate) fn from_boxed(core: &HeapInner, value: Box<T>) -> Result<FarBox<T>, AllocError<Box<T>>> {
        match core.put_in_boxed(value) {
            Ok((number, place)) => Ok(FarBox { pointer: Pointer::new(core, number, place), owns: PhantomData }),
            Err((error, value)) => Err(AllocError { error, value }),
        }
    }

    /// Builds a value in its place: see [`Heap::alloc_with`](crate::Heap::alloc_with).
    pub(crate) fn build_in(
        core: &HeapInner,
        build: impl for<'p> FnOnce(Uninit<'p, T>) -> Result<Init<'p, T>, FarError>,
    ) -> Result<FarBox<T>, FarError> {
        let (number, place) = core.put_in_nothing::<MaybeUninit<T>>()?;
        // Without a destructor: if it is dropped, its place is free.
        let mut empty: FarBox<MaybeUninit<T>> =
            FarBox { pointer: Pointer::new(core, number, place), owns: PhantomData };
        // A pin and no scope: `build` may need room for more than one scope can hold.
        let mut pinned = empty.pin_mut()?;
        // SAFETY: the place is pinned, and has room for a `T`. Nobody else knows of it.
        unsafe { build_at(pinned.as_mut_ptr(), build)? };
        drop(pinned);
        // SAFETY: a pointer to the value that it is from now on. The other one is forgotten.
        let built = unsafe { FarBox::from_pointer(empty.pointer.alias()) };
        forget(empty);
        Ok(built)
    }

    /// Makes a second pointer to the value.
    ///
    /// # Safety
    /// Only one of the two drops the value or takes it out, and the other is not used afterwards.
    /// As long as there are two, the value is changed through neither.
    pub(super) unsafe fn alias(&self) -> FarBox<T> {
        FarBox { pointer: self.pointer.alias(), owns: PhantomData }
    }

    /// Makes a pointer to a value that has others.
    ///
    /// # Safety
    /// A `T` lives there, and the promises of [`FarBox::alias`] hold for all pointers to it.
    pub(super) unsafe fn from_pointer(pointer: Pointer) -> FarBox<T> {
        FarBox { pointer, owns: PhantomData }
    }

    /// Returns the value, and brings it near if it is far. It stays where it is as long as the
    /// scope lasts.
    #[inline]
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a T, FarError> {
        let address = self.pointer.address(scope, AccessMode::Read)?.cast::<T>();
        // SAFETY:
        // - initialised: `new_in` wrote a `T` there, and `self` owns it;
        // - alive: the page was Near after the scope began (`address`), so it keeps its frame until
        //   the scope ends, and the reference borrows the scope; it borrows `self` too, so the
        //   value is not dropped or moved out meanwhile;
        // - shared: a writer has `&mut self`, or writes through interior mutability, which `T`
        //   allows.
        Ok(unsafe { &*address })
    }

    /// Returns the value, to be changed. Brings it near if it is far.
    #[inline]
    pub fn get_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<&'a mut T, FarError> {
        let address = self.pointer.address(scope, AccessMode::Write)?.cast::<T>();
        // SAFETY: as in `get`, and `&mut self` makes it exclusive.
        Ok(unsafe { &mut *address })
    }

    /// Returns the value like [`FarBox::get`], with the hint that it will not be used again soon.
    /// If it has to be brought near, its page is evicted first. On the object plane, small values
    /// that are read in this way are put together in pages of their own.
    pub fn get_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a T, FarError> {
        scope.run_streaming(|hint| {
            self.pointer.note(hint, scope);
            self.get(scope)
        })
    }

    /// Returns the value like [`FarBox::get`], for a task: other tasks run while the value is
    /// fetched.
    ///
    /// ```compile_fail,E0505
    /// # let heap = farfield::Heap::builder().build().unwrap();
    /// let value = heap.alloc(7).unwrap();
    /// let task = async {
    ///     let scope = heap.enter();
    ///     let seven = value.fetch(&scope).await.unwrap();
    ///     drop(scope); // error: cannot move out of `scope` because it is borrowed
    ///     println!("{seven}");
    /// };
    /// ```
    pub async fn fetch<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a T, FarError> {
        let address = self.pointer.address_async(scope, AccessMode::Read).await?.cast::<T>();
        // SAFETY: as in `get`. The reference borrows the scope, so the task that waits with it
        // keeps the scope open; the scope cannot leave its thread, so neither does the task.
        Ok(unsafe { &*address })
    }

    /// Returns the value like [`FarBox::get_mut`], for a task: other tasks run while the value is
    /// fetched.
    ///
    /// ```compile_fail,E0502
    /// # let heap = farfield::Heap::builder().build().unwrap();
    /// let mut value = heap.alloc(7).unwrap();
    /// let task = async {
    ///     let scope = heap.enter();
    ///     let seven = value.fetch_mut(&scope).await.unwrap();
    ///     println!("{:?}", value.get(&scope)); // error: cannot borrow `value` as immutable
    ///     *seven += 1;
    /// };
    /// ```
    pub async fn fetch_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<&'a mut T, FarError> {
        let address = self.pointer.address_async(scope, AccessMode::Write).await?.cast::<T>();
        // SAFETY: as in `fetch`, and `&mut self` makes it exclusive.
        Ok(unsafe { &mut *address })
    }

    /// Returns the value like [`FarBox::fetch`], with the hint that it will not be used again soon:
    /// see [`FarBox::get_once`].
    pub async fn fetch_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a T, FarError> {
        let look = async |hint: &StreamingHint| {
            self.pointer.note(hint, scope);
            self.fetch(scope).await
        };
        scope.fetch_streaming(look).await
    }

    /// Calls `action` with the value, which is near as long as that takes. Needs no scope: it opens
    /// one.
    ///
    /// ```
    /// # let heap = farfield::Heap::builder().near(4 << 20).build()?;
    /// let mut name = heap.alloc(String::from("far"))?;
    /// name.write(|name| name.push_str("field"))?;
    /// assert_eq!(name.read(String::clone)?, "farfield");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The result of `action` cannot refer to the value:
    ///
    /// ```
    /// # let heap = farfield::Heap::builder().near(4 << 20).build().unwrap();
    /// let value = heap.alloc(7).unwrap();
    /// let seven: i32 = value.read(|seven| *seven).unwrap();
    /// ```
    ///
    /// ```compile_fail
    /// # let heap = farfield::Heap::builder().build().unwrap();
    /// let value = heap.alloc(7).unwrap();
    /// let seven: &i32 = value.read(|seven| seven).unwrap(); // error: lifetime may not live long enough
    /// ```
    pub fn read<R>(&self, action: impl FnOnce(&T) -> R) -> Result<R, FarError> {
        self.pointer.with_scope(|scope| self.get(scope).map(action))
    }

    /// Calls `action` like [`FarBox::read`], with the hint that the value will not be used again
    /// soon: see [`FarBox::get_once`].
    pub fn read_once<R>(&self, action: impl FnOnce(&T) -> R) -> Result<R, FarError> {
        self.pointer.with_scope(|scope| self.get_once(scope).map(action))
    }

    /// Calls `action` with the value, to change it. Needs no scope: see [`FarBox::read`].
    pub fn write<R>(&mut self, action: impl FnOnce(&mut T) -> R) -> Result<R, FarError> {
        let core = self.pointer.core();
        // SAFETY: our value keeps the heap.
        let scope = Scope::new(unsafe { &*core });
        self.get_mut(&scope).map(action)
    }

    /// Calls `action` like [`FarBox::write`], with the hint that the value will not be used again
    /// soon: see [`FarBox::get_once`].
    pub fn write_once<R>(&mut self, action: impl FnOnce(&mut T) -> R) -> Result<R, FarError> {
        let core = self.pointer.core();
        // SAFETY: our value keeps the heap.
        let scope = Scope::new(unsafe { &*core });
        let value = scope.run_streaming(|hint| {
            self.pointer.note(hint, &scope);
            self.get_mut(&scope)
        })?;
        Ok(action(value))
    }

    /// Brings the value near and keeps it there, whatever scopes and tasks do, until the guard is
    /// dropped.
    ///
    /// At most half of the near memory can be pinned ([`FarError::PinsFull`]). Other values in the
    /// same page stay near as well.
    ///
    /// ```
    /// # let heap = farfield::Heap::builder().near(4 << 20).build()?;
    /// let table = heap.alloc([7u64; 256])?;
    /// let pinned = table.pin()?;
    /// assert_eq!(pinned[3], 7); // no scope, no check
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The guard must be dropped before the value:
    ///
    /// ```compile_fail,E0505
    /// # let heap = farfield::Heap::builder().build().unwrap();
    /// let value = heap.alloc(7).unwrap();
    /// let pinned = value.pin().unwrap();
    /// drop(value); // error: cannot move out of `value` because it is borrowed
    /// println!("{}", *pinned);
    /// ```
    pub fn pin(&self) -> Result<Pinned<'_, T>, FarError> {
        let (address, pin) = self.pointer.pin(AccessMode::Read)?;
        // SAFETY: as in `get`; the pin keeps the page where it is.
        Ok(Pinned::new(unsafe { &*address.cast() }, pin))
    }

    /// Brings the value near and keeps it there, to be changed: see [`FarBox::pin`].
    ///
    /// ```compile_fail,E0499
    /// # let heap = farfield::Heap::builder().build().unwrap();
    /// let mut value = heap.alloc(7).unwrap();
    /// let mut one = value.pin_mut().unwrap();
    /// let mut other = value.pin_mut().unwrap(); // error: cannot borrow `value` as mutable more than once
    /// *one += *other;
    /// ```
    pub fn pin_mut(&mut self) -> Result<PinnedMut<'_, T>, FarError> {
        let (address, pin) = self.pointer.pin(AccessMode::Write)?;
        // SAFETY: as in `pin`, and `&mut self` makes it exclusive.
        Ok(PinnedMut::new(unsafe { &mut *address.cast() }, pin))
    }

    /// Pins the value like [`FarBox::pin`], for a task of any executor. The future holds no scope,
    /// so a task that waits for it, or has its result, can move to another thread.
    pub async fn fetch_pinned(&self) -> Result<Pinned<'_, T>, FarError> {
        let pin = self.pointer.arrive_pinned(AccessMode::Read).await?;
        // SAFETY: as in `pin`.
        Ok(Pinned::new(unsafe { &*self.pointer.within(&pin).cast() }, pin))
    }

    /// Pins the value like [`FarBox::pin_mut`], for a task of any executor: see
    /// [`FarBox::fetch_pinned`].
    pub async fn fetch_pinned_mut(&mut self) -> Result<PinnedMut<'_, T>, FarError> {
        let pin = self.pointer.arrive_pinned(AccessMode::Write).await?;
        // SAFETY: as in `pin_mut`.
        Ok(PinnedMut::new(unsafe { &mut *self.pointer.within(&pin).cast() }, pin))
    }

    /// Takes the value out of the heap. If it cannot be brought near, it stays where it is, and the
    /// box is given back.
    pub fn into_inner(self) -> Result<T, (FarBox<T>, FarError)> {
        let (core, number, card) = self.pointer.parts();
        // SAFETY: `self` owns a `T` there, which keeps the heap. On success it is forgotten.
        match unsafe { take(core, number, card) } {
            Ok(value) => {
                forget(self);
                Ok(value)
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Takes the value out of the heap into a `Box`. Its bytes are copied from where they are near,
    /// and do not pass the stack, as those of [`FarBox::into_inner`] do. So the value may be larger
    /// than the stack. The box is memory outside of the near budget.
    pub fn into_boxed(self) -> Result<Box<T>, (FarBox<T>, FarError)> {
        let (core, number, card) = self.pointer.parts();
        let mut boxed = Box::<T>::new_uninit();
        let target = boxed.as_mut_ptr();
        // SAFETY: as in `into_inner`; the value is moved into the box, which is another place.
        match unsafe { take_with(core, number, card, |at| target.copy_from_nonoverlapping(at.cast(), 1)) } {
            Ok(()) => {
                forget(self);
                // SAFETY: just filled.
                Ok(unsafe { boxed.assume_init() })
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Begins to bring the value near, and does not wait: see [`Heap::prefetch`](crate::Heap::prefetch).
    pub fn prefetch(&self) {
        self.pointer.prefetch();
    }

    /// Marks the value as not needed soon: its page is evicted before others. On the object plane,
    /// small values do not need this hint: those in use stay near anyway.
    pub fn cold(&self) {
        self.pointer.mark_cold();
    }
}

impl<T: Send + 'static> FarPtr for FarBox<T> {
    type Value = T;
}

impl<T: Send + 'static> Follow for FarBox<T> {
    fn pointer(&self) -> &Pointer {
        &self.pointer
    }
}

impl<T: Send + 'static> Drop for FarBox<T> {
    fn drop(&mut self) {
        let (core, number, card) = self.pointer.parts();
        // SAFETY: `self` owns a `T` there, which keeps the heap; nobody uses it after this.
        unsafe { drop_far::<T>(core, number, card) };
    }
}

impl<T: Send + 'static> core::fmt::Debug for FarBox<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarBox({:?})", self.pointer)
    }
}
