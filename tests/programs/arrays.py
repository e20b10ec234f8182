"""Large NumPy arrays: sort, gather, products, a transform, reductions, and a pool of threads. Prints digests."""
import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

millions = int(sys.argv[1])
random = np.random.Generator(np.random.PCG64(7))


def digest(name, array):
    print(name, array.dtype, array.shape, hashlib.sha256(np.ascontiguousarray(array)).hexdigest()[:16])


values = random.integers(0, 1 << 40, size=millions * 1_000_000, dtype=np.int64)
digest("values", values)
order = np.argsort(values, kind="stable")
digest("order", order)
digest("sorted", values[order])
del order
with ThreadPoolExecutor(2) as pool:
    parts = list(pool.map(lambda part: np.sort(part), np.array_split(values, 8)))
digest("parts", np.concatenate(parts))
del parts
counts = np.bincount(values & 0xFFFFF)
digest("counts", counts)
floats = values.astype(np.float64)
floats.resize(1 << (floats.size.bit_length() - 1))
spectrum = np.fft.rfft(floats)
print("transform there and back:", bool(np.allclose(np.fft.irfft(spectrum), floats)))
del spectrum
square = floats[:1_000_000].reshape(1000, 1000) / 2.0**40
print("trace of the product: %.6f" % np.trace(square @ square.T))
np.save("values.npy", values)
again = np.load("values.npy", mmap_mode="r")
print("through a file:", bool((again == values).all()))
