// Children that run in their parent's memory: vfork, posix_spawn, clone with CLONE_VM. What they write to far memory must not be
// lost while threads of the parent make pages leave, and what they change of their own (masks, stacks) must stay theirs.
#include "probe.h"
#include <sched.h>
#include <spawn.h>

extern char **environ;

enum { PAGES = 12288, RING = 2048, STACK = 64 << 10 };
static uint64_t *area;
static uint32_t written[PAGES]; // What the last write of each page was. Near: it is no mapping of its own.
static uint32_t ring[RING];
static uint64_t state = 88172645463325252ull;
static atomic_int stop, running;

static uint64_t next(void) {
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return state;
}

static volatile uint64_t *word(uint32_t page) { return area + page * (PAGE / 8) + 17; }

// Reads a page, which brings it near unchanged, and writes one that came some time ago, which may be leaving just now.
static void borrow(int rounds) {
    for (int i = 0; i < rounds; i++) {
        uint32_t page = next() % PAGES;
        (void)*word(page);
        ring[i % RING] = page;
        uint32_t old = ring[next() % RING];
        *word(old) = ++written[old];
    }
}

static int borrower(void *rounds) {
    borrow((int)(intptr_t)rounds);
    return 7;
}

// Only reads: pages come and leave, and no fault of this process tells that somebody else has written one.
static void *reader(void *seed) {
    uint64_t x = (uintptr_t)seed * 0x9e3779b97f4a7c15ull + 1, seen = 0;
    atomic_fetch_add(&running, 1);
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        x ^= x << 13; x ^= x >> 7; x ^= x << 17;
        seen += *word(x % PAGES);
    }
    return (void *)(uintptr_t)(seen == 1);
}

static size_t lost(void) {
    size_t count = 0;
    for (uint32_t page = 0; page < PAGES; page++) count += *word(page) != written[page];
    return count;
}

__attribute__((noinline)) static pid_t forked_away(int rounds) {
    pid_t child = vfork();
    if (child == 0) {
        borrow(rounds);
        _exit(3);
    }
    return child;
}

static int changes(void *unused) { // What a careful spawner does in its child, and more.
    (void)unused;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    stack_t stack = {.ss_sp = area, .ss_size = 65536};
    sigaltstack(&stack, NULL);
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigaction(SIGBUS, &ignore, NULL);
    return 5;
}

static void *ends(void *count) { return count; }

static int wakes[2];
static _Atomic(uintptr_t) storage;
static void *waits(void *unused) {
    char byte;
    atomic_store(&storage, (uintptr_t)pthread_self());
    NEED(read(wakes[0], &byte, 1) == 1);
    return unused;
}

static int is_near(uintptr_t address) {
    uint64_t entry;
    int pages = open("/proc/self/pagemap", O_RDONLY);
    NEED(pages >= 0 && pread(pages, &entry, 8, address / PAGE * 8) == 8);
    close(pages);
    return entry >> 63;
}

static atomic_int bare;
static char *bare_area;
// Without thread-local storage of its own: no libc here.
static int deep(void *bytes) {
    volatile char *frame = __builtin_alloca((size_t)bytes);
    size_t bad = 0;
    for (size_t i = 0; i < (size_t)bytes; i += PAGE) frame[i] = (char)(i >> 12);
    for (size_t i = 0; i < (size_t)bytes; i += PAGE) bad += frame[i] != (char)(i >> 12);
    atomic_store(&bare, bad ? 2 : 1);
    raw(SYS_exit, 0, 0, 0, 0, 0, 0);
    return 0;
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 40000;
    area = anon(PAGES * PAGE);
    for (uint32_t page = 0; page < PAGES; page++) {
        fill(area + page * (PAGE / 8), PAGE, page);
        *word(page) = 0;
    }
    pthread_t readers[2];
    for (uintptr_t i = 0; i < 2; i++) NEED(pthread_create(&readers[i], NULL, reader, (void *)(i + 1)) == 0);
    while (atomic_load(&running) < 2) sched_yield();

    reap("vfork", forked_away(rounds));
    char *stack = anon(STACK); // Far, as a program's own stacks are.
    reap("CLONE_VM and CLONE_VFORK", clone(borrower, stack + STACK, CLONE_VM | CLONE_VFORK | SIGCHLD, (void *)(intptr_t)rounds));
    for (int i = 0; i < 20; i++) {
        char *words[] = {"true", NULL};
        pid_t child;
        NEED(posix_spawnp(&child, "true", NULL, NULL, words, environ) == 0);
        borrow(rounds / 100);
        int status;
        NEED(waitpid(child, &status, 0) == child && status == 0);
    }
    pid_t child;
    char *words[] = {"no such program", NULL};
    say("posix_spawn says why: %d", posix_spawnp(&child, words[0], NULL, NULL, words, environ) == ENOENT);
    say("one at a time: %zu lost", lost());
    sigset_t before, after;
    stack_t stack_before, stack_after;
    struct sigaction action;
    sigprocmask(SIG_SETMASK, NULL, &before);
    sigaltstack(NULL, &stack_before);
    reap("one that changes its own", clone(changes, stack + STACK, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL));
    sigprocmask(SIG_SETMASK, NULL, &after);
    sigaltstack(NULL, &stack_after);
    sigaction(SIGBUS, NULL, &action);
    say("mask as it was: %d", memcmp(&before, &after, 8) == 0);
    say("stack as it was: %d", stack_before.ss_sp == stack_after.ss_sp && stack_before.ss_flags == stack_after.ss_flags);
    say("action as it was: %d", action.sa_handler == SIG_DFL);

    child = clone(borrower, stack + STACK, CLONE_VM | SIGCHLD, (void *)(intptr_t)rounds);
    NEED(child > 0);
    reap("CLONE_VM", child);
    child = clone(borrower, stack + STACK, CLONE_VM | CLONE_FILES | SIGCHLD, (void *)(intptr_t)rounds);
    NEED(child > 0);
    reap("CLONE_VM and CLONE_FILES", child);
    say("at the same time: %zu lost", lost());

    // Threads one after the other on one far stack, more than a page can be held at once, and a new stack each.
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    NEED(pthread_attr_setstack(&attributes, stack, STACK) == 0);
    uintptr_t ended = 0;
    for (uintptr_t i = 0; i < 3000; i++) {
        char *own = i % 2 ? anon(STACK) : stack;
        NEED(pthread_attr_setstack(&attributes, own, STACK) == 0);
        pthread_t thread;
        void *result;
        NEED(pthread_create(&thread, &attributes, ends, (void *)i) == 0);
        NEED(pthread_join(thread, &result) == 0);
        ended += result == (void *)i;
        if (own != stack && i % 3 == 0) munmap(own, STACK);
    }
    say("threads on far stacks: %zu", (size_t)ended);

    // The kernel writes to the storage of a thread whenever it has interrupted it: then it must be there.
    pthread_t waiter;
    NEED(pipe(wakes) == 0 && pthread_attr_setstack(&attributes, stack, STACK) == 0);
    NEED(pthread_create(&waiter, &attributes, waits, NULL) == 0);
    while (!atomic_load(&storage)) sched_yield();
    press();
    say("storage of a thread that waits is near: %d", is_near(atomic_load(&storage)));
    NEED(write(wakes[1], "", 1) == 1 && pthread_join(waiter, NULL) == 0);
    say("among them: %zu lost", lost());

    // A thread that shares its parent's thread-local storage, deep in a far stack before its first system call.
    bare_area = anon(8 * MIB);
    press();
    int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
    NEED(clone(deep, bare_area + 8 * MIB, flags, (void *)(6 * MIB)) > 0);
    while (!atomic_load(&bare)) sched_yield();
    say("deep in a far stack: %d", atomic_load(&bare));

    // fork, from a process whose other threads hold far memory.
    child = fork();
    if (child == 0) {
        size_t bad = 0;
        for (uint32_t page = 0; page < PAGES; page++) bad += *word(page) != written[page];
        press();
        _exit(bad != 0);
    }
    reap("fork", child);
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++) pthread_join(readers[i], NULL);
    say("in the end: %zu lost", lost());
    return 0;
}
