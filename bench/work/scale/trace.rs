//! Trace of an application: what its tasks do with shared objects, and how long they work between that.

/// Number of an object in a trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ObjectId(pub(super) u32);

impl ObjectId {
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Number of a task in a trace. The first task is number 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct TaskId(pub(super) u32);

impl TaskId {
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Bytes of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ByteRange {
    pub(super) begin: u32,
    pub(super) len: u32,
}

/// Use of shared memory by a task.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Action {
    Read(ObjectId, ByteRange),
    /// A read that is not waited for.
    Prefetch(ObjectId, ByteRange),
    Write(ObjectId, ByteRange),
    Lock(ObjectId),
    Unlock(ObjectId),
    /// A body with so many bytes of arguments is applied to the value of a lock, and leaves it with so many of a result.
    Enter(ObjectId, u32),
    Leave(ObjectId, u32),
    /// Step of an atomic number.
    Step(ObjectId),
    /// Another handle of an object that many own.
    Share(ObjectId),
    Unshare(ObjectId),
    /// An object has no owner any more. What it owns is dropped by a task at its home.
    Free(ObjectId, Option<TaskId>),
    Spawn(TaskId),
    Join(TaskId),
    End,
}

/// Work of a task, and what the task does then.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Step {
    pub(super) work_ns: u32,
    pub(super) action: Action,
}

/// All that a task does.
#[derive(PartialEq, Debug)]
pub(super) struct TaskTrace {
    pub(super) node: u16,
    pub(super) argument_bytes: u32,
    pub(super) result_bytes: u32,
    pub(super) steps: Vec<Step>,
}

/// Object when the measured part begins, or when it is made if that is later.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct TraceObject {
    /// Node that has made it or written to it last.
    pub(super) home: u16,
    pub(super) bytes: u32,
    /// Other nodes that have read this version: a bit for each.
    pub(super) readers: u32,
    /// Whether its value may own others: it is, or has, words that lead to them.
    pub(super) owns_others: bool,
}

/// Measured part of a run.
#[derive(Default, Debug)]
pub(super) struct Trace {
    pub(super) nodes: u16,
    pub(super) objects: Vec<TraceObject>,
    pub(super) tasks: Vec<TaskTrace>,
}

impl Trace {
    /// Returns the work of all tasks.
    pub(super) fn work_ns(&self) -> u64 {
        self.tasks.iter().flat_map(|task| &task.steps).map(|step| u64::from(step.work_ns)).sum()
    }
}
