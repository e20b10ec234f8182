//! Functions over far pointers, and how they run at a memory server.

use super::part::RootImage;
use super::place::{FarPlace, FarSpan, RegionPlace, RegionStop};
use super::reach::ServerPages;
use super::view_traits::{FarRef, FarView, ViewTypes};
use core::future::{Future, poll_fn};
use core::marker::PhantomData;
use core::pin::pin;
use core::task::Poll;
use farfield_wic::{Fault, Function, Place};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// An async function that follows far pointers, and runs at the client or at the memory server
/// beside the values. [`Heap::call`](crate::Heap::call) calls it.
///
/// It only reads. It waits for nothing but its place, and a server ends it when it takes too many
/// steps or too long. A server that runs it has [`AtServer`] of it in its registry.
///
/// ```
/// use farfield::{FarBox, FarFunction, FarPlace, FarRef, FarView, Fault, Heap};
///
/// #[derive(FarView)]
/// struct Node {
///     key: u64,
///     value: u32,
///     next: Option<FarBox<Node>>,
/// }
///
/// /// Finds the value of a key in a list.
/// struct Find;
///
/// impl FarFunction for Find {
///     const NAME: &'static str = "example.find";
///     const VERSION: u32 = 1;
///     type Root = Node;
///     type Argument = u64;
///     type Answer = Option<u32>;
///
///     async fn run<P: FarPlace>(far: &P, first: FarRef<'_, Node>, key: u64) -> Result<Option<u32>, Fault> {
///         let mut next = Some(first);
///         while let Some(pointer) = next {
///             let node = far.follow(pointer).await?;
///             if node.key == key {
///                 return Ok(Some(node.value));
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
/// assert_eq!(heap.call::<Find>(&first, 12).run()?, Some(84));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait FarFunction: 'static {
    /// Name of the function at servers, at most 64 bytes. Names that begin with `ff.` are reserved.
    const NAME: &'static str;
    /// Version, which changes when the argument, the answer or their meaning changes. Other layouts
    /// of the types that the function meets are noticed without that.
    const VERSION: u32;
    /// Type of the value with which the function begins.
    type Root: FarView;
    /// Argument; encoded, at most 64 KiB at a server, less what the call needs itself.
    type Argument: Clone + Serialize + DeserializeOwned + Send;
    /// Answer; encoded, at most 64 KiB at a server.
    type Answer: Serialize + DeserializeOwned + Send;

    /// Runs the function. It may pass on faults of its place; errors of its own belong into the
    /// answer.
    fn run<P: FarPlace>(
        far: &P,
        root: FarRef<'_, Self::Root>,
        argument: Self::Argument,
    ) -> impl Future<Output = Result<Self::Answer, Fault>>;
}

/// A [`FarFunction`] as a function of a memory server, for its
/// [`Registry`](farfield_wic::Registry):
///
/// ```
/// use farfield::AtServer;
/// use farfield_wic::Registry;
/// # use farfield::{FarFunction, FarPlace, FarRef, FarView, Fault};
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
///
/// let functions = Registry::standard().with::<AtServer<Look>>();
/// ```
#[derive(Debug)]
pub struct AtServer<F>(PhantomData<F>);

/// Argument of a call, as it goes to a server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FarArgument<A> {
    pub(super) span: FarSpan,
    /// Layouts of the types that the function may meet.
    pub(super) layouts: Vec<u64>,
    /// Halves of the slot word of the root.
    pub(super) root: (u32, u32),
    pub(super) argument: A,
    /// The root, if it is near at the client.
    pub(super) near: Option<RootImage>,
    /// Pages of the heap that the server has. Last, so that a server without it refuses the argument.
    pub(super) pages: ServerPages,
}

/// Answer to a call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FarAnswer<A> {
    /// The function has ended.
    Done(A),
    /// The server has another layout of this type of the client's list.
    OtherLayout(u32),
    /// The function cannot go on there.
    Stopped(RegionStop),
}

impl<F: FarFunction> Function for AtServer<F> {
    const NAME: &'static str = F::NAME;
    const VERSION: u32 = F::VERSION;
    const ONLY_READS: bool = true;
    type Argument = FarArgument<F::Argument>;
    type Answer = FarAnswer<F::Answer>;

    async fn run<P: Place>(place: &P, call: FarArgument<F::Argument>) -> Result<FarAnswer<F::Answer>, Fault> {
        let types = ViewTypes::of::<F::Root>();
        if let Some(index) = types.first_difference(&call.layouts) {
            return Ok(FarAnswer::OtherLayout(index as u32));
        }
        let (word, number) = call.root;
        let root = if call.near.is_some() { Some(FarRef::root()) } else { FarRef::elsewhere(word, number) };
        let Some(root) = root else { return Err(Fault::OutOfRange { offset: 0 }) };
        let region = RegionPlace::new(place, call.span, call.pages, call.near);
        let mut function = pin!(F::run(&region, root, call.argument));
        poll_fn(|context| {
            let polled = function.as_mut().poll(context);
            match region.stopped() {
                Some(stop) => Poll::Ready(Ok(FarAnswer::Stopped(stop))),
                None => polled.map_ok(FarAnswer::Done),
            }
        })
        .await
    }
}
