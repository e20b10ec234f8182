//! Functions over far pointers that change values, and how they run at a memory server: as functions
//! that read, whose answer says what is to change.

use super::function::{AtServer, FarFunction};
use super::overlay::{ChangeList, ChangeStop, OverlayLimits};
use super::place::FarPlace;
use super::place_mut::{FarPlaceMut, OverlayPlace};
use super::view_mut::{Changeable, FarMut, FarViewMut};
use super::view_traits::FarRef;
use core::future::{Future, poll_fn};
use core::marker::PhantomData;
use core::pin::pin;
use core::task::Poll;
use farfield_core::wire::CallBody;
use farfield_wic::Fault;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// An async function that follows far pointers and changes plain fields of the values that it
/// reaches, at the client or at the memory server beside them.
/// [`Heap::call_mut`](crate::Heap::call_mut) calls it.
///
/// A call changes all that its function has stored, or nothing: nothing if the function passes on a
/// fault, panics, takes too many steps or too long, or loses its server. A server that runs it has
/// [`AtServerMut`] of it in its registry.
///
/// ```
/// use farfield::{FarBox, FarFunctionMut, FarMut, FarPlaceMut, FarView, FarViewMut, Fault, Heap};
///
/// #[derive(FarView, FarViewMut)]
/// struct Node {
///     key: u64,
///     value: u32,
///     next: Option<FarBox<Node>>,
/// }
///
/// /// Replaces the value of a key in a list, and returns the one before.
/// struct Replace;
///
/// impl FarFunctionMut for Replace {
///     const NAME: &'static str = "example.replace";
///     const VERSION: u32 = 1;
///     type Root = Node;
///     type Argument = (u64, u32);
///     type Answer = Option<u32>;
///
///     async fn run<P: FarPlaceMut>(
///         far: &P,
///         first: FarMut<'_, Node>,
///         (key, value): (u64, u32),
///     ) -> Result<Option<u32>, Fault> {
///         let mut next = Some(first);
///         while let Some(pointer) = next {
///             let node = far.follow_mut(pointer).await?;
///             if node.key == key {
///                 return far.change(pointer, |node| Some(std::mem::replace(&mut node.value, value))).await;
///             }
///             next = node.next;
///         }
///         Ok(None)
///     }
/// }
///
/// let heap = Heap::builder().near(4 << 20).build()?;
/// let mut first = heap.alloc(Node { key: 0, value: 0, next: None })?;
/// for key in 1..100 {
///     first = heap.alloc(Node { key, value: 7 * key as u32, next: Some(first) })?;
/// }
/// assert_eq!(heap.call_mut::<Replace>(&mut first, (12, 5)).run()?, Some(84));
/// assert_eq!(heap.call_mut::<Replace>(&mut first, (12, 6)).run()?, Some(5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait FarFunctionMut: 'static {
    /// Name of the function at servers, at most 64 bytes. Names that begin with `ff.` are reserved.
    const NAME: &'static str;
    /// Version, which changes when the argument, the answer or their meaning changes. Other layouts
    /// of the types that the function meets are noticed without that.
    const VERSION: u32;
    /// Type of the value with which the function begins.
    type Root: FarViewMut;
    /// Argument; encoded, at most 64 KiB at a server, less what the call needs itself.
    type Argument: Clone + Serialize + DeserializeOwned + Send;
    /// Answer; encoded, at most 64 KiB at a server, together with the changes.
    type Answer: Serialize + DeserializeOwned + Send;

    /// Runs the function. It may pass on faults of its place, which undoes its changes. Errors of its
    /// own belong into the answer, and undo nothing.
    fn run<P: FarPlaceMut>(
        far: &P,
        root: FarMut<'_, Self::Root>,
        argument: Self::Argument,
    ) -> impl Future<Output = Result<Self::Answer, Fault>>;
}

/// A [`FarFunctionMut`] as a function of a memory server, for its
/// [`Registry`](farfield_wic::Registry): see [`AtServer`].
pub type AtServerMut<F> = AtServer<Changing<F>>;

/// A function that changes values, as one that reads them and answers with the changes.
#[doc(hidden)]
#[derive(Debug)]
pub struct Changing<F>(PhantomData<F>);

/// Argument of a function, with the limits of its changes.
#[doc(hidden)]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChangingArgument<A> {
    pub(super) limits: OverlayLimits,
    pub(super) argument: A,
}

/// Answer of a function, with what is to change.
#[doc(hidden)]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Changed<A> {
    /// The function has ended, and wants these changes.
    Done(A, ChangeList),
    /// The function has stored what it must not.
    Stopped(ChangeStop),
}

impl<F: FarFunctionMut> FarFunction for Changing<F> {
    const NAME: &'static str = F::NAME;
    const VERSION: u32 = F::VERSION;
    type Root = Changeable<F::Root>;
    type Argument = ChangingArgument<F::Argument>;
    type Answer = Changed<F::Answer>;

    async fn run<P: FarPlace>(
        far: &P,
        root: FarRef<'_, Changeable<F::Root>>,
        call: ChangingArgument<F::Argument>,
    ) -> Result<Changed<F::Answer>, Fault> {
        let mut limits = call.limits;
        if !root.is_here {
            // More would not be answered. So a caller cannot have a server keep more, either.
            limits.bytes_max = limits.bytes_max.min(CallBody::ANSWER_BYTES_MAX);
        }
        let place = OverlayPlace::new::<F::Root>(far, limits);
        let ended = {
            let mut function = pin!(F::run(&place, FarMut(root), call.argument));
            poll_fn(|context| {
                let polled = function.as_mut().poll(context);
                match place.stopped() {
                    Some(stop) => Poll::Ready(Err(stop)),
                    None => polled.map(Ok),
                }
            })
            .await
        };
        match ended {
            Ok(answer) => Ok(Changed::Done(answer?, place.into_list())),
            Err(stop) => Ok(Changed::Stopped(stop)),
        }
    }
}
