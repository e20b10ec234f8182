// fork with far pages: parent and child diverge, each sees its own writes and only its own; shared memory stays shared.
#include "probe.h"
#include <sched.h>

static char *area;
static size_t bytes = 32 * MIB; // or as many MiB as the first argument says

// Each generation checks what it inherited, then makes it its own.
static void generations(void) {
    for (int depth = 0;; depth++) {
        say("depth %d: inherited %zu wrong", depth, wrong(area, bytes, depth));
        fill(area, bytes, depth + 1);
        press();
        if (depth < 2) {
            pid_t child = fork();
            NEED(child >= 0);
            if (child == 0) continue;
            reap("grandchild", child);
        }
        say("depth %d: own %zu wrong", depth, wrong(area, bytes, depth + 1));
        _exit(depth);
    }
}

static void *busy(void *stop) {
    char *mine = anon(4 * MIB);
    uint64_t round = 0;
    while (!atomic_load((atomic_int *)stop)) {
        fill(mine, 4 * MIB, ++round);
        if (wrong(mine, 4 * MIB, round)) DIE("a thread's memory is wrong");
    }
    munmap(mine, 4 * MIB);
    return NULL;
}

static int nothing[2];
static atomic_int about_to_wait;
static void *waits(void *buffer) {
    atomic_fetch_add(&about_to_wait, 1);
    NEED(read(nothing[0], buffer, 64 << 10) == 0);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc > 1) bytes = (size_t)atoi(argv[1]) * MIB;
    NEED(pipe(nothing) == 0);
    area = anon(bytes);
    fill(area, bytes, 0);
    press();
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) generations();
    reap("child", child);
    say("parent: %zu wrong", wrong(area, bytes, 0));

    // Both write at the same time, to interleaved pages.
    int ready[2];
    NEED(pipe(ready) == 0);
    child = fork();
    if (child == 0) {
        for (size_t at = 0; at < bytes; at += 2 * PAGE) fill(area + at, PAGE, 77);
        press();
        size_t bad = 0;
        for (size_t at = 0; at < bytes; at += 2 * PAGE) bad += wrong(area + at, PAGE, 77);
        char token;
        NEED(read(ready[0], &token, 1) == 1);
        for (size_t at = PAGE; at < bytes; at += 2 * PAGE)
            for (size_t i = 0; i < PAGE / 8; i++)
                bad += ((uint64_t *)(area + at))[i] != mix(0 * 0x9e3779b97f4a7c15ull + at / 8 + i);
        say("child: %zu wrong", bad);
        _exit(bad != 0);
    }
    for (size_t at = PAGE; at < bytes; at += 2 * PAGE) fill(area + at, PAGE, 88);
    press();
    NEED(write(ready[1], "x", 1) == 1);
    size_t bad = 0;
    for (size_t at = PAGE; at < bytes; at += 2 * PAGE) bad += wrong(area + at, PAGE, 88);
    for (size_t at = 0; at < bytes; at += 2 * PAGE)
        for (size_t i = 0; i < PAGE / 8; i++) bad += ((uint64_t *)(area + at))[i] != mix(at / 8 + i);
    reap("interleaved child", child);
    say("parent, interleaved: %zu wrong", bad);

    // A snapshot, as an in-memory database takes it: the child writes out what was, while the parent goes on changing it.
    fill(area, bytes, 3);
    press();
    int out[2];
    NEED(pipe(out) == 0);
    child = fork();
    if (child == 0) {
        close(out[0]);
        size_t done = 0;
        while (done < bytes) {
            ssize_t n = write(out[1], area + done, bytes - done);
            NEED(n > 0);
            done += n;
        }
        _exit(0);
    }
    close(out[1]);
    uint64_t hash = 0xcbf29ce484222325ull;
    char *buffer = malloc(MIB);
    ssize_t n;
    size_t changed = 0, got = 0;
    while ((n = read(out[0], buffer, MIB)) > 0) {
        for (ssize_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)buffer[i]) * 0x100000001b3ull;
        got += n;
        // Change pages ahead of and behind the reader.
        for (int i = 0; i < 16 && changed < bytes; i++, changed += PAGE) fill(area + bytes - PAGE - changed, PAGE, 4);
    }
    reap("snapshot", child);
    fill(area, bytes, 3);
    say("snapshot of %zu bytes is the old state: %d", got, hash == sum(area, bytes));

    // Several children alive at once, forked from a program with running threads.
    atomic_int stop = 0;
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) NEED(pthread_create(&threads[i], NULL, busy, &stop) == 0);
    pid_t children[8];
    for (int i = 0; i < 8; i++) {
        children[i] = fork();
        NEED(children[i] >= 0);
        if (children[i] == 0) {
            size_t part = bytes / 8;
            size_t off = wrong(area, bytes, 3);
            fill(area + i * part, part, 50 + i);
            off += wrong(area + i * part, part, 50 + i);
            _exit(off ? 1 : 10 + i);
        }
    }
    for (int i = 0; i < 8; i++) reap("one of eight", children[i]);
    atomic_store(&stop, 1);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    say("parent after eight: %zu wrong", wrong(area, bytes, 3));

    // Shared anonymous memory is one memory.
    uint64_t *shared = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED);
    fill(shared, 8 * MIB, 5);
    press();
    child = fork();
    if (child == 0) {
        size_t off = wrong(shared, 8 * MIB, 5);
        fill(shared, 8 * MIB, 6);
        press();
        _exit(off != 0);
    }
    reap("sharing child", child);
    say("its writes are seen: %zu wrong", wrong(shared, 8 * MIB, 6));

    // What the program asked not to be inherited.
    char *wiped = anon(2 * MIB);
    fill(wiped, 2 * MIB, 9);
    say("WIPEONFORK: %s", err(madvise(wiped, 2 * MIB, MADV_WIPEONFORK)));
    char *absent = anon(2 * MIB);
    fill(absent, 2 * MIB, 9);
    say("DONTFORK: %s", err(madvise(absent, 2 * MIB, MADV_DONTFORK)));
    press();
    child = fork();
    if (child == 0) {
        catch_faults();
        say("wiped in the child: %zu nonzero", nonzero(wiped, 2 * MIB));
        TRY("absent in the child", absent, (void)*(volatile char *)absent);
        _exit(0);
    }
    reap("child without", child);
    say("parent keeps both: %zu %zu wrong", wrong(wiped, 2 * MIB, 9), wrong(absent, 2 * MIB, 9));

    // Many short children in a row.
    int failures = 0;
    for (int i = 0; i < 50; i++) {
        child = fork();
        NEED(child >= 0);
        if (child == 0) _exit(((uint64_t *)area)[i * 70001 % (bytes / 8)] == mix(3 * 0x9e3779b97f4a7c15ull + i * 70001 % (bytes / 8)) ? 0 : 1);
        int status;
        NEED(waitpid(child, &status, 0) == child);
        failures += status != 0;
    }
    say("fifty short children: %d failed", failures);
    // By system call, without libc's help; and a child that outlives its parent.
    child = raw(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0);
    if (child == 0) {
        size_t off = wrong(area, bytes, 3);
        fill(area, bytes, 4);
        raw(SYS_exit_group, off ? 1 : wrong(area, bytes, 4) ? 2 : 33, 0, 0, 0, 0, 0);
    }
    reap("raw clone", child);
    child = raw(SYS_fork, 0, 0, 0, 0, 0, 0);
    if (child == 0) raw(SYS_exit_group, wrong(area, bytes, 3) ? 1 : 34, 0, 0, 0, 0, 0);
    reap("raw fork", child);
    int late[2];
    NEED(pipe(late) == 0);
    child = fork();
    if (child == 0) {
        if (fork() == 0) {
            press();
            uint64_t answer = wrong(area, bytes, 3);
            NEED(write(late[1], &answer, 8) == 8);
        }
        _exit(0);
    }
    reap("middle", child);
    uint64_t answer = 1;
    NEED(read(late[0], &answer, 8) == 8);
    say("orphan: %llu wrong", (unsigned long long)answer);

    // What threads of the parent wait to have filled must stay near for them, but not in children, which do not have these threads.
    enum { WAITING = 100, BUFFER = 64 << 10 };
    pthread_t waiting[WAITING];
    for (int i = 0; i < WAITING; i++) NEED(pthread_create(&waiting[i], NULL, waits, anon(BUFFER)) == 0);
    while (atomic_load(&about_to_wait) < WAITING) sched_yield();
    press();
    for (int depth = 0; depth < 4; depth++) {
        child = fork();
        NEED(child >= 0);
        if (child) {
            reap("a generation without the threads", child);
            if (depth) _exit(0);
            break;
        }
        press();
    }
    if (child == 0) _exit(0);
    close(nothing[1]);
    for (int i = 0; i < WAITING; i++) pthread_join(waiting[i], NULL);
    say("parent at the end: %zu wrong", wrong(area, bytes, 3));
    return 0;
}
