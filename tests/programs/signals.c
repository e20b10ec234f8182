// A program's own signal handlers: it gets the faults that are its own and none that are ours, with the right code and address;
// handlers touch far memory, run on far alternate stacks, jump out; masks and dispositions read back as they were set.
#include "probe.h"
#include <sys/time.h>
#include <ucontext.h>

static char *area;
static size_t bytes = 32 * MIB;
static volatile sig_atomic_t segv_count, bus_count, usr_count;
static char *volatile read_only;

static void on_segv(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)context;
    segv_count++;
    // Repairs the page, as garbage collectors do, and returns to the instruction.
    uintptr_t page = (uintptr_t)info->si_addr & ~(PAGE - 1);
    if (mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE)) _exit(80);
}

static void on_usr(int signal, siginfo_t *info, void *context) {
    (void)info; (void)context;
    // Touches far memory inside a handler.
    usr_count += signal == SIGUSR1 && ((uint64_t *)area)[usr_count * 100003 % (bytes / 8)] == mix(1 * 0x9e3779b97f4a7c15ull + usr_count * 100003 % (bytes / 8));
}

static void on_usr_far(int signal) {
    (void)signal;
    press(); // A handler may itself push everything out, its own alternate stack included.
    volatile char frame[40000];
    memset((char *)frame, 7, sizeof frame);
    usr_count += frame[12345];
}

static sigjmp_buf outside;
static void on_null(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)context;
    bus_count = info->si_addr == NULL ? 1 : 2;
    siglongjmp(outside, 1);
}

static void plain_handler(int signal) { (void)signal; }

int main(void) {
    area = anon(bytes);
    fill(area, bytes, 1);
    press();

    // Write barrier by protection fault: far pages that are read-only for the program.
    struct sigaction segv = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO};
    NEED(sigaction(SIGSEGV, &segv, NULL) == 0);
    read_only = anon(8 * MIB);
    fill(read_only, 8 * MIB, 2);
    NEED(mprotect(read_only, 8 * MIB, PROT_READ) == 0);
    press();
    say("reading: %zu wrong, %d faults", wrong(read_only, 8 * MIB, 2), (int)segv_count);
    press();
    for (size_t at = 0; at < 8 * MIB; at += PAGE) read_only[at] ^= 1;
    for (size_t at = 0; at < 8 * MIB; at += PAGE) read_only[at] ^= 1;
    say("write barrier: %d faults, %zu wrong", (int)segv_count, wrong(read_only, 8 * MIB, 2));

    struct sigaction null = {.sa_sigaction = on_null, .sa_flags = SA_SIGINFO};
    NEED(sigaction(SIGSEGV, &null, NULL) == 0);
    for (int i = 0; i < 1000; i++)
        if (sigsetjmp(outside, 1) == 0) *(volatile int *)NULL = i;
    say("a thousand jumps out of a null dereference: address %s", bus_count == 1 ? "right" : "wrong");

    // SIGBUS of its own: behind the end of a file.
    struct sigaction bus = {.sa_sigaction = on_null, .sa_flags = SA_SIGINFO};
    NEED(sigaction(SIGBUS, &bus, NULL) == 0);
    int fd = scratch_file();
    NEED(ftruncate(fd, PAGE) == 0);
    char *mapped = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEED(mapped != MAP_FAILED);
    mapped[0] = 1;
    bus_count = 0;
    if (sigsetjmp(outside, 1) == 0) { mapped[2 * PAGE] = 1; say("no signal behind the end"); }
    say("behind the end of a file: %s", bus_count ? "SIGBUS" : "nothing");
    say("far memory meanwhile: %zu wrong", wrong(area, bytes, 1));
    bus_count = 0;
    // Blocked and sent: it waits, once, until it is open again, and comes with its sender.
    sigset_t ours, opened;
    sigemptyset(&ours);
    sigaddset(&ours, SIGBUS);
    NEED(sigprocmask(SIG_BLOCK, &ours, &opened) == 0);
    raise(SIGBUS);
    raise(SIGBUS);
    say("blocked and sent: %s", bus_count ? "delivered" : "nothing");
    say("far memory meanwhile: %zu wrong", wrong(area, bytes, 1));
    if (sigsetjmp(outside, 1) == 0) { NEED(sigprocmask(SIG_SETMASK, &opened, NULL) == 0); say("opened: nothing"); }
    else say("opened: delivered");
    bus_count = 0;
    if (sigsetjmp(outside, 1) == 0) { NEED(sigprocmask(SIG_SETMASK, &opened, NULL) == 0); say("again: nothing"); }
    say("again: %s", bus_count ? "delivered" : "nothing");
    if (sigsetjmp(outside, 1) == 0) raise(SIGBUS);
    say("raised SIGBUS: %s", bus_count ? "handled" : "lost");
    bus_count = 0;
    if (sigsetjmp(outside, 1) == 0) kill(getpid(), SIGSEGV);
    say("sent SIGSEGV: %s", bus_count ? "handled" : "lost");

    // Dispositions read back.
    struct sigaction now;
    NEED(sigaction(SIGBUS, NULL, &now) == 0);
    say("SIGBUS reads back: handler %d, flags %s", now.sa_sigaction == on_null, now.sa_flags & SA_SIGINFO ? "SIGINFO" : "none");
    NEED(sigaction(SIGSYS, NULL, &now) == 0);
    say("SIGSYS reads back: %s", now.sa_handler == SIG_DFL ? "default" : "something");
    int numbers[] = {SIGSEGV, SIGBUS, SIGSYS, SIGUSR2, SIGCHLD};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        void (*old)(int) = signal(numbers[i], plain_handler);
        void (*older)(int) = signal(numbers[i], SIG_IGN);
        void (*oldest)(int) = signal(numbers[i], SIG_DFL);
        say("SIG%s: %s, %d, %d", sigabbrev_np(numbers[i]), old == SIG_DFL ? "default" : "handler", older == plain_handler,
            oldest == SIG_IGN);
        press();
    }
    // Ignoring or blocking what we use must not stop paging.
    signal(SIGBUS, SIG_IGN);
    signal(SIGSEGV, SIG_IGN);
    say("ignored: %zu wrong", wrong(area, bytes, 1));
    press();
    sigset_t all, before, seen;
    sigfillset(&all);
    NEED(sigprocmask(SIG_SETMASK, &all, &before) == 0);
    press();
    say("blocked: %zu wrong", wrong(area, bytes, 1));
    NEED(sigprocmask(SIG_BLOCK, NULL, &seen) == 0);
    int members = 0;
    for (int signal = 1; signal < 32; signal++) members += sigismember(&seen, signal);
    say("%d signals blocked", members);
    // Not SIGBUS or SIGSYS: no mask holds these two back while far memory needs them.
    kill(getpid(), SIGHUP);
    kill(getpid(), SIGUSR2);
    sigset_t pending;
    NEED(sigpending(&pending) == 0);
    say("pending: SIGUSR2 %d", sigismember(&pending, SIGUSR2));
    struct timespec none = {0, 0};
    for (int taken; (taken = sigtimedwait(&pending, NULL, &none)) > 0;) say("sigtimedwait takes SIG%s", sigabbrev_np(taken));
    say("then: %s", err(-1));
    signal(SIGBUS, SIG_DFL);
    signal(SIGSEGV, SIG_DFL);
    NEED(sigprocmask(SIG_SETMASK, &before, NULL) == 0);

    // Handlers that touch far memory, while the program does too.
    struct sigaction usr = {.sa_sigaction = on_usr, .sa_flags = SA_SIGINFO | SA_RESTART};
    NEED(sigaction(SIGUSR1, &usr, NULL) == 0);
    for (int i = 0; i < 300; i++) {
        if (i % 50 == 0) press();
        raise(SIGUSR1);
    }
    say("handlers on far memory: %d of 300", (int)usr_count);

    // An alternate stack that is far when the signal comes.
    stack_t stack = {.ss_sp = anon(MIB), .ss_size = MIB};
    NEED(sigaltstack(&stack, NULL) == 0);
    stack_t read_back;
    NEED(sigaltstack(NULL, &read_back) == 0);
    say("alternate stack reads back: %d %d %d", read_back.ss_sp == stack.ss_sp, read_back.ss_size == stack.ss_size, read_back.ss_flags);
    struct sigaction far = {.sa_handler = on_usr_far, .sa_flags = SA_ONSTACK};
    NEED(sigaction(SIGUSR2, &far, NULL) == 0);
    usr_count = 0;
    for (int i = 0; i < 5; i++) {
        press();
        raise(SIGUSR2);
    }
    say("handlers on a far stack: %d", (int)usr_count);

    // Stack overflow on a thread's guard page, handled on the alternate stack: a classic of runtimes.
    // (Here: a store below a page without access.)
    char *guard = anon(16 * PAGE);
    NEED(mprotect(guard, PAGE, PROT_NONE) == 0);
    NEED(sigaction(SIGSEGV, &(struct sigaction){.sa_sigaction = catch_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK}, NULL) == 0);
    press();
    TRY("guard page", guard, *(volatile char *)(guard + 100) = 1);

    // Default action of a true fault: death by SIGSEGV, seen by the parent.
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        press();
        *(volatile int *)8 = 1;
        _exit(0);
    }
    reap("true fault", child);
    child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        char *sealed = anon(MIB);
        NEED(mprotect(sealed, MIB, PROT_READ) == 0);
        sealed[5] = 1;
        _exit(0);
    }
    reap("write to read-only", child);
    child = fork();
    if (child == 0) { press(); abort(); }
    reap("abort", child);
    say("at the end: %zu wrong", wrong(area, bytes, 1));
    return 0;
}
