// A daemon's start: gives up root, changes its directory and session, goes on. Memory must follow.
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
    // Processes started after the change of user cannot reach the job's memory server: a known limit, not tested here.
    say("undumpable: %s", err(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)));
    press();
    say("memory: %zu wrong", wrong(area, bytes, 2));
    return 0;
}
