"""Kernels of Jupyter that have far memory: `python -m farfield jupyter install`, `list` and `remove`.

Kernels are written where Jupyter's documentation says that it looks for them, so Jupyter need not be installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Iterator, Optional

from ._errors import FarfieldError

_EXAMPLES = """examples:
  python -m farfield jupyter install --near 4G
  python -m farfield jupyter install --near 25% --far tcp://big:7400 --name big --display-name "Python, big"
  python -m farfield jupyter remove big

The kernel is in the menu of Jupyter after `install`."""
#: Where Jupyter looks for the data of all users.
_OF_ALL_USERS = ("/usr/local/share/jupyter", "/usr/share/jupyter")
#: What begins a kernel of ours, behind the interpreter.
_LAUNCHER = ["-m", "farfield._kernel"]


def main(words: "list[str]") -> None:
    """Runs `farfield jupyter` with these words."""
    parser = argparse.ArgumentParser(
        prog="farfield jupyter",
        description="Jupyter kernels of this Python that have far memory",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    install = commands.add_parser("install", help="write a kernel that starts with far memory")
    install.add_argument("--near", metavar="SIZE", help="memory on this machine: 4G, 25%% (default: half of it)")
    install.add_argument("--far", metavar="URL", action="append", default=[], help="where the rest is; may be repeated")
    install.add_argument("--slo", metavar="FACTOR", help="as little near memory as keeps it this many times slower")
    install.add_argument("--what", choices=("everything", "arrays"), help="arrays: only those made in `with far():`")
    install.add_argument("--token-file", metavar="FILE", help="file with the token of the servers")
    install.add_argument("--name", default="farfield", help="name of the kernel (default: farfield)")
    install.add_argument("--display-name", metavar="TEXT", help="its name in menus (default: Python 3 (far memory))")
    _add_place(install)
    commands.add_parser("list", help="list the kernels that have far memory")
    remove = commands.add_parser("remove", help="remove a kernel that has far memory")
    remove.add_argument("name", metavar="NAME", help="name of the kernel, as `list` shows it")
    _add_place(remove)
    arguments = parser.parse_args(words)
    if arguments.command == "install":
        _install(arguments)
    elif arguments.command == "remove":
        _remove(arguments)
    else:
        _list()


def _add_place(command: argparse.ArgumentParser) -> None:
    place = command.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="in the user's folder (default)")
    place.add_argument("--sys-prefix", action="store_true", help="in the folder of this Python")
    place.add_argument("--prefix", metavar="FOLDER", help="in FOLDER/share/jupyter, which other users may share")


def _install(arguments: argparse.Namespace) -> None:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", arguments.name):
        raise FarfieldError(f"--name {arguments.name}: Jupyter takes letters, digits, and the characters . _ -")
    options = [f"--near={arguments.near}"] if arguments.near else []
    options += [f"--far={url}" for url in arguments.far]
    options += [f"--slo={arguments.slo}"] if arguments.slo else []
    options += [f"--what={arguments.what}"] if arguments.what else []
    if arguments.token_file:
        options += [f"--token-file={os.path.abspath(arguments.token_file)}"]
    kernel: dict[str, Any] = {
        "argv": [sys.executable, *_LAUNCHER, *options, "--", "-f", "{connection_file}"],
        "display_name": arguments.display_name or "Python 3 (far memory)",
        "language": "python",
        # A signal to the group of processes would reach the kernel twice.
        "interrupt_mode": "message",
        "metadata": {"debugger": True, "farfield": True},
    }
    folder = (_data_folder(arguments) / "kernels" / arguments.name).absolute()
    file = folder / "kernel.json"
    try:
        if file.exists() and _ours(file) is None:
            raise FarfieldError(f"{folder} is another kernel: choose another --name, or remove it first")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(kernel, indent=1) + "\n")
    except OSError as error:
        advice = "say where with --prefix FOLDER, --sys-prefix, or the variable JUPYTER_DATA_DIR"
        raise FarfieldError(f"the kernel cannot be written to {folder} ({error.strerror}): {advice}") from None
    print(f"kernel {arguments.name!r} is in {folder}")
    if importlib.util.find_spec("ipykernel") is None:
        print(f"{sys.executable} has no ipykernel yet, which the kernel needs: pip install ipykernel", file=sys.stderr)


def _list() -> None:
    for name, folder, kernel in _all():
        middle = kernel["argv"].index("--")
        options = " ".join(word for word in kernel["argv"][:middle] if word.startswith("--"))
        print(f"{name}\t{kernel['display_name']}\t{options or '(half of memory near)'}\t{folder}")


def _remove(arguments: argparse.Namespace) -> None:
    is_anywhere = not (arguments.user or arguments.sys_prefix or arguments.prefix)
    chosen = None if is_anywhere else (_data_folder(arguments) / "kernels").absolute()
    for name, folder, _ in _all(chosen):
        if name == arguments.name:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise FarfieldError(f"{folder} cannot be removed: {error.strerror}") from None
            print(f"kernel {name!r} was in {folder}")
            return
    raise FarfieldError(f"there is no kernel {arguments.name!r} with far memory: `farfield jupyter list` shows all")


def _all(kernels: Optional[Path] = None) -> "Iterator[tuple[str, Path, dict[str, Any]]]":
    """Finds name, folder and contents of our kernels, here or wherever Jupyter looks, in its order."""
    for place in [kernels] if kernels else [folder / "kernels" for folder in _data_folders()]:
        for file in sorted(place.glob("*/kernel.json")):
            kernel = _ours(file)
            if kernel is not None:
                yield file.parent.name, file.parent, kernel


def _ours(file: Path) -> "Optional[dict[str, Any]]":
    """Returns what a file says of a kernel, if that has far memory."""
    try:
        kernel: dict[str, Any] = json.loads(file.read_text())
        return kernel if kernel["metadata"]["farfield"] and "--" in kernel["argv"] else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _data_folders() -> "list[Path]":
    """Returns all folders of Jupyter's data, in the order in which it looks."""
    folders = [Path(one) for one in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if one]
    try:
        folders.append(_of_user())
    except FarfieldError:
        pass
    folders += [_in_prefix(sys.prefix), *map(Path, _OF_ALL_USERS)]
    return list(dict.fromkeys(folder.absolute() for folder in folders))


def _data_folder(arguments: argparse.Namespace) -> Path:
    """Returns the folder of Jupyter's data that was asked for."""
    if arguments.prefix:
        return _in_prefix(arguments.prefix)
    return _in_prefix(sys.prefix) if arguments.sys_prefix else _of_user()


def _in_prefix(prefix: str) -> Path:
    return Path(prefix) / "share" / "jupyter"


def _of_user() -> Path:
    """Returns the user's folder of Jupyter's data, as Jupyter finds it on Linux."""
    if os.environ.get("JUPYTER_DATA_DIR"):
        return Path(os.environ["JUPYTER_DATA_DIR"])
    try:
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "jupyter"
    except RuntimeError:
        raise FarfieldError(
            "Jupyter's data folder cannot be found, because this user has no home: set JUPYTER_DATA_DIR, or say where "
            "with --prefix FOLDER or --sys-prefix"
        ) from None
