/* Look-ups in a hash table by Zipf's law with exponent 1.2, as caches see them. One operation is one look-up, which reads
 * the whole value.
 *
 * The table is one of indices (open addressing) to entries of 256 bytes. Entries stand in the order in which their keys
 * were first asked for, so popular ones stand together at the front, as in a cache that fills.
 * Verified: every key is found, and every word of its value is what the key says. */
#include "zipf.h"

/* 2^(1 - 1.2). */
#define FALL 0.8705505632961241
#define VALUE_WORDS 31
#define ENTRY_BYTES ((VALUE_WORDS + 1) * 8ul)
#define SLOT_BYTES 4ul

struct entry {
    uint64_t key, value[VALUE_WORDS];
};

static uint64_t mask;
static uint32_t *slots;
static struct entry *entries;

static inline const struct entry *find(uint64_t key) {
    for (uint64_t at = mix(key) & mask;; at = (at + 1) & mask) {
        if (slots[at] == 0) return NULL;
        if (entries[slots[at] - 1].key == key) return &entries[slots[at] - 1];
    }
}

static inline uint64_t key_of(uint64_t number, uint64_t seed) { return mix(number + seed); }

/* A key that is not there yet, as the entry with this index. */
static void insert(uint64_t key, uint64_t index) {
    uint64_t at = mix(key) & mask;
    while (slots[at] != 0) at = (at + 1) & mask;
    slots[at] = index + 1;
    entries[index].key = key;
    for (uint64_t word = 0; word < VALUE_WORDS; word++) entries[index].value[word] = key * (2 * word + 3);
}

int main(int argc, char **argv) {
    struct options opt = options_parse(
        argc, argv, (struct options){.data_mib = 256, .ops = 1000000, .seed = 1, .threads = 1, .passes = 1});
    uint64_t bytes = opt.data_mib << 20, table = 1;
    /* A sixteenth to an eighth of the entries' bytes: a quarter to half full. */
    while (table * ENTRY_BYTES <= bytes * 2) table *= 2;
    uint64_t count = (bytes - table * SLOT_BYTES) / ENTRY_BYTES, filled_count = 0, errors = 0, checksum = 0;
    mask = table - 1;
    slots = data_allocate(table * SLOT_BYTES);
    entries = data_allocate((count * ENTRY_BYTES + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
    /* Which numbers have an entry: filling reads none. */
    uint8_t *is_there = calloc(count, 1);
    if (!is_there) usage_error(argv[0], "no memory");
    struct zipf law = zipf_new(count, FALL);
    uint64_t state = mix(opt.seed) | 1;

    struct moment start = moment_now();
    memset(slots, 0, table * SLOT_BYTES);
    for (uint64_t draw = 0; draw < 2 * count; draw++) {
        /* Then those that nobody has asked for. */
        uint64_t number = draw < count ? zipf_next(&law, &state) : draw - count;
        if (is_there[number]) continue;
        is_there[number] = 1;
        insert(key_of(number, opt.seed), filled_count++);
    }
    free(is_there);
    if (filled_count != count) errors++;
    struct moment filled = moment_now();

    for (uint64_t i = 0; i < opt.ops; i++) {
        uint64_t key = key_of(zipf_next(&law, &state), opt.seed), sum = 0;
        const struct entry *entry = find(key);
        if (!entry) {
            errors++;
            continue;
        }
        uint64_t wrong = 0;
        for (uint64_t word = 0; word < VALUE_WORDS; word++) {
            wrong |= entry->value[word] ^ key * (2 * word + 3);
            sum += entry->value[word];
        }
        if (wrong) errors++;
        checksum = checksum * 31 + sum;
    }
    struct moment asked = moment_now();

    result_open("zipf", bytes);
    result_phase("fill", count, start, filled);
    result_phase("look-up", opt.ops, filled, asked);
    return result_close(checksum, errors);
}
