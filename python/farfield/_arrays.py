"""Where arrays of NumPy lie: `with farfield.near():` and `with farfield.far():`.

NumPy asks a handler for the memory of each array (NEP 49). The handlers, near and far, are in the
library of far memory; here they are only put in their place, by functions of NumPy's C interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from . import _job
from ._errors import NotEnabledError, NotSupportedError

if TYPE_CHECKING:
    import ctypes
    from types import TracebackType
    from typing import Callable

#: Index of `PyDataMem_SetHandler` in the table of functions that NumPy exports to C.
_SET_HANDLER = 304

_handlers: "Optional[_Handlers]" = None


class ArrayPlace:
    """Where arrays are made: `near()` or `far()`, to be used as `with near():`."""

    def __init__(self, is_far: bool) -> None:
        self._is_far = is_far
        self._before: "list[Any]" = []

    def __enter__(self) -> None:
        handlers = _load()
        if self._is_far and _job.current_job() is None:
            raise NotEnabledError("far memory is off, so no array can be far: call farfield.enable() first")
        self._before.append(handlers.set(handlers.far if self._is_far else handlers.near))

    def __exit__(
        self,
        kind: "Optional[type[BaseException]]",
        error: Optional[BaseException],
        traceback: "Optional[TracebackType]",
    ) -> None:
        _load().set(self._before.pop())

    def __repr__(self) -> str:
        return f"farfield.{'far' if self._is_far else 'near'}()"


def near() -> ArrayPlace:
    """Makes arrays of NumPy near: `with farfield.near():`. Their memory never leaves this machine.

    It holds for arrays that this thread, or this task of asyncio, makes inside of `with`, and for
    their whole life. It does not count against the near budget. It needs no `enable()`. `with` raises
    NotSupportedError without NumPy 1.22 or newer.
    """
    return ArrayPlace(False)


def far() -> ArrayPlace:
    """Makes arrays of NumPy far-capable: `with farfield.far():`. Their pages are near or far.

    It holds for arrays that this thread, or this task of asyncio, makes inside of `with`, and for
    their whole life. Arrays of less than 64 KiB lie where other small objects do. `with` raises
    NotEnabledError if far memory is off, and NotSupportedError without NumPy 1.22 or newer.
    """
    return ArrayPlace(True)


class _Handlers(NamedTuple):
    #: Sets the handler of this context, and returns the one before.
    set: "Callable[[Any], Any]"
    near: Any
    far: Any


def _load() -> _Handlers:
    """Returns the handlers, as capsules for NumPy."""
    global _handlers
    if _handlers is None:
        set_handler = _numpy()
        near, far = _capsules(_library())
        _handlers = _Handlers(set_handler, near, far)
    return _handlers


def _numpy() -> "Callable[[Any], Any]":
    import ctypes
    import importlib

    try:
        numpy = importlib.import_module("numpy")
        # NumPy 2 has renamed it.
        name = "numpy._core.multiarray" if int(numpy.__version__.split(".")[0]) >= 2 else "numpy.core.multiarray"
        multiarray = importlib.import_module(name)
    except ImportError as error:
        raise NotSupportedError(f"near() and far() place arrays of NumPy, which cannot be imported: {error}") from error
    # It came with handlers.
    if not hasattr(multiarray, "get_handler_name"):
        raise NotSupportedError(
            f"near() and far() need NumPy 1.22 or newer, and this is {numpy.__version__}: pip install --upgrade numpy"
        )
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    table = ctypes.cast(get(multiarray._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    set_handler: "Callable[[Any], Any]" = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[_SET_HANDLER])
    return set_handler


def _library() -> "ctypes.CDLL":
    """Returns the library that serves far memory in this process, now or once it is switched on."""
    import ctypes

    # In a process that was started in a job, the loader has loaded it. A second one would be another.
    loaded = ctypes.CDLL(None)
    if hasattr(loaded, "farfield_array_handler"):
        return loaded
    if _job.is_inherited():
        raise NotSupportedError("the far memory of this process is of another release, which cannot place arrays")
    return _job.open_library()[0]


def _capsules(library: "ctypes.CDLL") -> "tuple[Any, Any]":
    import ctypes

    handler = library.farfield_array_handler
    handler.argtypes, handler.restype = [ctypes.c_int], ctypes.c_void_p
    name = library.farfield_array_capsule
    name.argtypes, name.restype = [], ctypes.c_void_p
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    # Handlers and name are the library's, which stays: arrays may be freed after this module is gone.
    return make(handler(0), name(), None), make(handler(1), name(), None)
