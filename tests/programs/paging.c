// Memory that goes far and comes back holds what was written: dense, sparse, zero and half-zero pages; unaligned words across a
// page border; memory never touched reads as zero.
#include "probe.h"

int main(void) {
    size_t bytes = 40 * MIB;
    char *dense = anon(bytes);
    fill(dense, bytes, 1);
    say("dense, first look: %zu wrong", wrong(dense, bytes, 1));
    press();
    say("dense, after pressure: %zu wrong", wrong(dense, bytes, 1));
    for (size_t at = bytes; at > 0; at -= PAGE) dense[at - 1] ^= 0x5a;
    press();
    for (size_t at = PAGE; at <= bytes; at += PAGE) dense[at - 1] ^= 0x5a;
    say("dense, changed twice, backwards and forwards: %zu wrong", wrong(dense, bytes, 1));

    char *zero = anon(bytes);
    say("untouched: %zu nonzero", nonzero(zero, bytes));
    memset(zero, 0, bytes);
    press();
    say("written with zeros: %zu nonzero", nonzero(zero, bytes));
    for (size_t at = 0; at < bytes; at += 2 * PAGE) zero[at + 4095] = 1;
    press();
    say("every second page has one bit: %zu nonzero", nonzero(zero, bytes));
    for (size_t at = 0; at < bytes; at += 2 * PAGE) zero[at + 4095] = 0;
    press();
    say("and lost it again: %zu nonzero", nonzero(zero, bytes));

    // Words that lie across the border of two pages: both pages must be near at once.
    size_t bad = 0;
    for (size_t at = PAGE; at < bytes; at += PAGE) {
        uint64_t word = mix(at);
        memcpy(zero + at - 3, &word, 8);
    }
    press();
    for (size_t at = PAGE; at < bytes; at += PAGE) {
        uint64_t word;
        memcpy(&word, zero + at - 3, 8);
        bad += word != mix(at);
    }
    say("words across borders: %zu wrong", bad);

    // Copies whose source and target are both far, with every alignment.
    press();
    for (size_t i = 0; i < 16; i++) memcpy(zero + i * 2 * MIB, dense + i * 2 * MIB + i, 1 * MIB);
    press();
    uint64_t hash = 0;
    for (size_t i = 0; i < 16; i++) hash = hash * 31 + sum(zero + i * 2 * MIB, 1 * MIB);
    say("copies: %016llx", (unsigned long long)hash);
    __asm__ volatile("rep movsb" : : "D"(zero + 123), "S"(dense + 7 * MIB + 77), "c"(20 * MIB) : "memory");
    say("rep movsb of 20 MiB: %016llx", (unsigned long long)sum(zero, 21 * MIB));

    // Random order, reads mixed with writes.
    uint64_t state = 42, total = 0;
    for (int i = 0; i < 12000; i++) {
        state = mix(state + i);
        uint64_t *word = (uint64_t *)(dense + (state % (bytes / 8)) * 8);
        total += *word;
        if (i & 1) *word = state;
    }
    say("random: %016llx then %016llx", (unsigned long long)total, (unsigned long long)sum(dense, bytes));

    free(malloc(10));
    char **small = malloc(200000 * sizeof *small);
    for (int i = 0; i < 200000; i++) {
        size_t length = mix(i) % 400 + 8;
        small[i] = malloc(length);
        memset(small[i], i & 0xff, length);
    }
    press();
    size_t spoiled = 0;
    for (int i = 0; i < 200000; i++) {
        size_t length = mix(i) % 400 + 8;
        for (size_t j = 0; j < length; j++) spoiled += (unsigned char)small[i][j] != (i & 0xff);
        if (i % 3) free(small[i]);
    }
    say("malloc: %zu spoiled", spoiled);
    for (int i = 0; i < 200000; i += 3) {
        small[i] = realloc(small[i], 900);
        spoiled += (unsigned char)small[i][7] != (i & 0xff);
    }
    say("realloc: %zu spoiled", spoiled);
    return 0;
}
