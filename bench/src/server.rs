//! Servers that the driver starts for a sample: Farfield's, and Redis to compare with.

use crate::child::Interrupted;
use crate::job::{Job, binary};
use crate::redis_slots::slots_of_node;
use crate::swap::unavailable;
use crate::sys::{self, Processors};
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const READY_WITHIN: Duration = Duration::from_secs(20);
const STOPS_WITHIN: Duration = Duration::from_secs(5);
const PORT_TRIES: u32 = 3;

/// A server of the driver; stopped when dropped.
pub(crate) struct Server {
    child: Child,
    /// Where it listens.
    pub(crate) url: String,
}

impl Server {
    /// A memory server with room for the data three times over.
    pub(crate) fn farfield(job: &Job<'_>, listen: &str) -> Result<Server> {
        Server::farfield_with(job, listen, &[])
    }

    /// Starts a memory server that has the functions of the workloads too.
    pub(crate) fn with_workloads(job: &Job<'_>, listen: &str) -> Result<Server> {
        let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
        command.args(["serve", "--listen", listen, "--capacity", &(job.data_bytes * 3).to_string()]);
        Server::start_far(command, job)
    }

    /// Starts a memory server whose tenants are in this file.
    pub(crate) fn with_tenants(job: &Job<'_>, tokens: &Path) -> Result<Server> {
        Server::farfield_with(job, "tcp://127.0.0.1:0", &["--token-file", &tokens.display().to_string()])
    }

    /// Starts a memory server that speaks `tls://` alone, with an authority of its own. Its URL names a
    /// certificate for the client, which it wants.
    pub(crate) fn tls(job: &Job<'_>) -> Result<Server> {
        let certificates = Certificates::make(job)?;
        let [ca, cert, key] = [&certificates.ca, &certificates.server, &certificates.server_key].map(|path| text(path));
        let options = ["--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &ca];
        let mut server = Server::farfield_with(job, "tls://127.0.0.1:0", &options)?;
        let [cert, key] = [&certificates.client, &certificates.client_key].map(|path| text(path));
        server.url = format!("{}?ca={ca}&cert={cert}&key={key}", server.url);
        Ok(server)
    }

    /// Starts a stunnel in front of a memory server that speaks `tcp://`: what comes in clear at its URL goes
    /// encrypted to another service of it, which sends it on in clear. Both sides have certificates.
    pub(crate) fn tunnel(job: &Job<'_>, server: &Server) -> Result<Server> {
        let certificates = Certificates::make(job)?;
        let [ca, cert, key] = [&certificates.ca, &certificates.server, &certificates.server_key].map(|path| text(path));
        let [client, client_key] = [&certificates.client, &certificates.client_key].map(|path| text(path));
        let to = server.url.trim_start_matches("tcp://");
        let mut failure = anyhow!("no port for stunnel");
        // It cannot say which port it got, so it is told two that were free a moment ago.
        for _ in 0..PORT_TRIES {
            let (near, far) = (free_port()?, free_port()?);
            let settings = format!(
                "foreground = yes\npid =\nsocket = l:TCP_NODELAY=1\nsocket = r:TCP_NODELAY=1\nCAfile = {ca}\n\
                 verifyChain = yes\n[client]\nclient = yes\naccept = 127.0.0.1:{near}\n\
                 connect = 127.0.0.1:{far}\ncert = {client}\nkey = {client_key}\n[server]\n\
                 accept = 127.0.0.1:{far}\nconnect = {to}\ncert = {cert}\nkey = {key}\n"
            );
            let file = job.scratch.join("stunnel.conf");
            fs::write(&file, settings)?;
            let (out, err) = (job.scratch.join("stunnel.stdout"), job.scratch.join("stunnel.stderr"));
            let started = ["stunnel", "stunnel4"].into_iter().find_map(|program| {
                let mut command = Command::new(program);
                command.arg(&file);
                let started = Server::start(command, &out, &err);
                let is_absent = started.as_ref().is_err_and(is_not_found);
                (!is_absent).then_some(started)
            });
            let Some(started) = started else {
                return Err(unavailable("stunnel is not installed", "install stunnel (Debian: stunnel4)"));
            };
            let mut tunnel = started?;
            let addresses = [near, far].map(|port| format!("127.0.0.1:{port}"));
            let listens = || addresses.iter().all(|address| TcpStream::connect(address).is_ok());
            match tunnel.wait_until_ready(&err, || Ok(listens().then(|| format!("tcp://{}", addresses[0])))) {
                Ok(()) => return Ok(tunnel),
                Err(error) if error.is::<Interrupted>() => return Err(error),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// One that takes code, which this engine runs.
    pub(crate) fn sandbox(job: &Job<'_>, engine: &str) -> Result<Server> {
        let server = Server::farfield_with(job, "tcp://127.0.0.1:0", &[&format!("--sandbox={engine}")]);
        server.map_err(|error| match engine {
            "compiled" => error.context("build farfield-cli with --features compiled"),
            _ => error,
        })
    }

    /// One that can be read through this provider of libfabric.
    pub(crate) fn fabric(job: &Job<'_>, provider: &str) -> Result<Server> {
        if !cfg!(feature = "fabric") {
            return Err(unavailable(
                "this harness was built without libfabric",
                "install libfabric-dev and pkg-config, and build farfield-bench and farfield-cli with --features fabric",
            ));
        }
        let server = Server::farfield_with(job, "tcp://127.0.0.1:0", &["--fabric", provider]);
        server.map_err(|error| match refused_provider(&format!("{error:#}")) {
            Some(why) => unavailable(why, "see decision 9"),
            None => error,
        })
    }

    /// One with room for so many jobs, each with the data.
    pub(crate) fn of_jobs(job: &Job<'_>, jobs: usize) -> Result<Server> {
        let mut command = Command::new(binary(job)?);
        let capacity = format!("{}B", job.data_bytes * 2 * jobs as u64);
        let listen = format!("unix:{}", job.scratch.join("jobs.sock").display());
        command.args(["serve", "--listen", &listen, "--capacity", &capacity, "--drain-timeout", "0"]);
        command.args(["--max-connections", &(8 * jobs + 64).to_string()]);
        Server::start_far(command, job)
    }

    fn farfield_with(job: &Job<'_>, listen: &str, options: &[&str]) -> Result<Server> {
        let mut command = Command::new(binary(job)?);
        command.args(["serve", "--listen", listen, "--capacity", &format!("{}B", job.data_bytes * 3)]);
        command.args(options);
        command.args(["--drain-timeout", "0"]); // It waits for no client when told to stop.
        Server::start_far(command, job)
    }

    /// Starts a memory server that ends with this process, even if this process is killed, and waits
    /// until it listens.
    fn start_far(mut command: Command, job: &Job<'_>) -> Result<Server> {
        command.args(["--parent-pid", &std::process::id().to_string()]);
        let (out, err) = (job.scratch.join("server.stdout"), job.scratch.join("server.stderr"));
        let mut server = Server::start(command, &out, &err)?;
        server.wait_until_ready(&err, || {
            let text = fs::read_to_string(&out)?;
            text.split_inclusive('\n').find(|line| line.ends_with('\n')).map(endpoint).transpose()
        })?;
        Ok(server)
    }

    /// Redis, which keeps everything in memory and writes nothing to disk.
    pub(crate) fn redis(job: &Job<'_>) -> Result<Server> {
        Server::redis_with(job, "redis", &[])
    }

    /// Starts so many Redis servers that divide the keys among them, and waits until all keys are served.
    pub(crate) fn redis_cluster(job: &Job<'_>, nodes: usize) -> Result<Vec<Server>> {
        let start = |node: usize| {
            let name = format!("redis-{node}");
            let own = |kind: &str| job.scratch.join(format!("{name}.{kind}")).display().to_string();
            let bus = free_port()?.to_string();
            let options = ["--cluster-enabled", "yes", "--cluster-port", &bus, "--cluster-config-file", &own("conf")];
            // A configuration of a server before would be read again.
            fs::remove_file(own("conf")).ok();
            Ok((Server::redis_with(job, &name, &options)?, bus))
        };
        let servers: Vec<(Server, String)> = (0..nodes).map(start).collect::<Result<_>>()?;
        for (node, (server, _)) in servers.iter().enumerate() {
            let slots = slots_of_node(node, nodes);
            let range = [slots.start.to_string(), (slots.end - 1).to_string()];
            redis_command(server.redis_address(), &["CLUSTER", "ADDSLOTSRANGE", &range[0], &range[1]])?;
            redis_command(server.redis_address(), &["CLUSTER", "SET-CONFIG-EPOCH", &(node + 1).to_string()])?;
        }
        let first = servers[0].0.redis_address();
        for (server, bus) in &servers[1..] {
            let (host, port) = server.redis_address().rsplit_once(':').context("Redis has no port")?;
            redis_command(first, &["CLUSTER", "MEET", host, port, bus])?;
        }
        let deadline = Instant::now() + READY_WITHIN;
        let known = format!("cluster_known_nodes:{nodes}");
        for (server, _) in &servers {
            while !redis_command(server.redis_address(), &["CLUSTER", "INFO"])
                .is_ok_and(|info| info.contains("cluster_state:ok") && info.contains(&known))
            {
                if let Some(signal) = sys::stop_signal() {
                    return Err(Interrupted(signal).into());
                }
                ensure!(Instant::now() < deadline, "Redis Cluster is not ready after {READY_WITHIN:?}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(servers.into_iter().map(|(server, _)| server).collect())
    }

    /// Returns where a Redis server listens.
    fn redis_address(&self) -> &str {
        self.url.trim_start_matches("redis:")
    }

    fn redis_with(job: &Job<'_>, name: &str, options: &[&str]) -> Result<Server> {
        let mut failure = anyhow!("no port for redis");
        // Redis cannot say which port it got, so it is told one that was free a moment ago.
        for _ in 0..PORT_TRIES {
            let port = free_port()?;
            let mut command = Command::new("redis-server");
            command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
            command.args(options).current_dir(job.scratch);
            let (out, err) = (job.scratch.join(format!("{name}.stdout")), job.scratch.join(format!("{name}.stderr")));
            let mut server = match Server::start(command, &out, &err) {
                Ok(server) => server,
                Err(error) if is_not_found(&error) => {
                    return Err(unavailable("redis-server is not installed", "install Redis"));
                }
                Err(error) => return Err(error),
            };
            let address = format!("127.0.0.1:{port}");
            match server.wait_until_ready(&out, || Ok(answers_ping(&address).then(|| format!("redis:{address}")))) {
                Ok(()) => return Ok(server),
                Err(error) if error.is::<Interrupted>() => return Err(error),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    fn start(mut command: Command, out: &Path, err: &Path) -> Result<Server> {
        command.stdin(Stdio::null()).stdout(File::create(out)?).stderr(File::create(err)?).process_group(0);
        let child =
            command.spawn().with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))?;
        Ok(Server { child, url: String::new() })
    }

    /// Asks `url` until it says where the server listens; what the server said last is in `words`.
    fn wait_until_ready(&mut self, words: &Path, url: impl Fn() -> Result<Option<String>>) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            if let Some(url) = url()? {
                self.url = url;
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("the server ended with {status}: {}", fs::read_to_string(words)?.trim());
            }
            if let Some(signal) = sys::stop_signal() {
                return Err(Interrupted(signal).into());
            }
            ensure!(Instant::now() < deadline, "the server is not ready after {READY_WITHIN:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// From now on it runs on these processors only.
    pub(crate) fn keep_on(&self, processors: Processors) -> Result<()> {
        processors.keep_process(self.child.id()).context("cannot keep the server on processors of its own")
    }

    /// Bytes of the server's memory that no region shares: buffers, stacks and tables.
    pub(crate) fn private_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let kib =
            status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB")?.parse().ok());
        kib.unwrap_or(0u64) * 1024
    }

    /// CPU time that the server has taken so far.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        cpu_seconds_of(self.child.id())
    }
}

/// CPU time that a process has taken so far.
pub(crate) fn cpu_seconds_of(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    cpu_ticks(&stat) as f64 / 100.0 // Ticks of /proc are hundredths of a second on every Linux.
}

/// Files of an authority, and of a server and a client that it vouches for.
struct Certificates {
    ca: PathBuf,
    server: PathBuf,
    server_key: PathBuf,
    client: PathBuf,
    client_key: PathBuf,
}

impl Certificates {
    /// Makes them in the scratch folder, once, by `farfield cert`.
    fn make(job: &Job<'_>) -> Result<Certificates> {
        let folder = job.scratch.join("certificates");
        let file = |name: &str| folder.join(name);
        let made = Certificates {
            ca: file("ca.pem"),
            server: file("127.0.0.1.pem"),
            server_key: file("127.0.0.1.key"),
            client: file("bench.pem"),
            client_key: file("bench.key"),
        };
        if made.client.is_file() {
            return Ok(made);
        }
        for (kind, name) in [("init", None), ("server", Some("127.0.0.1")), ("client", Some("bench"))] {
            let output = Command::new(binary(job)?).args(["cert", kind]).arg(&folder).args(name).output()?;
            ensure!(output.status.success(), "farfield cert {kind}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(made)
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn is_not_found(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Why a server does not have a provider of libfabric, if that is why it ended.
fn refused_provider(words: &str) -> Option<String> {
    let line = words.lines().find(|line| line.contains("provider"))?;
    Some(line.rsplit_once("farfield: ").map_or(line, |(_, reason)| reason).trim().to_owned())
}

/// The first address in the line that `farfield serve` prints when it is ready.
fn endpoint(line: &str) -> Result<String> {
    let ready: serde_json::Value = serde_json::from_str(line).context("farfield serve printed no JSON")?;
    let url = ready["endpoints"][0].as_str().context("farfield serve named no endpoint")?;
    Ok(url.to_string())
}

/// utime + stime of a `/proc/PID/stat`.
fn cpu_ticks(stat: &str) -> u64 {
    let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    after_name.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum()
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = self.child.id() as i32;
        if self.child.try_wait().is_ok_and(|status| status.is_some()) {
            return;
        }
        sys::terminate(pid).ok();
        let deadline = Instant::now() + STOPS_WITHIN;
        while self.child.try_wait().is_ok_and(|status| status.is_none()) {
            if Instant::now() >= deadline {
                self.child.kill().ok();
                self.child.wait().ok();
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Says something to a Redis server, and returns its answer. An error message is an error.
fn redis_command(address: &str, words: &[&str]) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(READY_WITHIN))?;
    let mut message = format!("*{}\r\n", words.len());
    words.iter().for_each(|word| message.push_str(&format!("${}\r\n{word}\r\n", word.len())));
    stream.write_all(message.as_bytes())?;
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    // A text is as long as its first line says; other answers are one line.
    loop {
        let bytes = stream.read(&mut piece)?;
        ensure!(bytes > 0, "Redis has ended");
        answer.extend_from_slice(&piece[..bytes]);
        let text = String::from_utf8_lossy(&answer);
        let Some((first, rest)) = text.split_once("\r\n") else { continue };
        ensure!(!first.starts_with('-'), "Redis refuses {}: {first}", words.join(" "));
        match first.strip_prefix('$').and_then(|length| length.parse::<usize>().ok()) {
            Some(length) if rest.len() < length + 2 => {}
            _ => return Ok(text.into_owned()),
        }
    }
}

fn answers_ping(address: &str) -> bool {
    let ask = || -> io::Result<bool> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"PING\r\n")?;
        let mut answer = [0; 7];
        stream.read_exact(&mut answer)?;
        Ok(&answer == b"+PONG\r\n")
    };
    ask().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_says_where_it_listens() {
        let line = r#"{"ready":true,"endpoints":["tcp://127.0.0.1:4567"],"metrics":null,"pid":1}"#;
        assert_eq!(endpoint(line).unwrap(), "tcp://127.0.0.1:4567");
        assert!(endpoint("{}").is_err());
        assert!(endpoint("ready").is_err());
    }

    #[test]
    fn a_provider_that_the_server_does_not_have_is_told_from_a_server_that_broke() {
        let refused = "the server ended with exit status: 1: farfield: libfabric's shm provider is not used";
        assert_eq!(refused_provider(refused).as_deref(), Some("libfabric's shm provider is not used"));
        assert_eq!(refused_provider("the server ended with signal: 11"), None);
    }

    #[test]
    fn cpu_time_is_found_behind_a_name_with_spaces() {
        let stat = "12 (a ) b) S 1 2 3 4 5 6 7 8 9 10 30 12 0 0";
        assert_eq!(cpu_ticks(stat), 42);
        assert_eq!(cpu_ticks(""), 0);
    }
}
