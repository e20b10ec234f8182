// Threads whose thread pointer is not the C library's, as those of Go without it: the main thread gives itself another one, others
// begin with one of their own, near, far or in the middle of nowhere, or set it themselves. Far memory, system calls, signals and
// forks are the same for them.
#include "probe.h"
#include <asm/prctl.h>
#include <linux/futex.h>
#include <sched.h>

// Code that runs with such a pointer uses no storage of its thread: no errno, no canary, no library.
#define BARE __attribute__((no_stack_protector, noinline))
enum { SIZE = 48 * MIB, STACK = 128 * 1024 };

static char storage[8192] __attribute__((aligned(64)));
static char *area, *ballast;
static _Atomic uint32_t ended, handled;
static size_t bad[8];

BARE static void bare_press(uint64_t seed) {
    for (size_t i = 0; i < 24 * MIB; i += PAGE) *(volatile uint64_t *)(ballast + i) = seed + i;
}
BARE static size_t bare_wrong(uint64_t seed, size_t from, size_t to) {
    size_t off = 0;
    for (size_t i = from / 8; i < to / 8; i++) off += ((uint64_t *)area)[i] != mix(seed * 0x9e3779b97f4a7c15ull + i);
    return off;
}
BARE static void on_signal(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)info; (void)context;
    bare_press(3);
    handled += bare_wrong(1, 5 * MIB, 5 * MIB + PAGE) == 0;
}
BARE static void work(size_t number) {
    bare_press(number);
    bad[number] = bare_wrong(1, 0, SIZE / 4);
    uint64_t mask = 0;
    raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, 0, 8, 0, 0);
    for (int i = 0; i < 3; i++) {
        bare_press(i);
        raw(SYS_tgkill, raw(SYS_getpid, 0, 0, 0, 0, 0, 0), raw(SYS_gettid, 0, 0, 0, 0, 0, 0), SIGURG, 0, 0, 0);
    }
    struct timespec now;
    bad[number] += raw(SYS_clock_gettime, CLOCK_REALTIME, (long)&now, 0, 0, 0, 0) != 0;
    // Far buffers of system calls.
    bare_press(number);
    int pipes[2];
    bad[number] += raw(SYS_pipe2, (long)pipes, 0, 0, 0, 0, 0) != 0;
    bad[number] += raw(SYS_write, pipes[1], (long)(area + 7 * PAGE), 4096, 0, 0, 0) != 4096;
    bad[number] += raw(SYS_read, pipes[0], (long)(area + SIZE - (number + 1) * PAGE), 4096, 0, 0, 0) != 4096;
    raw(SYS_close, pipes[0], 0, 0, 0, 0, 0);
    raw(SYS_close, pipes[1], 0, 0, 0, 0, 0);
}

BARE static int thread(void *argument) {
    size_t number = (size_t)argument;
    // As Go's threads do.
    if (number == 3) raw(SYS_arch_prctl, ARCH_SET_FS, (long)(area + SIZE / 2), 0, 0, 0, 0);
    uint64_t *before = 0;
    raw(SYS_arch_prctl, ARCH_GET_FS, (long)&before, 0, 0, 0, 0);
    work(number);
    uint64_t *after = 0;
    raw(SYS_arch_prctl, ARCH_GET_FS, (long)&after, 0, 0, 0, 0);
    bad[number] += before != after;
    atomic_fetch_add(&ended, 1);
    raw(SYS_exit, 0, 0, 0, 0, 0, 0);
    return 0;
}

BARE static long begin(char *stack, size_t number, int settls, void *pointer) {
    long flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | (settls ? CLONE_SETTLS : 0);
    // The new thread begins at the function's address, on a stack of its own.
    void **top = (void **)(stack + STACK - 64);
    top[0] = (void *)number;
    long result;
    register void *r8 __asm__("r8") = pointer;
    register long r10 __asm__("r10") = 0;
    __asm__ volatile("syscall\n\ttest %%rax, %%rax\n\tjnz 1f\n\tpop %%rdi\n\tcall *%[thread]\n\t1:"
                     : "=a"(result)
                     : "a"(SYS_clone), "D"(flags), "S"(top), "d"(0L), "r"(r8), "r"(r10), [thread] "r"(thread)
                     : "rcx", "r11", "memory");
    return result;
}

BARE static int other(void) {
    size_t all = 0;
    raw(SYS_arch_prctl, ARCH_SET_FS, (long)(storage + 4096), 0, 0, 0, 0);
    bare_press(9);
    all += bare_wrong(1, 0, SIZE / 2);
    work(0);
    static char near_stack[STACK] __attribute__((aligned(64)));
    char *stacks = (char *)raw(SYS_mmap, 0, 4 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    // Storage of its own: near, far, nowhere; none at first, on a near and on a far stack.
    uint32_t made = 0;
    made += begin(near_stack, 1, 1, storage + 6000) > 0;
    while (ended < 1) raw(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
    made += begin(stacks, 2, 1, area + SIZE / 2 + MIB) > 0;
    made += begin(stacks + STACK, 3, 0, 0) > 0;
    made += begin(stacks + 2 * STACK, 4, 1, 0) > 0;
    made += begin(stacks + 3 * STACK, 5, 0, 0) > 0;
    while (ended < 5) { bare_press(ended); raw(SYS_sched_yield, 0, 0, 0, 0, 0, 0); }
    long child = raw(SYS_fork, 0, 0, 0, 0, 0, 0);
    if (child == 0) {
        bare_press(11);
        raw(SYS_exit_group, bare_wrong(1, 0, SIZE / 2) == 0 ? 7 : 8, 0, 0, 0, 0, 0);
    }
    int status = 0;
    raw(SYS_wait4, child, (long)&status, 0, 0, 0, 0);
    return (int)(all + (made != 5) + (status != 7 << 8));
}

int main(void) {
    area = anon(SIZE);
    fill(area, SIZE, 1);
    ballast = anon(24 * MIB);
    stack_t stack = {.ss_sp = anon(STACK), .ss_size = STACK};
    NEED(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK};
    NEED(sigaction(SIGURG, &action, NULL) == 0);
    uint64_t *mine = NULL;
    NEED(raw(SYS_arch_prctl, ARCH_GET_FS, (long)&mine, 0, 0, 0, 0) == 0);
    int off = other();
    raw(SYS_arch_prctl, ARCH_SET_FS, (long)mine, 0, 0, 0, 0);
    say("other thread pointers: %d, handlers %u, threads %u", off, handled, ended);
    for (int i = 0; i < 6; i++) say("thread %d: %zu", i, bad[i]);
    say("storage: %zu not zero", nonzero(storage, sizeof storage));
    say("far memory: %zu wrong", wrong(area, SIZE / 2, 1));
    return 0;
}
