"""The programs that the package carries."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ._errors import FarfieldError

if TYPE_CHECKING:
    import subprocess

_BIN = os.path.join(os.path.dirname(os.path.realpath(__file__)), "bin")


def command() -> str:
    """Returns the path of the command `farfield` that belongs to this package."""
    return _program("farfield")


def library() -> str:
    """Returns the path of the library that serves far memory inside a process."""
    return _program("libfarfield_preload.so")


def _program(name: str) -> str:
    path = os.path.join(_BIN, name)
    if not os.path.isfile(path):
        raise FarfieldError(f"{path} is missing: install the package again")
    return path


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command with these words, and returns what it printed. ^C ends it."""
    import subprocess

    environment = {name: value for name, value in os.environ.items() if name != "FARFIELD_PRELOAD"}
    return subprocess.run(
        [command(), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
        check=False,
    )
