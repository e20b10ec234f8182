"""Situations in which far memory is switched on: `situations.py NAME [ARGUMENT]`. Prints "ok" if all is right."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import numpy as np

import farfield

NEAR = "32M"
COUNT = 12_000_000  # 96 MB
EXPECTED = COUNT * (COUNT - 1) // 2


def far_array():
    return np.arange(COUNT, dtype=np.int64)


def part_sum(part):
    return int(np.arange(part, COUNT, 4, dtype=np.int64).sum())


def refused(kind, *words, **arguments):
    try:
        farfield.enable(**arguments)
    except kind as error:
        text = str(error)
        assert all(word in text for word in words), text
    else:
        raise AssertionError(f"{arguments} was not refused")


def nothing_changed():
    """Far memory is off: no filter, no handler, and large arrays are where they always are."""
    status = open("/proc/self/status").read()
    assert "\nSeccomp:\t0\n" in status, status
    assert far_array().ctypes.data >> 40 != 0x20 and "FARFIELD_ENABLED" not in os.environ


def children(_):
    farfield.enable(near=NEAR)
    # The keeper is no child of this process.
    try:
        os.waitpid(-1, os.WNOHANG)
        raise AssertionError("a child that was not started")
    except ChildProcessError:
        pass
    values = far_array()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if int(values.sum()) == EXPECTED else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert int(values.sum()) == EXPECTED
    code = "import numpy; print(numpy.arange(3_000_000).sum())"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"4499998500000\n"
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert sum(pool.map(part_sum, range(4))) == EXPECTED


def threads(_):
    """Threads that existed before, one with a small stack and one with a small alternate stack."""
    ready, go, results = threading.Barrier(4), threading.Event(), []
    libc = ctypes.CDLL(None)

    class Stack(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

    def work(has_stack):
        if has_stack:
            # 16 KiB with a page without access below.
            base = libc.mmap
            base.restype, base.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_long] * 5
            place = base(None, 5 * 4096, 3, 0x22, -1, 0)
            libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(4096), 0)
            assert libc.sigaltstack(ctypes.byref(Stack(place + 4096, 0, 4 * 4096)), None) == 0
        ready.wait()
        go.wait()
        results.append(int(far_array().sum()))

    threading.stack_size(256 << 10)
    olds = [threading.Thread(target=work, args=(has_stack,)) for has_stack in (False, True, True)]
    for old in olds:
        old.start()
    ready.wait()
    jobs = []
    enabling = threading.Thread(target=lambda: jobs.append(farfield.enable(near=NEAR)))
    enabling.start()
    enabling.join()
    values = far_array()
    go.set()
    for old in olds:
        old.join()
    assert results == [EXPECTED] * 3 and int(values.sum()) == EXPECTED
    assert jobs[0].stats().far_peak_bytes > 32 << 20


def handlers(_):
    """Handlers of signals from before, and the fault handler with its alternate stack."""
    import faulthandler
    import signal

    faulthandler.enable()
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    job = farfield.enable(near=NEAR)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    deadline = time.monotonic() + 60
    while len(seen) < 5 and time.monotonic() < deadline:
        assert int(far_array().sum()) == EXPECTED
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(seen) >= 5 and job.near == 32 << 20


def in_child(_):
    """A forked child switches far memory on for itself. Its parent has none, and does so later."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            job = farfield.enable(near=NEAR)
            code = 0 if int(far_array().sum()) == EXPECTED and job.stats().far_peak_bytes > 32 << 20 else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    nothing_changed()
    job = farfield.enable(near=NEAR)
    assert int(far_array().sum()) == EXPECTED and job.stats().far_peak_bytes > 32 << 20


def preloaded(_):
    """Other libraries in LD_PRELOAD stay there, also for programs that are started."""
    with open("/proc/self/maps") as maps:
        library = next(line.split()[-1] for line in maps if "/libm.so.6" in line)
    if os.environ.get("LD_PRELOAD") != library:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": library})
    farfield.enable(near=NEAR)
    assert int(far_array().sum()) == EXPECTED
    code = "import os, numpy; print(os.environ['LD_PRELOAD'], numpy.arange(3_000_000).sum())"
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert library in ended.stdout and "libfarfield_preload.so" in ended.stdout and "4499998500000" in ended.stdout, ended.stdout


def budget(_):
    job = farfield.enable(near=NEAR)
    assert farfield.enable(near=NEAR) is job
    refused(farfield.ConflictError, "near='32M'", near="33M")
    values = far_array()
    job.near = "48M"
    deadline = time.monotonic() + 20
    while job.near != 48 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "of 48.0 MiB" in repr(job), repr(job)
    try:
        job.near = "1M"
        raise AssertionError("less than the least")
    except farfield.BudgetError as error:
        assert "16.0 MiB" in str(error), error
    assert int(values.sum()) == EXPECTED
    # `top` and `near` find the job by this process, which its keeper did not start.
    command = [farfield.command(), "near", "--json", str(os.getpid())]
    assert b'"near_limit_bytes":50331648' in subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def refusals(_):
    refused(farfield.BudgetError, "16M", near="1M")
    for near in ("4", "", "x", "-1G", "0G", "101%", "9" * 30 + "G", 0, -5):
        refused(farfield.BudgetError, "is no size", near=near)
    for arguments in ({"near": 1.5}, {"near": True}, {"far": 5}, {"far": [""]}, {"far": ["a\0b"]}, {"slo": "x"}):
        refused(TypeError, **arguments)
    refused(farfield.ServerError, near=NEAR, far="tcp://127.0.0.1:1")
    refused(farfield.ServerError, near=NEAR, far="nonsense:")
    refused(farfield.FarfieldError, "/absent/token", near=NEAR, token_file="/absent/token")
    nothing_changed()
    farfield.enable(near=NEAR)
    assert int(far_array().sum()) == EXPECTED


def wrong_token(_):
    """A server with tenants refuses a token, and takes another one."""
    import tempfile

    folder = tempfile.TemporaryDirectory()

    def private(name, text):
        path = os.path.join(folder.name, name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(text + "\n")
        return path

    url = f"unix:{folder.name}/socket"
    words = [farfield.command(), "serve", "--listen", url, "--token-file", private("tenants", "alice 0123456789abcdef 512M")]
    words += ["--parent-pid", str(os.getpid())]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert server.stdout.readline()
    refused(farfield.ServerError, "token", near=NEAR, far=url, token_file=private("wrong", "fedcba9876543210"))
    nothing_changed()
    farfield.enable(near=NEAR, far=url, token_file=private("right", "0123456789abcdef"))
    assert int(far_array().sum()) == EXPECTED


def limit(_):
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, resource.RLIM_INFINITY))
    refused(farfield.NotSupportedError, "ulimit -v", near=NEAR)
    nothing_changed()


def masked_thread(work):
    """A thread that blocks all signals, as those of libzmq do, and works when it is told."""
    import signal

    ready, go = threading.Event(), threading.Event()

    def begin():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ready.set()
        go.wait()
        work()

    old = threading.Thread(target=begin)
    old.start()
    ready.wait()
    return old, go


def mask(_):
    """Older threads that block the signals of far memory, one of them in a call that waits."""
    import select

    results = []
    old, go = masked_thread(lambda: results.append([int(values.sum()), int(far_array().sum())]))
    reader, writer = os.pipe()
    waiting, go_too = masked_thread(lambda: results.append(select.select([reader], [], [], 60)[0]))
    go_too.set()
    job = farfield.enable(near=NEAR)
    values = far_array()
    go.set()
    old.join()
    assert results == [[EXPECTED] * 2] and job.stats().far_peak_bytes > 32 << 20, results
    os.write(writer, b"x")
    waiting.join()
    assert results[1:] == [[reader]]


def untraced(_):
    """Threads that block the signals, where nobody may change that from outside."""
    forbid(101)
    old, go = masked_thread(lambda: None)
    refused(farfield.NotSupportedError, "SIGBUS", "ptrace", str(old.native_id), near=NEAR)
    assert far_array().ctypes.data >> 40 != 0x20
    go.set()
    old.join()
    farfield.enable(near=NEAR)
    assert int(far_array().sum()) == EXPECTED


def forbid(call):
    """Installs a filter that forbids a system call, as in a container."""
    ld, equal, ret = 0x20, 0x15, 0x06
    rules = [(ld, 0, 0, 0), (equal, 0, 1, call), (ret, 0, 0, 0x0005_0001), (ret, 0, 0, 0x7FFF_0000)]
    import struct

    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    # For all threads: those of NumPy's libraries are there already.
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.syscall(317, 1, 1, program) == 0, ctypes.get_errno()


def forbidden(_):
    """A filter that forbids userfaultfd."""
    forbid(323)
    refused(farfield.NotSupportedError, "userfaultfd", near=NEAR)
    assert far_array().ctypes.data >> 40 != 0x20


def interrupt(_):
    """^C while a server does not answer."""
    import signal
    import socket

    silent = socket.create_server(("127.0.0.1", 0))
    sent = []

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.5, send).start()
    try:
        farfield.enable(near=NEAR, far=f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        raise AssertionError("nobody answers there")
    except KeyboardInterrupt:
        # 50 ms, and as much again as a busy machine needs.
        assert time.monotonic() - sent[0] < 1, time.monotonic() - sent[0]
        print(f"after {(time.monotonic() - sent[0]) * 1e3:.0f} ms")
    silent.close()
    nothing_changed()
    farfield.enable(near=NEAR)
    assert int(far_array().sum()) == EXPECTED


def inside(_):
    """Under `farfield run`: the job is that one."""
    import warnings

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        job = farfield.enable(near="1G")
    assert len(said) == 1 and issubclass(said[0].category, farfield.FarfieldWarning), said
    assert job.near == 40 << 20 and int(far_array().sum()) == EXPECTED


def keeper(_):
    """The keeper of a job with a server of its own is killed: the program goes on."""
    job = farfield.enable(near=NEAR, far=sys.argv[2])
    values = far_array()
    os.kill(job.pid, 9)
    while os.path.exists(f"/proc/{job.pid}/fd/0"):
        time.sleep(0.01)
    assert int(values.sum()) == EXPECTED
    assert "keeper is gone" in repr(job)
    try:
        job.near = "48M"
        raise AssertionError("there is no keeper")
    except farfield.JobEndedError:
        pass


def encrypted(_):
    """Servers with TLS, for a program that has threads and a heap already, and far memory that moves to another one."""
    import json
    import tempfile

    folder = tempfile.TemporaryDirectory()
    at = os.path.join(folder.name, "certs")

    def certify(*words):
        subprocess.run([farfield.command(), "cert", *words], check=True, stdout=subprocess.DEVNULL)

    certify("init", at)
    certify("server", at, "127.0.0.1")
    certify("client", at, "alice")
    words = [farfield.command(), "serve", "--listen", "tls://127.0.0.1:0", "--capacity", "512M"]
    words += ["--tls-cert", f"{at}/127.0.0.1.pem", "--tls-key", f"{at}/127.0.0.1.key", "--tls-client-ca", f"{at}/ca.pem"]
    # They end with this process, which needs them to its end.
    words += ["--parent-pid", str(os.getpid())]
    servers = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)]
    option = f"?ca={at}/ca.pem&cert={at}/alice.pem&key={at}/alice.key"
    first, second = (json.loads(server.stdout.readline())["endpoints"][0] + option for server in servers)
    go, sums = threading.Event(), []
    older = threading.Thread(target=lambda: (go.wait(), sums.append(int(values.sum()))))
    older.start()
    job = farfield.enable(near=NEAR, far=first)
    values = far_array()
    go.set()
    older.join()
    assert sums == [EXPECTED] and job.stats().far_bytes > 32 << 20, (sums, job)
    for place in (None, second):
        if place is not None:
            job.pool(place)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if int(values.sum()) == EXPECTED else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert int(values.sum()) == EXPECTED


def servers(url):
    """Servers are killed by the test while the program goes through its array."""
    farfield.enable(near=NEAR, far=url)
    values = far_array()
    print("filled", flush=True)
    sys.stdin.readline()
    assert int(values.sum()) == EXPECTED


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else None)
    print("ok", flush=True)
