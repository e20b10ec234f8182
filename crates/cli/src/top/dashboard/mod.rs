//! `farfield top --serve`: a page that shows jobs, heaps, servers and tenants of one machine or several.
//!
//! One thread reads this machine, one thread per joined dashboard reads that one, and what the
//! page shows is computed once for all readers. `docs/design/web.md` is the design page.

mod access;
mod changes;
mod findings;
mod history;
mod joined;
mod local;
mod openmetrics;
mod pace;
mod rows;
mod servers;

use super::metrics::ScrapeCollector;
use super::{TopArgs, TopSnapshot};
use crate::metrics::MetricSource;
use access::TokenGuard;
use anyhow::{Context, bail, ensure};
use changes::ChangeGate;
use farfield_os::{serving, signals};
use farfield_web::{
    EventChannel, HttpLimits, Method, StatusCode, TlsIdentity, WebRequest, WebResponse, WebScheme, bytes, events,
    metrics, refuse_stranger, shown_token, text, unauthorized,
};
use history::History;
use joined::{JoinCredentials, JoinedSource};
use local::LocalMachine;
use pace::StepInterval;
use rows::{MachineState, RowBook};
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Interval between two looks while somebody looks at the page. A look may take a fiftieth of a
/// processor at most; where it would take more, looks become rarer.
const LOOK: StepInterval = StepInterval { least: Duration::from_secs(1), share: 50 };
/// Interval between two looks while nobody looks at the page: only the history needs them.
const LOOK_ALONE: Duration = history::EVERY;
/// Time for which somebody who has asked for JSON counts as looking.
const INTEREST: Duration = Duration::from_secs(10);
/// Time after which a wait for a signal begins anew.
const SIGNAL_WAIT: Duration = Duration::from_secs(3600);

/// Everything that the threads of a dashboard share.
struct Dashboard {
    channel: Arc<EventChannel>,
    /// This machine, then the joined ones.
    machines: Mutex<Vec<MachineState>>,
    history: Mutex<History>,
    /// Last time that somebody asked for JSON.
    asked: Mutex<Option<Instant>>,
    metrics: MetricSource,
    changes: Option<ChangeGate>,
    /// Certificate, if the page is encrypted.
    identity: Option<TlsIdentity>,
    /// Token of those who may read; `None` if everybody who reaches it may.
    readers: Option<TokenGuard>,
}

/// Serves the page until interrupted. First prints the URL, because the kernel chooses the port if it is 0.
pub(super) fn serve(address: SocketAddr, args: &TopArgs, token: Vec<u8>) -> anyhow::Result<()> {
    let identity = match (&args.tls_cert, &args.tls_key) {
        (Some(certificate), Some(key)) => Some(TlsIdentity::read(certificate, key).context("--tls-cert, --tls-key")?),
        _ => None,
    };
    let readers = args.read_token.as_deref().map(|file| TokenGuard::open("--read-token", file)).transpose()?;
    ensure!(
        address.ip().is_loopback() || identity.is_some() && readers.is_some(),
        "--serve {address}: other machines could read this: give --tls-cert, --tls-key and --read-token; or use \
         127.0.0.1:{port}, and from elsewhere `ssh -N -L {port}:127.0.0.1:{port} THIS-MACHINE` and \
         http://127.0.0.1:{port}/",
        port = address.port()
    );
    if let Some(pid) = args.targets.iter().find(|target| target.parse::<u32>().is_ok()) {
        bail!("--serve shows all jobs: name URLs of memory servers only, not process {pid}");
    }
    let changes = args.allow_changes.as_deref().map(|file| ChangeGate::open(file, token.clone())).transpose()?;
    let credentials = join_credentials(args)?;
    let joined = args.join.iter().map(|url| JoinedSource::parse(url, &credentials));
    let joined = joined.collect::<anyhow::Result<Vec<_>>>()?;
    let local = LocalMachine::new(&args.targets, token)?;
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
    let name = if identity.is_some() { "https" } else { "http" };
    let url = format!("{name}://{}/", listener.local_addr()?);

    let machines = std::iter::once("here").chain(args.join.iter().map(String::as_str));
    let dashboard = Dashboard {
        channel: Arc::default(),
        machines: Mutex::new(machines.map(MachineState::new).collect()),
        history: Mutex::default(),
        asked: Mutex::default(),
        metrics: MetricSource::new("farfield", Box::new(ScrapeCollector)),
        changes,
        identity,
        readers,
    };
    let has_files = dashboard.identity.is_some() || dashboard.readers.is_some() || dashboard.changes.is_some();
    if has_files {
        // Done before there are threads, so that one of them takes all of these signals.
        signals::set_mask(signals::bit(libc::SIGHUP));
    }
    let mut out = std::io::stdout();
    writeln!(out, "{url}").and_then(|()| out.flush())?;
    let (dashboard, local) = (Arc::new(dashboard), Arc::new(local));
    for (index, source) in joined.into_iter().enumerate() {
        let dashboard = dashboard.clone();
        std::thread::spawn(move || joined::read_for_ever(&dashboard, index + 1, source));
    }
    for _ in 0..servers::THREADS {
        let local = local.clone();
        std::thread::spawn(move || local.servers.ask_for_ever());
    }
    let looking = dashboard.clone();
    std::thread::spawn(move || looking.look(&local));
    if has_files {
        let reading = dashboard.clone();
        std::thread::spawn(move || reading.reload_on_signals());
    }
    // Ends with an error only; the threads above end with the process.
    let (limits, answer) = (HttpLimits::default(), |request: &WebRequest| dashboard.answer(request));
    match &dashboard.identity {
        Some(identity) => farfield_web::serve_tls(&listener, &limits, identity, || false, answer)?,
        None => farfield_web::serve(&listener, &limits, || false, answer)?,
    }
    Ok(())
}

fn join_credentials(args: &TopArgs) -> anyhow::Result<JoinCredentials> {
    let token = args.join_token.as_deref().map(|file| {
        let token = crate::token::read_file(file).and_then(|token| Ok(String::from_utf8(token)?));
        token.with_context(|| format!("--join-token {}", file.display()))
    });
    Ok(JoinCredentials { authorities: args.join_ca.clone(), token: token.transpose()? })
}

impl Dashboard {
    /// Looks at this machine again and again, and publishes what has changed.
    fn look(&self, local: &LocalMachine) {
        let (mut views, mut book) = (local::LocalViews::default(), RowBook::default());
        loop {
            let start = Instant::now();
            let snapshot = views.read(local);
            lock(&self.machines)[0].set(Ok(snapshot));
            let rows = rows::of_machines(&lock(&self.machines));
            let at_ms = now_ms();
            lock(&self.history).note(at_ms, &rows);
            let (snapshot, change) = book.update(at_ms, rows);
            self.channel.publish(snapshot, &change);
            let wait = LOOK.after(start.elapsed());
            match self.has_readers() {
                true => std::thread::sleep(wait),
                false => self.channel.wait_for_reader(wait.max(LOOK_ALONE)),
            }
        }
    }

    /// Reads certificate and tokens again on each SIGHUP. What cannot be used stays as it is.
    fn reload_on_signals(&self) {
        loop {
            if !matches!(serving::wait_for_signal(signals::bit(libc::SIGHUP), SIGNAL_WAIT), Ok(Some(_))) {
                continue;
            }
            let certificate = self.identity.as_ref().map_or(Ok(()), TlsIdentity::reload).map_err(anyhow::Error::from);
            let readers = self.readers.as_ref().map_or(Ok(()), TokenGuard::reload);
            let changes = self.changes.as_ref().map_or(Ok(()), ChangeGate::reload);
            let failures: Vec<_> = [certificate, readers, changes].into_iter().filter_map(Result::err).collect();
            for error in &failures {
                crate::say(&format!("nothing changes by this file, which cannot be used: {error:#}"));
            }
            if failures.is_empty() {
                crate::say("certificate and tokens were read again");
            }
        }
    }

    /// Tells whether somebody looks at the page, or has just asked.
    fn has_readers(&self) -> bool {
        self.channel.readers() > 0 || lock(&self.asked).is_some_and(|asked| asked.elapsed() < INTEREST)
    }

    fn answer(&self, request: &WebRequest) -> WebResponse {
        let scheme = if self.identity.is_some() { WebScheme::Https } else { WebScheme::Http };
        if let Some(refusal) = refuse_stranger(request, scheme) {
            return refusal;
        }
        match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, _) if !self.may_read(request) => {
                unauthorized("give any user name, and the token in the file of --read-token as the password")
            }
            (&Method::GET | &Method::HEAD, path) => self.read(path, request.uri().query().unwrap_or_default()),
            (&Method::POST, path @ ("/api/near" | "/api/pool")) => match &self.changes {
                Some(gate) => gate.answer(path, request),
                None => text(StatusCode::FORBIDDEN, "this dashboard is read-only: start it with --allow-changes FILE"),
            },
            _ => text(StatusCode::METHOD_NOT_ALLOWED, "only GET"),
        }
    }

    fn may_read(&self, request: &WebRequest) -> bool {
        let Some(readers) = &self.readers else { return true };
        shown_token(request).is_some_and(|shown| readers.admits(&shown))
    }

    fn read(&self, path: &str, query: &str) -> WebResponse {
        let file = |kind, contents: &'static str| bytes(StatusCode::OK, kind, contents.as_bytes());
        match path {
            "/" => file("text/html; charset=utf-8", include_str!("page/index.html")),
            "/page.css" => file("text/css; charset=utf-8", include_str!("page/page.css")),
            "/page.js" => file("text/javascript; charset=utf-8", include_str!("page/page.js")),
            "/icon.svg" => file("image/svg+xml", include_str!("page/icon.svg")),
            "/events" => events(self.channel.clone()),
            "/metrics" => metrics(self.metrics.text()),
            "/api/about" => self.about(),
            "/api/top" => self.top(),
            "/api/row" => self.row(parameter(query, "id")),
            "/api/history" => {
                let since_ms = parameter(query, "since").parse().unwrap_or(0);
                json(&lock(&self.history).since(parameter(query, "id"), since_ms))
            }
            _ => text(StatusCode::NOT_FOUND, "no such page; the dashboard is at /"),
        }
    }

    fn about(&self) -> WebResponse {
        let about = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "machine": super::machine_name(),
            "changes": self.changes.is_some(),
        });
        json(&about)
    }

    /// Returns what `farfield top --json` prints.
    fn top(&self) -> WebResponse {
        *lock(&self.asked) = Some(Instant::now());
        let snapshot = lock(&self.machines)[0].snapshot.clone();
        match snapshot {
            Ok(snapshot) => json(&*snapshot),
            Err(_) => text(StatusCode::SERVICE_UNAVAILABLE, "the first look is not over: try again in a second"),
        }
    }

    /// Returns everything that is known of one row.
    fn row(&self, id: &str) -> WebResponse {
        let row = rows::details(&lock(&self.machines), id);
        row.map_or_else(|| text(StatusCode::NOT_FOUND, "it is gone"), |row| json(&row))
    }
}

fn json(value: &impl serde::Serialize) -> WebResponse {
    match serde_json::to_vec(value) {
        Ok(text) => bytes(StatusCode::OK, "application/json", text),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error),
    }
}

/// Returns a parameter of a query, or an empty text. Identifiers and numbers need no decoding.
fn parameter<'a>(query: &'a str, name: &str) -> &'a str {
    query.split('&').find_map(|pair| pair.split_once('=').filter(|(this, _)| *this == name)).map_or("", |it| it.1)
}

/// Locks what no thread leaves half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the time in milliseconds, as JavaScript counts it.
fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_found_by_their_whole_name() {
        assert_eq!(parameter("xid=1&id=0-j-7&since=5", "id"), "0-j-7");
        assert_eq!(parameter("xid=1&id", "id"), "");
        assert_eq!(parameter("", "id"), "");
    }
}
