//! The runner: starts a program with far memory, watches its processes, and reports how it went.
//!
//! The runner changes three things for the program: `LD_PRELOAD`, [`crate::config::ENV_CONTROL`],
//! and the token of the servers, which is not in its environment. Everything else, from the
//! terminal to the signal mask, is as if the program had been started without it.
//! `docs/design/runner.md` is the design page.

mod agent;
mod block;
mod budget;
mod far;
mod history;
mod job;
mod job_process;
pub mod machine;
mod near;
mod placement;
mod plain;
mod pool;
mod preload;
mod program;
mod protection;
mod refusal;
mod report;
mod requests;
mod server;
mod slot_monitor;
mod sys;
mod watched;

pub use agent::{
    AGENT_VERSION, AgentFrameError, AgentOptions, AgentReply, AgentRequest, AgentStatus, AgentStatusRow, FrameBuffer,
    frame, read_status,
};
pub use block::{ControlBlock, RunnerBlock, Settings, create_control, find_control, find_jobs, find_memfds, processes};
pub use budget::{SloOptions, SloReport};
pub use far::pool_builder;
pub use history::HistoryFile;
pub use job::{Options, ProgramExit, keep, run};
pub use near::{NearStatus, offer_near};
pub use plain::{PlainRun, PlainRunner, progress_columns};
pub use pool::{MovingProcess, PoolStatus};
pub use preload::{ENV_PRELOAD, find_preload};
pub use protection::ProtectionReport;
pub use refusal::JobRefusal;
pub use report::{ByteSize, CompactCount, Latency, PagerFailure, Report, mode_name};
pub use requests::{cancel_switch, switch_pool};
pub use slot_monitor::{JobTotals, state_name};
pub use sys::{die_by, poll};
pub use watched::{JobActivity, ProcessTree, WatchedJob, agent_socket};
