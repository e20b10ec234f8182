//! Shared memory that records how it is used: the part of `farfield-dsm` that the applications use, over plain boxes.
//!
//! The applications are compiled once more with this module in the place of that crate. All nodes are in this thread, and a
//! task runs when it is started, so nothing disturbs the work between two uses of shared memory, which is timed. What the tasks
//! do is recorded from [`measured`] on. Of what was before, the recorder keeps where each object is and who has read it.
//!
//! That order of tasks is right for programs whose tasks wait for the end of others and for locks only, and keep no lock
//! meanwhile.

use super::trace::{Action, ByteRange, ObjectId, Step, TaskId, TaskTrace, Trace, TraceObject};
pub(super) use farfield_dsm::{JoinError, NodeId, ShareError};
use farfield_os::process::thread_cpu_ns;
use std::cell::{Cell, RefCell, RefMut};
use std::convert::Infallible;
/// Values of any type can be recorded. The applications derive this where `farfield-dsm` wants a promise.
pub(super) use std::fmt::Debug as Far;
use std::fmt::Formatter;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::rc::Rc;
use std::time::Instant;

/// Most nodes of a trace.
pub(super) const NODES_MAX: u16 = 32;
/// Times that the cost of the recorder itself is measured.
const TRIES: usize = 1000;
/// After work of this length the recorder looks whether other processes had the processor meanwhile.
const LOOK_AFTER_NS: u64 = 100_000;

thread_local! {
    static RECORDER: RefCell<Recorder> = RefCell::new(Recorder::new(1));
}

/// Task that runs: its node, and its number if it is recorded.
#[derive(Clone, Copy)]
struct RunningTask {
    node: u16,
    task: Option<TaskId>,
}

struct Recorder {
    trace: Trace,
    /// The task that runs is the last one; the others wait for it.
    running: Vec<RunningTask>,
    /// End of the last use of shared memory.
    resumed: Instant,
    /// What a use without work in between takes by the clock.
    own_ns: u64,
    /// When the recorder looked last, and the processor time of this thread then.
    looked: (Instant, u64),
}

impl Recorder {
    fn new(nodes: u16) -> Recorder {
        let first = RunningTask { node: 0, task: None };
        let trace = Trace { nodes, ..Trace::default() };
        let now = Instant::now();
        let mut recorder =
            Recorder { trace, running: vec![first], resumed: now, own_ns: 0, looked: (now, thread_cpu_ns()) };
        let mut tries: Vec<u64> = (0..TRIES)
            .map(|_| {
                recorder.resumed = Instant::now();
                recorder.since_resumed_ns(Instant::now())
            })
            .collect();
        tries.sort_unstable();
        recorder.own_ns = tries[tries.len() / 2];
        recorder
    }

    fn since_resumed_ns(&self, stopped: Instant) -> u64 {
        let ns = stopped.duration_since(self.resumed).as_nanos() as u64;
        ns.saturating_sub(self.own_ns)
    }

    /// Returns for how long this thread did not run since the recorder looked last.
    fn look(&mut self) -> u64 {
        let (then, used_ns) = std::mem::replace(&mut self.looked, (Instant::now(), thread_cpu_ns()));
        let elapsed_ns = self.looked.0.duration_since(then).as_nanos() as u64;
        elapsed_ns.saturating_sub(self.looked.1 - used_ns)
    }

    fn current(&self) -> RunningTask {
        *self.running.last().expect("the first task runs to the end")
    }

    fn begin(&mut self, node: u16, task: Option<TaskId>) {
        self.running.push(RunningTask { node, task });
    }

    /// Adds a task that is recorded.
    fn add_task(&mut self, node: u16, argument_bytes: usize, result_bytes: usize) -> TaskId {
        let task = TaskId(self.trace.tasks.len() as u32);
        let (argument_bytes, result_bytes) = (argument_bytes as u32, result_bytes as u32);
        self.trace.tasks.push(TaskTrace { node, argument_bytes, result_bytes, steps: Vec::new() });
        task
    }

    /// Records what the running task does. Returns whether it is recorded.
    fn note(&mut self, stopped: Instant, action: Action) -> bool {
        let RunningTask { node, task } = self.current();
        let Some(task) = task else {
            // What comes after the measured part is not where the objects are when that begins.
            if self.trace.tasks.is_empty() {
                self.keep(node, action);
            }
            return false;
        };
        let mut work_ns = self.since_resumed_ns(stopped);
        if work_ns > LOOK_AFTER_NS {
            work_ns = work_ns.saturating_sub(self.look());
        }
        let steps = &mut self.trace.tasks[task.index()].steps;
        // A step holds some four seconds. Whoever works for longer reads nothing in between.
        while work_ns > u64::from(u32::MAX) {
            let nothing = Action::Read(ObjectId(0), ByteRange { begin: 0, len: 0 });
            steps.push(Step { work_ns: u32::MAX, action: nothing });
            work_ns -= u64::from(u32::MAX);
        }
        steps.push(Step { work_ns: work_ns as u32, action });
        true
    }

    /// Keeps what is left of what a task does that is not recorded.
    fn keep(&mut self, node: u16, action: Action) {
        match action {
            Action::Read(object, _) => {
                let object = &mut self.trace.objects[object.index()];
                object.readers |= u32::from(object.home != node) << node;
            }
            Action::Write(object, _) => {
                let object = &mut self.trace.objects[object.index()];
                (object.home, object.readers) = (node, 0);
            }
            _ => {}
        }
    }
}

/// Records what the running task does.
fn note(action: Action) {
    let stopped = Instant::now();
    // Values that are dropped with their thread are recorded by nobody.
    let _ = RECORDER.try_with(|recorder| {
        let mut recorder = recorder.borrow_mut();
        if recorder.note(stopped, action) {
            recorder.resumed = Instant::now();
        }
    });
}

/// Records a new object. Returns its number and its home.
fn note_object(bytes: usize, owns_others: bool) -> (ObjectId, NodeId) {
    let stopped = Instant::now();
    RECORDER.with_borrow_mut(|recorder| {
        let id = ObjectId(recorder.trace.objects.len() as u32);
        let home = recorder.current().node;
        recorder.trace.objects.push(TraceObject { home, bytes: bytes as u32, readers: 0, owns_others });
        // What is made is work as what was before, but for what it takes to record it.
        let work = stopped.duration_since(recorder.resumed);
        recorder.resumed = Instant::now().checked_sub(work).unwrap_or(recorder.resumed);
        (id, NodeId(home))
    })
}

fn whole(bytes: usize) -> ByteRange {
    ByteRange { begin: 0, len: bytes as u32 }
}

/// Runs a task to its end. Returns its number, if it is recorded, and its result.
fn run_task<A, R>(node: NodeId, arguments: A, body: impl FnOnce(&Here<'_>, A) -> R) -> (Option<TaskId>, R) {
    let stopped = Instant::now();
    let task = RECORDER.with_borrow_mut(|recorder| {
        let is_recorded = recorder.current().task.is_some();
        let task = is_recorded.then(|| recorder.add_task(node.0, size_of::<A>(), size_of::<R>()));
        if let Some(task) = task {
            recorder.note(stopped, Action::Spawn(task));
        }
        recorder.begin(node.0, task);
        recorder.resumed = Instant::now();
        task
    });
    let result = body(&Here { node, of_node: PhantomData }, arguments);
    end_task();
    (task, result)
}

fn end_task() {
    note(Action::End);
    let _ = RECORDER.try_with(|recorder| {
        let mut recorder = recorder.borrow_mut();
        recorder.running.pop();
        recorder.resumed = Instant::now();
    });
}

/// Begins a task at the home of an object that has no owner any more: it drops what the object owns.
fn begin_drop(object: ObjectId, home: NodeId) {
    let stopped = Instant::now();
    let _ = RECORDER.try_with(|recorder| {
        let mut recorder = recorder.borrow_mut();
        let is_recorded = recorder.current().task.is_some();
        let task = is_recorded.then(|| recorder.add_task(home.0, 0, 0));
        recorder.note(stopped, Action::Free(object, task));
        recorder.begin(home.0, task);
        recorder.resumed = Instant::now();
    });
}

fn note_join(task: Option<TaskId>) {
    if let Some(task) = task {
        note(Action::Join(task));
    }
}

/// Records what a body does, as the first task.
pub(super) fn measured<R>(body: impl FnOnce() -> R) -> R {
    RECORDER.with_borrow_mut(|recorder| {
        let RunningTask { node, task } = recorder.current();
        assert!(task.is_none() && recorder.trace.tasks.is_empty(), "one part of a run is measured");
        let first = recorder.add_task(node, 0, 0);
        recorder.begin(node, Some(first));
        recorder.look();
        recorder.resumed = Instant::now();
    });
    let result = body();
    end_task();
    result
}

/// Returns what was recorded since the last program was begun.
pub(super) fn take() -> Trace {
    RECORDER.replace(Recorder::new(1)).trace
}

/// Settings of the nodes.
pub(super) struct NodeBuilder {
    nodes: u16,
}

impl NodeBuilder {
    pub(super) fn new() -> NodeBuilder {
        NodeBuilder { nodes: 1 }
    }

    pub(super) fn nodes(self, nodes: u16) -> NodeBuilder {
        assert!((1..=NODES_MAX).contains(&nodes), "a trace has 1 to {NODES_MAX} nodes");
        NodeBuilder { nodes }
    }

    pub(super) fn near(self, _bytes: u64) -> NodeBuilder {
        self
    }

    pub(super) fn workers(self, _count: usize) -> NodeBuilder {
        self
    }

    pub(super) fn read_in_place(self, _is_in_place: bool) -> NodeBuilder {
        self
    }
}

/// Runs a program.
pub(super) fn run<R>(config: &NodeBuilder, body: impl FnOnce(&Here<'_>) -> R) -> Result<R, Infallible> {
    RECORDER.set(Recorder::new(config.nodes));
    Ok(body(&Here { node: NodeId(0), of_node: PhantomData }))
}

/// Counts of a node, which a recorder does not keep.
#[derive(Default)]
pub(super) struct NodeStats {
    pub(super) messages: u64,
    pub(super) message_bytes: u64,
    pub(super) moved_objects: u64,
    pub(super) object_bytes: u64,
}

/// Scope of a task.
pub(super) struct Here<'n> {
    node: NodeId,
    of_node: PhantomData<&'n ()>,
}

impl Here<'_> {
    pub(super) fn enter(&self) -> Here<'_> {
        Here { ..*self }
    }

    pub(super) fn id(&self) -> NodeId {
        self.node
    }

    pub(super) fn nodes(&self) -> impl ExactSizeIterator<Item = NodeId> + DoubleEndedIterator + Clone + use<> {
        (0..RECORDER.with_borrow(|recorder| recorder.trace.nodes)).map(NodeId)
    }

    pub(super) fn stats(&self) -> NodeStats {
        NodeStats::default()
    }

    pub(super) fn alloc<T: Far>(&self, value: T) -> Result<DBox<T>, ShareError> {
        Ok(DBox::new(Box::new(value)))
    }

    pub(super) fn spawn_to<F, A, R>(&self, node: NodeId, arguments: A, body: F) -> Result<TaskHandle<R>, ShareError>
    where
        F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy,
        A: Far,
        R: Far,
    {
        let (task, result) = run_task(node, arguments, body);
        Ok(TaskHandle { task, result })
    }
}

/// Task that has ended.
#[must_use]
pub(super) struct TaskHandle<R> {
    task: Option<TaskId>,
    result: R,
}

impl<R> TaskHandle<R> {
    pub(super) fn join(self, _here: &Here<'_>) -> Result<R, JoinError> {
        note_join(self.task);
        Ok(self.result)
    }
}

/// Tasks that borrow, and those of them that nobody has joined.
pub(super) struct TaskScope<'s, 'env: 's> {
    open: RefCell<Vec<TaskId>>,
    of_scope: PhantomData<&'s mut &'s ()>,
    of_environment: PhantomData<&'env mut &'env ()>,
}

pub(super) fn scope<'env, R>(
    _here: &'env Here<'_>,
    body: impl for<'s> FnOnce(&'s TaskScope<'s, 'env>) -> R,
) -> Result<R, JoinError> {
    let scope = TaskScope { open: RefCell::default(), of_scope: PhantomData, of_environment: PhantomData };
    let result = body(&scope);
    while let Some(task) = scope.pop() {
        note_join(Some(task));
    }
    Ok(result)
}

impl<'s, 'env> TaskScope<'s, 'env> {
    fn pop(&self) -> Option<TaskId> {
        self.open.borrow_mut().pop()
    }

    pub(super) fn lend<O: Owner>(&'s self, owner: &'env O) -> Lent<'s, O::Object> {
        let (id, object) = owner.place();
        Lent { id, object }
    }

    pub(super) fn lend_mut<O: OwnerMut>(&'s self, owner: &'env mut O) -> LentMut<'s, O::Object> {
        let (id, object) = owner.place_mut();
        LentMut { id, object }
    }

    pub(super) fn spawn_to<F, A, R>(
        &'s self,
        node: NodeId,
        arguments: A,
        body: F,
    ) -> Result<ScopedHandle<'s, R>, ShareError>
    where
        F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy,
        A: 's,
        R: Far,
    {
        let (task, result) = run_task(node, arguments, body);
        self.open.borrow_mut().extend(task);
        Ok(ScopedHandle { task, result, open: &self.open })
    }
}

/// Task of a scope that has ended.
pub(super) struct ScopedHandle<'s, R> {
    task: Option<TaskId>,
    result: R,
    open: &'s RefCell<Vec<TaskId>>,
}

impl<R> ScopedHandle<'_, R> {
    pub(super) fn join(self) -> Result<R, JoinError> {
        if let Some(task) = self.task {
            self.open.borrow_mut().retain(|open| *open != task);
        }
        note_join(self.task);
        Ok(self.result)
    }
}

/// Type of what an owner owns.
pub(super) trait Object {
    /// Place of the object in plain memory.
    type Place;
    fn of(place: &Self::Place) -> &Self;
    fn of_mut(place: &mut Self::Place) -> &mut Self;
    fn owns_others() -> bool;
}

impl<T> Object for T {
    type Place = Box<T>;

    fn of(place: &Box<T>) -> &T {
        place
    }

    fn of_mut(place: &mut Box<T>) -> &mut T {
        place
    }

    fn owns_others() -> bool {
        std::mem::needs_drop::<T>()
    }
}

impl<T> Object for [T] {
    type Place = Vec<T>;

    fn of(place: &Vec<T>) -> &[T] {
        place
    }

    fn of_mut(place: &mut Vec<T>) -> &mut [T] {
        place
    }

    fn owns_others() -> bool {
        std::mem::needs_drop::<T>()
    }
}

impl Object for str {
    type Place = String;

    fn of(place: &String) -> &str {
        place
    }

    fn of_mut(place: &mut String) -> &mut str {
        place
    }

    fn owns_others() -> bool {
        false
    }
}

/// Reads an object.
fn read<T: Object + ?Sized>(id: ObjectId, object: &T) -> &T {
    note(Action::Read(id, whole(size_of_val(object))));
    object
}

/// Begin of an object that has one owner: dropped before the object.
struct OwnerBegin<T: Object + ?Sized> {
    id: ObjectId,
    home: Cell<NodeId>,
    of_object: PhantomData<T>,
}

impl<T: Object + ?Sized> Drop for OwnerBegin<T> {
    fn drop(&mut self) {
        if T::owns_others() {
            begin_drop(self.id, self.home.get());
        } else {
            note(Action::Free(self.id, None));
        }
    }
}

/// End of an object that has one owner: dropped after the object.
struct OwnerEnd<T: Object + ?Sized>(PhantomData<T>);

impl<T: Object + ?Sized> Drop for OwnerEnd<T> {
    fn drop(&mut self) {
        if T::owns_others() {
            end_task();
        }
    }
}

/// Owner of an object. What the object owns is dropped by a task at its home, as in shared memory.
pub(super) struct DBox<T: Object + ?Sized> {
    begin: OwnerBegin<T>,
    place: T::Place,
    /// Behind what it ends.
    _end: OwnerEnd<T>,
}

impl<T: Object + ?Sized> std::fmt::Debug for DBox<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "DBox({})", self.begin.id.0)
    }
}

impl<T: Object + ?Sized> DBox<T> {
    fn new(place: T::Place) -> DBox<T> {
        let (id, home) = note_object(size_of_val(T::of(&place)), T::owns_others());
        let begin = OwnerBegin { id, home: Cell::new(home), of_object: PhantomData };
        DBox { begin, place, _end: OwnerEnd(PhantomData) }
    }

    pub(super) fn get<'a>(&'a self, _here: &'a Here<'_>) -> Result<&'a T, ShareError> {
        Ok(read(self.begin.id, T::of(&self.place)))
    }

    pub(super) fn get_mut<'a>(&'a mut self, here: &'a Here<'_>) -> Result<Mut<'a, T>, ShareError> {
        self.begin.home.set(here.node);
        let (id, object) = self.place_mut();
        Ok(Mut::new(id, object))
    }
}

impl<T> DBox<T> {
    pub(super) fn into_inner(self, here: &Here<'_>) -> Result<T, ShareError> {
        self.get(here)?;
        Ok(*self.place)
    }
}

/// Reads a part of a slice.
pub(super) fn part<'a, T>(
    _here: &'a Here<'_>,
    values: &'a DBox<[T]>,
    range: Range<usize>,
) -> Result<&'a [T], ShareError> {
    let (begin, len) = (range.start * size_of::<T>(), range.len() * size_of::<T>());
    note(Action::Read(values.begin.id, ByteRange { begin: begin as u32, len: len as u32 }));
    Ok(&values.place[range])
}

/// Mutable borrow of an object.
pub(super) struct Mut<'a, T: ?Sized> {
    object: &'a mut T,
}

impl<'a, T: Object + ?Sized> Mut<'a, T> {
    fn new(id: ObjectId, object: &'a mut T) -> Self {
        note(Action::Write(id, whole(size_of_val(object))));
        Mut { object }
    }

    pub(super) fn into_mut(this: Mut<'a, T>) -> &'a mut T {
        this.object
    }
}

impl<T: ?Sized> Deref for Mut<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.object
    }
}

impl<T: ?Sized> DerefMut for Mut<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.object
    }
}

/// Owner that can be lent for reading.
pub(super) trait Owner {
    type Object: Object + ?Sized;

    fn place(&self) -> (ObjectId, &Self::Object);

    fn prefetch(&self, _here: &Here<'_>) {
        let (id, object) = self.place();
        note(Action::Prefetch(id, whole(size_of_val(object))));
    }
}

/// Owner that can be lent for writing.
pub(super) trait OwnerMut: Owner {
    fn place_mut(&mut self) -> (ObjectId, &mut Self::Object);
}

impl<T: Object + ?Sized> Owner for DBox<T> {
    type Object = T;

    fn place(&self) -> (ObjectId, &T) {
        (self.begin.id, T::of(&self.place))
    }
}

impl<T: Object + ?Sized> OwnerMut for DBox<T> {
    fn place_mut(&mut self) -> (ObjectId, &mut T) {
        (self.begin.id, T::of_mut(&mut self.place))
    }
}

/// Object that is lent for reading.
pub(super) struct Lent<'s, T: ?Sized> {
    id: ObjectId,
    object: &'s T,
}

impl<T: Object + ?Sized> Lent<'_, T> {
    pub(super) fn get<'a>(&'a self, _here: &'a Here<'_>) -> Result<&'a T, ShareError> {
        Ok(read(self.id, self.object))
    }
}

impl<T: Object + ?Sized> Owner for Lent<'_, T> {
    type Object = T;

    fn place(&self) -> (ObjectId, &T) {
        (self.id, self.object)
    }
}

/// Object that is lent for writing.
pub(super) struct LentMut<'s, T: ?Sized> {
    id: ObjectId,
    object: &'s mut T,
}

impl<T: Object + ?Sized> LentMut<'_, T> {
    pub(super) fn get_mut<'a>(&'a mut self, _here: &'a Here<'_>) -> Result<Mut<'a, T>, ShareError> {
        Ok(Mut::new(self.id, self.object))
    }
}

/// Vector in chunks.
pub(super) struct DVec<T> {
    /// Chunks that are full.
    full: Option<DBox<[DBox<[T]>]>>,
    last: Option<DBox<[T]>>,
    chunk_len: usize,
}

impl<T> std::fmt::Debug for DVec<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "DVec({} values)", self.len())
    }
}

/// Appends values to a slice, which is made if there is none.
fn append<T>(slice: &mut Option<DBox<[T]>>, here: &Here<'_>, values: impl IntoIterator<Item = T>) {
    let slice = slice.get_or_insert_with(|| DBox::new(Vec::new()));
    let before = slice.place.len();
    slice.place.extend(values);
    slice.begin.home.set(here.node);
    let len = (slice.place.len() - before) * size_of::<T>();
    let range = ByteRange { begin: (before * size_of::<T>()) as u32, len: len as u32 };
    note(Action::Write(slice.begin.id, range));
    RECORDER.with_borrow_mut(|recorder| {
        recorder.trace.objects[slice.begin.id.index()].bytes = (slice.place.len() * size_of::<T>()) as u32;
    });
}

impl<T> DVec<T> {
    pub(super) fn new() -> DVec<T> {
        DVec::with_chunk((1 << 20) / size_of::<T>().max(1))
    }

    pub(super) fn with_chunk(values: usize) -> DVec<T> {
        DVec { full: None, last: None, chunk_len: values.max(1) }
    }

    pub(super) fn len(&self) -> usize {
        let full = self.full.as_ref().map_or(0, |full| full.place.len());
        full * self.chunk_len + self.last.as_ref().map_or(0, |last| last.place.len())
    }

    /// Makes the last chunk one that is not full. Returns how many values it has room for.
    fn begin_chunk(&mut self, here: &Here<'_>) -> usize {
        let len = self.last.as_ref().map_or(0, |last| last.place.len());
        if len < self.chunk_len {
            return self.chunk_len - len;
        }
        append(&mut self.full, here, self.last.take());
        self.chunk_len
    }

    pub(super) fn push(&mut self, here: &Here<'_>, value: T) -> Result<(), ShareError> {
        self.begin_chunk(here);
        append(&mut self.last, here, [value]);
        Ok(())
    }

    pub(super) fn extend_from_slice(&mut self, here: &Here<'_>, mut values: &[T]) -> Result<(), ShareError>
    where
        T: Copy,
    {
        while !values.is_empty() {
            let room = self.begin_chunk(here);
            let (now, later) = values.split_at(values.len().min(room));
            append(&mut self.last, here, now.iter().copied());
            values = later;
        }
        Ok(())
    }

    pub(super) fn get<'a>(&'a self, here: &'a Here<'_>, index: usize) -> Result<Option<&'a T>, ShareError> {
        let Some(chunk) = self.chunk(here, index / self.chunk_len)? else { return Ok(None) };
        let at = index % self.chunk_len;
        let end = (at + 1).min(chunk.place.len());
        Ok(part(here, chunk, at.min(end)..end)?.first())
    }

    pub(super) fn iter<'a>(&'a self, here: &'a Here<'_>) -> impl Iterator<Item = Result<&'a T, ShareError>> {
        let full = self.full.as_ref().map_or(&[][..], |full| read(full.begin.id, &full.place[..]));
        full.iter().chain(&self.last).flat_map(|chunk| chunk.get(here).expect("a recorder has all objects")).map(Ok)
    }

    pub(super) fn chunk<'a>(&'a self, here: &'a Here<'_>, chunk: usize) -> Result<Option<&'a DBox<[T]>>, ShareError> {
        let full = match &self.full {
            Some(full) => part(here, full, chunk.min(full.place.len())..(chunk + 1).min(full.place.len()))?,
            None => &[],
        };
        let full_len = self.full.as_ref().map_or(0, |full| full.place.len());
        Ok(full.first().or_else(|| self.last.as_ref().filter(|_| chunk == full_len)))
    }

    pub(super) fn chunks_mut<'a>(
        &'a mut self,
        here: &'a Here<'_>,
    ) -> Result<impl Iterator<Item = ChunkMut<'a, T>> + use<'a, T>, ShareError> {
        let full = self.full.as_mut().map(|full| full.get_mut(here)).transpose()?;
        let full = full.map_or(&mut [][..], Mut::into_mut);
        Ok(full.iter_mut().chain(&mut self.last).map(|chunk| ChunkMut { chunk }))
    }
}

/// Mutable borrow of the owner of a chunk.
pub(super) struct ChunkMut<'a, T> {
    chunk: &'a mut DBox<[T]>,
}

impl<T> Owner for ChunkMut<'_, T> {
    type Object = [T];

    fn place(&self) -> (ObjectId, &[T]) {
        self.chunk.place()
    }
}

impl<T> OwnerMut for ChunkMut<'_, T> {
    fn place_mut(&mut self) -> (ObjectId, &mut [T]) {
        self.chunk.place_mut()
    }
}

/// String in one object.
pub(super) struct DString(DBox<str>);

impl std::fmt::Debug for DString {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl DString {
    pub(super) fn from_str(_here: &Here<'_>, text: &str) -> Result<DString, ShareError> {
        Ok(DString(DBox::new(text.to_owned())))
    }

    pub(super) fn as_str<'a>(&'a self, here: &'a Here<'_>) -> Result<&'a str, ShareError> {
        self.0.get(here)
    }
}

/// One of many owners of an object.
pub(super) struct DArc<T>(Rc<SharedObject<T>>);

struct SharedObject<T> {
    id: ObjectId,
    value: T,
}

impl<T> std::fmt::Debug for DArc<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "DArc({})", self.0.id.0)
    }
}

impl<T> DArc<T> {
    pub(super) fn new(_here: &Here<'_>, value: T) -> Result<DArc<T>, ShareError> {
        let (id, _) = note_object(size_of::<T>(), T::owns_others());
        Ok(DArc(Rc::new(SharedObject { id, value })))
    }

    pub(super) fn get<'a>(&'a self, _here: &'a Here<'_>) -> Result<&'a T, ShareError> {
        Ok(read(self.0.id, &self.0.value))
    }

    pub(super) fn try_clone(&self, _here: &Here<'_>) -> Result<DArc<T>, ShareError> {
        note(Action::Share(self.0.id));
        Ok(DArc(self.0.clone()))
    }
}

impl<T> Drop for DArc<T> {
    fn drop(&mut self) {
        note(Action::Unshare(self.0.id));
    }
}

impl<T> Owner for DArc<T> {
    type Object = T;

    fn place(&self) -> (ObjectId, &T) {
        (self.0.id, &self.0.value)
    }
}

/// Value under a lock: one word, as in shared memory.
pub(super) struct DMutex<T>(Box<LockedValue<T>>);

struct LockedValue<T> {
    id: ObjectId,
    value: RefCell<T>,
}

impl<T> std::fmt::Debug for DMutex<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "DMutex({})", self.0.id.0)
    }
}

impl<T> DMutex<T> {
    pub(super) fn new(_here: &Here<'_>, value: T) -> Result<DMutex<T>, ShareError> {
        let (id, _) = note_object(size_of::<T>(), T::owns_others());
        Ok(DMutex(Box::new(LockedValue { id, value: RefCell::new(value) })))
    }

    pub(super) fn lock<'a>(&'a self, _here: &'a Here<'_>) -> Result<DMutexGuard<'a, T>, ShareError> {
        note(Action::Lock(self.0.id));
        Ok(DMutexGuard { id: self.0.id, value: self.0.value.borrow_mut() })
    }

    pub(super) fn apply<A: Far, R: Far>(
        &self,
        _here: &Here<'_>,
        arguments: A,
        body: impl for<'v> FnOnce(&'v mut T, A) -> R + Copy,
    ) -> Result<R, JoinError> {
        note(Action::Enter(self.0.id, size_of::<A>() as u32));
        let result = body(&mut self.0.value.borrow_mut(), arguments);
        note(Action::Leave(self.0.id, size_of::<R>() as u32));
        Ok(result)
    }
}

/// Holding of a lock.
pub(super) struct DMutexGuard<'a, T> {
    id: ObjectId,
    value: RefMut<'a, T>,
}

impl<T> Deref for DMutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for DMutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for DMutexGuard<'_, T> {
    fn drop(&mut self) {
        note(Action::Unlock(self.id));
    }
}

/// Number that changes in steps.
#[derive(Debug)]
pub(super) struct DAtomic<T: Copy> {
    id: ObjectId,
    value: Cell<T>,
}

impl DAtomic<u64> {
    pub(super) fn new(_here: &Here<'_>, value: u64) -> Result<DAtomic<u64>, ShareError> {
        let (id, _) = note_object(size_of::<u64>(), false);
        Ok(DAtomic { id, value: Cell::new(value) })
    }

    pub(super) fn fetch_add(&self, _here: &Here<'_>, more: u64) -> Result<u64, ShareError> {
        note(Action::Step(self.id));
        Ok(self.value.replace(self.value.get() + more))
    }
}
