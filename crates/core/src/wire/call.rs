//! Calls: the server runs a function, which it has by name, over a region, and returns its answer.

use super::bytes::{Fields, short_length};
use super::reply::append;
use super::{MessageHeader, MessageKind};
use alloc::vec::Vec;

/// Body of a call: which function to run, with which argument.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CallBody<'a> {
    /// Name of the function.
    pub name: &'a str,
    /// Version of the function: another one may read other arguments and give other answers.
    pub version: u32,
    /// Bytes that only the function understands.
    pub argument: &'a [u8],
}

impl core::fmt::Debug for CallBody<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "CallBody({:?} {}, {} bytes)", self.name, self.version, self.argument.len())
    }
}

impl<'a> CallBody<'a> {
    /// Greatest length of a name in bytes; the least is one.
    pub const NAME_BYTES_MAX: usize = 64;
    /// Greatest length of an argument in bytes.
    pub const ARGUMENT_BYTES_MAX: usize = 64 * 1024;
    /// Greatest length of an answer in bytes. Longer ones belong into the region.
    pub const ANSWER_BYTES_MAX: usize = 64 * 1024;
    /// Length of the fields before the name, in bytes.
    const FIXED_BYTES: usize = 6;

    /// Returns the length of the body in bytes.
    pub fn body_bytes(&self) -> usize {
        Self::FIXED_BYTES + self.name.len() + self.argument.len()
    }

    /// Checks whether name and argument keep their limits.
    pub fn is_sendable(&self) -> bool {
        (1..=Self::NAME_BYTES_MAX).contains(&self.name.len()) && self.argument.len() <= Self::ARGUMENT_BYTES_MAX
    }

    /// Decodes the body of a request; `None` if it is malformed.
    pub fn decode(body: &'a [u8]) -> Option<CallBody<'a>> {
        let mut fields = Fields(body);
        let version = fields.u32()?;
        let name_bytes = usize::from(fields.u16()?);
        if name_bytes > Self::NAME_BYTES_MAX {
            return None;
        }
        let name = core::str::from_utf8(fields.bytes(name_bytes)?).ok()?;
        let call = CallBody { name, version, argument: fields.0 };
        call.is_sendable().then_some(call)
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&short_length(self.name.len()).to_le_bytes());
        out.extend_from_slice(self.name.as_bytes());
        out.extend_from_slice(self.argument);
    }
}

/// Appends the answer of a function that took `steps` steps, at most [`CallBody::ANSWER_BYTES_MAX`]
/// bytes.
pub fn encode_answer(tag: u64, steps: u32, answer: &[u8], out: &mut Vec<u8>) {
    assert!(answer.len() <= CallBody::ANSWER_BYTES_MAX);
    append(
        MessageHeader { kind: MessageKind::Call.answer(), tag, count: steps, ..MessageHeader::default() },
        answer,
        out,
    );
}
