//! Memory servers of the jobs, each asked by one of a few threads, so that a silent server makes
//! nothing else wait.

use super::super::{ServerRow, ServerView};
use super::lock;
use super::pace::StepInterval;
use crate::server_stat::servers_of;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of threads that ask servers.
pub(super) const THREADS: usize = 4;
/// Interval between two questions to one server. A server that answers late is asked less often.
const ASK: StepInterval = StepInterval { least: Duration::from_secs(5), share: 10 };
/// Longest sleep of a thread that has nothing to ask, which bounds how late a new server is asked.
const SLEEP: Duration = Duration::from_secs(1);

/// A server, and the client as which it is asked.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ServerKey {
    pub(super) url: String,
    pub(super) token: Vec<u8>,
    /// User that may run the server beside root and this one.
    pub(super) uid: Option<u32>,
}

impl ServerKey {
    /// Makes a key, if a server at this URL can be asked.
    pub(super) fn checked(url: &str, token: Vec<u8>) -> anyhow::Result<ServerKey> {
        anyhow::ensure!(
            servers_of(url).eq([url]),
            "{url}: only servers at tcp://HOST:PORT, tls://HOST:PORT, unix:PATH and shm:PATH are asked"
        );
        ServerView::open(url, token.clone(), None)?;
        Ok(ServerKey { url: url.to_owned(), token, uid: None })
    }
}

/// Servers that are asked, and their last answers.
#[derive(Default)]
pub(super) struct ServerWatch {
    servers: Mutex<BTreeMap<ServerKey, WatchedServer>>,
    news: Condvar,
}

struct WatchedServer {
    /// Absent while a thread asks the server.
    view: Option<ServerView>,
    row: Option<ServerRow>,
    due: Instant,
}

impl ServerWatch {
    /// Returns the last answer of a server, or the error instead of one.
    pub(super) fn row(&self, key: &ServerKey) -> Option<ServerRow> {
        lock(&self.servers).get(key)?.row.clone()
    }

    /// Asks these servers from now on, and no others. A pool may consist of several.
    pub(super) fn watch_only(&self, wanted: &[ServerKey]) {
        let mut servers = lock(&self.servers);
        let before = std::mem::take(&mut *servers);
        let wanted: BTreeSet<&ServerKey> = wanted.iter().collect();
        *servers = before.into_iter().filter(|(key, _)| wanted.contains(key)).collect();
        let mut has_new = false;
        for key in wanted {
            if !servers.contains_key(key)
                && let Ok(view) = ServerView::open(&key.url, key.token.clone(), key.uid)
            {
                has_new = true;
                servers.insert((*key).clone(), WatchedServer { view: Some(view), row: None, due: Instant::now() });
            }
        }
        if has_new {
            self.news.notify_all();
        }
    }

    /// Asks servers in turn until the process ends. Each of [`THREADS`] threads runs this.
    pub(super) fn ask_for_ever(&self) {
        loop {
            let (key, mut view) = self.next_due();
            let start = Instant::now();
            let row = view.read_or_say();
            let due = Instant::now() + ASK.after(start.elapsed());
            // It may not be wanted any more.
            if let Some(server) = lock(&self.servers).get_mut(&key) {
                *server = WatchedServer { view: Some(view), row: Some(row), due };
            }
        }
    }

    /// Waits for a server that is due, and takes its view.
    fn next_due(&self) -> (ServerKey, ServerView) {
        let mut servers = lock(&self.servers);
        loop {
            let now = Instant::now();
            let mut sleep = SLEEP;
            for (key, server) in servers.iter_mut() {
                if server.view.is_some() && server.due <= now {
                    return (key.clone(), server.view.take().expect("just seen"));
                }
                sleep = sleep.min(server.due.saturating_duration_since(now).max(Duration::from_millis(10)));
            }
            servers = self.news.wait_timeout(servers, sleep).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
