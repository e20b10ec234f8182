//! What other nodes ask of this one: a function of the node's server. Nothing here waits, but for the
//! memory server that keeps the node's backup, and for short bodies that a program applies to values under locks.

use super::{NodeId, ShareNode, within};
use crate::member::ReplicaVerdict;
use crate::message::{AnswerLetter, Letter, ShareMessage, ShareReply, TaskOutcome, VALUE_BYTES_MAX, ViewNews};
use crate::task::Borrows;
use crate::task::code::ShippedCode;
use farfield_core::dsm::{BorrowRoot, OwnerWord, ViewChange};
use farfield_wic::{Handler, Stop};
use std::sync::{Arc, OnceLock, Weak};

/// The function of a node that is about to run.
#[derive(Default)]
pub(crate) struct Door(OnceLock<Weak<ShareNode>>);

impl Door {
    /// Lets others in.
    pub(crate) fn open(&self, node: Weak<ShareNode>) {
        let _ = self.0.set(node);
    }
}

impl Handler for Door {
    fn answer(&self, argument: &[u8], answer: &mut Vec<u8>) -> Result<(), Stop> {
        let letter: Letter<'_> = postcard::from_bytes(argument).map_err(|_| Stop::Argument)?;
        let node = self.0.get().and_then(Weak::upgrade).ok_or(Stop::Argument)?;
        let mut bytes = Vec::new();
        let (sender, known) = (NodeId(letter.sender), letter.view.number);
        let reply = if letter.build != node.peers.build() {
            Some(ShareReply::OtherBuild)
        } else if node.peers.is_lost(sender) {
            Some(ShareReply::Expelled(node.peers.expulsion(sender)))
        } else if let Some(changes) = node.missed(&letter) {
            Some(ShareReply::View { after: known, changes })
        } else {
            node.hear_load(sender, letter.load);
            let is_read = letter.message.is_read();
            let reply = node.clone().receive(letter, &mut bytes);
            // It has an effect elsewhere. The memory server waits for no node, so this wait ends.
            let is_taken_over = !is_read && node.commit().is_err();
            if is_taken_over { Some(ShareReply::TakenOver) } else { reply }
        };
        let load = node.peers.tell_load(&node, sender);
        let view = node.peers.news_since(known);
        let answered = AnswerLetter { view, load, reply: reply.ok_or(Stop::Argument)? };
        *answer = postcard::to_extend(&answered, core::mem::take(answer)).map_err(|_| Stop::AnswerTooLong)?;
        Ok(())
    }
}

impl ShareNode {
    /// Learns who is gone from a letter, before what it asks for is done: that may follow from these losses. Returns
    /// what the sender has missed, if the answer has no room for that.
    fn missed(&self, letter: &Letter<'_>) -> Option<Vec<ViewChange>> {
        let view = &letter.view;
        self.peers.note_view(NodeId(letter.sender), view.number);
        self.learn(view.after(), &view.changes);
        let is_long = self.peers.view().saturating_sub(view.number) > ViewNews::CHANGES_MAX;
        // A view is told whatever its sender knows.
        let is_view = matches!(letter.message, ShareMessage::View { .. } | ShareMessage::Join);
        (is_long && !is_view).then(|| self.peers.news_since(view.number).changes)
    }

    /// Does what a message asks for. Returns `None` if it asks for nonsense.
    fn receive<'b>(self: Arc<ShareNode>, letter: Letter<'_>, bytes: &'b mut Vec<u8>) -> Option<ShareReply<'b>> {
        let sender = NodeId(letter.sender);
        match letter.message {
            ShareMessage::Hello { address } => {
                Some(if self.peers.introduce(sender, address) { ShareReply::Done } else { ShareReply::NoPlace })
            }
            ShareMessage::Peers { addresses } => {
                let is_all = self.peers.introduce_all(addresses);
                is_all.then(|| self.first.begin()).map(|()| ShareReply::Done)
            }
            ShareMessage::Join => Some(self.peers.promise_place().map_or(ShareReply::NoPlace, ShareReply::Invited)),
            ShareMessage::Beat => {
                self.first.hear();
                Some(ShareReply::Done)
            }
            ShareMessage::Over => {
                self.first.program_ended();
                Some(ShareReply::Done)
            }
            // The letter itself says it.
            ShareMessage::Load => Some(ShareReply::Done),
            ShareMessage::View { after, changes } => {
                self.learn(after, &changes);
                Some(ShareReply::Done)
            }
            ShareMessage::BackupLost { replica } => match self.peers.lose_backup(sender, replica) {
                true => Some(ShareReply::Done),
                false => Some(ShareReply::Expelled(self.peers.expulsion(sender))),
            },
            ShareMessage::BackupRestored { replica, access } => {
                Some(match self.peers.restore_backup(sender, replica, access) {
                    ReplicaVerdict::Used => ShareReply::Done,
                    ReplicaVerdict::Unused => ShareReply::NoPlace,
                    ReplicaVerdict::TakenOver => ShareReply::Expelled(self.peers.expulsion(sender)),
                })
            }
            ShareMessage::Fetch { word, offset, bytes: size } => {
                match self.read_for(OwnerWord::from_bits(word)?, offset, size) {
                    Some(contents) => {
                        *bytes = contents;
                        Some(ShareReply::Bytes(bytes))
                    }
                    None => Some(ShareReply::Stale),
                }
            }
            ShareMessage::FetchGroup { word, offset, root } => {
                match self.read_group_for(OwnerWord::from_bits(word)?, offset, ShippedCode::find(root)?) {
                    Some((size, piece)) => {
                        *bytes = piece;
                        Some(ShareReply::Group { bytes: size, piece: bytes })
                    }
                    None => Some(ShareReply::Stale),
                }
            }
            ShareMessage::Free { word, destructor } => {
                let word = OwnerWord::from_bits(word)?;
                let destructor = match destructor {
                    Some(reference) => Some(ShippedCode::find(reference)?),
                    None => None,
                };
                if !self.may_hold(word) && !self.holds_promoted(word) {
                    return Some(ShareReply::Stale);
                }
                if destructor.is_some() {
                    self.free_later(word, destructor);
                } else {
                    self.drop_here(word, None);
                }
                Some(ShareReply::Done)
            }
            ShareMessage::Spawn { if_room: true, .. } if self.workers.load().room == 0 => Some(ShareReply::NoPlace),
            ShareMessage::Spawn { task, body, borrows, arguments, .. } => {
                let borrows: Borrows = borrows.map(|roots| roots.into_iter().map(BorrowRoot::from_bits).collect());
                // Somebody waits already for the tasks that a dead node has sent.
                if borrows.as_ref().is_some_and(|roots| !self.borrowers.lock().admit(sender.0, roots)) {
                    return Some(ShareReply::Expelled(self.peers.expulsion(sender)));
                }
                let taken = self.submit(sender, task, body, borrows, arguments)?;
                Some(taken.map_or_else(ShareReply::TooMuch, |()| ShareReply::Done))
            }
            ShareMessage::Ended { task, outcome, loans } => {
                self.task_ended(task, outcome, loans);
                Some(ShareReply::Done)
            }
            ShareMessage::Apply { word, locked, body, arguments } => {
                let word = OwnerWord::from_bits(word)?;
                let Some(ended) = self.apply_here(word, locked, body, arguments)? else {
                    return Some(ShareReply::NoPlace);
                };
                Some(ShareReply::Applied(match ended {
                    Err(message) => {
                        *bytes = message.into_bytes();
                        TaskOutcome::Panicked(core::str::from_utf8(bytes).ok()?)
                    }
                    Ok(value) if value.len() > VALUE_BYTES_MAX => {
                        let bytes = value.len() as u64;
                        within(&self, false, || drop(value));
                        TaskOutcome::TooLarge(bytes)
                    }
                    Ok(value) => {
                        self.stage(|| value.owned());
                        *bytes = value.into_bytes();
                        TaskOutcome::Returned(bytes)
                    }
                }))
            }
            shared => self.serve_shared(sender, shared),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeBuilder;
    use crate::backup::BackupAccess;
    use crate::message::{LockEnd, LockedType, NameRequest, NodeAddress, WaitAnswer};
    use crate::node::{AtomicStep, NodeBackup, Peers};
    use crate::task::TaskRefusal;
    use core::time::Duration;
    use farfield_core::dsm::{
        BackupImage, Colour, Expulsion, HomeTicket, LossCause, NodeLoad, Partition, StoredAnswer, StoredChannel,
        StoredLock, StoredMessage,
    };
    use farfield_core::lock::LockMode;
    use std::borrow::Cow;

    const BUILD: u128 = 77;

    fn door() -> (Arc<ShareNode>, Door) {
        door_of(2)
    }

    fn door_of(nodes: u16) -> (Arc<ShareNode>, Door) {
        let peers = Peers::new(nodes, BUILD, String::new());
        let node = ShareNode::new(NodeId(0), 0, &NodeBuilder::new().near(1 << 20), peers, None).unwrap();
        let door = Door::default();
        door.open(Arc::downgrade(&node));
        (node, door)
    }

    fn ask(door: &Door, build: u128, message: ShareMessage<'_>) -> Result<Vec<u8>, Stop> {
        let letter = postcard::to_allocvec(&Letter {
            sender: 1,
            build,
            view: ViewNews::default(),
            load: NodeLoad::default(),
            message,
        })
        .unwrap();
        let mut answer = Vec::new();
        door.answer(&letter, &mut answer).map(|()| answer)
    }

    fn reply_of(answer: &[u8]) -> Option<ShareReply<'_>> {
        postcard::from_bytes(answer).ok().map(|answer: AnswerLetter<'_>| answer.reply)
    }

    #[test]
    fn letters_of_nonsense_are_refused_and_change_nothing() {
        let (node, door) = door();
        let mut random = fastrand::Rng::with_seed(5);
        let word = node.store(&[8; 8]).unwrap().bits();
        let object_bytes = node.stats().object_bytes;
        let (ticket, value) = (7, Cow::Borrowed(&[8u8; 8][..]));
        let locked = LockedType { bytes: 8, owns_others: true, destructor: None };
        let messages = [
            ShareMessage::Fetch { word, offset: 0, bytes: 5 },
            ShareMessage::Lock { word, ticket, mode: LockMode::Exclusive, may_wait: true, may_borrow: true, locked },
            ShareMessage::Unlock { word, ticket, end: LockEnd::Released(Some(vec![8; 8])) },
            ShareMessage::Atomic { word, step: AtomicStep::Add(1) },
            ShareMessage::Share { word, more: -1 },
            ShareMessage::Send { word, ticket, settled: 3, may_wait: true, value },
            ShareMessage::Receive { word, ticket, settled: 3, may_wait: true },
            ShareMessage::Cancel { word, ticket },
            ShareMessage::Withdraw { word, ticket: 1 << 40 },
            ShareMessage::EndReceiver { word },
            ShareMessage::Answered { ticket, answer: WaitAnswer::Received(vec![8; 8]) },
            ShareMessage::Name { name: "a", request: NameRequest::Find { types: 1, ticket: Some(ticket) } },
            ShareMessage::Name { name: "b", request: NameRequest::Publish { word, types: 1, type_name: "u64" } },
            ShareMessage::NameWaitEnded { ticket },
        ];
        let load = NodeLoad { stamp: 1, room: 1, waiting: 1 };
        let letter = |message| {
            postcard::to_allocvec(&Letter { sender: 1, build: BUILD, view: ViewNews::default(), load, message })
                .unwrap()
        };
        let letters = messages.map(letter);
        for _ in 0..40_000 {
            let mut bytes = letters[random.usize(..letters.len())].clone();
            match random.u8(..3) {
                0 => bytes.truncate(random.usize(..bytes.len())),
                1 => bytes = (0..random.usize(..80)).map(|_| random.u8(..)).collect(),
                // Sender, build, load and kind stay: a node of this build is believed to name its own code.
                _ => {
                    let at = random.usize(8..bytes.len());
                    bytes[at] = random.u8(..);
                }
            }
            let _ = door.answer(&bytes, &mut Vec::new());
        }
        assert_eq!(node.stats().object_bytes, object_bytes);
    }

    #[test]
    fn other_builds_and_words_of_no_object_are_told_so() {
        let (node, door) = door();
        let reply = |bytes: &Result<Vec<u8>, Stop>| match reply_of(bytes.as_ref().unwrap()).unwrap() {
            ShareReply::Bytes(bytes) => Some(bytes.to_vec()),
            ShareReply::Stale => None,
            other => panic!("{other:?}"),
        };
        let word = node.store(&[9; 100]).unwrap().bits();
        let other = ask(&door, BUILD + 1, ShareMessage::Fetch { word, offset: 0, bytes: 100 }).unwrap();
        assert!(matches!(reply_of(&other), Some(ShareReply::OtherBuild)));
        assert_eq!(reply(&ask(&door, BUILD, ShareMessage::Fetch { word, offset: 0, bytes: 100 })), Some(vec![9; 100]));
        let mut random = fastrand::Rng::with_seed(6);
        for _ in 0..20_000 {
            // Offsets within the arena and beyond, sizes up to the whole.
            let bits = [random.u8(1..37), random.u8(1..40)];
            let [word, bytes] = bits.map(|bits| 1 + random.u64(..1 << bits));
            let answer =
                ask(&door, BUILD, ShareMessage::Fetch { word, offset: random.u64(..1 << 20) % (bytes * 2), bytes });
            if answer.is_ok() {
                assert!(reply(&answer).is_none_or(|found| found.len() as u64 == bytes));
            }
        }
    }

    #[test]
    fn what_has_changed_in_the_view_is_learned_before_a_message_is_heard() {
        let (node, door) = door_of(9);
        let word = node.store(&[9; 8]).unwrap().bits();
        let gone = |node| ViewChange { node, host: Some(1), cause: LossCause::Silent(Duration::from_secs(2)) };
        let said = |sender, number, changes: Vec<ViewChange>| {
            let (view, load) = (ViewNews { number, changes }, NodeLoad::default());
            let message = ShareMessage::Fetch { word, offset: 0, bytes: 8 };
            let letter = postcard::to_allocvec(&Letter { sender, build: BUILD, view, load, message }).unwrap();
            let mut answer = Vec::new();
            door.answer(&letter, &mut answer).unwrap();
            answer
        };
        let answer = |answer: &[u8]| {
            let AnswerLetter { view, reply, .. } = postcard::from_bytes(answer).unwrap();
            (view.number, view.changes, format!("{reply:?}"))
        };
        let here = |partition| OwnerWord::new(Partition::new(partition).unwrap(), 64, Colour(0)).unwrap();
        let bytes = format!("{:?}", ShareReply::Bytes(&[9; 8]));
        assert_eq!(answer(&said(1, 1, vec![gone(2)])), (1, Vec::new(), bytes.clone()));
        assert!(node.peers.is_lost(NodeId(2)) && !node.peers.is_lost(NodeId(3)));
        assert_eq!(node.host_of(here(2)), NodeId(1));
        // What is said twice, or too early, changes nothing.
        said(1, 1, vec![gone(2)]);
        said(1, 4, vec![gone(5)]);
        assert_eq!(node.peers.view(), 1);
        // Who knows less is told with the answer, and who was expelled is told when and why.
        assert_eq!(answer(&said(3, 0, Vec::new())), (1, vec![gone(2)], bytes.clone()));
        let expelled = answer(&said(2, 0, Vec::new())).2;
        let expulsion = Expulsion { view: 1, cause: LossCause::Silent(Duration::from_secs(2)) };
        assert_eq!(expelled, format!("{:?}", ShareReply::Expelled(Some(expulsion))));
        let error = crate::ShareError::Expelled { expulsion: Some(expulsion) };
        assert_eq!(error.to_string(), "this node was expelled in view 1, since it has not answered for 2 s");
        // If an answer has no room for all of it, nothing is done before it is known.
        let five: Vec<_> = (2..7).map(gone).collect();
        said(1, 5, five.clone());
        let missed = format!("{:?}", ShareReply::View { after: 0, changes: five.clone() });
        assert_eq!(answer(&said(7, 0, Vec::new())), (5, five.clone(), missed));
        assert_eq!(answer(&said(7, 1, Vec::new())), (5, five[1..].to_vec(), bytes));
    }

    /// A node that runs nothing is sent tasks.
    #[test]
    fn tasks_of_others_that_wait_are_bounded() {
        let config = NodeBuilder::new().near(1 << 20).workers(0);
        let node = ShareNode::new(NodeId(0), 0, &config, Peers::new(2, BUILD, String::new()), None).unwrap();
        let door = Door::default();
        door.open(Arc::downgrade(&node));
        let root = BorrowRoot::of_task(1, 1);
        let spawn = |body: ShippedCode, arguments: &[u8], borrows| {
            let body = body.reference();
            let answer = ask(&door, BUILD, ShareMessage::Spawn { task: 1, body, if_room: false, borrows, arguments });
            match reply_of(&answer.unwrap()) {
                Some(ShareReply::Done) => None,
                Some(ShareReply::TooMuch(refusal)) => Some(refusal),
                other => panic!("{other:?}"),
            }
        };
        let large = || {
            let body = ShippedCode::of_body(|_: &crate::Here<'_>, _: [u8; 1000]| ());
            spawn(body, &[0; 1000], Some(vec![root.bits()]))
        };
        let empty = || spawn(ShippedCode::of_body(|_: &crate::Here<'_>, (): ()| ()), &[], None);
        // Each with its root.
        let fit = (1 << 20) / 1008;
        assert!((0..fit).all(|_| large().is_none()));
        assert_eq!(large(), Some(TaskRefusal::Bytes { bytes: (fit + 1) * 1008, limit_bytes: 1 << 20 }));
        let most = 1 << 16;
        assert!((fit..most).all(|_| empty().is_none()));
        assert_eq!(empty(), Some(TaskRefusal::Tasks { tasks: most + 1, most }));
        // What was refused is waited for by nobody.
        let ticket = HomeTicket { node: 0, number: 1 };
        (0..fit).for_each(|_| assert!(node.borrowers.lock().end(1, &[root]).is_empty()));
        assert!(node.borrowers.lock().close(1, root, ticket));
    }

    /// A node asks for a lock, and receives from a channel, again and again, and settles nothing.
    #[test]
    fn requests_of_others_that_are_kept_are_bounded() {
        let (node, door) = door();
        let most = farfield_core::dsm::REQUESTS_OF_NODE_MAX as u64;
        let locked = LockedType { bytes: 8, owns_others: false, destructor: None };
        let mode = LockMode::Exclusive;
        let word = node.store(&[8; 8]).unwrap();
        let own = node.store(&[8; 8]).unwrap();
        let channel = (word.bits(), own.bits());
        let here = super::super::Here::at(&node);
        let (_sender, receiver) = crate::channel::<u64>(&here, 1).unwrap();
        let ends = receiver.owner_word().bits();
        let reply = |message| {
            let answer = ask(&door, BUILD, message).unwrap();
            match reply_of(&answer) {
                Some(ShareReply::Waits) => None,
                Some(ShareReply::Answer(answer)) => Some(answer),
                other => panic!("{other:?}"),
            }
        };
        let lock =
            |word, ticket| reply(ShareMessage::Lock { word, ticket, mode, may_wait: true, may_borrow: true, locked });
        let receive = |ticket| reply(ShareMessage::Receive { word: ends, ticket, settled: 0, may_wait: true });
        assert!(matches!(lock(channel.0, 0), Some(WaitAnswer::Granted { .. })));
        for ticket in 1..=most {
            assert!(lock(channel.0, ticket).is_none() && receive(ticket).is_none(), "{ticket}");
        }
        assert!(matches!(lock(channel.0, most + 1), Some(WaitAnswer::TooMany)));
        assert!(matches!(receive(most + 1), Some(WaitAnswer::TooMany)));
        // Other locks are others, and who has given up makes room.
        assert!(matches!(lock(channel.1, most + 2), Some(WaitAnswer::Granted { .. })));
        for word in [channel.0, ends] {
            ask(&door, BUILD, ShareMessage::Cancel { word, ticket: 5 }).unwrap();
        }
        assert!(lock(channel.0, most + 3).is_none() && receive(most + 3).is_none());
    }

    #[test]
    fn a_group_is_read_in_its_version_only() {
        type Pair = (u64, crate::TBox<[u64; 3]>);
        let (node, door) = door();
        let here = super::super::Here::at(&node);
        let root = ShippedCode::of_object::<Pair>().reference();
        let read = |word: OwnerWord, offset: u64| {
            let answer = ask(&door, BUILD, ShareMessage::FetchGroup { word: word.bits(), offset, root });
            match reply_of(&answer.unwrap()).unwrap() {
                ShareReply::Group { bytes, piece } => Some((bytes, piece.len())),
                ShareReply::Stale => None,
                other => panic!("{other:?}"),
            }
        };
        let mut pair = here.alloc((1u64, here.tie([2u64; 3]).unwrap())).unwrap();
        let first = pair.word;
        assert_eq!((read(first, 0), read(first, 16), read(first, 99)), (Some((48, 48)), Some((48, 32)), Some((48, 0))));
        assert_eq!(read(first.next_version().unwrap(), 0), None, "it is not there yet");
        // A question that comes late does not walk what is being written to, dropped or freed.
        pair.get_mut(&here).unwrap().1[0] = 3;
        assert_eq!((read(first, 0), read(pair.word, 0)), (None, Some((48, 48))));
        let second = pair.word;
        within(&node, false, || drop(pair));
        let started = std::time::Instant::now();
        while node.stats().object_bytes > 0 {
            assert!(started.elapsed().as_secs() < 60);
            std::thread::yield_now();
        }
        let plain = node.store(&[7; 16]).unwrap();
        assert_eq!((read(second, 0), read(plain, 0)), (None, None), "it is gone, or no group");
    }

    /// Another node has set the fence while this one was stopped. Whoever asks it is told to ask there.
    #[test]
    fn a_node_that_was_taken_over_tells_nothing_and_says_so() {
        let server = farfield_server::Server::start(farfield_server::Config {
            listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
            functions: farfield_wic::Registry::standard(),
            ..farfield_server::Config::default()
        });
        let server = server.unwrap();
        let (access, _kept) = BackupAccess::create(&server.endpoints()[0], "", 1 << 20).unwrap();
        let backup = NodeBackup::new(access.open().unwrap()).unwrap();
        let peers = Peers::new(2, BUILD, String::new());
        let node = ShareNode::new(NodeId(0), 0, &NodeBuilder::new().near(1 << 20), peers, Some(backup)).unwrap();
        let door = Door::default();
        door.open(Arc::downgrade(&node));
        let word = node.store(&[8; 8]).unwrap();
        node.begin_lock(word, 8, None);
        let locked = LockedType { bytes: 8, owns_others: false, destructor: None };
        let lock = |ticket| {
            let (word, mode) = (word.bits(), LockMode::Exclusive);
            ask(&door, BUILD, ShareMessage::Lock { word, ticket, mode, may_wait: false, may_borrow: false, locked })
                .unwrap()
        };
        let unlock = |ticket, value| {
            let end = LockEnd::Released(Some(vec![value; 8]));
            ask(&door, BUILD, ShareMessage::Unlock { word: word.bits(), ticket, end }).unwrap()
        };
        assert!(matches!(reply_of(&lock(1)), Some(ShareReply::Answer(WaitAnswer::Granted { .. }))));
        assert!(matches!(reply_of(&unlock(1, 9)), Some(ShareReply::Done)));
        assert!(matches!(reply_of(&lock(2)), Some(ShareReply::Answer(WaitAnswer::Granted { .. }))));
        let image = access.open().unwrap().take_over(&BackupImage::default()).unwrap();
        let stored = image.locks.into_values().map(|(of, lock)| (of, lock.value, lock.holders)).collect::<Vec<_>>();
        assert_eq!(stored, [(word, vec![9; 8], vec![(HomeTicket { node: 1, number: 2 }, LockMode::Exclusive)])]);
        assert!(matches!(reply_of(&unlock(2, 10)), Some(ShareReply::TakenOver)), "it is said elsewhere again");
        assert!(matches!(reply_of(&lock(3)), Some(ShareReply::TakenOver)));
    }

    /// Node 1 wants to go on without a server, and then without a backup. Once that is taken over it must not.
    #[test]
    fn nothing_is_heard_of_a_backup_that_is_taken_over() {
        let (node, door) = door_of(3);
        let lose = |replica| match reply_of(&ask(&door, BUILD, ShareMessage::BackupLost { replica }).unwrap()) {
            Some(ShareReply::Done) => true,
            Some(ShareReply::Expelled(None)) => false,
            other => panic!("{other:?}"),
        };
        assert!(lose(Some(2)) && lose(Some(0)));
        assert_eq!(node.peers.begin_take_over(NodeId(1)).map(|(lost, _)| lost), Some(0b101));
        assert!(!lose(Some(1)) && !lose(None));
        let (node, door) = door_of(3);
        let lost = ask(&door, BUILD, ShareMessage::BackupLost { replica: None }).unwrap();
        assert!(matches!(reply_of(&lost), Some(ShareReply::Done)));
        let lost = [1, 2].map(|node_id| node.peers.begin_take_over(NodeId(node_id)).map(|(lost, _)| lost));
        assert_eq!(lost, [None, Some(0)]);
    }

    /// Node 1 has not been answered in time, and its withdrawals have overtaken what it had asked for.
    #[test]
    fn what_was_withdrawn_before_it_has_come_is_not_done() {
        let (node, door) = door();
        let word = node.store(&[8; 8]).unwrap();
        let locked = LockedType { bytes: 8, owns_others: false, destructor: None };
        let answer = |message| {
            let answer = ask(&door, BUILD, message).unwrap();
            match reply_of(&answer) {
                Some(ShareReply::Answer(answer)) => Some(answer),
                Some(ShareReply::Done | ShareReply::Waits) => None,
                other => panic!("{other:?}"),
            }
        };
        let lock = |ticket| {
            let (word, mode) = (word.bits(), LockMode::Exclusive);
            answer(ShareMessage::Lock { word, ticket, mode, may_wait: true, may_borrow: false, locked })
        };
        let withdraw = |word: OwnerWord, ticket| answer(ShareMessage::Withdraw { word: word.bits(), ticket });
        assert!(withdraw(word, 7).is_none());
        assert!(matches!(lock(7), Some(WaitAnswer::Busy)), "nobody would give it back");
        assert!(matches!(lock(8), Some(WaitAnswer::Granted { .. })) && lock(9).is_none());
        // One that waits, and one that has it.
        assert!(withdraw(word, 9).is_none() && withdraw(word, 8).is_none());
        assert!(matches!(lock(10), Some(WaitAnswer::Granted { .. })));
        // Nobody would have received the value.
        let channel = node.store(&[0; 8]).unwrap();
        node.begin_channel(channel, 1, 1, None);
        let receive =
            |ticket| answer(ShareMessage::Receive { word: channel.bits(), ticket, settled: ticket, may_wait: true });
        let send = |ticket, value: u8| {
            let (word, value) = (channel.bits(), Cow::Owned(vec![value]));
            answer(ShareMessage::Send { word, ticket, settled: ticket, may_wait: true, value })
        };
        assert!(withdraw(channel, 11).is_none() && withdraw(channel, 12).is_none());
        assert!(matches!(receive(11), Some(WaitAnswer::Busy)) && matches!(send(12, 1), Some(WaitAnswer::Busy)));
        assert!(matches!(send(13, 2), Some(WaitAnswer::Sent)));
        assert!(matches!(receive(14), Some(WaitAnswer::Received(value)) if value == [2]));
        assert!(receive(15).is_none() && withdraw(channel, 15).is_none() && receive(16).is_none());
    }

    /// Node 1 was given a lock by node 2, which died before it said so.
    #[test]
    fn whoever_was_given_a_lock_by_a_dead_home_has_it_when_asking_again() {
        let (node, door) = door_of(3);
        let word = OwnerWord::new(Partition::new(2).unwrap(), 64, Colour(3)).unwrap();
        let holders = vec![(HomeTicket { node: 1, number: 7 }, LockMode::Exclusive)];
        let lock = StoredLock { value: vec![5; 8], holders, ..StoredLock::default() };
        let mut image = BackupImage::default();
        image.locks.insert(word.block(), (word, lock));
        node.promote(NodeId(2), image);
        node.expel(ViewChange { node: 2, host: Some(0), cause: LossCause::Ended });
        let locked = LockedType { bytes: 8, owns_others: false, destructor: None };
        let lock = |ticket| {
            let (word, mode) = (word.bits(), LockMode::Exclusive);
            let answer = ask(
                &door,
                BUILD,
                ShareMessage::Lock { word, ticket, mode, may_wait: false, may_borrow: false, locked },
            )
            .unwrap();
            match reply_of(&answer) {
                Some(ShareReply::Answer(WaitAnswer::Granted { was_left, value })) => Some((was_left, value)),
                Some(ShareReply::Answer(WaitAnswer::Busy)) => None,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(lock(8), None, "another one of that node");
        assert_eq!((lock(7), lock(7)), (Some((false, vec![5; 8])), Some((false, vec![5; 8]))));
        // What is said twice is done once, also after the next one has the lock.
        let unlock = |value: u8| {
            let end = LockEnd::Released(Some(vec![value; 8]));
            ask(&door, BUILD, ShareMessage::Unlock { word: word.bits(), ticket: 7, end }).unwrap();
        };
        unlock(6);
        assert_eq!(lock(9), Some((false, vec![6; 8])));
        unlock(7);
        assert_eq!((lock(10), lock(9)), (None, Some((false, vec![6; 8]))));
        // It is dropped when it is given back.
        node.drop_here(word, None);
        assert_eq!(node.stats().promoted_objects, 1);
        ask(&door, BUILD, ShareMessage::Unlock { word: word.bits(), ticket: 9, end: LockEnd::Abandoned }).unwrap();
        let started = std::time::Instant::now();
        while node.stats().promoted_objects > 0 {
            assert!(started.elapsed().as_secs() < 60);
            std::thread::yield_now();
        }
        assert_eq!((node.stats().late_frees, node.stats().orphans), (0, 0));
    }

    /// Node 2 has accepted values of node 1, and has handed it one, and died before it said so.
    #[test]
    fn a_dead_home_s_answers_are_given_again_until_they_have_arrived() {
        let (node, door) = door_of(3);
        let word = |block: u64| OwnerWord::new(Partition::new(2).unwrap(), 64 * block, Colour(3)).unwrap();
        let ticket = |number| HomeTicket { node: 1, number };
        let channel = StoredChannel {
            bound: 3,
            value_bytes: 1,
            has_senders: true,
            has_receiver: true,
            answers: [(ticket(4), StoredAnswer::Received(word(2))), (ticket(5), StoredAnswer::Sent)].into(),
            ..StoredChannel::default()
        };
        let mut image = BackupImage::default();
        image.channels.insert(word(1).block(), (word(1), channel));
        for (block, position, value) in [(2, 0, 20u8), (3, 7, 31), (4, 6, 30)] {
            let message = StoredMessage { channel: word(1), position, value: vec![value] };
            image.messages.insert(word(block).block(), (word(block), message));
        }
        node.promote(NodeId(2), image);
        node.expel(ViewChange { node: 2, host: Some(0), cause: LossCause::Ended });
        let channel = word(1).bits();
        let reply = |message| {
            let answer = ask(&door, BUILD, message).unwrap();
            match reply_of(&answer) {
                Some(ShareReply::Answer(WaitAnswer::Received(value))) => Some(value[0]),
                Some(ShareReply::Answer(WaitAnswer::Sent)) => Some(0),
                Some(ShareReply::Answer(WaitAnswer::Busy)) => None,
                other => panic!("{other:?}"),
            }
        };
        let receive =
            |ticket, settled| reply(ShareMessage::Receive { word: channel, ticket, settled, may_wait: false });
        let send = |ticket, settled, value: u8| {
            let value = Cow::Owned(vec![value]);
            reply(ShareMessage::Send { word: channel, ticket, settled, may_wait: false, value })
        };
        assert_eq!((receive(4, 4), send(5, 4, 30), receive(4, 4)), (Some(20), Some(0), Some(20)));
        assert_eq!(node.stats().promoted_objects, 3);
        assert_eq!((send(6, 4, 40), send(7, 4, 41)), (Some(0), None), "it has two, and room for one");
        assert_eq!([8, 9, 10, 11].map(|ticket| receive(ticket, ticket)), [Some(30), Some(31), Some(40), None]);
        assert_eq!(node.stats().promoted_objects, 0, "what was settled is not kept");
        // A channel that nobody has stored.
        let message = ShareMessage::Receive { word: word(9).bits(), ticket: 12, settled: 12, may_wait: true };
        assert!(matches!(reply_of(&ask(&door, BUILD, message).unwrap()), Some(ShareReply::Stale)));
        // Who has the value last drops it: the receiver is gone, and so is the channel.
        send(13, 13, 42);
        assert!(ask(&door, BUILD, ShareMessage::EndReceiver { word: channel }).is_ok());
        let answer =
            ask(&door, BUILD, ShareMessage::Receive { word: channel, ticket: 14, settled: 14, may_wait: true });
        assert!(matches!(reply_of(&answer.unwrap()), Some(ShareReply::Answer(WaitAnswer::Closed))));
    }

    #[test]
    fn a_place_that_was_given_away_stays_with_whoever_came_first() {
        let (node, door) = door();
        let hello = |url: &str| {
            let address = NodeAddress { url: url.into(), arena: None };
            ask(&door, BUILD, ShareMessage::Hello { address }).unwrap()
        };
        assert!(matches!(reply_of(&hello("tcp://127.0.0.1:1")), Some(ShareReply::Done)));
        assert!(matches!(reply_of(&hello("tcp://127.0.0.1:2")), Some(ShareReply::NoPlace)));
        assert_eq!(node.peers.url_of(NodeId(1)).as_deref(), Some("tcp://127.0.0.1:1"));
        // Until it is gone.
        node.peers.forget(NodeId(1));
        assert!(matches!(reply_of(&hello("tcp://127.0.0.1:2")), Some(ShareReply::Done)));
    }

    #[test]
    fn an_object_that_is_freed_twice_is_dropped_once() {
        let (node, door) = door();
        let inner = node.store(&[1; 8]).unwrap();
        let outer = node.store(&inner.bits().to_ne_bytes()).unwrap();
        let destructor = ShippedCode::of_destructor::<crate::DBox<u64>>(1);
        // As the thread of drops does when a message was said again.
        node.drop_here(outer, destructor);
        node.drop_here(outer, destructor);
        let stats = node.stats();
        assert_eq!((stats.object_bytes, stats.late_frees), (0, 1), "the inner object was freed once");
        // A lock that is asked for late is not had, whatever is in the block by now.
        let locked = LockedType { bytes: 8, owns_others: false, destructor: None };
        let lock = |word: OwnerWord| ShareMessage::Lock {
            word: word.bits(),
            ticket: 7,
            mode: LockMode::Exclusive,
            may_wait: true,
            may_borrow: false,
            locked,
        };
        let new = node.store(&[3; 8]).unwrap();
        assert!(new.is_same_block(outer) || new.is_same_block(inner));
        for gone in [inner, outer] {
            let answer = ask(&door, BUILD, lock(gone)).unwrap();
            assert!(matches!(reply_of(&answer), Some(ShareReply::Answer(WaitAnswer::Closed))));
        }
        // One that is held is dropped when it is given back.
        assert!(ask(&door, BUILD, lock(new)).is_ok());
        node.drop_here(new, None);
        assert!(node.stats().object_bytes > 0);
        let end = LockEnd::Released(Some(vec![4; 8]));
        ask(&door, BUILD, ShareMessage::Unlock { word: new.bits(), ticket: 7, end }).unwrap();
        let started = std::time::Instant::now();
        while node.stats().object_bytes > 0 {
            assert!(started.elapsed().as_secs() < 60);
            std::thread::yield_now();
        }
    }
}
