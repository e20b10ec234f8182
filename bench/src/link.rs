//! A network link before a memory server, in the driver: so many bytes a second each way, first come first served, whoever sends them.

use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What passes in one piece; others wait so long.
const PIECE_BYTES: usize = 16 << 10;
/// Who sleeps wakes late; so much time that was lost in this way is made up for.
const SLACK: Duration = Duration::from_millis(2);

/// Ends with all its connections when it is dropped.
pub(crate) struct Link {
    /// The server, through the link.
    pub(crate) url: String,
    shared: Arc<Shared>,
}

struct Shared {
    here: SocketAddr,
    there: String,
    to_server: Way,
    to_client: Way,
    streams: Mutex<Option<Vec<TcpStream>>>,
}

impl Link {
    /// To the server with this `tcp://` URL.
    pub(crate) fn to(url: &str, bytes_per_s: u64) -> Result<Link> {
        let there = url.strip_prefix("tcp://").context("a link leads to a TCP server")?.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").context("no port for a link")?;
        let here = listener.local_addr()?;
        let way = || Way::new(bytes_per_s, Instant::now());
        let streams = Mutex::new(Some(Vec::new()));
        let shared = Arc::new(Shared { here, there, to_server: way(), to_client: way(), streams });
        let own = shared.clone();
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                if own.connect(client).is_none() {
                    return;
                }
            }
        });
        Ok(Link { url: format!("tcp://{here}"), shared })
    }
}

impl Shared {
    fn streams(&self) -> MutexGuard<'_, Option<Vec<TcpStream>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread for each way. `None`: it is over.
    fn connect(self: &Arc<Shared>, client: TcpStream) -> Option<()> {
        let mut streams = self.streams();
        let open = streams.as_mut()?;
        // Who finds no server is hung up on, and says so.
        let Ok(server) = TcpStream::connect(&self.there) else { return Some(()) };
        for (from, to, is_to_server) in [(&client, &server, true), (&server, &client, false)] {
            let _ = from.set_nodelay(true);
            let (Ok(from), Ok(to), Ok(kept)) = (from.try_clone(), to.try_clone(), from.try_clone()) else {
                return Some(());
            };
            open.push(kept);
            let own = self.clone();
            std::thread::spawn(move || {
                let way = if is_to_server { &own.to_server } else { &own.to_client };
                carry(way, from, to);
            });
        }
        Some(())
    }
}

fn carry(way: &Way, mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = vec![0; PIECE_BYTES];
    loop {
        let got = from.read(&mut bytes).unwrap_or(0);
        let passed_at = way.pass(Instant::now(), got);
        std::thread::sleep(passed_at.saturating_duration_since(Instant::now()));
        if got == 0 || to.write_all(&bytes[..got]).is_err() {
            let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
            return;
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let streams = self.shared.streams().take().unwrap_or_default();
        streams.iter().for_each(|stream| _ = stream.shutdown(Shutdown::Both));
        // Whoever listens looks up, and ends.
        let _ = TcpStream::connect(self.shared.here);
    }
}

/// One direction.
struct Way {
    bytes_per_s: u64,
    /// When all that came so far has passed.
    free_at: Mutex<Instant>,
}

impl Way {
    fn new(bytes_per_s: u64, now: Instant) -> Way {
        Way { bytes_per_s, free_at: Mutex::new(now) }
    }

    /// When so many bytes that come now have passed, behind those before them.
    fn pass(&self, now: Instant, bytes: usize) -> Instant {
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_s as f64);
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let from = now.checked_sub(SLACK).map_or(*free_at, |least| least.max(*free_at));
        *free_at = from + takes;
        *free_at
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a link that is as fast as the machine, behind which nothing is ever saturated.
    use super::*;

    #[test]
    fn bytes_pass_one_after_the_other_and_lost_time_is_made_up_for() {
        let start = Instant::now();
        let ms = Duration::from_millis;
        let way = Way::new(1_000_000, start);
        assert_eq!(way.pass(start, 3000), start + ms(3));
        assert_eq!(way.pass(start + ms(1), 3000), start + ms(6), "behind the first");
        assert_eq!(way.pass(start + ms(7), 1000), start + ms(7), "a millisecond late");
        assert_eq!(way.pass(start + ms(100), 3000), start + ms(101), "after a pause no more than the slack");
    }

    #[test]
    fn connections_share_what_there_is() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("tcp://{}", server.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in server.incoming().flatten() {
                std::thread::spawn(move || std::io::copy(&mut stream.try_clone().unwrap(), &mut &stream));
            }
        });
        let link = Link::to(&url, 4 << 20).unwrap();
        let started = Instant::now();
        // There and back: a quarter of a second each way, in the same time.
        let clients: Vec<_> = (0..2)
            .map(|byte| {
                let mut stream = TcpStream::connect(link.url.strip_prefix("tcp://").unwrap()).unwrap();
                let sent = vec![byte; 512 << 10];
                std::thread::spawn(move || {
                    let mut back = stream.try_clone().unwrap();
                    let reader = std::thread::spawn(move || {
                        let mut got = vec![0; 512 << 10];
                        back.read_exact(&mut got).map(|()| got)
                    });
                    stream.write_all(&sent).unwrap();
                    assert!(reader.join().unwrap().unwrap() == sent);
                })
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
        assert!(started.elapsed() >= Duration::from_millis(240), "{:?}", started.elapsed());
        let mut stream = TcpStream::connect(link.url.strip_prefix("tcp://").unwrap()).unwrap();
        drop(link);
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "nobody is left who answers");
    }
}
