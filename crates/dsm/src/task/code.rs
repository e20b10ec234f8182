//! ShippedCode that travels: a place in the section of trampolines, and a hash of its types.
//!
//! Each body of a task, and each destructor, has an instance of a trampoline in one section of the
//! program. All nodes run one build, so an offset in that section means the same code in each of
//! them, wherever it is loaded. Equal functions may be merged by the compiler; a hash of the types
//! tells them apart.
#![allow(unsafe_code, reason = "code is called by its offset, and values are bytes")]

use crate::message::CodeRef;
use crate::node::with_current;
use crate::ptr::MemberType;
use crate::{Far, FarGroup, Here, OwnedObject, Portable};
use core::any::{TypeId, type_name};
use core::hash::{Hash, Hasher};
use core::marker::PhantomData;
use core::mem::{ManuallyDrop, needs_drop, size_of};
use core::ptr::{NonNull, slice_from_raw_parts_mut};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use twox_hash::XxHash3_128;

unsafe extern "C" {
    /// Begin and end of the section. The linker defines both.
    #[link_name = "__start_farfield_share"]
    static SECTION_START: u8;
    #[link_name = "__stop_farfield_share"]
    static SECTION_END: u8;
}

/// What a trampoline is asked to do.
pub(crate) enum TrampolineOp<'o, 'h> {
    /// Say for which types it is.
    Describe(&'o mut Description),
    /// Read the arguments from the first address, which takes them, run the body, and write its
    /// result to the second address.
    Run { here: &'o Here<'h>, arguments: *const u8, result: *mut u8 },
    /// Drop so many values that lie side by side at this address: a result, or an object.
    Drop(*mut u8, usize),
    /// Say how objects of its type are walked.
    Member(&'o mut Option<MemberType>),
    /// Pass what so many values own that lie side by side at this address: arguments, or what it drops.
    Visit { values: *const u8, count: usize, are_arguments: bool, visit: &'o mut dyn FnMut(OwnedObject) },
}

/// Types of a trampoline.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Description {
    pub(crate) types: u128,
    pub(crate) argument_bytes: usize,
    pub(crate) result_bytes: usize,
}

type Trampoline = unsafe fn(TrampolineOp<'_, '_>);

/// Returns the identity of a type, whatever its lifetimes are.
fn erased<T: ?Sized>() -> TypeId {
    trait Typed {
        fn id(&self) -> TypeId
        where
            Self: 'static;
    }
    impl<T: ?Sized> Typed for PhantomData<T> {
        fn id(&self) -> TypeId
        where
            Self: 'static,
        {
            TypeId::of::<T>()
        }
    }
    let typed = PhantomData::<T>;
    let typed: &dyn Typed = &typed;
    // SAFETY: nothing of the type is used but its identity, which does not depend on lifetimes.
    let typed = unsafe { core::mem::transmute::<&dyn Typed, &(dyn Typed + 'static)>(typed) };
    typed.id()
}

/// Returns a hash of a type, which is the same in all processes of a build.
pub(crate) fn types_of<T>() -> u128 {
    struct TypeBytes(Vec<u8>);
    impl Hasher for TypeBytes {
        fn write(&mut self, bytes: &[u8]) {
            self.0.extend_from_slice(bytes);
        }
        fn finish(&self) -> u64 {
            0
        }
    }
    let mut bytes = TypeBytes(type_name::<T>().as_bytes().to_vec());
    erased::<T>().hash(&mut bytes);
    XxHash3_128::oneshot(&bytes.0)
}

/// # Safety
/// For `Run`: the arguments are the bytes of a value of `A` that nobody else uses, there is room
/// for an `R`, and `F` has no size. For `Drop`: a value of `R` lies there that nobody else uses. For
/// `Visit`: a value of `A` or `R` lies there, aligned, to which nobody writes.
#[unsafe(link_section = "farfield_share")]
#[inline(never)]
unsafe fn run_body<F, A, R>(op: TrampolineOp<'_, '_>)
where
    F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy,
    A: Portable,
    R: Far,
{
    match op {
        TrampolineOp::Member(_) => {}
        TrampolineOp::Describe(description) => {
            *description = Description {
                types: types_of::<(F, A, R)>(),
                argument_bytes: size_of::<A>(),
                result_bytes: size_of::<R>(),
            };
        }
        TrampolineOp::Run { here, arguments, result } => {
            // SAFETY: a type without size is made of nothing; `F` is one, and whoever made the code
            // had a value of it.
            let body = unsafe { NonNull::<F>::dangling().read() };
            // SAFETY: the caller's promise.
            let arguments = unsafe { arguments.cast::<A>().read_unaligned() };
            let value = body(here, arguments);
            // SAFETY: the caller's promise.
            unsafe { result.cast::<R>().write_unaligned(value) };
        }
        // SAFETY: the caller's promise. The value may lie anywhere.
        TrampolineOp::Drop(value, _) => drop(unsafe { value.cast::<R>().read_unaligned() }),
        TrampolineOp::Visit { values, are_arguments: true, visit, .. } => {
            // SAFETY: the caller's promise.
            let arguments = unsafe { &*values.cast::<A>() };
            arguments.visit_sent(visit);
        }
        TrampolineOp::Visit { values, visit, .. } => {
            // SAFETY: the caller's promise.
            let result = unsafe { &*values.cast::<R>() };
            result.visit_sent(visit);
        }
    }
}

/// # Safety
/// For `Drop`: so many values of `T` lie there that nobody else uses. For `Visit`: as many, to which nobody
/// writes. For `Run`: never.
#[unsafe(link_section = "farfield_share")]
#[inline(never)]
unsafe fn drop_object<T: FarGroup>(op: TrampolineOp<'_, '_>) {
    match op {
        TrampolineOp::Member(member) => *member = Some(MemberType::of::<T>()),
        TrampolineOp::Describe(description) => {
            *description =
                Description { types: types_of::<PhantomData<T>>(), argument_bytes: 0, result_bytes: size_of::<T>() };
        }
        TrampolineOp::Run { .. } => {}
        // SAFETY: the caller's promise; objects are aligned.
        TrampolineOp::Drop(object, count) => unsafe {
            slice_from_raw_parts_mut(object.cast::<T>(), count).drop_in_place()
        },
        TrampolineOp::Visit { values, count, visit, .. } => {
            // SAFETY: the caller's promise; objects are aligned.
            let values = unsafe { core::slice::from_raw_parts(values.cast::<T>(), count) };
            values.iter().for_each(|value| value.visit_owned(visit));
        }
    }
}

/// # Safety
/// For `Drop`: a group that begins with a `T` lies there, which is elsewhere now. For `Run`: never.
#[unsafe(link_section = "farfield_share")]
#[inline(never)]
unsafe fn release_group<T: FarGroup>(op: TrampolineOp<'_, '_>) {
    /// Distinguishes this code from the destructor of the type.
    struct Released<T>(PhantomData<T>);
    match op {
        TrampolineOp::Describe(description) => {
            *description = Description { types: types_of::<Released<T>>(), argument_bytes: 0, result_bytes: 0 };
        }
        TrampolineOp::Run { .. } | TrampolineOp::Member(_) | TrampolineOp::Visit { .. } => {}
        TrampolineOp::Drop(object, _) => {
            // SAFETY: the caller's promise.
            with_current(|node| unsafe { node.release_members(object, MemberType::of::<T>()) });
        }
    }
}

/// Code of this build.
#[derive(Clone, Copy)]
pub(crate) struct ShippedCode {
    trampoline: Trampoline,
    pub(crate) description: Description,
    /// Number of values that a destructor drops.
    count: usize,
}

impl ShippedCode {
    /// Returns the code of a task's body. Refuses, when it is compiled, bodies that capture
    /// something.
    pub(crate) fn of_body<F, A, R>(_body: F) -> ShippedCode
    where
        F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy,
        A: Portable,
        R: Far,
    {
        const {
            assert!(size_of::<F>() == 0, "a task's body captures nothing: pass what it needs in the arguments");
        };
        ShippedCode::of(run_body::<F, A, R>, 1)
    }

    /// Returns the destructor of so many values of a type that lie side by side; `None` if they need
    /// none.
    pub(crate) fn of_destructor<T: FarGroup>(count: usize) -> Option<ShippedCode> {
        (needs_drop::<T>() && count > 0).then(|| ShippedCode::of(drop_object::<T>, count))
    }

    /// Returns the code by which nodes know a type of objects.
    pub(crate) fn of_object<T: FarGroup>() -> ShippedCode {
        ShippedCode::of(drop_object::<T>, 1)
    }

    /// Returns what frees the members of a group that is elsewhere now.
    pub(crate) fn of_release<T: FarGroup>() -> ShippedCode {
        ShippedCode::of(release_group::<T>, 1)
    }

    /// Returns how objects of the type are walked that the code is for.
    pub(crate) fn member_type(self) -> Option<MemberType> {
        let mut member = None;
        // SAFETY: a trampoline may always be asked for its type.
        unsafe { (self.trampoline)(TrampolineOp::Member(&mut member)) };
        member
    }

    fn of(trampoline: Trampoline, count: usize) -> ShippedCode {
        let mut description = Description::default();
        // SAFETY: a trampoline may always be asked for its types.
        unsafe { trampoline(TrampolineOp::Describe(&mut description)) };
        ShippedCode { trampoline, description, count }
    }

    /// Returns what another node finds the code by.
    pub(crate) fn reference(self) -> CodeRef {
        let offset = self.trampoline as usize - section().start;
        let offset = u32::try_from(offset).expect("a program's code is small");
        CodeRef { offset, types: self.description.types, count: self.count as u64 }
    }

    /// Finds code of the build that has made the reference; `None` if it is for other types. The
    /// builds must have been compared.
    pub(crate) fn find(reference: CodeRef) -> Option<ShippedCode> {
        let address = section().start + reference.offset as usize;
        if !section().contains(&address) {
            return None;
        }
        // SAFETY: the sender is of the same build, where a trampoline begins at this offset.
        let trampoline = unsafe { core::mem::transmute::<*const (), Trampoline>(address as *const ()) };
        Some(ShippedCode::of(trampoline, reference.count as usize))
            .filter(|code| code.description.types == reference.types)
    }

    /// Runs a body on the bytes of its arguments. Returns the bytes of its result, or what it
    /// panicked with.
    ///
    /// # Safety
    /// The arguments are the bytes of a value that nobody else uses, of the type that the body
    /// takes.
    pub(crate) unsafe fn run(self, here: &Here<'_>, arguments: &[u8]) -> Result<Value, Box<dyn Any + Send>> {
        assert_eq!(arguments.len(), self.description.argument_bytes, "builds were compared");
        let mut result = vec![0; self.description.result_bytes];
        let op = TrampolineOp::Run { here, arguments: arguments.as_ptr(), result: result.as_mut_ptr() };
        // SAFETY: the caller's promise, and room for the result.
        catch_unwind(AssertUnwindSafe(|| unsafe { (self.trampoline)(op) }))?;
        initialise(&mut result);
        Ok(Value { bytes: result, code: self })
    }

    /// Returns the size of what the code drops, in bytes.
    pub(crate) fn dropped_bytes(self) -> usize {
        self.description.result_bytes.saturating_mul(self.count)
    }

    /// Returns the objects that are owned by the arguments of a task, or else by what the code drops: so
    /// many bytes of values.
    ///
    /// # Safety
    /// They are the bytes of such values, and nobody drops them meanwhile.
    pub(crate) unsafe fn owned_by(self, values: &[u8], are_arguments: bool) -> Vec<OwnedObject> {
        // Values are visited where they are aligned.
        let mut aligned = vec![0u128; values.len().div_ceil(size_of::<u128>()).max(1)];
        let at = aligned.as_mut_ptr().cast::<u8>();
        // SAFETY: room for so many bytes.
        unsafe { core::ptr::copy_nonoverlapping(values.as_ptr(), at, values.len()) };
        let mut owned = Vec::new();
        let mut visit = |object| owned.push(object);
        let op = TrampolineOp::Visit { values: at, count: self.count, are_arguments, visit: &mut visit };
        // SAFETY: the caller's promise.
        unsafe { (self.trampoline)(op) };
        owned
    }

    /// Drops an object.
    ///
    /// # Safety
    /// It is of the destructor's type and length, lies there, and nobody else uses it.
    pub(crate) unsafe fn drop_at(self, object: *mut u8) {
        // What a destructor panics with has been printed. The object is gone all the same.
        // SAFETY: the caller's promise.
        let _ = catch_unwind(AssertUnwindSafe(|| unsafe { (self.trampoline)(TrampolineOp::Drop(object, self.count)) }));
    }
}

/// Result of a task, as bytes that own what the result owns.
pub(crate) struct Value {
    bytes: Vec<u8>,
    code: ShippedCode,
}

impl Value {
    /// Makes the value that these bytes are.
    ///
    /// # Safety
    /// They are the bytes of a result of that code, which nobody else uses.
    pub(crate) unsafe fn from_bytes(bytes: Vec<u8>, code: ShippedCode) -> Value {
        Value { bytes, code }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn code(&self) -> ShippedCode {
        self.code
    }

    /// Returns the objects that the value owns.
    pub(crate) fn owned(&self) -> Vec<OwnedObject> {
        // SAFETY: the bytes of a value of the code's type, which is borrowed.
        unsafe { self.code.owned_by(&self.bytes, false) }
    }

    /// Returns the bytes, which own what the value owned.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        core::mem::take(&mut ManuallyDrop::new(self).bytes)
    }

    /// Returns the value.
    ///
    /// # Safety
    /// `R` is the result of the code.
    pub(crate) unsafe fn into_result<R: Far>(self) -> R {
        let bytes = self.into_bytes();
        assert_eq!(bytes.len(), size_of::<R>());
        // SAFETY: the caller's promise.
        unsafe { bytes.as_ptr().cast::<R>().read_unaligned() }
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: nobody has taken the value, and nobody else uses it.
        unsafe { self.code.drop_at(self.bytes.as_mut_ptr()) };
    }
}

/// Returns the bytes of a value, which own what it owns.
pub(crate) fn bytes_of<T: Portable>(value: T) -> Vec<u8> {
    object_bytes_of(value)
}

/// Returns the bytes of a value that stays in this process, which own what it owns.
pub(crate) fn object_bytes_of<T>(value: T) -> Vec<u8> {
    let value = ManuallyDrop::new(value);
    let mut bytes = vec![0; size_of::<T>()];
    // SAFETY: as many bytes as the value has. What is between its fields is copied as it is.
    unsafe { core::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), bytes.as_mut_ptr(), size_of::<T>()) };
    initialise(&mut bytes);
    bytes
}

/// Makes bytes initialised, with any value, that were copied from between the fields of a value.
pub(crate) fn initialise(bytes: &mut [u8]) {
    // For the compiler these instructions, of which there are none, may have written all of them.
    // SAFETY: nothing is done.
    unsafe { core::arch::asm!("/* {0} */", in(reg) bytes.as_mut_ptr(), options(nostack, preserves_flags)) };
}

/// Returns the addresses of the section.
fn section() -> core::ops::Range<usize> {
    (&raw const SECTION_START) as usize..(&raw const SECTION_END) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(_: &Here<'_>, (one, other): (u64, u32)) -> u64 {
        one + u64::from(other)
    }

    #[test]
    fn code_is_found_by_its_offset_and_by_its_types_only() {
        let code = ShippedCode::of_body(sum);
        let reference = code.reference();
        let found = ShippedCode::find(reference).expect("it is there");
        assert_eq!(found.description, code.description);
        assert_eq!((code.description.argument_bytes, code.description.result_bytes), (16, 8));
        assert!(ShippedCode::find(CodeRef { types: reference.types ^ 1, ..reference }).is_none());
        assert!(ShippedCode::find(CodeRef { offset: u32::MAX, ..reference }).is_none());
        // Bodies that do the same with other types.
        let other = ShippedCode::of_body(|_: &Here<'_>, (one, other): (i64, i32)| one + i64::from(other));
        assert_ne!(other.description.types, code.description.types);
        assert!(ShippedCode::of_destructor::<u64>(1).is_none());
    }
}
