//! What other nodes ask of this one: a function of the node's server. Nothing here waits.

use super::{NodeId, ShareNode};
use crate::message::{Letter, ShareMessage, ShareReply};
use crate::task::code::ShippedCode;
use farfield_core::dsm::OwnerWord;
use farfield_wic::{Handler, Stop};
use std::sync::{OnceLock, Weak};

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
        let reply = if letter.build == node.peers.build() {
            node.receive(letter, &mut bytes)
        } else {
            Some(ShareReply::OtherBuild)
        };
        *answer = postcard::to_extend(&reply.ok_or(Stop::Argument)?, core::mem::take(answer))
            .map_err(|_| Stop::AnswerTooLong)?;
        Ok(())
    }
}

impl ShareNode {
    /// Does what a message asks for. Returns `None` if it asks for nonsense.
    fn receive<'b>(
        self: std::sync::Arc<ShareNode>,
        letter: Letter<'_>,
        bytes: &'b mut Vec<u8>,
    ) -> Option<ShareReply<'b>> {
        let sender = NodeId(letter.sender);
        match letter.message {
            ShareMessage::Hello { url } => self.peers.introduce(sender, url).then_some(ShareReply::Done),
            ShareMessage::Peers { urls } => self.peers.introduce_all(urls).then_some(ShareReply::Done),
            ShareMessage::Lost { node } => {
                self.lose(NodeId(node));
                Some(ShareReply::Done)
            }
            ShareMessage::Fetch { word, bytes: size } => match self.read_for(OwnerWord::from_bits(word)?, size) {
                Some(contents) => {
                    *bytes = contents;
                    Some(ShareReply::Bytes(bytes))
                }
                None => Some(ShareReply::Stale),
            },
            ShareMessage::Free { word, destructor } => {
                let word = OwnerWord::from_bits(word)?;
                let destructor = match destructor {
                    Some(reference) => Some(ShippedCode::find(reference)?),
                    None => None,
                };
                if !self.may_hold(word) {
                    return Some(ShareReply::Stale);
                }
                self.free(word, destructor);
                Some(ShareReply::Done)
            }
            ShareMessage::Spawn { task, body, arguments } => {
                self.submit(sender, task, body, arguments).then_some(ShareReply::Done)
            }
            ShareMessage::Ended { task, outcome, loans } => {
                self.task_ended(task, outcome, loans);
                Some(ShareReply::Done)
            }
        }
    }
}
