// Memory that the kernel may take away (MAP_DROPPABLE), as glibc's getrandom asks for since 2.41, and memory with flags that nobody knows yet:
// both stay the kernel's.
#include "probe.h"
#include <sys/random.h>

#ifndef MAP_DROPPABLE
#define MAP_DROPPABLE 0x08
#endif
#define UNKNOWN_FLAG 0x200

// Far-capable memory lies here if it asked for no address.
static const char *place(const void *at) {
    uintptr_t address = (uintptr_t)at;
    return address >= 0x200000000000 && address < 0x2c0000000000 ? "in the window" : "the kernel's";
}

// Whether the kernel's own flags of the mapping have these two letters.
static const char *has(const void *at, const char *letters) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    NEED(maps != NULL);
    char line[4096];
    int inside = 0, found = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) inside = (uintptr_t)at >= start && (uintptr_t)at < end;
        if (inside && strncmp(line, "VmFlags:", 8) == 0) found = strstr(line, letters) != NULL;
    }
    NEED(fclose(maps) == 0);
    return found ? "yes" : "no";
}

// Pages that are there hold the pattern. Others were dropped, and are zero.
static size_t damaged(const char *at, size_t pages, uint64_t seed) {
    size_t count = 0;
    for (size_t i = 0; i < pages; i++)
        count += wrong(at + i * PAGE, PAGE, seed + i) != 0 && nonzero(at + i * PAGE, PAGE) != 0;
    return count;
}

int main(void) {
    catch_faults();
    enum { PAGES = 1024 };
    int access = PROT_READ | PROT_WRITE;
    // The pages that were there before are far, and the filter is in force in all its parts.
    char *before = anon(4 * MIB);
    fill(before, 4 * MIB, 1);
    press();

    char *state = mmap(NULL, PAGES * PAGE, access, MAP_ANONYMOUS | MAP_DROPPABLE, -1, 0);
    say("droppable: %s", err(state == MAP_FAILED ? -1 : 0));
    if (state != MAP_FAILED) {
        say("it is %s, droppable: %s", place(state), has(state, " dp"));
        for (size_t i = 0; i < PAGES; i++) fill(state + i * PAGE, PAGE, 7 + i);
        press();
        say("%zu damaged", damaged(state, PAGES, 7));
        say("part away: %s", err(munmap(state + MIB, MIB)));
        say("read only: %s", err(mprotect(state, MIB, PROT_READ)));
        say("given back: %s", err(madvise(state, MIB, MADV_DONTNEED)));
        say("given back: %zu nonzero", nonzero(state, MIB));
        pid_t child = fork();
        // A child has none of it.
        if (child == 0) _exit(nonzero(state + 2 * MIB, 2 * MIB) != 0);
        reap("child", child);
        say("unmap: %s", err(munmap(state, PAGES * PAGE)));
    }
    char *other = mmap(NULL, 4 * MIB, access, MAP_PRIVATE | MAP_ANONYMOUS | UNKNOWN_FLAG, -1, 0);
    NEED(other != MAP_FAILED);
    fill(other, 4 * MIB, 3);
    say("with an unknown flag: %s, %zu wrong", place(other), wrong(other, 4 * MIB, 3));

    // A buffer that is far, from whoever answers: the vDSO or the kernel.
    unsigned char *random = (unsigned char *)before;
    press();
    NEED(getrandom(random, 256, 0) == 256);
    say("random: %s", nonzero(random, 256) > 0 ? "yes" : "no");
    return 0;
}
