// A program that installs its own system call filters: they hold, in children and threads too, and paging goes on under them.
#include "probe.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

static int install(unsigned number, unsigned action, unsigned flags) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, action),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
}

static volatile int trapped_number;
static void on_trap(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)context;
    trapped_number = info->si_syscall;
}

static void *in_thread(void *unused) { (void)unused; errno = 0; syscall(SYS_getppid); return (void *)(size_t)errno; }

int main(void) {
    size_t bytes = 32 * MIB;
    char *area = anon(bytes);
    fill(area, bytes, 1);
    press();
    say("no new privileges: %s", err(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)));
    say("reads back: %d", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
    say("bad filter: %s", err(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, NULL)));
    say("bad operation: %s", err(syscall(SYS_seccomp, 99, 0, NULL)));
    press();
    say("filter: %s", err(install(SYS_getppid, SECCOMP_RET_ERRNO | EPERM, 0)));
    say("getppid: %s", err(syscall(SYS_getppid)));
    press();
    say("memory under a filter: %zu wrong", wrong(area, bytes, 1));
    pthread_t thread;
    void *got;
    NEED(pthread_create(&thread, NULL, in_thread, NULL) == 0);
    NEED(pthread_join(thread, &got) == 0);
    say("in a thread: %s", strerrorname_np((int)(size_t)got));
    struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
    NEED(sigaction(SIGSYS, &action, NULL) == 0);
    say("trap filter: %s", err(install(SYS_getpgid, SECCOMP_RET_TRAP, 0)));
    syscall(SYS_getpgid, 0);
    say("its SIGSYS arrives: %d", trapped_number == SYS_getpgid);
    press();
    say("memory after a trap: %zu wrong", wrong(area, bytes, 1));
    say("synchronised filter: %s", err(install(SYS_getsid, SECCOMP_RET_ERRNO | ENOTTY, SECCOMP_FILTER_FLAG_TSYNC)));
    say("getsid: %s", err(syscall(SYS_getsid, 0)));
    pid_t child = fork();
    if (child == 0) {
        say("child: %s, %zu wrong", err(syscall(SYS_getppid)), wrong(area, bytes, 1));
        fill(area, bytes, 2);
        press();
        say("child's own: %zu wrong", wrong(area, bytes, 2));
        say("filter that kills: %s", err(install(SYS_getpgrp, SECCOMP_RET_KILL_PROCESS, 0)));
        press();
        say("still alive: %zu wrong", wrong(area, bytes, 2));
        syscall(SYS_getpgrp);
        say("this line must not appear");
        _exit(0);
    }
    reap("killed child", child);
    // Filters survive exec.
    child = fork();
    if (child == 0) { execl("/bin/sh", "sh", "-c", "echo from a shell; exit 7", NULL); _exit(127); }
    reap("shell", child);
    say("parent: %zu wrong", wrong(area, bytes, 1));
    return 0;
}
