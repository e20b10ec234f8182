// Input and output that the kernel does after the call has returned, into and from buffers that are far, or would leave meanwhile: io_uring, the
// kernel's asynchronous I/O, and libc's threads. Operations begin before faults are ours, wait while everything else leaves,
// transfer more than the budget at once, and bypass the page cache (which pins memory). Where a kernel does not let us make a ring or
// a context, that is the transcript. Without an argument io_uring, with one the others.
#include "probe.h"
#include <aio.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

// More than may be under way at once with 16 MiB near.
enum { DEPTH = 64, CHUNKS = 24 };
#define SPAN ((size_t)384 * 1024)

struct ring {
    int fd;
    unsigned *sq_tail, *sq_mask, *array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *completions;
    void *maps[2];
    size_t lengths[2];
    unsigned pending;
};

static size_t bytes = CHUNKS * SPAN;
static char *source, *target;

static int ring_open(struct ring *ring, unsigned flags) {
    struct io_uring_params p;
    memset(&p, 0, sizeof p);
    p.flags = flags;
    memset(ring, 0, sizeof *ring);
    ring->fd = syscall(SYS_io_uring_setup, DEPTH, &p);
    if (ring->fd < 0) return -1;
    ring->lengths[0] = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    if (ring->lengths[0] < p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe))
        ring->lengths[0] = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    ring->lengths[1] = p.sq_entries * sizeof(struct io_uring_sqe);
    char *queues = ring->maps[0] = mmap(NULL, ring->lengths[0], PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, IORING_OFF_SQ_RING);
    ring->entries = ring->maps[1] = mmap(NULL, ring->lengths[1], PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, IORING_OFF_SQES);
    NEED(queues != MAP_FAILED && ring->entries != MAP_FAILED);
    ring->sq_tail = (unsigned *)(queues + p.sq_off.tail);
    ring->sq_mask = (unsigned *)(queues + p.sq_off.ring_mask);
    ring->array = (unsigned *)(queues + p.sq_off.array);
    ring->cq_head = (unsigned *)(queues + p.cq_off.head);
    ring->cq_tail = (unsigned *)(queues + p.cq_off.tail);
    ring->cq_mask = (unsigned *)(queues + p.cq_off.ring_mask);
    ring->completions = (struct io_uring_cqe *)(queues + p.cq_off.cqes);
    return 0;
}

static void ring_close(struct ring *ring) {
    for (int i = 0; i < 2; i++) munmap(ring->maps[i], ring->lengths[i]);
    close(ring->fd);
}

static struct io_uring_sqe *prepare(struct ring *ring, int opcode, int fd, const void *address, unsigned length, uint64_t offset) {
    unsigned tail = *ring->sq_tail + ring->pending, slot = tail & *ring->sq_mask;
    struct io_uring_sqe *entry = &ring->entries[slot];
    memset(entry, 0, sizeof *entry);
    entry->opcode = opcode;
    entry->fd = fd;
    entry->addr = (uintptr_t)address;
    entry->len = length;
    entry->off = offset;
    entry->user_data = tail;
    ring->array[slot] = slot;
    ring->pending++;
    return entry;
}

// Submits what was prepared, as programs do it that look at the result, and waits for `wait` completions.
static long submit(struct ring *ring, unsigned wait) {
    unsigned total = ring->pending, left = total;
    atomic_store_explicit((_Atomic unsigned *)ring->sq_tail, *ring->sq_tail + total, memory_order_release);
    ring->pending = 0;
    while (left) {
        long n = syscall(SYS_io_uring_enter, ring->fd, left, wait, wait ? IORING_ENTER_GETEVENTS : 0, NULL, 0);
        if (n <= 0) return n;
        left -= n;
    }
    return total;
}

struct done {
    uint64_t user_data;
    int res;
    unsigned flags;
};

// The next completion; waits for it.
static struct done next(struct ring *ring) {
    unsigned head = *ring->cq_head;
    while (atomic_load_explicit((_Atomic unsigned *)ring->cq_tail, memory_order_acquire) == head)
        NEED(syscall(SYS_io_uring_enter, ring->fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) >= 0 || errno == EINTR);
    struct io_uring_cqe *place = &ring->completions[head & *ring->cq_mask];
    struct done completion = {place->user_data, place->res, place->flags};
    atomic_store_explicit((_Atomic unsigned *)ring->cq_head, head + 1, memory_order_release);
    return completion;
}

// The sum of `count` results; errors are named.
static long results(struct ring *ring, int count) {
    long total = 0;
    for (int i = 0; i < count; i++) {
        int result = next(ring).res;
        if (result < 0) say("  error %s", strerrorname_np(-result));
        else total += result;
    }
    return total;
}

// Transfers the whole file, going on where a transfer was short.
static void whole_file(struct ring *ring, int opcode, int fd, char *memory) {
    size_t done[CHUNKS] = {0};
    unsigned first = *ring->sq_tail;
    int chunk_of[4 * CHUNKS], left = CHUNKS, prepared = 0, calls = 0;
    for (int i = 0; i < CHUNKS; i++, prepared++) {
        prepare(ring, opcode, fd, memory + i * SPAN, SPAN, i * SPAN);
        chunk_of[prepared] = i;
    }
    submit(ring, CHUNKS);
    while (left) {
        struct done completion = next(ring);
        int chunk = chunk_of[completion.user_data - first];
        if (completion.res <= 0) { say("  error %d", completion.res); left--; continue; }
        done[chunk] += completion.res;
        if (done[chunk] == SPAN) { left--; continue; }
        NEED(prepared < 4 * CHUNKS && calls++ < 3 * CHUNKS);
        chunk_of[prepared++] = chunk;
        prepare(ring, opcode, fd, memory + chunk * SPAN + done[chunk], SPAN - done[chunk], chunk * SPAN + done[chunk]);
        submit(ring, 0);
    }
}

static void ring_files(struct ring *ring, int fd, const char *how) {
    memset(target, 0, bytes);
    press();
    whole_file(ring, IORING_OP_READ, fd, target);
    say("%s read: %zu wrong", how, wrong(target, bytes, 1));
    fill(target, bytes, 2);
    press();
    whole_file(ring, IORING_OP_WRITE, fd, target);
    memset(target, 0, bytes);
    NEED(pread(fd, target, bytes, 0) == (ssize_t)bytes);
    say("%s write: %zu wrong", how, wrong(target, bytes, 2));
    NEED(pwrite(fd, source, bytes, 0) == (ssize_t)bytes);
}

static void ring_vectors(struct ring *ring, int fd) {
    enum { PARTS = 64 };
    struct iovec *parts = anon(MIB);
    for (int i = 0; i < PARTS; i++) {
        parts[i].iov_base = target + (PARTS - 1 - i) * 128 * 1024;
        parts[i].iov_len = 8192;
    }
    memset(target, 0, bytes);
    press();
    prepare(ring, IORING_OP_READV, fd, parts, PARTS, 4096);
    submit(ring, 0);
    say("readv: %ld", results(ring, 1));
    size_t bad = 0;
    for (int i = 0; i < PARTS; i++) bad += memcmp(parts[i].iov_base, source + 4096 + i * 8192, 8192) != 0;
    say("readv: %zu parts wrong", bad);
    prepare(ring, IORING_OP_WRITEV, fd, parts, PARTS, bytes);
    submit(ring, 0);
    say("writev: %ld", results(ring, 1));
    NEED(pread(fd, target, PARTS * 8192, bytes) == PARTS * 8192);
    say("writev: %d", memcmp(target, source + 4096, PARTS * 8192));
}

// Reads that wait, while their buffers would leave, until somebody writes. All have the same name.
static void ring_waiting(struct ring *ring, const char *how, int (*make)(int[2]), int opcode) {
    enum { WAITING = 16 };
    int ends[WAITING][2];
    char *text = anon(MIB);
    for (int i = 0; i < WAITING; i++) {
        NEED(make(ends[i]) == 0);
        prepare(ring, opcode, ends[i][0], target + i * SPAN + 100 * i, 5000, 0)->user_data = 7;
    }
    say("%s: %ld", how, submit(ring, 0));
    press();
    for (int i = 0; i < WAITING; i++) {
        memset(text, 'a' + i, 5000);
        NEED(write(ends[i][1], text, 5000) == 5000);
    }
    say("%s: %ld", how, results(ring, WAITING));
    size_t bad = 0;
    for (int i = 0; i < WAITING; i++) {
        for (int j = 0; j < 5000; j++) bad += target[i * SPAN + 100 * i + j] != 'a' + i;
        close(ends[i][0]);
        close(ends[i][1]);
    }
    say("%s: %zu wrong", how, bad);
}

static int make_pipe(int ends[2]) { return pipe(ends); }
static int make_stream(int ends[2]) { return socketpair(AF_UNIX, SOCK_STREAM, 0, ends); }

static void ring_registered(struct ring *ring, int fd) {
    enum { BUFFERS = 4, SIZE = 128 * 1024 };
    struct iovec *list = anon(MIB);
    for (int i = 0; i < BUFFERS; i++) list[i] = (struct iovec){target + i * SPAN, SIZE};
    press();
    say("register: %s", err(syscall(SYS_io_uring_register, ring->fd, IORING_REGISTER_BUFFERS, list, BUFFERS)));
    for (int round = 0; round < 2; round++) {
        // What the program writes now must be what the kernel finds in memory that it has pinned before.
        for (int i = 0; i < BUFFERS; i++) fill(target + i * SPAN, SIZE, 50 + round * BUFFERS + i);
        press();
        for (int i = 0; i < BUFFERS; i++)
            prepare(ring, IORING_OP_WRITE_FIXED, fd, target + i * SPAN, SIZE, bytes + i * SIZE)->buf_index = i;
        submit(ring, 0);
        say("write fixed: %ld", results(ring, BUFFERS));
        for (int i = 0; i < BUFFERS; i++) memset(target + i * SPAN, 0, SIZE);
        press();
        for (int i = 0; i < BUFFERS; i++)
            prepare(ring, IORING_OP_READ_FIXED, fd, target + i * SPAN, SIZE, bytes + i * SIZE)->buf_index = i;
        submit(ring, 0);
        say("read fixed: %ld", results(ring, BUFFERS));
        size_t bad = 0;
        for (int i = 0; i < BUFFERS; i++) bad += wrong(target + i * SPAN, SIZE, 50 + round * BUFFERS + i);
        say("fixed: %zu wrong", bad);
    }
    say("unregister: %s", err(syscall(SYS_io_uring_register, ring->fd, IORING_UNREGISTER_BUFFERS, NULL, 0)));
    say("unregister: %s", err(syscall(SYS_io_uring_register, ring->fd, IORING_UNREGISTER_BUFFERS, NULL, 0)));
}

static void ring_others(struct ring *ring, int fd) {
    char *far = anon(MIB);
    strcpy(far, ".");
    press();
    prepare(ring, IORING_OP_OPENAT, AT_FDCWD, far, 0, 0)->open_flags = O_RDONLY | O_DIRECTORY;
    submit(ring, 0);
    int opened = next(ring).res;
    say("openat: %s", opened >= 0 ? "ok" : strerrorname_np(-opened));
    prepare(ring, IORING_OP_CLOSE, opened, NULL, 0, 0);
    prepare(ring, IORING_OP_STATX, AT_FDCWD, far, STATX_TYPE, (uintptr_t)(far + 8192));
    submit(ring, 0);
    say("close, statx: %ld, a folder: %d", results(ring, 2), S_ISDIR(((struct statx *)(far + 8192))->stx_mode));

    int ends[2];
    NEED(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends) == 0);
    struct msghdr *out = (void *)(far + 64 * 1024), *in = (void *)(far + 128 * 1024);
    struct iovec *from = (void *)(far + 192 * 1024), *to = (void *)(far + 256 * 1024);
    memset(out, 0, sizeof *out);
    memset(in, 0, sizeof *in);
    *from = (struct iovec){target + 5 * SPAN, 30000};
    *to = (struct iovec){target + 6 * SPAN, 40000};
    *out = (struct msghdr){.msg_iov = from, .msg_iovlen = 1};
    *in = (struct msghdr){.msg_iov = to, .msg_iovlen = 1};
    fill(target + 5 * SPAN, 32768, 9);
    memset(target + 6 * SPAN, 0, 65536);
    prepare(ring, IORING_OP_RECVMSG, ends[0], in, 1, 0);
    submit(ring, 0);
    press();
    prepare(ring, IORING_OP_SENDMSG, ends[1], out, 1, 0);
    submit(ring, 0);
    say("message: %ld, %d", results(ring, 2), memcmp(target + 5 * SPAN, target + 6 * SPAN, 30000));

    // A chain is one: what comes second finds what came first.
    fill(target, SPAN, 11);
    memset(target + SPAN, 0, SPAN);
    press();
    prepare(ring, IORING_OP_WRITE, fd, target, SPAN / 2, bytes)->flags = IOSQE_IO_LINK;
    prepare(ring, IORING_OP_FSYNC, fd, NULL, 0, 0)->flags = IOSQE_IO_LINK;
    prepare(ring, IORING_OP_READ, fd, target + SPAN, SPAN / 2, bytes);
    submit(ring, 3);
    say("chain: %ld, %zu wrong", results(ring, 3), wrong(target + SPAN, SPAN / 2, 11));

    struct __kernel_timespec *time = (void *)(far + 320 * 1024);
    *time = (struct __kernel_timespec){.tv_nsec = 1000000};
    press();
    prepare(ring, IORING_OP_TIMEOUT, -1, time, 1, 0);
    submit(ring, 0);
    say("timeout: %s", strerrorname_np(-next(ring).res));
    prepare(ring, 200, -1, NULL, 0, 0);
    submit(ring, 0);
    say("no such operation: %s", strerrorname_np(-next(ring).res));
    prepare(ring, IORING_OP_READ, fd, (void *)4096, 4096, 0);
    submit(ring, 0);
    say("nobody's memory: %s", strerrorname_np(-next(ring).res));

    // Waiting with a mask and a limit, both far, while everything that is not held leaves.
    struct io_uring_getevents_arg *limits = (void *)(far + 384 * 1024);
    sigset_t *mask = (void *)(far + 448 * 1024);
    sigfillset(mask);
    *limits = (struct io_uring_getevents_arg){.sigmask = (uintptr_t)mask, .sigmask_sz = 8, .ts = (uintptr_t)time};
    press();
    say("waiting: %s", err(syscall(SYS_io_uring_enter, ring->fd, 0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, limits, sizeof *limits)));
    prepare(ring, IORING_OP_NOP, -1, NULL, 0, 0);
    atomic_store_explicit((_Atomic unsigned *)ring->sq_tail, *ring->sq_tail + 1, memory_order_release);
    ring->pending = 0;
    say("submitting and waiting: %ld", syscall(SYS_io_uring_enter, ring->fd, 1, 1, IORING_ENTER_GETEVENTS, mask, 8));
    say("nothing done: %ld", results(ring, 1));
    say("no ring: %s", err(syscall(SYS_io_uring_enter, 999, 1, 0, 0, NULL, 0)));
    say("not a ring: %s", err(syscall(SYS_io_uring_enter, fd, 1, 0, 0, NULL, 0)));
    close(ends[0]);
    close(ends[1]);
}

// The kernel chooses among buffers that it was given before.
static void ring_provided(struct ring *ring) {
    int ends[2];
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    prepare(ring, IORING_OP_PROVIDE_BUFFERS, 16, target, 4096, 0)->buf_group = 3;
    submit(ring, 0);
    say("provide: %d", next(ring).res);
    for (int round = 0; round < 40; round++) {
        struct io_uring_sqe *entry = prepare(ring, IORING_OP_RECV, ends[0], NULL, 4096, 0);
        entry->flags = IOSQE_BUFFER_SELECT;
        entry->buf_group = 3;
        submit(ring, 0);
        if (round == 20) press();
        char text[100];
        memset(text, 'A' + round % 26, sizeof text);
        NEED(write(ends[1], text, sizeof text) == sizeof text);
        struct done completion = next(ring);
        unsigned chosen = completion.flags >> IORING_CQE_BUFFER_SHIFT;
        if (completion.res != 100 || chosen > 15 || memcmp(target + chosen * 4096, text, 100))
            say("round %d: %d, buffer %u", round, completion.res, chosen);
        prepare(ring, IORING_OP_PROVIDE_BUFFERS, 1, target + chosen * 4096, 4096, chosen)->buf_group = 3;
        submit(ring, 0);
        NEED(next(ring).res >= 0);
    }
    say("provided: ok");
    close(ends[0]);
    close(ends[1]);
}

// A fork while operations wait: they are the parent's.
static void ring_fork(struct ring *ring) {
    int ends[2];
    NEED(pipe(ends) == 0);
    memset(target, 1, 64 * 1024);
    prepare(ring, IORING_OP_READ, ends[0], target, 64 * 1024, 0);
    submit(ring, 0);
    press();
    pid_t child = fork();
    if (child == 0) {
        press();
        say("child: %d %d", target[0], target[60000]);
        _exit(target[0] == 1 && target[60000] == 1 ? 0 : 1);
    }
    reap("child", child);
    press();
    char text[3000];
    memset(text, 2, sizeof text);
    NEED(write(ends[1], text, sizeof text) == sizeof text);
    long got = results(ring, 1);
    say("parent: %ld, %d %d %d", got, target[0], target[2999], target[3000]);
    close(ends[0]);
    close(ends[1]);
}

// Closing a ring ends what it has under way: the pipe has no reader then.
static void ring_closing(void) {
    struct ring ring;
    int ends[2];
    NEED(ring_open(&ring, 0) == 0 && pipe(ends) == 0);
    prepare(&ring, IORING_OP_READ, ends[0], target, SPAN, 0);
    submit(&ring, 0);
    press();
    ring_close(&ring);
    close(ends[0]);
    signal(SIGPIPE, SIG_IGN);
    struct pollfd poller = {.fd = ends[1]};
    int ready = poll(&poller, 1, 20000);
    say("closed: %d %s", ready, poller.revents & POLLERR ? "no reader" : "a reader");
    close(ends[1]);
}

// A file past the page cache; -1 where the file system has none.
static int open_direct(void) {
    char name[] = "./probe-XXXXXX";
    int fd = mkostemp(name, O_DIRECT);
    NEED(fd >= 0 || errno == EINVAL);
    unlink(name);
    return fd;
}

static void native(int fd, const char *how) {
    aio_context_t context = 0;
    NEED(syscall(SYS_io_setup, 32, &context) == 0);
    struct iocb *blocks = anon(MIB), **list = anon(MIB);
    struct io_event *events = anon(MIB);
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < CHUNKS; i++) {
            memset(&blocks[i], 0, sizeof blocks[i]);
            blocks[i].aio_lio_opcode = turn ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
            blocks[i].aio_fildes = fd;
            blocks[i].aio_buf = (uintptr_t)(target + i * SPAN);
            blocks[i].aio_nbytes = SPAN;
            blocks[i].aio_offset = i * SPAN;
            blocks[i].aio_data = i;
            list[i] = &blocks[i];
        }
        if (turn) fill(target, bytes, 3);
        else memset(target, 0, bytes);
        press();
        long submitted = 0, done = 0, good = 0;
        while (submitted < CHUNKS) {
            long n = syscall(SYS_io_submit, context, CHUNKS - submitted, list + submitted);
            if (n <= 0) { say("io_submit: %s", err(n)); break; }
            submitted += n;
        }
        press();
        while (done < submitted) {
            struct timespec *limit = (void *)(list + 1000);
            sigset_t *mask = (void *)(list + 2000);
            struct { sigset_t *mask; size_t size; } *with = (void *)(list + 3000);
            *limit = (struct timespec){.tv_sec = 20};
            sigfillset(mask);
            with->mask = mask;
            with->size = 8;
            long n = turn ? syscall(333 /* io_pgetevents */, context, 1, CHUNKS, events, limit, with)
                          : syscall(SYS_io_getevents, context, 1, CHUNKS, events, NULL);
            if (n <= 0) { say("io_getevents: %s", err(n)); break; }
            for (long i = 0; i < n; i++) good += events[i].res == (long)SPAN && events[i].obj == (uintptr_t)&blocks[events[i].data];
            done += n;
        }
        if (turn) {
            memset(target, 0, bytes);
            NEED(pread(fd, target, bytes, 0) == (ssize_t)bytes);
        }
        say("%s %s: %ld of 24, %zu wrong", how, turn ? "write" : "read", good, wrong(target, bytes, turn ? 3 : 1));
    }
    NEED(pwrite(fd, source, bytes, 0) == (ssize_t)bytes);

    struct iovec *parts = (void *)(list + 4000);
    for (int i = 0; i < 32; i++) parts[i] = (struct iovec){target + (31 - i) * 280 * 1024, 4096};
    memset(target, 0, bytes);
    memset(blocks, 0, 2 * sizeof *blocks);
    blocks[0] = (struct iocb){.aio_lio_opcode = IOCB_CMD_PREADV, .aio_fildes = fd, .aio_buf = (uintptr_t)parts, .aio_nbytes = 32, .aio_offset = 8192};
    press();
    NEED(syscall(SYS_io_submit, context, 1, list) == 1);
    press();
    NEED(syscall(SYS_io_getevents, context, 1, 1, events, NULL) == 1);
    size_t bad = 0;
    for (int i = 0; i < 32; i++) bad += memcmp(parts[i].iov_base, source + 8192 + i * 4096, 4096) != 0;
    say("%s vector: %lld, %zu wrong", how, (long long)events[0].res, bad);

    // A poll that waits, and is still waiting when the context goes.
    int signalled = eventfd(0, 0);
    for (int i = 0; i < 2; i++) {
        blocks[i] = (struct iocb){.aio_lio_opcode = IOCB_CMD_POLL, .aio_fildes = i ? fd : signalled, .aio_buf = POLLIN};
        list[i] = &blocks[i];
    }
    say("%s poll: %ld", how, syscall(SYS_io_submit, context, 1, list));
    press();
    NEED(eventfd_write(signalled, 1) == 0);
    say("%s poll: %ld %lld", how, syscall(SYS_io_getevents, context, 1, 1, events, NULL), (long long)events[0].res);
    NEED(eventfd_read(signalled, &(eventfd_t){0}) == 0);
    say("%s poll: %ld", how, syscall(SYS_io_submit, context, 1, list));
    list[0] = (void *)8;
    say("%s nobody's block: %s", how, err(syscall(SYS_io_submit, context, 1, list)));
    say("%s destroy: %s", how, err(syscall(SYS_io_destroy, context)));
    say("%s destroyed: %s", how, err(syscall(SYS_io_submit, context, 1, list)));
    close(signalled);
}

static void by_threads(int fd) {
    static struct aiocb blocks[8];
    memset(target, 0, bytes);
    press();
    for (int i = 0; i < 8; i++) {
        blocks[i] = (struct aiocb){.aio_fildes = fd, .aio_buf = target + i * 3 * SPAN, .aio_nbytes = 3 * SPAN, .aio_offset = i * 3 * SPAN};
        NEED(aio_read(&blocks[i]) == 0);
    }
    press();
    int good = 0;
    for (int i = 0; i < 8; i++) {
        const struct aiocb *one = &blocks[i];
        while (aio_error(&blocks[i]) == EINPROGRESS) aio_suspend(&one, 1, NULL);
        good += aio_return(&blocks[i]) == (ssize_t)(3 * SPAN);
    }
    say("libc: %d of 8, %zu wrong", good, wrong(target, bytes, 1));
}

static void rings(int fd, int direct, struct ring *ring, int early, char *waiting, char *registered) {
    fill(registered, 128 * 1024, 22);
    press();
    prepare(ring, IORING_OP_WRITE_FIXED, fd, registered, 128 * 1024, bytes);
    submit(ring, 0);
    say("early buffer: %ld", results(ring, 1));
    NEED(pread(fd, target, 128 * 1024, bytes) == 128 * 1024);
    say("early buffer: %zu wrong", wrong(target, 128 * 1024, 22));
    press();
    memset(target, 'e', 10000);
    NEED(write(early, target, 10000) == 10000);
    say("early read: %ld", results(ring, 1));
    say("early read: %d", memcmp(waiting + 100, target, 10000));
    NEED(syscall(SYS_io_uring_register, ring->fd, IORING_UNREGISTER_BUFFERS, NULL, 0) == 0);

    ring_files(ring, fd, "buffered");
    if (direct >= 0) {
        NEED(pwrite(direct, source, bytes, 0) == (ssize_t)bytes);
        ring_files(ring, direct, "direct");
    }
    ring_vectors(ring, fd);
    ring_waiting(ring, "pipes", make_pipe, IORING_OP_READ);
    ring_waiting(ring, "sockets", make_stream, IORING_OP_RECV);
    ring_registered(ring, direct >= 0 ? direct : fd);
    ring_others(ring, fd);
    ring_provided(ring);
    ring_fork(ring);
    ring_close(ring);
    ring_closing();
    if (ring_open(ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN) == 0) {
        ring_files(ring, fd, "deferred");
        ring_waiting(ring, "deferred pipes", make_pipe, IORING_OP_READ);
        ring_close(ring);
    }
}

int main(int argc, char **argv) {
    (void)argv;
    struct ring ring;
    int early[2], has_ring = 0;
    char *waiting = NULL, *registered = NULL;
    if (argc == 1) {
        // Before anything is far: a buffer is registered, and a read waits.
        has_ring = ring_open(&ring, 0) == 0;
        say("io_uring: %s", has_ring ? "ok" : err(-1));
        if (!has_ring) return 0;
        NEED(pipe(early) == 0);
        waiting = anon(256 * 1024);
        registered = anon(256 * 1024);
        fill(registered, 128 * 1024, 21);
        struct iovec list = {registered, 128 * 1024};
        NEED(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &list, 1) == 0);
        prepare(&ring, IORING_OP_READ, early[0], waiting + 100, 10000, 0);
        submit(&ring, 0);
    }
    source = anon(bytes);
    target = anon(bytes);
    fill(source, bytes, 1);
    int fd = scratch_file(), direct = open_direct();
    NEED(pwrite(fd, source, bytes, 0) == (ssize_t)bytes);
    press();
    if (has_ring) {
        rings(fd, direct, &ring, early[1], waiting, registered);
        return 0;
    }
    aio_context_t context = 0;
    long made = syscall(SYS_io_setup, 32, &context);
    say("io_setup: %s", err(made));
    if (made == 0) {
        NEED(syscall(SYS_io_destroy, context) == 0);
        native(fd, "buffered");
        if (direct >= 0) {
            NEED(pwrite(direct, source, bytes, 0) == (ssize_t)bytes);
            native(direct, "direct");
        }
    }
    by_threads(fd);
    return 0;
}
