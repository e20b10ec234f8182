// What every probe shares: a deterministic transcript on stdout, patterns that can be checked, and pressure that makes
// older memory leave for far memory when the near budget is 16 MiB.
//
// A probe prints only what must be the same with and without far memory: never an address, a process id, a time.
#ifndef PROBE_H
#define PROBE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define MIB ((size_t)1 << 20)

__attribute__((format(printf, 1, 2))) static inline void say_line(const char *format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length] = '\n';
    // One write per line: transcripts of forked children do not interleave inside a line, and nothing is buffered twice.
    if (write(1, line, length + 1) != length + 1) _exit(70);
}

#define DIE(...) do { say_line(__VA_ARGS__); _exit(71); } while (0)
#define NEED(condition) do { if (!(condition)) DIE("line %d: %s: %s", __LINE__, #condition, strerror(errno)); } while (0)

// say(format, a, b, …): C leaves the order of arguments open, but most of ours act: left to right, please.
#define SAY_0(f) say_line(f)
#define SAY_1(f, a) do { __auto_type a_ = (a); say_line(f, a_); } while (0)
#define SAY_2(f, a, b) do { __auto_type a_ = (a); __auto_type b_ = (b); say_line(f, a_, b_); } while (0)
#define SAY_3(f, a, b, c) do { __auto_type a_ = (a); __auto_type b_ = (b); __auto_type c_ = (c); say_line(f, a_, b_, c_); } while (0)
#define SAY_4(f, a, b, c, d)                                                                                      \
    do {                                                                                                          \
        __auto_type a_ = (a); __auto_type b_ = (b); __auto_type c_ = (c); __auto_type d_ = (d);                   \
        say_line(f, a_, b_, c_, d_);                                                                              \
    } while (0)
#define SAY_5(f, a, b, c, d, e)                                                                                   \
    do {                                                                                                          \
        __auto_type a_ = (a); __auto_type b_ = (b); __auto_type c_ = (c); __auto_type d_ = (d);                   \
        __auto_type e_ = (e);                                                                                     \
        say_line(f, a_, b_, c_, d_, e_);                                                                          \
    } while (0)
#define SAY_PICK(f, a, b, c, d, e, name, ...) name
#define say(...) SAY_PICK(__VA_ARGS__, SAY_5, SAY_4, SAY_3, SAY_2, SAY_1, SAY_0, 0)(__VA_ARGS__)

// A name, because numbers of errors read badly.
static inline const char *err(long result) { return result == -1 ? strerrorname_np(errno) : "ok"; }

static inline uint64_t mix(uint64_t x) {
    x ^= x >> 30; x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27; x *= 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Fills with a pattern that depends on the seed and on the place, so that a page in a wrong place shows.
static inline void fill(void *start, size_t bytes, uint64_t seed) {
    uint64_t *words = start;
    for (size_t i = 0; i < bytes / 8; i++) words[i] = mix(seed * 0x9e3779b97f4a7c15ull + i);
}

// Number of words that differ from the pattern.
static inline size_t wrong(const void *start, size_t bytes, uint64_t seed) {
    const uint64_t *words = start;
    size_t count = 0;
    for (size_t i = 0; i < bytes / 8; i++) count += words[i] != mix(seed * 0x9e3779b97f4a7c15ull + i);
    return count;
}

static inline size_t nonzero(const void *start, size_t bytes) {
    const uint64_t *words = start;
    size_t count = 0;
    for (size_t i = 0; i < bytes / 8; i++) count += words[i] != 0;
    return count;
}

static inline uint64_t sum(const void *start, size_t bytes) {
    const unsigned char *byte = start;
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ byte[i]) * 0x100000001b3ull;
    return hash;
}

static inline void *anon(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) DIE("mmap of %zu bytes: %s", bytes, strerror(errno));
    return at;
}

// Writes 20 MiB and checks a part of it: with 16 MiB near, whatever was touched before is far afterwards, or nearly all of it.
static inline void press(void) {
    enum { PAGES = 20 * 256 };
    static char *ballast;
    static uint64_t round;
    if (!ballast) ballast = anon(PAGES * PAGE);
    round++;
    for (size_t i = 0; i < PAGES; i++) fill(ballast + i * PAGE, PAGE, round * PAGES + i);
    for (size_t i = round % 16; i < PAGES; i += 16)
        if (wrong(ballast + i * PAGE, PAGE, round * PAGES + i)) DIE("ballast is wrong in round %llu", (unsigned long long)round);
}

// Runs `action` and says which signal it raised, with the code and the offset of si_addr from `base`.
static __thread sigjmp_buf caught_at;
static __thread volatile sig_atomic_t caught_code, expected;
static __thread void *volatile caught_address;
static inline void catch_fault(int signal, siginfo_t *info, void *context) {
    (void)context;
    if (!expected) DIE("a fault nobody expected: SIG%s", sigabbrev_np(signal));
    expected = 0;
    caught_code = info->si_code;
    caught_address = info->si_addr;
    siglongjmp(caught_at, signal);
}
static inline void catch_faults(void) {
    struct sigaction action = {.sa_sigaction = catch_fault, .sa_flags = SA_SIGINFO};
    NEED(sigaction(SIGSEGV, &action, NULL) == 0);
    NEED(sigaction(SIGBUS, &action, NULL) == 0);
}
#define TRY(what, base, ...)                                                                                      \
    do {                                                                                                          \
        int signal_ = sigsetjmp(caught_at, 1);                                                                    \
        if (signal_ == 0) {                                                                                       \
            expected = 1;                                                                                         \
            __VA_ARGS__;                                                                                          \
            expected = 0;                                                                                         \
            say_line("%s: no fault", what);                                                                            \
        } else {                                                                                                  \
            say_line("%s: SIG%s code %d at +%ld", what, sigabbrev_np(signal_), (int)caught_code,                       \
                (long)((char *)caught_address - (char *)(base)));                                                 \
        }                                                                                                         \
    } while (0)

// Waits for a child and says how it ended.
static inline void reap(const char *what, pid_t child) {
    int status = 0;
    pid_t got;
    do got = waitpid(child, &status, 0); while (got == -1 && errno == EINTR);
    NEED(got == child);
    if (WIFEXITED(status)) say("%s: exit %d", what, WEXITSTATUS(status));
    else say("%s: signal SIG%s", what, sigabbrev_np(WTERMSIG(status)));
}

// A system call by its own instruction, as programs without libc make it.
static inline long raw(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

// A file of ours in the current directory, unlinked at once.
static inline int scratch_file(void) {
    char name[] = "./probe-XXXXXX";
    int fd = mkstemp(name);
    NEED(fd >= 0);
    NEED(unlink(name) == 0);
    return fd;
}
#endif
