// Starting programs from far memory: arguments, environment and names that are far when execve reads them; vfork and posix_spawn, whose
// child runs in the parent's memory; programs that get an empty environment; static programs; scripts.
#include "probe.h"
#include <spawn.h>

extern char **environ;

static char **far_list(const char *const *texts) {
    size_t count = 0;
    while (texts[count]) count++;
    char **list = anon((count + 1) * sizeof *list + PAGE);
    for (size_t i = 0; i < count; i++) {
        list[i] = (char *)anon(2 * PAGE) + PAGE - 4; // Across a page border.
        strcpy(list[i], texts[i]);
    }
    list[count] = NULL;
    return list;
}

// The grandchild's side: prints what it was given.
static int given(int argc, char **argv) {
    uint64_t hash = 0;
    size_t bytes = 0;
    for (int i = 2; i < argc; i++) { hash = hash * 31 + sum(argv[i], strlen(argv[i])); bytes += strlen(argv[i]); }
    const char *value = getenv("PROBE_VALUE");
    say("given %d arguments, %zu bytes, hash %016llx, value %s", argc - 2, bytes, (unsigned long long)hash, value ? value : "none");
    char *own = anon(48 * MIB);
    fill(own, 48 * MIB, 4);
    say("its own memory: %zu wrong", wrong(own, 48 * MIB, 4));
    return 5;
}

static void *waiter(void *unused) { (void)unused; for (;;) pause(); return NULL; }
static void *starter(void *lists) {
    char ***start = lists;
    execve(start[0][0], start[0], start[1]);
    _exit(126);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "given") == 0) return given(argc, argv);
    size_t bytes = 32 * MIB;
    char *area = anon(bytes);
    fill(area, bytes, 1);
    char **arguments = far_list((const char *const[]){argv[0], "given", "one", "two words", "", "three", NULL});
    char **environment = far_list((const char *const[]){"PROBE_VALUE=far away", "PATH=/usr/bin:/bin", NULL});
    // Keeps what the runner needs, as a program that adds to its environment does.
    size_t count = 0;
    while (environ[count]) count++;
    char **both = anon((count + 3) * sizeof *both);
    memcpy(both, environ, count * sizeof *both);
    both[count] = environment[0];

    press();
    pid_t child = fork();
    if (child == 0) { execve(arguments[0], arguments, both); _exit(126); }
    reap("fork and execve", child);
    press();
    child = vfork();
    if (child == 0) { execve(arguments[0], arguments, both); _exit(126); }
    reap("vfork and execve", child);
    press();
    int result = posix_spawn(&child, arguments[0], NULL, NULL, arguments, both);
    reap("spawned", child);
    say("posix_spawn: %d", result); // After the child has ended: both print.
    press();
    child = vfork();
    if (child == 0) { ((volatile char *)area)[5 * MIB] ^= 1; _exit(9); } // vfork's child writes to the parent's memory.
    reap("vfork without exec", child);
    area[5 * MIB] ^= 1;
    say("parent: %zu wrong", wrong(area, bytes, 1));
    press();
    result = posix_spawn(&child, "/no/such/program", NULL, NULL, arguments, both);
    say("posix_spawn of nothing: %s", strerrorname_np(result));
    child = fork();
    if (child == 0) {
        press();
        int failed = execve("/no/such/program", arguments, both);
        say("execve of nothing: %s", err(failed));
        say("goes on: %zu wrong", wrong(area, bytes, 1));
        int fd = scratch_file();
        char *volatile nowhere = (char *)16;
        failed = execve(nowhere, arguments, both);
        say("execve of a bad name: %s", err(failed));
        failed = execve("/bin/true", (char **)nowhere, both);
        say("execve with bad arguments: %s", err(failed));
        failed = execve("/dev/null", arguments, both);
        say("execve of a device: %s", err(failed));
        close(fd);
        press();
        say("still goes on: %zu wrong", wrong(area, bytes, 1));
        _exit(0);
    }
    reap("failing execve", child);

    // Large argument lists.
    char **many = anon(4000 * sizeof *many);
    many[0] = argv[0];
    many[1] = (char *)"given";
    char *texts = anon(4000 * 128);
    for (int i = 2; i < 3999; i++) { many[i] = texts + i * 128; snprintf(many[i], 128, "argument number %d of a long list", i); }
    many[3999] = NULL;
    press();
    child = fork();
    if (child == 0) { execve(many[0], many, both); _exit(126); }
    reap("many arguments", child);

    // Programs with an environment that says nothing of us: they run, near or far.
    char *empty[] = {NULL};
    press();
    child = fork();
    if (child == 0) { execve(arguments[0], arguments, empty); _exit(126); }
    reap("empty environment", child);
    child = fork();
    if (child == 0) { execve(arguments[0], arguments, NULL); _exit(126); }
    reap("no environment at all", child);
    press();
    child = fork();
    if (child == 0) { execl("/usr/bin/env", "env", "-i", "/bin/echo", "through env -i", NULL); _exit(126); }
    reap("env -i", child);
    // Statically linked, if this machine has one that may be run: nothing can be preloaded into it.
    const char *still[] = {"./static-probe", NULL};
    if (access(still[0], X_OK) == 0) {
        press();
        child = fork();
        if (child == 0) { execv(still[0], (char **)still); _exit(126); }
        reap("static program", child);
    }
    // Scripts and shells.
    press();
    fflush(NULL);
    result = system("x=1; for i in 1 2 3; do x=$((x * 2)); done; echo shell says $x | cat; exit 3");
    say("system: exit %d", WEXITSTATUS(result));
    FILE *pipe_end = popen("printf 'a\\nb\\nc\\n' | sort -r | tr '\\n' ' '", "r");
    char line[100] = "";
    if (pipe_end && fgets(line, sizeof line, pipe_end)) say("popen: %s", line);
    if (pipe_end) say("pclose: %d", pclose(pipe_end));
    int fd = open("./script", O_CREAT | O_WRONLY, 0700);
    if (fd >= 0) {
        const char *script = "#!/bin/sh\necho script with $# arguments: $1\n";
        NEED(write(fd, script, strlen(script)) == (ssize_t)strlen(script));
        close(fd);
        press();
        child = fork();
        if (child == 0) { execl("./script", "./script", "first", "second", NULL); _exit(126); }
        reap("script", child);
        unlink("./script");
    }
    int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    press();
    child = fork();
    if (child == 0) { fexecve(self, arguments, both); _exit(126); }
    reap("fexecve", child);
    say("at the end: %zu wrong", wrong(area, bytes, 1));
    // From a thread that is not the first, while another waits.
    press();
    child = fork();
    if (child == 0) {
        pthread_t threads[2];
        char **start[] = {arguments, both};
        NEED(pthread_create(&threads[0], NULL, waiter, NULL) == 0);
        NEED(pthread_create(&threads[1], NULL, starter, start) == 0);
        for (;;) pause();
    }
    reap("exec from a thread", child);
    return 0;
}
