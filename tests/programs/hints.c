// Mappings at a place that the program would like to have: it gets it where it is free, as from the kernel, and what lies there is far
// memory like any other, with all that can be done with a mapping.
#include "probe.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

static void *at(uintptr_t want, size_t bytes, int prot, int flags) {
    return mmap((void *)want, bytes, prot, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

static void *at_raw(uintptr_t want, size_t bytes, int prot, int flags) {
    return (void *)raw(SYS_mmap, (long)want, (long)bytes, prot, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

// Maps, and says whether it is there; unmaps again.
static void place(const char *what, uintptr_t want, size_t bytes, int prot, int flags) {
    char *got = at(want, bytes, prot, flags);
    NEED(got != MAP_FAILED);
    say("%s: %s", what, got == (char *)want ? "there" : "elsewhere");
    NEED(munmap(got, bytes) == 0);
}

int main(void) {
    enum { READ_WRITE = PROT_READ | PROT_WRITE };
    place("reservation, as of ZGC", 0x40000000000, 1024 * MIB, PROT_NONE, MAP_NORESERVE);
    place("reservation", 0x50000000000, 1024 * MIB, PROT_NONE, 0);
    place("64 MiB, as of GHC", 0x4200000000, 64 * MIB, READ_WRITE, MAP_NORESERVE);
    place("below 2 GiB, as of LuaJIT", 0x40000000, MIB, READ_WRITE, 0);
    place("not replacing", 0x60000000000, 64 * MIB, READ_WRITE, MAP_FIXED_NOREPLACE);
    place("an arena, as of Go", 0xc000000000, 64 * MIB, PROT_NONE, 0);
    place("the same place again", 0xc000000000, 64 * MIB, READ_WRITE, 0);
    char *code = (char *)((uintptr_t)main & ~(uintptr_t)0xffff);
    int near = 0;
    for (int i = 1; i <= 32; i++) {
        char *got = at((uintptr_t)code - i * 16 * MIB, 64 << 10, READ_WRITE, 0);
        near += got == code - i * 16 * MIB;
        NEED(mprotect(got, 64 << 10, PROT_READ | PROT_EXEC) == 0);
        NEED(munmap(got, 64 << 10) == 0);
    }
    say("near code: %s", near > 16 ? "there" : "elsewhere");

    // A heap that is reserved by a raw call and then opened piece by piece, as a garbage collector does it.
    enum { ARENA = 64, PIECE = 4 };
    char *arena = at_raw(0xc000000000, ARENA * MIB, PROT_NONE, 0);
    say("arena: %s", arena == (char *)0xc000000000 ? "there" : "elsewhere");
    for (size_t i = 0; i < ARENA; i += PIECE) {
        char *piece = arena + i * MIB;
        NEED(at((uintptr_t)piece, PIECE * MIB, READ_WRITE, MAP_FIXED) == piece);
        fill(piece, PIECE * MIB, i);
    }
    // The next one goes on where this one ends, and a mapping crosses from one to the other.
    char *next = at_raw((uintptr_t)arena + ARENA * MIB, ARENA * MIB, PROT_NONE, 0);
    say("next arena: %s", next == arena + ARENA * MIB ? "there" : "elsewhere");
    NEED(mprotect(next - MIB, 2 * MIB, READ_WRITE) == 0);
    fill(next, MIB, 99);
    press();
    size_t off = 0;
    for (size_t i = 0; i < ARENA; i += PIECE) off += wrong(arena + i * MIB, PIECE * MIB, i);
    say("%zu wrong, %zu in the next one", off, wrong(next, MIB, 99));

    // System calls with buffers there.
    int fd = scratch_file();
    press();
    say("written: %zd", pwrite(fd, arena + 5 * MIB, 8 * MIB, 0));
    press();
    say("read: %zd", pread(fd, arena + 20 * MIB, 8 * MIB, 0));
    say("as written: %d", memcmp(arena + 5 * MIB, arena + 20 * MIB, 8 * MIB));
    struct timespec *time = (struct timespec *)(arena + 30 * MIB);
    press();
    say("the time: %s", err(raw(SYS_clock_gettime, CLOCK_REALTIME, (long)time, 0, 0, 0, 0) ? -1 : 0));
    int pipes[2];
    NEED(pipe(pipes) == 0);
    press();
    NEED(write(pipes[1], arena + 3 * MIB, 4096) == 4096 && read(pipes[0], next + 4096, 4096) == 4096);
    say("through a pipe: %d", memcmp(next + 4096, arena + 3 * MIB, 4096));

    // Given up, protected, moved, grown, shared with a child.
    fill(arena, PIECE * MIB, 7);
    press();
    NEED(madvise(arena, MIB, MADV_DONTNEED) == 0);
    say("given up: %zu not zero, beside it %zu wrong", nonzero(arena, MIB), wrong(arena + PIECE * MIB, PIECE * MIB, PIECE));
    NEED(mprotect(arena + MIB, MIB, PROT_READ) == 0);
    catch_faults();
    TRY("read-only", arena + MIB, *(volatile char *)(arena + MIB) = 1);
    NEED(munmap(arena + 2 * MIB, MIB) == 0);
    TRY("a hole", arena + 2 * MIB, *(volatile char *)(arena + 2 * MIB) = 1);
    unsigned char resident[1];
    say("mincore in the hole: %s", err(mincore(arena + 2 * MIB, PAGE, resident)));
    say("not replacing: %s", err(at((uintptr_t)arena + 4 * MIB, PAGE, READ_WRITE, MAP_FIXED_NOREPLACE) == MAP_FAILED ? -1 : 0));
    NEED(at((uintptr_t)arena + 2 * MIB, MIB, READ_WRITE, MAP_FIXED_NOREPLACE) == arena + 2 * MIB);
    say("the hole filled: %zu not zero", nonzero(arena + 2 * MIB, MIB));
    char *moved = mremap(arena + 8 * MIB, 4 * MIB, 8 * MIB, MREMAP_MAYMOVE);
    NEED(moved != MAP_FAILED);
    press();
    say("moved: %zu wrong, %zu not zero", wrong(moved, 4 * MIB, 8), nonzero(moved + 4 * MIB, 4 * MIB));
    char *shared = mmap(arena + 8 * MIB, MIB, READ_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    NEED(shared == arena + 8 * MIB);
    NEED(ftruncate(fd, 16 * MIB) == 0);
    char *file = mmap(arena + 9 * MIB, MIB, READ_WRITE, MAP_SHARED, fd, 0);
    say("a file at a free place: %s", file == arena + 9 * MIB ? "there" : "elsewhere");
    say("its content: %d", memcmp(file, arena + 20 * MIB, MIB));
    pid_t child = fork();
    if (child == 0) {
        press();
        size_t bad = wrong(arena + 40 * MIB, PIECE * MIB, 40);
        strcpy(shared, "from the child");
        fill(arena + 40 * MIB, PIECE * MIB, 1);
        _exit(bad != 0);
    }
    reap("child", child);
    say("%s; mine: %zu wrong", shared, wrong(arena + 40 * MIB, PIECE * MIB, 40));
    NEED(munmap(arena, 2 * ARENA * MIB) == 0);
    place("afterwards", 0xc000000000, 128 * MIB, READ_WRITE, 0);
    // Many: the first ones get their place in any case.
    int there = 0;
    for (int i = 0; i < 40; i++) {
        char *got = at(0x100000000000 + ((uintptr_t)i << 36), 4 * MIB, READ_WRITE, 0);
        there += got == (char *)(0x100000000000 + ((uintptr_t)i << 36));
        fill(got, 4 * MIB, i);
    }
    off = 0;
    for (int i = 0; i < 40; i++) off += wrong((char *)(0x100000000000 + ((uintptr_t)i << 36)), 4 * MIB, i);
    say("many: %d there, %zu wrong", there, off);
    return 0;
}
