// Children of `clone` without CLONE_VM that begin on a stack of their own, as sandboxes of browsers do: a child ends in
// its function, or leaves it by longjmp to where its parent was; while all is near, and while most is far.
#define _GNU_SOURCE
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORDS = 6 << 20 };
static unsigned long *data;

static unsigned long sum(void) {
    unsigned long sum = 0;
    for (long i = 0; data && i < WORDS; i += 64)
        sum = sum * 31 + data[i];
    return sum % 100;
}

static int ends(void *argument) {
    _exit(*(int *)argument + (int)sum());
}

static int jumps(void *argument) {
    longjmp(*(jmp_buf *)argument, 1);
}

static int status_of(int child) {
    int status = -1;
    if (child <= 0 || waitpid(child, &status, 0) != child)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

__attribute__((noinline)) static int clone_on_own_stack(int (*function)(void *), void *argument) {
    char stack[16384] __attribute__((aligned(16)));
    return clone(function, stack + sizeof stack, SIGCHLD, argument);
}

static void both(const char *when) {
    int start = 20;
    printf("%s: ended %d\n", when, status_of(clone_on_own_stack(ends, &start)));
    jmp_buf place;
    if (setjmp(place) != 0)
        _exit(5 + (int)sum());
    printf("%s: jumped %d\n", when, status_of(clone_on_own_stack(jumps, &place)));
    char *heap = malloc(1 << 20);
    printf("%s: on the heap %d\n", when, status_of(clone(ends, heap + (1 << 20), SIGCHLD, &start)));
    free(heap);
    fflush(stdout);
}

int main(void) {
    both("near");
    data = malloc(WORDS * sizeof *data);
    for (long i = 0; i < WORDS; i++)
        data[i] = (unsigned long)i * 2654435761u;
    for (int round = 0; round < 3; round++)
        both("far");
    return 0;
}
