// Calls by functions of libc whose buffers are near, while other memory leaves: data are right, pages that a call uses stay, pages
// that no call uses any more leave, and whatever ends a call (a signal, a jump, cancellation) ends it as without far memory.
#include "probe.h"
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { PAIRS = 3, ROUNDS = 4000, SMALL = 96 };

// Two threads of each pair send to and fro out of buffers in the middle of pages that the pressure wants.
static int ends[PAIRS][2];
static atomic_int pressing = 1;

static void *echo(void *number) {
    size_t me = (size_t)number;
    char *buffer = anon(64 * PAGE);
    for (size_t round = 0; round < ROUNDS; round++) {
        uint64_t *at = (uint64_t *)(buffer + round % 63 * PAGE + PAGE - 32); // Straddles a page border.
        NEED(recv(ends[me][1], at, SMALL, MSG_WAITALL) == SMALL);
        for (size_t i = 0; i < SMALL / 8; i++) at[i] += 1;
        NEED(send(ends[me][1], at, SMALL, 0) == SMALL);
    }
    return NULL;
}

static void *ask(void *number) {
    size_t me = (size_t)number, bad = 0;
    char *buffer = anon(64 * PAGE);
    for (size_t round = 0; round < ROUNDS; round++) {
        uint64_t *out = (uint64_t *)(buffer + round % 31 * PAGE + PAGE - 40), *in = (uint64_t *)(buffer + (32 + round % 31) * PAGE);
        for (size_t i = 0; i < SMALL / 8; i++) out[i] = mix(me * ROUNDS + round + i);
        struct iovec parts[2] = {{out, 40}, {(char *)out + 40, SMALL - 40}};
        NEED(writev(ends[me][0], parts, 2) == SMALL);
        for (size_t done = 0; done < SMALL;) {
            ssize_t n = read(ends[me][0], (char *)in + done, SMALL - done);
            NEED(n > 0);
            done += n;
        }
        for (size_t i = 0; i < SMALL / 8; i++) bad += in[i] != out[i] + 1;
    }
    return (void *)bad;
}

static void *pressure(void *unused) {
    (void)unused;
    while (atomic_load(&pressing)) press();
    return NULL;
}

// A read that waits in memory that was never touched, when the process starts to page.
static int pipes[2];
static char *untouched;
static void *first_reader(void *unused) {
    (void)unused;
    return (void *)read(pipes[0], untouched, 3 * PAGE);
}

static sigjmp_buf out;
static volatile int jumps;
static pthread_t target;
static atomic_int over;
static char *handler_buffer;
static int handler_pipe[2];
static void jump_out(int signal) {
    (void)signal;
    jumps++;
    siglongjmp(out, 1);
}
// Reads and writes inside the call that it has interrupted.
static volatile int handled;
static void talk(int signal) {
    (void)signal;
    NEED(write(handler_pipe[1], "inner", 5) == 5 && read(handler_pipe[0], handler_buffer, 5) == 5);
    handled += memcmp(handler_buffer, "inner", 5) == 0;
}
static void *alarms(void *number) {
    int signal = (int)(size_t)number;
    while (!atomic_load(&over)) {
        pthread_kill(target, signal);
        usleep(500);
    }
    return NULL;
}

static char *cancel_buffer;
static int cancel_pipe[2];
static volatile int cleaned;
static void clean(void *unused) {
    (void)unused;
    // The call that was cancelled is over: its buffer may be used by others.
    cleaned = write(cancel_pipe[1], cancel_buffer, 10) == 10 && read(cancel_pipe[0], cancel_buffer, 10) == 10;
}
static atomic_int waits;
static void *cancelled(void *unused) {
    (void)unused;
    pthread_cleanup_push(clean, NULL);
    atomic_store(&waits, 1);
    NEED(read(pipes[0], cancel_buffer, 10) == -2);
    pthread_cleanup_pop(0);
    return NULL;
}

static int shared_storage(void *buffer) {
    // Uses the storage of the thread that waits for it, and its own stack.
    return read(pipes[0], buffer, 3) == 3 ? 21 : 22;
}

int main(int argc, char **argv) {
    target = pthread_self();
    NEED(pipe(pipes) == 0 && pipe(handler_pipe) == 0 && pipe(cancel_pipe) == 0);
    if (argc > 1) {
        // Calls on memory that is near all the time.
        char *buffer = anon(PAGE);
        int zeros = open("/dev/zero", O_RDONLY);
        if (strcmp(argv[1], "armed") == 0) press();
        for (int i = 0; i < 100000; i++) NEED(read(zeros, buffer + 100, 64) == 64);
        say("read");
        return 0;
    }
    pthread_t reader, helper, threads[2 * PAIRS];
    void *result;
    untouched = anon(16 * PAGE) + PAGE / 2;
    NEED(pthread_create(&reader, NULL, first_reader, NULL) == 0);
    press();
    press();
    char *source = anon(4 * PAGE);
    fill(source, 3 * PAGE, 5);
    NEED(write(pipes[1], source, 3 * PAGE) == (ssize_t)(3 * PAGE));
    NEED(pthread_join(reader, &result) == 0);
    say("first read: %zd, %zu wrong", (ssize_t)result, wrong(untouched, 3 * PAGE, 5));

    for (size_t i = 0; i < PAIRS; i++) {
        NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, ends[i]) == 0);
        NEED(pthread_create(&threads[2 * i], NULL, echo, (void *)i) == 0);
        NEED(pthread_create(&threads[2 * i + 1], NULL, ask, (void *)i) == 0);
    }
    NEED(pthread_create(&helper, NULL, pressure, NULL) == 0);
    size_t bad = 0;
    for (size_t i = 0; i < 2 * PAIRS; i++) { NEED(pthread_join(threads[i], &result) == 0); bad += (size_t)result; }
    atomic_store(&pressing, 0);
    NEED(pthread_join(helper, NULL) == 0);
    say("%d pairs: %zu wrong", PAIRS, bad);

    // A handler jumps out of a call that waits. The call is over then, whatever comes after it.
    char *buffer = anon(PAGE);
    struct sigaction action = {.sa_handler = jump_out};
    NEED(sigaction(SIGUSR1, &action, NULL) == 0);
    NEED(pthread_create(&helper, NULL, alarms, (void *)(size_t)SIGUSR1) == 0);
    while (jumps < 200)
        if (sigsetjmp(out, 1) == 0) {
            strcpy(buffer, "before");
            say("no jump: %zd", read(pipes[0], buffer, 100));
        }
    atomic_store(&over, 1);
    while (sigsetjmp(out, 1) != 0) {}
    NEED(pthread_join(helper, NULL) == 0);
    press();
    say("after the jumps: %s, %zd", buffer, write(pipes[1], buffer, 6) == 6 ? read(pipes[0], buffer, 6) : -1);

    // A handler makes calls inside of one that it interrupts, which goes on afterwards.
    handler_buffer = anon(PAGE);
    action = (struct sigaction){.sa_handler = talk, .sa_flags = SA_RESTART};
    NEED(sigaction(SIGUSR2, &action, NULL) == 0);
    atomic_store(&over, 0);
    pid_t child = fork();
    if (child == 0) {
        while (handled < 20) { press(); NEED(write(pipes[1], "x", 1) == 1); usleep(1000); handled++; }
        _exit(3);
    }
    NEED(pthread_create(&helper, NULL, alarms, (void *)(size_t)SIGUSR2) == 0);
    size_t arrived = 0;
    while (arrived < 20) {
        ssize_t n = read(pipes[0], buffer, 100);
        NEED(n > 0 && buffer[0] == 'x');
        arrived += n;
    }
    while (handled < 20) usleep(1000);
    atomic_store(&over, 1);
    NEED(pthread_join(helper, NULL) == 0);
    reap("writer", child);
    say("inside a call: %zu arrived, %s", arrived, handled >= 20 ? "handled" : "not handled");

    // Cancellation.
    cancel_buffer = anon(PAGE);
    memset(cancel_buffer, 'c', 10);
    NEED(pthread_create(&helper, NULL, cancelled, NULL) == 0);
    while (!atomic_load(&waits)) sched_yield();
    press();
    NEED(pthread_cancel(helper) == 0 && pthread_join(helper, &result) == 0);
    say("cancelled: %d, cleaned up %d", result == PTHREAD_CANCELED, cleaned);

    // Memory that is not there, or not for this.
    char *hole = anon(4 * PAGE);
    memset(hole, 1, 4 * PAGE);
    NEED(munmap(hole + PAGE, PAGE) == 0 && mprotect(hole + 2 * PAGE, PAGE, PROT_READ) == 0 && mprotect(hole + 3 * PAGE, PAGE, PROT_NONE) == 0);
    int zeros = open("/dev/zero", O_RDONLY);
    say("read into a hole: %s", err(read(zeros, hole + PAGE + 8, 8)));
    say("read into what can be read: %s", err(read(zeros, hole + 2 * PAGE + 8, 8)));
    say("read into what nobody may touch: %s", err(read(zeros, hole + 3 * PAGE + 8, 8)));
    say("up to a hole: %zd", read(zeros, hole + PAGE - 8, 16));
    say("write from a hole: %s", err(write(pipes[1], hole + PAGE, 8)));
    struct iovec vector[2] = {{buffer, 4}, {hole + PAGE, 4}};
    say("writev with a hole: %s", err(writev(pipes[1], vector, 2)));
    say("a vector in a hole: %s", err(writev(pipes[1], (struct iovec *)(hole + PAGE), 1)));
    say("a message in a hole: %s", err(sendmsg(ends[0][0], (struct msghdr *)(hole + PAGE), 0)));
    say("a path in a hole: %s", err(open(hole + PAGE, O_RDONLY)));
    volatile size_t too_many = 5000, too_long = -1; // The compiler would warn.
    say("too many parts: %s", err(writev(pipes[1], vector, too_many)));
    say("a closed descriptor: %s", err(read(999, buffer, 8)));
    say("a length beyond the end: %s", err(read(zeros, buffer, too_long)));

    // A path that goes on in a page that is far, and an answer in another.
    char *path = anon(4 * PAGE), *name = path + 2 * PAGE - 6;
    strcpy(name, "/dev/null");
    press();
    *(volatile char *)name = '/';
    struct stat *status = (struct stat *)(path + 40);
    say("stat: %s, %d", err(stat(name, status)), (int)S_ISCHR(status->st_mode));
    press();
    *(volatile char *)name = '/';
    say("open: %s", err(open(name, O_RDONLY)));

    // Processes that use the storage of this thread: one that it waits for, and one that it does not.
    press();
    child = vfork();
    if (child == 0) _exit(write(pipes[1], buffer, 3) == 3 && read(pipes[0], buffer, 3) == 3 ? 11 : 12);
    reap("vfork", child);
    char *stack = anon(64 * PAGE);
    child = clone(shared_storage, stack + 60 * PAGE, CLONE_VM | SIGCHLD, buffer);
    NEED(child > 0);
    for (int i = 0; i < 1000; i++) NEED(write(handler_pipe[1], handler_buffer, 5) == 5 && read(handler_pipe[0], handler_buffer, 5) == 5);
    NEED(write(pipes[1], "abc", 3) == 3);
    reap("clone", child);
    say("it has read %.3s", buffer);

    int epoll = epoll_create1(0);
    struct epoll_event *events = (struct epoll_event *)anon(PAGE), wanted = {.events = EPOLLIN, .data.u64 = 77};
    NEED(epoll_ctl(epoll, EPOLL_CTL_ADD, pipes[0], &wanted) == 0 && write(pipes[1], "abc", 3) == 3);
    press();
    int ready = epoll_wait(epoll, events, 100, -1);
    say("epoll_wait: %d, %d", ready, (int)events[0].data.u64);
    ready = epoll_wait(epoll, events, 100, -1);
    say("epoll_wait: %d, %d", ready, (int)events[0].data.u64);
    struct pollfd *fds = (struct pollfd *)anon(PAGE);
    *fds = (struct pollfd){pipes[0], POLLIN, 0};
    ready = poll(fds, 1, -1);
    say("poll: %d, %d", ready, fds->revents == POLLIN);
    return 0;
}
