// The program break: grows, shrinks, and memory that comes back after a shrink is zero.
#include "probe.h"

int main(void) {
    char *start = sbrk(0);
    say("sbrk(0) twice: %d", start == sbrk(0));
    NEED(sbrk(24 * MIB) == start);
    say("fresh: %zu nonzero", nonzero(start, 24 * MIB));
    fill(start, 24 * MIB, 1);
    press();
    say("far: %zu wrong", wrong(start, 24 * MIB, 1));
    NEED(brk(start + 10 * MIB) == 0);
    say("shrunk: end at +%ld", (long)((char *)sbrk(0) - start));
    NEED(brk(start + 24 * MIB) == 0);
    say("regrown: %zu wrong, %zu nonzero", wrong(start, 10 * MIB, 1), nonzero(start + 10 * MIB, 14 * MIB));
    fill(start, 24 * MIB, 2);
    press();
    NEED(brk(start + 5 * PAGE + 100) == 0);
    say("to the middle of a page: end at +%ld", (long)((char *)sbrk(0) - start));
    NEED(brk(start + 24 * MIB) == 0);
    say("first pages: %zu wrong, later: %zu nonzero", wrong(start, 5 * PAGE, 2), nonzero(start + 6 * PAGE, 20 * MIB));
    // The raw call gives back the old break when it refuses, it does not set errno.
    // (The raw brk(0) itself is not compared: it shows the kernel's own break, a known limit.)
    long now = (long)sbrk(0);
    long refused = raw(SYS_brk, 1, 0, 0, 0, 0, 0);
    say("raw brk(1) refuses: %d", refused == now);
    long absurd = raw(SYS_brk, 0x7ffffffff000, 0, 0, 0, 0, 0);
    say("raw brk(too far) refuses: %d", absurd == now);
    say("brk beyond everything: %s", err(brk((void *)0x7ffffffff000)));
    pid_t child = fork();
    if (child == 0) {
        char *mine = sbrk(0);
        NEED(sbrk(4 * MIB) == mine);
        fill(mine, 4 * MIB, 3);
        press();
        say("child: %zu wrong of its own", wrong(mine, 4 * MIB, 3));
        _exit(0);
    }
    reap("child", child);
    say("parent's break has not moved: %d", (char *)sbrk(0) == start + 24 * MIB);
    // Small requests are malloc's, from the break.
    char *first = malloc(100), *second = malloc(100000);
    memset(first, 1, 100);
    memset(second, 2, 100000);
    press();
    say("malloc: %d %d", first[99], second[99999]);
    return 0;
}
