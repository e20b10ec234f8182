"""Kernels of Jupyter that have far memory: `python -m farfield jupyter install`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from ._errors import FarfieldError

_EXAMPLES = """examples:
  python -m farfield jupyter install --near 4G
  python -m farfield jupyter install --near 25% --far tcp://big:7400 --name big --display-name "Python, big"

The kernel is in the menu of Jupyter afterwards. `jupyter kernelspec remove NAME` removes it."""


def main(words: "list[str]") -> None:
    """Runs `farfield jupyter` with these words."""
    parser = argparse.ArgumentParser(
        prog="farfield jupyter", description="Jupyter kernels of this Python that have far memory"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    install = commands.add_parser(
        "install",
        help="write a kernel that starts with far memory",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    install.add_argument("--near", metavar="SIZE", help="memory on this machine: 4G, 25%% (default: half of it)")
    install.add_argument("--far", metavar="URL", action="append", default=[], help="where the rest is; may be repeated")
    install.add_argument("--slo", metavar="FACTOR", help="as little near memory as keeps it this many times slower")
    install.add_argument("--token-file", metavar="FILE", help="file with the token of the servers")
    install.add_argument("--name", default="farfield", help="name of the kernel (default: farfield)")
    install.add_argument("--display-name", metavar="TEXT", help="its name in menus (default: Python 3 (far memory))")
    install.add_argument("--sys-prefix", action="store_true", help="for this Python only, not for all of the user's")
    arguments = parser.parse_args(words)
    print(f"kernel {arguments.name!r} is in {_install(arguments)}")


def _install(arguments: argparse.Namespace) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", arguments.name):
        raise FarfieldError(f"--name {arguments.name}: Jupyter takes letters, digits, and the characters . _ -")
    if importlib.util.find_spec("ipykernel") is None:
        raise FarfieldError(f"{sys.executable} has no ipykernel: install it (pip install ipykernel)")
    options = [f"--near={arguments.near}"] if arguments.near else []
    options += [f"--far={url}" for url in arguments.far]
    options += [f"--slo={arguments.slo}"] if arguments.slo else []
    if arguments.token_file:
        options += [f"--token-file={os.path.abspath(arguments.token_file)}"]
    kernel: dict[str, Any] = {
        "argv": [
            *(sys.executable, "-m", "farfield", "run", "--quiet", *options, "--"),
            *(sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"),
        ],
        "display_name": arguments.display_name or "Python 3 (far memory)",
        "language": "python",
        # A signal to the group of processes would reach the kernel twice.
        "interrupt_mode": "message",
        "metadata": {"debugger": True, "farfield": True},
    }
    folder: Path = (_data_folder(arguments.sys_prefix) / "kernels" / arguments.name).absolute()
    file = folder / "kernel.json"
    if file.exists() and not _is_ours(file):
        raise FarfieldError(f"{folder} is another kernel: choose another --name, or remove it first")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kernel, indent=1) + "\n")
    return folder


def _is_ours(file: Path) -> bool:
    try:
        return bool(json.loads(file.read_text())["metadata"]["farfield"])
    except (ValueError, TypeError, KeyError):
        return False


def _data_folder(for_this_python: bool) -> Path:
    """Returns the folder of Jupyter's data, as Jupyter finds it on Linux."""
    if for_this_python:
        return Path(sys.prefix) / "share" / "jupyter"
    if os.environ.get("JUPYTER_DATA_DIR"):
        return Path(os.environ["JUPYTER_DATA_DIR"])
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "jupyter"
