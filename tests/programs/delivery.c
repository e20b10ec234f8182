// Where handlers of signals run, and with which mask: on the alternate stack that the program gave, near or far, or below its stack
// pointer, also if that stack is far; what `sigaltstack` and `sigaction` say meanwhile; handlers in handlers; handlers that jump away.
#include "probe.h"
#include <poll.h>
#include <ucontext.h>

enum { STACK = 256 * 1024 };
static char *given;
static volatile int count, on_given, named, depth, deepest;

static int is_on(const void *address, const char *stack) {
    return (const char *)address >= stack && (const char *)address < stack + STACK;
}
static uint64_t blocked_now(void) {
    sigset_t set;
    NEED(sigprocmask(SIG_BLOCK, NULL, &set) == 0);
    uint64_t mask = 0;
    for (int signal = 1; signal < 32; signal++) mask |= (uint64_t)(sigismember(&set, signal) == 1) << signal;
    return mask;
}
static void set(int signal, void (*handler)(int, siginfo_t *, void *), int flags, uint64_t mask) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = flags | SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    for (int member = 1; member < 32; member++) if (mask >> member & 1) sigaddset(&action.sa_mask, member);
    NEED(sigaction(signal, &action, NULL) == 0);
}

static void on_signal(int signal, siginfo_t *info, void *context) {
    (void)signal;
    char here[20000];
    memset(here, 1, sizeof here);
    ucontext_t *interrupted = context;
    count++;
    on_given += is_on(here, given);
    named += is_on(info, given) == is_on(here, given) && interrupted->uc_stack.ss_sp == given && interrupted->uc_stack.ss_size == STACK;
}

// Sees the stack as the kernel would say it, and cannot change it while it runs on it.
static void on_looking(int signal, siginfo_t *info, void *context) {
    (void)info;
    stack_t now, other = {.ss_sp = given + STACK, .ss_size = STACK};
    NEED(sigaltstack(NULL, &now) == 0);
    say("in SIG%s: flags %x, of mine %d", sigabbrev_np(signal), (unsigned)now.ss_flags, now.ss_sp == given);
    say("another: %s", err(sigaltstack(&other, NULL)));
    say("frame: flags %x, of mine %d", (unsigned)((ucontext_t *)context)->uc_stack.ss_flags, ((ucontext_t *)context)->uc_stack.ss_sp == given);
    say("blocked %llx, before %d", (unsigned long long)blocked_now(), sigismember(&((ucontext_t *)context)->uc_sigmask, SIGBUS));
}

static void on_nested(int signal, siginfo_t *info, void *context) {
    (void)info; (void)context;
    char here;
    on_given += is_on(&here, given);
    if (++depth > deepest) deepest = depth;
    if (depth < 5) raise(signal);
    press();
    depth--;
    count++;
}

static sigjmp_buf outside;
static void on_jump(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)info; (void)context;
    count++;
    siglongjmp(outside, 1);
}

static void on_change(int signal, siginfo_t *info, void *context) {
    // A handler may change what is returned to: registers, mask.
    (void)signal; (void)info;
    ucontext_t *interrupted = context;
    sigaddset(&interrupted->uc_sigmask, SIGWINCH);
    sigaddset(&interrupted->uc_sigmask, SIGBUS);
    count++;
}

static void on_other(int signal, siginfo_t *info, void *context) {
    (void)info; (void)context;
    say_line("SIG%s inside SIG%s", sigabbrev_np(SIGUSR2), depth ? "USR1" : "nothing");
    count += signal == SIGUSR2;
}
static void on_waiting(int signal, siginfo_t *info, void *context) {
    (void)info; (void)context; (void)signal;
    depth = 1;
    kill(getpid(), SIGUSR2); // Open while the interrupted call waits, blocked otherwise.
    count++;
    depth = 0;
}

static double volatile wheel[8];
static void on_float(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)info; (void)context;
    double a = 1.5, b = 2.5;
    for (int i = 0; i < 8; i++) wheel[i] = a = a * b - i;
    press();
    count++;
}

// A coroutine's stack: no alternate one is asked for, and it is far when the signal comes.
static ucontext_t home, coroutine;
static void on_far_stack(void) {
    for (int i = 0; i < 5; i++) {
        swapcontext(&coroutine, &home);
        raise(SIGURG);
    }
}

static char *thread_stacks[4];
static void on_thread_signal(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)info;
    char here;
    stack_t *mine = &((ucontext_t *)context)->uc_stack;
    if (mine->ss_flags & SS_DISABLE) atomic_fetch_add((_Atomic int *)&named, 1);
    else if (is_on(&here, mine->ss_sp)) atomic_fetch_add((_Atomic int *)&on_given, 1);
}
static void *thread(void *number) {
    // Its first signal comes before it has asked for anything: there is no alternate stack yet.
    pthread_kill(pthread_self(), SIGURG);
    stack_t mine = {.ss_sp = thread_stacks[(size_t)number], .ss_size = STACK};
    NEED(sigaltstack(&mine, NULL) == 0);
    for (int i = 0; i < 20; i++) pthread_kill(pthread_self(), SIGURG);
    return NULL;
}

int main(void) {
    static char near_stack[2 * STACK];
    char *stacks[] = {near_stack, anon(2 * STACK)};
    for (int far = 0; far < 2; far++) {
        given = stacks[far];
        stack_t stack = {.ss_sp = given, .ss_size = STACK}, old;
        NEED(sigaltstack(&stack, NULL) == 0);
        set(SIGURG, on_signal, SA_ONSTACK | SA_RESTART, 0);
        count = on_given = named = 0;
        for (int i = 0; i < 10; i++) { if (far && i % 3 == 0) press(); raise(SIGURG); }
        say("%d handlers, %d on the given stack, %d as named", count, on_given, named);
        set(SIGURG, on_signal, SA_RESTART, 0);
        count = on_given = named = 0;
        for (int i = 0; i < 10; i++) raise(SIGURG);
        say("without SA_ONSTACK: %d handlers, %d on the given stack", count, on_given);

        set(SIGUSR1, on_looking, SA_ONSTACK, 1ul << SIGUSR2 | 1ul << SIGBUS);
        raise(SIGUSR1);
        set(SIGUSR1, on_looking, 0, 0);
        raise(SIGUSR1);
        NEED(sigaltstack(&stack, NULL) == 0);
        set(SIGUSR1, on_looking, SA_ONSTACK | SA_NODEFER | SA_RESETHAND, 0);
        raise(SIGUSR1);
        struct sigaction now;
        NEED(sigaction(SIGUSR1, NULL, &now) == 0);
        say("afterwards: %s, blocked %llx", now.sa_handler == SIG_DFL ? "default" : "a handler", (unsigned long long)blocked_now());

        set(SIGUSR1, on_nested, SA_ONSTACK | SA_NODEFER, 0);
        count = on_given = deepest = 0;
        raise(SIGUSR1);
        say("nested: %d handlers, %d deep, %d on the given stack", count, deepest, on_given);
        set(SIGUSR1, on_jump, SA_ONSTACK, 0);
        count = 0;
        for (volatile int i = 0; i < 500; i++) if (sigsetjmp(outside, 1) == 0) raise(SIGUSR1);
        NEED(sigaltstack(NULL, &old) == 0);
        say("%d jumps out; flags %x, blocked %llx", count, (unsigned)old.ss_flags, (unsigned long long)blocked_now());

        // One that is given up while a handler runs on it.
        stack.ss_flags = 1u << 31;
        say("autodisarm: %s", err(sigaltstack(&stack, NULL)));
        NEED(sigaltstack(NULL, &old) == 0);
        say("reads back: flags %x", (unsigned)old.ss_flags);
        set(SIGUSR1, on_signal, SA_ONSTACK, 0);
        count = on_given = named = 0;
        raise(SIGUSR1);
        say("a handler there: %d", on_given);
        set(SIGUSR1, on_looking, SA_ONSTACK, 0);
        raise(SIGUSR1);
        NEED(sigaltstack(NULL, &old) == 0);
        say("afterwards of mine: %d, flags %x", old.ss_sp == given, (unsigned)old.ss_flags);
        stack.ss_flags = SS_DISABLE;
        NEED(sigaltstack(&stack, NULL) == 0);
        NEED(sigaltstack(NULL, &old) == 0);
        say("disabled: flags %x, size %zu", (unsigned)old.ss_flags, old.ss_size);
        stack_t small = {.ss_sp = given, .ss_size = 100}, strange = {.ss_sp = given, .ss_size = STACK, .ss_flags = 17};
        say("too small: %s", err(sigaltstack(&small, NULL)));
        say("strange: %s", err(sigaltstack(&strange, NULL)));
        NEED(raw(SYS_sigaltstack, 8, 0, 0, 0, 0, 0) == -EFAULT);
    }

    // The mask that a handler's frame says is in force afterwards, ours included.
    set(SIGUSR1, on_change, 0, 0);
    raise(SIGUSR1);
    say("after a handler that changed the mask: %llx", (unsigned long long)blocked_now());
    press();
    sigset_t none;
    sigemptyset(&none);
    NEED(sigprocmask(SIG_SETMASK, &none, NULL) == 0);
    struct sigaction read_back;
    set(SIGUSR2, on_other, SA_ONSTACK | SA_RESTART | SA_NOCLDSTOP, 1ul << SIGBUS | 1ul << SIGSYS | 1ul << SIGHUP);
    NEED(sigaction(SIGUSR2, NULL, &read_back) == 0);
    say("reads back: handler %d, flags %x, SIGBUS %d, SIGHUP %d, SIGINT %d", read_back.sa_sigaction == on_other,
        (unsigned)read_back.sa_flags, sigismember(&read_back.sa_mask, SIGBUS), sigismember(&read_back.sa_mask, SIGHUP),
        sigismember(&read_back.sa_mask, SIGINT));
    NEED(sigaction(SIGKILL, NULL, &read_back) == 0);
    say("of SIGKILL: %s", err(sigaction(SIGKILL, &read_back, NULL)));
    say("of signal 65: %s", raw(SYS_rt_sigaction, 65, 0, (long)&read_back, 8, 0, 0) == -EINVAL ? "refused" : "taken");

    // During a call that waits with a mask of its own, handlers run under that one.
    sigset_t usual, waiting;
    sigemptyset(&usual);
    sigaddset(&usual, SIGUSR1);
    sigaddset(&usual, SIGUSR2);
    sigemptyset(&waiting);
    NEED(sigprocmask(SIG_SETMASK, &usual, NULL) == 0);
    set(SIGUSR1, on_waiting, 0, 0);
    count = 0;
    raise(SIGUSR1);
    say("suspended: %s", err(sigsuspend(&waiting)));
    raise(SIGUSR1);
    struct timespec long_time = {60, 0};
    say("polled: %s", err(ppoll(NULL, 0, &long_time, &waiting)));
    say("%d handlers; blocked %llx", count, (unsigned long long)blocked_now());
    NEED(sigprocmask(SIG_SETMASK, &none, NULL) == 0);

    set(SIGUSR1, on_float, 0, 0);
    volatile double x = 1.0;
    double kept = x * 3.25;
    for (int i = 0; i < 3; i++) { raise(SIGUSR1); kept += x; }
    say("floating point: %.2f, %.2f", kept, wheel[7]);

    set(SIGURG, on_signal, SA_RESTART, 0);
    NEED(getcontext(&coroutine) == 0);
    coroutine.uc_stack.ss_sp = anon(STACK);
    coroutine.uc_stack.ss_size = STACK;
    makecontext(&coroutine, on_far_stack, 0);
    count = 0;
    for (int i = 0; i < 5; i++) { press(); NEED(swapcontext(&home, &coroutine) == 0); }
    say("on a far stack: %d handlers", count);

    set(SIGURG, on_thread_signal, SA_ONSTACK | SA_RESTART, 0);
    on_given = named = 0;
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) { thread_stacks[i] = anon(STACK); NEED(pthread_create(&threads[i], NULL, thread, (void *)i) == 0); }
    for (size_t i = 0; i < 4; i++) NEED(pthread_join(threads[i], NULL) == 0);
    say("threads: %d without a stack, %d on their own", named, on_given);

    // An alternate stack without access, or one that is full: the end.
    const char *kinds[] = {"without access", "full", "in a child"};
    for (int kind = 0; kind < 3; kind++) {
        pid_t child = fork();
        if (child == 0) {
            given = anon(STACK);
            stack_t stack = {.ss_sp = given, .ss_size = STACK};
            NEED(sigaltstack(&stack, NULL) == 0);
            set(SIGURG, on_signal, SA_ONSTACK, 0);
            set(SIGUSR1, on_nested, SA_ONSTACK | SA_NODEFER, 0);
            if (kind == 0) NEED(mprotect(given, STACK, PROT_READ) == 0);
            depth = -1000000;
            press();
            on_given = 0;
            raise(kind == 1 ? SIGUSR1 : SIGURG);
            _exit(on_given);
        }
        reap(kinds[kind], child);
    }
    return 0;
}
