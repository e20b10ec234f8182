// Input and output that the kernel does later, into buffers that are far when the call is made: libc's threads; with the argument "native"
// the kernel's asynchronous I/O, with "ring" io_uring. The last two may also be refused, in a way that programs know from other kernels.
#include "probe.h"
#include <aio.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>

static char *source, *target;
static size_t bytes = 24 * MIB;

static void native(int fd) {
    aio_context_t context = 0;
    long made = syscall(SYS_io_setup, 32, &context);
    say("io_setup: %s", err(made));
    if (made) return;
    struct iocb *blocks = anon(24 * sizeof *blocks), **list = anon(24 * sizeof *list);
    struct io_event *events = anon(24 * sizeof *events);
    for (int i = 0; i < 24; i++) {
        memset(&blocks[i], 0, sizeof blocks[i]);
        blocks[i].aio_lio_opcode = IOCB_CMD_PREAD;
        blocks[i].aio_fildes = fd;
        blocks[i].aio_buf = (uintptr_t)(target + i * MIB);
        blocks[i].aio_nbytes = MIB;
        blocks[i].aio_offset = i * MIB;
        list[i] = &blocks[i];
    }
    memset(target, 0, bytes);
    press();
    long submitted = 0;
    while (submitted < 24) {
        long n = syscall(SYS_io_submit, context, 24 - submitted, list + submitted);
        if (n <= 0) { say("io_submit: %s", err(n)); break; }
        submitted += n;
    }
    press();
    long done = 0, good = 0;
    while (done < submitted) {
        long n = syscall(SYS_io_getevents, context, 1, 24, events, NULL);
        if (n <= 0) { say("io_getevents: %s", err(n)); break; }
        for (long i = 0; i < n; i++) good += events[i].res == (long)MIB;
        done += n;
    }
    say("native: %ld of 24, %zu wrong", good, wrong(target, bytes, 1));
    syscall(SYS_io_destroy, context);
}

static void ring(int fd) {
    struct io_uring_params parameters;
    memset(&parameters, 0, sizeof parameters);
    int uring = syscall(SYS_io_uring_setup, 32, &parameters);
    say("io_uring_setup: %s", uring < 0 ? err(-1) : "ok");
    if (uring < 0) return;
    size_t ring_bytes = parameters.sq_off.array + parameters.sq_entries * 4;
    size_t completion_bytes = parameters.cq_off.cqes + parameters.cq_entries * sizeof(struct io_uring_cqe);
    if (completion_bytes > ring_bytes) ring_bytes = completion_bytes;
    char *rings = mmap(NULL, ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, uring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *entries = mmap(NULL, parameters.sq_entries * sizeof *entries, PROT_READ | PROT_WRITE,
                                        MAP_SHARED | MAP_POPULATE, uring, IORING_OFF_SQES);
    NEED(rings != MAP_FAILED && entries != MAP_FAILED);
    memset(target, 0, bytes);
    press();
    unsigned *tail = (unsigned *)(rings + parameters.sq_off.tail), *array = (unsigned *)(rings + parameters.sq_off.array);
    for (int i = 0; i < 24; i++) {
        memset(&entries[i], 0, sizeof entries[i]);
        entries[i].opcode = IORING_OP_READ;
        entries[i].fd = fd;
        entries[i].addr = (uintptr_t)(target + i * MIB);
        entries[i].len = MIB;
        entries[i].off = i * MIB;
        array[i] = i;
    }
    atomic_store_explicit((_Atomic unsigned *)tail, *tail + 24, memory_order_release);
    long entered = syscall(SYS_io_uring_enter, uring, 24, 24, IORING_ENTER_GETEVENTS, NULL, 0);
    say("io_uring_enter: %ld", entered);
    unsigned head = *(unsigned *)(rings + parameters.cq_off.head);
    unsigned end = atomic_load_explicit((_Atomic unsigned *)(rings + parameters.cq_off.tail), memory_order_acquire);
    struct io_uring_cqe *completions = (struct io_uring_cqe *)(rings + parameters.cq_off.cqes);
    unsigned mask = *(unsigned *)(rings + parameters.cq_off.ring_mask);
    int good = 0;
    for (; head != end; head++) good += completions[head & mask].res == (int)MIB;
    say("io_uring: %d of 24, %zu wrong", good, wrong(target, bytes, 1));
}

static void by_threads(int fd) {
    static struct aiocb blocks[8];
    memset(target, 0, bytes);
    press();
    for (int i = 0; i < 8; i++) {
        blocks[i] = (struct aiocb){.aio_fildes = fd, .aio_buf = target + i * 3 * MIB, .aio_nbytes = 3 * MIB, .aio_offset = i * 3 * MIB};
        NEED(aio_read(&blocks[i]) == 0);
    }
    press();
    int good = 0;
    for (int i = 0; i < 8; i++) {
        const struct aiocb *one = &blocks[i];
        while (aio_error(&blocks[i]) == EINPROGRESS) aio_suspend(&one, 1, NULL);
        good += aio_return(&blocks[i]) == (ssize_t)(3 * MIB);
    }
    say("libc: %d of 8, %zu wrong", good, wrong(target, bytes, 1));
}

int main(int argc, char **argv) {
    source = anon(bytes);
    target = anon(bytes);
    fill(source, bytes, 1);
    int fd = scratch_file();
    NEED(pwrite(fd, source, bytes, 0) == (ssize_t)bytes);
    if (argc > 1 && strcmp(argv[1], "ring") == 0) {
        ring(fd);
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "native") == 0) {
        native(fd);
        return 0;
    }
    by_threads(fd);
    return 0;
}
