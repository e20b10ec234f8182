/* A program with stages: each makes an array out of the one before, in order, and then uses it in random order, and no
 * other. So of four arrays two are used for a short time and one for a long one, and which one changes. After the last
 * comes the first again. One operation is one random access.
 *
 * Verified: every word that is read, in order or not, is that of its place and of the stage that made it. */
#include "common.h"

#define ARRAYS 4

static inline uint64_t word_of(uint64_t index, uint64_t stage, uint64_t seed) {
    return mix(index ^ (stage + 1) * 0xD1342543DE82EF95ul ^ seed);
}

int main(int argc, char **argv) {
    struct options opt = options_parse(
        argc, argv, (struct options){.data_mib = 256, .ops = 10000000, .seed = 1, .threads = 1, .passes = 1});
    uint64_t pages = (opt.data_mib << 20) / PAGE_BYTES / ARRAYS, words = pages * PAGE_WORDS;
    uint64_t stages = opt.passes * ARRAYS, ops = opt.ops / stages, errors = 0, checksum = 0;
    uint64_t *arrays[ARRAYS], state = mix(opt.seed) | 1;
    for (uint64_t a = 0; a < ARRAYS; a++) arrays[a] = data_allocate(pages * PAGE_BYTES);

    struct moment start = moment_now();
    /* What the first stage begins with lies where the last one leaves its own. */
    for (uint64_t i = 0; i < words; i++) arrays[ARRAYS - 1][i] = word_of(i, 0, opt.seed);
    struct moment filled = moment_now();

    for (uint64_t stage = 1; stage <= stages; stage++) {
        const uint64_t *before = arrays[(stage + ARRAYS - 2) % ARRAYS];
        uint64_t *own = arrays[(stage - 1) % ARRAYS];
        for (uint64_t i = 0; i < words; i++) {
            if (before[i] != word_of(i, stage - 1, opt.seed)) errors++;
            own[i] = word_of(i, stage, opt.seed);
        }
        for (uint64_t i = 0; i < ops; i++) {
            uint64_t at = (xorshift(&state) >> 16) % words;
            if (own[at] != word_of(at, stage, opt.seed)) errors++;
            checksum += own[at];
        }
    }
    struct moment done = moment_now();

    result_open("stages", ARRAYS * pages * PAGE_BYTES);
    result_phase("fill", words, start, filled);
    result_phase("use", ops * stages, filled, done);
    return result_close(mix(checksum), errors);
}
