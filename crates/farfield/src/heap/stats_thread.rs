//! The statistics thread of a heap with a name: it writes the heap's [notice], which `farfield top`
//! finds among the files that the process has open.

use super::{HeapInner, HeapInnerPointer};
use crate::error::BuildError;
use crate::plane::Plane;
use core::time::Duration;
use farfield_core::notice;
use farfield_os::{memfd, process};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

/// Time between two notices. Readers refresh each second.
const EVERY: Duration = Duration::from_millis(250);

/// Handle on the thread, if there is one. The thread ends when the sender is dropped.
#[derive(Default)]
pub(crate) struct StatsThread(Mutex<Option<(Sender<()>, JoinHandle<()>)>>);

impl StatsThread {
    /// Starts the thread. The first notice is written when this returns.
    pub(crate) fn start(&self, core: &HeapInner, name: &str, plane: Plane) -> Result<(), BuildError> {
        // A child that this process forks has the file open, too; the process ID tells it from us.
        let title = format!("name {name}\nplane {}\npid {}\n", format!("{plane:?}").to_lowercase(), process::pid());
        let refused = |what, why: &dyn ToString| BuildError::Os { what, why: why.to_string() };
        let file = memfd::create(notice::OF_HEAP, notice::FILE_BYTES as u64)
            .and_then(|file| core.publish(file.as_fd(), &title).map(|()| file))
            .map_err(|error| refused("a file for the heap's notice", &error))?;
        let (sender, receiver) = channel();
        let address = HeapInnerPointer(core);
        let body = move || {
            let address = address;
            // SAFETY: see `HeapInnerPointer`.
            let core = unsafe { &*address.0 };
            while receiver.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                // If there is no memory for a new notice, the last one stays.
                let _ = core.publish(file.as_fd(), &title);
            }
        };
        let thread = std::thread::Builder::new().name("farfield-publish".to_owned()).spawn(body);
        let thread = thread.map_err(|error| refused("a thread", &error))?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((sender, thread));
        Ok(())
    }

    /// Ends the thread, and the notice with it.
    pub(crate) fn stop(&self) {
        if let Some((sender, thread)) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            drop(sender);
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}

/// Function that returns lines for the heap's notice.
type NoticeLines = Box<dyn Fn() -> String + Send>;

/// What the [`Space`](crate::space::Space) of a heap adds to the heap's notice: nothing if there is none.
#[derive(Default)]
pub(crate) struct SpaceNotice(Mutex<Option<NoticeLines>>);

impl SpaceNotice {
    /// Sets the function; `None` ends what it adds. When this returns, nobody calls the last one.
    pub(crate) fn set(&self, lines: Option<NoticeLines>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = lines;
    }

    fn lines(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or_else(String::new, |lines| lines())
    }
}

impl HeapInner {
    fn publish(&self, file: BorrowedFd<'_>, title: &str) -> farfield_os::Result<()> {
        let (own, of_space) = (self.stats().lines(), self.space_notice.lines());
        let text = format!("{title}at_ns {}\n{own}{of_space}", process::now_ns());
        memfd::write_at(file, &notice::seal(&text), 0)
    }
}
