// Threads on far memory: all signals blocked, locks and condition variables that are themselves far, stacks that are far,
// threads that come and go, thread-local memory.
#include "probe.h"

enum { THREADS = 6 };

struct shared {
    char padding[3 * 4096 + 8];
    pthread_mutex_t lock;
    char more[2 * 4096];
    pthread_cond_t wake;
    pthread_barrier_t barrier;
    pthread_rwlock_t rwlock;
    char yet_more[4096];
    _Atomic uint64_t turns;
    uint64_t plain;
    uint64_t written;
    uint64_t turn;
};

static struct shared *shared;
static char *area;
static size_t bytes = 36 * MIB;
static _Thread_local char local[256 * 1024];

static void *blocked(void *number) {
    size_t me = (size_t)number;
    sigset_t all;
    sigfillset(&all);
    NEED(pthread_sigmask(SIG_SETMASK, &all, NULL) == 0);
    size_t part = bytes / THREADS / PAGE * PAGE;
    char *mine = area + me * part;
    size_t bad = 0;
    for (int round = 0; round < 3; round++) {
        fill(mine, part, me * 10 + round);
        memset(local, (int)me, sizeof local);
        pthread_barrier_wait(&shared->barrier);
        // Everybody reads everybody's part.
        for (size_t other = 0; other < THREADS; other++) bad += wrong(area + other * part, part, other * 10 + round);
        for (size_t i = 0; i < sizeof local; i++) bad += local[i] != (char)me;
        pthread_barrier_wait(&shared->barrier);
    }
    sigset_t now;
    NEED(pthread_sigmask(SIG_SETMASK, NULL, &now) == 0);
    int still = 0;
    for (int signal = 1; signal < 32; signal++) still += sigismember(&now, signal) == 1;
    // All but SIGKILL and SIGSTOP.
    return (void *)(bad + (still == 29 ? 0 : 1000000 + still));
}

static void *locker(void *number) {
    size_t me = (size_t)number;
    char *mine = anon(4 * MIB);
    for (int i = 0; i < 60; i++) {
        fill(mine + (i % 8) * MIB / 2, MIB / 2, i); // Pushes the locks out.
        NEED(pthread_mutex_lock(&shared->lock) == 0);
        shared->plain++;
        NEED(pthread_mutex_unlock(&shared->lock) == 0);
        NEED(pthread_rwlock_wrlock(&shared->rwlock) == 0);
        shared->written++;
        NEED(pthread_rwlock_unlock(&shared->rwlock) == 0);
        atomic_fetch_add(&shared->turns, me);
    }
    return NULL;
}

static void *turner(void *number) {
    size_t me = (size_t)number;
    for (int i = 0; i < 150; i++) {
        NEED(pthread_mutex_lock(&shared->lock) == 0);
        while (shared->turn % THREADS != me) NEED(pthread_cond_wait(&shared->wake, &shared->lock) == 0);
        shared->turn++;
        NEED(pthread_cond_broadcast(&shared->wake) == 0);
        NEED(pthread_mutex_unlock(&shared->lock) == 0);
    }
    return NULL;
}

static uint64_t deep(int depth, uint64_t seed) {
    volatile uint64_t frame[500];
    for (int i = 0; i < 500; i++) frame[i] = seed + depth + i;
    uint64_t below = depth ? deep(depth - 1, seed) : 0;
    for (int i = 0; i < 500; i++) below += frame[i] - seed;
    return below;
}

static void *recursive(void *number) { return (void *)deep(3000, (uint64_t)number); }

static void *brief(void *number) {
    char *mine = malloc(100000);
    memset(mine, (int)(size_t)number, 100000);
    size_t answer = mine[99999] == (char)(size_t)number;
    free(mine);
    return (void *)answer;
}

int main(void) {
    area = anon(bytes);
    shared = malloc(sizeof *shared);
    pthread_t threads[THREADS];
    NEED(pthread_mutex_init(&shared->lock, NULL) == 0);
    NEED(pthread_cond_init(&shared->wake, NULL) == 0);
    NEED(pthread_barrier_init(&shared->barrier, NULL, THREADS) == 0);
    NEED(pthread_rwlock_init(&shared->rwlock, NULL) == 0);
    shared->turns = shared->plain = shared->written = shared->turn = 0;

    size_t bad = 0;
    for (size_t i = 0; i < THREADS; i++) NEED(pthread_create(&threads[i], NULL, blocked, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) { void *got; NEED(pthread_join(threads[i], &got) == 0); bad += (size_t)got; }
    say("threads that block all signals: %zu wrong", bad);

    press();
    for (size_t i = 0; i < THREADS; i++) NEED(pthread_create(&threads[i], NULL, locker, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) NEED(pthread_join(threads[i], NULL) == 0);
    say("mutex: %llu, rwlock: %llu, atomics: %llu", (unsigned long long)shared->plain, (unsigned long long)shared->written, (unsigned long long)shared->turns);

    press();
    for (size_t i = 0; i < THREADS; i++) NEED(pthread_create(&threads[i], NULL, turner, (void *)i) == 0);
    for (int i = 0; i < 3; i++) press();
    for (size_t i = 0; i < THREADS; i++) NEED(pthread_join(threads[i], NULL) == 0);
    say("turns: %llu", (unsigned long long)shared->turn);

    pthread_attr_t attributes;
    NEED(pthread_attr_init(&attributes) == 0);
    NEED(pthread_attr_setstacksize(&attributes, 24 * MIB) == 0);
    uint64_t sums = 0;
    for (size_t i = 0; i < 3; i++) NEED(pthread_create(&threads[i], &attributes, recursive, (void *)i) == 0);
    for (size_t i = 0; i < 3; i++) { void *got; NEED(pthread_join(threads[i], &got) == 0); sums += (uint64_t)got; }
    say("deep stacks: %llu", (unsigned long long)sums);

    size_t good = 0;
    for (size_t round = 0; round < 60; round++) {
        for (size_t i = 0; i < THREADS; i++) NEED(pthread_create(&threads[i], NULL, brief, (void *)(round + i)) == 0);
        for (size_t i = 0; i < THREADS; i++) { void *got; NEED(pthread_join(threads[i], &got) == 0); good += (size_t)got; }
    }
    say("brief threads: %zu", good);
    return 0;
}
