//! Client of etcd: leases, keys, and transactions, over the JSON gateway that each server of etcd has since 3.4.

use super::urls::EtcdUrls;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest wait for one server before the next one is asked.
const SERVER_WITHIN: Duration = Duration::from_secs(1);
/// Most bytes of an answer: all names of a program, and more.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Servers of one etcd.
pub(super) struct EtcdClient {
    servers: Vec<String>,
    /// Server that has answered last.
    current: AtomicUsize,
    agent: ureq::Agent,
    /// User and password, if etcd wants them.
    login: Option<(String, String)>,
    /// Token that it has given for these.
    token: Mutex<Option<String>>,
}

/// Error: etcd has not done what it was asked for, as far as is known.
#[derive(Debug, thiserror::Error)]
pub(super) enum EtcdError {
    #[error("it cannot be reached ({0}): start it, or name more of its servers (--etcd URL,URL)")]
    Unreachable(String),
    #[error("it does not answer ({0}): most of its servers must run and reach each other (etcdctl endpoint health)")]
    Silent(String),
    #[error("it refuses: {0}")]
    Refused(String),
    #[error("it refuses the user: {0}")]
    Unauthenticated(String),
    #[error("its answer is none of etcd 3.4 or newer: {0}")]
    Malformed(&'static str),
}

/// Value of a key.
#[derive(Clone, Debug)]
pub(super) struct StoredValue {
    pub(super) value: Vec<u8>,
    /// Revision in which it was written last.
    pub(super) revision: i64,
    /// Lease that it goes with; zero if it goes with none.
    pub(super) lease: i64,
}

/// Condition of a transaction.
pub(super) enum EtcdCondition<'a> {
    Absent(&'a str),
    /// The key was written last in this revision.
    Revision(&'a str, i64),
    /// The key goes with this lease.
    Lease(&'a str, i64),
}

/// Step of a transaction.
pub(super) enum EtcdStep<'a> {
    Put {
        key: &'a str,
        value: &'a [u8],
        lease: i64,
    },
    Get(&'a str),
    Delete(&'a str),
    /// All keys that begin so are deleted.
    DeleteAll(&'a str),
}

/// End of a transaction.
pub(super) struct TransactionEnd {
    /// Whether its conditions held, so that its steps were done.
    pub(super) is_done: bool,
    /// Values of the keys that it has read, in order.
    pub(super) found: Vec<Option<StoredValue>>,
}

fn encode(bytes: impl AsRef<[u8]>) -> String {
    BASE64.encode(bytes)
}

/// Returns the first key after those that begin so.
fn after(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// Numbers of 64 bits are texts in JSON, and absent if they are zero.
fn number(value: &Value) -> i64 {
    value.as_str().and_then(|text| text.parse().ok()).or(value.as_i64()).unwrap_or(0)
}

fn key_value(found: &Value) -> Option<(String, StoredValue)> {
    let bytes = |name: &str| BASE64.decode(found[name].as_str().unwrap_or_default()).ok();
    let key = String::from_utf8(bytes("key")?).ok()?;
    let (revision, lease) = (number(&found["mod_revision"]), number(&found["lease"]));
    Some((key, StoredValue { value: bytes("value")?, revision, lease }))
}

fn key_values(answer: &Value) -> impl Iterator<Item = (String, StoredValue)> + '_ {
    answer["kvs"].as_array().into_iter().flatten().filter_map(key_value)
}

impl EtcdClient {
    /// Creates a client of the servers at these URLs, which commas separate.
    pub(super) fn new(urls: &str) -> Result<EtcdClient, String> {
        let EtcdUrls { servers, login, files } = EtcdUrls::parse(urls)?;
        let config = ureq::Agent::config_builder().max_redirects(0).proxy(None).http_status_as_error(false);
        let agent = ureq::Agent::new_with_config(config.tls_config(files.config()?).build());
        Ok(EtcdClient { servers, current: AtomicUsize::new(0), agent, login, token: Mutex::default() })
    }

    /// Asks one server after the other until one answers, or the time is over.
    fn ask(&self, path: &str, message: &Value, within: Duration) -> Result<Value, EtcdError> {
        let (begun, first, count) = (Instant::now(), self.current.load(Relaxed), self.servers.len());
        let mut failed = EtcdError::Silent(self.servers.join(","));
        // The connection to a server may be one that it has closed: it is asked twice.
        for turn in 0..=count {
            let left = within.saturating_sub(begun.elapsed());
            if left.is_zero() {
                break;
            }
            let server = (first + turn) % count;
            match self.ask_server(&self.servers[server], path, message, left.min(SERVER_WITHIN)) {
                // It has no leader to ask, or not in time.
                Err(error @ (EtcdError::Unreachable(_) | EtcdError::Silent(_))) => failed = error,
                answer => {
                    self.current.store(server, Relaxed);
                    return answer;
                }
            }
        }
        Err(failed)
    }

    /// Asks a server, with a token if a user is named. A token that has ended is replaced once.
    fn ask_server(&self, server: &str, path: &str, message: &Value, within: Duration) -> Result<Value, EtcdError> {
        let Some((user, password)) = &self.login else { return self.post(server, path, message, None, within) };
        let known = self.token.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(token) = known {
            match self.post(server, path, message, Some(&token), within) {
                Err(EtcdError::Unauthenticated(_)) => {}
                answer => return answer,
            }
        }
        let answer =
            self.post(server, "auth/authenticate", &json!({ "name": user, "password": password }), None, within)?;
        let token = answer["token"].as_str().ok_or(EtcdError::Malformed("it gives no token"))?.to_owned();
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token.clone());
        self.post(server, path, message, Some(&token), within)
    }

    fn post(
        &self,
        server: &str,
        path: &str,
        message: &Value,
        token: Option<&str>,
        within: Duration,
    ) -> Result<Value, EtcdError> {
        let mut request = self.agent.post(format!("{server}/v3/{path}")).content_type("application/json");
        if let Some(token) = token {
            request = request.header("authorization", token);
        }
        let request = request.config().timeout_global(Some(within)).build();
        let failed = |error: ureq::Error| match error {
            ureq::Error::Timeout(_) => EtcdError::Silent(server.to_owned()),
            error => EtcdError::Unreachable(format!("{server}: {error}")),
        };
        let mut response = request.send(message.to_string()).map_err(failed)?;
        let text = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec().map_err(failed)?;
        // A stream has one answer a line; ours have one.
        let answer: Value = serde_json::from_slice(&text).map_err(|_| EtcdError::Malformed("it is no JSON"))?;
        if response.status().is_success() {
            return Ok(answer);
        }
        let said = answer["message"].as_str().or(answer["error"].as_str()).unwrap_or_default();
        let told = format!("{server}: {} {said}", response.status().as_u16());
        // Codes of gRPC: the deadline is exceeded, the server is unavailable, or the token has ended.
        Err(match number(&answer["code"]) {
            4 | 14 => EtcdError::Silent(format!("{server}: {said}")),
            16 => EtcdError::Unauthenticated(told),
            _ => EtcdError::Refused(told),
        })
    }

    /// Begins a lease. Returns its number, and for how long it is granted.
    pub(super) fn grant(&self, term: Duration, within: Duration) -> Result<(i64, Duration), EtcdError> {
        let seconds = term.as_secs() + u64::from(term.subsec_nanos() > 0);
        let answer = self.ask("lease/grant", &json!({ "TTL": seconds.to_string(), "ID": "0" }), within)?;
        match (number(&answer["ID"]), u64::try_from(number(&answer["TTL"]))) {
            (lease @ 1.., Ok(term @ 1..)) => Ok((lease, Duration::from_secs(term))),
            _ => Err(EtcdError::Malformed("it grants no lease")),
        }
    }

    /// Renews a lease. Returns for how long; `None` if there is no such lease any more.
    pub(super) fn renew(&self, lease: i64, within: Duration) -> Result<Option<Duration>, EtcdError> {
        let answer = self.ask("lease/keepalive", &json!({ "ID": lease.to_string() }), within)?;
        let granted = &answer["result"];
        if number(&granted["ID"]) != lease {
            return Err(EtcdError::Malformed("it is about another lease"));
        }
        Ok(u64::try_from(number(&granted["TTL"])).ok().filter(|term| *term > 0).map(Duration::from_secs))
    }

    /// Ends a lease, and removes the keys that go with it. Does nothing if there is none.
    pub(super) fn revoke(&self, lease: i64, within: Duration) -> Result<(), EtcdError> {
        match self.ask("lease/revoke", &json!({ "ID": lease.to_string() }), within) {
            Err(EtcdError::Refused(_)) | Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns all keys that begin so, without the prefix, as they are at one moment.
    pub(super) fn range(&self, prefix: &str, within: Duration) -> Result<BTreeMap<String, StoredValue>, EtcdError> {
        let message = json!({ "key": encode(prefix), "range_end": encode(after(prefix)) });
        let answer = self.ask("kv/range", &message, within)?;
        let short = |(key, value): (String, StoredValue)| Some((key.strip_prefix(prefix)?.to_owned(), value));
        Ok(key_values(&answer).filter_map(short).collect())
    }

    /// Transacts: all steps are done at once if all conditions hold.
    pub(super) fn transact(
        &self,
        conditions: &[EtcdCondition<'_>],
        steps: &[EtcdStep<'_>],
        within: Duration,
    ) -> Result<TransactionEnd, EtcdError> {
        let condition = |compare: &EtcdCondition<'_>| match compare {
            EtcdCondition::Absent(key) => json!({ "key": encode(key), "target": "CREATE", "create_revision": "0" }),
            EtcdCondition::Revision(key, revision) => {
                json!({ "key": encode(key), "target": "MOD", "mod_revision": revision.to_string() })
            }
            EtcdCondition::Lease(key, lease) => {
                json!({ "key": encode(key), "target": "LEASE", "lease": lease.to_string() })
            }
        };
        let step = |step: &EtcdStep<'_>| match step {
            EtcdStep::Put { key, value, lease } => {
                let put = json!({ "key": encode(key), "value": encode(value), "lease": lease.to_string() });
                json!({ "request_put": put })
            }
            EtcdStep::Get(key) => json!({ "request_range": { "key": encode(key) } }),
            EtcdStep::Delete(key) => json!({ "request_delete_range": { "key": encode(key) } }),
            EtcdStep::DeleteAll(prefix) => {
                json!({ "request_delete_range": { "key": encode(prefix), "range_end": encode(after(prefix)) } })
            }
        };
        let compare: Vec<Value> = conditions.iter().map(condition).collect();
        let success: Vec<Value> = steps.iter().map(step).collect();
        let answer = self.ask("kv/txn", &json!({ "compare": compare, "success": success }), within)?;
        let is_done = answer["succeeded"].as_bool().unwrap_or(false);
        let read = answer["responses"].as_array().into_iter().flatten();
        let read = read.filter_map(|response| response.get("response_range"));
        let found = read.map(|range| key_values(range).next().map(|(_, value)| value)).collect();
        Ok(TransactionEnd { is_done, found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// Answers each request with the next of these, and returns what was asked.
    fn server(answers: Vec<&'static str>) -> (String, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let thread = std::thread::spawn(move || {
            let answer = |answer: &str| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut asked = Vec::new();
                // What is asked is an object of JSON.
                while !asked.ends_with(b"}") {
                    let mut part = [0; 1024];
                    let bytes = stream.read(&mut part).unwrap();
                    asked.extend_from_slice(&part[..bytes]);
                }
                stream.write_all(answer.as_bytes()).unwrap();
                String::from_utf8_lossy(&asked).into_owned()
            };
            answers.into_iter().map(answer).collect()
        });
        (url, thread)
    }

    fn http(status: &str, body: &str) -> &'static str {
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
        Box::leak(head.into_boxed_str())
    }

    const WITHIN: Duration = Duration::from_secs(20);

    #[test]
    fn another_server_is_asked_if_one_has_no_quorum_or_is_not_there() {
        let no_quorum = http("503 Unavailable", r#"{"code":14,"message":"etcdserver: no leader"}"#);
        let lease = http("200 OK", r#"{"ID":"7","TTL":"5"}"#);
        let (bad, asked_bad) = server(vec![no_quorum]);
        let (good, asked) = server(vec![lease]);
        let closed = "http://127.0.0.1:1";
        let client = EtcdClient::new(&format!("{closed}, {bad}/,{good}")).unwrap();
        assert_eq!(client.grant(Duration::from_millis(4100), WITHIN).unwrap(), (7, Duration::from_secs(5)));
        assert!(asked_bad.join().unwrap()[0].starts_with("POST /v3/lease/grant"));
        drop(asked.join().unwrap());
        let nobody = EtcdClient::new(closed).unwrap().renew(7, WITHIN).unwrap_err();
        assert!(nobody.to_string().contains("--etcd"), "{nobody}");
    }

    #[test]
    fn what_is_no_etcd_is_told_so() {
        let answers = [
            (http("404 Not Found", "{}"), "refuses"),
            (http("200 OK", "<html>"), "none of etcd"),
            (http("200 OK", r#"{"ID":"7"}"#), "grants no lease"),
        ];
        for (answer, expected) in answers {
            let (url, asked) = server(vec![answer]);
            let error = EtcdClient::new(&url).unwrap().grant(WITHIN, WITHIN).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            drop(asked.join());
        }
    }

    #[test]
    fn a_token_that_has_ended_is_replaced_once() {
        let ended = http("401 Unauthorized", r#"{"code":16,"message":"etcdserver: invalid auth token"}"#);
        let token = |token| http("200 OK", if token == 1 { r#"{"token":"one"}"# } else { r#"{"token":"two"}"# });
        let lease = http("200 OK", r#"{"ID":"7","TTL":"5"}"#);
        let (url, asked) = server(vec![token(1), lease, ended, token(2), lease, ended, token(2), ended]);
        let client = EtcdClient::new(&url.replace("http://", "http://us%65r:p@ss:word@")).unwrap();
        client.grant(WITHIN, WITHIN).unwrap();
        client.grant(WITHIN, WITHIN).unwrap();
        let refused = client.grant(WITHIN, WITHIN).unwrap_err();
        assert!(refused.to_string().contains("refuses the user"), "{refused}");
        let asked = asked.join().unwrap();
        assert!(
            asked[0].contains(r#""name":"user""#) && asked[0].contains(r#""password":"p@ss:word""#),
            "{}",
            asked[0]
        );
        let tokens =
            asked.iter().map(|asked| ["one", "two"].map(|token| asked.contains(&format!("authorization: {token}"))));
        let [first, second, none] = [[true, false], [false, true], [false, false]];
        assert_eq!(tokens.collect::<Vec<_>>(), [none, first, first, none, second, second, none, second]);
    }
}
