"""The recipes of docs/guide/python.md: `recipes.py NAME`. Prints "ok" if all is right, and "absent MODULE" without that module."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import farfield

NEAR = "32M"
COUNT = 8_000_000  # 64 MB
EXPECTED = COUNT * (COUNT - 1) // 2


def part_sum(part):
    return int(np.arange(part, COUNT, 4, dtype=np.int64).sum())


def far_bytes():
    return farfield.current_job().stats().far_peak_bytes


def with_multiprocessing():
    farfield.enable(near=NEAR)
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert sum(pool.map(part_sum, range(4))) == EXPECTED, method
    assert far_bytes() > 0


def with_joblib():
    from joblib import Parallel, delayed

    farfield.enable(near=NEAR)
    array = np.arange(COUNT, dtype=np.int64)
    for backend in ("loky", "threading"):
        assert sum(Parallel(n_jobs=2, backend=backend)(delayed(part_sum)(part) for part in range(4))) == EXPECTED
        # Large arguments travel by files that workers map.
        assert sum(Parallel(n_jobs=2, backend=backend)(delayed(np.sum)(array[part::4]) for part in range(4))) == EXPECTED
    assert far_bytes() > 0


CONFTEST = f"""
import farfield

def pytest_configure():
    farfield.enable(near="{NEAR}")

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(repr(farfield.current_job()))
"""

TEST = f"""
import numpy as np

def test_sum():
    assert np.arange({COUNT}, dtype=np.int64).sum() == {EXPECTED}
"""


def with_pytest():
    import pytest

    del pytest
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "conftest.py").write_text(CONFTEST)
        Path(folder, "test_far.py").write_text(TEST)
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", folder], capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout and "<farfield.Job" in done.stdout, done.stdout


def with_jupyter():
    import ipykernel

    del ipykernel
    from jupyter_client.manager import start_new_kernel

    with tempfile.TemporaryDirectory() as folder:
        os.environ["JUPYTER_DATA_DIR"] = folder
        install = [sys.executable, "-m", "farfield", "jupyter", "install", "--near", "64M"]
        for _ in range(2):
            assert subprocess.run(install).returncode == 0
        spec = Path(folder, "kernels", "farfield", "kernel.json")
        assert json.loads(spec.read_text())["interrupt_mode"] == "message"
        other = Path(folder, "kernels", "other", "kernel.json")
        other.parent.mkdir()
        other.write_text("{}")
        refused = subprocess.run([*install, "--name", "other"], capture_output=True, text=True)
        assert refused.returncode == 1 and "is another kernel" in refused.stderr and other.read_text() == "{}"
        manager, client = start_new_kernel(kernel_name="farfield", startup_timeout=60)
        try:
            notebook(manager, client)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def notebook(manager, client):
    def said_until(is_enough, request=None):
        said, until = [], time.monotonic() + 60
        while not is_enough(said):
            assert time.monotonic() < until, said
            message = client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            is_answer = request is not None and message["parent_header"].get("msg_id") == request
            if kind == "update_display_data" or is_answer and kind in ("display_data", "execute_result"):
                said.append((kind, content["data"]["text/plain"]))
            elif is_answer and kind in ("stream", "error"):
                said.append((kind, content.get("text") or content["ename"]))
            elif is_answer and kind == "status":
                said.append((kind, content["execution_state"]))
        return said

    def run(code):
        return said_until(lambda said: ("status", "idle") in said, client.execute(code))

    lines = [text for kind, text in run("%load_ext farfield") if kind == "display_data"]
    assert len(lines) == 1 and lines[0].startswith("<farfield.Job") and lines[0].endswith("far 0 B>"), lines
    assert ("stream", f"{EXPECTED}\n") in run(f"import numpy as np; a = np.arange({COUNT}); print(a.sum())")
    # The line changes without a cell that runs.
    said_until(lambda said: any(kind == "update_display_data" and "far 0 B" not in text for kind, text in said))
    request = client.execute("print('begun')\nwhile True: pass")
    said_until(lambda said: ("stream", "begun\n") in said, request)
    manager.interrupt_kernel()
    assert ("error", "KeyboardInterrupt") in said_until(lambda said: ("status", "idle") in said, request)
    assert ("stream", f"{EXPECTED}\n") in run("print(a.sum())")


def with_dask():
    import dask
    import dask.array
    from dask.distributed import Client, LocalCluster

    dask.config.set({"distributed.worker.preload": ["farfield.dask"]})
    limit = 400_000_000
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=limit, dashboard_address=None)
    with cluster, Client(cluster) as client:
        # Twice what the workers may have.
        array = dask.array.arange(2 * 2 * limit // 8, chunks=4_000_000, dtype=np.int64).persist()
        count = array.size
        assert int(array.sum().compute()) == count * (count - 1) // 2
        far = client.run(far_bytes)
        assert len(far) == 2 and min(far.values()) > limit // 4, far


def with_ray():
    import ray

    command = f"{sys.executable} -m farfield run --quiet --near {NEAR} -- {sys.executable}"
    environment = {"py_executable": command, "env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, runtime_env=environment)
    try:

        @ray.remote
        def work():
            return int(np.arange(COUNT, dtype=np.int64).sum()), farfield.current_job().stats().far_peak_bytes

        for found, far in ray.get([work.remote() for _ in range(2)], timeout=120):
            assert found == EXPECTED and far > 0, (found, far)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    try:
        globals()["with_" + sys.argv[1]]()
        print("ok")
    except ModuleNotFoundError as error:
        print("absent", error.name)
