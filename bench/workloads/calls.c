/* System calls on a small buffer, by the C library's functions. One operation is one call. The rest of the data is only
 * written, once: if it does not fit, some of it is far by then, and the buffer is near.
 *
 * Verified: each transfer arrives whole, and what came through the socket is what was sent. */
#include "common.h"
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv) {
    struct options opt = options_parse(
        argc, argv, (struct options){.data_mib = 64, .ops = 1 << 20, .seed = 1, .threads = 1, .passes = 1, .record_words = 8});
    uint64_t bytes = opt.data_mib << 20, len = opt.record_words * 8, errors = 0;
    if (len > PAGE_BYTES) usage_error(argv[0], "--record-words must be at most 512");
    char *data = data_allocate(bytes), *buffer = data_allocate(4 * PAGE_BYTES);
    for (uint64_t i = 0; i < bytes; i += 8) *(uint64_t *)(data + i) = mix(i + opt.seed);
    memset(buffer, 1, 4 * PAGE_BYTES);
    char *out = buffer, *in = buffer + PAGE_BYTES, *path = strcpy(buffer + 2 * PAGE_BYTES, "/dev/null");
    int zeros = open("/dev/zero", O_RDONLY), null = open(path, O_WRONLY), ends[2];
    if (zeros < 0 || null < 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) return 3;

    struct moment start = moment_now();
    for (uint64_t i = 0; i < opt.ops; i++) errors += read(zeros, in, len) != (ssize_t)len;
    struct moment read_all = moment_now();
    for (uint64_t i = 0; i < opt.ops; i++) errors += write(null, out, len) != (ssize_t)len;
    struct moment written = moment_now();
    for (uint64_t i = 0; i < opt.ops / 2; i++) {
        *(uint64_t *)out = mix(i);
        errors += send(ends[0], out, len, 0) != (ssize_t)len || recv(ends[1], in, len, 0) != (ssize_t)len;
        errors += *(uint64_t *)in != mix(i);
    }
    struct moment sent = moment_now();
    struct stat status;
    for (uint64_t i = 0; i < opt.ops / 4; i++) errors += stat(path, &status) || !S_ISCHR(status.st_mode);
    struct moment looked = moment_now();
    uint64_t checksum = 0;
    for (uint64_t i = 0; i < bytes; i += 8) {
        errors += *(uint64_t *)(data + i) != mix(i + opt.seed);
        checksum = mix(checksum ^ *(uint64_t *)(data + i));
    }

    result_open("calls", bytes);
    result_phase("read", opt.ops, start, read_all);
    result_phase("write", opt.ops, read_all, written);
    result_phase("send and receive", opt.ops / 2 * 2, written, sent);
    result_phase("stat", opt.ops / 4, sent, looked);
    return result_close(checksum, errors);
}
