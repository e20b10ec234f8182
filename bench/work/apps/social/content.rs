//! What people write and ask for, and whether an answer is right: the same for all who keep the posts.

use super::Far;
use crate::random::{Random, mix};
use crate::real;
use crate::{Options, Outcome};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// Posts of a timeline.
pub(super) const TIMELINE: usize = 10;
/// Sizes of media, in bytes: all sizes between are alike by their logarithms.
const MEDIA_BYTES: [u64; 2] = [64 << 10, 1 << 20];
/// What the media of a post take, about.
const MEDIA_MEAN: u64 = 354 << 10;
/// Users of a made graph.
const USERS: u32 = 256;
/// Friends that a new user of a made graph has among those before.
const NEW_FRIENDS: u32 = 8;
/// Words of a post.
const WORDS: u64 = 30;

/// Who is a friend of whom.
pub(super) struct FriendGraph {
    /// Where the friends of each user begin, and where those of the last one end.
    pub(super) offsets: Vec<u32>,
    pub(super) friends: Vec<u32>,
}

impl FriendGraph {
    pub(super) fn of(options: &Options) -> Result<FriendGraph> {
        if options.real == 1 {
            return real::friends().map(|(links, users)| FriendGraph::new(&links, users));
        }
        // Who has many friends gets more of them.
        let mut random = Random::new(options.seed);
        let mut ends: Vec<u32> = vec![0];
        let mut links = Vec::new();
        for user in 1..USERS {
            for _ in 0..NEW_FRIENDS.min(user) {
                let friend = ends[random.below(ends.len() as u64) as usize];
                if friend != user {
                    links.push([user, friend]);
                    ends.extend([user, friend]);
                }
            }
        }
        Ok(FriendGraph::new(&links, USERS as usize))
    }

    fn new(links: &[[u32; 2]], users: usize) -> FriendGraph {
        let mut both: Vec<[u32; 2]> = links.iter().flat_map(|[one, other]| [[*one, *other], [*other, *one]]).collect();
        both.sort_unstable();
        both.dedup();
        let begin = |user| both.partition_point(|[from, _]| (*from as usize) < user) as u32;
        FriendGraph { offsets: (0..=users).map(begin).collect(), friends: both.iter().map(|[_, to]| *to).collect() }
    }

    pub(super) fn users(&self) -> u64 {
        self.offsets.len() as u64 - 1
    }

    pub(super) fn friends_of(&self, user: u32) -> &[u32] {
        let [begin, end] = [user as usize, user as usize + 1].map(|at| self.offsets[at] as usize);
        &self.friends[begin..end]
    }
}

/// The newest posts of a timeline, the newest first; 0 is none.
#[derive(Clone, Copy, Default, Far, Serialize, Deserialize)]
pub(super) struct Timeline {
    pub(super) ids: [u64; TIMELINE],
}

impl Timeline {
    /// Adds a post, unless it is there.
    pub(super) fn push(&mut self, id: u64) {
        if !self.ids.contains(&id) {
            self.ids.rotate_right(1);
            self.ids[0] = id;
        }
    }
}

/// What is asked for.
pub(super) enum Asked {
    /// The posts of a user's friends.
    Home(u32),
    /// The posts of a user.
    User(u32),
    /// A user writes the post of this number.
    Compose(u32, u64),
}

/// A client, and what it does.
#[derive(Clone, Copy, Far, Serialize, Deserialize)]
pub(super) struct Activity {
    pub(super) client: u64,
    /// Whether it only writes: before it is measured.
    is_filling: bool,
}

/// What all clients do.
#[derive(Clone, Copy, Far)]
pub(super) struct SocialLoad {
    pub(super) posts: u64,
    clients: u64,
    /// Operations of each client.
    ops: u64,
    users: u32,
    seed: u64,
}

/// How posts are made: their numbers say the rest.
#[derive(Clone, Copy)]
pub(super) struct Content {
    users: u32,
}

impl SocialLoad {
    pub(super) fn of(options: &Options) -> Result<SocialLoad> {
        ensure!((1..=1024).contains(&options.threads), "--threads must be 1 to 1024");
        let posts = options.data_bytes() / MEDIA_MEAN;
        Ok(SocialLoad {
            posts,
            clients: options.threads,
            ops: options.ops / options.threads,
            users: 0,
            seed: options.seed,
        })
    }

    pub(super) fn with(self, graph: &FriendGraph) -> SocialLoad {
        SocialLoad { users: graph.users() as u32, ..self }
    }

    pub(super) fn ops(self) -> u64 {
        self.ops * self.clients
    }

    /// Returns a number of posts that are never exceeded.
    pub(super) fn posts_max(self) -> u64 {
        self.posts + self.ops() + 1
    }

    pub(super) fn content(self) -> Content {
        Content { users: self.users }
    }

    pub(super) fn clients(self, is_filling: bool) -> impl Iterator<Item = Activity> {
        (0..self.clients).map(move |client| Activity { client, is_filling })
    }

    /// Returns what a client does: of a hundred requests 60 for a home timeline, 30 for a user's, and 10 posts.
    pub(super) fn requests(self, activity: Activity) -> impl Iterator<Item = Asked> {
        let Activity { client, is_filling } = activity;
        let mut random = Random::new(self.seed ^ (client << 1 | u64::from(is_filling)) << 20);
        let count = if is_filling { (self.posts + self.clients - 1 - client) / self.clients } else { self.ops };
        (0..count).map(move |at| {
            let user = random.below(self.users.into()) as u32;
            match random.below(100) {
                0..60 if !is_filling => Asked::Home(user),
                60..90 if !is_filling => Asked::User(user),
                _ => Asked::Compose(user, (client << 1 | u64::from(is_filling)) << 40 | at),
            }
        })
    }

    /// Says what was found. If there is one client, all of it follows from the load.
    pub(super) fn finish(self, outcome: &mut Outcome, filled: PostFound, found: PostFound) {
        let is_exact = self.clients == 1;
        let (written, asked) = (filled.composed + found.composed, found.composed + found.reads);
        let errors =
            filled.errors + found.errors + u64::from(asked != self.ops()) + u64::from(filled.composed != self.posts);
        outcome.figure("posts_per_read", found.posts as f64 / found.reads.max(1) as f64);
        outcome.figure("media_bytes_per_op", found.media_bytes as f64 / self.ops().max(1) as f64);
        let sum = if is_exact { mix(found.sum ^ found.posts) } else { 0 };
        outcome.checked(sum ^ mix(written), errors);
    }
}

impl Content {
    /// Returns the text of a post, with a link and a mention.
    pub(super) fn text_of(self, number: u64) -> String {
        let mut text = String::new();
        for at in 0..WORDS {
            let word = mix(number ^ at << 56);
            match at {
                7 => text.push_str(&format!("@user{} ", word % u64::from(self.users))),
                19 => text.push_str(&format!("https://example.org/{word:016x} ")),
                _ => text.push_str(&format!("word{} ", word % 9973)),
            }
        }
        text
    }

    /// Returns the media of a post: one word, again and again.
    pub(super) fn media_of(self, number: u64) -> Vec<u8> {
        let [least, most] = MEDIA_BYTES.map(|bytes| (bytes as f64).ln());
        let share = (mix(number ^ 0x6d) >> 11) as f64 / (1u64 << 53) as f64;
        let words = (least + share * (most - least)).exp() as usize / 8;
        mix(number).to_le_bytes().repeat(words)
    }
}

/// media: returns whether media have a size that is allowed.
pub(super) fn is_media(bytes: usize) -> bool {
    (MEDIA_BYTES[0] as usize - 8..=MEDIA_BYTES[1] as usize).contains(&bytes)
}

/// user: returns a user's name, as a number.
pub(super) fn name_of(user: u32) -> u64 {
    mix(u64::from(user) ^ 0x75)
}

/// url-shorten: returns the short forms of the links in a text.
pub(super) fn links_of(text: &str) -> [u64; 1] {
    let link = text.split(' ').find(|word| word.starts_with("https://"));
    [link.map_or(0, |link| link.bytes().fold(0, |sum, byte| mix(sum ^ u64::from(byte))))]
}

/// user-mention: returns who is mentioned in a text.
pub(super) fn mentions_of(text: &str) -> [u32; 1] {
    let mention = text.split(' ').find_map(|word| word.strip_prefix("@user")?.parse().ok());
    [mention.unwrap_or(u32::MAX)]
}

/// What a client has found.
#[derive(Clone, Copy, Default, Far, Serialize, Deserialize)]
pub(super) struct PostFound {
    reads: u64,
    composed: u64,
    posts: u64,
    media_bytes: u64,
    sum: u64,
    errors: u64,
}

impl PostFound {
    pub(super) fn add(&mut self, more: PostFound) {
        self.reads += more.reads;
        self.composed += more.composed;
        self.posts += more.posts;
        self.media_bytes += more.media_bytes;
        self.sum = mix(self.sum ^ more.sum);
        self.errors += more.errors;
    }

    /// Records that a post was written, and has this id.
    pub(super) fn compose(&mut self, id: u64) {
        self.composed += 1;
        self.sum = mix(self.sum ^ id);
    }

    /// Records that a timeline of so many posts is read. Each of them is to be seen.
    pub(super) fn expect(&mut self, posts: u64) {
        self.reads += 1;
        self.errors += posts;
    }

    /// Records a post that was read, with its author, the author's name and its number, its text, what was found in the text,
    /// and its media. All of it is looked at.
    pub(super) fn see(
        &mut self,
        content: Content,
        (author, name, number): (u32, u64, u64),
        text: &str,
        (link, mention): (u64, u32),
        media: &[u8],
    ) {
        let (words, rest) = media.as_chunks::<8>();
        let word = mix(number).to_le_bytes();
        let is_right = name == name_of(author)
            && text == content.text_of(number)
            && [link] == links_of(text)
            && [mention] == mentions_of(text)
            && is_media(media.len())
            && rest.is_empty()
            && words.iter().fold(true, |is_right, found| is_right & (*found == word));
        self.posts += 1;
        self.errors -= u64::from(is_right);
        self.media_bytes += media.len() as u64;
        self.sum = mix(self.sum ^ number ^ mix(media.len() as u64 ^ u64::from(author) << 32));
    }
}
