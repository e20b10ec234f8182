// Keeps versions: versions MIB THREADS [forks]. Writes and checks single pages in random order until SIGUSR1; every word of a page says which page, thread
// and version it is. Threads share each page: each has a part of it. Mostly reads, so that pages that leave are mostly unchanged. With `forks` the first thread forks now and
// then; the child checks that it sees this thread's pages as they were, and goes on by itself. One thread also discards pages.
#include "probe.h"

static uint64_t *area;
static size_t pages, threads_count, part;
static int does_fork;
static atomic_ulong bad;
static atomic_int is_told;

static void tell(int signal) { (void)signal; atomic_store(&is_told, 1); }

struct walker { size_t number; uint64_t random; uint32_t *versions; };

static uint64_t next(struct walker *w) { w->random ^= w->random << 13; w->random ^= w->random >> 7; return w->random ^= w->random << 17; }

static uint64_t *mine(struct walker *w, size_t page) { return area + page * 512 + w->number * part; }

static uint64_t word(struct walker *w, size_t page, size_t at) {
    uint64_t version = w->versions[page];
    return version ? mix((page * 64 + w->number) * 0x100000001ull + version) + at : 0;
}

static void check(struct walker *w, size_t page) {
    for (size_t at = 0; at < part; at++)
        if (mine(w, page)[at] != word(w, page, at)) {
            atomic_fetch_add(&bad, 1);
            DIE("thread %zu, page %zu, version %u: another version", w->number, page, w->versions[page]);
        }
}

static void store(struct walker *w, size_t page) {
    if (++w->versions[page] == 0) w->versions[page] = 1;
    for (size_t at = 0; at < part; at++) mine(w, page)[at] = word(w, page, at);
}

static void step(struct walker *w) {
    size_t page = next(w) % pages;
    check(w, page);
    uint64_t choice = next(w) % 64;
    if (choice < 12) {
        store(w, page);
    } else if (choice == 12 && threads_count == 1) {
        NEED(madvise(area + page * 512, PAGE, MADV_DONTNEED) == 0);
        w->versions[page] = 0;
    }
}

static void fork_once(struct walker *w) {
    pid_t child = fork();
    NEED(child >= 0);
    for (int i = 0; i < (child ? 300 : 1500); i++) step(w);
    if (child == 0) _exit(0);
    int status = 0;
    NEED(waitpid(child, &status, 0) == child);
    if (status) DIE("the child ended with status %x", status);
}

static void *walk(void *number) {
    struct walker w = {(size_t)number, mix((size_t)number + 1) | 1, anon(pages * sizeof(uint32_t))};
    for (size_t page = 0; page < pages; page++) store(&w, page);
    for (uint64_t steps = 1; !atomic_load(&is_told); steps++) {
        step(&w);
        if (does_fork && w.number == 0 && steps % 8192 == 0) fork_once(&w);
    }
    for (size_t page = 0; page < pages; page++) check(&w, page);
    return NULL;
}

int main(int argc, char **argv) {
    NEED(argc > 2);
    pages = strtoul(argv[1], NULL, 10) * MIB / PAGE;
    threads_count = strtoul(argv[2], NULL, 10);
    does_fork = argc > 3 && strcmp(argv[3], "forks") == 0;
    part = 512 / threads_count;
    NEED(signal(SIGUSR1, tell) != SIG_ERR);
    say("started");
    area = anon(pages * PAGE);
    pthread_t threads[64];
    for (size_t i = 1; i < threads_count; i++) NEED(pthread_create(&threads[i], NULL, walk, (void *)i) == 0);
    walk(NULL);
    for (size_t i = 1; i < threads_count; i++) NEED(pthread_join(threads[i], NULL) == 0);
    say("%lu wrong", bad);
    return 0;
}
