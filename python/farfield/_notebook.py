"""A line about far memory in a notebook, which lives: `%load_ext farfield`."""

from __future__ import annotations

import threading
from typing import Any, Optional

from ._errors import FarfieldError
from ._job import current_job, _text

#: Seconds between two looks. Each takes a hundredth of a second of a processor.
_LOOK_EVERY = 2.0

_line: "Optional[_Line]" = None


class _Line:
    """A displayed line that a thread keeps up to date, where a displayed line can be changed."""

    def __init__(self, is_changeable: bool) -> None:
        from IPython import display

        show: Any = display.display
        self._text = _status()
        self._handle: Any = show({"text/plain": self._text}, raw=True, display_id=True)
        self._ended = threading.Event()
        if is_changeable:
            threading.Thread(target=self._follow, name="farfield-line", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _follow(self) -> None:
        while not self._ended.wait(_LOOK_EVERY):
            text = _status()
            if text != self._text:
                self._text = text
                self._handle.update({"text/plain": text}, raw=True)


def _status() -> str:
    job = current_job()
    if job is None:
        return "farfield: far memory is off: call farfield.enable()"
    try:
        stats = job.stats()
    except FarfieldError as error:
        return f"farfield: {error}"
    near, limit, far = map(_text, (stats.near_bytes, stats.near_limit_bytes, stats.far_bytes))
    return f"farfield: near {near} of {limit}, far {far}, {stats.faults:,} faults"


def _show(_words: str = "") -> None:
    """Shows a line about far memory here, and keeps it up to date until the next one is shown.

    On a terminal, which would print each change below, the line stays as it is.
    """
    global _line
    from IPython import get_ipython

    get_shell: Any = get_ipython
    _end()
    _line = _Line(is_changeable=hasattr(get_shell(), "kernel"))


def _end() -> None:
    if _line is not None:
        _line.end()


def load_ipython_extension(shell: Any) -> None:
    """Shows the line, and makes `%farfield` show it again."""
    shell.register_magic_function(_show, magic_kind="line", magic_name="farfield")
    _show()


def unload_ipython_extension(_shell: Any) -> None:
    """Leaves the line as it is."""
    _end()
