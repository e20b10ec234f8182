# The questions of `farfield-work questions` by farfield.Heap, of the same file: questions.py FILE POOL NEAR_BYTES FAR_BYTES. Prints the same line as our own programs; `--check` ends with what is missing.
import json
import resource
import struct
import sys
import time

if sys.argv[1:] == ["--check"]:
    try:
        from farfield import Heap

        Heap("4M")
    except (ImportError, RuntimeError) as error:
        sys.exit(str(error))
    sys.exit()

from farfield import Heap, col

MASK = 2**64 - 1


def ask(trips):
    answers = []

    def tell(frame):
        for row in frame.rows():
            answers.extend(-1.0 if value is None else float(value) for value in row)

    def tell_totals(frame, name):
        answers.extend(-1.0 if value is None else float(value) for value in frame.totals(name))

    tell(trips.group_by("VendorID", "passenger_count").agg(n="count"))
    tell_totals(trips, "trip_distance")
    places = trips.group_by("PULocationID").agg(n="count", fare=("fare_amount", "mean"), tip=("tip_amount", "max"))
    tell(places.sort("n", "PULocationID", descending=[True, False])[:10])
    tell_totals(trips.filter((col("trip_distance") > 10.0) & (col("fare_amount") > 40.0)), "tip_amount")
    paid = trips.select("tip_amount", "fare_amount").filter(col("fare_amount") > 0.0)
    tell_totals(paid.with_columns(share=col("tip_amount") / col("fare_amount")), "share")
    for name, share in [("fare_amount", 0.9), ("trip_distance", 0.5)]:
        found = trips.quantile(name, share)
        answers.append(-1.0 if found is None else found)
    when = col("lpep_pickup_datetime")
    autumn = trips.filter((when >= "2020-09-01") & (when < "2020-12-01"))
    tell(autumn.group_by("DOLocationID").agg(n="count", tip=("tip_amount", "mean")))
    dear = trips.select("total_amount", "PULocationID", "DOLocationID", "trip_distance")
    tell(dear.sort("total_amount", "PULocationID", "DOLocationID", descending=[True, False, False])[:100])
    return answers


def mix(number):
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def usage():
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic(), spent.ru_utime + spent.ru_stime, spent.ru_majflt, spent.ru_minflt


file, pool, near, far = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
heap = Heap(near, pool, near_max=near, far_max=far)
trips = heap.read_csv(file)
before = usage()
answers = ask(trips)
spent = [after - earlier for after, earlier in zip(usage(), before)]
phase = dict(zip(["seconds", "cpu_seconds", "faults_major", "faults_minor"], spent))
checksum = 0
for answer in answers:
    checksum = mix(checksum ^ struct.unpack("<Q", struct.pack("<d", answer))[0])
stats = heap.stats()
figures = {"near_peak_bytes": stats.near_bytes, "misses": stats.misses, "fetched_bytes": stats.fetched_bytes}
line = {"phases": [{"name": "ask", "ops": len(trips), **phase}], "checksum": f"{checksum:016x}", "verified": True, "errors": 0}
print(json.dumps({**line, "figures": figures}))
