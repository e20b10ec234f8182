// mremap in all its forms on far memory: contents travel, old places vanish, errors are the kernel's.
#include "probe.h"

static long result_of(void *at) { return at == MAP_FAILED ? -1 : 0; }

// A place that belongs to us and is not mapped.
static char *hole(size_t bytes) {
    char *at = anon(bytes);
    NEED(munmap(at, bytes) == 0);
    return at;
}

static char *move_to(char *to, char *from, size_t bytes) {
    return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to);
}

// Another thread's accesses while memory moves to and fro between two places: each finds what was stored last, or a fault,
// and then it is at the other place.
enum { PLACE_BYTES = 64 * 4096, MOVES = 300 };
static char *volatile places[2];
static atomic_int moved_enough;
static size_t found_wrong;

static int try_access(volatile uint64_t *at, uint64_t *value, int write) {
    if (sigsetjmp(caught_at, 1)) return 0;
    expected = 1;
    if (write) *at = *value; else *value = *at;
    expected = 0;
    return 1;
}

// Where it went, with `place` tried first.
static int insist(size_t offset, uint64_t *value, int write, int place) {
    for (;; place = !place)
        if (try_access((volatile uint64_t *)(places[place] + offset), value, write)) return place;
}

static void *bystander(void *unused) {
    (void)unused;
    for (uint64_t n = 1; !atomic_load(&moved_enough); n++) {
        size_t offset = mix(n) % 64 * PAGE + 8;
        uint64_t stored = n, found = 0;
        int place = insist(offset, &stored, 1, 0);
        // First where it was not: older bytes must be gone from there.
        insist(offset, &found, 0, !place);
        found_wrong += found != n;
    }
    return NULL;
}

static void moves_under_a_bystander(void) {
    char *both = anon(2 * PLACE_BYTES);
    places[0] = both;
    places[1] = both + PLACE_BYTES;
    for (size_t i = 0; i < 64; i++) *(uint64_t *)(both + i * PAGE) = i + 1;
    NEED(munmap(places[1], PLACE_BYTES) == 0);
    pthread_t thread;
    NEED(pthread_create(&thread, NULL, bystander, NULL) == 0);
    size_t bad = 0;
    for (int i = 0; i < MOVES; i++) {
        NEED(move_to(places[(i + 1) % 2], places[i % 2], PLACE_BYTES) == places[(i + 1) % 2]);
        for (size_t j = 0; j < 64; j++) bad += *(uint64_t *)(places[(i + 1) % 2] + j * PAGE) != j + 1;
        if (i % 100 == 50) press();
    }
    atomic_store(&moved_enough, 1);
    pthread_join(thread, NULL);
    say("moved under a bystander: %zu wrong, and it found %zu wrong", bad, found_wrong);
}

// Files and shared memory in between, memory below 64 KiB, which is the kernel's, and a place nobody asked for.
static void memory_of_others(void) {
    int fd = scratch_file();
    char page[PAGE];
    for (int i = 0; i < 8; i++) { fill(page, PAGE, 70 + i); NEED(write(fd, page, PAGE) == (ssize_t)PAGE); }
    char *arena = anon(64 * PAGE);
    fill(arena, 64 * PAGE, 71);
    NEED(mmap(arena + 8 * PAGE, 8 * PAGE, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == arena + 8 * PAGE);
    char *file = move_to(arena + 32 * PAGE, arena + 8 * PAGE, 8 * PAGE);
    say("a file moves: %s, there %d, %zu wrong", err(result_of(file)), file == arena + 32 * PAGE, wrong(file + 2 * PAGE, PAGE, 72));
    TRY("where it was", arena, (void)*(volatile char *)(arena + 9 * PAGE));
    char *smaller = mremap(file, 8 * PAGE, 3 * PAGE, MREMAP_MAYMOVE);
    say("it shrinks: %s, in place %d, %zu wrong", err(result_of(smaller)), smaller == file, wrong(file + PAGE, PAGE, 71));
    TRY("behind it", arena, (void)*(volatile char *)(file + 3 * PAGE));
    for (int i = 0; i < 2; i++) {
        char *where = i ? arena + 8 * PAGE : file + 3 * PAGE;
        NEED(mmap(where, 5 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == where);
        say("anew: %zu nonzero", nonzero(where, 5 * PAGE));
        fill(where, 5 * PAGE, 80 + i);
    }
    press();
    say("after pressure: %zu wrong", wrong(file + 3 * PAGE, 5 * PAGE, 80) + wrong(arena + 8 * PAGE, 5 * PAGE, 81));
    char *small = anon(PAGE);
    fill(small, PAGE, 90);
    char *grown = (char *)raw(SYS_mremap, (long)small, PAGE, 2 * PAGE, MREMAP_MAYMOVE, (long)(arena + PAGE), 0);
    say("what is no argument does not matter: %s, %zu wrong", err(result_of(grown)), wrong(grown, PAGE, 90));
    char *inside = mremap(grown, 2 * PAGE, 2 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, arena + 48 * PAGE);
    say("small memory to a large one's place: %s, %zu wrong, %zu nonzero", err(result_of(inside)), wrong(inside, PAGE, 90), nonzero(inside + PAGE, PAGE));
    say("given back: %s", err(munmap(inside, 2 * PAGE)));
    TRY("then there", arena, (void)*(volatile char *)(arena + 48 * PAGE));
    press();
    say("the rest: %zu wrong", wrong(arena, 8 * PAGE, 71));
    close(fd);
}

// Nobody may read it, and it moves all the same.
static void sealed_memory(void) {
    char *sealed = anon(2 * MIB);
    for (int near = 0; near < 2; near++) {
        fill(sealed, 2 * MIB, 6 + near);
        if (!near) press();
        NEED(mprotect(sealed, 2 * MIB, PROT_NONE) == 0);
        char *moved = move_to(hole(2 * MIB), sealed, 2 * MIB);
        say("moved without leave to read: %s", err(result_of(moved)));
        TRY("read it", moved, (void)*(volatile char *)moved);
        NEED(mprotect(moved, 2 * MIB, PROT_READ | PROT_WRITE) == 0);
        say("opened: %zu wrong", wrong(moved, 2 * MIB, 6 + near));
        char *kept = mremap(moved, 2 * MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
        say("and left mapped: %s, %zu wrong, %zu nonzero", err(result_of(kept)), wrong(kept, 2 * MIB, 6 + near), nonzero(moved, 2 * MIB));
        sealed = kept;
    }
}

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
    sealed_memory();
    memory_of_others();
    moves_under_a_bystander();
    return 0;
}
