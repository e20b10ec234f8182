// A library in front of the C library, as people load it to see or change what a program reads. It must see every call.
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

static long seen;

ssize_t read(int fd, void *buffer, size_t len) {
    seen++;
    return syscall(SYS_read, fd, buffer, len);
}

__attribute__((destructor)) static void say(void) {
    char line[64];
    int len = snprintf(line, sizeof line, "%ld calls seen\n", seen);
    if (write(1, line, len) != len) _exit(70);
}
