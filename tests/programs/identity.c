// A daemon's start: gives up root, changes its root directory and session, forks twice, goes on. Memory must follow.
// Prints "not root" and ends when it has nothing to give up.
#include "probe.h"
#include <grp.h>
#include <sys/prctl.h>

int main(void) {
    if (getuid() != 0) { say("not root"); return 0; }
    size_t bytes = 32 * MIB;
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
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
        size_t bad = wrong(area, bytes, 2);
        fill(area, bytes, 3);
        press();
        bad += wrong(area, bytes, 3);
        pid_t grandchild = fork();
        if (grandchild == 0) { press(); _exit(wrong(area, bytes, 3) ? 1 : 0); }
        reap("grandchild", grandchild);
        _exit(bad ? 1 : 0);
    }
    reap("child as nobody", child);
    child = fork();
    if (child == 0) { execl("/bin/sh", "sh", "-c", "exec sort -r /etc/passwd | wc -l > /dev/null; exit 4", NULL); _exit(126); }
    reap("exec as nobody", child);
    say("undumpable: %s", err(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)));
    press();
    say("memory: %zu wrong", wrong(area, bytes, 2));
    child = fork();
    if (child == 0) { size_t bad = wrong(area, bytes, 2); press(); _exit(bad + wrong(area, bytes, 2) ? 1 : 0); }
    reap("child of an undumpable parent", child);
    return 0;
}
