"""Far memory in this process: how it is switched on, and what it does."""

from __future__ import annotations

import os
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Sequence, Union

from . import _programs
from ._errors import (
    BudgetError,
    ConflictError,
    FarfieldError,
    FarfieldWarning,
    JobEndedError,
    NotSupportedError,
    ServerError,
)

if TYPE_CHECKING:
    # Imported where they are used: `import farfield` is to take no time.
    import ctypes
    import subprocess
    from typing import Literal

#: A number of bytes, or a text: "512M", "1.5G", "25%".
Size = Union[int, str]

_CONTROL = "FARFIELD_CONTROL"
_MESSAGE_BYTES = 1024
#: What may be far unless something else is asked for.
_EVERYTHING = "everything"
#: How long the keeper may take until far memory is ready: it opens every server, each within 10 s.
_READY_WITHIN = 60.0


class Stats(NamedTuple):
    """What a job has, in bytes, and what it has done."""

    near_bytes: int
    near_limit_bytes: int
    near_peak_bytes: int
    far_bytes: int
    far_peak_bytes: int
    faults: int
    pages_in: int
    pages_out: int


class Job:
    """A job with far memory: this process, and the processes that it starts."""

    def __init__(self, runner: int, control: str, asked: "Optional[_Arguments]") -> None:
        self._runner = runner
        self._control = control
        self._asked = asked

    @property
    def pid(self) -> int:
        """The process that keeps the job, for `farfield top` and `farfield pool`."""
        return self._runner

    @property
    def near(self) -> int:
        """The near budget in bytes.

        It may be set to a size: `job.near = "6G"`. That does not wait until the budget holds, so for
        some tens of milliseconds, or as long as pages take to leave, the old one is read.
        """
        return int(self._ask("near", "--json", str(self._runner))["near_limit_bytes"])

    @near.setter
    def near(self, size: Size) -> None:
        self._tell(BudgetError, "near", "--no-wait", str(self._runner), _size(size))

    def stats(self) -> Stats:
        """Returns what the job has now, and what it has done so far."""
        answer = self._ask("top", "--once", "--json", str(self._runner))
        jobs = answer.get("jobs") or []
        if not jobs:
            raise JobEndedError(self._ended())
        job = jobs[0]
        counters = job["counters"]
        return Stats(
            near_bytes=int(job["near_bytes"]),
            near_limit_bytes=int(job["near_limit_bytes"]),
            near_peak_bytes=int(job["near_peak_bytes"]),
            far_bytes=int(job["far_bytes"]),
            far_peak_bytes=int(job["far_peak_bytes"]),
            faults=int(counters["faults"]),
            pages_in=int(counters["pages_in"]),
            pages_out=int(counters["pages_out"]),
        )

    def pool(self, url: str) -> None:
        """Moves far memory of the job to the pool at `url`. Returns when all of it is there."""
        self._tell(ServerError, "pool", "switch", str(self._runner), url)

    def __repr__(self) -> str:
        try:
            stats = self.stats()
        except FarfieldError:
            return f"<farfield.Job {self._runner}: its keeper is gone>"
        near, limit, far = map(_text, (stats.near_bytes, stats.near_limit_bytes, stats.far_bytes))
        return f"<farfield.Job {self._runner}: near {near} of {limit}, far {far}>"

    def _ask(self, *words: str) -> "dict[str, Any]":
        import json

        done = _programs.run(*words)
        if done.returncode != 0:
            raise self._error(FarfieldError, done)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def _tell(self, kind: "type[FarfieldError]", *words: str) -> None:
        done = _programs.run(*words)
        if done.returncode != 0:
            raise self._error(kind, done)

    def _error(self, kind: "type[FarfieldError]", done: "subprocess.CompletedProcess[str]") -> FarfieldError:
        if not os.path.exists(self._control):
            return JobEndedError(self._ended())
        return kind(_said(done.stderr))

    def _ended(self) -> str:
        return (
            f"the keeper of this job (process {self._runner}) is gone: memory stays as it is, and nobody can change "
            "the budget or the pool any more"
        )


class _Arguments(NamedTuple):
    near: Optional[str]
    far: "tuple[str, ...]"
    slo: Optional[float]
    what: str

    def __str__(self) -> str:
        words = [f"near={self.near!r}" if self.near else "", f"far={list(self.far)!r}" if self.far else ""]
        words.append(f"slo={self.slo!r}" if self.slo is not None else "")
        words.append(f"what={self.what!r}" if self.what != _EVERYTHING else "")
        return f"enable({', '.join(word for word in words if word)})"


_lock = threading.Lock()
_job: Optional[Job] = None


def enable(
    *,
    near: Optional[Size] = None,
    far: "Union[str, Sequence[str], None]" = None,
    slo: Optional[float] = None,
    token_file: "Union[str, os.PathLike[str], None]" = None,
    what: "Literal['everything', 'arrays']" = "everything",
) -> Job:
    """Switches far memory on in this process and in those that it starts.

    `near` is the memory that they may use together on this machine: bytes, "4G", or "25%" of it
    (default: half). `far` is the URL of a pool, or several: "tcp://big:7400",
    "mirror(tcp://a:7400,tcp://b:7400)", "ssd:/var/tmp?size=64G"; without it, a private server on
    this machine is started. With `slo`, the job gets as little near memory as keeps it at most that
    many times slower than with all memory near. `token_file` is a file whose first line is the
    token of the servers (default: the variable FARFIELD_TOKEN).

    With `what="arrays"`, nothing is far but arrays of NumPy that are made inside of `with far():`, and
    `near` limits only their memory: everything else stays as it was, at the same speed.

    Called again with the same arguments it does nothing. It blocks until far memory is ready, some
    tens of milliseconds, and lets other threads run meanwhile. It raises ConflictError,
    NotSupportedError, ServerError or BudgetError; then nothing was changed.
    """
    global _job
    asked = _arguments(near, far, slo, what)
    with _lock:
        if _job is None:
            _job = _surrounding(asked) or _start(asked, token_file)
        elif _job._asked is not None and _job._asked != asked:
            raise ConflictError(
                f"far memory is on already, by {_job._asked}: use job.near and job.pool() to change it, or restart "
                "the interpreter"
            )
        return _job


def current_job() -> Optional[Job]:
    """Returns the job of this process: from `enable()`, from its parent, or from `farfield run`.

    None if far memory is off.
    """
    with _lock:
        return _job or _inherited()


def doctor() -> bool:
    """Prints what works on this machine and what does not. Returns whether far memory does."""
    done = _programs.run("doctor")
    print(done.stdout, end="")
    return done.returncode == 0


def _arguments(
    near: Optional[Size], far: "Union[str, Sequence[str], None]", slo: Optional[float], what: str
) -> _Arguments:
    urls = (far,) if isinstance(far, str) else tuple(far or ())
    if not all(isinstance(url, str) and url and "\0" not in url for url in urls):
        raise TypeError('far must be a URL, or a list of URLs: far="tcp://big:7400"')
    if slo is not None and (isinstance(slo, bool) or not isinstance(slo, (int, float))):
        raise TypeError("slo must be a number: 1.4 is 1.4 times the run time with all memory near")
    if what not in (_EVERYTHING, "arrays"):
        raise ValueError(f"what={what!r} is neither 'everything' nor 'arrays'")
    return _Arguments(None if near is None else _size(near), urls, None if slo is None else float(slo), what)


def _size(size: Size) -> str:
    if isinstance(size, int) and not isinstance(size, bool):
        if size <= 0:
            raise BudgetError(f"near={size} is no size: give bytes, or a text like '4G' or '25%'")
        return f"{size}B"
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT]?|[KMGT]I?B|B|%)\s*", size.upper())
        if match and match[2] and float(match[1]) > 0 and (match[2] != "%" or float(match[1]) <= 100):
            return match[1] + match[2]
        raise BudgetError(f"near={size!r} is no size: give bytes, or a text like '4G' or '25%'")
    raise TypeError("near must be a number of bytes, or a text like '4G' or '25%'")


def _surrounding(asked: _Arguments) -> Optional[Job]:
    """Returns the job that this process was started in, if any, and warns if it was not asked for."""
    job = _inherited()
    if job is None:
        return None
    # A child of a process that called `enable()` runs the same lines: it is no surprise there.
    if os.environ.get("FARFIELD_ENABLED") != str(asked):
        import warnings

        warnings.warn(
            f"this process belongs to a job already: {job!r}; {asked} changes nothing. Use job.near and job.pool()",
            FarfieldWarning,
            stacklevel=3,
        )
    return job


def is_inherited() -> bool:
    """Returns whether this process was started in a job."""
    return _inherited() is not None


def _inherited() -> Optional[Job]:
    match = re.fullmatch(r"/proc/([0-9]+)/fd/[0-9]+", os.environ.get(_CONTROL, ""))
    return None if match is None else Job(int(match[1]), match[0], None)


def _start(asked: _Arguments, token_file: "Union[str, os.PathLike[str], None]") -> Job:
    import ctypes

    library, path = open_library()
    words = [_programs.command(), "keep", "--background", "--quiet", "--for", str(os.getpid())]
    if asked.near is not None:
        words += ["--near", asked.near]
    for url in asked.far:
        words += ["--far", url]
    if asked.slo is not None:
        words += ["--slo", str(asked.slo)]
    if token_file is not None:
        words += ["--token-file", os.fspath(token_file)]
    if asked.what != _EVERYTHING:
        words += ["--what", asked.what]
    ready = _keeper(words)
    keeper = int(ready["pid"])
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    try:
        failed = library.farfield_start(os.fsencode(ready["control"]), os.fsencode(path), message, _MESSAGE_BYTES)
    except BaseException:
        _stop(keeper)
        raise
    if failed:
        _stop(keeper)
        raise NotSupportedError(message.value.decode("utf-8", "replace"))
    os.environ["FARFIELD_ENABLED"] = str(asked)
    return Job(keeper, str(ready["control"]), asked)


def open_library() -> "tuple[ctypes.CDLL, str]":
    """Loads the library that serves far memory, and returns it with its path."""
    import ctypes

    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise NotSupportedError("far memory works on Linux on 64-bit x86")
    path = _programs.library()
    if any(separator in path for separator in " :"):
        raise NotSupportedError(
            f"{path}: the path has a space or a colon in it, so the loader could not find the library for the "
            "programs that you start: install the package elsewhere"
        )
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise NotSupportedError(
            f"the library of far memory cannot be loaded into this Python ({error}): it needs a dynamically linked "
            "Python with glibc (no Alpine, no static build)"
        ) from None
    library.farfield_start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    library.farfield_start.restype = ctypes.c_int
    return library, path


def _keeper(words: "list[str]") -> "dict[str, Any]":
    """Starts the keeper in the background, and returns what it says when it is ready."""
    import json
    import select
    import subprocess

    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        # A keeper that is left behind, because of ^C, ends by itself: no process joins it.
        if not select.select([process.stdout], [], [], _READY_WITHIN)[0]:
            raise ServerError(f"far memory was not ready within {_READY_WITHIN:.0f} s: is the server there?")
        line = process.stdout.readline()
        process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        process.stdout.close()
    try:
        ready: dict[str, Any] = json.loads(line)
    except ValueError:
        raise FarfieldError(f"farfield keep ended with code {process.returncode}: see its message above") from None
    if "error" in ready:
        text = str(ready["error"])
        raise _kind(text)(text)
    return ready


def _kind(text: str) -> "type[FarfieldError]":
    if text.startswith("--near"):
        return BudgetError
    if text.startswith(("--far", "far memory cannot be used", "the private memory server")):
        return ServerError
    return NotSupportedError


def _stop(keeper: int) -> None:
    import signal

    try:
        os.kill(keeper, signal.SIGTERM)
    except OSError:
        pass


def _said(text: str) -> str:
    lines = [line.removeprefix("farfield: ") for line in text.splitlines() if line.strip()]
    return "\n".join(lines) or "the command farfield failed and said nothing"


def _text(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
