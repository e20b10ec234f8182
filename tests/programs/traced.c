// Parents that trace their children from the start: by vfork, as gdb does, and by fork, as most do.
#include "probe.h"
#include <sys/ptrace.h>

// Lets the child go on with every signal but the one that says that it has executed something.
static void follow(const char *what, pid_t child) {
    int status = 0, executed = 0;
    while (waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
        int signal = WSTOPSIG(status);
        executed += signal == SIGTRAP;
        NEED(ptrace(PTRACE_CONT, child, 0, signal == SIGTRAP ? 0 : signal) == 0);
    }
    if (WIFEXITED(status)) say_line("%s: executed %d times, exit %d", what, executed, WEXITSTATUS(status));
    else say_line("%s: executed %d times, signal %s", what, executed, sigabbrev_np(WTERMSIG(status)));
}

int main(int argc, char **argv) {
    if (argc > 1) {
        char *area = anon(32 * MIB);
        fill(area, 32 * MIB, 1);
        press();
        return wrong(area, 32 * MIB, 1) ? 1 : 5;
    }
    (void)argv;
    alarm(100);
    pid_t child = vfork();
    if (child == 0) {
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        signal(SIGHUP, SIG_DFL);
        execl("/no/such/program", "traced", NULL);
        execl("/proc/self/exe", "traced", "child", NULL);
        _exit(9);
    }
    follow("by vfork", child);
    child = vfork();
    if (child == 0) _exit(ptrace(PTRACE_TRACEME, 0, 0, 0) == 0 && ptrace(PTRACE_TRACEME, 0, 0, 0) == -1 ? 7 : 8);
    follow("by vfork, without exec", child);
    child = fork();
    if (child == 0) {
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        raise(SIGSTOP);
        execl("/proc/self/exe", "traced", "child", NULL);
        _exit(9);
    }
    // Whoever is traced meets each of its signals: the first one that was sent by itself.
    int status;
    while (waitpid(child, &status, 0) == child && WIFSTOPPED(status) && WSTOPSIG(status) != SIGSTOP)
        NEED(ptrace(PTRACE_CONT, child, 0, WSTOPSIG(status)) == 0);
    say("stopped by itself: %d", WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    NEED(ptrace(PTRACE_CONT, child, 0, 0) == 0);
    follow("by fork", child);
    return 0;
}
