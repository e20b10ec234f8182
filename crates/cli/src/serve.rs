//! `farfield serve`: runs a memory server.

use crate::address::address;
use crate::size::Size;
use anyhow::Context;
use clap::{Args, ValueEnum};
use farfield_os::{serving, signals};
use farfield_pager::runner::machine;
use farfield_server::{Config, ListenUrl, Server, ServerFiles, TenantChanges, TenantConfig, Tenants};
use farfield_wic::Registry;
use sd_notify::NotifyState;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Keep far memory for programs on this or other machines.
///
/// Programs reach it with --far URL. What a program keeps here is freed when the program ends, also when it is killed.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// Where to listen: tls://HOST:PORT with --tls-cert, tcp://HOST:PORT in clear, or unix:PATH for programs on this
    /// machine, which then share the memory instead of copying it. May be given several times
    /// [default: tcp://127.0.0.1:7400 and a socket of this user]
    #[arg(long, value_name = "URL")]
    listen: Vec<ListenUrl>,
    /// Most memory to keep: 64G, or 50% of this machine's (or container's) [default: 90% of what is free]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, alias = "memory")]
    capacity: Option<Size>,
    /// File with a line `NAME TOKEN QUOTA` for each tenant, read again on SIGHUP. Without it, everybody who can connect
    /// may use the memory
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Certificate of the server for tls:// (PEM, as `farfield cert server` makes it), read again on SIGHUP
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of that certificate
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Authority that signs the certificates of clients; a client whose certificate has the name of a tenant needs no
    /// token. `none` asks clients for no certificate, and then they need tokens
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Listen without --token-file where other machines can connect: everybody who reaches the port may use the memory
    #[arg(long)]
    insecure: bool,
    /// Offer one-sided reads to heaps on other machines through a provider of libfabric, tcp: they use
    /// --far fabric:tcp://HOST:PORT. Needs a farfield that was built with --features fabric
    #[arg(long, value_name = "PROVIDER")]
    fabric: Option<String>,
    /// Run functions that clients ship as WebAssembly, each in a sandbox that reaches the memory of
    /// its client and nothing else: `tiered` compiles code once interpreting it has taken as long as
    /// that, `interpreted` never, `compiled` at the first call
    #[arg(long, value_name = "ENGINE", num_args = 0..=1, require_equals = true, default_missing_value = "tiered")]
    sandbox: Option<EngineName>,
    /// Load native functions from a shared library, which clients call by name. Its code runs in the server and is
    /// trusted. May be given several times
    #[arg(long, value_name = "LIB.so")]
    functions: Vec<PathBuf>,
    /// Answer Prometheus at http://ADDR:PORT/metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
    metrics: Option<SocketAddr>,
    /// How long the server keeps the memory of a client that lost its connection: 10s, 500ms, 0 [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    lease: Option<Duration>,
    /// How long to wait on SIGTERM until clients have freed all memory. A second signal ends at once [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    drain_timeout: Option<Duration>,
    /// Most connections at a time. One client (tenant or address) may have as many as it leaves free
    #[arg(long, value_name = "N", default_value_t = Config::default().connections_max, value_parser = connections)]
    max_connections: usize,
    /// How long an idle connection polls for requests before its thread sleeps: longer is faster and takes more CPU
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "50us")]
    spin: Duration,
    /// How to write the log (to stderr; FARFIELD_LOG=debug for more)
    #[arg(long, value_enum, default_value = "auto")]
    log_format: LogFormat,
    /// For one job: no drain, a short lease, only warnings in the log
    #[arg(long, hide = true)]
    private: bool,
    /// Ends when its parent is not this process any more
    #[arg(long, value_name = "PID", hide = true)]
    parent_pid: Option<i32>,
}

/// Name of what runs shipped code.
#[derive(Clone, Copy, ValueEnum, Debug)]
enum EngineName {
    Tiered,
    Interpreted,
    Compiled,
}

const EXAMPLES: &str = "\
Examples:
  farfield serve                                          For this user on this machine
  farfield serve --listen tcp://0.0.0.0:7400 --capacity 64G --token-file tokens
                                                          For other machines; see --token-file
  farfield serve --listen tls://0.0.0.0:7400 --tls-cert server.pem --tls-key server.key --tls-client-ca ca.pem
                                                          Encrypted, for clients with a certificate (farfield cert)
  farfield serve --listen unix:/run/farfield.sock         For programs on this machine only
  farfield serve --metrics 127.0.0.1:7401                 With metrics for Prometheus
  farfield serve --sandbox                                Also runs code that clients ship (docs/design/wic.md)
  farfield serve --functions ./libledger.so               Also runs functions of a library (docs/guide/functions.md)

Without --token-file everybody who can reach a TCP port may use the memory, so the default is this machine only, and
other addresses need --token-file, --tls-client-ca or --insecure; a socket serves processes of the same user and root. \
A token file looks like this (chmod 600):
  alice  8Xw0p3kq  16G
  batch  Zk3v0s1d  -
  carol  -         8G
The token - means that only a certificate with the tenant's name will do. On SIGHUP the file and the certificates are
read again: jobs that run go on, and tokens that were exchanged start no new ones.
When it listens it prints one line of JSON to stdout, unless that is a terminal.";

#[derive(Clone, Copy, PartialEq, ValueEnum, Debug)]
enum LogFormat {
    /// Text on a terminal, else JSON
    Auto,
    /// Lines for people
    Text,
    /// One object per line
    Json,
}

/// Parses a number of connections, which must be at least 1.
fn connections(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("a server without connections is of no use: give at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("give a number".to_owned()),
    }
}

/// Returns the capacity in bytes. Returns an error if it is more than the memory of the machine,
/// which would run out of memory before it refused clients.
fn capacity_bytes(wanted: Option<Size>, memory_bytes: u64) -> anyhow::Result<u64> {
    let bytes = wanted.map_or_else(default_capacity, |size| size.bytes(memory_bytes));
    anyhow::ensure!(bytes > 0, "a capacity of less than a page is of no use: give more, like 512M or 50%");
    anyhow::ensure!(
        bytes <= memory_bytes,
        "a capacity of {} MiB is more than the {} MiB of memory of this machine or container: give less, like 90%",
        bytes >> 20,
        memory_bytes >> 20
    );
    Ok(bytes)
}

/// Returns an error if strangers could connect by mistake.
fn check_reach(args: &ServeArgs, listen: &[ListenUrl], has_tokens: bool, asks_clients: bool) -> anyhow::Result<()> {
    let is_open = |url: &&ListenUrl| is_open_to_others(url) && !(asks_clients && matches!(url, ListenUrl::Tls(_)));
    let Some(open) = listen.iter().find(is_open) else { return Ok(()) };
    if has_tokens {
        return Ok(());
    }
    anyhow::ensure!(
        args.insecure,
        "{open} can be reached from other machines, and without tokens whoever reaches it may use the memory: \
         say who may with --token-file FILE, or insist with --insecure"
    );
    tracing::warn!(endpoint = %open, "insecure: whoever reaches this endpoint may use the memory");
    Ok(())
}

/// Parses a time: a number and `us`, `ms`, `s` or `m`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let bad = || "a time is a number and a unit, like 10s, 500ms, 50us or 2m".to_owned();
    let number: u64 = text[..digits].parse().map_err(|_| bad())?;
    match &text[digits..] {
        "us" => Ok(Duration::from_micros(number)),
        "ms" => Ok(Duration::from_millis(number)),
        "s" => Ok(Duration::from_secs(number)),
        "m" if number < u64::MAX / 60 => Ok(Duration::from_secs(number * 60)),
        _ => Err(bad()),
    }
}

/// Returns the addresses to listen at by default, which only this machine can reach.
fn default_listen() -> Vec<ListenUrl> {
    let socket = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) => PathBuf::from(folder).join("farfield.sock"),
        None => PathBuf::from(format!("/tmp/farfield-{}.sock", serving::effective_uid())),
    };
    vec![ListenUrl::Tcp("127.0.0.1:7400".to_owned()), ListenUrl::Unix(socket)]
}

/// Returns nine tenths of the memory that is free now.
fn default_capacity() -> u64 {
    let free_kib = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    let all = machine::memory_bytes();
    free_kib.map_or(all, |kib| (kib * 1024).min(all)) / 10 * 9
}

fn start_log(args: &ServeArgs) {
    let quiet = if args.private { "warn" } else { "info" };
    let json = match args.log_format {
        LogFormat::Auto => !args.private && !std::io::stderr().is_terminal(),
        format => format == LogFormat::Json,
    };
    crate::log::start(quiet, json);
}

/// Reads the token file again. The server keeps what it has if the file is not valid.
fn exchange_tenants(server: &Server, path: &Path) {
    let exchanged = load_tenants(path).and_then(|tenants| Ok(server.exchange_tenants(&tenants)?));
    match exchanged {
        Ok(TenantChanges { added, changed, removed }) => {
            tracing::info!(added, changed, removed, "the token file was read again");
        }
        Err(error) => tracing::error!(%error, "tenants stay as they are: the token file could not be used"),
    }
}

fn load_tenants(path: &Path) -> anyhow::Result<Tenants> {
    let tenants = Tenants::load(path)?;
    anyhow::ensure!(!tenants.0.is_empty(), "the token file {} has no tenant in it", path.display());
    Ok(tenants)
}

fn tenants(args: &ServeArgs) -> anyhow::Result<Option<Tenants>> {
    if let Some(path) = &args.token_file {
        return load_tenants(path).map(Some);
    }
    // A job may have a token. Then it is required, and the user is not checked.
    match crate::token::read(None)? {
        token if args.private && !token.is_empty() => {
            Ok(Some(Tenants(vec![TenantConfig { name: "job".to_owned(), token, quota_bytes: None }])))
        }
        _ => Ok(None),
    }
}

/// Returns the files of certificates. Clients must have one too, unless that is ruled out in so many words.
fn certificates(args: &ServeArgs) -> anyhow::Result<Option<ServerFiles>> {
    let (Some(certificate), Some(key)) = (args.tls_cert.clone(), args.tls_key.clone()) else { return Ok(None) };
    let client_ca = args.tls_client_ca.clone().context(
        "--tls-client-ca is missing: give the authority that signs the certificates of clients, or `none` to tell \
         clients apart by tokens only",
    )?;
    let client_ca = (client_ca != Path::new("none")).then_some(client_ca);
    Ok(Some(ServerFiles { certificate, key, client_ca }))
}

/// Reads the certificates again. The server keeps what it has if they are not valid.
fn reload_certificates(server: &Server) {
    match server.reload_certificates() {
        Ok(()) => tracing::info!("the certificates were read again"),
        Err(error) => tracing::error!(%error, "certificates stay as they are: the files could not be used"),
    }
}

/// Returns the functions that clients may call.
fn functions(args: &ServeArgs) -> anyhow::Result<Registry> {
    let own = args.functions.iter().try_fold(Registry::standard(), |registry, library| {
        let registry = farfield_plugin::with_library(registry, library)?;
        tracing::info!(library = %library.display(), "functions were loaded");
        anyhow::Ok(registry)
    })?;
    match args.sandbox {
        None => Ok(own),
        Some(engine) => with_sandbox(own, engine),
    }
}

#[cfg(feature = "sandbox")]
fn with_sandbox(own: Registry, engine: EngineName) -> anyhow::Result<Registry> {
    use farfield_sandbox::SandboxEngine;
    let engine = match engine {
        EngineName::Tiered => SandboxEngine::Tiered,
        EngineName::Interpreted => SandboxEngine::Interpreted,
        #[cfg(feature = "compiled")]
        EngineName::Compiled => SandboxEngine::Compiled,
        #[cfg(not(feature = "compiled"))]
        EngineName::Compiled => anyhow::bail!(
            "this farfield only interprets shipped code: build it with `--features compiled`, or use --sandbox"
        ),
    };
    Ok(farfield_sandbox::with_sandbox_by(own, engine))
}

#[cfg(not(feature = "sandbox"))]
fn with_sandbox(_: Registry, _: EngineName) -> anyhow::Result<Registry> {
    anyhow::bail!("this farfield was built without the feature sandbox: build it with `--features sandbox`")
}

/// Runs the server until it is told to stop.
pub(crate) fn run(args: ServeArgs) -> anyhow::Result<()> {
    // Done before there are threads, so that all of them inherit the mask: this thread takes the
    // signals one by one.
    let stop = signals::bit(libc::SIGTERM) | signals::bit(libc::SIGINT) | signals::bit(libc::SIGHUP);
    let parent_died = signals::bit(libc::SIGUSR2);
    signals::set_mask(stop | parent_died);
    if args.parent_pid.is_some() {
        // The signal only means that it is time to check. The kernel sends it when the *thread*
        // that started us ends, so it proves nothing.
        serving::signal_when_parent_dies(libc::SIGUSR2)?;
    }
    start_log(&args);
    let defaults = Config::default();
    let lease = args.lease.unwrap_or(if args.private { Duration::from_secs(1) } else { defaults.lease });
    let listen = if args.listen.is_empty() { default_listen() } else { args.listen.clone() };
    let tenants = tenants(&args)?;
    let tls = certificates(&args)?;
    let asks_clients = tls.as_ref().is_some_and(|files| files.client_ca.is_some());
    check_reach(&args, &listen, tenants.is_some(), asks_clients)?;
    let config = Config {
        listen,
        capacity_bytes: Some(capacity_bytes(args.capacity, machine::memory_bytes())?),
        tenants,
        tls,
        lease,
        functions: functions(&args)?,
        fabric: args.fabric.clone(),
        metrics: args.metrics,
        connections_max: args.max_connections,
        is_private: args.private,
        spin: args.spin,
        ..defaults
    };
    let server = Server::start(config)?;
    announce(&server, args.private).context("cannot write to stdout")?;
    let tell_manager = |state, text: &str| {
        // The private server of a job that is a service itself is not what the manager waits for.
        if !args.private
            && let Err(error) = sd_notify::notify(&[state, NotifyState::Status(text)])
        {
            tracing::warn!(%error, "the service manager cannot be told: {text}");
        }
    };
    tell_manager(NotifyState::Ready, &format!("listening at {}", server.endpoints().join(" ")));

    let orphaned = || args.parent_pid.is_some_and(|pid| serving::parent_pid() != pid);
    // Waits for a signal that tells the server to stop. SIGHUP is none where there are files to read again.
    let stop_signal = |within| -> anyhow::Result<Option<i32>> {
        let signal = serving::wait_for_signal(stop | parent_died, within)?;
        let has_files = args.token_file.is_some() || args.tls_cert.is_some();
        match signal {
            Some(libc::SIGHUP) if has_files => {
                if let Some(path) = &args.token_file {
                    exchange_tenants(&server, path);
                }
                if args.tls_cert.is_some() {
                    reload_certificates(&server);
                }
            }
            Some(signal) if signal != libc::SIGUSR2 => return Ok(Some(signal)),
            _ => {}
        }
        Ok(None)
    };
    loop {
        if orphaned() {
            tracing::warn!("the parent is gone, and so is the reason to be here");
            remove_private_folders(&args);
            return Ok(());
        }
        if let Some(signal) = stop_signal(Duration::from_millis(500))? {
            tracing::info!(signal, "told to stop");
            break;
        }
    }
    let patience = args.drain_timeout.unwrap_or(Duration::from_secs(if args.private { 0 } else { 30 }));
    let until = Instant::now() + patience;
    server.drain();
    tell_manager(NotifyState::Stopping, "waiting until clients have freed their memory");
    while !server.is_drained() && Instant::now() < until && !orphaned() {
        if let Some(signal) = stop_signal(Duration::from_millis(50))? {
            tracing::warn!(signal, "told to stop a second time: not waiting for clients any more");
            break;
        }
    }
    server.shutdown(Duration::ZERO);
    Ok(())
}

/// Removes the private socket and its folder, which a killed runner could not remove. The folder
/// stays if it is not empty.
fn remove_private_folders(args: &ServeArgs) {
    for url in &args.listen {
        if let (true, ListenUrl::Unix(path)) = (args.private, url) {
            let _ = std::fs::remove_file(path);
            let _ = path.parent().map(std::fs::remove_dir);
        }
    }
}

/// Checks whether other machines can reach the address.
pub(crate) fn is_open_to_others(url: &ListenUrl) -> bool {
    let (ListenUrl::Tcp(address) | ListenUrl::Tls(address)) = url else { return false };
    let host = address.rsplit_once(':').map_or("", |(host, _)| host).trim_matches(['[', ']']);
    host != "localhost" && !host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Prints the server's addresses to stdout: one line of JSON for programs, words for people.
fn announce(server: &Server, private: bool) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if !private && out.is_terminal() {
        for endpoint in server.endpoints() {
            match endpoint.starts_with("tls:") {
                true => writeln!(out, "ready: use --far '{endpoint}?ca=FILE&cert=FILE&key=FILE'")?,
                false => writeln!(out, "ready: use --far {endpoint}")?,
            }
        }
        return out.flush();
    }
    let line = serde_json::json!({
        "ready": true,
        "endpoints": server.endpoints(),
        "metrics": server.metrics_address().map(|address| format!("http://{address}/metrics")),
        "incarnation": format!("{:#x}", server.incarnation().0),
        "pid": std::process::id(),
    });
    writeln!(out, "{line}")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_need_a_unit() {
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        for text in ["", "10", "s", "-1s", "1.5s", "99999999999999999999s", "1h"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_capacity_is_what_the_machine_has_or_less() {
        let check = |text: &str| capacity_bytes(Some(text.parse().unwrap()), 8 << 30);
        assert_eq!(check("8G").unwrap(), 8 << 30);
        assert_eq!(check("100%").unwrap(), 8 << 30);
        for (text, part) in [("9G", "8192 MiB"), ("1T", "give less"), ("5B", "less than a page")] {
            let error = check(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(capacity_bytes(None, machine::memory_bytes()).unwrap() > 0);
        assert_eq!(connections("1"), Ok(1));
        assert!(connections("0").is_err() && connections("-1").is_err() && connections("").is_err());
    }

    #[test]
    fn only_loopback_is_closed_to_others() {
        let check = |url: &str, open: bool| assert_eq!(is_open_to_others(&url.parse().unwrap()), open, "{url}");
        check("tcp://127.0.0.1:1", false);
        check("tcp://[::1]:1", false);
        check("tcp://localhost:1", false);
        check("unix:/tmp/x", false);
        check("tcp://0.0.0.0:1", true);
        check("tls://0.0.0.0:1", true);
        check("tcp://[::]:1", true);
        check("tcp://10.0.0.7:1", true);
    }
}
