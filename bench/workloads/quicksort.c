/* Quicksort in place of records whose first word is the key, noise. One operation is one record.
 *
 * --record-words 1 sorts plain 64-bit numbers, where comparing costs as much as moving; 8 sorts records of one cache line.
 * Verified: the order, and the sum and the exclusive or of all words before and after. */
#include "common.h"

#define SMALL 16

#define DEFINE_SORT(WORDS)                                                                                             \
    typedef struct { uint64_t word[WORDS]; } record##WORDS;                                                            \
    static void sort_small##WORDS(record##WORDS *at, uint64_t count) {                                                 \
        for (uint64_t i = 1; i < count; i++) {                                                                         \
            record##WORDS value = at[i];                                                                               \
            uint64_t j = i;                                                                                            \
            for (; j > 0 && at[j - 1].word[0] > value.word[0]; j--) at[j] = at[j - 1];                                 \
            at[j] = value;                                                                                             \
        }                                                                                                              \
    }                                                                                                                  \
    static void quicksort##WORDS(record##WORDS *at, uint64_t count) {                                                  \
        while (count > SMALL) {                                                                                        \
            uint64_t pivot = median3(at[0].word[0], at[count / 2].word[0], at[count - 1].word[0]);                     \
            uint64_t low = 0, high = count - 1;                                                                        \
            for (;;) {                                                                                                 \
                while (at[low].word[0] < pivot) low++;                                                                 \
                while (at[high].word[0] > pivot) high--;                                                               \
                if (low >= high) break;                                                                                \
                record##WORDS t = at[low];                                                                             \
                at[low++] = at[high];                                                                                  \
                at[high--] = t;                                                                                        \
            }                                                                                                          \
            /* Hoare: [0, high] <= pivot <= [high + 1, count). Recurse into the smaller part. */                       \
            uint64_t left = high + 1;                                                                                  \
            if (left < count - left) {                                                                                 \
                quicksort##WORDS(at, left);                                                                            \
                at += left;                                                                                            \
                count -= left;                                                                                         \
            } else {                                                                                                   \
                quicksort##WORDS(at + left, count - left);                                                             \
                count = left;                                                                                          \
            }                                                                                                          \
        }                                                                                                              \
        sort_small##WORDS(at, count);                                                                                  \
    }

static uint64_t median3(uint64_t a, uint64_t b, uint64_t c) {
    if (a > b) {
        uint64_t t = a;
        a = b;
        b = t;
    }
    if (b > c) b = c;
    return a > b ? a : b;
}

DEFINE_SORT(1)
DEFINE_SORT(8)

int main(int argc, char **argv) {
    struct options opt = options_parse(
        argc, argv, (struct options){.data_mib = 128, .seed = 1, .threads = 1, .passes = 1, .record_words = 1});
    if (opt.record_words != 1 && opt.record_words != 8) usage_error(argv[0], "--record-words must be 1 or 8");
    uint64_t words = (opt.data_mib << 20) / 8, count = words / opt.record_words;
    uint64_t sum = 0, parity = 0, errors = 0, checksum = 0;
    uint64_t *at = data_allocate(words * 8);

    struct moment start = moment_now();
    for (uint64_t i = 0; i < words; i++) {
        at[i] = mix(i + opt.seed);
        sum += at[i];
        parity ^= at[i];
    }
    struct moment filled = moment_now();
    if (opt.record_words == 1) quicksort1((record1 *)at, count);
    else quicksort8((record8 *)at, count);
    struct moment sorted = moment_now();
    for (uint64_t i = 0; i < words; i++) {
        if (i % opt.record_words == 0 && i > 0 && at[i - opt.record_words] > at[i]) errors++;
        sum -= at[i];
        parity ^= at[i];
        checksum = checksum * 31 + at[i];
    }
    if (sum || parity) errors++;
    struct moment checked = moment_now();

    result_open("quicksort", words * 8);
    result_phase("fill", words, start, filled);
    result_phase("sort", count, filled, sorted);
    result_phase("check", words, sorted, checked);
    return result_close(checksum, errors);
}
