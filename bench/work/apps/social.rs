//! Social network: people write posts with pictures, and read the timelines of their friends and of others. After the
//! social network of DeathStarBench, whose services call each other (DRust, section 7).
//!
//! The services are: front end, compose-post, text, url-shorten, user-mention, unique-id, media, user, post-storage,
//! user-timeline, home-timeline and social-graph. Here their calls pass references to what lies in shared memory; the number of
//! a post is a step of an atomic number, and the graph is read where it is needed. `rpc` has the same services that pass values.
//!
//! What a post says follows from its number, so each answer can be checked, whoever was first.

mod content;
mod plain;
mod rpc;

use super::dsm::{
    self, DArc, DAtomic, DBox, DMutex, DString, DVec, Far, Here, JoinError, Lent, NodeId, Owner, ShareError, scope,
};
use super::{Nodes, all, count_since, counts, part, store};
use crate::{Options, Outcome};
use anyhow::Result;
use content::{Activity, Asked, Content, FriendGraph, PostFound, SocialLoad, TIMELINE, Timeline};

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let load = SocialLoad::of(options)?;
    if let Some(peer) = options.peer.as_deref().filter(|peer| !peer.starts_with("share:")) {
        return rpc::run(options, load, peer);
    }
    match Nodes::of(options)? {
        None => plain::run(options, load),
        Some(nodes) => nodes.run(|here| shared(here, options, load)),
    }
}

/// Service that has a place.
#[derive(Clone, Copy)]
enum Service {
    ComposePost,
    Text,
    UrlShorten,
    UserMention,
    UniqueId,
    Media,
    User,
    PostStorage,
    UserTimeline,
    HomeTimeline,
    SocialGraph,
}

impl Service {
    /// Returns the node whose replica of the service is asked about this user or post.
    fn place(self, about: u64, nodes: u64) -> u64 {
        (self as u64 + about) % nodes
    }

    fn at(self, here: &Here<'_>, about: impl Into<u64>) -> NodeId {
        NodeId(self.place(about.into(), here.nodes().count() as u64) as u16)
    }
}

/// Post that was written.
#[derive(Far)]
struct Post {
    author: u32,
    name: u64,
    number: u64,
    text: DString,
    links: [u64; 1],
    mentions: [u32; 1],
    media: DVec<u8>,
}

/// Post that is being written.
#[derive(Far)]
struct Draft {
    text: DString,
    media: DVec<u8>,
}

/// State of the services at a node.
#[derive(Far)]
struct ServiceState {
    posts: DVec<DMutex<Option<DArc<Post>>>>,
    home: DVec<DMutex<Timeline>>,
    user: DVec<DMutex<Timeline>>,
}

/// All of the network.
#[derive(Far)]
struct Net {
    last_id: DAtomic<u64>,
    /// Where the friends of each user begin.
    offsets: DVec<u32>,
    friends: DVec<u32>,
    states: DVec<ServiceState>,
}

impl Net {
    fn new(here: &Here<'_>, load: SocialLoad, graph: &FriendGraph) -> Result<Net, JoinError> {
        let nodes = here.nodes().count() as u64;
        let mut states = DVec::new();
        for node in here.nodes() {
            let each = |count: u64| count.div_ceil(nodes);
            let counts = (each(load.posts_max()), each(graph.users()));
            let state = here.spawn_to(node, counts, |here, (posts, users)| {
                let mut state = ServiceState { posts: DVec::new(), home: DVec::new(), user: DVec::new() };
                for _ in 0..posts {
                    state.posts.push(here, DMutex::new(here, None)?)?;
                }
                for _ in 0..users {
                    state.home.push(here, DMutex::new(here, Timeline::default())?)?;
                    state.user.push(here, DMutex::new(here, Timeline::default())?)?;
                }
                Ok::<_, ShareError>(state)
            })?;
            states.push(here, state.join(here)??)?;
        }
        let (offsets, friends) = (store(here, &graph.offsets)?, store(here, &graph.friends)?);
        Ok(Net { last_id: DAtomic::new(here, 0)?, offsets, friends, states })
    }

    /// Returns the state of a service at the node that has this user's or post's, and the position there.
    fn state<'a>(
        &'a self,
        here: &'a Here<'_>,
        service: Service,
        about: u64,
    ) -> Result<(&'a ServiceState, usize), ShareError> {
        let nodes = self.states.len() as u64;
        let state = self.states.get(here, service.place(about, nodes) as usize)?;
        Ok((state.expect("each node has a state"), (about / nodes) as usize))
    }

    fn post_slot<'a>(&'a self, here: &'a Here<'_>, id: u64) -> Result<&'a DMutex<Option<DArc<Post>>>, ShareError> {
        let (state, at) = self.state(here, Service::PostStorage, id)?;
        Ok(state.posts.get(here, at)?.expect("there is room for all posts"))
    }

    fn timeline<'a>(
        &'a self,
        here: &'a Here<'_>,
        service: Service,
        user: u32,
    ) -> Result<&'a DMutex<Timeline>, ShareError> {
        let (state, at) = self.state(here, service, user.into())?;
        let timelines = if matches!(service, Service::HomeTimeline) { &state.home } else { &state.user };
        Ok(timelines.get(here, at)?.expect("each user has timelines"))
    }

    /// Returns the friends of a user, as the social graph knows them.
    fn friends_of<'a>(&'a self, here: &'a Here<'_>, user: u32) -> Result<&'a [u32], ShareError> {
        let user = user as usize;
        let offsets = part(here, &self.offsets, user..user + 2)?;
        part(here, &self.friends, offsets[0] as usize..offsets[1] as usize)
    }
}

/// Front end: has a post written. Returns its id.
fn compose(here: &Here<'_>, net: &DArc<Net>, content: Content, author: u32, number: u64) -> Result<u64, ShareError> {
    let (text, media) = (DString::from_str(here, &content.text_of(number))?, store(here, &content.media_of(number))?);
    let draft = here.alloc(Draft { text, media })?;
    let node = Service::ComposePost.at(here, author);
    here.spawn_to(node, (net.try_clone(here)?, draft, author, number), compose_post)?.join(here)?
}

/// compose-post: asks the other services about the draft, and passes the post on.
fn compose_post(
    here: &Here<'_>,
    (net, draft, author, number): (DArc<Net>, DBox<Draft>, u32, u64),
) -> Result<u64, ShareError> {
    let (id, (links, mentions), name) = scope(here, |s| {
        let text = s.spawn_to(Service::Text.at(here, author), (s.lend(&draft), author), process_text)?;
        let media = s.spawn_to(Service::Media.at(here, author), (s.lend(&draft),), |here, (draft,)| {
            Ok::<_, ShareError>(content::is_media(draft.get(here)?.media.len()))
        })?;
        let name = s.spawn_to(Service::User.at(here, author), (author,), |_, (author,)| content::name_of(author))?;
        let id = net.get(here)?.last_id.fetch_add(here, 1)? + 1;
        assert!(media.join()??, "front ends send media of the right size");
        Ok::<_, ShareError>((id, text.join()??, name.join()?))
    })??;
    let Draft { text, media } = draft.into_inner(here)?;
    let post = DArc::new(here, Post { author, name, number, text, links, mentions, media })?;
    scope(here, |s| {
        let stored = (s.lend(&net), post.try_clone(here)?, id);
        let stored = s.spawn_to(Service::PostStorage.at(here, id), stored, |here, (net, post, id)| {
            *net.get(here)?.post_slot(here, id)?.lock(here)? = Some(post);
            Ok::<_, ShareError>(())
        })?;
        // Who finds the post in a timeline finds it in the storage.
        stored.join()??;
        let of_user = (s.lend(&net), author, id);
        let mut tasks =
            vec![s.spawn_to(Service::UserTimeline.at(here, author), of_user, |here, (net, user, id)| {
                net.get(here)?.timeline(here, Service::UserTimeline, user)?.lock(here)?.push(id);
                Ok(())
            })?];
        for node in here.nodes() {
            tasks.push(s.spawn_to(node, (s.lend(&net), author, mentions, id), write_home_timelines)?);
        }
        tasks.into_iter().try_for_each(|task| task.join()?)
    })??;
    Ok(id)
}

/// text: has links and mentions looked for by two other services.
fn process_text(here: &Here<'_>, (draft, author): (Lent<'_, Draft>, u32)) -> Result<([u64; 1], [u32; 1]), ShareError> {
    scope(here, |s| {
        let links = s.spawn_to(Service::UrlShorten.at(here, author), (s.lend(&draft),), |here, (draft,)| {
            Ok::<_, ShareError>(content::links_of(draft.get(here)?.text.as_str(here)?))
        })?;
        let mentions = s.spawn_to(Service::UserMention.at(here, author), (s.lend(&draft),), |here, (draft,)| {
            Ok::<_, ShareError>(content::mentions_of(draft.get(here)?.text.as_str(here)?))
        })?;
        Ok((links.join()??, mentions.join()??))
    })?
}

/// home-timeline: adds a post to those of its author's friends and of who is mentioned, which are at this node.
fn write_home_timelines(
    here: &Here<'_>,
    (net, author, mentions, id): (Lent<'_, Net>, u32, [u32; 1], u64),
) -> Result<(), ShareError> {
    let net = net.get(here)?;
    for user in net.friends_of(here, author)?.iter().chain(&mentions) {
        if Service::HomeTimeline.at(here, *user) == here.id() {
            net.timeline(here, Service::HomeTimeline, *user)?.lock(here)?.push(id);
        }
    }
    Ok(())
}

/// Front end: reads a timeline, with the text and the media of its posts.
fn read(
    here: &Here<'_>,
    net: &DArc<Net>,
    content: Content,
    service: Service,
    user: u32,
) -> Result<PostFound, ShareError> {
    let timeline = scope(here, |s| {
        let is_home = matches!(service, Service::HomeTimeline);
        let task = s.spawn_to(service.at(here, user), (s.lend(net), user, is_home), |here, (net, user, is_home)| {
            let service = if is_home { Service::HomeTimeline } else { Service::UserTimeline };
            let timeline = net.get(here)?.timeline(here, service, user)?.lock(here)?;
            Ok::<_, ShareError>(*timeline)
        })?;
        task.join()?
    })??;
    // post-storage, at each node that has some of the posts.
    let posts = scope(here, |s| {
        let mut tasks = Vec::new();
        for node in here.nodes() {
            let is_there = |id: &u64| *id > 0 && Service::PostStorage.at(here, *id) == node;
            let wanted = timeline.ids.map(|id| if is_there(&id) { id } else { 0 });
            if wanted != [0; TIMELINE] {
                tasks.push(s.spawn_to(node, (s.lend(net), wanted), find_posts)?);
            }
        }
        let mut posts: [Option<DArc<Post>>; TIMELINE] = std::array::from_fn(|_| None);
        for task in tasks {
            posts.iter_mut().zip(task.join()??).for_each(|(post, found)| *post = post.take().or(found));
        }
        Ok::<_, ShareError>(posts)
    })??;
    let here = &here.enter();
    // What is needed soon is asked for at once.
    posts.iter().flatten().for_each(|post| post.prefetch(here));
    for post in posts.iter().flatten() {
        if let Some(media) = post.get(here)?.media.chunk(here, 0)? {
            media.prefetch(here);
        }
    }
    let mut found = PostFound::default();
    found.expect(timeline.ids.iter().filter(|id| **id > 0).count() as u64);
    for post in posts.iter().flatten() {
        let Post { author, name, number, text, links, mentions, media } = post.get(here)?;
        let (text, media) = (text.as_str(here)?, all(here, media)?);
        found.see(content, (*author, *name, *number), text, (links[0], mentions[0]), media);
    }
    Ok(found)
}

/// post-storage: returns the posts that have these ids.
fn find_posts(
    here: &Here<'_>,
    (net, ids): (Lent<'_, Net>, [u64; TIMELINE]),
) -> Result<[Option<DArc<Post>>; TIMELINE], ShareError> {
    let (net, mut posts) = (net.get(here)?, std::array::from_fn(|_| None));
    for (post, id) in posts.iter_mut().zip(ids).filter(|(_, id)| *id > 0) {
        *post = net.post_slot(here, id)?.lock(here)?.as_ref().map(|post| post.try_clone(here)).transpose()?;
    }
    Ok(posts)
}

/// Client, as a task at the node of its front end.
fn serve(here: &Here<'_>, (net, load, activity): (DArc<Net>, SocialLoad, Activity)) -> Result<PostFound, ShareError> {
    let mut found = PostFound::default();
    for asked in load.requests(activity) {
        match asked {
            Asked::Home(user) => found.add(read(here, &net, load.content(), Service::HomeTimeline, user)?),
            Asked::User(user) => found.add(read(here, &net, load.content(), Service::UserTimeline, user)?),
            Asked::Compose(author, number) => {
                let id = compose(here, &net, load.content(), author, number)?;
                found.compose(id);
            }
        }
    }
    Ok(found)
}

fn shared(here: &Here<'_>, options: &Options, load: SocialLoad) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let graph = FriendGraph::of(options)?;
    let load = load.with(&graph);
    let net = DArc::new(here, Net::new(here, load, &graph)?)?;
    let clients = |is_filling| -> Result<PostFound, JoinError> {
        let tasks = load.clients(is_filling).map(|activity| {
            let node = NodeId((activity.client % here.nodes().count() as u64) as u16);
            here.spawn_to(node, (net.try_clone(here)?, load, activity), serve)
        });
        let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
        let mut found = PostFound::default();
        for task in tasks {
            found.add(task.join(here)??);
        }
        Ok(found)
    };
    let filled = outcome.phase("fill", load.posts, || clients(true))?;
    let before = counts(here)?;
    let found = outcome.phase("serve", load.ops(), || dsm::measured(|| clients(false)))?;
    count_since(here, before, load.ops(), &mut outcome)?;
    load.finish(&mut outcome, filled, found);
    Ok(outcome)
}
