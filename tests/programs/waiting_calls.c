// Many threads wait inside system calls with large far buffers, together more than the near budget, while the rest of the program
// must go on; calls that wait are interrupted, restarted and cancelled as without far memory.
#include "probe.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/time.h>

enum { READERS = 48 };
static int pipes[READERS][2];
static char *buffers[READERS];
static size_t part = MIB;

static void *reader(void *number) {
    size_t me = (size_t)number, done = 0;
    while (done < part) {
        ssize_t n = read(pipes[me][0], buffers[me] + done, part - done);
        NEED(n > 0);
        done += n;
    }
    return (void *)wrong(buffers[me], part, me);
}

static void handler(int signal) { (void)signal; }
static volatile int cleaned;
static void cleanup(void *unused) { (void)unused; cleaned = 1; }
static void *cancelled(void *buffer) {
    pthread_cleanup_push(cleanup, NULL);
    say("read before cancellation: %zd", read(pipes[0][0], buffer, MIB));
    pthread_cleanup_pop(0);
    return NULL;
}
static void *late_writer(void *unused) {
    (void)unused;
    press();
    NEED(write(pipes[0][1], "late", 4) == 4);
    return NULL;
}
static pthread_t main_thread;
static atomic_int done_reading;
static void *alarmist(void *unused) {
    (void)unused;
    // Until the read has ended: one signal is lost if it comes before the call begins.
    while (!atomic_load(&done_reading)) {
        pthread_kill(main_thread, SIGUSR1);
        usleep(2000);
    }
    return NULL;
}

int main(void) {
    main_thread = pthread_self();
    pthread_t threads[READERS];
    for (size_t i = 0; i < READERS; i++) {
        NEED(pipe(pipes[i]) == 0);
        buffers[i] = anon(part);
        memset(buffers[i], 1, part);
    }
    for (size_t i = 0; i < READERS; i++) NEED(pthread_create(&threads[i], NULL, reader, (void *)i) == 0);
    press(); // All of them may be waiting by now, or not yet: both must work.
    press();
    uint64_t *source = anon(part);
    for (size_t i = 0; i < READERS; i++) {
        fill(source, part, i);
        for (size_t done = 0; done < part;) {
            ssize_t n = write(pipes[i][1], (char *)source + done, part - done);
            NEED(n > 0);
            done += n;
        }
    }
    size_t bad = 0;
    for (size_t i = 0; i < READERS; i++) { void *got; NEED(pthread_join(threads[i], &got) == 0); bad += (size_t)got; }
    say("%d waiting readers: %zu wrong", READERS, bad);

    // EINTR without SA_RESTART.
    press();
    struct sigaction action = {.sa_handler = handler};
    NEED(sigaction(SIGUSR1, &action, NULL) == 0);
    pthread_t helper;
    NEED(pthread_create(&helper, NULL, alarmist, NULL) == 0);
    ssize_t n = read(pipes[0][0], buffers[0], part);
    say("interrupted read: %s", err(n));
    struct pollfd polls = {pipes[0][0], POLLIN, 0};
    say("interrupted poll: %s", err(poll(&polls, 1, -1)));
    int epoll = epoll_create1(0);
    struct epoll_event event;
    say("interrupted epoll_wait: %s", err(epoll_wait(epoll, &event, 1, -1)));
    int status;
    pid_t child = fork();
    if (child == 0) { char c; _exit(read(pipes[1][0], &c, 1) == 1 ? 5 : 6); }
    say("interrupted waitpid: %s", err(waitpid(child, &status, 0)));
    struct timespec long_time = {100, 0}, rest = {0, 0};
    int slept = nanosleep(&long_time, &rest);
    say("interrupted nanosleep: %s, rest %d", err(slept), rest.tv_sec >= 90);
    sigset_t none;
    sigemptyset(&none);
    say("sigsuspend: %s", err(sigsuspend(&none)));
    say("pause: %s", err(pause()));
    atomic_store(&done_reading, 1);
    NEED(pthread_join(helper, NULL) == 0);
    NEED(write(pipes[1][1], "x", 1) == 1);
    reap("waiting child", child);

    // Restarted with SA_RESTART: the read ends with data only.
    action.sa_flags = SA_RESTART;
    NEED(sigaction(SIGUSR1, &action, NULL) == 0);
    atomic_store(&done_reading, 0);
    pthread_t writer;
    NEED(pthread_create(&helper, NULL, alarmist, NULL) == 0);
    NEED(pthread_create(&writer, NULL, late_writer, NULL) == 0);
    n = read(pipes[0][0], buffers[0], part);
    atomic_store(&done_reading, 1);
    NEED(pthread_join(helper, NULL) == 0);
    NEED(pthread_join(writer, NULL) == 0);
    say("restarted read: %zd, %.4s", n, buffers[0]);

    // Cancellation of a thread that waits.
    NEED(pthread_create(&helper, NULL, cancelled, buffers[1]) == 0);
    press();
    NEED(pthread_cancel(helper) == 0);
    void *result;
    NEED(pthread_join(helper, &result) == 0);
    say("cancelled: %d, cleaned up %d", result == PTHREAD_CANCELED, cleaned);

    // A second thread unmaps, or takes away access to, nothing that a waiting call uses; but memory around it changes.
    char *neighbours = anon(8 * MIB);
    fill(neighbours, 8 * MIB, 9);
    buffers[2] = neighbours + 3 * MIB;
    NEED(pthread_create(&threads[2], NULL, reader, (void *)2) == 0);
    press();
    NEED(munmap(neighbours, 3 * MIB) == 0);
    NEED(mprotect(neighbours + 4 * MIB, 4 * MIB, PROT_NONE) == 0);
    fill(source, part, 2);
    for (size_t done = 0; done < part;) {
        n = write(pipes[2][1], (char *)source + done, part - done);
        NEED(n > 0);
        done += n;
    }
    NEED(pthread_join(threads[2], &result) == 0);
    say("neighbours changed: %zu wrong", (size_t)result);
    return 0;
}
