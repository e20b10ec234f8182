//! A network between programs and a server that can be cut (bytes vanish on the way, and connections stay open), or slow.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Passes on what comes, both ways, unless it is cut. Gone when it is dropped.
#[derive(Debug)]
pub struct Relay {
    url: String,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Where it listens, and the server.
    here: SocketAddr,
    there: String,
}

#[derive(Debug, Default)]
struct State {
    is_cut: bool,
    is_over: bool,
    delay: Duration,
    streams: Vec<TcpStream>,
}

impl Relay {
    /// To the server with this `tcp://` URL.
    pub fn to(url: &str) -> Relay {
        let there = url.strip_prefix("tcp://").expect("a TCP server").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
        let here = listener.local_addr().expect("it listens");
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), here, there });
        let own = shared.clone();
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                if !own.wait_while_cut() {
                    return;
                }
                own.connect(client);
            }
        });
        Relay { url: format!("tcp://{here}"), shared }
    }

    /// For `--far`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// From now on what comes arrives so much later, each way.
    pub fn delay(&self, by: Duration) {
        self.shared.state().delay = by;
    }

    /// From now on nothing arrives, until [`Relay::mend`].
    pub fn cut(&self) {
        self.shared.state().is_cut = true;
    }

    /// What was on its way arrives, and whatever follows.
    pub fn mend(&self) {
        self.shared.state().is_cut = false;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `false`: it is over.
    fn wait_while_cut(&self) -> bool {
        let waits = |state: &mut State| state.is_cut && !state.is_over;
        let state = self.changed.wait_while(self.state(), waits).unwrap_or_else(PoisonError::into_inner);
        !state.is_over
    }

    /// Two threads, one for each way.
    fn connect(self: &Arc<Shared>, client: TcpStream) {
        // Who is not there hangs up.
        let Ok(server) = TcpStream::connect(&self.there) else { return };
        for stream in [&client, &server] {
            let _ = stream.set_nodelay(true);
            self.state().streams.extend(stream.try_clone());
        }
        let ways = [(client.try_clone(), server.try_clone()), (Ok(server), Ok(client))];
        for (from, to) in ways {
            let (Ok(from), Ok(to), own) = (from, to, self.clone()) else { return };
            std::thread::spawn(move || own.carry(from, to));
        }
    }

    fn carry(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = vec![0; 64 << 10];
        loop {
            let got = from.read(&mut bytes).unwrap_or(0);
            let delay = self.state().delay;
            if !delay.is_zero() {
                std::thread::sleep(delay);
            }
            // An end is noticed as late as anything else.
            if !self.wait_while_cut() || got == 0 || to.write_all(&bytes[..got]).is_err() {
                let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
                return;
            }
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let streams = {
            let mut state = self.shared.state();
            state.is_over = true;
            std::mem::take(&mut state.streams)
        };
        self.shared.changed.notify_all();
        streams.iter().for_each(|stream| _ = stream.shutdown(Shutdown::Both));
        // Whoever listens looks up, and ends.
        let _ = TcpStream::connect(self.shared.here);
    }
}
