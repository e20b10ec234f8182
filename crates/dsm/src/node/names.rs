//! Named values: the first node keeps a table of names, by which tasks of any node find what they share.
//!
//! The table owns a counted handle of each value, so a value stays as long as its name. A look-up is a message to the
//! first node, which tells the word, and one to the value's home, which counts a handle more. Names outlive who has
//! given them: all end with the first node, or etcd keeps the names, and the first node that is left has them from
//! there. Values die with their homes, or are kept by the first node, as others are.

use super::{NodeId, ShareNode, WaitCause};
use crate::error::NameError;
use crate::message::{NameRequest, ShareMessage, ShareReply, WaitAnswer};
use crate::node::peers::Unanswered;
use crate::object::owned_by;
use crate::task::code::types_of;
use crate::{DArc, Far, Here, ShareError};
use core::any::type_name;
use core::mem;
use core::time::Duration;
use farfield_core::dsm::{HomeTicket, NameRefusal, NameTable, NamedValue, OwnerWord};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Names of the program, at its first node. Other nodes have an empty table.
#[derive(Default)]
pub(super) struct ProgramNames(Mutex<KnownNames>);

#[derive(Default)]
struct KnownNames {
    table: NameTable,
    /// Whether the table has the names that are kept elsewhere.
    is_whole: bool,
}

/// A name with its value, for readers.
pub(super) struct NameRow {
    pub(super) name: String,
    pub(super) type_name: String,
    pub(super) home: NodeId,
    /// Whether the value is gone with its home.
    pub(super) is_lost: bool,
}

impl ProgramNames {
    fn lock(&self) -> MutexGuard<'_, KnownNames> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the waits of a node that is gone.
    pub(super) fn lose(&self, node: NodeId) {
        self.lock().table.lose(node.0);
    }
}

impl Here<'_> {
    /// Gives a value a name, by which tasks of any node find it ([`Here::lookup`]). The program keeps an owner of the
    /// value until the name is taken away ([`Here::unpublish`]). Waits for the first node.
    ///
    /// A name is a word of 1 to 64 bytes. Any task may give one that is free; the first has it, and others are refused
    /// with [`NameError::Taken`]. The name outlives the task's node. If the value's home dies and has no backup, the
    /// value is gone (`NodeLost`), and the name is free again for whoever publishes. With a backup the first node keeps
    /// the value under its name. On `Silent` nobody knows whether the value has the name.
    pub fn publish<T: Far>(&self, name: &str, value: &DArc<T>) -> Result<(), NameError> {
        check(name)?;
        let handle = value.try_clone(self)?;
        // Whoever looks the name up comes to own what the value owns.
        self.node().stage(|| owned_by(&handle));
        let request = NameRequest::Publish {
            word: handle.owner_word().bits(),
            types: types_of::<T>(),
            type_name: NameTable::cut_type(type_name::<T>()),
        };
        let told = self.node().ask_names(name, request);
        if told.as_ref().map_or_else(|unanswered| unanswered.may_have_arrived, |reply| matches!(reply, NameReply::Done))
        {
            // It is the table's, or nobody's.
            mem::forget(handle);
        }
        match told? {
            NameReply::Done => Ok(()),
            NameReply::Refused(refusal) => Err(refused::<T>(name, refusal)),
            NameReply::Word(_) | NameReply::Waits => Err(self.node().stale_names().into()),
        }
    }

    /// Returns an owner of the value that has a name. Waits for the first node, and for the value's home unless a
    /// handle is spare there.
    ///
    /// Fails with [`NameError::Absent`] if no value has the name, with [`NameError::OtherType`] if `T` is not the type
    /// that was published, and with `NodeLost` if the value's home is gone and had no backup.
    pub fn lookup<T: Far>(&self, name: &str) -> Result<DArc<T>, NameError> {
        self.look_up(name, None)
    }

    /// Returns an owner of the value that has a name, as [`Here::lookup`] does, and waits until one has it, up to this
    /// time. The place of the task is lent meanwhile. Fails with [`NameError::Absent`] when the time is over.
    pub fn lookup_within<T: Far>(&self, name: &str, within: Duration) -> Result<DArc<T>, NameError> {
        self.look_up(name, Some(within))
    }

    /// Takes a name away from its value. Returns the owner that the program has kept, so the value is dropped after
    /// this one and all others. Any task may do that. Fails as [`Here::lookup`] does; on `Silent` the name may have
    /// been taken away, and the value stays until the program ends.
    pub fn unpublish<T: Far>(&self, name: &str) -> Result<DArc<T>, NameError> {
        check(name)?;
        match self.node().ask_names(name, NameRequest::Unpublish { types: types_of::<T>() })? {
            NameReply::Word(word) => Ok(DArc::of_word(word)),
            NameReply::Refused(refusal) => Err(refused::<T>(name, refusal)),
            NameReply::Done | NameReply::Waits => Err(self.node().stale_names().into()),
        }
    }

    fn look_up<T: Far>(&self, name: &str, within: Option<Duration>) -> Result<DArc<T>, NameError> {
        check(name)?;
        // Centuries at most: the sum is a time.
        let until = within.map(|within| Instant::now() + within.min(Duration::from_secs(1 << 32)));
        let mut dropped = None;
        loop {
            let word = match self.node().find_name(name, types_of::<T>(), until)? {
                Ok(word) => word,
                Err(refusal) => return Err(refused::<T>(name, refusal)),
            };
            match self.node().share(word).map_err(|unanswered| unanswered.error) {
                Ok(()) => return Ok(DArc::of_word(word)),
                // The name was taken away meanwhile, and the value dropped.
                Err(ShareError::Stale { .. }) if dropped != Some(word) => dropped = Some(word),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn check(name: &str) -> Result<(), NameError> {
    let is_name = NameTable::is_name(name);
    is_name.then_some(()).ok_or_else(|| NameError::NoName { name: name.chars().take(80).collect() })
}

/// Returns the error of a refusal, for a value of this type.
fn refused<T>(name: &str, refusal: NameRefusal) -> NameError {
    let name = name.to_owned();
    match refusal {
        NameRefusal::Absent => NameError::Absent { name },
        NameRefusal::Taken => NameError::Taken { name },
        NameRefusal::OtherType(found) => NameError::OtherType { name, found, wanted: type_name::<T>() },
        NameRefusal::TooManyNames(most) => NameError::TooManyNames { name, most },
        NameRefusal::TooManyWaits(most) => NameError::TooManyWaits { name, most },
    }
}

/// Answer of the first node about a name.
enum NameReply {
    Done,
    Word(OwnerWord),
    Waits,
    Refused(NameRefusal),
}

impl ShareNode {
    /// Returns the error of an answer about names that makes no sense.
    fn stale_names(&self) -> ShareError {
        ShareError::Stale { node: self.leader() }
    }

    fn ask_names(&self, name: &str, request: NameRequest<'_>) -> Result<NameReply, Unanswered> {
        let word = |bits| OwnerWord::from_bits(bits).ok_or(self.stale_names());
        loop {
            let first = self.leader();
            return Ok(match self.at_home(first, ShareMessage::Name { name, request }) {
                Ok(ShareReply::Done) => NameReply::Done,
                Ok(ShareReply::Word(bits)) => NameReply::Word(word(bits)?),
                Ok(ShareReply::Waits) => NameReply::Waits,
                Ok(ShareReply::NameRefused(refusal)) => NameReply::Refused(refusal),
                Ok(_) => return Err(self.stale_names().into()),
                // Another node keeps the names since. What may have been done is not done twice.
                Err(Unanswered { error: ShareError::NodeLost { .. }, may_have_arrived })
                    if self.leader() != first && (!may_have_arrived || matches!(request, NameRequest::Find { .. })) =>
                {
                    continue;
                }
                Err(unanswered) => return Err(unanswered),
            });
        }
    }

    /// Returns the word of the value that has a name. Waits until one has it, up to this time, or not at all.
    fn find_name(
        &self,
        name: &str,
        types: u128,
        until: Option<Instant>,
    ) -> Result<Result<OwnerWord, NameRefusal>, ShareError> {
        loop {
            let Some(until) = until else {
                return match self.ask_names(name, NameRequest::Find { types, ticket: None }) {
                    Ok(NameReply::Word(word)) => Ok(Ok(word)),
                    Ok(NameReply::Refused(refusal)) => Ok(Err(refusal)),
                    Ok(_) => Err(self.stale_names()),
                    Err(unanswered) => Err(unanswered.error),
                };
            };
            let first = self.leader();
            let (number, slot) = self.waits.expect(first, WaitCause::Name, ());
            let reply = self.ask_names(name, NameRequest::Find { types, ticket: Some(number) });
            let answer = match &reply {
                Ok(NameReply::Waits) => slot.wait_until(self, until),
                _ => None,
            };
            self.waits.take(number);
            match (reply, answer) {
                (Ok(NameReply::Word(word)), _) => return Ok(Ok(word)),
                (Ok(NameReply::Refused(refusal)), _) => return Ok(Err(refusal)),
                // A value has the name, or had it a moment ago; or another node keeps the names since.
                (Ok(NameReply::Waits), Some(answer)) => {
                    answer.0.map(drop).or_else(|error| if self.leader() == first { Err(error) } else { Ok(()) })?;
                }
                (Ok(NameReply::Waits), None) => {
                    self.end_name_wait(number);
                    return Ok(Err(NameRefusal::Absent));
                }
                (Ok(NameReply::Done), _) => return Err(self.stale_names()),
                (Err(unanswered), _) => {
                    self.end_name_wait(number);
                    return Err(unanswered.error);
                }
            }
        }
    }

    /// Tells the first node that a wait for a name is over. Never waits.
    fn end_name_wait(&self, number: u64) {
        let first = self.leader();
        if self.id == first {
            self.names.lock().table.cancel(HomeTicket { node: self.id.0, number });
        } else {
            self.outbox.tell(first, ShareMessage::NameWaitEnded { ticket: number });
        }
    }

    /// Serves a message about a name, at the first node. Returns `None` for nonsense, and if this node ends.
    pub(super) fn serve_name(
        &self,
        sender: NodeId,
        name: &str,
        request: &NameRequest<'_>,
    ) -> Option<ShareReply<'static>> {
        if self.id != self.leader() || !NameTable::is_name(name) {
            return None;
        }
        let mut known = self.names.lock();
        let names = self.whole_names(&mut known)?;
        let found = match *request {
            NameRequest::Publish { word, types, type_name } => {
                let value = NamedValue { word: OwnerWord::from_bits(word)?, types, type_name: visible(type_name) };
                match names.publish(name, value.clone(), |word| self.is_value_lost(word)) {
                    Ok(waiting) => {
                        if !self.authority().keep_name(self, name, Some(&value)) {
                            return None;
                        }
                        drop(known);
                        waiting.into_iter().for_each(|ticket| self.answer(ticket, WaitAnswer::Named));
                        return Some(ShareReply::Done);
                    }
                    Err(refusal) => Err(refusal),
                }
            }
            NameRequest::Find { types, ticket: None } => names.find(name, types),
            // A node that is gone was lost before its waits are taken out.
            NameRequest::Find { .. } if self.peers.is_lost(sender) => return None,
            NameRequest::Find { types, ticket: Some(number) } => {
                match names.find_or_wait(name, types, HomeTicket { node: sender.0, number }) {
                    Ok(None) => return Some(ShareReply::Waits),
                    Ok(Some(word)) => Ok(word),
                    Err(refusal) => Err(refusal),
                }
            }
            NameRequest::Unpublish { types } => {
                let taken = names.unpublish(name, types);
                if taken.is_ok() && !self.authority().keep_name(self, name, None) {
                    return None;
                }
                taken
            }
        };
        Some(found.map_or_else(ShareReply::NameRefused, |word| ShareReply::Word(word.bits())))
    }

    /// Returns the table with the names that a node has kept elsewhere which is gone. `None` if this node ends.
    fn whole_names<'t>(&self, known: &'t mut KnownNames) -> Option<&'t mut NameTable> {
        if !known.is_whole {
            known.table.restore(self.authority().kept_names(self)?);
            known.is_whole = true;
        }
        Some(&mut known.table)
    }

    /// Ends a wait of another node for a name.
    pub(super) fn cancel_name(&self, sender: NodeId, number: u64) {
        self.names.lock().table.cancel(HomeTicket { node: sender.0, number });
    }

    /// Returns whether a value's home is gone, and nobody keeps the value.
    fn is_value_lost(&self, word: OwnerWord) -> bool {
        self.peers.is_lost(self.home_of(word)) && !self.holds_promoted(word)
    }

    /// Returns how many names there are, and the first of them with their values.
    pub(super) fn name_rows(&self, most: usize) -> (usize, Vec<NameRow>) {
        let known = self.names.lock();
        let names = &known.table;
        let row = |(name, value): (&str, &NamedValue)| NameRow {
            name: name.to_owned(),
            type_name: value.type_name.clone(),
            home: self.host_of(value.word),
            is_lost: self.is_value_lost(value.word),
        };
        (names.iter().len(), names.iter().take(most).map(row).collect())
    }
}

/// Returns the name of a type as one line.
fn visible(type_name: &str) -> String {
    NameTable::cut_type(type_name).chars().filter(|part| !part.is_control()).collect()
}
