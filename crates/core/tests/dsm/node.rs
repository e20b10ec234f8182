//! A node as farfield-dsm has it: blocks, copies, loans, a backup, and what others ask of it. What it decides is
//! decided by the pure code of `core::dsm`.

use crate::channels::{
    ChannelAnswer, HomeChannel, Wish, ask_channel, cancel, lose_channels, take_channel_answer, withdraw,
};
use crate::locks::{
    HomeLock, LockAnswer, LockEnd, ask_lock, end_lock, lose_locks, outlast_lenders, take_answer, unlock,
};
use crate::program::{Held, Outcome, Start, start_task};
use crate::world::{Action, FIRST, Failure, Kind, NODES, Rule, Slot, World};
use farfield_core::dsm::{
    BackupBatch, BackupImage, BackupLayout, BackupLog, BackupReadStep, BackupReader, BatchPlace, BlockHeader,
    BlockRights, BorrowRoot, BorrowerCounts, Colour, CommitWord, HomeTicket, LoanNumber, LoanPlace, OwnerWord,
    Partition, StoredChannel, StoredLock, StoredMessage, WithdrawnTickets,
};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::lock::LockMode;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// Bytes of an object: three of them take more than a page.
const OBJECT_BYTES: usize = 1500;
/// Blocks of a node at first. Two of them have few colours left.
const BLOCKS: u64 = 6;

/// Contents of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Contents {
    pub(crate) value: u64,
    pub(crate) child: Option<OwnerWord>,
}

impl Contents {
    fn encode(self) -> Vec<u8> {
        let mut bytes = self.value.to_le_bytes().repeat(OBJECT_BYTES / 8);
        bytes.extend_from_slice(&self.child.map_or(0, OwnerWord::bits).to_le_bytes());
        bytes
    }

    /// Reads the bytes of an object. `None` if they are not whole.
    fn decode(bytes: &[u8]) -> Option<Contents> {
        let mut words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
        let child = words.next_back()?;
        let value = words.next()?;
        words.all(|other| other == value).then_some(Contents { value, child: OwnerWord::from_bits(child) })
    }
}

pub(crate) struct Block {
    header: BlockHeader,
    pub(crate) contents: Contents,
    /// Word of the version that is in the block.
    version: Option<OwnerWord>,
}

/// End of a task at the node that has started it.
pub(crate) type TaskEnd = Result<(Outcome, BTreeMap<LoanNumber, Option<LoanPlace>>), u16>;

#[derive(Clone)]
pub(crate) enum Message {
    Fetch {
        word: OwnerWord,
    },
    Free {
        word: OwnerWord,
        drops: bool,
    },
    Spawn {
        number: u64,
        is_scoped: bool,
        roots: Vec<BorrowRoot>,
        /// Roots of which nothing was lent.
        unused: BTreeMap<BorrowRoot, bool>,
        arguments: Vec<Held>,
        seed: u64,
        depth: u64,
    },
    Ended {
        number: u64,
        outcome: Outcome,
        loans: BTreeMap<LoanNumber, Option<LoanPlace>>,
    },
    Outlast {
        of: u16,
        root: BorrowRoot,
        ticket: u64,
    },
    Outlasted {
        ticket: u64,
    },
    /// A replica of the sender's backup is older than what others will know.
    ReplicaLost {
        replica: usize,
    },
    /// Who is gone, and who keeps what that had stored.
    View {
        changes: View,
    },
    Lock {
        word: OwnerWord,
        ticket: u64,
        mode: LockMode,
        /// Whether the task may have been lent something of what the lock owns.
        may_borrow: bool,
    },
    Unlock {
        word: OwnerWord,
        ticket: u64,
        end: LockEnd,
    },
    Answered {
        ticket: u64,
        answer: LockAnswer,
    },
    Wish {
        word: OwnerWord,
        ticket: u64,
        settled: u64,
        wish: Wish,
    },
    Cancel {
        word: OwnerWord,
        ticket: u64,
    },
    Told {
        ticket: u64,
        answer: ChannelAnswer,
    },
}

impl Message {
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Message::Fetch { .. } => Kind::Fetch,
            Message::Free { .. } => Kind::Free,
            Message::Spawn { .. } => Kind::Spawn,
            Message::Ended { .. } => Kind::Ended,
            Message::Outlast { .. } => Kind::Outlast,
            Message::Outlasted { .. } => Kind::Outlasted,
            Message::View { .. } => Kind::View,
            Message::ReplicaLost { .. } => Kind::ReplicaLost,
            Message::Lock { .. } => Kind::Lock,
            Message::Unlock { .. } => Kind::Unlock,
            Message::Answered { .. } => Kind::Answered,
            Message::Wish { wish: Wish::Send(_), .. } => Kind::Send,
            Message::Wish { wish: Wish::Receive, .. } => Kind::Receive,
            Message::Cancel { .. } => Kind::Cancel,
            Message::Told { .. } => Kind::Told,
        }
    }

    /// Returns whether nobody learns from the message what its sender has done.
    pub(crate) fn is_read(&self) -> bool {
        matches!(
            self,
            Message::Fetch { .. } | Message::Outlast { .. } | Message::View { .. } | Message::ReplicaLost { .. }
        )
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    Done,
    Contents(Contents),
    Lock(LockAnswer),
    Channel(ChannelAnswer),
    Waits,
    Expelled,
}

pub(crate) type Reply = Result<Answer, Failure>;
/// Nodes that are gone, in order, with those that keep what they had stored.
pub(crate) type View = Vec<(u16, Option<u16>)>;
type OpenCall = (u16, Slot<(Reply, View)>);

pub(crate) struct Node {
    pub(crate) id: u16,
    pub(crate) is_alive: bool,
    pub(crate) is_stopped: bool,
    /// It has died or was expelled: what it sees does not count.
    pub(crate) is_condemned: bool,
    pub(crate) is_expelled: bool,
    /// What happens when it runs again.
    pub(crate) held: Vec<Action>,
    pub(crate) lost: BTreeSet<u16>,
    pub(crate) view: View,
    hosts: BTreeMap<u16, u16>,
    pub(crate) calls: Vec<OpenCall>,
    joins: BTreeMap<u64, (u16, Slot<TaskEnd>)>,
    waits: BTreeMap<u64, (u16, Slot<bool>)>,
    pub(crate) lock_waits: BTreeMap<u64, (u16, Slot<Option<LockAnswer>>)>,
    /// Locks that this node keeps, by word.
    pub(crate) locks: BTreeMap<u64, HomeLock>,
    pub(crate) channel_waits: BTreeMap<u64, (u16, Slot<Option<ChannelAnswer>>)>,
    /// Channels that this node keeps, by word.
    pub(crate) channels: BTreeMap<u64, HomeChannel>,
    /// Tickets of this node that may still be asked for, by the word of the channel.
    pub(crate) tickets: BTreeSet<(u64, u64)>,
    pub(crate) withdrawn: WithdrawnTickets,
    borrowers: BorrowerCounts,
    numbers: u64,
    pub(crate) blocks: BTreeMap<u64, Block>,
    free: Vec<u64>,
    copies: BTreeMap<u64, Contents>,
    pub(crate) promoted: BTreeMap<(u16, u64), (OwnerWord, Contents)>,
    outbox: BTreeMap<u16, VecDeque<Message>>,
    pub(crate) backup: Option<Backup>,
}

/// Backup of a node at one memory server.
struct Replica {
    commit: CommitWord,
    pages: Vec<u8>,
}

impl Replica {
    fn new() -> Replica {
        Replica { commit: CommitWord::default(), pages: vec![0; layout().pages() as usize * PAGE_BYTES] }
    }
}

/// Backup of a node: what the memory servers have, and what is known of it.
pub(crate) struct Backup {
    replicas: Vec<Replica>,
    /// Replicas that the writer uses.
    used: BTreeSet<usize>,
    /// Replicas that the first node knows to be lost, and whether it takes the backup over.
    known_lost: BTreeSet<usize>,
    is_taken_over: bool,
    log: BackupLog,
    stored: BTreeMap<u64, OwnerWord>,
    /// Locks of this node, by offset, and the offsets of those that have changed since they were stored.
    pub(crate) locks: BTreeMap<u64, (OwnerWord, StoredLock)>,
    pub(crate) changed_locks: BTreeSet<u64>,
    /// Channels in the same way; and values in them, with the channel and the position.
    pub(crate) channels: BTreeMap<u64, (OwnerWord, StoredChannel)>,
    pub(crate) changed_channels: BTreeSet<u64>,
    pub(crate) messages: BTreeMap<u64, (OwnerWord, OwnerWord, u64)>,
    pub(crate) changed_messages: BTreeSet<u64>,
    pub(crate) position: u64,
    pub(crate) batch: BackupBatch,
    pub(crate) staged: u64,
    collecting: u64,
    done: u64,
    is_writing: bool,
    waiters: Vec<Slot<()>>,
}

fn layout() -> BackupLayout {
    BackupLayout::for_objects(BLOCKS * (OBJECT_BYTES as u64 + 40))
}

pub(crate) fn key(word: OwnerWord) -> (u16, u64) {
    (word.partition().number(), word.offset())
}

pub(crate) fn home_of(word: OwnerWord) -> u16 {
    word.partition().number()
}

/// Takes out what waits for a node.
fn take_of<T>(waits: &mut BTreeMap<u64, (u16, T)>, node: u16) -> Vec<T> {
    let numbers: Vec<u64> = waits.iter().filter(|(_, (of, _))| *of == node).map(|(number, _)| *number).collect();
    numbers.iter().filter_map(|number| waits.remove(number)).map(|(_, wait)| wait).collect()
}

impl Node {
    pub(crate) fn new(id: u16, replicas: usize) -> Node {
        let block = |next| Block { header: BlockHeader::Free { next: Colour(next) }, contents: EMPTY, version: None };
        let offsets = (1..=BLOCKS).map(|block| block * 4096);
        let blocks = offsets.clone().zip((0..).map(|index| if index < 2 { u16::MAX - 3 } else { 0 }));
        Node {
            id,
            is_alive: true,
            is_stopped: false,
            is_condemned: false,
            is_expelled: false,
            held: Vec::new(),
            lost: BTreeSet::new(),
            view: View::new(),
            hosts: BTreeMap::new(),
            calls: Vec::new(),
            joins: BTreeMap::new(),
            waits: BTreeMap::new(),
            lock_waits: BTreeMap::new(),
            locks: BTreeMap::new(),
            channel_waits: BTreeMap::new(),
            channels: BTreeMap::new(),
            tickets: BTreeSet::new(),
            withdrawn: WithdrawnTickets::default(),
            borrowers: BorrowerCounts::default(),
            numbers: u64::from(id) << 32,
            blocks: blocks.map(|(offset, next)| (offset, block(next))).collect(),
            free: offsets.collect(),
            copies: BTreeMap::new(),
            promoted: BTreeMap::new(),
            outbox: BTreeMap::new(),
            backup: (replicas > 0).then(|| Backup {
                replicas: (0..replicas).map(|_| Replica::new()).collect(),
                used: (0..replicas).collect(),
                known_lost: BTreeSet::new(),
                is_taken_over: false,
                log: BackupLog::new(layout(), CommitWord::default()),
                stored: BTreeMap::new(),
                locks: BTreeMap::new(),
                changed_locks: BTreeSet::new(),
                channels: BTreeMap::new(),
                changed_channels: BTreeSet::new(),
                messages: BTreeMap::new(),
                changed_messages: BTreeSet::new(),
                position: 0,
                batch: BackupBatch::default(),
                staged: 0,
                collecting: 1,
                done: 0,
                is_writing: false,
                waiters: Vec::new(),
            }),
        }
    }

    /// Returns a number that no other node has.
    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Returns the number of objects at this node.
    pub(crate) fn objects(&self) -> usize {
        self.blocks.values().filter(|block| matches!(block.header, BlockHeader::Used { .. })).count()
    }

    pub(crate) fn host_of(&self, word: OwnerWord) -> u16 {
        self.hosts.get(&home_of(word)).copied().unwrap_or(home_of(word))
    }

    pub(crate) fn is_here(&self, word: OwnerWord) -> bool {
        home_of(word) == self.id
    }

    /// Stores an object in a free block.
    pub(crate) fn alloc(&mut self, contents: Contents) -> OwnerWord {
        let offset = self.free.pop().unwrap_or_else(|| {
            let offset = (self.blocks.len() as u64 + 1) * 4096;
            self.blocks.insert(offset, Block { header: BlockHeader::NEW, contents, version: None });
            offset
        });
        let block = self.blocks.get_mut(&offset).expect("a block");
        let colour = block.header.fill().expect("a free block");
        let partition = Partition::new(self.id).expect("a small number");
        let word = OwnerWord::new(partition, offset, colour).expect("a small offset");
        (block.contents, block.version) = (contents, Some(word));
        word
    }

    pub(crate) fn read_here(&self, word: OwnerWord) -> Option<Contents> {
        if !self.is_here(word) {
            return self.promoted.get(&key(word)).filter(|(of, _)| *of == word).map(|(_, contents)| *contents);
        }
        let block = self.blocks.get(&word.offset())?;
        block.header.may_hold(word.colour()).then_some(block.contents)
    }

    /// Overwrites an object of this node, which has this word from now on.
    pub(crate) fn write_here(&mut self, word: OwnerWord, contents: Contents) {
        let block = self.blocks.get_mut(&word.offset()).expect("it is here");
        (block.contents, block.version) = (contents, Some(word));
    }

    /// Returns the contents of an object of this node that is borrowed.
    pub(crate) fn borrowed(&self, word: OwnerWord) -> Contents {
        self.blocks[&word.offset()].contents
    }

    /// Records that an object is changed or freed.
    fn forget_stored(&mut self, word: OwnerWord) {
        let Some(backup) = &mut self.backup else { return };
        if backup.stored.get(&word.offset()).is_some_and(|stored| stored.colour() <= word.colour()) {
            backup.stored.remove(&word.offset());
            backup.batch.free(word);
        }
    }

    /// Adds an object and what it owns to the next batch, as far as they are at this node and not stored.
    pub(crate) fn stage(&mut self, word: OwnerWord) {
        let mut left = vec![word];
        while let Some(word) = left.pop() {
            let contents = self.read_here(word).filter(|_| self.is_here(word) && !word.is_lost());
            let (Some(contents), Some(backup)) = (contents, &mut self.backup) else { continue };
            if backup.stored.insert(word.offset(), word) != Some(word) {
                backup.batch.put(word, &contents.encode());
                backup.staged += 1;
                left.extend(contents.child);
            }
        }
    }

    /// Records that another node is gone. What waits for it waits no longer.
    fn lose(world: &Rc<World>, at: u16, node: u16) {
        let mut here = world.node(at);
        here.lost.insert(node);
        for (_, call) in here.calls.extract_if(.., |(to, _)| *to == node) {
            call.put(world, (Err(Failure::NodeLost(node)), View::new()));
        }
        for join in take_of(&mut here.joins, node) {
            join.put(world, Err(node));
        }
        for wait in take_of(&mut here.waits, node) {
            wait.put(world, false);
        }
        for wait in take_of(&mut here.lock_waits, node) {
            wait.put(world, None);
        }
        for wait in take_of(&mut here.channel_waits, node) {
            wait.put(world, None);
        }
        here.withdrawn.lose(node);
        drop(here);
        lose_locks(world, at, node);
        lose_channels(world, at, node);
    }

    /// Learns who is gone.
    pub(crate) fn learn(world: &Rc<World>, at: u16, view: &[(u16, Option<u16>)]) {
        let known = world.node(at).view.len();
        for (node, host) in view.iter().skip(known).copied() {
            world.node(at).hosts.extend(host.map(|host| (node, host)));
            Node::lose(world, at, node);
            world.node(at).view.push((node, host));
        }
    }

    /// Does what a message asks for.
    pub(crate) fn receive(world: &Rc<World>, at: u16, from: u16, message: Message) -> Reply {
        if world.node(at).lost.contains(&from) {
            return Ok(Answer::Expelled);
        }
        match message {
            Message::Fetch { word } => world.node(at).read_here(word).map(Answer::Contents).ok_or(Failure::Stale),
            Message::Free { word, drops } => free_at(world, at, word, drops),
            Message::Spawn { number, is_scoped, roots, unused, arguments, seed, depth } => {
                if is_scoped && !world.node(at).borrowers.admit(from, &roots) {
                    return Ok(Answer::Expelled);
                }
                start_task(world, at, Start { origin: from, number, is_scoped, roots, unused, arguments, seed, depth });
                Ok(Answer::Done)
            }
            Message::Ended { number, outcome, loans } => {
                let join = world.node(at).joins.remove(&number);
                if let Some((_, join)) = join {
                    join.put(world, Ok((outcome, loans)));
                }
                Ok(Answer::Done)
            }
            Message::Outlast { of, root, ticket } => {
                let ticket = HomeTicket { node: from, number: ticket };
                Ok(if world.node(at).borrowers.close(of, root, ticket) { Answer::Done } else { Answer::Waits })
            }
            Message::Outlasted { ticket } => {
                let wait = world.node(at).waits.remove(&ticket);
                if let Some((_, wait)) = wait {
                    wait.put(world, true);
                }
                Ok(Answer::Done)
            }
            Message::ReplicaLost { replica } => {
                let is_heard = backup_of(world, from, |it| {
                    let is_heard = !it.is_taken_over;
                    if is_heard {
                        it.known_lost.insert(replica);
                    }
                    is_heard
                });
                Ok(if is_heard { Answer::Done } else { Answer::Expelled })
            }
            Message::View { changes } => {
                Node::learn(world, at, &changes);
                Ok(Answer::Done)
            }
            Message::Lock { word, ticket, mode, may_borrow } => {
                let ticket = HomeTicket { node: from, number: ticket };
                Ok(ask_lock(world, at, word, ticket, mode, may_borrow).map_or(Answer::Waits, Answer::Lock))
            }
            Message::Unlock { word, ticket, end } => {
                let ticket = HomeTicket { node: from, number: ticket };
                let is_channel = world.node(at).channels.contains_key(&word.bits());
                if is_channel {
                    withdraw(world, at, word, ticket);
                } else {
                    end_lock(world, at, word, ticket, end);
                }
                Ok(Answer::Done)
            }
            Message::Wish { word, ticket, settled, wish } => {
                let ticket = HomeTicket { node: from, number: ticket };
                Ok(ask_channel(world, at, word, (ticket, settled), wish).map_or(Answer::Waits, Answer::Channel))
            }
            Message::Cancel { word, ticket } => {
                let is_over = cancel(world, at, word, HomeTicket { node: from, number: ticket });
                Ok(if is_over { Answer::Done } else { Answer::Waits })
            }
            Message::Told { ticket, answer } => {
                take_channel_answer(world, at, ticket, answer);
                Ok(Answer::Done)
            }
            Message::Answered { ticket, answer } => {
                take_answer(world, at, ticket, answer);
                Ok(Answer::Done)
            }
        }
    }
}

const EMPTY: Contents = Contents { value: 0, child: None };

/// Frees an object at the node that keeps it, and what it owns if it is dropped.
fn free_at(world: &Rc<World>, at: u16, word: OwnerWord, drops: bool) -> Reply {
    let mut node = world.node(at);
    let child = if !node.is_here(word) {
        let Some((_, contents)) = node.promoted.get(&key(word)).filter(|(of, _)| *of == word).copied() else {
            return Err(Failure::Stale);
        };
        node.promoted.remove(&key(word));
        drop(node);
        contents.child
    } else {
        node.forget_stored(word);
        node.forget_lock(word);
        node.forget_channel(world, word);
        let (outlive, knows_late) = (world.has(Rule::ColoursOutliveObjects), world.has(Rule::LateFreesAreKnown));
        let Some(block) = node.blocks.get_mut(&word.offset()) else { return Err(Failure::Stale) };
        if block.header.free(word.colour()).is_err() {
            if knows_late || !matches!(block.header, BlockHeader::Used { .. }) {
                return Err(Failure::Stale);
            }
            block.header = BlockHeader::Free { next: word.colour() };
        }
        if !outlive {
            block.header = BlockHeader::NEW;
        }
        let (contents, version) = (block.contents, block.version.take());
        block.contents = EMPTY;
        if matches!(block.header, BlockHeader::Free { .. }) {
            node.free.push(word.offset());
        }
        drop(node);
        if version != Some(word) {
            world.broken(at, format!("{version:?} is freed by {word:?}"));
        }
        contents.child
    };
    if let Some(child) = child.filter(|_| drops) {
        free(world, at, child, true);
    }
    Ok(Answer::Done)
}

/// Records that a free that was said for the first time has found no object. The first node says it of what a
/// promoted object owned, if the dead node had dropped that already, and had not stored it.
fn freed_again(world: &World, at: u16, word: OwnerWord) {
    if at != FIRST || world.seen.borrow().promotions == 0 {
        world.broken(at, format!("{word:?} is freed twice"));
    }
}

/// Frees an object that has no owner any more, here or at its node. Does not wait.
pub(crate) fn free(world: &Rc<World>, at: u16, word: OwnerWord, drops: bool) {
    if word.is_lost() {
        return;
    }
    let host = world.node(at).host_of(word);
    if host == at {
        if free_at(world, at, word, drops).is_err() && home_of(word) == at {
            freed_again(world, at, word);
        }
    } else {
        tell(world, at, host, Message::Free { word, drops });
    }
}

/// Says something to a node, in order, again and again until it answers or is gone.
pub(crate) fn tell(world: &Rc<World>, from: u16, to: u16, message: Message) {
    let mut node = world.node(from);
    let lane = node.outbox.entry(to).or_default();
    lane.push_back(message);
    if lane.len() > 1 {
        return;
    }
    drop(node);
    let world = world.clone();
    world.clone().spawn(from, async move {
        loop {
            let next = world.node(from).outbox.get(&to).and_then(|lane| lane.front().cloned());
            let Some(message) = next else { return };
            say(&world, from, to, message.clone()).await;
            let host = match &message {
                Message::Free { word, .. } | Message::Unlock { word, .. } => world.node(from).host_of(*word),
                _ => to,
            };
            world.node(from).outbox.get_mut(&to).and_then(VecDeque::pop_front);
            // Another node keeps it since. What was done before is not done again.
            match message {
                Message::Free { word, drops } if host != to => free(&world, from, word, drops),
                Message::Unlock { word, ticket, end } if host != to => {
                    unlock(&world, from, word, HomeTicket { node: from, number: ticket }, end);
                }
                _ => {}
            }
        }
    });
}

/// Says something until it is answered. Returns whether the node may have heard it.
async fn say(world: &Rc<World>, from: u16, to: u16, message: Message) -> bool {
    let (mut is_first, mut may_have_arrived) = (true, false);
    loop {
        may_have_arrived |= !world.node(from).lost.contains(&to);
        match world.ask(from, to, message.clone()).await {
            Err(Failure::Silent) => is_first = false,
            Err(Failure::Stale)
                if is_first && matches!(&message, Message::Free { word, .. } if home_of(*word) == to) =>
            {
                if let Message::Free { word, .. } = message {
                    freed_again(world, from, word);
                }
                return true;
            }
            Ok(Answer::Expelled) => {
                world.die(from);
                world.alive(from).await;
            }
            Err(Failure::NodeLost(_)) => return may_have_arrived,
            _ => return true,
        }
    }
}

/// Takes the place of a node that is gone: sets the fence, reads its backup, and tells all.
pub(crate) async fn take_over(world: Rc<World>, node: u16) {
    let has_backup = world.node(node).backup.is_some();
    let mut lenders = Vec::new();
    if has_backup {
        let (replicas, lost) = backup_of(&world, node, |it| {
            it.is_taken_over = true;
            (it.replicas.len(), it.known_lost.clone())
        });
        let mut fenced = Vec::new();
        for replica in (0..replicas).filter(|replica| !lost.contains(replica)) {
            fenced.extend(fence(&world, node, replica).await.map(|word| (word.batch(), replica, word)));
        }
        fenced.sort_by_key(|(batch, replica, _)| (std::cmp::Reverse(*batch), *replica));
        let mut image = None;
        for (_, replica, commit) in fenced {
            let read = move |world: &World| backup_of(world, node, |it| read_all(&it.replicas[replica], commit));
            image = world.at_replica(FIRST, replica, Kind::Fence, read).await;
            if image.is_some() {
                break;
            }
        }
        match image {
            Some(Some(Image { objects, locks, channels, mut messages })) => {
                let mut first = world.node(FIRST);
                first.promoted.extend(objects.into_iter().map(|(word, contents)| (key(word), (word, contents))));
                for (word, lock) in locks {
                    let of_lock = first.promote_lock(&world, word, lock, node);
                    lenders.extend(of_lock.into_iter().map(|ticket| (word, ticket)));
                }
                for (word, channel) in channels {
                    let of_channel = messages.extract_if(.., |(_, message)| message.channel == word).collect();
                    first.promote_channel(word, channel, of_channel, node);
                }
                drop(first);
                world.seen.borrow_mut().promotions += 1;
            }
            Some(None) => world.broken(FIRST, format!("the backup of node {node} is torn")),
            // The only server that has all of it cannot be reached.
            None => world.is_backup_gone.set(true),
        }
    }
    let host = (has_backup && !world.is_backup_gone.get()).then_some(FIRST);
    world.seen.borrow_mut().lenders += lenders.len() as u64;
    outlast_lenders(&world, FIRST, lenders);
    let mut changes = world.node(FIRST).view.clone();
    changes.push((node, host));
    Node::learn(&world, FIRST, &changes);
    for other in (0..NODES).filter(|other| *other != node && *other != FIRST) {
        tell(&world, FIRST, other, Message::View { changes: changes.clone() });
    }
}

fn backup_of<T>(world: &World, node: u16, action: impl FnOnce(&mut Backup) -> T) -> T {
    action(world.node(node).backup.as_mut().expect("it has one"))
}

/// Contents of a backup.
struct Image {
    objects: Vec<(OwnerWord, Contents)>,
    locks: Vec<(OwnerWord, StoredLock)>,
    channels: Vec<(OwnerWord, StoredChannel)>,
    messages: Vec<(OwnerWord, StoredMessage)>,
}

/// Reads all batches that count. `None` if one is not whole.
fn read_all(backup: &Replica, commit: CommitWord) -> Option<Image> {
    let mut reader = BackupReader::new(layout(), commit, BackupImage::default());
    let pages = |first: u64, count: u64| {
        let range = first as usize * PAGE_BYTES..(first + count) as usize * PAGE_BYTES;
        backup.pages.get(range)
    };
    while let BackupReadStep::Pages(first, count) = reader.poll_header() {
        let BackupReadStep::Pages(first, count) = reader.on_header(pages(first, count)?).ok()? else { return None };
        reader.on_batch(pages(first, count)?).ok()?;
    }
    let image = reader.into_image();
    let objects = image.objects.into_values();
    let objects = objects.map(|(word, bytes)| Contents::decode(&bytes).map(|contents| (word, contents)));
    Some(Image {
        objects: objects.collect::<Option<_>>()?,
        locks: image.locks.into_values().collect(),
        channels: image.channels.into_values().collect(),
        messages: image.messages.into_values().collect(),
    })
}

/// Sets the fence at a replica. Returns the commit word as it was; `None` if the replica cannot be reached.
async fn fence(world: &Rc<World>, node: u16, replica: usize) -> Option<CommitWord> {
    loop {
        let read = move |world: &World| backup_of(world, node, |it| it.replicas[replica].commit);
        let word = world.at_replica(FIRST, replica, Kind::Fence, read).await?;
        if !world.has(Rule::TakenOverWithFence) {
            return Some(word);
        }
        let fenced = word.fenced().expect("nobody else takes it over");
        let exchange = exchange(node, replica, word, fenced);
        if world.at_replica(FIRST, replica, Kind::Fence, exchange).await? == word {
            return Some(word);
        }
    }
}

/// Returns the step of a server that exchanges a commit word.
fn exchange(of: u16, replica: usize, current: CommitWord, new: CommitWord) -> impl FnOnce(&World) -> CommitWord {
    move |world: &World| {
        backup_of(world, of, |backup| {
            let commit = &mut backup.replicas[replica].commit;
            let found = *commit;
            if found == current {
                *commit = new;
            }
            found
        })
    }
}

/// Waits until what was staged is stored (group commit).
pub(crate) async fn commit(world: &Rc<World>, at: u16) {
    if world.node(at).backup.is_none() || !world.has(Rule::StoredBeforeSent) {
        return;
    }
    world.node(at).stage_changes();
    let target = backup_of(world, at, |it| if it.staged > 0 { it.collecting } else { it.collecting - 1 });
    loop {
        let (done, is_writing) = backup_of(world, at, |it| (it.done, it.is_writing));
        if done >= target {
            return;
        }
        if is_writing {
            let written = Slot::new();
            backup_of(world, at, |it| it.waiters.push(written.clone()));
            written.wait(world).await;
            continue;
        }
        write_batch(world, at).await;
        for waiter in backup_of(world, at, |it| std::mem::take(&mut it.waiters)) {
            waiter.put(world, ());
        }
    }
}

/// Writes what was collected as one batch.
async fn write_batch(world: &Rc<World>, at: u16) {
    let (mut batch, place, number): (BackupBatch, BatchPlace, u64) = {
        let mut node = world.node(at);
        node.stage_changes();
        let messages = node.all_messages();
        let stored: Vec<OwnerWord> =
            node.backup.as_ref().map_or_else(Vec::new, |backup| backup.stored.values().copied().collect());
        let all = stored.into_iter().filter_map(|word| Some((word, node.read_here(word)?))).collect::<Vec<_>>();
        let backup = node.backup.as_mut().expect("it has one");
        backup.is_writing = true;
        let (mut batch, number) = (std::mem::take(&mut backup.batch), backup.collecting);
        (backup.collecting, backup.staged) = (number + 1, 0);
        let place = backup.log.append(&batch).unwrap_or_else(|| {
            batch = BackupBatch::default();
            all.iter().for_each(|(word, contents)| batch.put(*word, &contents.encode()));
            backup.locks.values().for_each(|(word, lock)| batch.put_lock(*word, lock));
            backup.channels.values().for_each(|(word, channel)| batch.put_channel(*word, channel));
            messages.iter().for_each(|(word, message)| batch.put_message(*word, message));
            backup.log.checkpoint(&batch).expect("a half has room for all objects")
        });
        (batch, place, number)
    };
    world.seen.borrow_mut().checkpoints += u64::from(place.is_checkpoint);
    let before = backup_of(world, at, |it| it.log.commit());
    let used: Vec<usize> = backup_of(world, at, |it| it.used.iter().copied().collect());
    let (mut written, mut lost) = (Vec::new(), BTreeSet::new());
    for (page, bytes) in (place.first_page..).zip(batch.seal(place).chunks(PAGE_BYTES)) {
        for replica in used.iter().copied() {
            let bytes = bytes.to_vec();
            let step = move |world: &World| {
                let start = page as usize * PAGE_BYTES;
                backup_of(world, at, |it| {
                    it.replicas[replica].pages[start..start + bytes.len()].copy_from_slice(&bytes);
                });
            };
            written.push((replica, world.start_at_replica(at, replica, Kind::Page, step).await));
        }
    }
    if world.has(Rule::PagesBeforeCommit) {
        for (replica, page) in written {
            if page.wait(world).await.is_none() {
                lost.insert(replica);
            }
        }
    }
    let mut exchanged = Vec::new();
    for replica in used.iter().copied().filter(|replica| !lost.contains(replica)) {
        let step = exchange(at, replica, before, place.commit);
        exchanged.push((replica, world.start_at_replica(at, replica, Kind::Commit, step).await));
    }
    let mut is_fenced = false;
    for (replica, word) in exchanged {
        match word.wait(world).await {
            Some(word) => is_fenced |= word != before,
            None => drop(lost.insert(replica)),
        }
    }
    if is_fenced {
        // Another node keeps its objects.
        world.seen.borrow_mut().fenced_writers += 1;
        world.die(at);
        world.alive(at).await;
    }
    for replica in lost {
        world.seen.borrow_mut().lost_replicas += 1;
        backup_of(world, at, |it| it.used.remove(&replica));
        if world.has(Rule::LostReplicasAreKnown) {
            Box::pin(say(world, at, FIRST, Message::ReplicaLost { replica })).await;
        }
    }
    backup_of(world, at, |it| {
        if let Some((first, count)) = it.log.advance(place) {
            let unused = first as usize * PAGE_BYTES..(first + count) as usize * PAGE_BYTES;
            it.replicas.iter_mut().for_each(|replica| replica.pages[unused.clone()].fill(0));
        }
        (it.done, it.is_writing) = (number, false);
    });
}

/// A task at a node.
pub(crate) struct Here {
    pub(crate) world: Rc<World>,
    pub(crate) node: u16,
    /// What has become of the mutable loans that the task has used.
    pub(crate) loans: BTreeMap<LoanNumber, Option<LoanPlace>>,
    /// Roots of what the task was lent, and of what the values of its locks own.
    pub(crate) roots: BTreeSet<BorrowRoot>,
    /// Those of them of which the task was lent nothing, and whether other things were lent under the lock.
    pub(crate) unused: BTreeMap<BorrowRoot, bool>,
}

impl Here {
    pub(crate) fn new(world: &Rc<World>, node: u16) -> Here {
        Here { world: world.clone(), node, loans: BTreeMap::new(), roots: BTreeSet::new(), unused: BTreeMap::new() }
    }

    /// Returns the roots of which the task was lent something.
    pub(crate) fn borrowed(&self) -> impl Iterator<Item = &BorrowRoot> {
        self.roots.iter().filter(|root| !self.unused.contains_key(root))
    }

    /// Returns the bytes of an object, wherever it is. Tells whether they are a copy.
    async fn contents(&self, word: OwnerWord) -> Result<Contents, Failure> {
        loop {
            let (host, found) = {
                let node = self.world.node(self.node);
                (node.host_of(word), node.read_here(word))
            };
            if host == self.node {
                return found.ok_or(if home_of(word) == self.node {
                    Failure::Stale
                } else {
                    Failure::NodeLost(home_of(word))
                });
            }
            match self.world.ask(self.node, host, Message::Fetch { word }).await {
                Ok(Answer::Contents(contents)) => return Ok(contents),
                Ok(Answer::Expelled) => {
                    self.world.die(self.node);
                    self.world.alive(self.node).await;
                }
                // Another node keeps it since, or keeps it not.
                Err(Failure::NodeLost(_)) if self.world.node(self.node).host_of(word) != host => {}
                Err(Failure::Stale) if host != home_of(word) => return Err(Failure::NodeLost(home_of(word))),
                Err(failure) => return Err(failure),
                Ok(_) => return Err(Failure::Stale),
            }
        }
    }

    /// Borrows an object for a while.
    pub(crate) async fn read(&self, word: OwnerWord, for_so_long: u64) -> Result<Contents, Failure> {
        if word.is_lost() {
            return Err(Failure::Lost);
        }
        let home = home_of(word);
        let is_in_place =
            home == self.node || (self.world.plan.reads_in_place && !self.world.node(self.node).lost.contains(&home));
        if is_in_place {
            let look = || self.world.node(home).blocks.get(&word.offset()).map(|block| (block.contents, block.version));
            let Some((found, version)) = look() else { return Err(Failure::Stale) };
            if version != Some(word) {
                self.world.broken(self.node, format!("{word:?} is borrowed where {version:?} is"));
            }
            self.world.pause(for_so_long).await;
            if look() != Some((found, version)) {
                self.world.broken(self.node, format!("{word:?} is changed while it is borrowed"));
            }
            return Ok(found);
        }
        let copy = self.world.node(self.node).copies.get(&word.bits()).copied();
        let found = match copy {
            Some(copy) => copy,
            None => self.contents(word).await?,
        };
        self.world.node(self.node).copies.insert(word.bits(), found);
        Ok(found)
    }

    /// Prepares a mutable borrow. Returns the word of the new version, which is at this node.
    pub(crate) async fn write(&self, word: OwnerWord, rights: BlockRights) -> Result<OwnerWord, Failure> {
        let world = &self.world;
        if word.is_lost() {
            return Err(Failure::Lost);
        }
        let rights = match rights {
            BlockRights::Reader if !world.has(Rule::LentBlocksAreNotWritten) => BlockRights::Writer,
            BlockRights::Reader | BlockRights::Writer if !world.has(Rule::LentBlocksStay) => BlockRights::Owner,
            rights => rights,
        };
        {
            let mut node = world.node(self.node);
            if let Some(next) = word.next_version().filter(|_| node.is_here(word) && rights.may_write()) {
                node.forget_stored(word);
                return Ok(if world.has(Rule::BorrowsTakeColours) { next } else { word });
            }
        }
        let contents = self.contents(word).await?;
        let new = world.node(self.node).alloc(contents);
        if rights.frees_moved() {
            free(world, self.node, word, false);
        }
        Ok(new)
    }

    /// Starts a task at a node. Returns where its end arrives; `None` if it certainly has not started.
    pub(crate) async fn spawn(
        &self,
        to: u16,
        arguments: Vec<Held>,
        root: Option<BorrowRoot>,
        depth: u64,
    ) -> Option<Slot<TaskEnd>> {
        let (world, slot) = (&self.world, Slot::new());
        let seed = world.pick(u64::MAX);
        let number = {
            let mut node = world.node(self.node);
            let number = node.number();
            node.joins.insert(number, (to, slot.clone()));
            arguments.iter().for_each(|argument| node.stage(argument.word()));
            number
        };
        let is_scoped = root.is_some();
        let roots = root.map(|root| self.roots.iter().copied().chain([root]).collect()).unwrap_or_default();
        let unused = self.unused.clone();
        if to == self.node {
            start_task(
                world,
                to,
                Start { origin: to, number, is_scoped: false, roots, unused, arguments, seed, depth },
            );
            return Some(slot);
        }
        if is_scoped {
            self.note_lent();
        }
        commit(world, self.node).await;
        if world.node(self.node).lost.contains(&to) {
            world.node(self.node).joins.remove(&number);
            return None;
        }
        match world
            .ask(self.node, to, Message::Spawn { number, is_scoped, roots, unused, arguments, seed, depth })
            .await
        {
            Ok(Answer::Expelled) => {
                world.die(self.node);
                world.alive(self.node).await;
                None
            }
            // Whether it runs is known when it has ended, or its node is gone.
            _ => Some(slot),
        }
    }

    /// Says how a task has ended to the node that waits.
    pub(crate) async fn end(mut self, origin: u16, number: u64, outcome: Outcome) {
        let (world, loans) = (self.world.clone(), std::mem::take(&mut self.loans));
        let message = Message::Ended { number, outcome: outcome.clone(), loans: loans.clone() };
        if origin == self.node {
            let _ = Node::receive(&world, origin, origin, message);
            return;
        }
        let places = loans.values().flatten();
        {
            let mut node = world.node(self.node);
            places.clone().for_each(|place| node.stage(place.word));
            outcome.given.iter().for_each(|given| node.stage(given.word()));
        }
        commit(&world, self.node).await;
        if !say(&world, self.node, origin, message).await {
            // The lender is dead, and what it has lent is nobody's.
            for place in places.filter(|place| place.is_moved() && home_of(place.word) == self.node) {
                free(&world, self.node, place.word, false);
            }
        }
    }

    /// Waits until no living task has borrows of this root that came through tasks of a dead node.
    pub(crate) async fn outlast_borrowers(&self, dead: u16, root: BorrowRoot) {
        let (mut dead, mut asked) = (vec![dead], 0);
        while let Some(of) = dead.get(asked).copied() {
            asked += 1;
            for node in 0..NODES {
                if !dead.contains(&node) && !self.outlast_borrowers_at(node, of, root).await {
                    dead.push(node);
                }
            }
        }
    }

    /// Returns whether the node has lived until it had no scoped task of a dead one.
    async fn outlast_borrowers_at(&self, node: u16, of: u16, root: BorrowRoot) -> bool {
        let world = &self.world;
        loop {
            let slot = Slot::new();
            let ticket = {
                let mut here = world.node(self.node);
                let ticket = here.number();
                here.waits.insert(ticket, (node, slot.clone()));
                ticket
            };
            let message = Message::Outlast { of, root, ticket };
            let answer = if node == self.node {
                Node::receive(world, node, node, message)
            } else {
                world.ask(self.node, node, message).await
            };
            match answer {
                Ok(Answer::Waits) => return slot.wait(world).await,
                Ok(Answer::Expelled) => {
                    world.die(self.node);
                    world.alive(self.node).await;
                }
                Ok(_) => return true,
                Err(Failure::Silent) => {}
                Err(_) => return false,
            }
        }
    }
}

/// Records that a scoped task of another node has no borrows any more.
pub(crate) fn end_borrower(world: &Rc<World>, at: u16, sender: u16, roots: &[BorrowRoot]) {
    let ended = world.node(at).borrowers.end(sender, roots);
    for ticket in ended {
        if ticket.node == at {
            let _ = Node::receive(world, at, at, Message::Outlasted { ticket: ticket.number });
        } else {
            tell(world, at, ticket.node, Message::Outlasted { ticket: ticket.number });
        }
    }
}
