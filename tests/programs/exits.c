// Every way to end, with far pages and running threads: the code or the signal must come out unchanged.
// The first argument says which way.
#include "probe.h"
#include <sys/prctl.h>

static char *area;
static void *busy(void *unused) {
    (void)unused;
    for (uint64_t round = 0;; round++) fill(area, 24 * MIB, round);
    return NULL;
}
static void at_exit(void) { say("atexit: %zu wrong", wrong(area + 24 * MIB, 8 * MIB, 1)); }
static void *ender(void *way) { exit((int)(size_t)way); return NULL; }

int main(int argc, char **argv) {
    const char *way = argc > 1 ? argv[1] : "return";
    area = anon(32 * MIB);
    fill(area, 32 * MIB, 1);
    press();
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) NEED(pthread_create(&threads[i], NULL, busy, NULL) == 0);
    say("way: %s", way);
    if (!strcmp(way, "return")) return 3;
    if (!strcmp(way, "zero")) return 0;
    if (!strcmp(way, "exit")) { atexit(at_exit); exit(42); }
    if (!strcmp(way, "_exit")) _exit(255);
    if (!strcmp(way, "raw")) raw(SYS_exit_group, 77, 0, 0, 0, 0, 0);
    if (!strcmp(way, "thread")) {
        pthread_t thread;
        NEED(pthread_create(&thread, NULL, ender, (void *)9) == 0);
        for (;;) pause();
    }
    if (!strcmp(way, "abort")) abort();
    if (!strcmp(way, "term")) kill(getpid(), SIGTERM);
    if (!strcmp(way, "kill")) kill(getpid(), SIGKILL);
    if (!strcmp(way, "segv")) *(volatile int *)16 = 1;
    if (!strcmp(way, "bus")) raise(SIGBUS);
    if (!strcmp(way, "sys")) raise(SIGSYS);
    if (!strcmp(way, "fpe")) { volatile int seven = 7, zero = 0; say("%d", seven / zero); }
    if (!strcmp(way, "ill")) __builtin_trap();
    if (!strcmp(way, "pthread_exit")) { // The first thread leaves; the process goes on with the others until one of them ends it.
        pthread_t thread;
        NEED(pthread_create(&thread, NULL, ender, (void *)11) == 0);
        pthread_exit(NULL);
    }
    if (!strcmp(way, "exec")) execl("/bin/sh", "sh", "-c", "exit 12", NULL);
    if (!strcmp(way, "orphan")) { // A child is left behind for a moment: the job ends when all have ended, or the child still works.
        pid_t child = fork();
        if (child == 0) {
            close(1);
            press();
            _exit(0);
        }
        return 13;
    }
    for (;;) pause();
}
