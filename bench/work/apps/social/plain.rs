//! The same network in std's types: what is called is a thread of the scope, as it is a task in shared memory.

use super::content::{self, Activity, Asked, FriendGraph, PostFound, SocialLoad, Timeline};
use crate::{Options, Outcome};
use anyhow::Result;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

struct PlainPost {
    author: u32,
    name: u64,
    number: u64,
    text: String,
    links: [u64; 1],
    mentions: [u32; 1],
    media: Vec<u8>,
}

struct PlainNet {
    load: SocialLoad,
    graph: FriendGraph,
    last_id: AtomicU64,
    posts: Vec<Mutex<Option<Arc<PlainPost>>>>,
    home: Vec<Mutex<Timeline>>,
    user: Vec<Mutex<Timeline>>,
}

/// Runs a service in a thread and waits for it.
fn call<R: Send>(service: impl FnOnce() -> R + Send) -> R {
    thread::scope(|s| s.spawn(service).join().expect("no service panics"))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no service panics")
}

impl PlainNet {
    fn compose(&self, author: u32, number: u64) -> u64 {
        let (text, media) = (self.load.content().text_of(number), self.load.content().media_of(number));
        call(|| self.compose_post(text, media, author, number))
    }

    fn compose_post(&self, text: String, media: Vec<u8>, author: u32, number: u64) -> u64 {
        let (id, (links, mentions), name) = thread::scope(|s| {
            let found = s.spawn(|| process_text(&text));
            let is_media = s.spawn(|| content::is_media(media.len()));
            let name = s.spawn(|| content::name_of(author));
            let id = self.last_id.fetch_add(1, SeqCst) + 1;
            assert!(is_media.join().expect("no service panics"), "front ends send media of the right size");
            (id, found.join().expect("no service panics"), name.join().expect("no service panics"))
        });
        let post = Arc::new(PlainPost { author, name, number, text, links, mentions, media });
        call(|| *locked(&self.posts[id as usize]) = Some(post));
        thread::scope(|s| {
            s.spawn(|| locked(&self.user[author as usize]).push(id));
            s.spawn(|| {
                for user in self.graph.friends_of(author).iter().chain(&mentions) {
                    locked(&self.home[*user as usize]).push(id);
                }
            });
        });
        id
    }

    fn read(&self, timelines: &[Mutex<Timeline>], user: u32) -> PostFound {
        let timeline = call(|| *locked(&timelines[user as usize]));
        let wanted = timeline.ids.iter().filter(|id| **id > 0);
        let posts: Vec<_> = call(|| wanted.filter_map(|id| locked(&self.posts[*id as usize]).clone()).collect());
        let mut found = PostFound::default();
        found.expect(timeline.ids.iter().filter(|id| **id > 0).count() as u64);
        for post in posts {
            let PlainPost { author, name, number, text, links, mentions, media } = &*post;
            found.see(self.load.content(), (*author, *name, *number), text, (links[0], mentions[0]), media);
        }
        found
    }

    fn serve(&self, activity: Activity) -> PostFound {
        let mut found = PostFound::default();
        for asked in self.load.requests(activity) {
            match asked {
                Asked::Home(user) => found.add(self.read(&self.home, user)),
                Asked::User(user) => found.add(self.read(&self.user, user)),
                Asked::Compose(author, number) => found.compose(self.compose(author, number)),
            }
        }
        found
    }
}

fn process_text(text: &str) -> ([u64; 1], [u32; 1]) {
    thread::scope(|s| {
        let links = s.spawn(|| content::links_of(text));
        let mentions = s.spawn(|| content::mentions_of(text));
        (links.join().expect("no service panics"), mentions.join().expect("no service panics"))
    })
}

pub(super) fn run(options: &Options, load: SocialLoad) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let graph = FriendGraph::of(options)?;
    let load = load.with(&graph);
    let timelines = || (0..graph.users()).map(|_| Mutex::default()).collect();
    let posts = (0..=load.posts_max()).map(|_| Mutex::default()).collect();
    let net = PlainNet { load, last_id: AtomicU64::new(0), posts, home: timelines(), user: timelines(), graph };
    let clients = |is_filling| {
        thread::scope(|s| {
            let net = &net;
            let clients: Vec<_> = load.clients(is_filling).map(|client| s.spawn(move || net.serve(client))).collect();
            clients.into_iter().fold(PostFound::default(), |mut found, client| {
                found.add(client.join().expect("no client panics"));
                found
            })
        })
    };
    let filled = outcome.phase("fill", load.posts, || clients(true));
    let found = outcome.phase("serve", load.ops(), || clients(false));
    load.finish(&mut outcome, filled, found);
    Ok(outcome)
}
