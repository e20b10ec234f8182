//! Scheduling of jobs that can run with part of their memory far (CFM, EuroSys 2020).
//!
//! A job asks for memory and says the least share of it that must be near. A node takes a job if
//! all of it fits near; else if the least shares of its jobs fit near and the pool of far memory
//! has room for the rest ([`fit`]). The near memory of a node is then divided among its jobs
//! ([`split`]). The pool is accounted by overflow: a node holds as much of it as its jobs asked
//! for beyond its near memory, whoever of them has it.
//!
//! A policy is a division and an order of the waiting jobs ([`order`]). On a real node, budgets then
//! follow the division as memory moves ([`node`]), and curves what jobs show ([`learned`]), from one run
//! to the next ([`history`]); in a real cluster, a scheduler of its own has the queue, and jobs pass a
//! gate in front of it ([`gate`]).

pub mod claim;
pub mod fit;
pub mod gate;
pub mod history;
pub mod job;
pub mod learned;
pub mod node;
pub mod order;
pub mod split;

pub use claim::{ClaimError, JobClaim};
pub use fit::{Cluster, NodeShape, Shortage};
pub use gate::{
    GateDecision, GateJob, GateNode, GateOffer, GatePhase, GateRules, GateWait, PoolServers, decide, offer,
};
pub use history::{FinishedRun, HISTORY_VERSION, HistoryPoint, RunHistory};
pub use job::{ClassError, JobClass, RunTime};
pub use learned::LearnedCurve;
pub use node::JobBudget;
pub use order::{QueueHead, QueueOrder};
pub use split::{JobProgress, LeastSharesExceedNode, SplitRule, Splitter};
