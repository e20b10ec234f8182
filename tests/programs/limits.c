// Limits on address space and data: read, set, met and inherited, over fork, vfork and exec.
#include "probe.h"
#include <sys/resource.h>
#include <spawn.h>

static void show(const char *what) {
    struct rlimit space, data;
    NEED(getrlimit(RLIMIT_AS, &space) == 0 && getrlimit(RLIMIT_DATA, &data) == 0);
    say_line("%s: address space %lld of %lld MiB, data %lld of %lld MiB", what, (long long)space.rlim_cur >> 20,
        (long long)space.rlim_max >> 20, (long long)data.rlim_cur >> 20, (long long)data.rlim_max >> 20);
}

static int limit(int resource, size_t soft) {
    struct rlimit both;
    NEED(getrlimit(resource, &both) == 0);
    both.rlim_cur = soft;
    return setrlimit(resource, &both);
}

static const char *maps(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return err(-1);
    munmap(at, bytes);
    return "ok";
}

static void meet(void) {
    say("2 GiB: %s", maps(2048 * MIB));
    say("100 MiB: %s", maps(100 * MIB));
    void *volatile big = malloc(2048 * MIB);
    say("malloc of 2 GiB: %s", big ? "given" : "refused");
    free(big);
    char *volatile small = malloc(64 * MIB);
    say("malloc of 64 MiB: %s", small ? "given" : "refused");
    if (!small) return;
    fill(small, 64 * MIB, 7);
    press();
    say("its memory: %zu wrong", wrong(small, 64 * MIB, 7));
    free(small);
}

static int shown(int hard) {
    show("executed");
    meet();
    return hard;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "shown") == 0) return shown(3);
    char *area = anon(32 * MIB);
    fill(area, 32 * MIB, 1);
    show("at the start");
    meet();
    say("set address space: %s", err(limit(RLIMIT_AS, 1024 * MIB)));
    show("address space");
    meet();
    char *grows = anon(100 * MIB);
    say("grown to 2 GiB: %s", err(mremap(grows, 100 * MIB, 2048 * MIB, MREMAP_MAYMOVE) == MAP_FAILED ? -1 : 0));
    say("grown to 200 MiB: %s", err((grows = mremap(grows, 100 * MIB, 200 * MIB, MREMAP_MAYMOVE)) == MAP_FAILED ? -1 : 0));
    NEED(munmap(grows, 200 * MIB) == 0);
    pid_t child = fork();
    if (child == 0) { show("forked"); meet(); _exit(4); }
    reap("forked", child);
    child = fork();
    if (child == 0) { execl("/proc/self/exe", "limits", "shown", NULL); _exit(9); }
    reap("executed", child);
    child = vfork();
    if (child == 0) {
        limit(RLIMIT_AS, 512 * MIB);
        execl("/proc/self/exe", "limits", "shown", NULL);
        _exit(9);
    }
    reap("executed with less", child);
    show("the parent of a vfork");
    say("above the hard limit: %s", err(setrlimit(RLIMIT_AS, &(struct rlimit){2, 1})));
    struct rlimit before;
    NEED(prlimit(0, RLIMIT_AS, &(struct rlimit){RLIM_INFINITY, RLIM_INFINITY}, &before) == 0);
    say("before: %lld MiB", (long long)before.rlim_cur >> 20);
    say("set data: %s", err(limit(RLIMIT_DATA, 1024 * MIB)));
    show("data");
    meet();
    say("a bad address: %ld", raw(SYS_prlimit64, 0, RLIMIT_DATA, 8, 0, 0, 0));
    say("hard limits too: %s", err(setrlimit(RLIMIT_AS, &(struct rlimit){900 * MIB, 950 * MIB})));
    child = fork();
    if (child == 0) { execl("/proc/self/exe", "limits", "shown", NULL); _exit(9); }
    reap("executed with hard limits", child);
    say("all along: %zu wrong", wrong(area, 32 * MIB, 1));
    return 0;
}
