# Tables larger than memory, by the means of several libraries: spill.py WHAT [--how LIBRARY] [--data-mib N] [--ops N] [--seed N] [--limit BYTES] [--enable NEAR_BYTES]. Prints the same line as
# our own programs. Without --how the table is in the memory of this process. `--check` ends with what is missing, `--own` after all modules are imported; code 3 says that memory was out.
import argparse
import importlib.util
import json
import os
import sys
import tempfile

from phases import Phases

OUT_OF_MEMORY = 3
#: Rows that are made at a time.
PART = 1 << 18
#: Look-ups of a round, each of which depends on the one before.
AT_ONCE = 1000


def mixed(numbers, seed):
    """Noise of 31 bits for each number."""
    import numpy as np

    with np.errstate(over="ignore"):
        spread = (numbers.astype(np.uint64) + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
        spread = (spread ^ (spread >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (spread >> np.uint64(33)).astype(np.int64)


def parts(rows):
    import numpy as np

    for first in range(0, rows, PART):
        yield np.arange(first, min(first + PART, rows))


def as_array(rows, column):
    import numpy as np

    values = np.empty(rows, dtype=np.int64)
    for numbers in parts(rows):
        values[numbers[0] : numbers[-1] + 1] = column(numbers)
    return values


def as_parquet(path, rows, columns):
    """Writes a table a part at a time: it need not fit into memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for numbers in parts(rows):
        table = pa.table({name: column(numbers) for name, column in columns.items()})
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


def duckdb_at(folder, limit):
    import duckdb

    base = duckdb.connect()
    base.execute(f"set temp_directory = '{folder}'; set preserve_insertion_order = false")
    if limit:
        base.execute(f"set memory_limit = '{limit}B'")
    return base


def dask_table(path, folder):
    """A table in parts of the size of a row group; what a shuffle makes lies in files."""
    import dask
    import dask.dataframe as dd

    dask.config.set({"scheduler": "threads", "temporary_directory": folder, "dataframe.shuffle.method": "disk"})
    return dd.read_parquet(path, split_row_groups=True)


def look_ups(how, data, ops, seed, limit, folder, phases):
    """Rounds of a thousand rows at random; which ones depends on the round before."""
    import numpy as np

    rows = data // 8
    path = os.path.join(folder, "table")
    column = {"key": lambda numbers: numbers, "value": lambda numbers: mixed(numbers, seed)}
    with phases.timed("fill", rows):
        if how == "memory":
            values = as_array(rows, column["value"])
        elif how == "memmap":
            values = np.memmap(path, dtype=np.int64, mode="w+", shape=rows)
            for numbers in parts(rows):
                values[numbers[0] : numbers[-1] + 1] = column["value"](numbers)
            values.flush()
        else:
            as_parquet(path, rows, column)
    if how == "polars":
        import polars as pl

        def ask(keys):
            wanted = pl.LazyFrame({"key": keys})
            found = pl.scan_parquet(path).join(wanted, on="key", how="semi").select(pl.col("value").sum())
            return found.collect(engine="streaming").item()
    elif how == "duckdb":
        base = duckdb_at(folder, limit)

        def ask(keys):
            wanted = {"key": keys}
            return int(base.execute(f"select sum(value) from read_parquet('{path}') join wanted using (key)").fetchone()[0])
    elif how == "dask":
        table = dask_table(path, folder)

        def ask(keys):
            return int(table[table["key"].isin(keys)]["value"].sum().compute())
    else:

        def ask(keys):
            return int(values[keys].sum())

    found, offsets = 0, np.arange(AT_ONCE)
    with phases.timed("use", ops * AT_ONCE):
        for _ in range(ops):
            # Each key once, so that a join counts it once.
            found += ask(np.unique(mixed(offsets + found % (1 << 40), seed) % rows))
    return found


def join(how, data, ops, seed, limit, folder, phases):
    """A join of two tables, and a sort of what comes out."""
    rows = data // 150
    table = {"key": lambda numbers: mixed(numbers, seed) % rows, "fare": lambda numbers: mixed(numbers, ~seed & 0xFFFF) % 10_000}
    # A permutation: the factor is a prime above all rows.
    other = {"key": lambda numbers: numbers * 2_654_435_761 % rows, "zone": lambda numbers: numbers % 5_000}
    paths = [os.path.join(folder, name) for name in ("table", "other")]
    with phases.timed("fill", rows):
        if how == "memory":
            import polars as pl

            left, right = (pl.DataFrame({name: as_array(rows, make) for name, make in each.items()}).lazy() for each in (table, other))
        else:
            as_parquet(paths[0], rows, table)
            as_parquet(paths[1], rows, other)
    if how == "polars":
        import polars as pl

        left, right = map(pl.scan_parquet, paths)
    out = os.path.join(folder, "joined")
    found = 0
    with phases.timed("use", ops * rows):
        for _ in range(ops):
            if how == "duckdb":
                # The answer is as large as the question: it goes to a file, as under `polars`.
                base = duckdb_at(folder, limit)
                base.execute(f"copy (select * from read_parquet('{paths[0]}') as one join read_parquet('{paths[1]}') as other using (key) order by zone, fare) to '{out}' (format parquet)")
                found += answer_of(out)
            elif how == "polars":
                left.join(right, on="key").sort("zone", "fare").sink_parquet(out)
                found += answer_of(out)
            elif how == "dask":
                left, right = (dask_table(path, folder) for path in paths)
                left.merge(right, on="key").sort_values(["zone", "fare"]).to_parquet(out, write_index=False)
                found += answer_of(*(os.path.join(out, f"part.{number}.parquet") for number in range(len(os.listdir(out)))))
            else:
                joined = left.join(right, on="key").sort("zone", "fare").collect()
                found += int(joined["fare"][len(joined) // 3]) + int(joined["zone"].sum())
    return found


def answer_of(*paths):
    """The answer in these files, one after the other."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    files = [pq.ParquetFile(path) for path in paths]
    at, total, passed = sum(file.metadata.num_rows for file in files) // 3, 0, 0
    for batch in (batch for file in files for batch in file.iter_batches(columns=["fare", "zone"])):
        total += pc.sum(batch["zone"]).as_py()
        if passed <= at < passed + len(batch):
            total += batch["fare"][at - passed].as_py()
        passed += len(batch)
    return total


def groups(how, data, ops, seed, limit, folder, phases):
    """Totals of groups, of which there are a quarter as many as rows."""
    rows = data // 100
    table = {"key": lambda numbers: mixed(numbers, seed) % (rows // 4), "fare": lambda numbers: mixed(numbers, ~seed & 0xFFFF) % 10_000}
    path = os.path.join(folder, "table")
    with phases.timed("fill", rows):
        if how == "memory":
            import polars as pl

            source = pl.DataFrame({name: as_array(rows, make) for name, make in table.items()}).lazy()
        else:
            as_parquet(path, rows, table)
    found = 0
    with phases.timed("use", ops * rows):
        for _ in range(ops):
            if how == "duckdb":
                totals = f"select sum(fare) as s, count(*) as c from read_parquet('{path}') group by key"
                most, rest = duckdb_at(folder, limit).execute(f"select max(s), sum(s * c % 1009) from ({totals})").fetchone()
            elif how == "dask":
                import dask

                fares = dask_table(path, folder).groupby("key")["fare"]
                totals = fares.agg(["sum", "count"], split_out=16)
                most, rest = dask.compute(totals["sum"].max(), (totals["sum"] * totals["count"] % 1009).sum())
            else:
                import polars as pl

                source = pl.scan_parquet(path) if how == "polars" else source
                totals = source.group_by("key").agg(s=pl.col("fare").sum(), c=pl.len().cast(pl.Int64))
                answers = totals.select(pl.col("s").max(), c=(pl.col("s") * pl.col("c") % 1009).sum())
                most, rest = answers.collect(engine="streaming" if how == "polars" else "in-memory").row(0)
            found += int(most) + int(rest)
    return found


PROGRAMS = {"spill-look-ups": look_ups, "spill-join": join, "spill-groups": groups}
MODULES = {"memory": ["polars"], "memmap": [], "polars": ["polars", "pyarrow"], "duckdb": ["duckdb", "pyarrow"], "dask": ["dask.dataframe", "pyarrow"]}
#: What a library raises when it has no memory left, beside MemoryError.
SAYS_OUT_OF_MEMORY = ("OutOfMemoryException", "ComputeError")

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=PROGRAMS)
parser.add_argument("--how", choices=MODULES, default="memory")
parser.add_argument("--data-mib", type=int, default=64)
parser.add_argument("--ops", type=int, default=1)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--limit", type=int, default=0, help="bytes that a library may take that has a limit of its own")
parser.add_argument("--enable", type=int, help="switch far memory on in this process, with so many bytes near")
parser.add_argument("--check", action="store_true")
parser.add_argument("--own", action="store_true")
options, _ = parser.parse_known_args()
modules = ["numpy", *MODULES[options.how]] + (["farfield"] if options.enable else [])
missing = [name for name in modules if importlib.util.find_spec(name.split(".")[0]) is None]
if options.how == "memmap" and options.what != "spill-look-ups":
    missing.append("joins and groups of numpy.memmap, which has none")
if missing or options.check:
    sys.exit(" ".join(missing) or None)
for module in modules:
    importlib.import_module(module)
if options.own:
    sys.exit()
phases = Phases()
if options.enable:
    import farfield

    farfield.enable(near=options.enable)
# The harness removes this folder when the program has ended, however that comes about.
with tempfile.TemporaryDirectory(dir=os.environ.get("FARFIELD_BENCH_FILES")) as folder:
    try:
        arguments = (options.how, options.data_mib << 20, options.ops, options.seed, options.limit, folder, phases)
        checksum = PROGRAMS[options.what](*arguments)
    except Exception as error:
        if not isinstance(error, MemoryError) and type(error).__name__ not in SAYS_OUT_OF_MEMORY:
            raise
        print(error, file=sys.stderr)
        sys.exit(OUT_OF_MEMORY)
print(json.dumps({"phases": phases.done, "checksum": f"{checksum:x}", "verified": True, "errors": 0, "figures": {}}))
