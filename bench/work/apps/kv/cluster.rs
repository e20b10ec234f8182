//! The same store in Redis Cluster: a client asks the node that has a key, over connections of its own.

use super::load::KvLoad;
use super::{KvFound, KvStore, KvValue, LOADER, finish, value};
use crate::Outcome;
use crate::polled::now;
use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use farfield_bench::redis_slots::node_of_key;
use std::io::{Read, Write};
use std::net::TcpStream;

/// Keys that are stored by one message in the beginning.
const BATCH: usize = 1000;
const VALUE_BYTES: usize = size_of::<KvValue>();
/// What stands around a value.
const BEFORE: &[u8] = b"$32\r\n";
const AFTER: &[u8] = b"\r\n";
const ANSWER_BYTES: usize = BEFORE.len() + VALUE_BYTES + AFTER.len();
const OK: &[u8] = b"+OK\r\n";

/// A client's connections to all nodes.
struct ClusterClient {
    nodes: Vec<TcpStream>,
    /// Whether the client polls for answers, as a node of shared memory does: if it has a processor for itself.
    is_polling: bool,
    message: Vec<u8>,
    answer: Vec<u8>,
}

/// Returns a key as Redis knows it.
fn name(key: u64) -> String {
    format!("user{key:016}")
}

fn bulk(message: &mut Vec<u8>, bytes: &[u8]) {
    message.extend(format!("${}\r\n", bytes.len()).bytes());
    message.extend(bytes);
    message.extend(b"\r\n");
}

fn set(message: &mut Vec<u8>, key: u64, value: &KvValue) {
    message.extend(b"*3\r\n$3\r\nSET\r\n");
    bulk(message, name(key).as_bytes());
    bulk(message, &value.map(u64::to_le_bytes).concat());
}

impl ClusterClient {
    fn connect(addresses: &str, is_polling: bool) -> Result<ClusterClient> {
        let connect = |address: &str| -> Result<TcpStream> {
            let stream = TcpStream::connect(address).with_context(|| format!("no Redis at {address}"))?;
            stream.set_nodelay(true)?;
            stream.set_nonblocking(is_polling)?;
            Ok(stream)
        };
        let nodes = addresses.split(',').map(connect).collect::<Result<_>>()?;
        Ok(ClusterClient { nodes, is_polling, message: Vec::new(), answer: Vec::new() })
    }

    /// Sends what is in `message` to a node.
    fn send(&mut self, node: usize) -> Result<()> {
        let mut sent = 0;
        while sent < self.message.len() {
            sent += now(self.nodes[node].write(&self.message[sent..]))?;
        }
        self.message.clear();
        Ok(())
    }

    /// Receives so many bytes of an answer of a node. An error message is one.
    fn receive(&mut self, node: usize, bytes: usize) -> Result<()> {
        let mut filled = 0;
        self.answer.resize(bytes, 0);
        while filled < bytes {
            filled += now(self.nodes[node].read(&mut self.answer[filled..]))?;
            if self.answer[0] == b'-' || self.answer.starts_with(b"$-1\r\n") {
                self.answer.truncate(filled);
                break;
            }
        }
        let text = || String::from_utf8_lossy(&self.answer).into_owned();
        ensure!(self.answer[0] != b'-', "Redis says {}", text());
        Ok(())
    }

    /// Passes the keys in batches, each of which belongs to one node.
    fn in_batches(&mut self, keys: u64, mut work: impl FnMut(&mut Self, usize, &[u64]) -> Result<()>) -> Result<()> {
        ensure!(!self.is_polling, "many keys are for a client that waits");
        let nodes = self.nodes.len();
        let mut batches: Vec<Vec<u64>> = vec![Vec::new(); nodes];
        for key in 0..keys {
            let node = node_of_key(name(key).as_bytes(), nodes);
            batches[node].push(key);
            if batches[node].len() == BATCH {
                work(self, node, &std::mem::take(&mut batches[node]))?;
            }
        }
        batches.iter().enumerate().try_for_each(|(node, keys)| work(self, node, keys))
    }

    /// Stores the values with which a store begins.
    fn store(&mut self, node: usize, keys: &[u64]) -> Result<()> {
        keys.iter().for_each(|key| set(&mut self.message, *key, &value(*key, LOADER, 0)));
        self.send(node)?;
        self.receive(node, keys.len() * OK.len())?;
        ensure!(self.answer.chunks(OK.len()).all(|answer| answer == OK), "Redis does not take the values");
        Ok(())
    }

    /// Asks for the value of a key.
    fn ask(&mut self, key: u64) {
        self.message.extend(b"*2\r\n$3\r\nGET\r\n");
        bulk(&mut self.message, name(key).as_bytes());
    }
}

/// Reads the answer to a question for a value.
fn read_value(answer: &[u8]) -> Result<Option<KvValue>> {
    let Some(bytes) = answer.strip_prefix(BEFORE).and_then(|rest| rest.strip_suffix(AFTER)) else {
        return Ok(None);
    };
    let (words, _) = bytes.as_chunks::<8>();
    let words: [[u8; 8]; 4] = words.try_into().map_err(|_| anyhow!("Redis has a value of another size"))?;
    Ok(Some(words.map(u64::from_le_bytes)))
}

impl KvStore for ClusterClient {
    type Error = Error;

    fn get(&mut self, key: u64) -> Result<Option<KvValue>> {
        let node = node_of_key(name(key).as_bytes(), self.nodes.len());
        self.ask(key);
        self.send(node)?;
        self.receive(node, ANSWER_BYTES)?;
        read_value(&self.answer)
    }

    fn put(&mut self, key: u64, value: KvValue) -> Result<()> {
        let node = node_of_key(name(key).as_bytes(), self.nodes.len());
        set(&mut self.message, key, &value);
        self.send(node)?;
        self.receive(node, OK.len())?;
        if self.answer != OK {
            bail!("Redis does not take a value");
        }
        Ok(())
    }

    /// In two steps, as YCSB's clients do it: others may write between them.
    fn swap(&mut self, key: u64, value: KvValue) -> Result<Option<KvValue>> {
        let before = self.get(key)?;
        self.put(key, value)?;
        Ok(before)
    }

    /// Asks each node at once for all that it has.
    fn scan(&mut self, first: u64, count: u64) -> Result<Vec<KvValue>> {
        let mut asked = vec![0; self.nodes.len()];
        for (node, asked) in asked.iter_mut().enumerate() {
            for key in first..first + count {
                if node_of_key(name(key).as_bytes(), self.nodes.len()) == node {
                    self.ask(key);
                    *asked += 1;
                }
            }
            // Nothing is sent to a node that has none of them.
            self.send(node)?;
        }
        let mut read = Vec::with_capacity(count as usize);
        for (node, asked) in asked.into_iter().enumerate().filter(|(_, asked)| *asked > 0) {
            self.receive(node, asked * ANSWER_BYTES)?;
            for answer in self.answer.chunks(ANSWER_BYTES) {
                read.extend(read_value(answer)?);
            }
        }
        Ok(read)
    }
}

pub(super) fn run(load: KvLoad, addresses: &str) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    outcome.phase("fill", load.keys, || {
        ClusterClient::connect(addresses, false)?.in_batches(load.keys, ClusterClient::store)
    })?;
    let is_polling = load.clients == 1;
    let clients: Vec<ClusterClient> =
        (0..load.clients).map(|_| ClusterClient::connect(addresses, is_polling)).collect::<Result<_>>()?;
    let found = outcome.phase("serve", load.all_ops(), || {
        std::thread::scope(|s| {
            let clients: Vec<_> =
                (0..).zip(clients).map(|(number, mut client)| s.spawn(move || load.run(number, &mut client))).collect();
            clients.into_iter().try_fold(KvFound::default(), |found, client| {
                Ok::<_, Error>(found.add(client.join().expect("no client panics")?))
            })
        })
    })?;
    let mut end = KvFound::default();
    ClusterClient::connect(addresses, false)?.in_batches(load.keys_in_the_end(), |client, node, keys| {
        keys.iter().for_each(|key| client.ask(*key));
        client.send(node)?;
        client.receive(node, keys.len() * ANSWER_BYTES)?;
        let answers = client.answer.chunks(ANSWER_BYTES);
        ensure!(answers.len() == keys.len(), "Redis has lost values");
        keys.iter().zip(answers).try_for_each(|(key, answer)| {
            end.see(*key, read_value(answer)?, load.is_exact);
            Ok(())
        })
    })?;
    finish(&mut outcome, load, found, end);
    Ok(outcome)
}
