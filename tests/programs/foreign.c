// One process reads another's far memory, and its own through the back door: debuggers and crash reporters do. A page that
// is far must read right or fail with an error, never read as something else.
#include "probe.h"
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

static size_t bytes = 16 * MIB;

// 0 when all right, 1 when refused, 2 when wrong.
static int judge(ssize_t got, char *copy) {
    if (got < 0) return 1;
    return wrong(copy, got / 8 * 8, 1) ? 2 : 0;
}

int main(void) {
    char *area = anon(bytes), *copy = anon(MIB);
    fill(area, bytes, 1);
    press();
    int worst = 0;
    int memory = open("/proc/self/mem", O_RDONLY);
    NEED(memory >= 0);
    int verdict = judge(pread(memory, copy, MIB, (off_t)(uintptr_t)area), copy);
    if (verdict > worst) worst = verdict;
    press();
    struct iovec mine = {copy, MIB}, theirs = {area, MIB};
    verdict = judge(process_vm_readv(getpid(), &mine, 1, &theirs, 1, 0), copy);
    if (verdict > worst) worst = verdict;
    press();
    int ready[2], go[2];
    NEED(pipe(ready) == 0 && pipe(go) == 0);
    pid_t child = fork();
    if (child == 0) {
        press();
        NEED(write(ready[1], "x", 1) == 1);
        char c;
        NEED(read(go[0], &c, 1) == 1);
        _exit(wrong(area, bytes, 1) ? 1 : 0);
    }
    char c;
    NEED(read(ready[0], &c, 1) == 1);
    memset(copy, 0, MIB);
    verdict = judge(process_vm_readv(child, &mine, 1, &theirs, 1, 0), copy);
    if (verdict > worst) worst = verdict;
    NEED(write(go[1], "x", 1) == 1);
    reap("child that was read", child);
    say("never wrong: %s", worst == 2 ? "WRONG" : "true");
    say("area: %zu wrong", wrong(area, bytes, 1));
    return 0;
}
