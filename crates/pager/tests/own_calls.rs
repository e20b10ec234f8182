//! Guards against system calls of our own that come to our own handler and wait there for what their own thread holds: a program
//! that hangs for ever in `fork`.
//!
//! Each case is this program once more, in a job of its own: it becomes a program with far memory as the preload library makes one, and then
//! does what a library that we use might do. Not under the usual test harness, whose threads would be the program's.
#![allow(clippy::disallowed_methods, reason = "what starts and watches the cases runs outside of programs")]

use farfield_pager::config::{Capture, ENV_CONTROL};
use farfield_pager::control::{FaultMode, exit};
use farfield_pager::inside::own_code::OwnCode;
use farfield_pager::inside::runtime::RUNTIME;
use farfield_pager::inside::{heap::PreloadAllocator, start};
use farfield_pager::runner::{Settings, create_control};
use farfield_pager::window;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// As in the preload library.
#[global_allocator]
static HEAP: PreloadAllocator = PreloadAllocator;

/// Far longer than any case takes, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);

/// A case: its name, what the program does, and how it ends.
type Case = (&'static str, fn(), i32);

const CASES: &[Case] = &[
    ("a_call_of_the_program_is_guarded", of_the_program, 0),
    ("a_call_of_ours_beside_the_gate_takes_no_lock", of_ours, 0),
    ("handlers_of_the_program_that_run_in_the_middle_of_an_exec_are_its_own", in_exec, 0),
    ("a_panic_of_ours_ends_the_program_at_once", panic_of_ours, exit::INTERNAL),
    #[cfg(debug_assertions)]
    ("a_call_of_ours_beside_the_gate_is_noticed_in_debug_builds", noticed, exit::INTERNAL),
];

unsafe extern "C" {
    static environ: *const *const libc::c_char;
}

/// Wakes nobody, as a lock of the standard library does it when it is given back, while registers that the call does not use still have
/// what somebody left there: here, an address of far-capable memory.
fn wake_with_stale_registers() -> isize {
    let word = AtomicU32::new(0);
    let result: isize;
    // SAFETY: a wake-up looks at the address of the word only.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_futex as isize => result,
            in("rdi") word.as_ptr(),
            in("rsi") libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            in("rdx") 1usize,
            in("r10") window::BASE,
            in("r8") window::BASE,
            in("r9") window::BASE,
            out("rcx") _,
            out("r11") _,
        );
    }
    result
}

fn trapped() -> u64 {
    RUNTIME.counters().own_calls_trapped.load(Ordering::Relaxed)
}

fn of_the_program() {
    assert_eq!((wake_with_stale_registers(), trapped()), (0, 0));
    let guarded = RUNTIME.counters().syscalls_guarded.load(Ordering::Relaxed);
    // (No page lies there: nothing is held.)
    assert_eq!(guarded, 0);
}

fn of_ours() {
    RUNTIME.is_lenient.store(true, Ordering::Relaxed);
    // As in the handler of `fork`, between its first lock and its last one.
    let _own = OwnCode::enter();
    let end = RUNTIME.break_end.lock();
    let space = RUNTIME.space.lock();
    assert_eq!((wake_with_stale_registers(), trapped()), (0, 1));
    {
        // A handler inside of another one.
        let _own = OwnCode::enter();
        assert_eq!((wake_with_stale_registers(), trapped()), (0, 2));
    }
    assert_eq!((wake_with_stale_registers(), trapped()), (0, 3));
    drop((space, end));
}

/// How often the handler below ran, and how often it ran inside a handler of ours.
static TICKS: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];

extern "C" fn tick(_: libc::c_int) {
    let here = 0u8;
    let alternate = farfield_pager::inside::thread::current().expect("a record");
    TICKS[0].fetch_add(1, Ordering::Relaxed);
    TICKS[1].fetch_add(alternate.on_alternate_stack(&raw const here as usize).into(), Ordering::Relaxed);
    // A call that is only right if it is served by us.
    // SAFETY: new memory.
    let address = unsafe {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let address = libc::mmap(core::ptr::null_mut(), 1 << 20, prot, flags, -1, 0) as usize;
        libc::munmap(address as *mut libc::c_void, 1 << 20);
        address
    };
    assert!(window::contains(address), "{address:#x}");
}

fn in_exec() {
    let every = libc::timeval { tv_sec: 0, tv_usec: 300 };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    let words = [c"/no/such/program".as_ptr(), core::ptr::null()];
    // SAFETY: the handler makes system calls only; the words end with NULL.
    unsafe {
        assert_ne!(libc::signal(libc::SIGALRM, tick as *const () as usize), libc::SIG_ERR);
        assert_eq!(libc::setitimer(libc::ITIMER_REAL, &raw const timer, core::ptr::null_mut()), 0);
        while TICKS[1].load(Ordering::Relaxed) < 20 {
            assert_eq!(libc::execve(words[0], words.as_ptr(), environ.cast()), -1);
        }
    }
    assert_eq!(trapped(), 0);
}

fn panic_of_ours() {
    let _own = OwnCode::enter();
    panic!("of ours");
}

#[cfg(debug_assertions)]
fn noticed() {
    let _own = OwnCode::enter();
    wake_with_stale_registers();
}

/// The case, in a program with far memory.
fn be(name: &str) -> ! {
    // SAFETY: the environment of this process, which has one thread. A program that is executed would be given the library: any file will do.
    unsafe {
        std::env::set_var("LD_PRELOAD", std::env::current_exe().expect("this program"));
        start::start(environ);
    }
    let (_, case, _) = CASES.iter().find(|case| case.0 == name).expect("a case");
    case();
    farfield_os::process::exit_group(0)
}

/// How it ended; `None` if it did not.
fn wait(child: &mut Child) -> Option<i32> {
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return Some(status.code().unwrap_or(-1));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [first, name] = &words[..]
        && first == "be"
    {
        be(name);
    }
    let chosen = |name: &str| {
        let mut words = words.iter().filter(|word| !word.starts_with('-')).peekable();
        words.peek().is_none() || words.any(|word| name.contains(word.as_str()))
    };
    let mut passed = 0;
    for (name, _, code) in CASES.iter().filter(|case| chosen(case.0)) {
        let settings = Settings {
            near_limit_bytes: 1 << 30,
            mode: FaultMode::Signal,
            huge_pages: false,
            capture: Capture::Everything,
            urls: vec!["ram:".into()],
            token: vec![],
        };
        let control = create_control(&settings).expect("a control block");
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["be", name])
            .env(ENV_CONTROL, control.path())
            .spawn()
            .expect("it starts");
        let ended = wait(&mut child);
        assert_eq!(ended, Some(*code), "{name}: {:?}", control.failure());
        println!("test {name} ... ok");
        passed += 1;
    }
    println!("test result: ok. {passed} passed; 0 failed");
}
