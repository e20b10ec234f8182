// A job whose worker gives up its identity and then turns on the rest of the job: it looks for what decides where far memory
// is (`search URL TOKEN`), or writes nonsense into everything that it shares with the others (`lie`). Its parent goes on.
#include "probe.h"
#include <dirent.h>
#include <grp.h>
#include <sys/uio.h>

static size_t bytes = 40 * MIB;

typedef struct { char *start; size_t length; int writable; int decides; } Shared;

// What the process shares with the rest of its job.
static int shared(Shared *found, int most) {
    FILE *maps = fopen("/proc/self/maps", "r");
    NEED(maps);
    char line[512];
    int count = 0;
    while (count < most && fgets(line, sizeof line, maps)) {
        if (!strstr(line, "memfd:farfield-")) continue;
        unsigned long start, end;
        char rights[8];
        NEED(sscanf(line, "%lx-%lx %7s", &start, &end, rights) == 3);
        // Longer are those that it shares with a memory server.
        if (end - start > 64 * MIB) continue;
        found[count++] = (Shared){(char *)start, end - start, rights[1] == 'w', 0};
    }
    fclose(maps);
    return count;
}

static int occurrences(const char *start, size_t length, const char *text) {
    int count = 0;
    for (const char *at = start; (at = memmem(at, start + length - at, text, strlen(text))); at++) count++;
    return count;
}

static void search(const char *url, const char *token) {
    Shared all[16];
    int count = shared(all, 16), places = 0, writable = 0, opened = 0;
    for (int i = 0; i < count; i++) {
        all[i].decides = occurrences(all[i].start, all[i].length, url) + occurrences(all[i].start, all[i].length, token);
        places += all[i].decides;
        if (all[i].writable) writable += all[i].decides;
    }
    say("it knows where far memory is: %d", places > 0);
    say("places at which it could write that: %d", writable);
    for (int i = 0; i < count; i++) {
        if (!all[i].decides) continue;
        char *at = all[i].start;
        say("mprotect: %s", err(mprotect(at, all[i].length, PROT_READ | PROT_WRITE)));
        say("madvise: %s", err(madvise(at, PAGE, MADV_REMOVE)));
        int memory = open("/proc/self/mem", O_RDWR);
        say("a write around the protection: %d", memory >= 0 && pwrite(memory, "x", 1, (off_t)(uintptr_t)at) == 1);
        struct iovec from = {"x", 1}, into = {at, 1};
        say("process_vm_writev: %d", process_vm_writev(getpid(), &from, 1, &into, 1, 0) == 1);
    }
    // Whatever it has open, opened once more with all rights.
    for (int fd = 0; fd < 4096; fd++) {
        char path[64], name[256];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(path, name, sizeof name - 1);
        if (length < 0 || !memmem(name, length, "farfield-config", 15)) continue;
        int again = open(path, O_RDWR);
        if (again < 0) continue;
        opened++;
        say("write: %s", err(pwrite(again, "x", 1, 0)));
        say("map: %s", err(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0) == MAP_FAILED ? -1 : 0));
        say("truncate: %s", err(ftruncate(again, 0)));
    }
    say("opened again: %d", opened);
    int in_environment = 0;
    for (char **variable = environ; *variable; variable++) in_environment += strstr(*variable, token) != NULL;
    say("tokens in its environment: %d", in_environment);
    // The runner, by its path: what it has open is not for other users.
    char runner[64] = "";
    const char *control = getenv("FARFIELD_CONTROL");
    NEED(control && strlen(control) < sizeof runner);
    memcpy(runner, control, strrchr(control, '/') - control);
    say("the runner's descriptors: %s", err(opendir(runner) ? 0 : -1));
}

static void lie(void) {
    Shared all[16];
    int count = shared(all, 16);
    uint64_t random = 1;
    time_t end = time(NULL) + 2;
    while (time(NULL) < end)
        for (int i = 0; i < count; i++) {
            if (!all[i].writable) continue;
            volatile uint64_t *words = (volatile uint64_t *)all[i].start;
            // The totals, and the first slots. Now and then small numbers, which are believed sooner.
            size_t most = all[i].length / 8 < 1 << 14 ? all[i].length / 8 : 1 << 14;
            for (size_t word = 0; word < most; word++) {
                random = mix(random + word + 1);
                words[word] = random & 1 ? random : random >> 40;
            }
        }
    for (int i = 0; i < count; i++)
        if (all[i].writable) memset(all[i].start, 0, all[i].length);
}

int main(int argc, char **argv) {
    NEED(argc > 1);
    char *area = anon(bytes);
    fill(area, bytes, 1);
    press();
    pid_t worker = fork();
    NEED(worker >= 0);
    if (worker == 0) {
        NEED(setgroups(0, NULL) == 0);
        NEED(setresgid(65534, 65534, 65534) == 0);
        NEED(setresuid(65534, 65534, 65534) == 0);
        if (argc == 4) search(argv[2], argv[3]);
        else lie();
        _exit(0);
    }
    int status;
    NEED(waitpid(worker, &status, 0) == worker);
    say("memory of its parent: %zu wrong", wrong(area, bytes, 1));
    press();
    say("and after it has been away: %zu wrong", wrong(area, bytes, 1));
    return 0;
}
