// Userfaultfds of the program's own: registered before its memory is far, while it is far, and again elsewhere; copies from far memory.
#include "probe.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

static int descriptor;
static char *served_from;

static void *serve(void *unused) {
    (void)unused;
    // Its pages are copied from memory that may itself be far.
    char *pages = anon(26 * PAGE);
    for (size_t i = 0; i < 26; i++) memset(pages + i * PAGE, 'A' + (int)i, PAGE);
    for (;;) {
        struct uffd_msg message;
        if (read(descriptor, &message, sizeof message) != sizeof message) continue;
        uintptr_t at = message.arg.pagefault.address & ~(PAGE - 1);
        size_t letter = (at - (uintptr_t)served_from) / PAGE % 26;
        struct uffdio_copy copy = {.dst = at, .src = (uintptr_t)pages + letter * PAGE, .len = PAGE};
        if (ioctl(descriptor, UFFDIO_COPY, &copy) == -1 && errno != EEXIST) DIE("UFFDIO_COPY: %s", strerror(errno));
    }
    return NULL;
}

static void own(char *start, size_t bytes) {
    struct uffdio_register registration = {.range = {(uintptr_t)start, bytes}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    served_from = start;
    say("registered: %s", err(ioctl(descriptor, UFFDIO_REGISTER, &registration)));
}

int main(int argc, char **argv) {
    int late = argc > 1 && strcmp(argv[1], "late") == 0;
    descriptor = syscall(SYS_userfaultfd, UFFD_USER_MODE_ONLY | O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API};
    if (descriptor < 0 || ioctl(descriptor, UFFDIO_API, &api)) { say("no userfaultfd"); return 0; }
    pthread_t thread;
    NEED(pthread_create(&thread, NULL, serve, NULL) == 0);
    size_t bytes = 8 * MIB;
    char *area = anon(bytes), *heap = anon(48 * MIB);
    if (late) { fill(heap, 48 * MIB, 1); press(); }
    // The first half has content, part of it far if it can be.
    fill(area, bytes / 2, 2);
    if (late) press();
    own(area, bytes);
    say("what was there: %zu wrong", wrong(area, bytes / 2, 2));
    say("served: %016llx", (unsigned long long)sum(area + bytes / 2, bytes / 4));
    if (!late) { fill(heap, 48 * MIB, 1); press(); }
    say("served under pressure: %016llx", (unsigned long long)sum(area + bytes / 2, bytes / 2));
    say("what was there: %zu wrong, heap: %zu wrong", wrong(area, bytes / 2, 2), wrong(heap, 48 * MIB, 1));
    // Given up, it is served anew.
    NEED(madvise(area, bytes / 2, MADV_DONTNEED) == 0);
    say("served after a discard: %016llx", (unsigned long long)sum(area, bytes / 2));
    pid_t child = fork();
    if (child == 0) _exit(wrong(heap, 48 * MIB, 1) || area[0] != 'A');
    reap("child", child);
    NEED(munmap(area, bytes) == 0);
    char *again = anon(bytes);
    fill(again, bytes, 3);
    press();
    say("memory after it: %zu wrong, heap: %zu wrong", wrong(again, bytes, 3), wrong(heap, 48 * MIB, 1));
    own(again, bytes);
    say("registered as a whole: %zu wrong", wrong(again, bytes, 3));
    struct uffdio_register bad = {.range = {(uintptr_t)again + 1, PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    say("crooked: %s", err(ioctl(descriptor, UFFDIO_REGISTER, &bad)));
    say("no userfaultfd: %s", err(ioctl(0, UFFDIO_REGISTER, &bad)));
    return 0;
}
