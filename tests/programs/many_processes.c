// Many processes at once, all with far memory: many_processes COUNT. Each ends when all of them have checked theirs.
#include "probe.h"

int main(int argc, char **argv) {
    NEED(argc == 2);
    int count = atoi(argv[1]), wrong_ones = 0, all[2], done[2];
    NEED(pipe(all) == 0 && pipe(done) == 0);
    char *area = anon(24 * MIB);
    fill(area, 24 * MIB, 1);
    for (int i = 0; i < count; i++) {
        pid_t child = fork();
        NEED(child >= 0);
        if (child == 0) {
            char *own = anon(2 * MIB), byte;
            fill(own, 2 * MIB, i);
            close(all[1]);
            NEED(write(done[1], "x", 1) == 1 && read(all[0], &byte, 1) == 0);
            _exit(wrong(own, 2 * MIB, i) || wrong(area, MIB, 1));
        }
    }
    char byte;
    for (int i = 0; i < count; i++) NEED(read(done[0], &byte, 1) == 1);
    close(all[1]);
    for (int i = 0; i < count; i++) {
        int status;
        NEED(wait(&status) > 0);
        wrong_ones += status != 0;
    }
    say("%d children, %d wrong", count, wrong_ones);
    return 0;
}
