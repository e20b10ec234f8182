//! Code of the preload library that runs inside the program.
//!
//! This code lives in a foreign house. Almost all of it runs in two signal handlers, SIGBUS (a far
//! page was touched) and SIGSYS (a system call that is ours), with every other signal blocked. So
//! it follows three laws: system calls go through the gate, memory comes from [`heap`], and nothing
//! uses the C library where that could lock, allocate or set up thread-locals.

pub mod aio;
pub mod arm;
pub mod arrays;
pub mod async_io;
pub mod call;
pub mod clone;
pub mod delivery;
pub mod direct_calls;
pub mod emulate;
pub mod evict;
pub mod exec;
pub mod fault;
pub mod foreign_mask;
pub mod forking;
pub mod heap;
pub mod huge;
pub mod inherited_fds;
pub mod io_uring;
pub mod late_start;
pub mod limits;
pub mod loader;
pub mod lock;
pub mod maintenance_thread;
pub mod own_code;
pub mod own_faults;
pub mod queue;
pub mod remap;
pub mod runtime;
pub mod sanitizer;
pub mod signal;
pub mod sole_writer;
pub mod start;
pub mod storage;
pub mod store;
pub mod switching;
pub mod sync;
pub mod syscall_pinning;
pub mod table;
pub mod thread;
pub mod tracing;
