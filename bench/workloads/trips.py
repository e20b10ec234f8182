# What the workload `trips` does, by pandas or Polars: trips.py MODULE FOLDER. The folder has the columns and the answers that `farfield-work trips --columns FOLDER` left there; without
# one it only says what is needed before anything is loaded. Prints the same line as our own programs.
import importlib
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

VENDOR, START, END, PASSENGERS, MILES, FARE, TIP, TOTAL, SECONDS = range(9)
COPIED = [FARE, TIP, TOTAL, SECONDS]
SHUFFLED = [TOTAL, MILES]
DEAR = 6000.0
NONE = [0.0, 0.0, sys.float_info.max, -sys.float_info.max]

module = importlib.import_module(sys.argv[1])


class Pandas:
    def __init__(self, columns):
        self.frame = module.DataFrame(dict(enumerate(columns)), copy=False)

    def compute(self):
        self.frame[SECONDS] = self.frame[END] - self.frame[START]

    def column(self, name):
        return self.frame[name]

    def copy(self, column):
        return column.copy(deep=True)

    def take(self, column, order):
        return column.take(order)

    def totals(self, column):
        return [column.count(), column.sum(), column.min(), column.max()] if len(column) else NONE

    def tally(self, column):
        return column.value_counts(sort=False).sort_index().items()

    def group(self, keys, values):
        groups = self.frame.groupby(keys, sort=True)[values].agg(["count", "sum", "min", "max"])
        return groups.itertuples()

    def find(self, column):
        return np.flatnonzero(column > DEAR)

    def median(self, column):
        return column.quantile(0.5, interpolation="lower")


class Polars:
    def __init__(self, columns):
        self.frame = module.DataFrame({str(name): column for name, column in enumerate(columns)})

    def compute(self):
        self.frame = self.frame.with_columns((module.col(str(END)) - module.col(str(START))).alias(str(SECONDS)))

    def column(self, name):
        return self.frame[str(name)]

    # A clone would share the bytes.
    def copy(self, column):
        return module.Series(column.to_numpy().copy())

    def take(self, column, order):
        return column.gather(order)

    def totals(self, column):
        return [column.count(), column.sum(), column.min(), column.max()] if len(column) else NONE

    def tally(self, column):
        return column.value_counts().sort(column.name).iter_rows()

    def group(self, keys, values):
        of = module.col(str(values))
        totals = [of.count().alias("count"), of.sum().alias("sum"), of.min().alias("min"), of.max().alias("max")]
        return self.frame.group_by(str(keys)).agg(totals).sort(str(keys)).iter_rows()

    def find(self, column):
        return (column > DEAR).arg_true()

    def median(self, column):
        return column.quantile(0.5, interpolation="lower")


def ask(table, order, clock):
    answers, made = [], []

    def timed(kind, work, *arguments):
        started = time.monotonic()
        result = work(*arguments)
        clock[kind] += time.monotonic() - started
        return result

    timed("compute_s", table.compute)
    for name in COPIED:
        made.append(timed("copy_s", table.copy, table.column(name)))
    started = time.monotonic()
    for name in [FARE, TIP, TOTAL, MILES, SECONDS]:
        answers.extend(table.totals(table.column(name)))
    for name in [VENDOR, PASSENGERS]:
        for key, count in table.tally(table.column(name)):
            answers.extend([key, count])
    for keys, values in [(PASSENGERS, FARE), (VENDOR, TIP)]:
        for row in table.group(keys, values):
            answers.extend(row)
    answers.extend(table.median(table.column(name)) for name in [FARE, SECONDS])
    clock["aggregate_s"] += time.monotonic() - started
    for name in SHUFFLED:
        made.append(timed("shuffle_s", table.take, table.column(name), order))
    dear = timed("aggregate_s", table.find, table.column(TOTAL))
    for name in [TIP, MILES]:
        some = timed("shuffle_s", table.take, table.column(name), dear)
        answers.extend(timed("aggregate_s", table.totals, some))
    return [float(answer) for answer in answers], made


def usage():
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime, spent.ru_majflt, spent.ru_minflt


def load(path, kind=np.float64):
    return np.fromfile(path, dtype=kind)


def main():
    if len(sys.argv) < 3:
        print(json.dumps({"version": module.__version__}))
        return
    folder = Path(sys.argv[2])
    make = Pandas if sys.argv[1] == "pandas" else Polars
    table = make([load(folder / f"column-{name}") for name in range(8)])
    order = load(folder / "order", np.uint64)
    # Indices are of the type that the library prefers.
    order = order.astype(np.int64) if make is Pandas else module.Series(order.astype(np.uint32))
    clock = dict.fromkeys(["copy_s", "shuffle_s", "aggregate_s", "compute_s"], 0.0)
    (cpu, major, minor), started = usage(), time.monotonic()
    answers, made = ask(table, order, clock)
    seconds = time.monotonic() - started
    after = usage()
    wanted = load(folder / "answers")
    wrong = abs(len(wanted) - len(answers))
    wrong += sum(not np.isclose(one, other, rtol=1e-9) for one, other in zip(answers, wanted))
    sources = [load(folder / f"column-{name}") for name in SHUFFLED]
    for column, source in zip(made[-2:], sources):
        wrong += int((np.asarray(column)[:4096] != source[np.asarray(order)[:4096]]).sum())
    phase = {"name": "ask", "ops": len(order), "seconds": seconds, "cpu_seconds": after[0] - cpu}
    phase |= {"faults_major": after[1] - major, "faults_minor": after[2] - minor}
    line = {"phases": [phase], "checksum": "", "errors": wrong, "verified": wrong == 0, "figures": clock}
    print(json.dumps(line))


main()
