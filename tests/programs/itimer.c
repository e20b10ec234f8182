// A profiling timer interrupts the program everywhere, also in the middle of page faults, and its handler touches far memory.
#include "probe.h"
#include <sys/time.h>

static uint64_t *area;
static size_t bytes = 48 * MIB;
static atomic_ulong ticks, bad;

static void on_tick(int signal) {
    (void)signal;
    int saved = errno;
    for (int i = 0; i < 4; i++) {
        size_t at = mix(atomic_fetch_add(&ticks, 1)) % (bytes / 16);
        if (area[at] != mix(1 * 0x9e3779b97f4a7c15ull + at)) atomic_fetch_add(&bad, 1);
    }
    errno = saved;
}

static void *worker(void *number) {
    uint64_t state = (uint64_t)number;
    for (int i = 0; i < 15000; i++) {
        state = mix(state + i);
        area[bytes / 16 + state % (bytes / 16)] = state;
        size_t at = (state >> 30) % (bytes / 16);
        if (area[at] != mix(1 * 0x9e3779b97f4a7c15ull + at)) atomic_fetch_add(&bad, 1);
    }
    return NULL;
}

int main(void) {
    area = anon(bytes);
    fill(area, bytes, 1);
    struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_RESTART};
    NEED(sigaction(SIGPROF, &action, NULL) == 0);
    NEED(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    NEED(setitimer(ITIMER_PROF, &often, NULL) == 0);
    struct itimerval real = {{0, 1700}, {0, 1700}};
    NEED(setitimer(ITIMER_REAL, &real, NULL) == 0);
    pthread_t threads[2];
    for (size_t i = 0; i < 2; i++) NEED(pthread_create(&threads[i], NULL, worker, (void *)(i + 1)) == 0);
    for (int i = 0; i < 4; i++) press();
    for (size_t i = 0; i < 2; i++) NEED(pthread_join(threads[i], NULL) == 0);
    // System calls with far buffers under the same rain.
    int fd = scratch_file();
    size_t off = 0;
    for (int i = 0; i < 20; i++) {
        size_t at = i * MIB;
        if (pwrite(fd, (char *)area + at, MIB, 0) != (ssize_t)MIB) off++;
        if (pread(fd, (char *)area + at, MIB, 0) != (ssize_t)MIB) off++;
    }
    NEED(setitimer(ITIMER_PROF, &never, NULL) == 0);
    NEED(setitimer(ITIMER_REAL, &never, NULL) == 0);
    say("timer came: %s; wrong: %lu; short transfers: %zu", ticks > 10 ? "often" : "rarely", bad, off);
    say("first half: %zu wrong", wrong(area, bytes / 2, 1));
    return 0;
}
