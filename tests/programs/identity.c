// A daemon's start: gives up root, changes its directory and session, goes on; then it forks and executes. Memory must follow.
// Prints "not root" and ends when it has nothing to give up.
#include "probe.h"
#include <grp.h>
#include <sys/prctl.h>

static size_t bytes = 32 * MIB;

// What a program does that such a daemon executes: it has never been root.
static int executed(void) {
    char *area = anon(bytes);
    fill(area, bytes, 4);
    press();
    say("executed, as user %d: %zu wrong", (int)getuid(), wrong(area, bytes, 4));
    pid_t child = fork();
    if (child == 0) {
        size_t bad = wrong(area, bytes, 4);
        fill(area, bytes, 5);
        press();
        _exit(bad + wrong(area, bytes, 5) ? 1 : 0);
    }
    reap("its child", child);
    say("itself: %zu wrong", wrong(area, bytes, 4));
    return 0;
}

static void execute(int program, const char *what) {
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
        char *words[] = {"identity", "executed", NULL};
        fexecve(program, words, environ);
        say("fexecve: %s", err(-1));
        _exit(1);
    }
    reap(what, child);
}

static void give_up_root(void) {
    NEED(setgroups(0, NULL) == 0);
    NEED(setresgid(65534, 65534, 65534) == 0);
    NEED(setresuid(65534, 65534, 65534) == 0);
}

int main(int argc, char **argv) {
    (void)argv;
    if (argc > 1) return executed();
    if (getuid() != 0) { say("not root"); return 0; }
    int program = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    NEED(program >= 0);
    // Before any memory is far.
    pid_t child = fork();
    if (child == 0) {
        give_up_root();
        execute(program, "executed by a small process");
        char *late = anon(bytes);
        fill(late, bytes, 6);
        press();
        say("far only after the change: %zu wrong", wrong(late, bytes, 6));
        _exit(0);
    }
    reap("a small process", child);

    char *area = anon(bytes);
    fill(area, bytes, 1);
    press();
    say("setsid or already leader: %d", setsid() != -1 || errno == EPERM);
    say("chdir: %s", err(chdir("/")));
    say("setgroups: %s", err(setgroups(0, NULL)));
    say("setgid: %s", err(setresgid(65534, 65534, 65534)));
    say("setuid: %s", err(setresuid(65534, 65534, 65534)));
    say("cannot go back: %s", err(setuid(0)));
    press();
    say("as nobody: %zu wrong", wrong(area, bytes, 1));
    fill(area, bytes, 2);
    for (int round = 0; round < 2; round++) {
        child = fork();
        NEED(child >= 0);
        if (child == 0) {
            size_t bad = wrong(area, bytes, 2);
            fill(area, bytes, 3);
            press();
            say("child of nobody: %zu wrong", bad + wrong(area, bytes, 3));
            execute(program, "executed by a child");
            _exit(0);
        }
        reap("child of nobody", child);
        say("undumpable: %s", err(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)));
    }
    say("dumpable: %d", prctl(PR_GET_DUMPABLE, 0, 0, 0, 0));
    press();
    say("memory: %zu wrong", wrong(area, bytes, 2));
    return 0;
}
