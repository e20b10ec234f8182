/* Counts the words of a text that was written to memory before, and then answers how often words occur. The text, nearly
 * all of the data, is written once, read once, and not used again; what is used all the time is the table. Words by
 * Zipf's law with exponent 1.1. One operation is one word counted.
 *
 * Verified: every word that is asked for is there with its letters, and all counts together are those that were written. */
#include "zipf.h"

/* 2^(1 - 1.1). */
#define FALL 0.9330329915368074
#define WORDS (1ul << 17)
#define SLOTS (1ul << 18)
#define LETTERS_MAX 12

struct slot {
    uint64_t count;
    char word[LETTERS_MAX + 4];
};

static struct slot *slots;

/* The letters of that word, and a blank behind them; how many there are. The first six tell all words apart. */
static inline uint64_t spell(uint64_t number, char *into) {
    uint64_t letters = 6 + mix(number) % (LETTERS_MAX - 5), rest = number;
    for (uint64_t i = 0; i < letters; i++) {
        if (i == 6) rest = mix(number) >> 8;
        into[i] = 'a' + rest % 26;
        rest /= 26;
    }
    into[letters] = ' ';
    return letters;
}

static inline struct slot *find(const char *word, uint64_t letters) {
    uint64_t hash = letters;
    for (uint64_t i = 0; i < letters; i++) hash = hash * 0x100000001B3ul ^ (uint8_t)word[i];
    for (uint64_t at = mix(hash) % SLOTS;; at = (at + 1) % SLOTS) {
        struct slot *slot = &slots[at];
        if (slot->word[0] == 0 || (!memcmp(slot->word, word, letters) && slot->word[letters] == 0)) return slot;
    }
}

int main(int argc, char **argv) {
    struct options opt = options_parse(
        argc, argv, (struct options){.data_mib = 256, .ops = 1000000, .seed = 1, .threads = 1, .passes = 1});
    uint64_t table_bytes = SLOTS * sizeof(struct slot), bytes = opt.data_mib << 20;
    if (bytes < table_bytes * 2) usage_error(argv[0], "--data-mib is too small");
    uint64_t text_bytes = bytes - table_bytes, length = 0, words = 0, written = 0, errors = 0, checksum = 0;
    char *text = data_allocate(text_bytes), word[LETTERS_MAX + 4] = {0};
    slots = data_allocate(table_bytes);
    struct zipf law = zipf_new(WORDS, FALL);
    uint64_t state = mix(opt.seed) | 1;

    struct moment start = moment_now();
    for (; length + LETTERS_MAX + 1 < text_bytes; words++) {
        uint64_t number = zipf_next(&law, &state);
        length += spell(number, text + length) + 1;
        written += mix(number ^ opt.seed);
    }
    struct moment filled = moment_now();

    memset(slots, 0, table_bytes);
    for (uint64_t at = 0; at < length;) {
        uint64_t letters = 0;
        while (text[at + letters] != ' ') letters++;
        struct slot *slot = find(text + at, letters);
        if (slot->count++ == 0) memcpy(slot->word, text + at, letters);
        at += letters + 1;
    }
    struct moment read = moment_now();

    for (uint64_t i = 0; i < opt.ops; i++) {
        uint64_t letters = spell(zipf_next(&law, &state), word);
        checksum += find(word, letters)->count;
    }
    struct moment asked = moment_now();
    uint64_t found = 0, counted = 0;
    for (uint64_t number = 0; number < WORDS; number++) {
        uint64_t count = find(word, spell(number, word))->count;
        found += count;
        counted += count * mix(number ^ opt.seed);
    }
    if (found != words || counted != written) errors++;
    struct moment checked = moment_now();

    result_open("wordcount", bytes);
    result_phase("write", words, start, filled);
    result_phase("count", words, filled, read);
    result_phase("ask", opt.ops, read, asked);
    result_phase("check", WORDS, asked, checked);
    return result_close(mix(checksum ^ written), errors);
}
