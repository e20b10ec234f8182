"""A kernel of Jupyter that has far memory, and that tells the notebook why it ended.

Jupyter starts the supervisor, `python -m farfield._kernel OPTIONS -- -f FILE`. It starts `farfield run OPTIONS`, which
starts the kernel proper. If far memory ends the kernel in a cell, the supervisor answers that cell with an error. It
then stands in for the kernel: each further cell is answered with an error, until the user restarts. If far memory ends
the kernel between cells, a request may be lost with it, so Jupyter has to see that it is dead: the supervisor ends, and
the kernel that Jupyter starts in its place says in its first cell what happened.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

#: The file in which the kernel notes the cell that it runs.
_CELL = "FARFIELD_KERNEL_CELL"
#: What the kernel says in its first cell.
_BEFORE = "FARFIELD_KERNEL_BEFORE"
_INSIDE = "--inside"
#: Exit codes of `farfield run` that are not the kernel's.
_ENDED_BY_FAR_MEMORY = range(93, 98)
_SERVER_LOST, _REFUSED = 93, 97
#: How long the last words of the kernel may take, and how many of them are kept.
_WORDS_WITHIN = 2.0
_WORDS_MAX = 64 << 10


class _Words:
    """Copies what a process says on its standard error to ours, and keeps the end of it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stderr is not None
        self._source = process.stderr.fileno()
        self._end = b""
        self._thread = threading.Thread(target=self._copy, name="farfield-words", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while part := os.read(self._source, 1 << 16):
            self._end = (self._end + part)[-_WORDS_MAX:]
            try:
                os.write(2, part)
            except OSError:
                pass  # Nobody reads our log.

    def of_farfield(self) -> str:
        """Returns the lines of `farfield run`, once all have come. A child of the kernel may hold the pipe open."""
        self._thread.join(_WORDS_WITHIN)
        lines = self._end.decode("utf-8", "replace").splitlines()
        ours = [line.removeprefix("farfield: ") for line in lines if line.startswith("farfield: ")]
        return "\n".join(ours[-10:]) or "far memory was lost"


def _supervise(options: "list[str]", kernel: "list[str]") -> int:
    """Runs the kernel, and answers in its place if far memory ends it. Returns the exit code of the kernel."""
    import tempfile

    file = kernel[kernel.index("-f") + 1]
    before = _Note(file).taken()
    with tempfile.NamedTemporaryFile(prefix="farfield-cell-") as cell:
        process = _start(options, kernel, cell.name, before)
        words = _Words(process)
        code = process.wait()
        if code not in _ENDED_BY_FAR_MEMORY:
            return code if code >= 0 else 128 - code
        reason = words.of_farfield()
        if code == _SERVER_LOST:
            reason += "\nA kernel that is installed with --far 'mirror(URL,URL)' goes on when one of its servers dies."
        try:
            running = json.loads(cell.read() or b"null")
        except ValueError:
            running = None  # It was being written.
    from ._stand_in import stand_in

    if code == _REFUSED:
        reason = f"{before}\n{reason}" if before else reason
        stand_in(file, None, reason, "Start the server or install the kernel with other options, and restart it.")
    elif running is None or not stand_in(file, running, reason, "What it had computed is lost: restart the kernel."):
        _Note(file).leave(f"the kernel before this one ended: {reason}")
    return code


class _Note:
    """What a kernel leaves to the one that Jupyter starts in its place, beside the file of their connection."""

    def __init__(self, connection_file: str) -> None:
        self._path = connection_file + ".farfield"

    def leave(self, text: str) -> None:
        try:
            with open(self._path, "w") as file:
                file.write(text)
        except OSError as error:
            print(f"farfield: {self._path}: {error.strerror}", file=sys.stderr)

    def taken(self) -> str:
        """Returns the text, once; "" if there is none."""
        try:
            with open(self._path) as file:
                text = file.read()
            os.unlink(self._path)
            return text
        except OSError:
            return ""


def _start(options: "list[str]", kernel: "list[str]", cell: str, before: str) -> "subprocess.Popen[bytes]":
    import ctypes
    import signal
    import subprocess

    from ._programs import command

    libc, supervisor = ctypes.CDLL(None), os.getpid()

    def end_with_us() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != supervisor:
            os._exit(1)

    program = [sys.executable, "-m", "farfield._kernel", _INSIDE, *kernel]
    process = subprocess.Popen(
        ["farfield", "run", "--quiet", *options, "--", *program],
        executable=command(),
        stderr=subprocess.PIPE,
        env={**os.environ, _CELL: cell, _BEFORE: before},
        preexec_fn=end_with_us,
    )
    def pass_on(number: int, _frame: Any) -> None:
        if process.returncode is not None:
            sys.exit(128 + number)
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    # Jupyter interrupts the kernel by a message.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    return process


def _run_kernel(kernel: "list[str]") -> None:
    """Runs the kernel proper, which notes the cell that it runs."""
    cell, before = os.environ.pop(_CELL), os.environ.pop(_BEFORE)
    # The kernel ends when this one does.
    os.environ["JPY_PARENT_PID"] = str(os.getppid())
    from ipykernel.kernelapp import IPKernelApp

    app: Any = IPKernelApp.instance()
    app.initialize(kernel)
    file = os.open(cell, os.O_WRONLY | os.O_CLOEXEC)

    def begins(_info: Any) -> None:
        nonlocal before
        if before:
            print(f"farfield: {before}", file=sys.stderr)
            before = ""
        message = app.kernel.get_parent("shell")
        ident = getattr(app.kernel, "_parent_ident", {}).get("shell") or []
        ident = [ident] if isinstance(ident, bytes) else ident
        running = {
            "parent": {"header": message.get("header", {})},
            "ident": [one.hex() for one in ident],
            "count": app.shell.execution_count,
        }
        os.pwrite(file, json.dumps(running, default=lambda date: date.isoformat()).encode(), 0)

    def ends(_result: Any) -> None:
        os.ftruncate(file, 0)

    app.shell.events.register("pre_run_cell", begins)
    app.shell.events.register("post_run_cell", ends)
    app.start()


def main() -> None:
    """Runs the supervisor, or the kernel proper."""
    # A module of the notebook's folder must not stand before one of the kernel, which adds the folder later.
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    words = sys.argv[1:]
    if words[:1] == [_INSIDE]:
        return _run_kernel(words[1:])
    middle = words.index("--")
    sys.exit(_supervise(words[:middle], words[middle + 1 :]))


if __name__ == "__main__":
    main()
