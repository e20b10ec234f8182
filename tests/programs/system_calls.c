// System calls whose buffers are far when the call is made: every kind of pointer argument the usual programs use, by libc and by
// the bare instruction; and buffers that are truly bad still give EFAULT or a short count.
#include "probe.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysinfo.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <sys/xattr.h>
#include <time.h>

// A far object of a type: its own page, so that nothing else brings it near; one page-crossing copy of each besides.
static char *arena;
static size_t used;
static void *far_bytes(size_t bytes) {
    size_t span = (bytes + 2 * PAGE - 1) / PAGE * PAGE;
    NEED(used + span + PAGE < 64 * MIB);
    // Straddles a page border by 8 bytes, so that two pages matter.
    char *at = arena + used + PAGE - 8;
    used += span + PAGE;
    memset(at, 0xee, bytes);
    return at;
}
#define FAR(type) ((type *)far_bytes(sizeof(type)))

int main(void) {
    arena = anon(64 * MIB);
    int fd = scratch_file();
    int pipes[2], sockets[2];
    NEED(pipe(pipes) == 0);
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);

    // Plain files.
    char *text = far_bytes(100000);
    fill(text - 0, 100000 / 8 * 8, 1);
    press();
    say("write: %zd", write(fd, text, 100000));
    press();
    char *back = far_bytes(100000);
    press();
    say("pread: %zd, same %d", pread(fd, back, 100000, 0), memcmp(text, back, 100000) == 0);
    press();
    say("raw read at the end: %ld", raw(SYS_read, fd, (long)back, 100, 0, 0, 0));
    NEED(lseek(fd, 10, SEEK_SET) == 10);
    press();
    say("raw read: %ld, same %d", raw(SYS_read, fd, (long)(back + 10), 90000, 0, 0, 0), memcmp(text, back, 100000) == 0);
    struct iovec *vector = far_bytes(64 * sizeof *vector);
    for (int i = 0; i < 64; i++) vector[i] = (struct iovec){far_bytes(5000), 5000};
    press();
    say("preadv of 64: %zd", preadv(fd, vector, 64, 0));
    press();
    say("pwritev of 64: %zd", pwritev(fd, vector, 64, 200000));
    press();
    say("writev: %zd", writev(pipes[1], vector, 4));
    press();
    say("readv: %zd", readv(pipes[0], vector + 30, 4));
    press();
    int same = 0;
    for (int i = 0; i < 4; i++) same += memcmp(vector[i].iov_base, vector[30 + i].iov_base, 5000) == 0;
    say("through the pipe: %d of 4", same);
    press();
    say("raw pwrite64: %ld", raw(SYS_pwrite64, fd, (long)text, 50000, 7, 0, 0));
    off_t *offset = FAR(off_t);
    *offset = 100;
    press();
    say("sendfile: %zd", sendfile(sockets[0], fd, offset, 3000));
    press();
    say("offset moved to %ld", (long)*offset);
    press();
    say("recv: %zd", recv(sockets[1], back, 100000, 0));
    loff_t *in = FAR(loff_t), *out = FAR(loff_t);
    *in = 0;
    *out = 500000;
    press();
    say("copy_file_range: %zd", copy_file_range(fd, in, fd, out, 4000, 0));
    *in = 0;
    press();
    say("splice: %zd", splice(fd, in, pipes[1], NULL, 4000, 0));
    struct iovec *one = FAR(struct iovec);
    *one = (struct iovec){text, 3000};
    press();
    say("vmsplice: %zd", vmsplice(pipes[1], one, 1, 0));
    press();
    ssize_t got = read(pipes[0], back, 7000);
    say("read back: %zd, same %d", got, memcmp(back + 4000, text, 3000) == 0);

    // Names and structures.
    char *name = far_bytes(64);
    strcpy(name, "/dev/null");
    press();
    int null = open(name, O_RDWR);
    say("open: %s", err(null));
    struct stat *status = FAR(struct stat);
    press();
    say("stat: %s, %d", err(stat(name, status)), (int)S_ISCHR(status->st_mode));
    press();
    say("fstat: %s, %ld", err(fstat(fd, status)), (long)status->st_size);
    struct statx *extended = FAR(struct statx);
    press();
    say("statx: %s, %d", err(statx(AT_FDCWD, name, 0, STATX_BASIC_STATS, extended)), (int)S_ISCHR(extended->stx_mode));
    press();
    say("access: %s", err(access(name, R_OK)));
    strcpy(name, "/no/such/name");
    press();
    say("open nothing: %s", err(open(name, O_RDONLY)));
    strcpy(name, "./probe-dir");
    press();
    say("mkdir: %s", err(mkdir(name, 0700)));
    char *target = far_bytes(64);
    strcpy(target, "./probe-dir/link");
    press();
    say("symlink: %s", err(symlink(name, target)));
    char *link = far_bytes(256);
    press();
    got = readlink(target, link, 256);
    say("readlink: %zd, %.*s", got, (int)got, link);
    struct dirent *entries = far_bytes(32768);
    int directory = open(name, O_RDONLY | O_DIRECTORY);
    press();
    long listed = raw(SYS_getdents64, directory, (long)entries, 32768, 0, 0, 0);
    say("getdents64: %s", listed > 0 ? "entries" : "nothing");
    close(directory);
    char *renamed = far_bytes(64);
    strcpy(renamed, "./probe-dir/other");
    press();
    say("rename: %s", err(rename(target, renamed)));
    press();
    say("unlink: %s", err(unlink(renamed)));
    press();
    say("rmdir: %s", err(rmdir(name)));
    char *directory_name = far_bytes(4096);
    press();
    say("getcwd: %s", getcwd(directory_name, 4096) ? "ok" : err(-1));
    struct utsname *system_name = FAR(struct utsname);
    press();
    say("uname: %s, %s", err(uname(system_name)), system_name->sysname);
    struct statfs *filesystem = FAR(struct statfs);
    press();
    say("fstatfs: %s, %d", err(fstatfs(null, filesystem)), filesystem->f_bsize > 0);
    struct sysinfo *information = FAR(struct sysinfo);
    press();
    say("sysinfo: %s, %d", err(sysinfo(information)), information->totalram > 0);
    struct rusage *usage = FAR(struct rusage);
    press();
    say("getrusage: %s, %d", err(getrusage(RUSAGE_SELF, usage)), usage->ru_utime.tv_sec >= 0);
    struct rlimit *limit = FAR(struct rlimit);
    press();
    say("getrlimit: %s, %d", err(getrlimit(RLIMIT_NOFILE, limit)), limit->rlim_cur > 0);
    press();
    say("setrlimit: %s", err(setrlimit(RLIMIT_NOFILE, limit)));
    struct timespec *clock = FAR(struct timespec);
    press();
    say("raw clock_gettime: %ld, %d", raw(SYS_clock_gettime, CLOCK_REALTIME, (long)clock, 0, 0, 0, 0), clock->tv_sec > 1000000);
    *clock = (struct timespec){0, 1000000};
    press();
    say("nanosleep: %s", err(nanosleep(clock, clock)));
    char *random = far_bytes(5000);
    press();
    say("getrandom: %zd", getrandom(random, 5000, 0));
    cpu_set_t *processors = FAR(cpu_set_t);
    press();
    say("sched_getaffinity: %s", err(sched_getaffinity(0, sizeof *processors, processors)));
    char *thread_name = far_bytes(16);
    strcpy(thread_name, "far-name");
    press();
    say("prctl PR_SET_NAME: %s", err(raw(SYS_prctl, 15, (long)thread_name, 0, 0, 0, 0)));
    memset(thread_name, 0, 16);
    press();
    say("prctl PR_GET_NAME: %s, %s", err(raw(SYS_prctl, 16, (long)thread_name, 0, 0, 0, 0)), thread_name);
    uid_t *ids = far_bytes(3 * sizeof *ids);
    press();
    say("getresuid: %s, %d", err(getresuid(&ids[0], &ids[1], &ids[2])), ids[0] == getuid());

    // Waiting for descriptors.
    struct pollfd *polls = far_bytes(2 * sizeof *polls);
    polls[0] = (struct pollfd){pipes[1], POLLOUT, 0};
    polls[1] = (struct pollfd){pipes[0], POLLIN, 0};
    press();
    say("poll: %d, %d %d", poll(polls, 2, 0), polls[0].revents, polls[1].revents);
    fd_set *set = FAR(fd_set);
    FD_ZERO(set);
    FD_SET(pipes[1], set);
    struct timeval *timeout = FAR(struct timeval);
    *timeout = (struct timeval){1, 0};
    press();
    int selected = select(pipes[1] + 1, NULL, set, NULL, timeout);
    say("select: %s, %d", err(selected), selected);
    int epoll = epoll_create1(0);
    struct epoll_event *events = far_bytes(10 * sizeof *events);
    events[0] = (struct epoll_event){EPOLLOUT, {.u64 = 77}};
    press();
    say("epoll_ctl: %s", err(epoll_ctl(epoll, EPOLL_CTL_ADD, pipes[1], &events[0])));
    press();
    say("epoll_wait: %d, %llu", epoll_wait(epoll, events, 10, 0), (unsigned long long)events[0].data.u64);
    int timer = timerfd_create(CLOCK_MONOTONIC, 0);
    struct itimerspec *when = FAR(struct itimerspec);
    *when = (struct itimerspec){{0, 0}, {0, 1000000}};
    press();
    say("timerfd_settime: %s", err(timerfd_settime(timer, 0, when, NULL)));
    uint64_t *expired = FAR(uint64_t);
    press();
    say("timerfd read: %zd, %llu", read(timer, expired, 8), (unsigned long long)*expired);
    int *waiting = FAR(int);
    NEED(write(pipes[1], "abc", 3) == 3);
    press();
    say("FIONREAD: %s, %d", err(ioctl(pipes[0], FIONREAD, waiting)), *waiting);
    int *fresh = far_bytes(2 * sizeof(int));
    press();
    say("pipe2: %s, %d", err(pipe2(fresh, O_CLOEXEC)), fresh[1] == fresh[0] + 1);

    // Sockets.
    int server = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in *address = FAR(struct sockaddr_in);
    memset(address, 0, sizeof *address);
    address->sin_family = AF_INET;
    address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t *length = FAR(socklen_t);
    *length = sizeof *address;
    press();
    say("bind: %s", err(bind(server, (struct sockaddr *)address, sizeof *address)));
    NEED(listen(server, 4) == 0);
    press();
    say("getsockname: %s, port %d", err(getsockname(server, (struct sockaddr *)address, length)), address->sin_port != 0);
    press();
    say("connect: %s", err(connect(client, (struct sockaddr *)address, sizeof *address)));
    struct sockaddr_in *peer = FAR(struct sockaddr_in);
    *length = sizeof *peer;
    press();
    int accepted = accept4(server, (struct sockaddr *)peer, length, 0);
    say("accept: %s, length %u, family %d", err(accepted), (unsigned)*length, peer->sin_family == AF_INET);
    int *option = FAR(int);
    *option = 1;
    press();
    say("setsockopt: %s", err(setsockopt(client, SOL_SOCKET, SO_KEEPALIVE, option, sizeof *option)));
    *option = 77;
    *length = sizeof *option;
    press();
    say("getsockopt: %s, %d, length %u", err(getsockopt(client, SOL_SOCKET, SO_KEEPALIVE, option, length)), *option, (unsigned)*length);
    press();
    say("send: %zd", send(client, text, 20000, 0));
    press();
    say("recv all: %zd, same %d", recv(accepted, back, 20000, MSG_WAITALL), memcmp(back, text, 20000) == 0);
    // A message with a vector, a name and a descriptor in it: all of it far.
    struct msghdr *message = FAR(struct msghdr);
    memset(message, 0, sizeof *message);
    char *control = far_bytes(CMSG_SPACE(sizeof(int)));
    memset(control, 0, CMSG_SPACE(sizeof(int)));
    message->msg_iov = vector;
    message->msg_iovlen = 3;
    message->msg_control = control;
    message->msg_controllen = CMSG_SPACE(sizeof(int));
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    press();
    say("sendmsg: %zd", sendmsg(sockets[0], message, 0));
    message->msg_iov = vector + 20;
    memset(control, 0, CMSG_SPACE(sizeof(int)));
    press();
    got = recvmsg(sockets[1], message, MSG_WAITALL);
    header = CMSG_FIRSTHDR(message);
    say("recvmsg: %zd, a descriptor %d, flags %d", got, header && header->cmsg_type == SCM_RIGHTS, message->msg_flags);
    if (header) { int passed; memcpy(&passed, CMSG_DATA(header), sizeof passed); close(passed); }
    same = 0;
    for (int i = 0; i < 3; i++) same += memcmp(vector[i].iov_base, vector[20 + i].iov_base, 5000) == 0;
    say("message: %d of 3", same);
    int datagrams[2];
    NEED(socketpair(AF_UNIX, SOCK_DGRAM, 0, datagrams) == 0);
    struct mmsghdr *messages = far_bytes(4 * sizeof *messages);
    memset(messages, 0, 4 * sizeof *messages);
    for (int i = 0; i < 4; i++) { messages[i].msg_hdr.msg_iov = &vector[i]; messages[i].msg_hdr.msg_iovlen = 1; }
    press();
    say("sendmmsg: %d", sendmmsg(datagrams[0], messages, 4, 0));
    for (int i = 0; i < 4; i++) messages[i].msg_hdr.msg_iov = &vector[40 + i];
    press();
    say("recvmmsg: %d", recvmmsg(datagrams[1], messages, 4, MSG_DONTWAIT, NULL));
    same = 0;
    for (int i = 0; i < 4; i++) same += messages[i].msg_len == 5000 && memcmp(vector[i].iov_base, vector[40 + i].iov_base, 5000) == 0;
    say("datagrams: %d of 4", same);
    int udp = socket(AF_INET, SOCK_DGRAM, 0);
    memset(address, 0, sizeof *address);
    address->sin_family = AF_INET;
    address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    NEED(bind(udp, (struct sockaddr *)address, sizeof *address) == 0);
    *length = sizeof *address;
    NEED(getsockname(udp, (struct sockaddr *)address, length) == 0);
    press();
    say("sendto: %zd", sendto(udp, text, 1000, 0, (struct sockaddr *)address, sizeof *address));
    *length = sizeof *peer;
    press();
    say("recvfrom: %zd, same %d, length %u", recvfrom(udp, back, 5000, 0, (struct sockaddr *)peer, length),
        memcmp(back, text, 1000) == 0, (unsigned)*length);

    // Futex words that are far.
    _Atomic uint32_t *word = FAR(_Atomic uint32_t);
    *word = 5;
    press();
    say("futex wait on another value: %s", err(syscall(SYS_futex, word, 0 | 128, 4, NULL, NULL, 0)));
    struct timespec *soon = FAR(struct timespec);
    *soon = (struct timespec){0, 1000000};
    press();
    say("futex wait until timeout: %s", err(syscall(SYS_futex, word, 0 | 128, 5, soon, NULL, 0)));
    press();
    say("futex wake of nobody: %ld", syscall(SYS_futex, word, 1 | 128, 1, NULL, NULL, 0));

    // Untouched memory as buffer: the kernel must find it zero, and fill it.
    char *untouched = anon(4 * MIB);
    say("write from untouched memory: %zd", pwrite(fd, untouched, MIB, 0));
    say("read into untouched memory: %zd", pread(fd, untouched + 2 * MIB, MIB, 100000));
    say("all zero: %zu", nonzero(untouched + 2 * MIB, MIB / 2));

    // Buffers that are truly bad.
    char *bad = anon(16 * PAGE);
    fill(bad, 16 * PAGE, 3);
    press();
    NEED(munmap(bad + 8 * PAGE, 8 * PAGE) == 0);
    say("read into nothing: %s", err(pread(fd, bad + 8 * PAGE, 100, 0)));
    say("write from nothing: %s", err(pwrite(fd, bad + 9 * PAGE, 100, 0)));
    say("write that runs into nothing: %zd", pwrite(fd, bad + 7 * PAGE, 2 * PAGE, 0));
    say("read that runs into nothing: %zd", pread(fd, bad + 7 * PAGE, 2 * PAGE, 0));
    say("stat into nothing: %s", err(stat("/dev/null", (struct stat *)(bad + 8 * PAGE))));
    say("open of nothing: %s", err(open(bad + 8 * PAGE, O_RDONLY)));
    say("raw write from kernel memory: %ld", raw(SYS_write, null, (long)0xffff800000000000, 10, 0, 0, 0));
    say("raw read into NULL: %ld", raw(SYS_read, fd, 0, 10, 0, 0, 0));
    say("write of NULL and no bytes: %zd", write(fd, NULL, 0));
    struct iovec broken[3] = {{text, 100}, {bad + 8 * PAGE, 100}, {text, 100}};
    say("writev with a bad middle: %zd", pwritev(fd, broken, 3, 0));
    say("writev with a bad vector: %s", err(writev(fd, (struct iovec *)(bad + 8 * PAGE), 3)));
    say("writev with too many: %s", err(writev(fd, vector, 100000)));
    NEED(mprotect(bad, 4 * PAGE, PROT_READ) == 0);
    press();
    say("read into read-only: %s", err(pread(fd, bad, 100, 0)));
    say("write from read-only: %zd", pwrite(fd, bad, 100, 0));
    say("bad itself: %zu wrong", wrong(bad + 4 * PAGE, 2 * PAGE, 3) ? (size_t)1 : (size_t)0);
    say("closed descriptor: %s", err(write(999, text, 10)));
    say("no such call: %ld", raw(999, 1, 2, 3, 4, 5, 6));
    return 0;
}
