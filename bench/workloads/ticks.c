/* A program that does little and whose numbers change: each second it writes to a few pages, the next ones each time, so that some
 * of its memory comes and goes. One operation is one second; --passes says how many.
 *
 * Verified: each page has what was last written to it. */
#include "common.h"
#include <unistd.h>

#define PAGES_A_TICK 32

int main(int argc, char **argv) {
    struct options opt = options_parse(
        argc, argv, (struct options){.data_mib = 20, .ops = 1, .seed = 1, .threads = 1, .passes = 10, .record_words = 8});
    uint64_t bytes = opt.data_mib << 20, pages = bytes / PAGE_BYTES, errors = 0, at = 0, checksum = 0;
    uint64_t *data = data_allocate(bytes);
    for (uint64_t page = 0; page < pages; page++) data[page * PAGE_WORDS] = mix(page + opt.seed);
    struct moment start = moment_now();
    for (uint64_t tick = 0; tick < opt.passes; tick++) {
        for (uint64_t i = 0; i < PAGES_A_TICK; i++, at = (at + 1) % pages) {
            errors += data[at * PAGE_WORDS] != mix(at + opt.seed);
            data[at * PAGE_WORDS + 1] = tick;
        }
        sleep(1);
    }
    struct moment end = moment_now();
    for (uint64_t page = 0; page < pages; page++) {
        errors += data[page * PAGE_WORDS] != mix(page + opt.seed);
        checksum = mix(checksum ^ data[page * PAGE_WORDS]);
    }
    result_open("ticks", bytes);
    result_phase("tick", opt.passes, start, end);
    return result_close(checksum, errors);
}
