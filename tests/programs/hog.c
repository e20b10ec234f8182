// Takes memory for the tests of budgets and faults: hog MIB ROUNDS [PROCESSES [THREADS [stalls|gently]]].
// Each process fills its share and checks it ROUNDS times (0 = until killed, or told to end by SIGUSR1), in random order of 64 KiB blocks. Prints what it found.
// With `gently` it computes for 10 ms after each block, and sleeps for 40, so that it hardly waits for its memory. With `stalls` each block changes whenever it was checked, and it says when a block has taken a quarter of a second or more.
#include "probe.h"

static char *area;
static size_t bytes, threads_count;
static int rounds;
static atomic_ulong bad;
static int says_stalls, is_gentle;
static volatile sig_atomic_t is_told;

static void tell(int signal) { (void)signal; is_told = 1; }

static long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void compute_and_sleep(void) {
    struct timespec now, pause = {0, 40 * 1000 * 1000};
    NEED(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0);
    long until = now.tv_sec * 1000 + now.tv_nsec / 1000000 + 10;
    while (now.tv_sec * 1000 + now.tv_nsec / 1000000 < until) NEED(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0);
    nanosleep(&pause, NULL);
}

static uint64_t seed(const uint64_t *versions, size_t block) { return block + (versions[block] << 32); }

static void *walk(void *number) {
    size_t me = (size_t)number, part = bytes / threads_count / 65536 * 65536, blocks = part / 65536;
    char *mine = area + me * part;
    uint64_t *versions = calloc(blocks, sizeof *versions);
    NEED(versions);
    for (size_t block = 0; block < blocks; block++) fill(mine + block * 65536, 65536, block);
    for (int round = 1; rounds == 0 ? !is_told : round <= rounds; round++)
        for (size_t i = 0; i < blocks; i++) {
            size_t block = mix(round * 1000003 + i) % blocks;
            long started = says_stalls ? now_ms() : 0;
            size_t off = wrong(mine + block * 65536, 65536, seed(versions, block));
            if (off) { atomic_fetch_add(&bad, off); DIE("block %zu has %zu wrong words", block, off); }
            if (says_stalls) versions[block]++;
            fill(mine + block * 65536, 65536, seed(versions, block));
            if (is_gentle && !is_told) compute_and_sleep();
            if (says_stalls && now_ms() - started >= 250) say("took %ld ms", now_ms() - started);
        }
    return NULL;
}

int main(int argc, char **argv) {
    NEED(argc > 2);
    bytes = strtoul(argv[1], NULL, 10) * MIB;
    rounds = atoi(argv[2]);
    int processes = argc > 3 ? atoi(argv[3]) : 1;
    threads_count = argc > 4 ? strtoul(argv[4], NULL, 10) : 1;
    says_stalls = argc > 5 && strcmp(argv[5], "stalls") == 0;
    is_gentle = argc > 5 && strcmp(argv[5], "gently") == 0;
    NEED(signal(SIGUSR1, tell) != SIG_ERR);
    say("started");
    bytes /= processes;
    pid_t children[64];
    for (int i = 0; i < processes - 1; i++) {
        children[i] = fork();
        NEED(children[i] >= 0);
        if (children[i] == 0) { processes = 0; break; }
    }
    area = anon(bytes);
    pthread_t threads[64];
    for (size_t i = 1; i < threads_count; i++) NEED(pthread_create(&threads[i], NULL, walk, (void *)i) == 0);
    walk(NULL);
    for (size_t i = 1; i < threads_count; i++) NEED(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < processes - 1; i++) reap("child", children[i]);
    if (processes) say("%lu wrong", bad);
    return 0;
}
