//! Memory that a submitted operation makes the kernel touch: the entries of io_uring's queue and
//! the blocks of `io_submit`.
//!
//! These are pure functions from the bytes of an entry to addresses. An operation that is not in
//! the table here is refused with `EINVAL`, in its place in the queue, as by a kernel that does not
//! know it. It is also absent from what a program is told when it asks for the known operations.

use crate::window;

/// Memory that an operation touches between its submission and its completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OperandMemory {
    /// No memory.
    Nothing,
    /// Bytes at an address: address, length.
    Bytes(u64, u64),
    /// A string that ends with NUL.
    Text(u64),
    /// An array of iovecs (address, count), and what they name.
    Vector(u64, u64),
    /// A message header, and what it names.
    Message(u64),
    /// An array of `futex_waitv` (address, count), and the words that it names.
    Waiters(u64, u64),
    /// Buffers (address, length) that the kernel may fill at any time from now on.
    Provided(u64, u64),
}

use OperandMemory::{Bytes, Message, Nothing, Provided, Text, Vector, Waiters};

/// Number of the system call `io_pgetevents`, which libc does not name.
pub const SYS_IO_PGETEVENTS: libc::c_long = 333;

/// Error: an entry cannot be submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnsupportedOperation;

/// Operations of io_uring (`IORING_OP_…`).
#[allow(missing_docs, reason = "the kernel's names")]
pub mod op {
    pub const READV: u8 = 1;
    pub const WRITEV: u8 = 2;
    pub const READ_FIXED: u8 = 4;
    pub const WRITE_FIXED: u8 = 5;
    pub const POLL_ADD: u8 = 6;
    pub const POLL_REMOVE: u8 = 7;
    pub const SENDMSG: u8 = 9;
    pub const RECVMSG: u8 = 10;
    pub const TIMEOUT: u8 = 11;
    pub const TIMEOUT_REMOVE: u8 = 12;
    pub const ACCEPT: u8 = 13;
    pub const LINK_TIMEOUT: u8 = 15;
    pub const CONNECT: u8 = 16;
    pub const OPENAT: u8 = 18;
    pub const CLOSE: u8 = 19;
    pub const FILES_UPDATE: u8 = 20;
    pub const STATX: u8 = 21;
    pub const READ: u8 = 22;
    pub const WRITE: u8 = 23;
    pub const MADVISE: u8 = 25;
    pub const SEND: u8 = 26;
    pub const RECV: u8 = 27;
    pub const OPENAT2: u8 = 28;
    pub const EPOLL_CTL: u8 = 29;
    pub const PROVIDE_BUFFERS: u8 = 31;
    pub const RENAMEAT: u8 = 35;
    pub const UNLINKAT: u8 = 36;
    pub const MKDIRAT: u8 = 37;
    pub const SYMLINKAT: u8 = 38;
    pub const LINKAT: u8 = 39;
    pub const MSG_RING: u8 = 40;
    pub const FSETXATTR: u8 = 41;
    pub const SETXATTR: u8 = 42;
    pub const FGETXATTR: u8 = 43;
    pub const GETXATTR: u8 = 44;
    pub const URING_CMD: u8 = 46;
    pub const SEND_ZC: u8 = 47;
    pub const SENDMSG_ZC: u8 = 48;
    pub const READ_MULTISHOT: u8 = 49;
    pub const WAITID: u8 = 50;
    pub const FUTEX_WAIT: u8 = 51;
    pub const FUTEX_WAKE: u8 = 52;
    pub const FUTEX_WAITV: u8 = 53;
    pub const BIND: u8 = 56;
    pub const LISTEN: u8 = 57;
    /// An opcode that no kernel will ever know.
    pub const NONE: u8 = 255;
}

/// The last operation that we know.
pub const OP_LAST: u8 = op::LISTEN;

/// Checks whether programs may use this operation. Excluded are operations that post completions
/// elsewhere, or whose arguments only a driver knows.
pub fn is_known(opcode: u8) -> bool {
    opcode <= OP_LAST && !matches!(opcode, op::MSG_RING | op::URING_CMD)
}

/// Flags that say that the next entry belongs to the same chain (`IOSQE_IO_LINK`,
/// `IOSQE_IO_HARDLINK`).
const FLAGS_LINK: u8 = 1 << 2 | 1 << 3;
/// Flag that lets the kernel take one of the provided buffers (`IOSQE_BUFFER_SELECT`).
const FLAG_BUFFER_SELECT: u8 = 1 << 5;
/// Flag that suppresses the completion of a success (`IOSQE_CQE_SKIP_SUCCESS`).
const FLAG_SKIP_SUCCESS: u8 = 1 << 6;
/// Longest address of a socket (`struct sockaddr_storage`).
const ADDRESS_BYTES: u64 = 128;
const TIMESPEC_BYTES: u64 = 16;

/// An entry of io_uring's submission queue: its first 64 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Entry(pub [u64; 8]);

impl Entry {
    /// Returns the field `opcode`.
    pub fn opcode(self) -> u8 {
        self.0[0] as u8
    }
    fn flags(self) -> u8 {
        (self.0[0] >> 8) as u8
    }
    fn priority(self) -> u16 {
        (self.0[0] >> 16) as u16
    }
    /// Returns the field `fd`.
    pub fn descriptor(self) -> i32 {
        (self.0[0] >> 32) as i32
    }
    fn second(self) -> u64 {
        self.0[1]
    }
    /// Returns the field `addr`.
    pub fn address(self) -> u64 {
        self.0[2]
    }
    /// Returns the field `len`.
    pub fn length(self) -> u32 {
        self.0[3] as u32
    }
    fn operation_flags(self) -> u32 {
        (self.0[3] >> 32) as u32
    }
    /// Returns the field `user_data`.
    pub fn user_data(self) -> u64 {
        self.0[4]
    }
    fn address_len(self) -> u16 {
        (self.0[5] >> 32) as u16
    }
    fn third(self) -> u64 {
        self.0[6]
    }
    /// Returns the entry with another opcode.
    pub fn with_opcode(mut self, opcode: u8) -> Entry {
        self.0[0] = self.0[0] & !0xFF | u64::from(opcode);
        self
    }
    /// Returns the entry with another buffer.
    pub fn with_buffer(mut self, address: u64, len: u32) -> Entry {
        self.0[2] = address;
        self.0[3] = self.0[3] >> 32 << 32 | u64::from(len);
        self
    }
    /// Checks whether the next entry belongs to the same chain.
    pub fn is_linked(self) -> bool {
        self.flags() & FLAGS_LINK != 0
    }
    /// Checks whether an operation may complete without a completion entry, or one under another
    /// `user_data` (`IORING_POLL_UPDATE_USER_DATA`).
    pub fn is_ambiguous(self) -> bool {
        self.flags() & FLAG_SKIP_SUCCESS != 0 || self.opcode() == op::POLL_REMOVE && self.length() & 1 << 2 != 0
    }
    /// Checks whether the operation uses a registered buffer, which is counted at its registration.
    pub fn is_fixed(self) -> bool {
        matches!(self.opcode(), op::READ_FIXED | op::WRITE_FIXED)
    }
    /// Checks whether the kernel chooses the buffer.
    pub fn selects(self) -> bool {
        self.flags() & FLAG_BUFFER_SELECT != 0
    }
    /// Checks whether the operation may complete more than once.
    pub fn is_multishot(self) -> bool {
        match self.opcode() {
            op::ACCEPT => self.priority() & 1 != 0,
            op::RECV | op::RECVMSG => self.priority() & 2 != 0,
            op::POLL_ADD => self.length() & 1 != 0,
            op::TIMEOUT => self.operation_flags() & 1 << 6 != 0,
            op::SEND_ZC | op::SENDMSG_ZC | op::READ_MULTISHOT => true,
            _ => false,
        }
    }
    /// Returns how the transfer can be made shorter; `None` if the operation is no transfer that
    /// may be done in part.
    pub fn transfer(self) -> Option<TransferKind> {
        match self.opcode() {
            _ if self.selects() => None,
            op::READ | op::WRITE | op::SEND | op::RECV | op::SEND_ZC => Some(TransferKind::Plain),
            op::READV => Some(TransferKind::Vector { single: op::READ }),
            op::WRITEV => Some(TransferKind::Vector { single: op::WRITE }),
            _ => None,
        }
    }

    /// Returns the memory that the operation touches. Fails if the operation is not known, or may
    /// not be submitted.
    pub fn parts(self) -> Result<[OperandMemory; 3], UnsupportedOperation> {
        let (address, second, third) = (self.address(), self.second(), self.third());
        let len = u64::from(self.length());
        if !is_known(self.opcode()) {
            return Err(UnsupportedOperation);
        }
        Ok(match self.opcode() {
            // A protection attribute behind a pointer, which kernels before 6.13 do not have.
            op::READ | op::WRITE | op::READV | op::WRITEV | op::READ_FIXED | op::WRITE_FIXED if self.0[7] != 0 => {
                return Err(UnsupportedOperation);
            }
            op::READ | op::RECV | op::RECVMSG | op::READ_MULTISHOT if self.selects() => match self.opcode() {
                op::RECVMSG => [Message(address), Nothing, Nothing],
                _ => [Nothing; 3],
            },
            op::READV if self.selects() => [Bytes(address, 16), Nothing, Nothing],
            op::READV | op::WRITEV => [Vector(address, len), Nothing, Nothing],
            op::READ | op::WRITE | op::READ_FIXED | op::WRITE_FIXED | op::RECV => {
                [Bytes(address, len), Nothing, Nothing]
            }
            op::SEND | op::SEND_ZC => [Bytes(address, len), Bytes(second, u64::from(self.address_len())), Nothing],
            op::SENDMSG | op::RECVMSG | op::SENDMSG_ZC => [Message(address), Nothing, Nothing],
            op::TIMEOUT | op::LINK_TIMEOUT => [Bytes(address, TIMESPEC_BYTES), Nothing, Nothing],
            op::TIMEOUT_REMOVE => [Bytes(second, TIMESPEC_BYTES), Nothing, Nothing],
            op::ACCEPT => [Bytes(address, ADDRESS_BYTES), Bytes(second, 4), Nothing],
            op::CONNECT | op::BIND => [Bytes(address, second), Nothing, Nothing],
            op::OPENAT | op::UNLINKAT | op::MKDIRAT => [Text(address), Nothing, Nothing],
            op::OPENAT2 => [Text(address), Bytes(second, len), Nothing],
            op::STATX => [Text(address), Bytes(second, 256), Nothing],
            op::RENAMEAT | op::SYMLINKAT | op::LINKAT => [Text(address), Text(second), Nothing],
            op::FILES_UPDATE => [Bytes(address, len.saturating_mul(4)), Nothing, Nothing],
            op::EPOLL_CTL => [Bytes(address, 12), Nothing, Nothing],
            op::FSETXATTR | op::FGETXATTR => [Text(address), Bytes(second, len), Nothing],
            op::SETXATTR | op::GETXATTR => [Text(address), Bytes(second, len), Text(third)],
            op::WAITID => [Bytes(second, 128), Nothing, Nothing],
            op::FUTEX_WAIT | op::FUTEX_WAKE => [Bytes(address, 8), Nothing, Nothing],
            op::FUTEX_WAITV => [Waiters(address, len), Nothing, Nothing],
            op::PROVIDE_BUFFERS => {
                [Provided(address, len.saturating_mul(self.descriptor().max(0) as u64)), Nothing, Nothing]
            }
            // Our descriptors stay open, and what is far is ours to drop.
            op::CLOSE if (window::DESCRIPTORS..window::DESCRIPTORS_END).contains(&self.descriptor()) => {
                return Err(UnsupportedOperation);
            }
            op::MADVISE if window::contains(address as usize) => return Err(UnsupportedOperation),
            _ => [Nothing; 3],
        })
    }
}

/// Way to make a transfer shorter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransferKind {
    /// The length is reduced.
    Plain,
    /// The number of iovecs is reduced. If the first alone is too long, the operation for a
    /// `single` buffer is used instead.
    Vector {
        /// Opcode for a single buffer.
        single: u8,
    },
}

/// A block of `io_submit` (`struct iocb`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Block(pub [u64; 8]);

impl Block {
    /// Bytes of a block.
    pub const BYTES: u64 = 64;

    /// Returns the memory that the operation touches, apart from the block itself.
    pub fn part(self) -> OperandMemory {
        let (opcode, address, len) = (self.0[2] as u16, self.0[3], self.0[4]);
        match opcode {
            // PREAD, PWRITE
            0 | 1 => Bytes(address, len),
            // PREADV, PWRITEV
            7 | 8 => Vector(address, len),
            // FSYNC, FDSYNC, POLL, and what the kernel will refuse.
            _ => Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(opcode: u8) -> Entry {
        let mut entry = Entry::default().with_opcode(opcode).with_buffer(0x1000, 7);
        entry.0[0] |= 3 << 32;
        entry.0[1] = 0x2000;
        entry.0[6] = 0x3000;
        entry
    }

    #[test]
    fn transfers_name_their_buffers() {
        for opcode in [op::READ, op::WRITE, op::RECV, op::READ_FIXED, op::WRITE_FIXED] {
            assert_eq!(entry(opcode).parts(), Ok([Bytes(0x1000, 7), Nothing, Nothing]), "operation {opcode}");
        }
        for opcode in [op::READV, op::WRITEV] {
            assert_eq!(entry(opcode).parts(), Ok([Vector(0x1000, 7), Nothing, Nothing]));
        }
        let mut selecting = entry(op::RECV);
        selecting.0[0] |= u64::from(FLAG_BUFFER_SELECT) << 8;
        assert_eq!(selecting.parts(), Ok([Nothing; 3]), "the address is not used");
    }

    #[test]
    fn results_and_paths_are_named_too() {
        assert_eq!(entry(op::STATX).parts(), Ok([Text(0x1000), Bytes(0x2000, 256), Nothing]));
        assert_eq!(entry(op::ACCEPT).parts(), Ok([Bytes(0x1000, 128), Bytes(0x2000, 4), Nothing]));
        assert_eq!(entry(op::GETXATTR).parts(), Ok([Text(0x1000), Bytes(0x2000, 7), Text(0x3000)]));
        assert_eq!(entry(op::PROVIDE_BUFFERS).parts(), Ok([Provided(0x1000, 21), Nothing, Nothing]));
    }

    #[test]
    fn unknown_operations_are_refused() {
        for opcode in [op::MSG_RING, op::URING_CMD, OP_LAST + 1, op::NONE] {
            assert_eq!(entry(opcode).parts(), Err(UnsupportedOperation), "operation {opcode}");
        }
        let ours = |descriptor: i32| {
            let mut close = Entry::default().with_opcode(op::CLOSE);
            close.0[0] |= (descriptor as u64) << 32;
            close.parts()
        };
        assert_eq!(ours(window::DESCRIPTORS), Err(UnsupportedOperation));
        assert_eq!(ours(5), Ok([Nothing; 3]));
        let advice = Entry::default().with_opcode(op::MADVISE);
        assert_eq!(advice.with_buffer(window::BASE as u64, 4096).parts(), Err(UnsupportedOperation));
        assert!(advice.with_buffer(0x1000, 4096).parts().is_ok());
    }

    #[test]
    fn arbitrary_bytes_do_not_panic() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..100_000 {
            let words = [0; 8].map(|_| random.u64(..));
            let _ = Entry(words).parts();
            let _ = (Entry(words).is_multishot(), Entry(words).transfer(), Block(words).part());
        }
    }

    #[test]
    fn a_changed_entry_differs_where_it_should() {
        let changed = entry(op::READV).with_opcode(op::READ).with_buffer(0x5000, 9);
        assert_eq!(
            (changed.opcode(), changed.address(), changed.length(), changed.descriptor()),
            (op::READ, 0x5000, 9, 3)
        );
        assert_eq!((changed.second(), changed.third()), (0x2000, 0x3000));
    }

    #[test]
    fn blocks_name_their_buffers() {
        let block = |opcode: u64| Block([0, 0, opcode | 5 << 32, 0x1000, 7, 0, 0, 0]).part();
        assert_eq!(block(0), Bytes(0x1000, 7));
        assert_eq!(block(1), Bytes(0x1000, 7));
        assert_eq!(block(8), Vector(0x1000, 7));
        assert_eq!(block(2), Nothing);
    }
}
