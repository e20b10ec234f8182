"""Heaps and frames from Python: `frames.py SITUATION [ARGUMENT]`. Prints "ok" if all is right, or "absent MODULE"."""

import datetime
import decimal
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time

import farfield
from farfield import col, lit

ZONES = ["Harlem", "Astoria", "", "Inwood", "Ä"]
DAY = datetime.date(2024, 1, 1)


def table(rows):
    """Columns of values, some of them None."""
    some = lambda value: None if random.random() < 0.1 else value
    return {
        "id": [some(random.randrange(-50, 50)) for _ in range(rows)],
        "fare": [some(random.randrange(-400, 4000) / 4) for _ in range(rows)],
        "zone": [some(random.choice(ZONES)) for _ in range(rows)],
        "day": [some(DAY + datetime.timedelta(days=random.randrange(60))) for _ in range(rows)],
        "row": list(range(rows)),
    }


def csv(columns):
    """CSV has no empty strings: they become None."""
    text = lambda value: "" if value is None else str(value)
    lines = [",".join(columns), *(",".join(map(text, row)) for row in zip(*columns.values()))]
    return "\n".join(lines) + "\n"


def near_rows(frame):
    return list(frame.rows())


def history(url):
    """Random chains of operations, beside the same in plain Python."""
    seed = int(os.environ.get("FARFIELD_SEED", random.randrange(1 << 32)))
    print("FARFIELD_SEED", seed, file=sys.stderr)
    random.seed(seed)
    heap = farfield.Heap(near="2M", far=url or None, far_max="1G")
    for _ in range(4):
        columns = table(random.choice([0, 50, 700, 8192, 30_000]))
        frame = heap.read_csv_text(csv(columns))
        columns["zone"] = [value or None for value in columns["zone"]]
        rows = list(zip(*columns.values()))
        assert near_rows(frame) == rows or not rows
        if not rows:
            continue
        names = list(columns)
        for _ in range(5):
            frame, rows, names = step(frame, rows, names)
            assert frame.columns == names, (frame.columns, names)
            assert near_rows(frame) == rows
    assert heap.stats().missing_servers == 0


def step(frame, rows, names):
    at = {name: number for number, name in enumerate(names)}
    which = random.randrange(6)
    if which == 0:
        bound, zone = random.randrange(-400, 4000) / 4, random.choice(ZONES)
        condition = (col("fare") > bound) | (col("zone") == zone)
        keeps = lambda row: bool(row[at["fare"]] is not None and row[at["fare"]] > bound or row[at["zone"]] == zone)
        return frame.filter(condition), list(filter(keeps, rows)), names
    if which == 1:
        first = DAY + datetime.timedelta(days=random.randrange(-5, 60))
        conditions = [col("day") >= first, ~col("id").is_null(), ~col("id").is_in([1, 2, 3.5])]
        keeps = lambda row: (
            row[at["day"]] is not None
            and row[at["day"]] >= first
            and row[at["id"]] is not None
            and row[at["id"]] not in (1, 2)
        )
        return frame.filter(*conditions), list(filter(keeps, rows)), names
    if which == 2:
        # Each expression sees the columns as they were.
        made = frame.with_columns(fare=col("fare") * 2 + col("id"), id=-col("id") % 7, twice=2 * lit(3))
        rest = lambda value: None if value is None else int(math.fmod(-value, 7))

        def changed(row):
            row = list(row)
            fare, number = row[at["fare"]], row[at["id"]]
            row[at["fare"]] = None if fare is None or number is None else fare * 2 + number
            row[at["id"]] = rest(number)
            if "twice" in at:
                row[at["twice"]] = 6
            return tuple(row) if "twice" in at else (*row, 6)

        return made, list(map(changed, rows)), names if "twice" in at else [*names, "twice"]
    if which == 3:
        descending = random.random() < 0.5
        sign = -1 if descending else 1
        key = lambda row: (row[at["fare"]] is None, 0 if row[at["fare"]] is None else sign * row[at["fare"]], row[at["row"]])
        return frame.sort("fare", "row", descending=[descending, False]), sorted(rows, key=key), names
    if which == 4:
        start, end = sorted(random.randrange(len(rows) + 1) for _ in range(2))
        return frame[start:end], rows[start:end], names
    groups = {}
    for row in rows:
        groups.setdefault(row[at["zone"]], []).append(row)
    values = lambda group, name: [row[at[name]] for row in group if row[at[name]] is not None]
    grouped = frame.group_by("zone").agg(n="count", fare="count", least=("day", "min"), total=("id", "sum"))
    expected = [
        (
            zone,
            len(group),
            len(values(group, "fare")),
            min(values(group, "day"), default=None),
            sum(values(group, "id")) if values(group, "id") else None,
        )
        for zone, group in sorted(groups.items(), key=lambda item: (item[0] is not None, (item[0] or "").encode()))
    ]
    assert near_rows(grouped) == expected
    joined = frame.join(grouped.rename({"n": "of_zone"}).select("zone", "of_zone"), on="zone", how="left")
    counts = {zone: len(group) for zone, group in groups.items() if zone is not None}
    pairs = sorted((row[at["row"]], row[-1]) for row in near_rows(joined)) if rows else []
    assert [count for _, count in pairs] == [counts.get(row[at["zone"]]) for row in sorted(rows, key=lambda row: row[at["row"]])]
    assert frame.totals("row").count == len(rows)
    return frame, rows, names


def numpy(_):
    import numpy as np
    import pandas as pd

    heap = farfield.Heap(near="2M")
    frame = heap.read_csv_text(csv(table(20_000)))
    values = frame.to_numpy("row")
    assert values.dtype == np.int64 and values.sum() == 20_000 * 19_999 // 2
    values[0] = 7  # It is a copy.
    fares = frame.to_numpy("fare")
    assert np.isnan(fares).sum() == frame.nulls("fare") and fares.dtype == np.float64
    assert frame.to_numpy("zone").dtype == object
    plain = pd.DataFrame({name: frame.to_numpy(name) for name in frame.columns})
    counts = frame.group_by("zone").agg(n="count").filter(~col("zone").is_null()).to_pandas()
    assert dict(zip(counts["zone"], counts["n"])) == plain.groupby("zone").size().to_dict()
    quartile = frame.quantile("fare", 0.25)
    assert quartile == np.quantile(fares[~np.isnan(fares)], 0.25, method="inverted_cdf")
    literal = frame.filter(col("row") == np.int64(5))
    assert literal.shape == (1, 5)


def polars(_):
    import polars as pl

    heap = farfield.Heap(near="2M")
    columns = table(50_000)
    plain = pl.DataFrame(columns).with_columns(
        price=pl.Series([decimal.Decimal(row) / 4 for row in range(50_000)], dtype=pl.Decimal(12, 2)),
        at=pl.Series([datetime.datetime(2024, 1, 1, 12, 0, 0, row) for row in range(50_000)]),
        kind=pl.Series([random.choice(["a", "b"]) for _ in range(50_000)], dtype=pl.Categorical),
    )
    frame = heap.from_arrow(plain)
    assert frame.to_polars().equals(plain.with_columns(pl.col("kind").cast(pl.String)))
    # Of a heap into another one.
    other = farfield.Heap(near="2M").from_arrow(frame)
    assert other.to_dict() == frame.to_dict()
    cut = decimal.Decimal("77.25")
    ours = frame.filter((col("price") > cut) & (col("at") < datetime.datetime(2024, 1, 1, 12, 0, 0, 40_000)))
    theirs = plain.filter((pl.col("price") > cut) & (pl.col("at") < datetime.datetime(2024, 1, 1, 12, 0, 0, 40_000)))
    assert ours.to_dict()["price"] == theirs["price"].to_list() and len(ours) == len(theirs)
    # Streams that nobody reads, and what is read twice.
    del other
    frame.__arrow_c_stream__()
    assert pl.DataFrame(frame[:10]).equals(pl.DataFrame(frame).head(10))


def names_of_threads():
    for number in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{number}/comm") as file:
                yield file.read().strip()
        except OSError:
            pass  # It has just ended.


def ends_soon(what):
    """No thread goes on after ^C with what was asked."""
    deadline = time.monotonic() + 20
    while "farfield frame" in names_of_threads():
        assert time.monotonic() < deadline, f"{what} goes on"
        time.sleep(0.01)


def interrupt(_):
    heap = farfield.Heap(near="2M", far_max="2G")
    frame = heap.read_csv_text("row\n" + "\n".join(map(str, range(400_000))))
    frame = frame.with_columns(other=col("row") * 7919 % 100_003)
    waits = []
    for delay in (0.02, 0.2, 0.5):
        # The handler notes when the signal came.
        came = []

        def handler(number, stack):
            came.append(time.monotonic())
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, handler)
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            while True:
                frame.sort("other", "row")
        except KeyboardInterrupt:
            waits.append(time.monotonic() - came[0])
        timer.join()
    assert max(waits) < 1, waits
    ends_soon("a sort")
    if __import__("farfield._native")._native.HAS_SQL:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            heap.sql("select count(*) as n from a, b where a.row < b.other", a=frame, b=frame)
            raise AssertionError("there are too many pairs")
        except KeyboardInterrupt:
            assert time.monotonic() - came[0] < 1
        timer.join()
        ends_soon("a query")
    # What was there is there, and the heap works.
    assert frame.totals("row").sum == 400_000 * 399_999 / 2
    assert len(frame.filter(col("other") < 1000)) == sum(row * 7919 % 100_003 < 1000 for row in range(400_000))


def threads(_):
    heap = farfield.Heap(near="4M")
    frame = heap.read_csv_text(csv(table(60_000)))
    expected = [len(frame.filter(col("id") > bound)) for bound in range(4)]
    found = [[] for _ in range(4)]

    def ask(bound):
        for _ in range(5):
            found[bound].append(len(frame.filter(col("id") > bound)))

    # A thread of Python goes on while others are in our code.
    turns, over = [0], threading.Event()

    def count():
        while not over.is_set():
            turns[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    asking = [threading.Thread(target=ask, args=(bound,)) for bound in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    over.set()
    counter.join()
    assert found == [[rows] * 5 for rows in expected] and turns[0] > 100, turns


def rows_of_own_heap(count):
    heap = farfield.Heap(near="1M")
    return len(heap.read_csv_text("row\n" + "\n".join(map(str, range(count)))))


def forks(_):
    heap = farfield.Heap(near="2M")
    frame = heap.read_csv_text(csv(table(1000)))
    child = os.fork()
    if child == 0:
        for use in (lambda: len(frame), lambda: heap.near, lambda: frame.filter(col("id") > 1)):
            try:
                use()
                os._exit(1)
            except farfield.FarfieldError as error:
                assert "fork" in str(error)
        own = rows_of_own_heap(100)
        del frame, heap
        os._exit(0 if own == 100 else 2)
    assert os.waitpid(child, 0)[1] == 0
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(rows_of_own_heap, [10, 20]) == [10, 20]
    assert len(frame) == 1000


def refused(kind, part, use):
    try:
        use()
    except kind as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"{part} was not refused")


def refusals(_):
    heap = farfield.Heap(near="2M")
    frame = heap.read_csv_text("zone,fare\nHarlem,7.5\nAstoria,12\n")
    query = farfield.QueryError
    refused(query, "tip", lambda: frame.filter(col("tip") > 1))
    refused(query, "cast", lambda: frame.filter(col("zone") > 1))
    refused(query, "condition", lambda: frame.filter(col("fare")))
    refused(query, "median", lambda: frame.group_by("zone").agg(fare="median"))
    refused(query, "tip", lambda: frame.group_by("zone").agg(tip="mean"))
    refused(query, "outer", lambda: frame.join(frame, on="zone", how="outer"))
    refused(query, "suffix", lambda: frame.join(frame, on="zone"))
    refused(query, "line 3", lambda: heap.read_csv_text("a\n1\n2,3\n"))
    refused(query, "Tuesday", lambda: frame.with_columns(day=lit("Tuesday").cast("date")))
    refused(query, "no type", lambda: frame.with_columns(day=col("fare").cast("number")))
    refused(query, "levels", lambda: frame.filter(sum((col("fare") for _ in range(10_000)), lit(0)) > 1))
    refused(TypeError, "truth value", lambda: frame.filter(col("fare") > 1 and col("fare") < 2))
    refused(TypeError, "object", lambda: col("fare") > object())
    refused(TypeError, "stream of Arrow", lambda: heap.from_arrow([1, 2]))
    refused(TypeError, "to_numpy", lambda: frame["zone"])
    refused(OverflowError, "integer", lambda: lit(1 << 200))
    refused(FileNotFoundError, "nowhere.parquet", lambda: heap.read_parquet("/nowhere.parquet"))
    refused(farfield.BudgetError, "1 MiB", lambda: farfield.Heap(near="1K"))
    refused(farfield.BudgetError, "no size", lambda: farfield.Heap(near="1X"))
    refused(farfield.ServerError, "tcp://127.0.0.1:1", lambda: farfield.Heap(near="2M", far="tcp://127.0.0.1:1"))
    assert frame.filter().to_dict() == frame.to_dict()
    heap.near = "4M"
    assert heap.near == 4 << 20 and repr(heap).startswith("<farfield.Heap: near ")
    assert "Harlem" in repr(frame) and repr(frame[:0]).endswith("0 rows of 2 columns, far")


def enabled(_):
    """Both doors in one process."""
    import numpy as np

    farfield.enable(near="32M")
    heap = farfield.Heap(near="4M")
    frame = heap.read_csv_text(csv(table(30_000)))
    array = np.arange(12_000_000)
    assert int(array.sum()) == 12_000_000 * 11_999_999 // 2
    assert frame.totals("row").sum == 30_000 * 29_999 / 2


def servers(url):
    heap = farfield.Heap(near="2M", far=url, far_max="1G")
    frame = heap.read_csv_text("row\n" + "\n".join(map(str, range(600_000))))
    heap.near = "1M"
    print("filled", flush=True)
    sys.stdin.readline()
    try:
        found = frame.totals("row").sum == 600_000 * 599_999 / 2 and len(frame.sort("row")[5:10]) == 5
    except farfield.ServerError as error:
        print("lost:", error)
        return
    assert found


def moves(urls):
    """From a pool to another, in the middle of questions."""
    first, second = urls.split(",")
    heap = farfield.Heap(near="2M", far=first, far_max="1G")
    frame = heap.read_csv_text("row\n" + "\n".join(map(str, range(300_000))))
    over, wrong = threading.Event(), []

    def ask():
        while not over.is_set():
            if len(frame.filter(col("row") < 1000)) != 1000:
                wrong.append(1)

    asking = threading.Thread(target=ask)
    asking.start()
    heap.pool(second)
    over.set()
    asking.join()
    assert not wrong and frame.totals("row").count == 300_000


def sql(_):
    if not __import__("farfield._native")._native.HAS_SQL:
        refused(farfield.NotSupportedError, "--sql", lambda: farfield.Heap(near="2M").sql("select 1"))
        return
    heap = farfield.Heap(near="4M")
    frame = heap.read_csv_text(csv(table(30_000)))
    answer = heap.sql("select zone, count(*) as n, avg(fare) as fare from trips group by zone order by zone", trips=frame)
    ours = frame.group_by("zone").agg(n=("row", "count"), fare="mean").filter(~col("zone").is_null())
    theirs = answer.filter(~col("zone").is_null())
    assert theirs.to_dict()["n"] == ours.to_dict()["n"]
    refused(farfield.QueryError, "nobody", lambda: heap.sql("select * from nobody"))


if __name__ == "__main__":
    situation, argument = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "")
    try:
        globals()[situation](argument)
        print("ok")
    except ModuleNotFoundError as error:
        print("absent", error.name)
