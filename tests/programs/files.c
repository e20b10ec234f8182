// Memory that belongs to files and to nobody: private and shared mappings, memfd, shared memory objects, between pages that are far.
#include "probe.h"
#include <sys/ipc.h>
#include <sys/shm.h>

int main(void) {
    catch_faults();
    size_t bytes = 24 * MIB;
    char *area = anon(bytes);
    fill(area, bytes, 1);
    int fd = scratch_file();
    NEED(pwrite(fd, area, bytes, 0) == (ssize_t)bytes);
    char *private = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    char *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEED(private != MAP_FAILED && shared != MAP_FAILED);
    press();
    say("private file mapping: %zu wrong", wrong(private, bytes, 1));
    for (size_t at = 0; at < bytes; at += 3 * PAGE) fill(private + at, PAGE, at);
    press();
    press();
    size_t bad = 0;
    for (size_t at = 0; at < bytes; at += 3 * PAGE) bad += wrong(private + at, PAGE, at);
    say("own pages of it: %zu wrong; the file: %zu wrong", bad, wrong(shared, bytes, 1));
    fill(shared + 2 * MIB, MIB, 2);
    char *check = malloc(MIB);
    NEED(pread(fd, check, MIB, 2 * MIB) == (ssize_t)MIB);
    say("shared writes are in the file: %zu wrong", wrong(check, MIB, 2));
    NEED(pwrite(fd, area, MIB, 2 * MIB) == (ssize_t)MIB);
    say("file writes are in the mapping: %d", memcmp(shared + 2 * MIB, area, MIB) == 0);
    pid_t child = fork();
    if (child == 0) {
        fill(shared + 4 * MIB, MIB, 3);
        fill(private + 4 * MIB, MIB, 4);
        press();
        _exit(wrong(shared + 4 * MIB, MIB, 3) + wrong(private + 4 * MIB, MIB, 4) ? 1 : 0);
    }
    reap("child", child);
    say("its shared writes: %zu wrong; its private ones: %s", wrong(shared + 4 * MIB, MIB, 3),
        wrong(private + 4 * MIB, MIB, 4) ? "its own" : "leaked");
    NEED(ftruncate(fd, 10 * MIB + 100) == 0);
    say("rest of the last page: %d", shared[10 * MIB + 200]);
    TRY("behind the end", shared, (void)*(volatile char *)(shared + 11 * MIB));
    say("PROT_WRITE on a read-only descriptor: %s",
        err(mmap(NULL, PAGE, PROT_WRITE, MAP_SHARED, open("/proc/self/exe", O_RDONLY), 0) == MAP_FAILED ? -1 : 0));
    NEED(munmap(private, bytes) == 0);
    NEED(munmap(shared, bytes) == 0);

    int memory = memfd_create("probe", MFD_CLOEXEC);
    NEED(memory >= 0 && ftruncate(memory, bytes) == 0);
    char *first = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    char *second = mmap(NULL, bytes, PROT_READ, MAP_SHARED, memory, 0);
    fill(first, bytes, 5);
    press();
    say("memfd seen twice: %zu wrong", wrong(second, bytes, 5));
    say("punched: %s", err(fallocate(memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, MIB, MIB)));
    say("hole: %zu nonzero", nonzero(second + MIB, MIB));
    int id = shmget(IPC_PRIVATE, 4 * MIB, IPC_CREAT | 0600);
    NEED(id >= 0);
    char *attached = shmat(id, NULL, 0);
    NEED(attached != (void *)-1);
    fill(attached, 4 * MIB, 6);
    press();
    child = fork();
    if (child == 0) {
        size_t off = wrong(attached, 4 * MIB, 6);
        fill(attached, 4 * MIB, 7);
        _exit(off != 0);
    }
    reap("sharing child", child);
    say("shared segment: %zu wrong", wrong(attached, 4 * MIB, 7));
    say("detach: %s", err(shmdt(attached)));
    NEED(shmctl(id, IPC_RMID, NULL) == 0);
    // A file mapping put over anonymous memory, and anonymous memory over it again.
    char *mixed = anon(8 * MIB);
    fill(mixed, 8 * MIB, 8);
    press();
    NEED(mmap(mixed + 2 * MIB, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, 4 * MIB) == mixed + 2 * MIB);
    say("file over far memory: %d", memcmp(mixed + 2 * MIB, second + 4 * MIB, 2 * MIB) == 0);
    NEED(mmap(mixed + 2 * MIB, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == mixed + 2 * MIB);
    say("memory over it: %zu nonzero", nonzero(mixed + 2 * MIB, MIB));
    press();
    say("the rest: %zu wrong", wrong(mixed, 2 * MIB, 8));
    say("and the file's half: %d", memcmp(mixed + 3 * MIB, second + 5 * MIB, MIB) == 0);
    int zero = open("/dev/zero", O_RDWR);
    char *zeros = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE, zero, 0);
    NEED(zeros != MAP_FAILED);
    say("/dev/zero: %zu nonzero", nonzero(zeros, 8 * MIB));
    fill(zeros, 8 * MIB, 9);
    press();
    say("/dev/zero, written: %zu wrong", wrong(zeros, 8 * MIB, 9));
    say("area: %zu wrong", wrong(area, bytes, 1));
    return 0;
}
