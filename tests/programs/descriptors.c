// Descriptors belong to the program: it gets the lowest free numbers, may close all it does not know, and may lower its limit.
#include "probe.h"
#include <dirent.h>
#include <sys/resource.h>

static int shell_sees(void) { // Descriptors that a program we exec inherits beyond 0, 1, 2 and its own.
    int out[2];
    NEED(pipe(out) == 0);
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
        dup2(out[1], 1);
        execl("/bin/sh", "sh", "-c", "for n in 3 4 5 6 7 8 9; do if [ -e /proc/self/fd/$n ]; then :; fi; done; echo done", NULL);
        _exit(127);
    }
    close(out[1]);
    char text[100] = "";
    ssize_t n = read(out[0], text, 99);
    close(out[0]);
    int status;
    NEED(waitpid(child, &status, 0) == child);
    return n == 5 && status == 0;
}

int main(void) {
    size_t bytes = 32 * MIB;
    char *area = anon(bytes);
    fill(area, bytes, 1);
    press();
    say("close_range(3, all): %s", err(close_range(3, ~0u, 0)));
    press();
    say("memory: %zu wrong", wrong(area, bytes, 1));
    say("next descriptor: %d", open("/dev/null", O_RDONLY));
    say("and the next: %d", dup(0));
    NEED(close(3) == 0 && close(4) == 0);
    for (int fd = 3; fd < 70000; fd++) close(fd);
    press();
    say("closed one by one: %zu wrong, next %d", wrong(area, bytes, 1), open("/dev/null", O_RDONLY));
    say("CLOEXEC on all: %s", err(close_range(3, ~0u, CLOSE_RANGE_CLOEXEC)));
    say("exec after that: %d", shell_sees());
    // Descriptors on top of every number that could be ours.
    int failed = 0;
    struct rlimit limit;
    NEED(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    for (int fd = 10; fd < 1000; fd++) failed += dup2(3, fd) != fd;
    say("dup2 over 10..1000: %d failed", failed);
    press();
    say("memory: %zu wrong", wrong(area, bytes, 1));
    int above = fcntl(3, F_DUPFD, 500);
    say("F_DUPFD from 500: %d", above);
    NEED(close_range(4, ~0u, 0) == 0);
    // What a program that looks into /proc/self/fd finds: only what it opened.
    DIR *directory = opendir("/proc/self/fd");
    NEED(directory);
    int seen = 0;
    for (struct dirent *entry; (entry = readdir(directory));) seen += entry->d_name[0] != '.' && atoi(entry->d_name) < 100;
    closedir(directory);
    say("in /proc/self/fd below 100: %d", seen);
    limit.rlim_cur = 16;
    NEED(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    int opened = 0;
    while (open("/dev/null", O_RDONLY) >= 0) opened++;
    say("under a limit of 16: %d more, then %s", opened, err(-1));
    press();
    say("memory: %zu wrong", wrong(area, bytes, 1));
    pid_t child = fork();
    if (child == 0) {
        size_t bad = wrong(area, bytes, 1);
        fill(area, bytes, 2);
        press();
        _exit(bad + wrong(area, bytes, 2) ? 1 : 0);
    }
    reap("child of a full table", child);
    NEED(close_range(3, ~0u, 0) == 0);
    // Closing the standard ones, as daemons do.
    int kept = dup(1);
    NEED(close(0) == 0 && close(2) == 0);
    press();
    say("without stdin and stderr: %zu wrong, next %d", wrong(area, bytes, 1), open("/dev/null", O_RDWR));
    close(kept);
    return 0;
}
