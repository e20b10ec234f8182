// Forks again and again, for the tests of servers that are silent meanwhile: forks MIB [stays]. Until it is killed.
// In each round parent and child change the same memory at the same time, and check it; the next round begins with what the parent has made of it.
// With `stays` it forks once: both go on with what they have, for ever.
// No more than five rounds a second: what a child had stays at the server for a lease.
#include "probe.h"

enum { BLOCK = 65536, ROUND_MS = 200 };
static char *area;
static size_t blocks;

static long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// Every block once, for their number is no multiple of that prime, from what it was to something else.
static void change(uint64_t from, uint64_t to) {
    for (size_t i = 0; i < blocks; i++) {
        size_t block = (i * 7919 + to) % blocks;
        size_t off = wrong(area + block * BLOCK, BLOCK, from + block);
        if (off) DIE("block %zu has %zu wrong words", block, off);
        fill(area + block * BLOCK, BLOCK, to + block);
    }
}

static void stay(void) {
    pid_t child = fork();
    NEED(child >= 0);
    uint64_t now = 0;
    for (uint64_t round = 1;; round++) {
        uint64_t next = round << 32 | (uint64_t)(child == 0) << 31;
        change(now, next);
        now = next;
        if (child && waitpid(child, NULL, WNOHANG)) DIE("the child has ended");
    }
}

int main(int argc, char **argv) {
    int stays = argc == 3 && strcmp(argv[2], "stays") == 0;
    NEED(argc == 2 || stays);
    blocks = strtoul(argv[1], NULL, 10) * MIB / BLOCK;
    area = anon(blocks * BLOCK);
    for (size_t block = 0; block < blocks; block++) fill(area + block * BLOCK, BLOCK, block);
    say("started");
    if (stays) stay();
    uint64_t now = 0;
    for (uint64_t round = 1;; round++) {
        uint64_t next = round << 32, other = next | 1 << 31;
        long started = now_ms();
        pid_t child = fork();
        NEED(child >= 0);
        if (child == 0) {
            change(now, other);
            change(other, now);
            _exit(0);
        }
        say("fork took %ld ms", now_ms() - started);
        change(now, next);
        now = next;
        int status;
        NEED(waitpid(child, &status, 0) == child);
        if (status) DIE("child %lu: status %d", (unsigned long)round, status);
        say("round %lu is over", (unsigned long)round);
        long left = started + ROUND_MS - now_ms();
        if (left > 0) usleep(left * 1000);
    }
}
