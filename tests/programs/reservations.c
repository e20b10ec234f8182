// Address space that is reserved and hardly used, as garbage collectors, databases and sanitizers reserve it.
#include "probe.h"

int main(void) {
    catch_faults();
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t huge = (size_t)1 << 40; // 1 TiB.
    char *area = mmap(NULL, huge, PROT_READ | PROT_WRITE, flags, -1, 0);
    say("1 TiB reserved: %s", err(area == MAP_FAILED ? -1 : 0));
    if (area == MAP_FAILED) return 1;
    for (size_t i = 0; i < 8192; i++) *(uint64_t *)(area + (mix(i) % (huge / PAGE)) * PAGE + 8) = i;
    press();
    size_t bad = 0;
    for (size_t i = 0; i < 8192; i++) bad += *(uint64_t *)(area + (mix(i) % (huge / PAGE)) * PAGE + 8) != i;
    say("8192 scattered pages: %zu wrong", bad); // No two of these hashes share a page.
    say("give all back: %s", err(madvise(area, huge, MADV_DONTNEED)));
    bad = 0;
    for (size_t i = 0; i < 8192; i += 5) bad += *(uint64_t *)(area + (mix(i) % (huge / PAGE)) * PAGE + 8) != 0;
    say("given back: %zu nonzero", bad);
    say("unmap: %s", err(munmap(area, huge)));

    // Reserve without access, then commit piece by piece, decommit, release the ends to get alignment.
    size_t reserve = (size_t)64 << 30;
    char *heap = mmap(NULL, reserve, PROT_NONE, flags, -1, 0);
    NEED(heap != MAP_FAILED);
    char *aligned = (char *)(((uintptr_t)heap + (1 << 30) - 1) & ~(uintptr_t)((1 << 30) - 1));
    if (aligned > heap) NEED(munmap(heap, aligned - heap) == 0);
    NEED(munmap(aligned + ((size_t)32 << 30), heap + reserve - aligned - ((size_t)32 << 30)) == 0);
    TRY("reserved is not usable", aligned, *(volatile char *)(aligned + 77) = 1);
    for (size_t i = 0; i < 40; i++) {
        NEED(mprotect(aligned + i * 2 * MIB, MIB, PROT_READ | PROT_WRITE) == 0);
        fill(aligned + i * 2 * MIB, MIB, i);
    }
    press();
    bad = 0;
    for (size_t i = 0; i < 40; i++) bad += wrong(aligned + i * 2 * MIB, MIB, i);
    say("committed by mprotect: %zu wrong", bad);
    for (size_t i = 0; i < 40; i += 2) {
        NEED(mmap(aligned + i * 2 * MIB, MIB, PROT_NONE, flags | MAP_FIXED, -1, 0) != MAP_FAILED);
    }
    press();
    TRY("decommitted", aligned, (void)*(volatile char *)(aligned + 4 * MIB));
    bad = 0;
    for (size_t i = 1; i < 40; i += 2) bad += wrong(aligned + i * 2 * MIB, MIB, i);
    say("the others: %zu wrong", bad);
    for (size_t i = 0; i < 40; i += 2) {
        NEED(mmap(aligned + i * 2 * MIB, MIB, PROT_READ | PROT_WRITE, flags | MAP_FIXED, -1, 0) != MAP_FAILED);
        bad += nonzero(aligned + i * 2 * MIB, MIB);
    }
    say("committed again: %zu nonzero", bad);

    // More than one of them at once, and children that inherit them.
    char *many[6];
    for (int i = 0; i < 6; i++) {
        many[i] = mmap(NULL, (size_t)16 << 30, PROT_READ | PROT_WRITE, flags, -1, 0);
        NEED(many[i] != MAP_FAILED);
        for (int j = 0; j < 1000; j++) many[i][(size_t)j * 16 * MIB + i] = (char)j;
    }
    press();
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < 6; i++)
            for (int j = 0; j < 1000; j++) if (many[i][(size_t)j * 16 * MIB + i] != (char)j) _exit(1);
        _exit(0);
    }
    reap("child of a sparse parent", child);
    return 0;
}
