# Programs that people run, as a workload: people.py WHAT [--data-mib N] [--ops N] [--seed N] [--enable NEAR_BYTES]. Prints the same line as our own programs. `--check` instead ends with what is missing.
import argparse
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib

from phases import Phases


# The harness removes this folder when the program has ended, however that comes about.
tempfile.tempdir = os.environ.get("FARFIELD_BENCH_FILES")


class Zipf:
    """Keys below `count` by Zipf's law with exponent 1: the logarithm of a rank is uniform. Popular keys lie anywhere."""

    def __init__(self, count, seed):
        self.count, self.random = count, random.Random(seed)

    def key(self):
        return int(self.count ** self.random.random()) * 0x9E3779B1 % self.count


def value_of(key, length):
    """Text that packs about three to one."""
    return (f"{key:08x}" * 4 + f"{key * 0x9E3779B97F4A7C15 % 2**64:016x}" * (length // 16))[:length]


def end_as(child):
    """Ends as a child did that was killed: so it is for want of memory that the program ends, and not for an error."""
    if child.wait(30) == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)


def numpy_product(data, ops, seed, phases):
    """Products of two square matrices of whole numbers, so that sums are exact."""
    import numpy as np

    size = int((data / 24) ** 0.5)
    with phases.timed("fill", size * size):
        make = np.random.default_rng(seed)
        left, right = (make.integers(0, 100, (size, size)).astype(np.float64) for _ in range(2))
        total = np.zeros((size, size))
    with phases.timed("use", ops):
        for _ in range(ops):
            np.matmul(left, right, out=total)
    return int(total.sum()) ^ int(total[:, size // 2].sum())


def pandas_join(data, ops, seed, phases):
    """Totals of groups, and a join with them; a tenth of the memory is the table."""
    import numpy as np
    import pandas as pd

    rows = data // 300
    with phases.timed("fill", rows):
        make = np.random.default_rng(seed)
        table = pd.DataFrame({"zone": make.integers(0, 5000, rows), "day": make.integers(0, 365, rows),
                              "fare": make.integers(0, 10000, rows), "miles": make.integers(0, 100, rows)})
    found = 0
    with phases.timed("use", ops * rows):
        for _ in range(ops):
            totals = table.groupby("zone", as_index=False).agg(mean=("fare", "mean"), most=("miles", "max"))
            joined = table.merge(totals, on="zone")
            dear = joined[joined["fare"] > joined["mean"]]
            found += int(dear["fare"].sum()) + int(dear.groupby("day")["miles"].sum().max())
    return found


def python_objects(data, ops, seed, phases):
    """A dictionary of lists with numbers and texts, of which some are replaced."""
    count = data // 880
    with phases.timed("fill", count):
        known = {f"user {key}": [key, float(key), [key + at for at in range(8)], value_of(key, 120)]
                 for key in range(count)}
    keys, found = Zipf(count, seed), 0
    with phases.timed("use", ops):
        for at in range(ops):
            key = keys.key()
            one = known[f"user {key}"]
            assert one[0] == key
            found += one[2][at % 8] + len(one[3])
            if at % 10 == 0:
                one[2] = [key + other for other in range(8)]
    return found


def sqlite_rows(data, ops, seed, phases):
    """A table in memory with an index on text: look-ups, ranges and updates."""
    count = data // 330
    base = sqlite3.connect(":memory:")
    with phases.timed("fill", count):
        base.execute("create table user (id integer primary key, name text, visits integer, about text)")
        rows = ((key, value_of(key, 24), 0, value_of(key, 200)) for key in range(count))
        base.executemany("insert into user values (?, ?, ?, ?)", rows)
        base.execute("create index by_name on user (name)")
        base.commit()
    keys, found = Zipf(count, seed), 0
    with phases.timed("use", ops):
        for at in range(ops):
            key = keys.key()
            name, about = base.execute("select id, about from user where name = ?", (value_of(key, 24),)).fetchone()
            assert name == key
            found += len(about)
            if at % 20 == 0:
                found += base.execute("select sum(length(about)) from user where id between ? and ?",
                                      (key, key + 100)).fetchone()[0]
            if at % 10 == 0:
                base.execute("update user set visits = visits + 1 where id = ?", (key,))
    return found + base.execute("select sum(visits) from user where id < 1000").fetchone()[0]


def redis_gets(data, ops, seed, phases):
    """A Redis server with values of 700 bytes, asked one at a time over a socket."""
    count, length = data // 850, 700
    with tempfile.TemporaryDirectory() as folder:
        # The path of a socket must be short, and that of the folder may be long.
        os.chdir(folder)
        path = "redis"
        words = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
        server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            link = socket.socket(socket.AF_UNIX)
            deadline = time.monotonic() + 30
            while link.connect_ex(path):
                if time.monotonic() > deadline or server.poll() is not None:
                    sys.exit("redis-server did not start")
                time.sleep(0.01)
            answers = link.makefile("rb")

            def command(*parts):
                texts = [str(part).encode() for part in parts]
                return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%s\r\n" % (len(text), text) for text in texts)

            with phases.timed("fill", count):
                for first in range(0, count, 100):
                    some = range(first, min(first + 100, count))
                    link.sendall(b"".join(command("SET", f"user:{key}", value_of(key, length)) for key in some))
                    for _ in some:
                        assert answers.readline() == b"+OK\r\n"
            keys, found = Zipf(count, seed), 0
            with phases.timed("use", ops):
                for _ in range(ops):
                    key = keys.key()
                    link.sendall(command("GET", f"user:{key}"))
                    assert answers.readline() == b"$%d\r\n" % length
                    value = answers.read(length + 2)
                    assert value.startswith(b"%08x" % key)
                    found += value[40]
            link.sendall(command("SHUTDOWN", "NOSAVE"))
            server.wait(30)
            return found
        except (AssertionError, OSError):
            server.terminate()
            end_as(server)
            raise
        finally:
            server.kill()
            server.wait()


def sorted_text(data, ops, seed, phases):
    """GNU sort of lines of text, with a buffer for all of them."""
    lines = data // 100
    make = random.Random(seed)
    with tempfile.NamedTemporaryFile("w") as text:
        with phases.timed("fill", lines):
            text.writelines(f"{make.getrandbits(64):016x} {value_of(at, 40)}\n" for at in range(lines))
            text.flush()
        with phases.timed("use", ops * lines):
            for _ in range(ops):
                words = ["sort", "--parallel=2", "-S", f"{data}b", text.name]
                found = 0
                with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"}) as sort:
                    while part := sort.stdout.read(1 << 20):
                        found = zlib.crc32(part, found)
                end_as(sort)
                assert sort.returncode == 0
    return found


def numpy_sort(data, ops, seed, phases):
    """Sorts a third of the memory; a sort by index takes as much again, and its answer, too."""
    import numpy as np

    count = data // 24
    with phases.timed("fill", count):
        values = np.random.default_rng(seed).integers(0, 1 << 40, count)
    found = 0
    with phases.timed("use", ops * count):
        for at in range(ops):
            order = np.argsort(values, kind="stable")
            ordered = values[order]
            found += int(ordered[count // 3]) ^ int(ordered[-1 - at])
            del order, ordered
    return found


def scikit_clusters(data, ops, seed, phases):
    """Clusters of points in 32 dimensions (k-means), from given centres, so that each run takes the same steps."""
    import numpy as np
    from sklearn.cluster import KMeans

    count = data // (32 * 8) * 6 // 10
    with phases.timed("fill", count):
        make = np.random.default_rng(seed)
        points = make.random((count, 32))
        points[:: 3] += 1
    centres = points[:: max(count // 8, 1)][:8].copy()
    with phases.timed("use", ops * count):
        fitted = KMeans(n_clusters=8, init=centres, n_init=1, max_iter=ops, tol=0, copy_x=False).fit(points)
    return int(round(fitted.inertia_ / count, 6) * 10**6)


def scikit_boosting(data, ops, seed, phases):
    """Gradient boosting over histograms of forty columns."""
    import numpy as np
    from sklearn.ensemble import HistGradientBoostingRegressor

    count = data // (40 * 8) * 45 // 100
    with phases.timed("fill", count):
        columns = np.random.default_rng(seed).random((count, 40))
        wanted = columns[:, 0] * 3 + columns[:, 7] * columns[:, 9]
    model = HistGradientBoostingRegressor(max_iter=ops, early_stopping=False, random_state=seed)
    with phases.timed("use", ops * count):
        model.fit(columns, wanted)
        error = float(((model.predict(columns[:1000]) - wanted[:1000]) ** 2).mean())
    return int(round(error, 6) * 10**6)


def polars_join(data, ops, seed, phases):
    """A join of two tables, and a sort of what comes out."""
    import numpy as np
    import polars as pl

    rows = data // 150
    with phases.timed("fill", rows):
        make = np.random.default_rng(seed)
        keys = make.permutation(rows)
        table = pl.DataFrame({"key": make.integers(0, rows, rows), "fare": make.integers(0, 10000, rows)})
        other = pl.DataFrame({"key": keys, "zone": keys % 5000})
    found = 0
    with phases.timed("use", ops * rows):
        for _ in range(ops):
            joined = table.join(other, on="key").sort("zone", "fare")
            found += int(joined["fare"][len(joined) // 3]) + int(joined["zone"].sum())
    return found


PROGRAMS = {
    "numpy-sort": (numpy_sort, ["numpy"], []),
    "scikit-clusters": (scikit_clusters, ["numpy", "sklearn"], []),
    "scikit-boosting": (scikit_boosting, ["numpy", "sklearn"], []),
    "polars": (polars_join, ["numpy", "polars"], []),
    "numpy": (numpy_product, ["numpy"], []),
    "pandas": (pandas_join, ["numpy", "pandas"], []),
    "python": (python_objects, [], []),
    "sqlite": (sqlite_rows, [], []),
    "redis": (redis_gets, [], ["redis-server"]),
    "sort": (sorted_text, [], ["sort"]),
}

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=PROGRAMS)
parser.add_argument("--data-mib", type=int, default=64)
parser.add_argument("--ops", type=int, default=1)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--enable", type=int, help="switch far memory on in this process, with so many bytes near")
parser.add_argument("--check", action="store_true")
options, _ = parser.parse_known_args()
program, modules, commands = PROGRAMS[options.what]
modules += ["farfield"] if options.enable else []
if options.check:
    import importlib.util

    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    sys.exit(" ".join(missing + [name for name in commands if shutil.which(name) is None]) or None)
phases, figures = Phases(), {}
if options.enable:
    moments = [time.monotonic()]
    import farfield

    moments.append(time.monotonic())
    farfield.enable(near=options.enable)
    moments.append(time.monotonic())
    figures = {"import_ms": (moments[1] - moments[0]) * 1e3, "enable_ms": (moments[2] - moments[1]) * 1e3}
checksum = program(options.data_mib << 20, options.ops, options.seed, phases)
print(json.dumps({"phases": phases.done, "checksum": f"{checksum:x}", "verified": True, "errors": 0, "figures": figures}))
