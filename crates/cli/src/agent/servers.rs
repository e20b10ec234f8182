//! Room of the memory servers behind an agent's pool. A thread asks them, because a server may be silent.

use crate::server_stat::{StatClient, servers_of};
use farfield_cluster::agent::ServerRoom;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Longest time between two questions to all servers.
const ASK_EVERY: Duration = Duration::from_secs(5);

/// Thread that asks the servers, until this is dropped.
pub(super) struct RoomThread {
    /// Answers, with the number of the question.
    answers: Receiver<(u64, ServerRoom)>,
    questions: Sender<u64>,
    /// Number of the last question.
    last: Cell<u64>,
}

impl RoomThread {
    /// Asks the servers of a pool once, and starts a thread that goes on. Each step of the first
    /// question blocks for five seconds at most. `None` if no server of the pool can be asked.
    pub(super) fn start(pool: &[String], token: &[u8]) -> anyhow::Result<Option<RoomThread>> {
        let mut asked = AskedPool { pool: pool.to_vec(), servers: BTreeMap::new(), is_reached: true };
        for url in pool.iter().flat_map(|url| servers_of(url)) {
            asked.servers.insert(url.to_owned(), StatClient::new(url, token.to_vec(), None)?);
        }
        if asked.servers.is_empty() {
            return Ok(None);
        }
        let ((answer, answers), (questions, asked_for)) = (channel(), channel());
        let _ = answer.send((0, asked.ask()));
        std::thread::spawn(move || {
            let mut number = 0;
            loop {
                match asked_for.recv_timeout(ASK_EVERY) {
                    Ok(next) => number = next,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                // One answer is enough for all questions so far.
                number = asked_for.try_iter().last().unwrap_or(number);
                if answer.send((number, asked.ask())).is_err() {
                    return;
                }
            }
        });
        Ok(Some(RoomThread { answers, questions, last: Cell::new(0) }))
    }

    /// Returns the newest answer to the last question, if it was not taken yet.
    pub(super) fn take_answer(&self) -> Option<ServerRoom> {
        self.answers.try_iter().filter(|(number, _)| *number == self.last.get()).last().map(|(_, room)| room)
    }

    /// Asks the servers now, because what they store has probably changed. Returns what is known
    /// until they answer.
    pub(super) fn ask(&self) -> ServerRoom {
        self.last.set(self.last.get() + 1);
        let _ = self.questions.send(self.last.get());
        ServerRoom::Asked
    }
}

/// Pool whose servers are asked.
struct AskedPool {
    pool: Vec<String>,
    servers: BTreeMap<String, StatClient>,
    is_reached: bool,
}

impl AskedPool {
    fn ask(&mut self) -> ServerRoom {
        let was_reached = self.is_reached;
        let mut free = BTreeMap::new();
        for (url, server) in &mut self.servers {
            match server.ask() {
                Ok(stats) => {
                    free.insert(url.clone(), free_bytes(&stats.numbers));
                }
                Err(error) if was_reached => tracing::warn!("{error:#}; no job starts"),
                Err(_) => {}
            }
        }
        self.is_reached = free.len() == self.servers.len();
        if !self.is_reached {
            return ServerRoom::Silent;
        }
        if !was_reached {
            tracing::info!("the memory servers answer again");
        }
        // Places of another kind say themselves when they are full.
        let room_of = |leaf: &str| free.get(leaf).copied().unwrap_or(u64::MAX);
        match farfield_pool::room_bytes(&self.pool, room_of) {
            None | Some(u64::MAX) => ServerRoom::Unknown,
            Some(bytes) => ServerRoom::Free { bytes },
        }
    }
}

/// Returns the bytes for which a server has room; `u64::MAX` if it has no limit.
fn free_bytes(numbers: &BTreeMap<&'static str, u64>) -> u64 {
    let of = |name| numbers.get(name).copied().unwrap_or(0);
    match of("capacity_bytes") {
        0 => u64::MAX,
        bytes => bytes.saturating_sub(of("used_bytes")).saturating_sub(of("reserved_bytes")),
    }
}

#[cfg(test)]
mod tests {
    //! Danger: far memory that is promised although its server is full.
    use super::*;

    #[test]
    fn what_is_stored_or_reserved_is_no_room() {
        let numbers = |capacity, used, reserved| {
            BTreeMap::from([("capacity_bytes", capacity), ("used_bytes", used), ("reserved_bytes", reserved)])
        };
        assert_eq!(free_bytes(&numbers(100, 30, 20)), 50);
        assert_eq!(free_bytes(&numbers(100, 90, 20)), 0);
        assert_eq!(free_bytes(&numbers(0, 90, 20)), u64::MAX, "no limit");
    }

    #[test]
    fn places_without_a_server_are_not_asked() {
        assert!(RoomThread::start(&["ssd:/var/tmp?size=1G".to_owned()], b"").unwrap().is_none());
        assert!(RoomThread::start(&[], b"").unwrap().is_none());
    }
}
