/* Random accesses to single pages, each one verified.
 *
 * Word 0 of every page carries a stamp with the number of writes so far, the other words a pattern that only depends on
 * page and word. A read checks one pattern word and the stamp; a write checks the stamp and puts the next one. So a page
 * that comes back old, swapped with another or damaged is seen. Threads work on disjoint pages. */
#include "common.h"

static struct options opt;
static uint64_t *words;
static uint64_t pages;
static uint32_t *versions;

static inline uint64_t pattern(uint64_t page, uint64_t word) {
    /* Compressible: one word of four is noise, the rest repeats within the page; about 3 to 1. */
    if (opt.compressible && (word & 3)) return page & 0xff;
    return mix(page * PAGE_WORDS + word + opt.seed);
}

static inline uint64_t stamp(uint64_t page, uint32_t version) {
    return mix(page ^ opt.seed) + version;
}

struct worker {
    pthread_t thread;
    uint64_t index, ops, errors, checksum;
};

static void *work(void *argument) {
    struct worker *w = argument;
    uint64_t state = mix(opt.seed * 64 + w->index) | 1, errors = 0, checksum = 0;
    uint64_t own = pages / opt.threads;
    uint64_t first = w->index * own;
    for (uint64_t i = 0; i < w->ops; i++) {
        uint64_t x = xorshift(&state);
        uint64_t page = first + (x >> 8) % own;
        uint64_t word = 1 + (x >> 48) % (PAGE_WORDS - 1);
        volatile uint64_t *at = words + page * PAGE_WORDS;
        if ((x & 0xff) * 100 < opt.write_percent * 256) {
            if (at[0] != stamp(page, versions[page])) errors++;
            at[0] = stamp(page, ++versions[page]);
        } else {
            uint64_t value = at[word];
            checksum += value;
            if (value != pattern(page, word)) errors++;
            if (at[0] != stamp(page, versions[page])) errors++;
        }
    }
    w->errors = errors;
    w->checksum = checksum;
    return NULL;
}

int main(int argc, char **argv) {
    opt = options_parse(argc, argv, (struct options){.data_mib = 256, .ops = 65536, .seed = 1, .threads = 1, .passes = 1});
    pages = (opt.data_mib << 20) / PAGE_BYTES;
    words = data_allocate(pages * PAGE_BYTES);
    versions = calloc(pages, sizeof *versions);
    if (!versions) usage_error(argv[0], "no memory");

    struct moment start = moment_now();
    for (uint64_t page = 0; page < pages; page++) {
        uint64_t *at = words + page * PAGE_WORDS;
        at[0] = stamp(page, 0);
        for (uint64_t word = 1; word < PAGE_WORDS; word++) at[word] = pattern(page, word);
    }
    struct moment filled = moment_now();

    struct worker *workers = calloc(opt.threads, sizeof *workers);
    uint64_t ops = 0, errors = 0, checksum = 0;
    for (uint64_t t = 0; t < opt.threads; t++) {
        workers[t].index = t;
        workers[t].ops = opt.ops / opt.threads;
        ops += workers[t].ops;
        if (t > 0 && pthread_create(&workers[t].thread, NULL, work, &workers[t])) usage_error(argv[0], "no thread");
    }
    work(&workers[0]);
    for (uint64_t t = 1; t < opt.threads; t++) pthread_join(workers[t].thread, NULL);
    struct moment accessed = moment_now();

    for (uint64_t t = 0; t < opt.threads; t++) {
        errors += workers[t].errors;
        checksum += workers[t].checksum;
    }
    /* After writes also the pages that were never read again. Not after reads, where each page was checked at its read and
     * more faults would only blur the count of those that were timed. */
    for (uint64_t page = 0; opt.write_percent && page < pages; page++) {
        volatile uint64_t *at = words + page * PAGE_WORDS;
        if (at[0] != stamp(page, versions[page])) errors++;
        if (at[PAGE_WORDS - 1] != pattern(page, PAGE_WORDS - 1)) errors++;
    }
    struct moment checked = moment_now();

    result_open("random", pages * PAGE_BYTES);
    result_phase("fill", pages, start, filled);
    result_phase("access", ops, filled, accessed);
    if (opt.write_percent) result_phase("check", pages, accessed, checked);
    return result_close(checksum, errors);
}
