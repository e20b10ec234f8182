/* The triad of STREAM, a[i] = b[i] + s * c[i], over three arrays that share the data size. One operation is one page of
 * one array.
 *
 * The arrays hold noise, not constants as in the original: pages filled with one repeated word cost a compressed
 * store nothing. */
#include "common.h"

static inline double noise(uint64_t index, uint64_t seed) {
    return (double)(mix(index + seed) >> 11) * 0x1p-53;
}

int main(int argc, char **argv) {
    struct options opt =
        options_parse(argc, argv, (struct options){.data_mib = 256, .seed = 1, .threads = 1, .passes = 3});
    uint64_t pages = (opt.data_mib << 20) / PAGE_BYTES / 3;
    uint64_t count = pages * PAGE_WORDS;
    double *a = data_allocate(pages * PAGE_BYTES), *b = data_allocate(pages * PAGE_BYTES),
           *c = data_allocate(pages * PAGE_BYTES);
    uint64_t errors = 0, checksum = 0;

    struct moment start = moment_now();
    for (uint64_t i = 0; i < count; i++) {
        a[i] = 0;
        b[i] = noise(2 * i, opt.seed);
        c[i] = noise(2 * i + 1, opt.seed);
    }
    struct moment filled = moment_now();
    for (uint64_t pass = 0; pass < opt.passes; pass++) {
        double scalar = 3.0 + pass;
        for (uint64_t i = 0; i < count; i++) a[i] = b[i] + scalar * c[i];
    }
    struct moment done = moment_now();
    double scalar = 3.0 + (opt.passes - 1);
    for (uint64_t i = 0; i < count; i++) {
        double wanted = noise(2 * i, opt.seed) + scalar * noise(2 * i + 1, opt.seed);
        double gap = a[i] - wanted;
        /* A fused multiply-add may round once less. */
        if (gap > 1e-12 || gap < -1e-12) errors++;
        uint64_t bits;
        memcpy(&bits, &a[i], 8);
        checksum += bits;
    }
    struct moment checked = moment_now();

    result_open("stream", 3 * pages * PAGE_BYTES);
    result_phase("fill", 3 * pages, start, filled);
    result_phase("triad", 3 * pages * opt.passes, filled, done);
    result_phase("check", pages, done, checked);
    return result_close(mix(checksum), errors);
}
