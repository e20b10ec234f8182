//! The notice of a node: what `farfield share status` and `farfield top` show of it. A thread writes it
//! to a file without a path, which they find among the files that the process has open.

use super::ShareNode;
use super::WaitCause;
use super::names::NameRow;
use super::waits::WaitNote;
use crate::NodeStartError;
use crate::stats::NodeStats;
use core::fmt::Write as _;
use core::time::Duration;
use farfield_core::{notice, notice_lines};
use farfield_os::{memfd, process};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Weak;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;

/// Time between two notices. Readers refresh each second.
const EVERY: Duration = Duration::from_millis(250);
/// Most waits, and most locks that are waited for, in a notice.
const WAITS_MAX: usize = 32;
/// Most names in a notice.
const NAMES_MAX: usize = 32;

/// The thread that writes notices. It ends, and the notice with it, when this is dropped.
pub(crate) struct NoticeThread(Option<(Sender<()>, JoinHandle<()>)>);

impl NoticeThread {
    /// Starts the thread. The first notice is written when this returns.
    pub(crate) fn start(node: &ShareNode, program: u64) -> Result<NoticeThread, NodeStartError> {
        // A child that this process forks has the file open, too; the process ID tells it from us.
        let title = format!("program {program:016x}\npid {}\n", process::pid());
        let file = memfd::create(notice::OF_NODE, notice::FILE_BYTES as u64)
            .and_then(|file| publish(node, file.as_fd(), &title).map(|()| file))
            .map_err(|errno| NodeStartError::os("write the node's notice")(errno.into()))?;
        let (sender, receiver) = channel();
        let node: Weak<ShareNode> = node.this.clone();
        let body = move || {
            while receiver.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let Some(node) = node.upgrade() else { return };
                // If there is no memory for a new notice, the last one stays.
                let _ = publish(&node, file.as_fd(), &title);
            }
        };
        let thread = std::thread::Builder::new().name("share-notice".into()).spawn(body);
        Ok(NoticeThread(Some((sender, thread.map_err(NodeStartError::os("start a thread"))?))))
    }
}

impl Drop for NoticeThread {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.0.take() {
            drop(sender);
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn publish(node: &ShareNode, file: BorrowedFd<'_>, title: &str) -> farfield_os::Result<()> {
    let mut text = format!("{title}at_ns {}\n{}", process::now_ns(), node.lines());
    // The last lines are those of names, and of locks with many holders.
    let whole = text.get(..notice::TEXT_BYTES_MAX).and_then(|fits| fits.rfind('\n'));
    text.truncate(whole.map_or(text.len(), |end| end + 1));
    memfd::write_at(file, &notice::seal(&text), 0)
}

impl ShareNode {
    /// Returns what the notice says of the node.
    fn lines(&self) -> String {
        let (running, queued) = self.workers.counts();
        let url = self.peers.url_of(self.id).unwrap_or_default();
        let mut text = format!(
            "node {}\nnodes {}\nurl {url}\nnear_limit_bytes {}\n",
            self.id,
            self.peers.count(),
            self.near_bytes
        );
        text += &format!("workers {}\nrunning_tasks {running}\nqueued_tasks {queued}\n", self.workers.most());
        text += &notice_lines!(
            "", NodeStats, self.stats();
            numbers messages fetches frees spawns given_tasks results message_bytes moved_objects
                object_bytes copy_bytes orphans late_frees backup_batches backup_bytes backup_servers promoted_objects
                promoted_bytes;
            durations; lists
        );
        if let Some((waiting_bytes, left, of)) = self.backup_lag() {
            text +=
                &format!("has_backup 1\nbackup_good {}\nbackup_waiting_bytes {waiting_bytes}\n", u8::from(left > 0));
            text += &format!("backup_servers_at_first {of}\n");
        }
        let lost: Vec<_> = (0..self.peers.count()).filter(|node| self.peers.is_lost(super::NodeId(*node))).collect();
        text += &format!("lost_nodes {}\nview {}\n", join(&lost), self.peers.view());
        if self.authority().is_elected() {
            text += &format!("leads {}\n", u8::from(self.first.leads()));
        }
        // Writing into a string cannot fail.
        for (index, WaitNote { cause, node, since }) in self.wait_notes.all().iter().take(WAITS_MAX).enumerate() {
            let (kind, word) = match cause {
                WaitCause::Task => ("task", 0),
                WaitCause::Lock(word) => ("lock", word.bits()),
                WaitCause::Channel(word) => ("channel", word.bits()),
                WaitCause::Name => ("name", 0),
                WaitCause::Answer => ("answer", 0),
            };
            let _ = writeln!(text, "wait_{index} {kind} {node} {} {word:x}", since.elapsed().as_millis());
        }
        for (index, (word, holders, waiters)) in self.locks.wanted().iter().take(WAITS_MAX).enumerate() {
            let _ = writeln!(text, "lock_{index} {:x} {waiters} {}", word.bits(), join(holders));
        }
        let (count, rows) = self.name_rows(NAMES_MAX);
        let _ = writeln!(text, "names {count}");
        for (index, NameRow { name, type_name, home, is_lost }) in rows.iter().enumerate() {
            let _ = writeln!(text, "name_{index} {home} {} {name} {type_name}", u8::from(*is_lost));
        }
        text
    }
}

fn join(nodes: &[u16]) -> String {
    nodes.iter().map(u16::to_string).collect::<Vec<_>>().join(" ")
}
