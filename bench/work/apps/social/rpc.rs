//! The same services in as many processes, without shared memory: a call carries values, and so does its answer.
//!
//! Messages are postcard, over TCP (`rpc`) or as unary calls of gRPC by tonic (`grpc`). A service that is in the caller's
//! process is called as a function. The first process starts the others, which end when their input does.

#[cfg(feature = "grpc")]
mod grpc;
mod tcp;

use super::Service;
use super::content::{self, Activity, Asked, FriendGraph, PostFound, SocialLoad, TIMELINE, Timeline};
use crate::{Options, Outcome};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread;

/// Bytes that are copied as a whole.
#[derive(Clone, PartialEq)]
struct Media(Vec<u8>);

impl Serialize for Media {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Media {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Media, D::Error> {
        struct MediaVisitor;
        impl serde::de::Visitor<'_> for MediaVisitor {
            type Value = Media;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Media, E> {
                Ok(Media(bytes.to_vec()))
            }
        }
        deserializer.deserialize_bytes(MediaVisitor)
    }
}

#[derive(Clone, Serialize, Deserialize)]
struct ValuePost {
    author: u32,
    name: u64,
    number: u64,
    text: String,
    links: [u64; 1],
    mentions: [u32; 1],
    media: Media,
}

/// Call of a service.
#[derive(Serialize, Deserialize)]
enum ServiceCall {
    Compose {
        author: u32,
        number: u64,
        text: String,
        media: Media,
    },
    Text {
        author: u32,
        text: String,
    },
    Links {
        text: String,
    },
    Mentions {
        text: String,
    },
    UniqueId,
    Media {
        media: Media,
    },
    User {
        author: u32,
    },
    Store {
        id: u64,
        post: ValuePost,
    },
    Posts {
        ids: [u64; TIMELINE],
    },
    WriteUser {
        user: u32,
        id: u64,
    },
    WriteHome {
        author: u32,
        mentions: [u32; 1],
        id: u64,
    },
    PushHome {
        users: Vec<u32>,
        id: u64,
    },
    Friends {
        user: u32,
    },
    Timeline {
        is_home: bool,
        user: u32,
    },
    /// A client runs at this process, whose front end it uses.
    Client(Activity),
}

/// Answer of a service.
#[derive(Serialize, Deserialize)]
enum ServiceAnswer {
    Done,
    Number(u64),
    Found([u64; 1], [u32; 1]),
    Posts(Vec<(u64, ValuePost)>),
    Users(Vec<u32>),
    Timeline(Timeline),
    Client(PostFound),
    Failed(String),
}

/// How messages travel.
#[derive(Clone, Copy, PartialEq)]
enum Transport {
    Tcp,
    Grpc,
}

/// Connections to a process.
trait Peer: Send + Sync {
    fn call(&self, call: ServiceCall) -> Result<ServiceAnswer>;
}

/// The services of a process, and the ways to those of others.
struct Process {
    load: SocialLoad,
    graph: FriendGraph,
    number: u64,
    last_id: AtomicU64,
    posts: Mutex<HashMap<u64, Arc<ValuePost>>>,
    home: Vec<Mutex<Timeline>>,
    user: Vec<Mutex<Timeline>>,
    /// By number, once all of them listen.
    peers: OnceLock<Vec<Box<dyn Peer>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no service panics")
}

impl Process {
    fn new(options: &Options, load: SocialLoad, number: u64) -> Result<Arc<Process>> {
        let graph = FriendGraph::of(options)?;
        let timelines = || (0..graph.users()).map(|_| Mutex::default()).collect();
        let (home, user) = (timelines(), timelines());
        let (load, posts, peers) = (load.with(&graph), Mutex::default(), OnceLock::new());
        Ok(Arc::new(Process { load, graph, number, last_id: AtomicU64::new(0), posts, home, user, peers }))
    }

    /// Returns the ways to all processes. Waits until this one knows them: it may be called before.
    fn peers(&self) -> &[Box<dyn Peer>] {
        self.peers.wait()
    }

    /// Calls a service where its replica for a user or a post is.
    fn call(&self, service: Service, about: u64, call: ServiceCall) -> Result<ServiceAnswer> {
        self.call_at(service.place(about, self.peers().len() as u64), call)
    }

    fn call_at(&self, process: u64, call: ServiceCall) -> Result<ServiceAnswer> {
        let answer = match process == self.number {
            true => self.answer(call),
            false => self.peers()[process as usize].call(call)?,
        };
        match answer {
            ServiceAnswer::Failed(why) => bail!("a service fails: {why}"),
            answer => Ok(answer),
        }
    }

    /// Answers a call. What is wrong is told to the caller.
    fn answer(&self, call: ServiceCall) -> ServiceAnswer {
        self.serve(call).unwrap_or_else(|error| ServiceAnswer::Failed(format!("{error:#}")))
    }

    fn serve(&self, call: ServiceCall) -> Result<ServiceAnswer> {
        Ok(match call {
            ServiceCall::Compose { author, number, text, media } => {
                ServiceAnswer::Number(self.compose_post(author, number, text, media)?)
            }
            ServiceCall::Text { author, text } => {
                let links = self.call(Service::UrlShorten, author.into(), ServiceCall::Links { text: text.clone() })?;
                let mentions = self.call(Service::UserMention, author.into(), ServiceCall::Mentions { text })?;
                match (links, mentions) {
                    (ServiceAnswer::Found(links, _), ServiceAnswer::Found(_, mentions)) => {
                        ServiceAnswer::Found(links, mentions)
                    }
                    _ => bail!("another answer was expected"),
                }
            }
            ServiceCall::Links { text } => ServiceAnswer::Found(content::links_of(&text), [0]),
            ServiceCall::Mentions { text } => ServiceAnswer::Found([0], content::mentions_of(&text)),
            ServiceCall::UniqueId => ServiceAnswer::Number(self.last_id.fetch_add(1, SeqCst) + 1),
            ServiceCall::Media { media } => {
                ensure!(content::is_media(media.0.len()), "media of a size that is not allowed");
                ServiceAnswer::Done
            }
            ServiceCall::User { author } => ServiceAnswer::Number(content::name_of(author)),
            ServiceCall::Store { id, post } => {
                locked(&self.posts).insert(id, Arc::new(post));
                ServiceAnswer::Done
            }
            ServiceCall::Posts { ids } => {
                let find = |id: u64| Some((id, locked(&self.posts).get(&id)?.clone()));
                let posts: Vec<_> = ids.into_iter().filter_map(find).collect();
                ServiceAnswer::Posts(posts.into_iter().map(|(id, post)| (id, ValuePost::clone(&post))).collect())
            }
            ServiceCall::WriteUser { user, id } => {
                locked(&self.user[user as usize]).push(id);
                ServiceAnswer::Done
            }
            ServiceCall::WriteHome { author, mentions, id } => self.write_home(author, mentions, id)?,
            ServiceCall::PushHome { users, id } => {
                users.iter().for_each(|user| locked(&self.home[*user as usize]).push(id));
                ServiceAnswer::Done
            }
            ServiceCall::Friends { user } => ServiceAnswer::Users(self.graph.friends_of(user).to_vec()),
            ServiceCall::Timeline { is_home, user } => {
                let timelines = if is_home { &self.home } else { &self.user };
                ServiceAnswer::Timeline(*locked(&timelines[user as usize]))
            }
            ServiceCall::Client(activity) => ServiceAnswer::Client(self.run_client(activity)?),
        })
    }

    /// compose-post: asks the other services about the draft, and passes the post on.
    fn compose_post(&self, author: u32, number: u64, text: String, media: Media) -> Result<u64> {
        let about = u64::from(author);
        let (found, name, id) = thread::scope(|s| {
            let (for_text, for_media) = (text.clone(), media.clone());
            let found = s.spawn(move || self.call(Service::Text, about, ServiceCall::Text { author, text: for_text }));
            let stored = s.spawn(move || self.call(Service::Media, about, ServiceCall::Media { media: for_media }));
            let name = s.spawn(move || self.call(Service::User, about, ServiceCall::User { author }));
            let id = self.call(Service::UniqueId, 0, ServiceCall::UniqueId)?;
            stored.join().expect("no call panics")?;
            Ok::<_, anyhow::Error>((found.join().expect("no call panics")?, name.join().expect("no call panics")?, id))
        })?;
        let (ServiceAnswer::Found(links, mentions), ServiceAnswer::Number(name), ServiceAnswer::Number(id)) =
            (found, name, id)
        else {
            bail!("another answer was expected")
        };
        let post = ValuePost { author, name, number, text, links, mentions, media };
        self.call(Service::PostStorage, id, ServiceCall::Store { id, post })?;
        thread::scope(|s| {
            let user = s.spawn(|| self.call(Service::UserTimeline, about, ServiceCall::WriteUser { user: author, id }));
            self.call(Service::HomeTimeline, about, ServiceCall::WriteHome { author, mentions, id })?;
            user.join().expect("no call panics")
        })?;
        Ok(id)
    }

    /// home-timeline: adds a post to those of its author's friends and of who is mentioned, in all processes.
    fn write_home(&self, author: u32, mentions: [u32; 1], id: u64) -> Result<ServiceAnswer> {
        let friends = self.call(Service::SocialGraph, author.into(), ServiceCall::Friends { user: author })?;
        let ServiceAnswer::Users(friends) = friends else { bail!("another answer was expected") };
        let processes = self.peers().len() as u64;
        let mut users: Vec<Vec<u32>> = vec![Vec::new(); processes as usize];
        for user in friends.into_iter().chain(mentions) {
            users[Service::HomeTimeline.place(user.into(), processes) as usize].push(user);
        }
        thread::scope(|s| {
            let push = |(process, users)| s.spawn(move || self.call_at(process, ServiceCall::PushHome { users, id }));
            let pushed: Vec<_> = (0..).zip(users).map(push).collect();
            pushed.into_iter().try_for_each(|pushed| pushed.join().expect("no call panics").map(drop))
        })?;
        Ok(ServiceAnswer::Done)
    }

    /// Front end: reads a timeline, with the text and the media of its posts.
    fn read(&self, service: Service, user: u32) -> Result<PostFound> {
        let is_home = matches!(service, Service::HomeTimeline);
        let ServiceAnswer::Timeline(timeline) =
            self.call(service, user.into(), ServiceCall::Timeline { is_home, user })?
        else {
            bail!("another answer was expected")
        };
        let processes = self.peers().len() as u64;
        let parts = (0..processes).map(|process| {
            let is_there = |id: &u64| *id > 0 && Service::PostStorage.place(*id, processes) == process;
            (process, timeline.ids.map(|id| if is_there(&id) { id } else { 0 }))
        });
        let parts: Vec<_> = parts.filter(|(_, ids)| *ids != [0; TIMELINE]).collect();
        let answers: Vec<Result<ServiceAnswer>> = thread::scope(|s| {
            let ask = |(process, ids)| s.spawn(move || self.call_at(process, ServiceCall::Posts { ids }));
            let asked: Vec<_> = parts.into_iter().map(ask).collect();
            asked.into_iter().map(|asked| asked.join().expect("no call panics")).collect()
        });
        let mut posts = Vec::new();
        for answer in answers {
            let ServiceAnswer::Posts(some) = answer? else { bail!("another answer was expected") };
            posts.extend(some);
        }
        let mut found = PostFound::default();
        found.expect(timeline.ids.iter().filter(|id| **id > 0).count() as u64);
        for id in timeline.ids {
            if let Some((_, post)) = posts.iter().find(|(found, _)| *found == id) {
                let ValuePost { author, name, number, text, links, mentions, media } = post;
                found.see(self.load.content(), (*author, *name, *number), text, (links[0], mentions[0]), &media.0);
            }
        }
        Ok(found)
    }

    fn run_client(&self, activity: Activity) -> Result<PostFound> {
        let (mut found, content) = (PostFound::default(), self.load.content());
        for asked in self.load.requests(activity) {
            match asked {
                Asked::Home(user) => found.add(self.read(Service::HomeTimeline, user)?),
                Asked::User(user) => found.add(self.read(Service::UserTimeline, user)?),
                Asked::Compose(author, number) => {
                    let (text, media) = (content.text_of(number), Media(content.media_of(number)));
                    let call = ServiceCall::Compose { author, number, text, media };
                    let ServiceAnswer::Number(id) = self.call(Service::ComposePost, author.into(), call)? else {
                        bail!("another answer was expected")
                    };
                    found.compose(id);
                }
            }
        }
        Ok(found)
    }
}

impl Transport {
    /// Lets others call a process. Returns where.
    fn listen(self, process: Arc<Process>) -> Result<String> {
        match self {
            Transport::Tcp => tcp::listen(process),
            #[cfg(feature = "grpc")]
            Transport::Grpc => grpc::listen(process),
            #[cfg(not(feature = "grpc"))]
            Transport::Grpc => bail!("build farfield-bench with --features grpc"),
        }
    }

    fn connect(self, address: &str) -> Result<Box<dyn Peer>> {
        Ok(match self {
            Transport::Tcp => Box::new(tcp::TcpPeer::new(address)),
            #[cfg(feature = "grpc")]
            Transport::Grpc => Box::new(grpc::GrpcPeer::connect(address)?),
            #[cfg(not(feature = "grpc"))]
            Transport::Grpc => bail!("build farfield-bench with --features grpc ({address})"),
        })
    }

    fn connect_all(self, process: &Process, addresses: &str) -> Result<()> {
        let peers = addresses.trim().split(' ').map(|address| self.connect(address)).collect::<Result<_>>()?;
        ensure!(process.peers.set(peers).is_ok(), "processes meet once");
        Ok(())
    }
}

/// The other processes. They end with this one.
struct Others(Vec<Child>);

impl Others {
    /// Starts the other processes, which run this program with the same arguments, and introduces all to each other.
    fn start(count: u64, peer: &str, transport: Transport, first: &Process, address: String) -> Result<Others> {
        let mut others = Others(Vec::new());
        let mut addresses = vec![address];
        for number in 1..count {
            let mut arguments: Vec<String> = std::env::args().skip(1).collect();
            let own = arguments.iter_mut().find(|argument| *argument == peer).context("--peer is missing")?;
            own.push_str(&number.to_string());
            let mut command = Command::new(std::env::current_exe()?);
            command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
            others.0.push(command.spawn().context("cannot start a process of the services")?);
        }
        for child in &mut others.0 {
            let mut line = String::new();
            BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
            ensure!(!line.is_empty(), "a process of the services has ended");
            addresses.push(line.trim().to_owned());
        }
        let all = addresses.join(" ");
        for child in &mut others.0 {
            writeln!(child.stdin.as_mut().context("no input")?, "{all}")?;
        }
        transport.connect_all(first, &all)?;
        Ok(others)
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for child in &mut self.0 {
            drop(child.stdin.take());
            child.wait().ok();
        }
    }
}

/// Serves as one of the other processes, until the input ends.
fn serve_others(process: Arc<Process>, transport: Transport) -> Result<()> {
    println!("{}", transport.listen(process.clone())?);
    let mut input = std::io::stdin().lock();
    let mut addresses = String::new();
    input.read_line(&mut addresses)?;
    transport.connect_all(&process, &addresses)?;
    std::io::copy(&mut input, &mut std::io::sink())?;
    Ok(())
}

pub(super) fn run(options: &Options, load: SocialLoad, peer: &str) -> Result<Outcome> {
    let (name, number) = peer.split_once(':').context("--peer must be share:, share:place, rpc: or grpc:")?;
    let transport = match name {
        "rpc" => Transport::Tcp,
        "grpc" => Transport::Grpc,
        _ => bail!("--peer must be share:, share:place, rpc: or grpc:, not {peer}"),
    };
    if !number.is_empty() {
        serve_others(Process::new(options, load, number.parse()?)?, transport)?;
        std::process::exit(0);
    }
    ensure!((1..=64).contains(&options.nodes), "--nodes must be 1 to 64");
    let mut outcome = Outcome::new();
    let first = Process::new(options, load, 0)?;
    let load = first.load;
    let address = transport.listen(first.clone())?;
    let _others = Others::start(options.nodes, peer, transport, &first, address)?;
    let clients = |is_filling| -> Result<PostFound> {
        thread::scope(|s| {
            let start = |activity: Activity| {
                let (first, process) = (&first, activity.client % options.nodes);
                s.spawn(move || first.call_at(process, ServiceCall::Client(activity)))
            };
            let clients: Vec<_> = load.clients(is_filling).map(start).collect();
            let mut found = PostFound::default();
            for client in clients {
                let ServiceAnswer::Client(more) = client.join().expect("no client panics")? else {
                    bail!("another answer was expected")
                };
                found.add(more);
            }
            Ok(found)
        })
    };
    let filled = outcome.phase("fill", load.posts, || clients(true))?;
    let found = outcome.phase("serve", load.ops(), || clients(false))?;
    load.finish(&mut outcome, filled, found);
    Ok(outcome)
}
