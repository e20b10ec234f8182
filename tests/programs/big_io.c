// One system call whose buffer is larger than the whole near budget.
#include "probe.h"
#include <sys/socket.h>
#include <sys/uio.h>

static int sockets[2];
static size_t bytes = 48 * MIB;

static void *reader(void *into) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = recv(sockets[1], (char *)into + done, bytes - done, MSG_WAITALL);
        NEED(n > 0);
        done += n;
    }
    return NULL;
}

int main(void) {
    char *source = anon(bytes), *target = anon(bytes);
    fill(source, bytes, 1);
    int fd = scratch_file();
    say("pwrite: %zd", pwrite(fd, source, bytes, 0));
    say("pread: %zd, %zu wrong", pread(fd, target, bytes, 0), wrong(target, bytes, 1));
    memset(target, 0, bytes);
    say("pread at an odd place: %zd", pread(fd, target + 3, bytes - 11, 8));
    say("same: %d", memcmp(target + 3, source + 8, bytes - 11) == 0);
    NEED(lseek(fd, 0, SEEK_SET) == 0);
    struct iovec vector[48];
    for (int i = 0; i < 48; i++) vector[i] = (struct iovec){target + (47 - i) * MIB, MIB};
    say("readv, backwards: %zd", readv(fd, vector, 48));
    size_t bad = 0;
    for (int i = 0; i < 48; i++) bad += memcmp(target + (47 - i) * MIB, source + i * MIB, MIB) != 0;
    say("pieces wrong: %zu", bad);
    say("pwritev: %zd", pwritev(fd, vector, 48, 0));
    say("read past the end: %zd", pread(fd, target, bytes, 40 * MIB));
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    memset(target, 0, bytes);
    pthread_t thread;
    NEED(pthread_create(&thread, NULL, reader, target) == 0);
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = send(sockets[0], source + done, bytes - done, 0);
        NEED(n > 0);
        done += n;
    }
    NEED(pthread_join(thread, NULL) == 0);
    say("through a socket: %zu wrong", wrong(target, bytes, 1));
    // From far memory to far memory without an own copy, file to file.
    FILE *stream = tmpfile();
    NEED(stream);
    say("fwrite: %zu", fwrite(source, 1, bytes, stream));
    rewind(stream);
    memset(target, 0, bytes);
    say("fread: %zu, %zu wrong", fread(target, 1, bytes, stream), wrong(target, bytes, 1));
    // Truly short: the rest of the buffer stays as it was.
    NEED(ftruncate(fd, 1000) == 0);
    memset(target, 0x55, bytes);
    say("short read: %zd, next byte %d, last byte %d", pread(fd, target, bytes, 0), target[1000], target[bytes - 1]);
    return 0;
}
