// The memory calls and their corners, on memory that is partly far: results, errors, signals and contents.
#include "probe.h"

static long result_of(void *at) { return at == MAP_FAILED ? -1 : 0; }

int main(void) {
    catch_faults();
    int rw = PROT_READ | PROT_WRITE, private = MAP_PRIVATE | MAP_ANONYMOUS;

    // Errors that do not depend on contents.
    say("length 0: %s", err(result_of(mmap(NULL, 0, rw, private, -1, 0))));
    say("no kind: %s", err(result_of(mmap(NULL, PAGE, rw, MAP_ANONYMOUS, -1, 0))));
    say("both kinds wrong: %s", err(result_of(mmap(NULL, PAGE, rw, MAP_ANONYMOUS | 0x0c, -1, 0))));
    say("bad descriptor: %s", err(result_of(mmap(NULL, PAGE, rw, MAP_PRIVATE, 999, 0))));
    say("odd offset: %s", err(result_of(mmap(NULL, PAGE, rw, MAP_PRIVATE, 0, 123))));
    say("fixed, odd address: %s", err(result_of(mmap((void *)0x10001, PAGE, rw, private | MAP_FIXED, -1, 0))));
    say("larger than any address space: %s", err(result_of(mmap(NULL, (size_t)1 << 62, rw, private | MAP_NORESERVE, -1, 0))));
    say("length that wraps: %s", err(result_of(mmap(NULL, (size_t)-1, rw, private, -1, 0))));
    say("munmap odd address: %s", err(munmap((void *)1, PAGE)));
    say("munmap length 0: %s", err(munmap((void *)PAGE, 0)));
    say("munmap of nothing: %s", err(munmap((void *)(1ull << 40), PAGE)));

    // Holes.
    size_t bytes = 24 * MIB;
    char *area = anon(bytes);
    fill(area, bytes, 7);
    press();
    say("punch a hole: %s", err(munmap(area + 8 * MIB, 1 * MIB)));
    say("before the hole: %zu wrong", wrong(area, 8 * MIB, 7));
    TRY("read in the hole", area, (void)*(volatile char *)(area + 8 * MIB + 5));
    TRY("write at its end", area, *(volatile char *)(area + 9 * MIB - 1) = 1);
    TRY("read after the hole", area, (void)*(volatile char *)(area + 9 * MIB));
    say("mprotect across the hole: %s", err(mprotect(area, bytes, PROT_READ)));
    TRY("write before the hole, now read-only", area, *(volatile char *)(area + PAGE) = 1);
    TRY("write after the hole, still writable", area, *(volatile char *)(area + 20 * MIB) = 2);
    say("mprotect back: %s", err(mprotect(area, 8 * MIB, rw)));
    say("madvise across the hole: %s", err(madvise(area, bytes, MADV_WILLNEED)));
    unsigned char seen[4096];
    say("mincore in the hole: %s", err(mincore(area + 8 * MIB, PAGE, seen)));
    say("mincore outside: %s", err(mincore(area, 16 * PAGE, seen)));
    say("msync: %s", err(msync(area, 8 * MIB, MS_SYNC)));
    say("fill the hole at a fixed place: %s",
        err(result_of(mmap(area + 8 * MIB, 1 * MIB, rw, private | MAP_FIXED_NOREPLACE, -1, 0))));
    say("fill it twice: %s", err(result_of(mmap(area + 8 * MIB, 1 * MIB, rw, private | MAP_FIXED_NOREPLACE, -1, 0))));
    say("the new part: %zu nonzero", nonzero(area + 8 * MIB, 1 * MIB));
    fill(area, bytes, 8);
    press();
    say("one piece again: %zu wrong", wrong(area, bytes, 8));
    say("unmap across two mappings: %s", err(munmap(area + 7 * MIB, 3 * MIB)));
    say("unmap again: %s", err(munmap(area + 7 * MIB, 3 * MIB)));
    say("replace by force: %s", err(result_of(mmap(area, 12 * MIB, rw, private | MAP_FIXED, -1, 0))));
    say("replaced: %zu nonzero", nonzero(area, 12 * MIB));
    press();
    say("replaced, later: %zu nonzero; rest: %zu wrong", nonzero(area, 12 * MIB),
        wrong(area, bytes, 8) - wrong(area, 12 * MIB, 8));
    say("unmap all: %s", err(munmap(area, bytes)));
    TRY("read after unmap", area, (void)*(volatile char *)(area + 20 * MIB));

    // Protection.
    char *guarded = anon(8 * MIB);
    fill(guarded, 8 * MIB, 9);
    press();
    NEED(mprotect(guarded, 4 * MIB, PROT_READ) == 0);
    NEED(mprotect(guarded + 4 * MIB, 4 * MIB, PROT_NONE) == 0);
    say("read-only, far: %zu wrong", wrong(guarded, 4 * MIB, 9));
    TRY("write to read-only", guarded, *(volatile char *)(guarded + 12345) = 1);
    TRY("read of no access", guarded, (void)*(volatile char *)(guarded + 5 * MIB + 1));
    press();
    TRY("write to read-only, far", guarded, *(volatile char *)(guarded + 12345) = 1);
    TRY("read of no access, far", guarded, (void)*(volatile char *)(guarded + 5 * MIB + 1));
    NEED(mprotect(guarded, 8 * MIB, rw) == 0);
    say("all back: %zu wrong", wrong(guarded, 8 * MIB, 9));
    for (size_t at = 0; at < 8 * MIB; at += 2 * PAGE) NEED(mprotect(guarded + at, PAGE, PROT_READ) == 0);
    press();
    say("every second page read-only: %zu wrong", wrong(guarded, 8 * MIB, 9));
    TRY("even page", guarded, *(volatile char *)(guarded + 40 * PAGE) = 1);
    TRY("odd page", guarded, *(volatile char *)(guarded + 41 * PAGE) = 1);
    NEED(mprotect(guarded, 8 * MIB, rw) == 0);
    say("mprotect odd address: %s", err(mprotect(guarded + 1, PAGE, rw)));
    say("mprotect bad bits: %s", err(mprotect(guarded, PAGE, 0x4000)));
    say("mprotect of nothing: %s", err(mprotect((void *)(1ull << 40), PAGE, rw)));
    say("mprotect length 0: %s", err(mprotect(guarded, 0, rw)));

    // Code in anonymous memory, as just-in-time compilers make it.
    unsigned char code[] = {0xb8, 0x2a, 0x00, 0x00, 0x00, 0xc3};
    char *jit = anon(2 * MIB);
    for (size_t at = 0; at < 2 * MIB; at += PAGE) { memcpy(jit + at, code, sizeof code); jit[at + 1] = (char)(at / PAGE); }
    press();
    NEED(mprotect(jit, 2 * MIB, PROT_READ | PROT_EXEC) == 0);
    long total = 0;
    for (size_t at = 0; at < 2 * MIB; at += PAGE) total += ((int (*)(void))(jit + at))();
    press();
    for (size_t at = 0; at < 2 * MIB; at += PAGE) total += ((int (*)(void))(jit + at))();
    say("code in far memory: %ld", total);
    char *rwx = mmap(NULL, MIB, rw | PROT_EXEC, private, -1, 0);
    NEED(rwx != MAP_FAILED);
    memcpy(rwx, code, sizeof code);
    press();
    say("writable code: %d", ((int (*)(void))rwx)());

    // madvise.
    char *given = anon(16 * MIB);
    fill(given, 16 * MIB, 10);
    press();
    say("DONTNEED: %s", err(madvise(given + 4 * MIB, 4 * MIB, MADV_DONTNEED)));
    say("given back: %zu nonzero; neighbours: %zu %zu wrong", nonzero(given + 4 * MIB, 4 * MIB), wrong(given, 4 * MIB, 10),
        wrong(given, 16 * MIB, 10) - wrong(given, 8 * MIB, 10));
    fill(given + 4 * MIB, 4 * MIB, 11);
    press();
    say("used again: %zu wrong", wrong(given + 4 * MIB, 4 * MIB, 11));
    fill(given + 4 * MIB, 4 * MIB, 12);
    say("DONTNEED right after write: %s", err(madvise(given + 4 * MIB, 4 * MIB, MADV_DONTNEED)));
    press();
    say("still zero later: %zu nonzero", nonzero(given + 4 * MIB, 4 * MIB));
    say("FREE: %s", err(madvise(given + 12 * MIB, MIB, MADV_FREE)));
    fill(given + 12 * MIB, MIB, 13);
    press();
    say("written after FREE: %zu wrong", wrong(given + 12 * MIB, MIB, 13));
    say("POPULATE_WRITE: %s", err(madvise(given, 4 * MIB, MADV_POPULATE_WRITE)));
    say("POPULATE_READ: %s", err(madvise(given, 4 * MIB, MADV_POPULATE_READ)));
    say("populated: %zu wrong", wrong(given, 4 * MIB, 10));
    int hints[] = {MADV_NORMAL, MADV_RANDOM, MADV_SEQUENTIAL, MADV_WILLNEED, MADV_DONTDUMP, MADV_DODUMP, MADV_COLD};
    for (size_t i = 0; i < sizeof hints / sizeof *hints; i++) say("hint %d: %s", hints[i], err(madvise(given, MIB, hints[i])));
    madvise(given, 16 * MIB, MADV_HUGEPAGE); // Whether it is allowed depends on the kernel.
    madvise(given, 16 * MIB, MADV_PAGEOUT);
    say("after hints: %zu wrong", wrong(given, 4 * MIB, 10));
    say("madvise odd address: %s", err(madvise(given + 1, PAGE, MADV_DONTNEED)));
    say("madvise bad advice: %s", err(madvise(given, PAGE, 12345)));

    // MAP_POPULATE, MAP_STACK, MAP_GROWSDOWN, MAP_LOCKED's cousin.
    char *populated = mmap(NULL, 24 * MIB, rw, private | MAP_POPULATE, -1, 0);
    say("MAP_POPULATE: %s, %zu nonzero", err(result_of(populated)), nonzero(populated, 24 * MIB));
    char *stack = mmap(NULL, MIB, rw, private | MAP_STACK, -1, 0);
    say("MAP_STACK: %s", err(result_of(stack)));
    say("mlock: %s", err(mlock(stack, 4 * PAGE)));
    fill(stack, 4 * PAGE, 14);
    press();
    say("locked: %zu wrong", wrong(stack, 4 * PAGE, 14));
    say("munlock: %s", err(munlock(stack, 4 * PAGE)));
    NEED(munmap(stack, MIB) == 0);
    NEED(munmap(populated, 24 * MIB) == 0);
    // A hint that is not fixed must not replace anything.
    char *hinted = mmap(given, MIB, rw, private, -1, 0);
    say("hint on used memory: %s, %s", err(result_of(hinted)), hinted == given ? "replaced!" : "elsewhere");
    say("given is whole: %zu wrong", wrong(given, 4 * MIB, 10));
    // Address below 4 GiB on request.
    char *low = mmap(NULL, MIB, rw, private | MAP_32BIT, -1, 0);
    say("MAP_32BIT: %s, %s", err(result_of(low)), (uintptr_t)low < (1ull << 31) ? "low" : "high");
    fill(low, MIB, 15);
    press();
    say("low: %zu wrong", wrong(low, MIB, 15));
    char *exact = mmap((void *)0x123400000000, 4 * MIB, rw, private | MAP_FIXED_NOREPLACE, -1, 0);
    say("at an address of our choice: %s", exact == (char *)0x123400000000 ? "there" : err(result_of(exact)));
    fill(exact, 4 * MIB, 16);
    press();
    say("there: %zu wrong", wrong(exact, 4 * MIB, 16));
    return 0;
}
