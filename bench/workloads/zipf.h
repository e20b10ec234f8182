/* Numbers by Zipf's law, in whole steps: within an octave (2^k to 2^(k+1)) all are alike, and each octave is drawn so much
 * more rarely than the one before. No function of libm, so that every machine draws the same. */
#ifndef ZIPF_H
#define ZIPF_H

#include "common.h"

struct zipf {
    uint64_t count, octaves;
    /* How many of 2^32 draws are of an octave up to this one. */
    uint64_t up_to[64];
};

/* Of the numbers 0 to count - 1. An octave has twice as many numbers as the one before, of which each is 2^exponent times
 * as rare: `fall` is 2^(1 - exponent). */
static inline struct zipf zipf_new(uint64_t count, double fall) {
    struct zipf z = {.count = count};
    double all = 0, weight = 1, sum = 0;
    while (1ul << z.octaves <= count) z.octaves++;
    for (uint64_t octave = 0; octave < z.octaves; octave++, weight *= fall) all += weight;
    weight = 1;
    for (uint64_t octave = 0; octave < z.octaves; octave++, weight *= fall) {
        sum += weight;
        z.up_to[octave] = (uint64_t)(sum / all * 0x1p32);
    }
    z.up_to[z.octaves - 1] = 1ul << 32;
    return z;
}

static inline uint64_t zipf_next(const struct zipf *z, uint64_t *state) {
    for (;;) {
        uint64_t draw = xorshift(state) * 0x2545F4914F6CDD1Dul, octave = 0;
        while (draw >> 32 >= z->up_to[octave]) octave++;
        uint64_t number = (1ul << octave) + (mix(draw) & ((1ul << octave) - 1)) - 1;
        /* The last octave may be a part of one. */
        if (number < z->count) return number;
    }
}

#endif
