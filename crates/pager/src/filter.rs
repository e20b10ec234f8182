//! The seccomp filter: which system calls of the program trap to our handler.
//!
//! The filter is a pure function from constants to classic BPF, so the tests can interpret it. It
//! outlives `exec`, so it refers only to addresses and descriptor numbers that are the same in
//! every process of a job. It lets through all calls that a program makes before our library is
//! initialised.
//!
//! These calls trap:
//! - calls that make or change far-capable memory;
//! - calls with an argument that points into the window or to where an extent of it can be;
//! - calls whose buffers are named by structures elsewhere (`readv`, `sendmsg`, …);
//! - calls that could take away our signals, descriptors or address space (`rt_sigprocmask`,
//!   `close_range`, `execve`, …).

use crate::config::Capture;
use crate::submission::SYS_IO_PGETEVENTS;
use crate::window;
use farfield_os::seccomp::Instruction;
use farfield_os::uffd;

const LD_W_ABS: u16 = 0x20;
const ALU_AND_K: u16 = 0x54;
const JEQ_K: u16 = 0x15;
const JGE_K: u16 = 0x35;
const JSET_K: u16 = 0x45;
const RET_K: u16 = 0x06;

const RET_ALLOW: u32 = 0x7fff_0000;
const RET_TRAP: u32 = 0x0003_0000 | TRAP_DATA as u32;
const RET_ERRNO: u32 = 0x0005_0000;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;

const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const POINTER_LOW: u32 = 8;
const POINTER_HIGH: u32 = 12;

/// Mark of our traps (`si_errno` of the SIGSYS), which tells them from those of a program's own
/// filter.
pub const TRAP_DATA: i32 = 0x4641;

/// First argument of a `clone3` that the filter answers with [`PROBE_ERRNO`]. The kernel refuses the call.
pub const PROBE: u32 = TRAP_DATA as u32;
/// Error by which a process learns that the filter is in force. Other filters, such as those of
/// containers, do not give it: they answer `clone3` with ENOSYS, too.
pub const PROBE_ERRNO: i32 = libc::ENOTUNIQ;

/// Flags with which the loader maps memory of its own, and reserves room for a library whose
/// segments are aligned to more than a page. It names no place. In a program that is executed
/// inside a job it does so under our filter before our handler is there, so these calls pass.
/// Reservations ask for no access, and the preload library lets nobody else make such calls
/// ([`reservation_flags`]). Others pass from [where the loader makes them](EarlyCall).
const LOADER_FLAGS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Returns the flags with which a program's reservation traps. The added flag changes nothing:
/// memory without access is not accounted for anyway.
pub fn reservation_flags(prot: i32, flags: i32) -> i32 {
    if prot == libc::PROT_NONE && flags == LOADER_FLAGS { flags | libc::MAP_NORESERVE } else { flags }
}

/// Flags of mappings that do not become far-capable: all but those that are known to change nothing
/// for far memory. So stacks, huge pages and locked memory stay the kernel's, and so does whatever a
/// future kernel gives a flag to. (`MAP_DROPPABLE`, which glibc's `getrandom` asks for since 2.41, is
/// no flag but another type than private.)
pub const NOT_CAPTURED: i32 = !(libc::MAP_TYPE
    | libc::MAP_ANONYMOUS
    | libc::MAP_FIXED
    | libc::MAP_FIXED_NOREPLACE
    | libc::MAP_NORESERVE
    | libc::MAP_POPULATE
    | libc::MAP_NONBLOCK
    | libc::MAP_DENYWRITE
    | libc::MAP_EXECUTABLE);

/// Minimum size in bytes of private anonymous mappings that become far-capable.
pub const CAPTURE_BYTES: u32 = 64 << 10;

/// The calls that glibc's loader may make in a way that traps, before our handlers are there: it
/// maps memory (for tables, and for the storage of the first thread), and says why it ends.
pub const EARLY_CALLS: [libc::c_long; 3] = [libc::SYS_mmap, libc::SYS_writev, libc::SYS_exit_group];
/// The bits of an address that say where in its page it lies.
pub const PAGE_OFFSET: u32 = 0xFFF;

/// A place in the loader from which one of the [`EARLY_CALLS`] is made. Code of the program may lie
/// at the same offset (1 of 4096 does). Then the same call from there passes too: large mappings
/// with the loader's flags stay near, `writev` finds only what is near, and far memory is freed a
/// moment after `exit_group`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EarlyCall {
    /// Number of the call.
    pub number: libc::c_long,
    /// Offset in its page of the instruction that the call returns to.
    pub offset: u32,
}

const fn argument_low(index: u32) -> u32 {
    16 + 8 * index
}
const fn argument_high(index: u32) -> u32 {
    argument_low(index) + 4
}

#[derive(Clone, Copy)]
enum Rule {
    /// Trap, unless the loader makes this call.
    Trap,
    /// Trap if the argument is not zero.
    TrapUnlessZero(u32),
    /// Trap if the argument (32 bits) equals the value.
    TrapIfEqual(u32, u32),
    /// Trap if the argument has none of the bits.
    TrapUnlessBits(u32, u32),
    /// Trap if the argument is one of our descriptors.
    TrapIfOurDescriptor(u32),
    /// Tell the program that the kernel does not have this call.
    NotImplemented,
    /// Answer a [`PROBE`]. Tell the program that the kernel does not have this call.
    NotImplementedUnlessProbe,
    /// Test only these arguments (one bit each) as pointers; registers that the call does not use
    /// may hold anything.
    Pointers(u8),
}

/// Frequent calls whose pointers are known, most frequent first, with one bit for each argument
/// that is one.
const POINTERS: &[(libc::c_long, u8)] = &[
    (libc::SYS_read, 0b10),
    (libc::SYS_write, 0b10),
    (libc::SYS_futex, 0b11001),
    (libc::SYS_epoll_wait, 0b10),
    (libc::SYS_recvfrom, 0b110010),
    (libc::SYS_sendto, 0b10010),
    (libc::SYS_pread64, 0b10),
    (libc::SYS_pwrite64, 0b10),
    (libc::SYS_munmap, 0b1),
    (libc::SYS_madvise, 0b1),
    (libc::SYS_mprotect, 0b1),
    (libc::SYS_mremap, 0b10001),
    (libc::SYS_lseek, 0),
    (libc::SYS_openat, 0b10),
    (libc::SYS_newfstatat, 0b110),
    (libc::SYS_fstat, 0b10),
    (libc::SYS_stat, 0b11),
    (libc::SYS_lstat, 0b11),
    (libc::SYS_poll, 0b1),
    (libc::SYS_epoll_ctl, 0b1000),
    (libc::SYS_ioctl, 0b100),
    (libc::SYS_fcntl, 0b100),
    (libc::SYS_getdents64, 0b10),
    (libc::SYS_clock_nanosleep, 0b1100),
    (libc::SYS_nanosleep, 0b11),
    (libc::SYS_getpid, 0),
    (libc::SYS_gettid, 0),
    (libc::SYS_getppid, 0),
    (libc::SYS_getuid, 0),
    (libc::SYS_geteuid, 0),
    (libc::SYS_getgid, 0),
    (libc::SYS_getegid, 0),
    (libc::SYS_sched_yield, 0),
    (libc::SYS_exit, 0),
    (libc::SYS_tgkill, 0),
    (libc::SYS_kill, 0),
    (libc::SYS_socket, 0),
    (libc::SYS_listen, 0),
    (libc::SYS_shutdown, 0),
    (libc::SYS_fsync, 0),
    (libc::SYS_fdatasync, 0),
    (libc::SYS_ftruncate, 0),
    (libc::SYS_fadvise64, 0),
    (libc::SYS_dup, 0),
    (libc::SYS_access, 0b1),
    (libc::SYS_readlink, 0b11),
    (libc::SYS_wait4, 0b1010),
    (libc::SYS_setpgid, 0),
    (libc::SYS_getpgrp, 0),
    (libc::SYS_umask, 0),
    (libc::SYS_set_robust_list, 0b1),
    (libc::SYS_set_tid_address, 0b1),
    (libc::SYS_getrandom, 0b1),
    (libc::SYS_sendfile, 0b100),
];

/// Returns the calls with rules of their own. A call that its rule does not claim still goes
/// through the test for pointers.
fn rules(capture: Capture) -> Vec<(libc::c_long, Rule)> {
    use Rule::*;
    let mut rules = vec![
        (libc::SYS_close, TrapIfOurDescriptor(0)),
        (libc::SYS_dup2, TrapIfOurDescriptor(1)),
        (libc::SYS_dup3, TrapIfOurDescriptor(1)),
        // Threads of this process that have thread-local storage of their own may go on. glibc
        // falls back from clone3, whose flags a filter cannot see.
        (libc::SYS_clone, TrapUnlessBits(0, libc::CLONE_VM as u32)),
        (libc::SYS_clone, TrapUnlessBits(0, libc::CLONE_THREAD as u32)),
        (libc::SYS_clone, TrapUnlessBits(0, libc::CLONE_SETTLS as u32)),
        (libc::SYS_clone3, NotImplementedUnlessProbe),
        (libc::SYS_prctl, TrapIfEqual(0, libc::PR_SET_SECCOMP as u32)),
        (libc::SYS_prlimit64, TrapIfEqual(1, libc::RLIMIT_AS)),
        (libc::SYS_prlimit64, TrapIfEqual(1, libc::RLIMIT_DATA)),
        (libc::SYS_setrlimit, TrapIfEqual(0, libc::RLIMIT_AS)),
        (libc::SYS_setrlimit, TrapIfEqual(0, libc::RLIMIT_DATA)),
        (libc::SYS_getrlimit, TrapIfEqual(0, libc::RLIMIT_AS)),
        (libc::SYS_getrlimit, TrapIfEqual(0, libc::RLIMIT_DATA)),
        (libc::SYS_ptrace, TrapIfEqual(0, libc::PTRACE_TRACEME)),
        (libc::SYS_ppoll, TrapUnlessZero(3)),
        (libc::SYS_pselect6, TrapUnlessZero(5)),
        (libc::SYS_epoll_pwait, TrapUnlessZero(4)),
        (libc::SYS_epoll_pwait2, TrapUnlessZero(4)),
        (SYS_IO_PGETEVENTS, TrapUnlessZero(5)),
        // The ranges of this call stand in memory that a filter cannot see.
        (libc::SYS_process_madvise, NotImplemented),
        // Protection keys belong to the kernel's mappings, and ours are one reservation. Without
        // keys programs do without.
        (libc::SYS_pkey_alloc, NotImplemented),
    ];
    for call in [
        libc::SYS_exit_group,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigaction,
        // The frame of this call names the program's alternate stack and mask, and may be far.
        libc::SYS_rt_sigreturn,
        libc::SYS_sigaltstack,
        libc::SYS_fork,
        libc::SYS_vfork,
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_seccomp,
        libc::SYS_rt_sigsuspend,
        libc::SYS_close_range,
        libc::SYS_mlockall,
        libc::SYS_readv,
        libc::SYS_writev,
        libc::SYS_preadv,
        libc::SYS_pwritev,
        libc::SYS_preadv2,
        libc::SYS_pwritev2,
        libc::SYS_sendmsg,
        libc::SYS_recvmsg,
        libc::SYS_sendmmsg,
        libc::SYS_recvmmsg,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_vmsplice,
        libc::SYS_futex_waitv,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_io_setup,
        libc::SYS_io_submit,
        libc::SYS_io_destroy,
        libc::SYS_setuid,
        libc::SYS_setreuid,
        libc::SYS_setresuid,
        libc::SYS_setfsuid,
        libc::SYS_setgid,
        libc::SYS_setregid,
        libc::SYS_setresgid,
        libc::SYS_setfsgid,
        libc::SYS_capset,
        libc::SYS_setns,
        libc::SYS_unshare,
    ] {
        rules.push((call, Trap));
    }
    let mut known = match capture {
        Capture::Everything => vec![(libc::SYS_brk, TrapUnlessZero(0))],
        // The length of a mapping may look like a pointer, and so may a break.
        Capture::Arrays => vec![(libc::SYS_mmap, Pointers(0b1)), (libc::SYS_brk, Pointers(0))],
    };
    for &(call, mask) in POINTERS {
        if call == libc::SYS_ioctl {
            // A userfaultfd of the program's own; the second request names its buffer in a
            // structure.
            known.extend([uffd::REGISTER, uffd::COPY].map(|request| (call, TrapIfEqual(1, request as u32))));
        }
        known.push((call, Pointers(mask)));
    }
    known.append(&mut rules);
    known
}

/// Assembles the filter for the system calls of a program, whose loader makes its early calls from
/// these places, and of whose memory `capture` becomes far-capable.
pub fn program(loader: &[EarlyCall], capture: Capture) -> Vec<Instruction> {
    let mut code = Vec::new();
    let op = |code, constant| Instruction { code, jump_true: 0, jump_false: 0, constant };
    let jump = |code, constant, jump_true, jump_false| Instruction { code, jump_true, jump_false, constant };

    let trap_pointer = |argument| {
        [
            op(LD_W_ABS, argument_high(argument)),
            jump(JGE_K, window::HIGH_END, 2, 0),
            jump(JGE_K, window::HIGH_FIRST, 0, 1),
            op(RET_K, RET_TRAP),
        ]
    };

    // Another architecture's calls are not ours (32-bit programs are refused at the start).
    code.push(op(LD_W_ABS, ARCH));
    code.push(jump(JEQ_K, AUDIT_ARCH_X86_64, 1, 0));
    code.push(op(RET_K, RET_ALLOW));
    // Calls from the gate pass: they are ours, or made by us for the program.
    code.push(op(LD_W_ABS, POINTER_HIGH));
    code.push(jump(JEQ_K, (window::GATE >> 32) as u32, 0, 4));
    code.push(op(LD_W_ABS, POINTER_LOW));
    code.push(op(ALU_AND_K, !0xFFF));
    code.push(jump(JEQ_K, window::GATE as u32 & !0xFFF, 0, 1));
    code.push(op(RET_K, RET_ALLOW));

    // mmap: large private anonymous memory traps, unless the loader may have asked for it. So does
    // any call that touches the window.
    let excluded = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE | NOT_CAPTURED;
    let from_loader = |number| loader.iter().filter(move |call| call.number == number).map(|call| call.offset);
    let places: Vec<u32> = from_loader(libc::SYS_mmap).collect();
    let trap = 22 + places.len();
    let allow = trap + 1;
    // From this instruction of the block to that one.
    let to = |from: usize, target: usize| u8::try_from(target - from - 1).expect("the block is short");
    let mut mmap = vec![
        op(LD_W_ABS, argument_high(0)),
        jump(JGE_K, window::HIGH_END, 1, 0),
        jump(JGE_K, window::HIGH_FIRST, to(2, trap), 0),
        op(LD_W_ABS, argument_low(3)),
        jump(JSET_K, libc::MAP_ANONYMOUS as u32, 0, to(4, allow)),
        jump(JSET_K, excluded as u32, to(5, allow), 0),
        op(ALU_AND_K, libc::MAP_TYPE as u32),
        jump(JEQ_K, libc::MAP_PRIVATE as u32, 0, to(7, allow)),
        op(LD_W_ABS, argument_high(1)),
        jump(JEQ_K, 0, 0, 2),
        op(LD_W_ABS, argument_low(1)),
        jump(JGE_K, CAPTURE_BYTES, 0, to(11, allow)),
        // The loader may make this call before there is a handler: see `LOADER_FLAGS`.
        op(LD_W_ABS, argument_low(3)),
        jump(JEQ_K, LOADER_FLAGS as u32, 0, to(13, trap)),
        op(LD_W_ABS, argument_high(0)),
        jump(JEQ_K, 0, 0, to(15, trap)),
        op(LD_W_ABS, argument_low(0)),
        jump(JEQ_K, 0, 0, to(17, trap)),
        op(LD_W_ABS, argument_low(2)),
        jump(JEQ_K, libc::PROT_NONE as u32, to(19, allow), 0),
        op(LD_W_ABS, POINTER_LOW),
        op(ALU_AND_K, PAGE_OFFSET),
    ];
    for &place in &places {
        mmap.push(jump(JEQ_K, place, to(mmap.len(), allow), 0));
    }
    mmap.extend([op(RET_K, RET_TRAP), op(RET_K, RET_ALLOW)]);
    code.push(op(LD_W_ABS, NUMBER));
    if capture == Capture::Everything {
        code.push(jump(JEQ_K, libc::SYS_mmap as u32, 0, mmap.len() as u8));
        code.extend(mmap);
    }

    for (number, rule) in rules(capture) {
        let body = match rule {
            Rule::Trap => {
                let mut body = Vec::new();
                for place in from_loader(number) {
                    body.extend([op(LD_W_ABS, POINTER_LOW), op(ALU_AND_K, PAGE_OFFSET)]);
                    body.extend([jump(JEQ_K, place, 0, 1), op(RET_K, RET_ALLOW)]);
                }
                body.push(op(RET_K, RET_TRAP));
                body
            }
            Rule::NotImplemented => vec![op(RET_K, RET_ERRNO | libc::ENOSYS as u32)],
            Rule::NotImplementedUnlessProbe => vec![
                op(LD_W_ABS, argument_low(0)),
                jump(JEQ_K, PROBE, 0, 1),
                op(RET_K, RET_ERRNO | PROBE_ERRNO as u32),
                op(RET_K, RET_ERRNO | libc::ENOSYS as u32),
            ],
            Rule::Pointers(mask) => {
                let mut body = Vec::new();
                for argument in (0..6).filter(|argument| mask & (1 << argument) != 0) {
                    body.extend(trap_pointer(argument));
                }
                body.push(op(RET_K, RET_ALLOW));
                body
            }
            Rule::TrapUnlessZero(argument) => vec![
                op(LD_W_ABS, argument_low(argument)),
                jump(JEQ_K, 0, 0, 2),
                op(LD_W_ABS, argument_high(argument)),
                jump(JEQ_K, 0, 1, 0),
                op(RET_K, RET_TRAP),
                op(LD_W_ABS, NUMBER),
            ],
            Rule::TrapIfEqual(argument, value) => vec![
                op(LD_W_ABS, argument_low(argument)),
                jump(JEQ_K, value, 0, 1),
                op(RET_K, RET_TRAP),
                op(LD_W_ABS, NUMBER),
            ],
            Rule::TrapUnlessBits(argument, bits) => vec![
                op(LD_W_ABS, argument_low(argument)),
                jump(JSET_K, bits, 1, 0),
                op(RET_K, RET_TRAP),
                op(LD_W_ABS, NUMBER),
            ],
            Rule::TrapIfOurDescriptor(argument) => vec![
                op(LD_W_ABS, argument_low(argument)),
                jump(JGE_K, window::DESCRIPTORS as u32, 0, 2),
                jump(JGE_K, window::DESCRIPTORS_END as u32, 1, 0),
                op(RET_K, RET_TRAP),
                op(RET_K, RET_ALLOW),
            ],
        };
        code.push(jump(JEQ_K, number as u32, 0, body.len() as u8));
        code.extend(body);
    }

    // Trap if any argument points into the window.
    for argument in 0..6 {
        code.extend(trap_pointer(argument));
    }
    code.push(op(RET_K, RET_ALLOW));
    code
}

/// Returns a program's own filter with a prefix that exempts our own calls. The filter still sees
/// the calls that we make for the program.
pub fn exempt_own_calls(theirs: &[Instruction]) -> Vec<Instruction> {
    let own = (window::GATE_OWN + 2) as u32;
    let mut code = vec![
        Instruction { code: LD_W_ABS, jump_true: 0, jump_false: 0, constant: POINTER_HIGH },
        Instruction { code: JEQ_K, jump_true: 0, jump_false: 3, constant: (window::GATE >> 32) as u32 },
        Instruction { code: LD_W_ABS, jump_true: 0, jump_false: 0, constant: POINTER_LOW },
        Instruction { code: JEQ_K, jump_true: 0, jump_false: 1, constant: own },
        Instruction { code: RET_K, jump_true: 0, jump_false: 0, constant: RET_ALLOW },
    ];
    code.extend_from_slice(theirs);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(PartialEq, Eq, Debug)]
    enum Verdict {
        Allow,
        Trap,
        Missing,
        Probed,
    }

    /// Interprets the filter on one call, as the kernel does.
    fn run(program: &[Instruction], number: libc::c_long, pointer: usize, args: [usize; 6]) -> Verdict {
        let mut data = [0u8; 64];
        data[0..4].copy_from_slice(&(number as u32).to_le_bytes());
        data[4..8].copy_from_slice(&AUDIT_ARCH_X86_64.to_le_bytes());
        data[8..16].copy_from_slice(&pointer.to_le_bytes());
        for (index, arg) in args.iter().enumerate() {
            data[16 + 8 * index..][..8].copy_from_slice(&arg.to_le_bytes());
        }
        let (mut at, mut a) = (0usize, 0u32);
        loop {
            let i = program[at];
            at += 1;
            let mut branch = |taken: bool| at += usize::from(if taken { i.jump_true } else { i.jump_false });
            match i.code {
                LD_W_ABS => a = u32::from_le_bytes(data[i.constant as usize..][..4].try_into().unwrap()),
                ALU_AND_K => a &= i.constant,
                JEQ_K => branch(a == i.constant),
                JGE_K => branch(a >= i.constant),
                JSET_K => branch(a & i.constant != 0),
                RET_K => {
                    return match i.constant {
                        RET_ALLOW => Verdict::Allow,
                        RET_TRAP => Verdict::Trap,
                        _ if i.constant == RET_ERRNO | PROBE_ERRNO as u32 => Verdict::Probed,
                        _ => Verdict::Missing,
                    };
                }
                other => panic!("code {other:#x}"),
            }
        }
    }

    fn verdict(number: libc::c_long, args: [usize; 6]) -> Verdict {
        run(&program(&LOADER, Capture::Everything), number, 0x7f00_1234_5678, args)
    }

    const LOADER: [EarlyCall; 3] = [
        EarlyCall { number: libc::SYS_mmap, offset: 0xca3 },
        EarlyCall { number: libc::SYS_mmap, offset: 0x123 },
        EarlyCall { number: libc::SYS_exit_group, offset: 0xe3a },
    ];
    const FAR: usize = window::BASE + 0x12_3456_7890;
    const ANON: usize = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;

    #[test]
    fn a_pointer_is_seen_where_the_call_has_one() {
        for &(number, mask) in POINTERS {
            for index in 0..6 {
                let mut args = [3, 0x7ffd_0000_0000, 7, 0, 0, 0];
                args[index] = FAR;
                let expected = if mask & (1 << index) != 0 { Verdict::Trap } else { Verdict::Allow };
                assert_eq!(verdict(number, args), expected, "call {number}, argument {index}");
            }
        }
    }

    #[test]
    fn a_pointer_into_the_window_is_seen_in_any_argument_of_an_unknown_call() {
        for number in [libc::SYS_mincore, libc::SYS_statx, libc::SYS_mq_open, 450] {
            for index in 0..6 {
                let mut args = [3, 0x7ffd_0000_0000, 7, 0, 0, 0];
                assert_eq!(verdict(number, args), Verdict::Allow);
                args[index] = FAR;
                assert_eq!(verdict(number, args), Verdict::Trap);
                args[index] = window::BASE;
                assert_eq!(verdict(number, args), Verdict::Trap);
                args[index] = window::BASE + window::LEN - 1;
                assert_eq!(verdict(number, args), Verdict::Trap);
                args[index] = window::extents::BASE;
                assert_eq!(verdict(number, args), Verdict::Trap);
                args[index] = window::extents::BASE - 1;
                assert_eq!(verdict(number, args), Verdict::Allow);
                args[index] = window::BASE + window::LEN;
                assert_eq!(verdict(number, args), Verdict::Allow);
            }
        }
    }

    #[test]
    fn the_gate_is_never_stopped() {
        for number in [libc::SYS_read, libc::SYS_mmap, libc::SYS_execve, libc::SYS_brk] {
            for gate in [window::GATE_OWN, window::GATE_FORWARD] {
                for capture in [Capture::Everything, Capture::Arrays] {
                    assert_eq!(run(&program(&LOADER, capture), number, gate + 2, [FAR; 6]), Verdict::Allow);
                }
            }
        }
    }

    #[test]
    fn large_private_anonymous_memory_is_captured() {
        let map = |addr: usize, len: usize, flags: usize| verdict(libc::SYS_mmap, [addr, len, 3, flags, usize::MAX, 0]);
        assert_eq!(map(0, 1 << 20, ANON), Verdict::Trap);
        assert_eq!(map(0, CAPTURE_BYTES as usize, ANON), Verdict::Trap);
        assert_eq!(map(0, 1 << 40, ANON | libc::MAP_NORESERVE as usize), Verdict::Trap);
        assert_eq!(map(0x7000_0000, 1 << 30, ANON), Verdict::Trap, "a hint is only a hint");
        assert_eq!(map(FAR & !4095, 4096, ANON | libc::MAP_FIXED as usize), Verdict::Trap);
        assert_eq!(map(0, CAPTURE_BYTES as usize - 1, ANON), Verdict::Allow);
        let known = libc::MAP_NORESERVE | libc::MAP_POPULATE | libc::MAP_NONBLOCK;
        assert_eq!(map(0, 1 << 20, ANON | known as usize), Verdict::Trap);
        let excluded = [libc::MAP_STACK, libc::MAP_GROWSDOWN, libc::MAP_HUGETLB, libc::MAP_32BIT, libc::MAP_LOCKED];
        // The last ones have no meaning for private memory yet.
        for flag in excluded.into_iter().chain([libc::MAP_SYNC, 0x200, 1 << 24, 1 << 31]) {
            assert_eq!(map(0, 8 << 20, ANON | flag as usize), Verdict::Allow, "{flag:#x}");
        }
        const DROPPABLE: i32 = 8;
        assert_eq!(map(0, 8 << 20, (DROPPABLE | libc::MAP_ANONYMOUS) as usize), Verdict::Allow);
        let reserve = |place: usize, flags: usize| verdict(libc::SYS_mmap, [place, 8 << 20, 0, flags, usize::MAX, 0]);
        assert_eq!(reserve(0, ANON), Verdict::Allow);
        for place in [0xc0_0000_0000, 0x7000_0000, 0x5e12_3400_0000] {
            assert_eq!(reserve(place, ANON), Verdict::Trap, "the loader asks for no place");
        }
        assert_eq!(reserve(0, ANON | libc::MAP_NORESERVE as usize), Verdict::Trap);
        assert_eq!(map(0x7000_0000, 1 << 30, ANON | libc::MAP_FIXED as usize), Verdict::Allow);
        assert_eq!(map(0, 1 << 20, (libc::MAP_SHARED | libc::MAP_ANONYMOUS) as usize), Verdict::Allow);
        assert_eq!(verdict(libc::SYS_mmap, [0, 1 << 20, 1, libc::MAP_PRIVATE as usize, 3, 0]), Verdict::Allow);
    }

    /// All other memory of the program stays the kernel's, and calls about it do not trap.
    #[test]
    fn where_only_arrays_are_far_only_the_window_is_captured() {
        let filter = program(&LOADER, Capture::Arrays);
        let verdict = |number, args| run(&filter, number, 0x7f00_1234_5678, args);
        let map = |addr: usize, len: usize, flags: usize| verdict(libc::SYS_mmap, [addr, len, 3, flags, usize::MAX, 0]);
        for len in [1 << 20, 5 << 30, 1 << 40] {
            assert_eq!(map(0, len, ANON), Verdict::Allow);
            assert_eq!(map(0x7000_0000, len, ANON), Verdict::Allow);
            assert_eq!(map(window::ANYWHERE, len, ANON), Verdict::Trap);
        }
        assert_eq!(map(FAR & !4095, 4096, ANON | libc::MAP_FIXED as usize), Verdict::Trap);
        assert_eq!(verdict(libc::SYS_brk, [0x5555_0000_0000, 0, 0, 0, 0, 0]), Verdict::Allow);
        assert_eq!(verdict(libc::SYS_brk, [0x1_2345_0000, 0, 0, 0, 0, 0]), Verdict::Allow);
        for number in [libc::SYS_munmap, libc::SYS_madvise, libc::SYS_mremap, libc::SYS_mprotect] {
            assert_eq!(verdict(number, [0x7f00_0000_0000, 1 << 20, 0, 0, 0, 0]), Verdict::Allow);
            assert_eq!(verdict(number, [FAR, 1 << 20, 0, 0, 0, 0]), Verdict::Trap);
        }
        assert_eq!(verdict(libc::SYS_read, [3, FAR, 1, 0, 0, 0]), Verdict::Trap);
        assert_eq!(verdict(libc::SYS_fork, [0; 6]), Verdict::Trap);
    }

    /// A program that is executed inside a job maps the gate, and the loader its files, before there is a handler.
    #[test]
    fn system_calls_before_the_handlers_pass() {
        let fixed = ANON | libc::MAP_FIXED_NOREPLACE as usize;
        let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
        assert_eq!(verdict(libc::SYS_mmap, [window::GATE, 4096, access, fixed, usize::MAX, 0]), Verdict::Allow);
        assert_eq!(verdict(libc::SYS_mprotect, [window::GATE, 4096, 5, 0, 0, 0]), Verdict::Allow);
        for place in [0, 0x40_0000, 0x5555_5555_4000, 0x7f12_3456_7000] {
            let fixed = libc::MAP_PRIVATE as usize | libc::MAP_FIXED as usize;
            assert_eq!(verdict(libc::SYS_mmap, [place, 1 << 20, 5, fixed, 3, 0]), Verdict::Allow);
            assert_eq!(verdict(libc::SYS_mprotect, [place, 1 << 20, 1, 0, 0, 0]), Verdict::Allow);
        }
    }

    /// Its tables are large when many libraries share symbols, and it says what it does not find.
    #[test]
    fn calls_of_the_loader_pass_and_the_same_calls_of_others_do_not() {
        let from =
            |at: usize, number, args| run(&program(&LOADER, Capture::Everything), number, 0x7f12_3456_7000 + at, args);
        let map = [0, 17 << 12, 3, ANON, usize::MAX, 0];
        for at in [0xca3, 0x123] {
            assert_eq!(from(at, libc::SYS_mmap, map), Verdict::Allow);
            assert_eq!(from(at + 1, libc::SYS_mmap, map), Verdict::Trap);
            assert_eq!(from(at, libc::SYS_mmap, [FAR & !4095, 4096, 3, ANON | 0x10, usize::MAX, 0]), Verdict::Trap);
            assert_eq!(from(at, libc::SYS_mmap, [0xc0_0000_0000, 1 << 26, 3, ANON, usize::MAX, 0]), Verdict::Trap);
            assert_eq!(from(at, libc::SYS_exit_group, [0; 6]), Verdict::Trap);
        }
        assert_eq!(from(0xe3a, libc::SYS_exit_group, [0; 6]), Verdict::Allow);
        assert_eq!(from(0xe3a, libc::SYS_mmap, map), Verdict::Trap);
        assert_eq!(from(0xe3a, libc::SYS_writev, map), Verdict::Trap, "not from a place of this loader");
    }

    #[test]
    fn rules_of_single_calls() {
        assert_eq!(verdict(libc::SYS_brk, [0; 6]), Verdict::Allow, "asked before our library is initialised");
        assert_eq!(verdict(libc::SYS_brk, [0x5555_0000_0000, 0, 0, 0, 0, 0]), Verdict::Trap);
        let thread = (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SETTLS) as usize;
        assert_eq!(verdict(libc::SYS_clone, [thread, 0, 0, 0, 0, 0]), Verdict::Allow);
        for lacks in [libc::CLONE_VM, libc::CLONE_THREAD, libc::CLONE_SETTLS] {
            let flags = thread & !(lacks as usize) | libc::CLONE_VFORK as usize;
            assert_eq!(verdict(libc::SYS_clone, [flags, 0, 0, 0, 0, 0]), Verdict::Trap, "lacks {lacks:#x}");
        }
        assert_eq!(verdict(libc::SYS_vfork, [0; 6]), Verdict::Trap);
        assert_eq!(verdict(libc::SYS_clone, [libc::SIGCHLD as usize, 0, 0, 0, 0, 0]), Verdict::Trap);
        assert_eq!(verdict(libc::SYS_clone3, [0x7f00_0000_0000, 88, 0, 0, 0, 0]), Verdict::Missing);
        assert_eq!(verdict(libc::SYS_clone3, [PROBE as usize, 0, 0, 0, 0, 0]), Verdict::Probed);
        assert_eq!(verdict(libc::SYS_pkey_alloc, [0; 6]), Verdict::Missing);
        assert_eq!(verdict(libc::SYS_close, [3, FAR, FAR, 0, 0, 0]), Verdict::Allow, "it has one argument");
        assert_eq!(verdict(libc::SYS_close, [window::DESCRIPTORS as usize, 0, 0, 0, 0, 0]), Verdict::Trap);
        assert_eq!(verdict(libc::SYS_close, [window::DESCRIPTORS_END as usize, 0, 0, 0, 0, 0]), Verdict::Allow);
        assert_eq!(verdict(libc::SYS_rt_sigprocmask, [0, 0x7ffd_0000_0000, 0, 8, 0, 0]), Verdict::Trap);
        assert_eq!(verdict(libc::SYS_prctl, [libc::PR_SET_NAME as usize, 1, 0, 0, 0, 0]), Verdict::Allow);
        let limit = |resource: u32| verdict(libc::SYS_prlimit64, [0, resource as usize, 0, 0x7ffd_0000_0000, 0, 0]);
        assert_eq!((limit(libc::RLIMIT_AS), limit(libc::RLIMIT_NOFILE)), (Verdict::Trap, Verdict::Allow));
        assert_eq!(verdict(libc::SYS_setrlimit, [libc::RLIMIT_DATA as usize, 1, 0, 0, 0, 0]), Verdict::Trap);
        assert_eq!(verdict(libc::SYS_readv, [3, 0x7ffd_0000_0000, 2, 0, 0, 0]), Verdict::Trap);
        assert_eq!(verdict(libc::SYS_io_uring_enter, [3, 0, 0, 0, 0, 0]), Verdict::Trap, "buffers named elsewhere");
        assert_eq!(verdict(libc::SYS_io_submit, [0x7ffd_0000_0000, 1, 0x7ffd_0000_0000, 0, 0, 0]), Verdict::Trap);
        assert_eq!(verdict(SYS_IO_PGETEVENTS, [0x7ffd_0000_0000, 1, 1, 0x7ffd_0000_0000, 0, 0]), Verdict::Allow);
        assert_eq!(verdict(SYS_IO_PGETEVENTS, [0x7ffd_0000_0000, 1, 1, 0, 0, 0x7ffd_0000_0000]), Verdict::Trap);
    }

    #[test]
    fn a_program_filter_sees_forwarded_calls_but_not_ours() {
        let deny_all = [Instruction { code: RET_K, jump_true: 0, jump_false: 0, constant: RET_ERRNO | 1 }];
        let combined = exempt_own_calls(&deny_all);
        assert_eq!(run(&combined, 0, window::GATE_OWN + 2, [0; 6]), Verdict::Allow);
        assert_eq!(run(&combined, 0, window::GATE_FORWARD + 2, [0; 6]), Verdict::Missing);
        assert_eq!(run(&combined, 0, 0x7f00_0000_0000, [0; 6]), Verdict::Missing);
    }
}
