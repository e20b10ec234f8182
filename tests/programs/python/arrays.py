"""Arrays that are placed near or far: `arrays.py NAME`. Prints "ok" if all is right."""

import asyncio
import contextvars
import gc
import io
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import weakref

import numpy as np

import farfield

NEAR = "32M"
COUNT = 8_000_000  # 64 MB
EXPECTED = COUNT * (COUNT - 1) // 2
SMALL = 1000  # 8 kB: below the 64 KiB from which on arrays are far


def is_far(array):
    return 0x2000_0000_0000 <= array.ctypes.data < 0x2C00_0000_0000


def handler(array):
    core = np._core if np.__version__[0] > "1" else np.core
    return core.multiarray.get_handler_name(array)


def refused(kind, *words, place=farfield.far):
    try:
        with place():
            raise AssertionError("it was not refused")
    except kind as error:
        assert all(word in str(error) for word in words), error


def only_arrays(_):
    """With `what="arrays"`, nothing but arrays of `far()` is far, and the budget is theirs alone."""
    refused(farfield.NotEnabledError, "enable()")
    job = farfield.enable(near=NEAR, what="arrays")
    ordinary = np.arange(COUNT)
    with farfield.near():
        near = np.arange(COUNT)
    assert not is_far(ordinary) and not is_far(near) and job.stats().near_bytes < 4 << 20, job.stats()
    # 200 MB of other memory, by mmap and by the program break.
    others = [bytearray(1 << 25) for _ in range(4)] + [bytes(range(256)) * 16 for _ in range(16_000)]
    import mmap

    mapping = mmap.mmap(-1, 1 << 26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.write(bytes(1 << 26))
    stats = job.stats()
    assert stats.far_peak_bytes == 0 and stats.near_bytes < 4 << 20, stats
    with farfield.far():
        far = np.arange(COUNT)
        small = np.arange(SMALL)
    assert is_far(far) and not is_far(small) and handler(far) == handler(small) == "farfield_far"
    assert [int(array.sum()) for array in (ordinary, near, far)] == [EXPECTED] * 3
    stats = job.stats()
    assert stats.far_bytes > 24 << 20 and stats.near_peak_bytes < 48 << 20, stats
    assert len(others) == 16_004 and mapping[-1] == 0
    del far
    deadline_free(job)
    try:
        farfield.enable(near=NEAR)
        raise AssertionError("it was not refused")
    except farfield.ConflictError as error:
        assert "what='arrays'" in str(error), error
    # A program that is executed has the same filter, and its own memory stays near.
    code = "import numpy as np, farfield; j = farfield.enable(near='32M', what='arrays'); a = np.arange(3_000_000)\n"
    code += "with farfield.far(): b = np.arange(3_000_000)\n"
    code += "print(a.ctypes.data >> 44, b.ctypes.data >> 44, (a + b).sum())"
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    first, second, total = map(int, ended.stdout.split())
    assert first != 2 and second == 2 and total == 8999997000000, ended.stdout
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert sum(pool.map(part_sum, range(4))) == EXPECTED


def part_sum(part):
    with farfield.far():
        array = np.arange(part, COUNT, 4)
    assert is_far(array)
    return int(array.sum())


def deadline_free(job):
    """Far memory of an array that is gone is given back."""
    import time

    until = time.monotonic() + 20
    while job.stats().far_bytes > 1 << 20:
        assert time.monotonic() < until, job.stats()
        time.sleep(0.02)


def among_everything(_):
    """Where everything is far-capable, `near()` is what stays, small arrays too."""
    job = farfield.enable(near=NEAR)
    with farfield.near():
        near, smalls = np.arange(COUNT), [np.arange(SMALL) + number for number in range(1000)]
    ordinary = np.arange(COUNT)
    with farfield.far():
        far = np.arange(COUNT)
    assert is_far(ordinary) and is_far(far) and not is_far(near) and not any(map(is_far, smalls))
    for _ in range(2):
        assert int(ordinary.sum()) == int(far.sum()) == EXPECTED
    status = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    assert int(status["Rss"].split()[0]) << 10 > COUNT * 8, "a part of the near array is far"
    before = job.stats().pages_in
    assert int(near.sum()) == EXPECTED and sum(int(small[0]) for small in smalls) == 499500
    assert job.stats().pages_in - before < 256, "near arrays had to be brought"
    assert handler(ordinary) == "default_allocator"


def lives(_):
    """Arrays outlive their `with`, and are freed by others than those that made them."""
    job = farfield.enable(near=NEAR, what="arrays")
    with farfield.far():
        outside = np.arange(COUNT)
        with farfield.near():
            inner = np.arange(COUNT)
            with farfield.far():
                innermost = np.zeros(COUNT)
        again = np.ones(COUNT, np.uint8)
    after = np.ones(COUNT, np.uint8)
    assert [is_far(array) for array in (outside, inner, innermost, again, after)] == [True, False, True, True, False]
    try:
        with farfield.far():
            raise KeyError
    except KeyError:
        assert not is_far(np.ones(COUNT, np.uint8)), "an exception leaves the handler behind"

    # Views and copies: a view keeps the array, a copy is made where the copy is.
    view, copy = outside[::2], outside.copy()
    del outside
    gc.collect()
    assert is_far(view) and not is_far(copy) and int(view.sum()) == sum(range(0, COUNT, 2))
    del view, copy

    # Freed in another thread, and under the other handler.
    gone = [weakref.ref(innermost), weakref.ref(inner)]
    holder = [innermost, inner]
    del innermost, inner
    with farfield.near():
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
    assert [one() for one in gone] == [None, None]
    with farfield.near():
        del again
    deadline_free(job)

    # Many of all sizes around the bounds, made and freed by four threads.
    def churn(seed):
        random = np.random.default_rng(seed)
        kept = {}
        for turn in range(400):
            place = farfield.far() if turn % 3 else farfield.near()
            with place:
                size = int(random.choice([0, 1, 100, 65535, 65536, 65537, 200_000, 1 << 20, 3_000_000]))
                array = np.full(size, turn % 251, np.uint8)
            kept[int(random.integers(24))] = (array, turn % 251)
        for array, value in kept.values():
            assert (array == value).all()
        results.append(seed)

    results = []
    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2, 3]


def sizes(_):
    """Arrays that change their size, and whose size at the end is not that at the beginning."""
    farfield.enable(near=NEAR, what="arrays")
    for place in (farfield.far, farfield.near):
        with place():
            zeros = np.zeros(COUNT)
            assert not zeros.any()
            zeros.fill(7)
            del zeros
            assert not np.zeros(COUNT).any(), "memory that was used before"
            array = np.arange(SMALL)
            # Small, large, larger (far: moved), smaller, small again, none.
            for count in (9_000, 40_000, 4_000_000, COUNT, 20_000, 500, 0, 100):
                kept = min(count, array.size)
                array.resize(count, refcheck=False)
                assert (array[:kept] == np.arange(kept)).all() and not array[kept:].any(), count
                array[:] = np.arange(count)
            assert is_far(array) is False
            array.resize(COUNT, refcheck=False)
            assert is_far(array) is (place is farfield.far)
            assert (np.resize(np.arange(5), 3_000_000)[-5:] == [0, 1, 2, 3, 4]).all()
            # The item size changes below an array, so that the size at the end is another one.
            other = np.arange(1_000_000, dtype=np.int64)
            other.shape = (1000, 1000)
            other.dtype = np.int32
            del other
            assert np.empty((0, 5)).size == 0 and np.array(3.5).item() == 3.5
            # From an iterator, and from a text: NumPy grows them as they come.
            assert int(np.fromiter(range(300_000), np.int64).sum()) == 44999850000
            assert np.array(["x" * 1000] * 3000).nbytes == 12_000_000
            try:
                np.empty(1 << 60, np.uint8)
                raise AssertionError("there is no such memory")
            except MemoryError:
                pass
        # Freed and grown under another handler than that which made it.
        array.resize(2 * COUNT, refcheck=False)
        assert is_far(array) is (place is farfield.far) and array[COUNT:].any() == False


def travels(_):
    """Far arrays as buffers of the kernel: files, sockets, pickles, children."""
    farfield.enable(near=NEAR, what="arrays")
    with farfield.far():
        array = np.arange(COUNT)
        # NumPy leaves an array in the bytes that were unpickled. A copy of it is an array of its own.
        unpacked = [pickle.loads(pickle.dumps(array, protocol=protocol)).copy() for protocol in (2, 5)]
        buffers = []
        outer = pickle.dumps(array, protocol=5, buffer_callback=buffers.append)
        shared = pickle.loads(outer, buffers=buffers)
    assert all(is_far(one) and (one == array).all() for one in unpacked)
    assert shared.ctypes.data == array.ctypes.data
    del unpacked, shared, buffers
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "array.npy")
        np.save(path, array)
        ordinary = np.load(path)
        with farfield.far():
            loaded = np.load(path)
        assert not is_far(ordinary) and is_far(loaded) and (loaded == ordinary).all() and (loaded == array).all()
        del ordinary, loaded
        array.tofile(path)
        with farfield.far():
            raw = np.fromfile(path, np.int64)
        assert is_far(raw) and (raw == array).all()
        with open(path, "rb", buffering=0) as file:
            raw.fill(0)
            assert file.readinto(raw) == raw.nbytes and (raw == array).all()
    left, right = socket.socketpair()
    with farfield.far():
        received = np.empty(COUNT, np.int64)
    sender = threading.Thread(target=lambda: (left.sendall(array), left.close()))
    sender.start()
    view, at = memoryview(received).cast("B"), 0
    while at < len(view):
        at += right.recv_into(view[at:])
    sender.join()
    assert (received == array).all()
    del view, received
    pid = os.fork()
    if pid == 0:
        good = int(array.sum()) == EXPECTED
        array += 1
        with farfield.far():
            more = np.arange(COUNT)
        good = good and is_far(more) and int(array.sum()) == EXPECTED + COUNT and int(more.sum()) == EXPECTED
        del array, more
        os._exit(0 if good else 1)
    array[::2] += 5
    assert os.waitpid(pid, 0)[1] == 0
    assert int(array.sum()) == EXPECTED + 5 * COUNT // 2
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array)
    assert len(stream.getvalue()) > COUNT * 8


def many(_):
    """More arrays than the kernel has mappings for if each were one: here they are few, and so is the time."""
    farfield.enable(near="64M", what="arrays")

    def mappings():
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)

    before = mappings()
    with farfield.far():
        arrays = [np.full(1 << 20 if number % 2 else 100_000, number % 251, np.uint8) for number in range(200)]
        arrays += [np.empty(1 << 20, np.uint8) for _ in range(2800)]
    assert mappings() - before < 200, mappings() - before
    assert all((array == number % 251).all() for number, array in enumerate(arrays[:200]))
    del arrays[::2]
    with farfield.far():
        again = np.full(3 << 20, 5, np.uint8)
    assert (again == 5).all() and all((array == (2 * at + 1) % 251).all() for at, array in enumerate(arrays[:100]))


def contexts(_):
    """Who has the handler: contexts of Python, which new threads begin without, and tasks copy."""
    farfield.enable(near=NEAR, what="arrays")

    def make():
        return is_far(np.ones(COUNT, np.uint8))

    def in_thread(call):
        results = []
        thread = threading.Thread(target=lambda: results.append(call()))
        thread.start()
        thread.join()
        return results[0]

    with farfield.far():
        assert make() and not in_thread(make), "a new thread begins with NumPy's handler"
        assert in_thread(lambda context=contextvars.copy_context(): context.run(make))
    assert not make()

    async def task():
        await asyncio.sleep(0)
        return make()

    async def both():
        with farfield.far():
            inner = asyncio.create_task(task())
        outer = asyncio.create_task(task())
        assert await inner and not await outer

    asyncio.run(both())
    place = farfield.far()
    assert repr(place) == "farfield.far()" and repr(farfield.near()) == "farfield.near()"
    with place:
        with place:
            assert make()
        assert make()
    assert not make()


def refusals(_):
    """Without far memory, without NumPy, and with one that has no handlers."""
    refused(farfield.NotEnabledError, "enable()")
    with farfield.near():
        early = np.arange(COUNT)
    assert handler(early) == "farfield_near" and handler(np.arange(COUNT)) == "default_allocator"
    try:
        farfield.enable(near=NEAR, what="tables")
        raise AssertionError("it was not refused")
    except ValueError as error:
        assert "'arrays'" in str(error), error
    code = """
import sys, types
import farfield
def refused(word):
    for place in (farfield.near, farfield.far):
        try:
            with place():
                raise AssertionError("it was not refused")
        except farfield.NotSupportedError as error:
            assert word in str(error), error
sys.modules["numpy"] = None
refused("NumPy, which cannot be imported")
old = types.ModuleType("numpy")
old.__version__, old.__path__ = "1.21.6", []
sys.modules["numpy"] = old
sys.modules["numpy.core"] = sys.modules["numpy.core.multiarray"] = types.ModuleType("numpy.core.multiarray")
refused("1.21.6")
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    farfield.enable(near=NEAR)
    assert int(early.sum()) == EXPECTED and not is_far(early)
    early.resize(2 * COUNT, refcheck=False)
    assert not is_far(early) and int(early.sum()) == EXPECTED


def ends(_):
    """Arrays that are still there when the interpreter ends, in modules that are torn down last."""
    farfield.enable(near=NEAR, what="arrays")
    with farfield.far():
        sys.modules["os"].kept = np.arange(COUNT)
    with farfield.near():
        builtins = sys.modules["builtins"]
        builtins.kept = [np.arange(COUNT), np.arange(SMALL)]


def inside(_):
    """Under `farfield run`: the library is the one that is loaded already."""
    with farfield.near():
        near = np.arange(COUNT)
    with farfield.far():
        far = np.arange(COUNT)
    assert is_far(far) and not is_far(near) and int(near.sum()) == int(far.sum()) == EXPECTED
    assert farfield.current_job().near == 40 << 20


def inside_arrays(_):
    """Under `farfield run --what arrays`: nothing but placed arrays is far, and no word of `enable()` is needed."""
    ordinary = np.arange(COUNT)
    others = [bytes(range(256)) * 16 for _ in range(16_000)]
    job = farfield.current_job()
    stats = job.stats()
    assert not is_far(ordinary) and stats.far_peak_bytes == 0 and stats.near_bytes < 8 << 20, stats
    inside(_)
    assert job.stats().far_peak_bytes > 0 and len(others) == 16_000 and int(ordinary.sum()) == EXPECTED
    code = "import numpy as np, farfield; a = np.arange(3_000_000)\n"
    code += "with farfield.far(): b = np.arange(3_000_000)\n"
    code += "print(a.ctypes.data >> 44, b.ctypes.data >> 44)"
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    first, second = ended.stdout.split()
    assert first != "2" and second == "2", ended.stdout


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else None)
    print("ok", flush=True)
