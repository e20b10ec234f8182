"""NumPy, pandas and scikit-learn beyond their budget: prints digests of results, to compare with a run without far memory."""

import hashlib
import sys

near, rows = sys.argv[1], int(sys.argv[2])
if near != "plain":
    import farfield

    job = farfield.enable(near=near)

import numpy as np
import pandas as pd


def show(name, values):
    print(name, hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest(), flush=True)


random = np.random.default_rng(7)
values = random.integers(0, 1 << 40, rows)
show("sorted", np.sort(values))
frame = pd.DataFrame({"key": values % 1009, "value": values, "weight": random.random(len(values))})
show("grouped", frame.groupby("key").agg({"value": "sum", "weight": "max"}).to_numpy())
joined = frame.merge(pd.DataFrame({"key": np.arange(1009), "name": np.arange(1009) * 3}), on="key")
show("merged", joined.sort_values(["value", "key"], kind="stable")[["value", "name"]].to_numpy())
if rows > 1_000_000:
    from sklearn.cluster import KMeans

    points = random.random((rows // 75, 8))
    show("clusters", KMeans(8, n_init=1, max_iter=5, random_state=1, algorithm="lloyd").fit(points).labels_.astype(np.int32))
small = [np.full(5_000, number, dtype=np.int64) for number in range(rows // 2_000)]  # 40 KB each: from glibc's heap
show("small", np.concatenate(small[::-1]))
if near != "plain":
    stats = job.stats()
    assert stats.far_peak_bytes > 8 << 20, stats
    assert stats.near_peak_bytes <= stats.near_limit_bytes + (9 << 20), stats
