# Timed sections of the scripts beside this file, as our own programs report them.
import contextlib
import resource
import time


class Phases:
    """Timed sections."""

    def __init__(self):
        self.done = []

    @contextlib.contextmanager
    def timed(self, name, ops):
        def now():
            used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            cpu = sum(one.ru_utime + one.ru_stime for one in used)
            return time.monotonic(), cpu, sum(one.ru_majflt for one in used), sum(one.ru_minflt for one in used)

        before = now()
        yield
        spent = [end - begin for end, begin in zip(now(), before)]
        names = ["seconds", "cpu_seconds", "faults_major", "faults_minor"]
        self.done.append({"name": name, "ops": ops, **dict(zip(names, spent))})
