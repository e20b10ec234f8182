"""A pandas table: read CSV, group, join, sort, pivot, write CSV."""
import hashlib
import sys

import numpy as np
import pandas as pd

rows = int(sys.argv[1])
random = np.random.Generator(np.random.PCG64(11))
table = pd.DataFrame(
    {
        "key": random.integers(0, 5000, rows),
        "zone": random.choice(["north", "south", "east", "west"], rows),
        "amount": random.integers(0, 10_000, rows),
        "name": ["n%07d" % n for n in random.integers(0, rows, rows)],
    }
)
table.to_csv("table.csv", index=False)
table = pd.read_csv("table.csv")
print(table.dtypes.to_string())
grouped = table.groupby(["zone", "key"])["amount"].agg(["count", "sum", "min", "max"])
print(grouped.head(5).to_string())
print("groups:", len(grouped), hashlib.sha256(grouped.to_csv().encode()).hexdigest()[:16])
joined = table.merge(grouped.reset_index(), on=["zone", "key"], how="left")
print("joined:", joined.shape, int(joined["sum"].sum()))
ordered = joined.sort_values(["name", "amount", "key"], kind="stable")
print("ordered:", hashlib.sha256(ordered["name"].str.cat().encode()).hexdigest()[:16])
pivot = table.pivot_table(index="key", columns="zone", values="amount", aggfunc="sum", fill_value=0)
pivot.to_csv("pivot.csv")
print("pivot:", pivot.shape)
