/* What the workload programs share: options, a clock, seeded randomness, the result line.
 *
 * The programs are plain C: they allocate with malloc, know nothing of far memory, time their own phases (filling is
 * never inside a timed phase that counts) and verify what they read. Each prints exactly one JSON line. */
#ifndef COMMON_H
#define COMMON_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#define PAGE_BYTES 4096ul
#define PAGE_WORDS (PAGE_BYTES / 8)
#define HUGE_BYTES (2ul << 20)

struct options {
    uint64_t data_mib, ops, seed, threads, write_percent, compressible, passes, record_words;
};

/* Does the program ask for huge pages? And was that said, so that the result is about them? */
static uint64_t is_huge, is_about_huge;

struct moment {
    double seconds, cpu_seconds;
    long faults_major, faults_minor;
};

/* One step of splitmix64: the value is a good hash of its argument. */
static inline uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ul;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ul;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBul;
    return x ^ (x >> 31);
}

static inline uint64_t xorshift(uint64_t *state) {
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}

static inline struct moment moment_now(void) {
    struct timespec wall, cpu;
    struct rusage usage;
    clock_gettime(CLOCK_MONOTONIC, &wall);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    getrusage(RUSAGE_SELF, &usage);
    return (struct moment){wall.tv_sec + wall.tv_nsec * 1e-9, cpu.tv_sec + cpu.tv_nsec * 1e-9, usage.ru_majflt,
                           usage.ru_minflt};
}

static inline void usage_error(const char *program, const char *what) {
    fprintf(stderr, "%s: %s\n", program, what);
    exit(2);
}

static inline struct options options_parse(int argc, char **argv, struct options defaults) {
    struct options o = defaults;
    if (argc % 2 == 0) usage_error(argv[0], "options come in pairs: --name value");
    for (int i = 1; i + 1 < argc; i += 2) {
        char *end;
        uint64_t value = strtoull(argv[i + 1], &end, 10);
        if (*end || end == argv[i + 1]) usage_error(argv[0], "an option's value must be a number");
        if (!strcmp(argv[i], "--data-mib")) o.data_mib = value;
        else if (!strcmp(argv[i], "--ops")) o.ops = value;
        else if (!strcmp(argv[i], "--seed")) o.seed = value;
        else if (!strcmp(argv[i], "--threads")) o.threads = value;
        else if (!strcmp(argv[i], "--write-percent")) o.write_percent = value;
        else if (!strcmp(argv[i], "--compressible")) o.compressible = value;
        else if (!strcmp(argv[i], "--passes")) o.passes = value;
        else if (!strcmp(argv[i], "--record-words")) o.record_words = value;
        else if (!strcmp(argv[i], "--huge")) is_huge = value, is_about_huge = 1;
        else usage_error(argv[0], argv[i]);
    }
    if (o.data_mib == 0 || o.data_mib > 1 << 20) usage_error(argv[0], "--data-mib must be 1 to 1048576");
    if (o.threads == 0 || o.threads > 64) usage_error(argv[0], "--threads must be 1 to 64");
    if (o.write_percent > 100) usage_error(argv[0], "--write-percent must be 0 to 100");
    if (o.record_words == 0) o.record_words = 1;
    if (o.passes == 0) usage_error(argv[0], "--passes must be at least 1");
    return o;
}

static inline void *data_allocate(uint64_t bytes) {
    void *data = aligned_alloc(is_huge ? HUGE_BYTES : PAGE_BYTES, bytes);
    if (!data) {
        fprintf(stderr, "no memory for %lu bytes\n", (unsigned long)bytes);
        exit(3);
    }
    /* Who cannot have them runs without, and the result says how many there were. */
    if (is_huge) madvise(data, bytes, MADV_HUGEPAGE);
    return data;
}

/* What of the program's memory the kernel maps as huge pages. */
static inline uint64_t huge_bytes_now(void) {
    char line[256];
    unsigned long kib = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "AnonHugePages: %lu kB", &kib) == 1) break;
    if (file) fclose(file);
    return kib << 10;
}

static inline void result_open(const char *workload, uint64_t data_bytes) {
    printf("{\"workload\":\"%s\",\"data_bytes\":%lu,\"phases\":[", workload, (unsigned long)data_bytes);
}

static inline void result_phase(const char *name, uint64_t ops, struct moment from, struct moment to) {
    static int phases;
    printf("%s{\"name\":\"%s\",\"ops\":%lu,\"seconds\":%.9f,\"cpu_seconds\":%.9f,\"faults_major\":%ld,\"faults_minor\":%ld}",
           phases++ ? "," : "", name, (unsigned long)ops, to.seconds - from.seconds,
           to.cpu_seconds - from.cpu_seconds, to.faults_major - from.faults_major, to.faults_minor - from.faults_minor);
}

/* Ends the line. The exit code is the verdict: 0 verified, 1 wrong data. */
static inline int result_close(uint64_t checksum, uint64_t errors) {
    printf("]");
    if (is_about_huge) printf(",\"figures\":{\"huge_bytes\":%lu}", (unsigned long)huge_bytes_now());
    printf(",\"checksum\":\"%016lx\",\"errors\":%lu,\"verified\":%s}\n", (unsigned long)checksum,
           (unsigned long)errors, errors ? "false" : "true");
    return errors ? 1 : 0;
}

#endif
