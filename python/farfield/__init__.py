"""More memory than the machine has, for a running Python.

>>> import farfield
>>> job = farfield.enable(near="4G", far="tcp://big:7400")

From then on, memory that the process maps (arrays, frames, Arrow buffers) is near or far: at most
`near` bytes of it are in this machine's memory, and the rest is where `far` says. What was
allocated before stays near and does not count. Far memory cannot be switched off again.

`with farfield.near():` and `with farfield.far():` choose for the arrays of NumPy that are made
inside; after `enable(what="arrays")`, only those of `far()` are far.
"""

from ._arrays import ArrayPlace, far, near
from ._job import Job, Stats, current_job, doctor, enable
from ._errors import (
    BudgetError,
    ConflictError,
    FarfieldError,
    FarfieldWarning,
    JobEndedError,
    NotEnabledError,
    NotSupportedError,
    ServerError,
)
from ._programs import command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "ArrayPlace",
    "BudgetError",
    "ConflictError",
    "FarfieldError",
    "FarfieldWarning",
    "Job",
    "JobEndedError",
    "NotEnabledError",
    "NotSupportedError",
    "ServerError",
    "Stats",
    "command",
    "current_job",
    "doctor",
    "enable",
    "far",
    "near",
]


def load_ipython_extension(shell: "Any") -> None:
    """`%load_ext farfield` shows a line about far memory that lives; `%farfield` shows it again."""
    from . import _notebook

    _notebook.load_ipython_extension(shell)


def unload_ipython_extension(shell: "Any") -> None:
    """`%unload_ext farfield` leaves the line as it is."""
    from . import _notebook

    _notebook.unload_ipython_extension(shell)


def __getattr__(name: str) -> str:
    # Reading the version takes longer than everything else here.
    if name == "__version__":
        from importlib import metadata

        return metadata.version("farfield")
    raise AttributeError(f"module 'farfield' has no attribute {name!r}")
