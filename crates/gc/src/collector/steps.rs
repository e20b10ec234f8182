//! Steps of a collection, at which tests do something: before and after each message, and at each stop.

/// Step of a collection at which a test does something, as killing a server. Each happens once in a
/// collection, or once for each message or stop.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CycleStep {
    /// Mutators are stopped, and the snapshot was taken.
    SnapshotTaken,
    /// Mutators go on while the collector marks.
    Marking,
    /// Near pages are about to be written for servers.
    Flushing,
    /// Near pages were written.
    Flushed,
    /// Servers are about to be asked for objects.
    AskingServers,
    /// Servers have answered, or failed.
    ServersAnswered,
    /// Far pages are about to be read.
    ReadingPages,
    /// Far pages were read.
    PagesRead,
    /// Mutators are stopped, and all is traced.
    Committing,
    /// Entries of the dead are free, and mutators still stopped.
    Committed,
    /// Pages without objects were given back.
    Released,
    /// A server is about to be asked to copy objects.
    AskingToCopy,
    /// The server has answered, or failed.
    ServerCopied,
    /// Mutators are stopped, and entries are about to lead to copies.
    Publishing,
    /// Entries lead to copies, and mutators go on.
    Published,
    /// Sparse far pages are about to be read.
    ReadingSources,
    /// Mutators are stopped, and objects are about to be copied.
    Moving,
    /// Objects were copied, and mutators go on.
    Moved,
    /// The collection is over.
    Ended,
}

impl CycleStep {
    /// All steps, in their order.
    pub const ALL: [CycleStep; 19] = [
        CycleStep::SnapshotTaken,
        CycleStep::Marking,
        CycleStep::Flushing,
        CycleStep::Flushed,
        CycleStep::AskingServers,
        CycleStep::ServersAnswered,
        CycleStep::ReadingPages,
        CycleStep::PagesRead,
        CycleStep::Committing,
        CycleStep::Committed,
        CycleStep::Released,
        CycleStep::AskingToCopy,
        CycleStep::ServerCopied,
        CycleStep::Publishing,
        CycleStep::Published,
        CycleStep::ReadingSources,
        CycleStep::Moving,
        CycleStep::Moved,
        CycleStep::Ended,
    ];
}

/// Function that is called at each step, on the thread that collects.
pub(crate) type StepHook = Box<dyn Fn(CycleStep) + Send + Sync>;
