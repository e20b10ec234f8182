// Random histories of memory calls on one arena, checked page by page against a model; threads read what does not change,
// children check what they inherit. Each history begins with an empty arena, so that its seed alone says what happens.
// While threads run, nobody else may ask the kernel for memory: it could give a hole of the arena. Arguments: rounds, first seed.
#include "probe.h"

enum { PAGES = 12288 }; // 48 MiB.
static char *arena;
// What each page must hold: 0 = zeros, else the seed of its pattern; -1 = not mapped.
static int64_t model[PAGES];
static int writable[PAGES];

static void check(size_t first, size_t count, const char *when) {
    for (size_t i = first; i < first + count; i++) {
        if (model[i] < 0) continue;
        size_t bad = model[i] ? wrong(arena + i * PAGE, PAGE, model[i]) : nonzero(arena + i * PAGE, PAGE);
        if (bad) DIE("%s: page %zu has %zu wrong words", when, i, bad);
    }
}

static void history(uint64_t seed, int steps) {
    uint64_t state = seed;
    int fd = scratch_file();
    NEED(mmap(arena, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == arena);
    for (size_t i = 0; i < PAGES; i++) { model[i] = 0; writable[i] = 1; }
    for (int step = 0; step < steps; step++) {
        state = mix(state + step);
        size_t first = state % PAGES, count = (state >> 16) % 300 + 1;
        if (first + count > PAGES) count = PAGES - first;
        char *at = arena + first * PAGE;
        int kind = (state >> 32) % 12;
        size_t all_mapped = 1, all_writable = 1;
        for (size_t i = first; i < first + count; i++) { all_mapped &= model[i] >= 0; all_writable &= model[i] >= 0 && writable[i]; }
        switch (kind) {
        case 0: case 1: case 2: // Write whole pages.
            for (size_t i = first; i < first + count; i++)
                if (model[i] >= 0 && writable[i]) { model[i] = step + 1; fill(arena + i * PAGE, PAGE, step + 1); }
            break;
        case 3: // Read.
            check(first, count, "read");
            break;
        case 4: // Give back.
            if (madvise(at, count * PAGE, MADV_DONTNEED) == 0 && all_mapped)
                for (size_t i = first; i < first + count; i++) model[i] = 0;
            else for (size_t i = first; i < first + count; i++) if (model[i] >= 0) model[i] = 0;
            break;
        case 5: // Unmap.
            NEED(munmap(at, count * PAGE) == 0);
            for (size_t i = first; i < first + count; i++) model[i] = -1;
            break;
        case 6: // Map anew.
            NEED(mmap(at, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
            for (size_t i = first; i < first + count; i++) { model[i] = 0; writable[i] = 1; }
            break;
        case 7: // Protect.
            if (all_mapped) {
                int on = (state >> 50) & 1;
                NEED(mprotect(at, count * PAGE, on ? PROT_READ | PROT_WRITE : PROT_READ) == 0);
                for (size_t i = first; i < first + count; i++) writable[i] = on;
            }
            break;
        case 8: { // Move to another place of the arena.
            size_t target = (state >> 40) % PAGES;
            // One mapping only: pages of different protection cannot move together.
            size_t run = 1;
            if (model[first] < 0) break;
            while (run < count && run < 64 && model[first + run] >= 0 && writable[first + run] == writable[first]) run++;
            if (target + run > PAGES || (target < first + run && first < target + run)) break;
            char *moved = mremap(at, run * PAGE, run * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, arena + target * PAGE);
            if (moved == MAP_FAILED) {
                // Pages of separate mappings, which kernels before 6.17 refuse, some after they have unmapped the target.
                NEED(munmap(arena + target * PAGE, run * PAGE) == 0);
                for (size_t i = 0; i < run; i++) model[target + i] = -1;
                break;
            }
            for (size_t i = 0; i < run; i++) {
                model[target + i] = model[first + i];
                writable[target + i] = writable[first + i];
                model[first + i] = -1;
            }
            break;
        }
        case 9: { // A child checks everything, changes its own, and checks again.
            if (step % 8) break;
            pid_t child = fork();
            NEED(child >= 0);
            if (child == 0) {
                check(0, PAGES, "child");
                for (size_t i = first; i < first + count; i++)
                    if (model[i] >= 0 && writable[i]) { model[i] = step + 1; fill(arena + i * PAGE, PAGE, step + 1); }
                check(first, count, "child's own");
                _exit(0);
            }
            int status;
            NEED(waitpid(child, &status, 0) == child);
            if (status) DIE("seed %d: a child ended with status %#x in step %d", (int)seed, status, step);
            break;
        }
        case 10: // Out to a file and in again somewhere else.
            if (all_mapped) {
                NEED(pwrite(fd, at, count * PAGE, 0) == (ssize_t)(count * PAGE));
                size_t target = (state >> 40) % PAGES;
                int room = target + count <= PAGES && (target >= first + count || first >= target + count);
                for (size_t i = 0; room && i < count; i++) room &= model[target + i] >= 0 && writable[target + i];
                if (room) {
                    NEED(pread(fd, arena + target * PAGE, count * PAGE, 0) == (ssize_t)(count * PAGE));
                    for (size_t i = 0; i < count; i++) model[target + i] = model[first + i];
                }
            }
            break;
        case 11: // Zeros.
            if (all_writable) {
                memset(at, 0, count * PAGE);
                for (size_t i = first; i < first + count; i++) model[i] = 0;
            }
            break;
        }
    }
    check(0, PAGES, "end");
    close(fd);
    size_t mapped = 0, zero = 0;
    for (size_t i = 0; i < PAGES; i++) { mapped += model[i] >= 0; zero += model[i] == 0; }
    // mremap's refusals depend on how mappings are cut, and so may the counts; that everything matches may not.
    say("seed %d: %d steps, everything matches: %d", (int)seed, steps, mapped > 0 && zero <= mapped);
}

enum { READERS = 2, READER_BYTES = 3 << 20 };
static atomic_int stop;
static char *readers_memory[READERS];
static void *reader(void *number) {
    uint64_t mine = (uint64_t)number;
    while (!atomic_load(&stop))
        if (wrong(readers_memory[mine], READER_BYTES, mine + 1000)) DIE("a bystander's memory changed");
    return NULL;
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 3;
    int seed = argc > 2 ? atoi(argv[2]) : 0;
    arena = anon(PAGES * PAGE);
    for (int round = 0; round < rounds; round++) history(seed + round + 1, 400);
    // Without holes, while memory and stacks of the threads find their places.
    NEED(mmap(arena, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == arena);
    pthread_t threads[READERS];
    for (size_t i = 0; i < READERS; i++) {
        readers_memory[i] = anon(READER_BYTES);
        fill(readers_memory[i], READER_BYTES, i + 1000);
        NEED(pthread_create(&threads[i], NULL, reader, (void *)i) == 0);
    }
    for (int round = 0; round < rounds; round++) history(seed + round + 101, 400);
    atomic_store(&stop, 1);
    for (int i = 0; i < READERS; i++) pthread_join(threads[i], NULL);
    return 0;
}
