//! Threads that serve connections, each of them one connection after another.
//!
//! No [permit](crate::work_semaphore) covers the time in which the kernel makes and ends a thread: a
//! client whose connections come and end in a loop would slow others down with it. So a thread whose
//! connection has ended waits for the next one.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Most threads that wait for a connection. They stand for connections that came and ended within
/// [`KEEP`].
const IDLE_MAX: usize = 16;
/// Longest time for which a thread waits for its next connection.
const KEEP: Duration = Duration::from_secs(1);
const STACK_BYTES: usize = 512 << 10;

type Service = Box<dyn FnOnce() + Send>;

/// Threads that serve connections (see the module documentation). They end by themselves.
#[derive(Clone, Default)]
pub(crate) struct ConnectionThreads(Arc<IdleThreads>);

#[derive(Default)]
struct IdleThreads {
    services: Mutex<ServiceQueue>,
    /// Condition variable that is notified of each new service, and of the end.
    change: Condvar,
}

/// Each service in the queue has an idle thread that will take it.
#[derive(Default)]
struct ServiceQueue {
    queue: VecDeque<Service>,
    idle: usize,
    is_over: bool,
}

impl core::fmt::Debug for ConnectionThreads {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ConnectionThreads").field("idle", &self.0.lock().idle).finish_non_exhaustive()
    }
}

impl ConnectionThreads {
    /// Calls `service` on a thread that is idle, or on a new one. If it panics, its thread ends.
    pub(crate) fn run(&self, service: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let service: Service = Box::new(service);
        let mut services = self.0.lock();
        if services.idle > services.queue.len() {
            services.queue.push_back(service);
            drop(services);
            self.0.change.notify_one();
            return Ok(());
        }
        drop(services);
        let threads = self.0.clone();
        let thread = std::thread::Builder::new().name("farfield-serve".to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || threads.serve(service)).map(drop)
    }

    /// Ends the threads that are idle now or become so later.
    pub(crate) fn end(&self) {
        self.0.lock().is_over = true;
        self.0.change.notify_all();
    }
}

impl IdleThreads {
    fn lock(&self) -> MutexGuard<'_, ServiceQueue> {
        self.services.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Body of a thread.
    fn serve(&self, first: Service) {
        let mut next = Some(first);
        while let Some(service) = next {
            service();
            next = self.wait_for_next();
        }
    }

    /// Waits for a service for up to [`KEEP`].
    fn wait_for_next(&self) -> Option<Service> {
        let mut services = self.lock();
        if services.idle >= IDLE_MAX {
            return None;
        }
        services.idle += 1;
        let is_waiting = |services: &mut ServiceQueue| services.queue.is_empty() && !services.is_over;
        let waited = self.change.wait_timeout_while(services, KEEP, is_waiting);
        let (mut services, _) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        services.idle -= 1;
        services.queue.pop_front()
    }
}

#[cfg(test)]
mod tests {
    //! Dangers: a service that no thread takes; threads that pile up, or outlive the server.
    use super::*;
    use std::collections::HashSet;
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::thread::ThreadId;

    const LONG: Duration = Duration::from_secs(60);

    /// Waits until so many threads are idle.
    fn wait_for_idle(threads: &ConnectionThreads, count: usize) {
        let until = std::time::Instant::now() + LONG;
        while threads.0.lock().idle != count {
            assert!(std::time::Instant::now() < until, "{} are idle, not {count}", threads.0.lock().idle);
            std::thread::yield_now();
        }
    }

    /// Runs `count` services at a time and returns their threads.
    fn threads_of(threads: &ConnectionThreads, count: usize) -> HashSet<ThreadId> {
        let (began, begun) = channel();
        let ends: Vec<_> = (0..count)
            .map(|_| {
                let (began, (end, ended)) = (began.clone(), channel::<()>());
                let service = move || {
                    began.send(std::thread::current().id()).unwrap();
                    assert_eq!(ended.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected));
                };
                threads.run(service).unwrap();
                end
            })
            .collect();
        let found = (0..count).map(|_| begun.recv_timeout(LONG).unwrap()).collect();
        drop(ends);
        found
    }

    #[test]
    fn connections_in_a_row_share_a_thread_and_connections_at_a_time_do_not() {
        let threads = ConnectionThreads::default();
        let first = threads_of(&threads, 1);
        wait_for_idle(&threads, 1);
        let two = threads_of(&threads, 2);
        assert_eq!((two.len(), two.is_superset(&first)), (2, true));
        wait_for_idle(&threads, 2);
        assert_eq!(threads_of(&threads, 2), two);
    }

    #[test]
    fn few_threads_wait_and_none_after_the_end() {
        let threads = ConnectionThreads::default();
        assert_eq!(threads_of(&threads, 2 * IDLE_MAX).len(), 2 * IDLE_MAX);
        wait_for_idle(&threads, IDLE_MAX);
        threads.end();
        wait_for_idle(&threads, 0);
        threads_of(&threads, 1);
        wait_for_idle(&threads, 0);
        let until = std::time::Instant::now() + LONG;
        while Arc::strong_count(&threads.0) > 1 {
            assert!(std::time::Instant::now() < until, "a thread goes on");
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_idle_thread_ends_by_itself() {
        let threads = ConnectionThreads::default();
        threads_of(&threads, 1);
        wait_for_idle(&threads, 1);
        wait_for_idle(&threads, 0);
    }

    #[test]
    fn a_panic_ends_its_thread_and_no_other() {
        let threads = ConnectionThreads::default();
        threads.run(|| panic!("on purpose")).unwrap();
        assert_eq!(threads_of(&threads, 1).len(), 1);
        wait_for_idle(&threads, 1);
    }
}
