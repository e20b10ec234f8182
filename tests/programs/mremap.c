// mremap in all its forms on far memory: contents travel, old places vanish, errors are the kernel's.
#include "probe.h"

static long result_of(void *at) { return at == MAP_FAILED ? -1 : 0; }

int main(void) {
    catch_faults();
    char *area = anon(8 * MIB);
    fill(area, 8 * MIB, 1);
    press();
    char *moved = mremap(area, 8 * MIB, 32 * MIB, MREMAP_MAYMOVE);
    say("grow: %s, %zu wrong, tail %zu nonzero", err(result_of(moved)), wrong(moved, 8 * MIB, 1), nonzero(moved + 8 * MIB, 24 * MIB));
    fill(moved, 32 * MIB, 2);
    press();
    char *shrunk = mremap(moved, 32 * MIB, 6 * MIB, 0);
    say("shrink: %s, same place %d, %zu wrong", err(result_of(shrunk)), shrunk == moved, wrong(shrunk, 6 * MIB, 2));
    TRY("read behind the end", shrunk, (void)*(volatile char *)(shrunk + 6 * MIB));
    char *target = anon(16 * MIB);
    fill(target, 16 * MIB, 3);
    press();
    char *fixed = mremap(shrunk, 6 * MIB, 10 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, target);
    say("move onto used memory: %s, there %d, %zu wrong, %zu nonzero, rest %zu wrong", err(result_of(fixed)), fixed == target,
        wrong(fixed, 6 * MIB, 2), nonzero(fixed + 6 * MIB, 4 * MIB), wrong(target, 16 * MIB, 3) - wrong(target, 10 * MIB, 3));
    TRY("the old place", shrunk, (void)*(volatile char *)shrunk);
    press();
    say("after pressure: %zu wrong", wrong(fixed, 6 * MIB, 2));
    char *middle = mremap(fixed + 2 * MIB, 1 * MIB, 3 * MIB, MREMAP_MAYMOVE);
    say("from the middle: %s", err(result_of(middle)));
    TRY("the hole it left", fixed, (void)*(volatile char *)(fixed + 2 * MIB));
    uint64_t before = sum(middle, 1 * MIB);
    press();
    say("its contents: %d, tail %zu nonzero", before == sum(middle, 1 * MIB), nonzero(middle + MIB, 2 * MIB));
    char *kept = mremap(middle, 3 * MIB, 3 * MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    say("DONTUNMAP: %s", err(result_of(kept)));
    if (kept != MAP_FAILED) say("%s, old place %zu nonzero", sum(kept, 1 * MIB) == before ? "moved" : "lost", nonzero(middle, 3 * MIB));
    say("cannot grow in place: %s", err(result_of(mremap(target, 4 * PAGE, 64 * MIB, 0))));
    say("new length 0: %s", err(result_of(mremap(target, PAGE, 0, MREMAP_MAYMOVE))));
    say("odd address: %s", err(result_of(mremap(target + 1, PAGE, 2 * PAGE, MREMAP_MAYMOVE))));
    say("bad flags: %s", err(result_of(mremap(target, PAGE, 2 * PAGE, 0x100))));
    say("fixed without maymove: %s", err(result_of(mremap(target, PAGE, PAGE, MREMAP_FIXED, middle))));
    say("overlap: %s", err(result_of(mremap(target, 4 * PAGE, 4 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target + PAGE))));
    say("nothing there: %s", err(result_of(mremap((void *)(1ull << 40), PAGE, 2 * PAGE, MREMAP_MAYMOVE))));
    say("across a hole: %s", err(result_of(mremap(fixed, 4 * MIB, 8 * MIB, MREMAP_MAYMOVE))));
    // realloc of large blocks is mremap; a vector that grows does this all the time.
    uint64_t *vector = NULL;
    size_t count = 0;
    for (size_t bytes = 1 * MIB; bytes <= 48 * MIB; bytes += bytes / 2 / PAGE * PAGE) {
        vector = realloc(vector, bytes);
        NEED(vector);
        for (; count < bytes / 8; count++) vector[count] = mix(count);
    }
    size_t bad = 0;
    for (size_t i = 0; i < count; i++) bad += vector[i] != mix(i);
    say("vector of %zu words: %zu wrong", count, bad);
    // Protection travels.
    char *sealed = anon(2 * MIB);
    fill(sealed, 2 * MIB, 5);
    NEED(mprotect(sealed, 2 * MIB, PROT_READ) == 0);
    press();
    char *sealed_moved = mremap(sealed, 2 * MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, anon(2 * MIB));
    say("read-only moved: %s, %zu wrong", err(result_of(sealed_moved)), wrong(sealed_moved, 2 * MIB, 5));
    TRY("write to it", sealed_moved, *(volatile char *)sealed_moved = 1);
    // Many moves of one page among many.
    char *pages[512];
    for (int i = 0; i < 512; i++) { pages[i] = anon(PAGE); fill(pages[i], PAGE, 100 + i); }
    press();
    for (int i = 0; i < 512; i++) {
        pages[i] = mremap(pages[i], PAGE, 2 * PAGE, MREMAP_MAYMOVE);
        NEED(pages[i] != MAP_FAILED);
    }
    bad = 0;
    for (int i = 0; i < 512; i++) bad += wrong(pages[i], PAGE, 100 + i) + nonzero(pages[i] + PAGE, PAGE);
    say("512 small moves: %zu wrong", bad);
    return 0;
}
