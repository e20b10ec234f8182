//! The runner: starts a program with far memory, watches its processes, and reports how it went.
//!
//! The runner changes three things for the program: `LD_PRELOAD`, [`crate::config::ENV_CONTROL`],
//! and the token of the servers, which is not in its environment. Everything else, from the
//! terminal to the signal mask, is as if the program had been started without it.
//! `docs/design/runner.md` is the design page.

mod block;
mod far;
mod hold;
mod job;
pub mod machine;
mod member;
mod plain;
mod pool;
mod preload;
mod program;
mod protection;
mod refusal;
mod report;
mod requests;
mod server;
mod settle;
mod sys;
mod watch;

pub use block::{ControlBlock, RunnerBlock, Settings, create_control, find_control, find_jobs, find_memfds, processes};
pub use far::opener;
pub use hold::{Held, HoldOptions};
pub use job::{Ended, Options, run};
pub use plain::{PlainRun, PlainRunner, progress_columns};
pub use pool::{MovingProcess, PoolStatus};
pub use preload::{ENV_PRELOAD, find_preload};
pub use protection::Protected;
pub use refusal::Refusal;
pub use report::{Bytes, Count, Failure, Latency, Report, mode_name};
pub use requests::{cancel_switch, switch_pool};
pub use sys::die_by;
pub use watch::{Totals, state_name};
