"""A notebook's day: `day.py SECONDS URL…`. Far memory is switched on once. Then, at random, arrays are made, changed and dropped, the budget
and the pool change, and children are forked and started, for so many seconds. Prints "ok" if every number was right.

Danger: what goes wrong only after hours, or when two of these meet. `FARFIELD_SEED` repeats the choices.
"""

import ctypes
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pandas as pd

import farfield

BUDGETS = ["32M", "48M", "64M", "96M"]
#: Bytes that all cells have together, at most.
MOST = 192 << 20
#: How the memory of a new array is chosen.
PLACES = [None, None, farfield.far, farfield.near]


class Cell:
    """What a cell of a notebook has made: numbers that grow evenly, so that each of them is known."""

    def __init__(self, chance):
        self.first, self.step = chance.randrange(1000), chance.randrange(1, 50)
        count = chance.randrange(1000, 3_000_000)
        place = chance.choice(PLACES)
        if place is None:
            self.values = self.expected(0, count)
        else:
            with place():
                self.values = self.expected(0, count)

    def expected(self, start, end):
        return np.arange(start, end, dtype=np.int64) * self.step + self.first

    def check(self):
        """Looks at all of it, a part at a time."""
        for start in range(0, len(self.values), 1 << 18):
            end = min(start + (1 << 18), len(self.values))
            assert np.array_equal(self.values[start:end], self.expected(start, end)), (self.first, self.step, start)

    def change(self, chance):
        more = chance.randrange(100)
        self.values += more
        self.first += more

    def resize(self, chance):
        """Grows or shrinks in its place, as NumPy does by `realloc`."""
        before, count = len(self.values), chance.randrange(1000, 3_000_000)
        self.values.resize(count, refcheck=False)
        if count > before:
            assert not self.values[before:].any()
            self.values[before:] = self.expected(before, count)


def part_sum(part):
    return int(np.arange(part, 1_000_000, 4, dtype=np.int64).sum())


class Day:
    def __init__(self, job, urls, chance):
        self.job, self.chance = job, chance
        #: The pool that it has, and the others.
        self.urls = urls
        self.cells, self.done = [], Counter()
        self.texts = {}

    def bytes(self):
        return sum(cell.values.nbytes for cell in self.cells)

    def grow(self):
        self.cells.append(Cell(self.chance))
        while self.bytes() > MOST:
            self.shrink()

    def shrink(self):
        if self.cells:
            del self.cells[self.chance.randrange(len(self.cells))]

    def change(self):
        for cell in self.chance.sample(self.cells, len(self.cells) // 2):
            cell.change(self.chance)

    def resize(self):
        if self.cells:
            self.chance.choice(self.cells).resize(self.chance)
        while self.bytes() > MOST:
            self.shrink()

    def look(self):
        for cell in self.cells:
            cell.check()

    def objects(self):
        """Python's own objects: many small ones, on the heap of malloc."""
        key = self.chance.randrange(8)
        if key in self.texts:
            texts = self.texts.pop(key)
            assert all(text == f"{key} {at}" * 3 for at, text in enumerate(texts))
        else:
            self.texts[key] = [f"{key} {at}" * 3 for at in range(40_000)]

    def table(self):
        rows = self.chance.randrange(10_000, 300_000)
        keys = np.random.default_rng(rows).integers(0, 1000, rows)
        table = pd.DataFrame({"key": keys, "value": np.arange(rows)})
        totals = table.groupby("key")["value"].sum()
        expected = np.bincount(keys, weights=np.arange(rows), minlength=1000)
        assert all(int(expected[key]) == int(total) for key, total in totals.items())

    def budget(self):
        self.job.near = self.chance.choice(BUDGETS)

    def pool(self):
        """Moves, while a thread goes through everything."""
        walk = Walk(self.cells)
        walk.start()
        here, *others = self.urls
        there = self.chance.choice(others)
        self.job.pool(there)
        self.urls = [there, here, *(url for url in others if url != there)]
        walk.end()

    def fork(self):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self.change()
                self.look()
                code = 0
            finally:
                os._exit(code)
        # Both go on at a time.
        self.change()
        self.look()
        status = os.waitpid(pid, 0)[1]
        assert status == 0, status

    def processes(self):
        method = self.chance.choice(["fork", "spawn", "forkserver"])
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert sum(pool.map(part_sum, range(4))) == 999_999 * 500_000, method

    def program(self):
        code = "import numpy; print(numpy.arange(3_000_000).sum())"
        ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        assert ended.stdout == "4499998500000\n", ended.stdout


class Walk(threading.Thread):
    """Looks at all cells in another thread. What it finds wrong is raised when it is joined."""

    def __init__(self, cells):
        super().__init__()
        self.cells, self.error = cells, None

    def run(self):
        try:
            for cell in self.cells:
                cell.check()
        except BaseException as error:
            self.error = error

    def end(self):
        self.join()
        if self.error is not None:
            raise self.error


#: What happens, and how often.
ACTIONS = {
    "grow": 20, "shrink": 8, "change": 12, "resize": 8, "look": 12, "objects": 8, "table": 6, "budget": 6, "pool": 6,
    "fork": 6, "processes": 2, "program": 3,
}


def main(seconds, urls):
    seed = int(os.environ.get("FARFIELD_SEED", time.time_ns() // 1000 % 1_000_000))
    print(f"FARFIELD_SEED={seed}", flush=True)
    # The first pool has the arguments of `enable()`; the others are moved to.
    day = Day(farfield.enable(near=BUDGETS[0], far=urls[0]), urls, random.Random(seed))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        action, = day.chance.choices(list(ACTIONS), list(ACTIONS.values()))
        getattr(day, action)()
        day.done[action] += 1
    day.look()
    stats = day.job.stats()
    print(dict(day.done), stats, flush=True)
    assert stats.far_peak_bytes > 0, "nothing was far"
    day.cells.clear()
    day.texts.clear()
    # What malloc keeps for later is not given back by itself.
    ctypes.CDLL(None).malloc_trim(0)
    until = time.monotonic() + 30
    # Fragments of what there was: a tenth of its peak.
    while day.job.stats().far_bytes > max(64 << 20, stats.far_peak_bytes // 10):
        assert time.monotonic() < until, day.job.stats()
        time.sleep(0.1)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
    print("ok", flush=True)
