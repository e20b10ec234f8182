//! `FarBox`: one owner, eight bytes.

use crate::error::{AllocError, FarError};
use crate::heap::{Arrival, Core, Scope, Want, drop_far, heap_of, take};
use core::marker::PhantomData;
use core::num::NonZeroU32;
use core::sync::atomic::{AtomicU32, Ordering};
use farfield_core::heap::{FrameWord, Place};

/// Owns a value of a [`Heap`](crate::Heap), near or far, as `Box` owns one of the memory.
///
/// Eight bytes, also as an `Option`; it may lie anywhere, inside other far values too. Dropping it drops the value, once,
/// wherever it is: a far value with a destructor comes near for it. If that is not possible now, it happens later; if its
/// bytes are lost, never ([`Stats::lost_values`](crate::Stats::lost_values)).
///
/// A reference ends with its scope, and the value does not change or go while there is one:
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
/// Values must be able to leave the thread, and to live as long as their box:
///
/// ```compile_fail,E0277
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let value = heap.alloc(std::rc::Rc::new(7)); // error: `Rc<i32>` cannot be sent between threads safely
/// ```
#[repr(C, align(8))]
pub struct FarBox<T: Send + 'static> {
    /// The lower half of the slot word, a [`Place`]. Its guess is corrected while others read.
    place: AtomicU32,
    /// The upper half: the number of its page, or on the object plane of its handle, among those of all heaps. Never 0, and
    /// never changes.
    number: NonZeroU32,
    owns: PhantomData<T>,
}

const _: () = assert!(size_of::<FarBox<u8>>() == 8 && size_of::<Option<FarBox<u8>>>() == 8);

impl<T: Send + 'static> FarBox<T> {
    pub(crate) fn new_in(core: &Core, value: T) -> Result<FarBox<T>, AllocError<T>> {
        match core.put_in(value) {
            Ok((number, place)) => {
                let Some(number) = NonZeroU32::new(core.first_page + number) else { unreachable!("0 is nobody's") };
                Ok(FarBox { place: AtomicU32::new(place.0), number, owns: PhantomData })
            }
            Err((error, value)) => Err(AllocError { error, value }),
        }
    }

    /// The value, brought near if it is far. It stays where it is as long as the scope lasts.
    #[inline]
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a T, FarError> {
        let address = self.address(scope, Want::Read)?;
        // SAFETY:
        // - initialised: `new_in` wrote a `T` there, and `self` owns it;
        // - alive: the page was Near after the scope began (`address`), so it keeps its frame until the scope ends, and the
        //   reference borrows the scope; it borrows `self` too, so the value is not dropped or moved out meanwhile;
        // - shared: whoever writes has `&mut self`, or does so through interior mutability, which `T` allows.
        Ok(unsafe { &*address })
    }

    /// The value, to be changed.
    #[inline]
    pub fn get_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<&'a mut T, FarError> {
        let address = self.address(scope, Want::Write)?;
        // SAFETY: as in `get`, and `&mut self` makes it exclusive.
        Ok(unsafe { &mut *address })
    }

    /// As [`FarBox::get`], for a task: while the value is on its way, others run. (Small values of a heap of the
    /// [object plane](crate::Plane::Object) make the thread wait.)
    pub async fn fetch<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a T, FarError> {
        let address = self.arrival(scope, Want::Read).await?;
        // SAFETY: as in `get`. The reference borrows the scope, so the task that waits with it keeps the scope open; the scope
        // cannot leave its thread, so neither does the task.
        Ok(unsafe { &*address })
    }

    /// As [`FarBox::get_mut`], for a task.
    pub async fn fetch_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<&'a mut T, FarError> {
        let address = self.arrival(scope, Want::Write).await?;
        // SAFETY: as in `fetch`, and `&mut self` makes it exclusive.
        Ok(unsafe { &mut *address })
    }

    /// Where the value is, as long as the scope lasts, when it is there.
    async fn arrival(&self, scope: &Scope<'_>, want: Want) -> Result<*mut T, FarError> {
        let place = Place(self.place.load(Ordering::Relaxed));
        let Some(page) = scope.number(self.number.get()) else {
            let place = scope.core.find_object(scope, self.number.get(), &self.place, want)?;
            scope.mark_used();
            // SAFETY: as in `address`.
            return Ok(unsafe { scope.arena.add(place.offset()) }.cast());
        };
        // SAFETY: as in `address`.
        let word = FrameWord(unsafe { &*scope.words.add(page as usize) }.load(Ordering::Acquire));
        let found = if want == Want::Write { word.confirms_dirty(place) } else { word.confirms(place) };
        if found {
            scope.mark_used();
            // SAFETY: as in `address`.
            return Ok(unsafe { scope.arena.add(place.offset()) }.cast());
        }
        let frame = Arrival::new(scope, page, want).await?;
        scope.mark_used();
        let place = scope.core.guess(scope.record, &self.place, frame);
        // SAFETY: as in `address`.
        Ok(unsafe { scope.arena.add(place.offset()) }.cast())
    }

    /// Where the value is, as long as the scope lasts.
    #[inline]
    fn address(&self, scope: &Scope<'_>, want: Want) -> Result<*mut T, FarError> {
        let mut place = Place(self.place.load(Ordering::Relaxed));
        let page = match scope.number(self.number.get()) {
            Some(page) => page,
            None => {
                let place = scope.core.find_object(scope, self.number.get(), &self.place, want)?;
                scope.mark_used();
                // SAFETY: as below.
                return Ok(unsafe { scope.arena.add(place.offset()) }.cast());
            }
        };
        // SAFETY: `page` is below `scope.pages`, the length of the table.
        let word = unsafe { &*scope.words.add(page as usize) };
        // Acquire: who brought the page has filled the frame.
        let word = FrameWord(word.load(Ordering::Acquire));
        let found = if want == Want::Write { word.confirms_dirty(place) } else { word.confirms(place) };
        if !found {
            place = scope.core.find(scope, page, &self.place, want)?;
        }
        scope.mark_used();
        // SAFETY: the word names a frame, and a card lies within its frame, so this is inside the arena.
        Ok(unsafe { scope.arena.add(place.offset()) }.cast())
    }

    /// Takes the value out of the heap. If it cannot be brought near, it stays where it is.
    pub fn into_inner(self) -> Result<T, (FarBox<T>, FarError)> {
        let (core, number, card) = self.parts();
        // SAFETY: `self` owns a `T` there, which keeps the heap. On success it is forgotten.
        match unsafe { take(core, number, card) } {
            Ok(value) => {
                core::mem::forget(self);
                Ok(value)
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Begins to bring the value near, and does not wait: see [`Heap::prefetch`](crate::Heap::prefetch).
    pub fn prefetch(&self) {
        let (core, number, _) = self.parts();
        // SAFETY: our value keeps the heap.
        let core = unsafe { &*core };
        core.prefetch(core.record(), [number]);
    }

    /// Its page's number within this heap.
    pub(crate) fn page_in(&self, core: &Core) -> Option<u32> {
        let page = self.number.get().wrapping_sub(core.first_page);
        (page < core.pages).then_some(page)
    }

    /// Heap, number within the heap, and card.
    fn parts(&self) -> (*const Core, u32, u8) {
        let number = self.number.get();
        let core = heap_of(number);
        // SAFETY: our value keeps the heap.
        let first = unsafe { &*core }.first_page;
        (core, number - first, Place(self.place.load(Ordering::Relaxed)).card())
    }
}

impl<T: Send + 'static> Drop for FarBox<T> {
    fn drop(&mut self) {
        let (core, number, card) = self.parts();
        // SAFETY: `self` owns a `T` there, which keeps the heap; nobody uses it after this.
        unsafe { drop_far::<T>(core, number, card) };
    }
}

impl<T: Send + 'static> core::fmt::Debug for FarBox<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarBox({})", self.number)
    }
}
