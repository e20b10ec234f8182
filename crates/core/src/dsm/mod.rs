//! Shared memory guided by ownership: the words and blocks of its objects, without I/O.
//!
//! After DRust (OSDI 2024). What its borrow checker knows, one writer or many readers, takes the
//! place of a coherence protocol: an owner's word names one *version* of an object, and a copy is
//! kept by that word. So copies of an old version are never asked for again, and nothing is
//! invalidated.

mod backup;
mod block;
mod borrowers;
mod channel;
mod election;
mod launch;
mod load;
mod loan;
mod lock_line;
mod names;
mod stored_channel;
mod stored_lock;
mod thin_lock;
mod view;
mod withdrawn;
mod word;

pub use backup::{
    BackupBatch, BackupImage, BackupLayout, BackupLog, BackupReadStep, BackupReader, BatchPlace, CommitWord,
    MalformedBatch,
};
pub use block::{BlockHeader, LateFree};
pub use borrowers::{BorrowRoot, BorrowerCounts};
pub use channel::{ChannelQueue, ReceiveStep, SendStep};
pub use election::{LeaseTerm, MemberStep, watched_node};
pub use launch::{LaunchOrder, LaunchRole};
pub use load::NodeLoad;
pub use loan::{BlockRights, LoanNumber, LoanPlace, word_of_lost_loan};
pub use lock_line::{HomeTicket, LockLine, REQUESTS_OF_NODE_MAX};
pub use names::{NameRefusal, NameTable, NamedValue};
pub use stored_channel::{StoredAnswer, StoredChannel, StoredMessage};
pub use stored_lock::StoredLock;
pub use thin_lock::ThinLock;
pub use view::{Expulsion, LossCause, MemberView, ViewChange};
pub use withdrawn::WithdrawnTickets;
pub use word::{BlockKey, Colour, OwnerWord, Partition};
