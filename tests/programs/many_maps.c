// Thousands of small mappings, made, cut, joined and released in a random order; a model in near memory knows what must be where.
#include "probe.h"

enum { SLOTS = 6000 };
static struct { char *at; uint32_t pages; uint32_t seed; int readonly; } slots[SLOTS];

int main(void) {
    size_t made = 0, freed = 0, bad = 0;
    uint64_t state = 7;
    for (int step = 0; step < 40000; step++) {
        state = mix(state + step);
        int i = state % SLOTS;
        uint32_t pages = (state >> 20) % 6 + 1;
        if (!slots[i].at) {
            slots[i].at = anon(pages * PAGE);
            slots[i].pages = pages;
            slots[i].seed = step;
            slots[i].readonly = 0;
            fill(slots[i].at, pages * PAGE, step);
            if (state >> 60 == 0) { NEED(mprotect(slots[i].at, pages * PAGE, PROT_READ) == 0); slots[i].readonly = 1; }
            made++;
        } else if ((state >> 40) % 4 == 0 && slots[i].pages > 1) {
            bad += wrong(slots[i].at, slots[i].pages * PAGE, slots[i].seed);
            slots[i].pages--;
            NEED(munmap(slots[i].at + slots[i].pages * PAGE, PAGE) == 0);
        } else if ((state >> 40) % 4 == 1 && !slots[i].readonly) {
            slots[i].seed = step;
            fill(slots[i].at, slots[i].pages * PAGE, step);
        } else if ((state >> 40) % 4 == 2) {
            char *grown = mremap(slots[i].at, slots[i].pages * PAGE, (slots[i].pages + 1) * PAGE, MREMAP_MAYMOVE);
            NEED(grown != MAP_FAILED);
            slots[i].at = grown;
            bad += wrong(grown, slots[i].pages * PAGE, slots[i].seed) + nonzero(grown + slots[i].pages * PAGE, PAGE);
            NEED(munmap(grown + slots[i].pages * PAGE, PAGE) == 0);
        } else {
            bad += wrong(slots[i].at, slots[i].pages * PAGE, slots[i].seed);
            NEED(munmap(slots[i].at, slots[i].pages * PAGE) == 0);
            slots[i].at = NULL;
            freed++;
        }
    }
    say("made %zu, freed %zu, wrong %zu", made, freed, bad);
    press();
    for (int i = 0; i < SLOTS; i++) if (slots[i].at) bad += wrong(slots[i].at, slots[i].pages * PAGE, slots[i].seed);
    say("what is left: %zu wrong", bad);
    // 20,000 mappings that the kernel cannot join, because every second one has another protection.
    char *striped = anon(40000 * PAGE);
    for (int i = 0; i < 40000; i++) striped[i * PAGE] = (char)i;
    for (int i = 0; i < 40000; i += 2) NEED(mprotect(striped + i * PAGE, PAGE, PROT_READ) == 0);
    press();
    for (int i = 0; i < 40000; i++) bad += striped[i * PAGE] != (char)i;
    say("20000 stripes: %zu wrong", bad);
    for (int i = 1; i < 40000; i += 4) NEED(munmap(striped + i * PAGE, PAGE) == 0);
    press();
    for (int i = 0; i < 40000; i += 2) bad += striped[i * PAGE] != (char)i;
    say("with holes: %zu wrong", bad);
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < 40000; i += 2) bad += striped[i * PAGE] != (char)i;
        _exit(bad != 0);
    }
    reap("child", child);
    return 0;
}
