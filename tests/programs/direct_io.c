// Reads past the page cache: a device fills memory that the kernel has looked up before, while another thread makes everything else, and soon
// that memory, leave.
#include "probe.h"

static _Atomic int over;

static void *presser(void *unused) {
    while (!over) press();
    return unused;
}

int main(void) {
    enum { PARTS = 4, ROUNDS = 40 };
    size_t bytes = 4 * MIB, bad = 0;
    char name[] = "./probe-XXXXXX";
    int fd = mkostemp(name, O_DIRECT);
    if (fd < 0) {
        say("no direct files here: %s", err(fd));
        return 0;
    }
    NEED(unlink(name) == 0);
    char *source = anon(PARTS * bytes), *target = anon(bytes);
    for (int i = 0; i < PARTS; i++) {
        fill(source + i * bytes, bytes, i + 1);
        NEED(pwrite(fd, source + i * bytes, bytes, i * bytes) == (ssize_t)bytes);
    }
    pthread_t thread;
    NEED(pthread_create(&thread, NULL, presser, NULL) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        int part = round % PARTS;
        memset(target, 0xee, bytes);
        // Until it is about to leave.
        usleep(round * 3000);
        NEED(pread(fd, target, bytes, part * bytes) == (ssize_t)bytes);
        bad += wrong(target, bytes, part + 1);
    }
    over = 1;
    pthread_join(thread, NULL);
    say("%zu wrong", bad);
    return 0;
}
