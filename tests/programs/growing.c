// Grows: growing MIB STEPS takes so much memory, STEPS times, and fills it. Says how much of it lies in huge pages after the first step and at the end, and that all of it is right.
#include "probe.h"

static long huge_kib(void) {
    FILE *rollup = fopen("/proc/self/smaps_rollup", "r");
    char line[256];
    long kib = -1;
    NEED(rollup);
    while (fgets(line, sizeof line, rollup)) sscanf(line, "AnonHugePages: %ld", &kib);
    fclose(rollup);
    return kib;
}

int main(int argc, char **argv) {
    NEED(argc == 3);
    size_t bytes = strtoul(argv[1], NULL, 10) * MIB, steps = strtoul(argv[2], NULL, 10);
    char **parts = calloc(steps, sizeof *parts);
    NEED(parts);
    for (size_t step = 0; step < steps; step++) {
        parts[step] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        NEED(parts[step] != MAP_FAILED);
        fill(parts[step], bytes, step);
        if (step == 0) say("%ld", huge_kib());
    }
    for (size_t step = 0; step < steps; step++) {
        size_t off = wrong(parts[step], bytes, step);
        if (off) DIE("part %zu has %zu wrong words", step, off);
    }
    say("%ld", huge_kib());
    return 0;
}
