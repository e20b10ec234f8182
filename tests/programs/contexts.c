// Programs that run on stacks of their own making: coroutines by ucontext, by sigaltstack and by hand, on far memory; longjmp across
// them; raw clone of a thread whose stack is far.
#include "probe.h"
#include <sched.h>
#include <ucontext.h>

enum { COROUTINES = 300 };
static ucontext_t home, contexts[COROUTINES];
static uint64_t totals[COROUTINES];

static void coroutine(int me) {
    volatile uint64_t frame[4000];
    for (int i = 0; i < 4000; i++) frame[i] = mix(me * 4000 + i);
    for (int round = 0; round < 5; round++) {
        swapcontext(&contexts[me], &home);
        for (int i = round; i < 4000; i += 5) totals[me] += frame[i] == mix(me * 4000 + i);
    }
    swapcontext(&contexts[me], &home);
}

static _Atomic uint32_t finished;
static uint64_t cloned_result;
static int deep_frame(void);
static int cloned(void *unused) {
    (void)unused;
    // As a threading library does it: the mask first. A deep far stack before any system call is a known limit.
    uint64_t mask = 0;
    raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, 0, 8, 0, 0);
    return deep_frame();
}
static __attribute__((noinline)) int deep_frame(void) {
    volatile char frame[3 * 1024 * 1024];
    for (size_t i = 0; i < sizeof frame; i += 100) frame[i] = (char)i;
    uint64_t total = 0;
    for (size_t i = 0; i < sizeof frame; i += 100) total += (unsigned char)frame[i];
    cloned_result = total;
    atomic_store(&finished, 1);
    raw(SYS_exit, 0, 0, 0, 0, 0, 0);
    return 0;
}

static jmp_buf deep;
static void dive(volatile int depth) {
    volatile char frame[8000];
    memset((char *)frame, 7, sizeof frame);
    if (depth == 0) longjmp(deep, 1);
    dive(depth - 1);
    frame[0]++;
}

int main(void) {
    for (int i = 0; i < COROUTINES; i++) {
        NEED(getcontext(&contexts[i]) == 0);
        contexts[i].uc_stack.ss_sp = anon(256 * 1024);
        contexts[i].uc_stack.ss_size = 256 * 1024;
        makecontext(&contexts[i], (void (*)(void))coroutine, 1, i);
    }
    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < COROUTINES; i++) NEED(swapcontext(&home, &contexts[i]) == 0);
        press();
    }
    uint64_t total = 0;
    for (volatile int i = 0; i < COROUTINES; i++) total += totals[i];
    say("coroutines: %llu", (unsigned long long)total);
    for (volatile int i = 0; i < 20; i++) {
        if (i % 5 == 0) press();
        if (setjmp(deep) == 0) dive(500);
    }
    say("long jumps done");
    char *stack = anon(4 * MIB);
    fill(stack, 4 * MIB, 1);
    press();
    long thread = clone(cloned, stack + 4 * MIB, CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM, NULL);
    say("clone: %s", err(thread));
    while (!atomic_load(&finished)) { press(); sched_yield(); }
    say("cloned thread: %llu", (unsigned long long)cloned_result);
    // A child that shares memory but is no thread, with its own stack: what vfork-like libraries do.
    atomic_store(&finished, 0);
    press();
    long child = clone(cloned, stack + 4 * MIB, CLONE_VM | SIGCHLD, NULL);
    say("clone with CLONE_VM: %s", err(child));
    reap("it", child);
    say("its writes are ours: %u", atomic_load(&finished));
    return 0;
}
