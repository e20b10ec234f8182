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


def jupyter(*words, **environment):
    """Runs `farfield jupyter`: its exit code, and what it says."""
    command = [sys.executable, "-m", "farfield", "jupyter", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    return done.returncode, done.stdout + done.stderr


def with_kernels():
    """Kernels are written, listed and removed where Jupyter is not installed, too."""
    with tempfile.TemporaryDirectory() as folder:
        of_user, prefix = os.path.join(folder, "user"), os.path.join(folder, "prefix")
        os.environ["JUPYTER_DATA_DIR"], os.environ["JUPYTER_PATH"] = of_user, os.path.join(prefix, "share", "jupyter")
        for _ in range(2):
            assert jupyter("install", "--near", "64M", "--far", "mirror(tcp://a:7400,tcp://b:7400)")[0] == 0
        spec = json.loads(Path(of_user, "kernels", "farfield", "kernel.json").read_text())
        assert spec["interrupt_mode"] == "message" and spec["argv"][0] == sys.executable, spec
        assert "--near=64M" in spec["argv"] and "{connection_file}" in spec["argv"], spec
        big = ["--name", "big", "--display-name", "Big", "--near=25%", "--what=arrays"]
        assert jupyter("install", "--prefix", prefix, *big)[0] == 0
        assert Path(prefix, "share", "jupyter", "kernels", "big", "kernel.json").is_file()
        other = Path(of_user, "kernels", "other", "kernel.json")
        other.parent.mkdir()
        other.write_text("{}")
        code, text = jupyter("list")
        lines = text.splitlines()
        assert code == 0 and len(lines) == 2 and "other" not in text, text
        assert lines[0].startswith("big\tBig\t--near=25% --what=arrays\t") and "--far=mirror(tcp://a:7400,tcp://b:7400)" in lines[1], text
        for words in (["install", "--name", "other"], ["remove", "other"], ["remove", "big", "--user"]):
            code, text = jupyter(*words)
            assert code == 1 and ("is another kernel" in text or "there is no kernel" in text), text
        assert other.read_text() == "{}" and jupyter("install", "--name", "a b")[0] == 1
        assert jupyter("remove", "big")[0] == 0 and jupyter("remove", "farfield", "--user")[0] == 0
        assert jupyter("list") == (0, "") and other.is_file()
        # Nothing is a folder below a file.
        code, text = jupyter("install", JUPYTER_DATA_DIR=str(other))
        assert code == 1 and "cannot be written" in text and "--prefix" in text, text
        # A user without a home.
        homeless = "import os, pwd, sys; del os.environ['HOME']; pwd.getpwuid = lambda _: {}[0]; sys.argv[1:] = ['jupyter', 'install']; "
        homeless += "import farfield.__main__ as program; program.main()"
        environment = {**os.environ, "JUPYTER_DATA_DIR": "", "XDG_DATA_HOME": "", "HOME": "/"}
        done = subprocess.run([sys.executable, "-c", homeless], capture_output=True, text=True, env=environment)
        assert done.returncode == 1 and "no home" in done.stderr and "JUPYTER_DATA_DIR" in done.stderr, done.stderr


def with_jupyter():
    import ipykernel

    del ipykernel
    from jupyter_client.manager import start_new_kernel

    with tempfile.TemporaryDirectory() as folder:
        os.environ["JUPYTER_DATA_DIR"] = folder
        server, url = start_server(folder)
        specs = {"farfield": [], "served": [f"--far={url}"], "idle": [f"--far={url}"], "refused": ["--far=unix:/nothing/there"]}
        for name, words in specs.items():
            assert jupyter("install", "--near", "64M", "--name", name, *words)[0] == 0
        for name in specs:
            manager, client = start_new_kernel(kernel_name=name, startup_timeout=60)
            try:
                notebook = Notebook(manager, client)
                if name == "farfield":
                    shows_a_line(notebook)
                elif name == "served":
                    server = loses_its_server(notebook, server, folder)
                elif name == "idle":
                    server = loses_its_server_between_cells(notebook, server, folder)
                else:
                    says_why_it_cannot_start(notebook)
            finally:
                client.stop_channels()
                manager.shutdown_kernel(now=True)
        server.kill()
        server.wait()


def start_server(folder):
    url = "unix:" + os.path.join(folder, "server")
    server = subprocess.Popen(
        [farfield.command(), "serve", "--listen", url, "--capacity", "512M"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert url.encode() in server.stdout.readline()
    return server, url


class Notebook:
    """Runs cells, and gives what a user sees: outputs and states."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client

    def seen_until(self, is_enough, request=None):
        seen, until = [], time.monotonic() + 60
        while not is_enough(seen):
            assert time.monotonic() < until, seen
            message = self.client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            is_answer = request is not None and message["parent_header"].get("msg_id") == request
            if kind == "update_display_data" or is_answer and kind in ("display_data", "execute_result"):
                seen.append((kind, content["data"]["text/plain"]))
            elif is_answer and kind in ("stream", "error"):
                seen.append((kind, content.get("text") or f"{content['ename']}: {content['evalue']}"))
            elif is_answer and kind == "status":
                seen.append((kind, content["execution_state"]))
        return seen

    def run(self, code):
        return self.seen_until(lambda seen: ("status", "idle") in seen, self.client.execute(code))


FILL = f"import numpy as np; a = np.arange({COUNT}); print(a.sum())"


def shows_a_line(notebook):
    lines = [text for kind, text in notebook.run("%load_ext farfield") if kind == "display_data"]
    assert len(lines) == 1 and lines[0].startswith("farfield: near ") and "far 0 B, 0 faults" in lines[0], lines
    assert ("stream", f"{EXPECTED}\n") in notebook.run(FILL)
    # The line changes without a cell that runs.
    notebook.seen_until(lambda seen: any(kind == "update_display_data" and "far 0 B" not in text for kind, text in seen))
    request = notebook.client.execute("print('begun')\nwhile True: pass")
    notebook.seen_until(lambda seen: ("stream", "begun\n") in seen, request)
    notebook.manager.interrupt_kernel()
    ended = notebook.seen_until(lambda seen: ("status", "idle") in seen, request)
    assert any(kind == "error" and text.startswith("KeyboardInterrupt") for kind, text in ended), ended
    assert ("stream", f"{EXPECTED}\n") in notebook.run("print(a.sum())")


class Gate:
    """What a cell waits for. It opens whether or not the kernel lives."""

    def __init__(self, path):
        os.mkfifo(path)
        self.wait, self.file = f"open({path!r}).readline()", os.open(path, os.O_RDWR)

    def open(self):
        os.write(self.file, b"go\n")


def end(server):
    server.kill()
    server.wait()


def loses_its_server(notebook, server, folder):
    """The cell that needs what is lost says so, and each one after it until the kernel is restarted."""
    go = Gate(os.path.join(folder, "go"))
    assert ("stream", f"{EXPECTED}\n") in notebook.run(FILL)
    request = notebook.client.execute(f"print('begun')\n{go.wait}\nprint(a.sum())")
    notebook.seen_until(lambda seen: ("stream", "begun\n") in seen, request)
    end(server)
    go.open()
    seen = notebook.seen_until(lambda seen: ("status", "idle") in seen, request)
    reasons = [text for kind, text in seen if kind == "error"]
    assert len(reasons) == 1 and reasons[0].startswith("FarMemoryLost: ") and "mirror(" in reasons[0], seen
    until = time.monotonic() + 60
    while (reply := notebook.client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != request:
        assert time.monotonic() < until
    assert reply["content"]["status"] == "error" and reply["content"]["ename"] == "FarMemoryLost", reply
    seen = notebook.run("1")
    assert any(kind == "error" and "mirror(" in text and "restart the kernel" in text for kind, text in seen), seen
    assert notebook.manager.is_alive()
    server, _ = start_server(folder)
    notebook.manager.restart_kernel(now=True)
    notebook.client.wait_for_ready(timeout=60)
    assert ("stream", f"{EXPECTED}\n") in notebook.run(FILL)
    return server


def loses_its_server_between_cells(notebook, server, folder):
    """Jupyter sees that the kernel is dead, and the next one says why."""
    go = Gate(os.path.join(folder, "go between"))
    code = f"import threading\nthreading.Thread(target=lambda: ({go.wait}, a.sum())).start()"
    assert ("stream", f"{EXPECTED}\n") in notebook.run(f"{FILL}\n{code}")
    end(server)
    go.open()
    until = time.monotonic() + 60
    while notebook.manager.is_alive():
        assert time.monotonic() < until
        time.sleep(0.1)
    server, _ = start_server(folder)
    notebook.manager.restart_kernel(now=True)
    notebook.client.wait_for_ready(timeout=60)
    seen = notebook.run("print(1)")
    assert any(kind == "stream" and "the kernel before this one ended" in text and "mirror(" in text for kind, text in seen), seen
    assert not any("kernel before" in str(text) for _, text in notebook.run("print(2)"))
    return server


def says_why_it_cannot_start(notebook):
    seen = notebook.run("1")
    assert any(kind == "error" and "/nothing/there" in text for kind, text in seen), seen


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
