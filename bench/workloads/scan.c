/* Sequential scans: every word of every page is read, pass after pass. One operation is one page.
 *
 * Verified twice: the first word of each page against its pattern, and the sum of a pass against the sum of the fill. */
#include "common.h"

int main(int argc, char **argv) {
    struct options opt =
        options_parse(argc, argv, (struct options){.data_mib = 256, .seed = 1, .threads = 1, .passes = 3});
    uint64_t pages = (opt.data_mib << 20) / PAGE_BYTES;
    uint64_t *words = data_allocate(pages * PAGE_BYTES);
    uint64_t expected = 0, errors = 0, checksum = 0;

    struct moment start = moment_now();
    for (uint64_t i = 0; i < pages * PAGE_WORDS; i++) {
        uint64_t value = opt.compressible && (i & 3) ? (i / PAGE_WORDS) & 0xff : mix(i + opt.seed);
        words[i] = value;
        expected += value;
    }
    struct moment filled = moment_now();
    for (uint64_t pass = 0; pass < opt.passes; pass++) {
        uint64_t sum = 0;
        for (uint64_t page = 0; page < pages; page++) {
            const uint64_t *at = words + page * PAGE_WORDS;
            if (at[0] != mix(page * PAGE_WORDS + opt.seed)) errors++;
            for (uint64_t word = 0; word < PAGE_WORDS; word++) sum += at[word];
        }
        if (sum != expected) errors++;
        checksum = mix(checksum ^ sum);
    }
    struct moment scanned = moment_now();

    result_open("scan", pages * PAGE_BYTES);
    result_phase("fill", pages, start, filled);
    result_phase("scan", pages * opt.passes, filled, scanned);
    return result_close(checksum, errors);
}
