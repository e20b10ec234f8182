//! Handshakes between a client and a server over a pair of sockets.
//!
//! Dangers: a peer that is accepted though nobody vouches for it, an error that does not say what to do, a
//! handshake that never ends.

use farfield_tls::authority::{Authority, Issued, Purpose, Validity};
use farfield_tls::{
    AcceptError, Accepted, Acceptor, ArrivalHandshake, ClientFiles, ConnectionKeys, Connector, EncryptionError,
    EncryptionSecret, KeyPin, LaneHandshake, RecordStream, ServerFiles, SessionHandshake,
};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const YEAR: Duration = Duration::from_secs(365 * 86_400);

/// Folder of a test, removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("farfield-tls-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn put(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn put_issued(&self, name: &str, issued: &Issued) -> (PathBuf, PathBuf) {
        (self.put(&format!("{name}.pem"), &issued.certificate), self.put(&format!("{name}.key"), &issued.key))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An authority with a server and a client.
struct World {
    folder: Folder,
    authority: Authority,
    ca: PathBuf,
    server: ServerFiles,
    client: ClientFiles,
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

impl World {
    fn new() -> World {
        let folder = Folder::new();
        let (authority, own) = Authority::create(Validity::lasting(YEAR)).unwrap();
        let (ca, _) = folder.put_issued("ca", &own);
        let server = authority.issue(Purpose::Server, &names(&["far.test", "127.0.0.1"]), Validity::lasting(YEAR));
        let (certificate, key) = folder.put_issued("server", &server.unwrap());
        let server = ServerFiles { certificate, key, client_ca: Some(ca.clone()) };
        let mut world = World { folder, authority, ca, server, client: ClientFiles::default() };
        world.client = world.client_files("client", &world.authority, Purpose::Client, Validity::lasting(YEAR));
        world
    }

    fn client_files(&self, name: &str, authority: &Authority, purpose: Purpose, validity: Validity) -> ClientFiles {
        let issued = authority.issue(purpose, &names(&["alice"]), validity).unwrap();
        let (certificate, key) = self.folder.put_issued(name, &issued);
        ClientFiles { ca: Some(self.ca.clone()), pin: None, certificate: Some(certificate), key: Some(key) }
    }

    fn server_files(&self, authority: &Authority, purpose: Purpose, validity: Validity) -> ServerFiles {
        let issued = authority.issue(purpose, &names(&["far.test"]), validity).unwrap();
        let (certificate, key) = self.folder.put_issued("other-server", &issued);
        ServerFiles { certificate, key, client_ca: Some(self.ca.clone()) }
    }

    fn acceptor(&self) -> Acceptor {
        Acceptor::new(self.server.clone()).unwrap()
    }
}

fn sockets() -> (UnixStream, UnixStream) {
    let (client, server) = UnixStream::pair().unwrap();
    client.set_nonblocking(true).unwrap();
    server.set_nonblocking(true).unwrap();
    (client, server)
}

type Met = (Result<(EncryptionSecret, ConnectionKeys), EncryptionError>, Result<Accepted, AcceptError>);

/// Runs both sides of a session's handshake to their ends.
fn meet(connector: &Connector, acceptor: &Acceptor) -> Met {
    let (client_fd, server_fd) = sockets();
    let (mut client, mut server) = (SessionHandshake::new(connector).unwrap(), ArrivalHandshake::default());
    let (mut client_fd, mut server_fd) = (Some(client_fd), Some(server_fd));
    let (mut of_client, mut of_server) = (None, None);
    while of_client.is_none() || of_server.is_none() {
        if let (None, Some(fd)) = (&of_server, &server_fd) {
            of_server = server.advance(acceptor, fd.as_raw_fd()).transpose();
            if matches!(of_server, Some(Err(_))) {
                server_fd = None;
            }
        }
        if let (None, Some(fd)) = (&of_client, &client_fd) {
            of_client = client.advance(fd.as_raw_fd()).transpose();
            if matches!(of_client, Some(Err(_))) {
                client_fd = None;
            }
        }
    }
    (of_client.unwrap(), of_server.unwrap())
}

fn refused(name: &str, files: &ClientFiles, acceptor: &Acceptor, part: &str) {
    let (client, server) = meet(&Connector::new(name, files).unwrap(), acceptor);
    let error = client.err().unwrap().to_string();
    assert!(error.contains(part), "{error}");
    assert!(server.is_err(), "{server:?}");
}

fn say(stream: &mut RecordStream, fd: &UnixStream, text: &[u8]) {
    assert_eq!(stream.write(fd.as_raw_fd(), text), Ok(text.len()));
}

fn hear(stream: &mut RecordStream, fd: &UnixStream) -> Result<Vec<u8>, farfield_os::Errno> {
    let mut bytes = vec![0; 64];
    let got = stream.read(fd.as_raw_fd(), &mut bytes)?;
    bytes.truncate(got);
    Ok(bytes)
}

/// Joins a session with a lane; returns both ends.
fn join(session: &EncryptionSecret, acceptor: &Acceptor) -> Result<[(UnixStream, RecordStream); 2], EncryptionError> {
    let (client_fd, server_fd) = sockets();
    let (mut client, mut server) = (LaneHandshake::new(session).unwrap(), ArrivalHandshake::default());
    assert!(client.advance(client_fd.as_raw_fd()).unwrap().is_none());
    let accepted = server.advance(acceptor, server_fd.as_raw_fd());
    let keys = client.advance(client_fd.as_raw_fd())?.expect("the server has answered");
    let mut stream = RecordStream::new();
    stream.set_client_keys(&keys);
    Ok([(client_fd, stream), (server_fd, accepted.unwrap().unwrap().stream)])
}

#[test]
fn both_sides_vouch_and_lanes_join_as_long_as_the_session_lives() {
    let world = World::new();
    let acceptor = world.acceptor();
    for name in ["far.test", "127.0.0.1"] {
        let (client, server) = meet(&Connector::new(name, &world.client).unwrap(), &acceptor);
        let ((session, _), server) = (client.unwrap(), server.unwrap());
        assert_eq!(*server.names, ["alice".to_owned()]);
        for _ in 0..2 {
            let [(client_fd, mut client), (server_fd, mut lane)] = join(&session, &acceptor).unwrap();
            say(&mut client, &client_fd, b"a page, please");
            assert_eq!(hear(&mut lane, &server_fd).unwrap(), b"a page, please");
            say(&mut lane, &server_fd, b"here");
            assert_eq!(hear(&mut client, &client_fd).unwrap(), b"here");
        }
        drop(server);
        assert_eq!(join(&session, &acceptor).err(), Some(EncryptionError::SessionUnknown));
    }
}

#[test]
fn whoever_knows_only_the_name_of_a_session_has_no_keys() {
    let world = World::new();
    let acceptor = world.acceptor();
    let connector = Connector::new("far.test", &world.client).unwrap();
    let (client, server) = meet(&connector, &acceptor);
    let (session, _server) = (client.unwrap().0, server.unwrap());
    // What an eavesdropper saw of a lane, once more.
    let (mut tap, wire) = UnixStream::pair().unwrap();
    assert!(LaneHandshake::new(&session).unwrap().advance(wire.as_raw_fd()).unwrap().is_none());
    drop(wire);
    let mut seen = Vec::new();
    tap.read_to_end(&mut seen).unwrap();
    let (mut client_fd, server_fd) = sockets();
    client_fd.write_all(&seen).unwrap();
    let mut accepted =
        ArrivalHandshake::default().advance(&acceptor, server_fd.as_raw_fd()).unwrap().expect("the message is whole");
    // It cannot seal: a record of another lane does not open here.
    let [(other_fd, mut other), (mut other_server, _)] = join(&session, &acceptor).unwrap();
    say(&mut other, &other_fd, b"hello");
    drop(other_fd);
    let mut sealed = Vec::new();
    other_server.set_nonblocking(false).unwrap();
    other_server.read_to_end(&mut sealed).unwrap();
    client_fd.write_all(&sealed).unwrap();
    assert_eq!(hear(&mut accepted.stream, &server_fd), Err(farfield_os::Errno(libc::EBADMSG)));
}

#[test]
fn servers_that_nobody_vouches_for_are_refused_with_what_to_do() {
    let world = World::new();
    let (stranger, _) = Authority::create(Validity::lasting(YEAR)).unwrap();
    let of = |authority, purpose, validity| Acceptor::new(world.server_files(authority, purpose, validity)).unwrap();
    let lasting = Validity::lasting(YEAR);
    refused("far.test", &world.client, &of(&stranger, Purpose::Server, lasting), "not of the authority in ca=");
    refused("far.test", &world.client, &of(&world.authority, Purpose::Server, Validity::past(YEAR)), "has expired");
    refused("far.test", &world.client, &of(&world.authority, Purpose::Client, lasting), "not one of a server");
    refused("other.test", &world.client, &world.acceptor(), "not for this name");
    refused("127.0.0.2", &world.client, &world.acceptor(), "not for this name");
    let nobody = ClientFiles { ca: None, ..world.client.clone() };
    refused("far.test", &nobody, &world.acceptor(), "add ca=FILE or pin=HEX");
}

#[test]
fn clients_that_nobody_vouches_for_are_refused_with_what_to_do() {
    let world = World::new();
    let acceptor = world.acceptor();
    let (stranger, _) = Authority::create(Validity::lasting(YEAR)).unwrap();
    let lasting = Validity::lasting(YEAR);
    let of = |name, authority, purpose, validity| world.client_files(name, authority, purpose, validity);
    let check = |files: &ClientFiles, part| refused("far.test", files, &acceptor, part);
    check(&of("a", &stranger, Purpose::Client, lasting), "--tls-client-ca");
    check(&of("b", &world.authority, Purpose::Client, Validity::past(YEAR)), "client's certificate has expired");
    check(&of("c", &world.authority, Purpose::Server, lasting), "refuses this client's certificate");
    check(&ClientFiles { certificate: None, key: None, ..world.client.clone() }, "add cert=FILE&key=FILE");
}

#[test]
fn a_pin_needs_no_authority_and_sees_another_key() {
    let world = World::new();
    let acceptor = world.acceptor();
    let pin = KeyPin::of_file(&world.server.certificate).unwrap();
    assert_eq!(pin.to_string().parse(), Ok(pin));
    let pinned =
        |pin, ca: Option<&Path>| ClientFiles { ca: ca.map(Path::to_owned), pin: Some(pin), ..world.client.clone() };
    let (client, server) = meet(&Connector::new("any.name", &pinned(pin, None)).unwrap(), &acceptor);
    assert!(client.is_ok() && server.is_ok());
    let other = KeyPin::of_file(&world.ca).unwrap();
    refused("far.test", &pinned(other, None), &acceptor, &format!("its key is {pin}"));
    refused("other.test", &pinned(pin, Some(&world.ca)), &acceptor, "not for this name");
    for text in ["", "12", &"g".repeat(64), &"ä".repeat(32)] {
        assert!(text.parse::<KeyPin>().is_err());
    }
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let world = World::new();
    let check = |files: ServerFiles, part: &str| {
        let error = Acceptor::new(files).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    let server = || world.server.clone();
    check(ServerFiles { certificate: "/no/such".into(), ..server() }, "cannot read /no/such");
    check(ServerFiles { certificate: server().key, ..server() }, "no certificate in");
    check(ServerFiles { key: server().certificate, ..server() }, "no private key in");
    check(ServerFiles { key: world.folder.0.join("ca.key"), ..server() }, "not the one of the certificate");
    assert!(Connector::new("not a name", &world.client).unwrap_err().to_string().contains("no name"));
}

#[test]
fn new_files_count_for_new_handshakes_and_wrong_ones_change_nothing() {
    let world = World::new();
    let acceptor = world.acceptor();
    let connector = Connector::new("far.test", &world.client).unwrap();
    let (before, _server) = meet(&connector, &acceptor);
    std::fs::write(&world.server.certificate, "nonsense").unwrap();
    assert!(acceptor.reload().is_err());
    assert!(meet(&connector, &acceptor).0.is_ok());
    let (stranger, _) = Authority::create(Validity::lasting(YEAR)).unwrap();
    let issued = stranger.issue(Purpose::Server, &names(&["far.test"]), Validity::lasting(YEAR)).unwrap();
    std::fs::write(&world.server.certificate, issued.certificate).unwrap();
    std::fs::write(&world.server.key, issued.key).unwrap();
    acceptor.reload().unwrap();
    assert!(meet(&connector, &acceptor).0.unwrap_err().to_string().contains("authority in ca="));
    join(&before.unwrap().0, &acceptor).expect("sessions of before go on");
}

/// Passes bytes on from one socket to another, `most` in all. Returns how many came.
fn pass(from: &mut UnixStream, to: &mut UnixStream, most: usize) -> usize {
    let mut bytes = [0; 4096];
    match from.read(&mut bytes[..most.min(4096)]) {
        Ok(got) => {
            to.write_all(&bytes[..got]).unwrap();
            got
        }
        Err(_) => 0,
    }
}

/// Runs a handshake behind a wire that is cut after so many bytes of the client, or of the server. Returns
/// whether both sides have keys, and the number of bytes that came from each.
fn cut(connector: &Connector, acceptor: &Acceptor, most: [usize; 2]) -> (bool, [usize; 2]) {
    let ((client_fd, mut client_wire), (mut server_wire, server_fd)) = (sockets(), sockets());
    let (mut client, mut server) = (SessionHandshake::new(connector).unwrap(), ArrivalHandshake::default());
    let mut passed = [0; 2];
    let (mut client_keys, mut server_keys) = (None, None);
    for _ in 0..1000 {
        if client_keys.is_none() {
            client_keys = client.advance(client_fd.as_raw_fd()).expect("nothing is wrong but that bytes are missing");
        }
        if server_keys.is_none() {
            server_keys = server.advance(acceptor, server_fd.as_raw_fd()).expect("nothing is wrong");
        }
        let now = [
            pass(&mut client_wire, &mut server_wire, most[0] - passed[0]),
            pass(&mut server_wire, &mut client_wire, most[1] - passed[1]),
        ];
        passed = [passed[0] + now[0], passed[1] + now[1]];
        if now == [0, 0] {
            break;
        }
    }
    let both = client_keys.is_some() && server_keys.is_some();
    drop((client_wire, server_wire));
    if client_keys.is_none() {
        let end = client.advance(client_fd.as_raw_fd()).err();
        assert!(matches!(end, Some(EncryptionError::HungUp | EncryptionError::Os(_))), "{end:?}");
    }
    if server_keys.is_none() {
        assert!(matches!(server.advance(acceptor, server_fd.as_raw_fd()), Err(AcceptError::Handshake(_))));
    }
    (both, passed)
}

#[test]
fn a_handshake_that_is_cut_at_any_byte_ends_with_an_error_and_keys_only_with_the_last() {
    let world = World::new();
    let (connector, acceptor) = (Connector::new("far.test", &world.client).unwrap(), world.acceptor());
    let (both, all) = cut(&connector, &acceptor, [usize::MAX, usize::MAX]);
    assert!(both && all[0] > 500 && all[1] > 500);
    // Lengths of signatures vary by some bytes, so the cuts end a little before the shortest handshake.
    for at in 0..all[0] - 16 {
        assert!(!cut(&connector, &acceptor, [at, usize::MAX]).0, "cut at byte {at} of the client");
    }
    for at in 0..all[1] - 16 {
        assert!(!cut(&connector, &acceptor, [usize::MAX, at]).0, "cut at byte {at} of the server");
    }
}

#[test]
fn whoever_speaks_no_tls_is_told_from_whoever_does() {
    let world = World::new();
    let acceptor = world.acceptor();
    for plain in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0x50, 0, 0, 0, 1, 0], &[0; 52], b"FFX\x01----"] {
        let (mut client_fd, server_fd) = sockets();
        client_fd.write_all(plain).unwrap();
        let answer = ArrivalHandshake::default().advance(&acceptor, server_fd.as_raw_fd());
        assert!(matches!(answer, Err(AcceptError::Plain)), "{plain:?}");
    }
    let connector = Connector::new("far.test", &world.client).unwrap();
    for plain in [&b"HTTP/1.1 400 Bad Request"[..], &[0x20, 0, 0, 0, 0xfe, 0, 5, 0]] {
        let (client_fd, mut server_fd) = sockets();
        let mut handshake = SessionHandshake::new(&connector).unwrap();
        assert!(handshake.advance(client_fd.as_raw_fd()).unwrap().is_none());
        server_fd.write_all(plain).unwrap();
        let error = handshake.advance(client_fd.as_raw_fd()).err().unwrap();
        assert_eq!(error, EncryptionError::Plain(plain.to_vec()));
        assert!(error.to_string().contains("write tcp://"));
    }
}
