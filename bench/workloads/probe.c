/* The physical limits on this machine, to put beside measured figures. One operation is one page, except where said.
 *
 * signal_fault: userfaultfd fault delivered as SIGBUS to the faulting thread and resolved with one UFFDIO_COPY: what no
 * signal-mode pager can beat. zero_fill: the kernel's own first touch. memory_read and memory_copy: streaming at the
 * speed of memory. page_copy: memcpy of one page, source and target in cache. */
#include "common.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int uffd;
static char *source;

static void on_sigbus(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    struct uffdio_copy copy = {
        .dst = (uint64_t)info->si_addr & ~(PAGE_BYTES - 1), .src = (uint64_t)source, .len = PAGE_BYTES};
    if (ioctl(uffd, UFFDIO_COPY, &copy) && errno != EEXIST) _exit(4);
}

static int signal_mode_open(void) {
    uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    if (uffd < 0) return 0;
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_SIGBUS};
    if (ioctl(uffd, UFFDIO_API, &api)) return 0;
    struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_NODEFER};
    return sigaction(SIGBUS, &action, NULL) == 0;
}

int main(int argc, char **argv) {
    struct options opt =
        options_parse(argc, argv, (struct options){.data_mib = 64, .seed = 1, .threads = 1, .passes = 4});
    uint64_t bytes = opt.data_mib << 20, pages = bytes / PAGE_BYTES, sum = 0, errors = 0;
    char *a = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *b = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *c = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    source = data_allocate(PAGE_BYTES);
    if (a == MAP_FAILED || b == MAP_FAILED || c == MAP_FAILED) usage_error(argv[0], "no memory");
    madvise(a, bytes, MADV_NOHUGEPAGE);
    memset(source, 7, PAGE_BYTES);
    memset(b, 3, bytes);

    result_open("probe", bytes);
    struct moment t0 = moment_now();
    for (uint64_t page = 0; page < pages; page++) *(volatile char *)(a + page * PAGE_BYTES) = 1;
    struct moment t1 = moment_now();
    result_phase("zero_fill", pages, t0, t1);

    t0 = moment_now();
    for (uint64_t pass = 0; pass < opt.passes; pass++)
        for (uint64_t word = 0; word < bytes / 8; word++) sum += ((uint64_t *)b)[word];
    t1 = moment_now();
    result_phase("memory_read", pages * opt.passes, t0, t1);

    t0 = moment_now();
    for (uint64_t pass = 0; pass < opt.passes; pass++) memcpy(a, b, bytes);
    t1 = moment_now();
    result_phase("memory_copy", pages * opt.passes, t0, t1);

    uint64_t copies = 100000;
    t0 = moment_now();
    for (uint64_t i = 0; i < copies; i++) {
        memcpy(a, source, PAGE_BYTES);
        __asm__ volatile("" ::: "memory");
    }
    t1 = moment_now();
    result_phase("page_copy", copies, t0, t1);

    if (signal_mode_open()) {
        struct uffdio_register r = {.range = {(uint64_t)c, bytes}, .mode = UFFDIO_REGISTER_MODE_MISSING};
        if (ioctl(uffd, UFFDIO_REGISTER, &r)) usage_error(argv[0], "userfaultfd refuses the range");
        t0 = moment_now();
        for (uint64_t page = 0; page < pages; page++)
            if (*(volatile char *)(c + page * PAGE_BYTES + 64) != 7) errors++;
        t1 = moment_now();
        result_phase("signal_fault", pages, t0, t1);
    }
    return result_close(mix(sum), errors);
}
