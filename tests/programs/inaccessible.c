// Memory that the program has made inaccessible leaves like any other, and comes back as it was: a quarantine of freed memory, as
// checkers of memory keep it, is larger than what may be near.
#include "probe.h"

enum { BLOCK = 256 * 1024, BLOCKS = 192 };

static char *toggled;
static atomic_int done;

// Opens, changes and closes memory while the other thread makes it leave.
static void *toggle(void *nothing) {
    (void)nothing;
    size_t wrong_bytes = 0;
    for (int round = 0; round < 200 || !atomic_load(&done); round++) {
        NEED(mprotect(toggled, BLOCK, PROT_READ | PROT_WRITE) == 0);
        for (size_t at = 0; at < BLOCK; at += PAGE) {
            uint64_t *word = (uint64_t *)(toggled + at);
            wrong_bytes += *word != (uint64_t)round;
            *word = (uint64_t)round + 1;
        }
        NEED(mprotect(toggled, BLOCK, PROT_NONE) == 0);
    }
    return (void *)wrong_bytes;
}

int main(void) {
    // Reserved without access, as the loader reserves room for libraries.
    char *blocks[BLOCKS], *all = mmap(NULL, (size_t)BLOCK * BLOCKS, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(all != MAP_FAILED);
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = all + (size_t)i * BLOCK;
        NEED(mprotect(blocks[i], BLOCK, PROT_READ | PROT_WRITE) == 0);
        fill(blocks[i], BLOCK, (uint64_t)i);
        NEED(mprotect(blocks[i], BLOCK, PROT_NONE) == 0);
    }
    say("%d blocks in quarantine", BLOCKS);

    toggled = anon(BLOCK);
    pthread_t thread;
    NEED(pthread_create(&thread, NULL, toggle, NULL) == 0);
    for (int i = 0; i < 4; i++) press();
    atomic_store(&done, 1);
    void *wrong_words;
    NEED(pthread_join(thread, &wrong_words) == 0);
    say("opened, changed and closed: %zu wrong", (size_t)wrong_words);

    // Some are opened for reading, some for writing, some go.
    size_t bad = 0;
    for (int i = 0; i < BLOCKS; i++) {
        if (i % 3 == 2) {
            NEED(munmap(blocks[i], BLOCK) == 0);
            continue;
        }
        NEED(mprotect(blocks[i], BLOCK, i % 3 == 0 ? PROT_READ : PROT_READ | PROT_WRITE) == 0);
        bad += wrong(blocks[i], BLOCK, (uint64_t)i);
    }
    say("out of quarantine: %zu wrong", bad);

    // A child sees them, too.
    for (int i = 0; i < BLOCKS; i++) if (i % 3 != 2) NEED(mprotect(blocks[i], BLOCK, PROT_NONE) == 0);
    press();
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
        size_t bad_there = 0;
        for (int i = 0; i < BLOCKS; i += 3) {
            NEED(mprotect(blocks[i], BLOCK, PROT_READ) == 0);
            bad_there += wrong(blocks[i], BLOCK, (uint64_t)i);
        }
        say("in a child: %zu wrong", bad_there);
        _exit(0);
    }
    int status;
    NEED(waitpid(child, &status, 0) == child);
    say("the child ended with %d", status);
    return 0;
}
