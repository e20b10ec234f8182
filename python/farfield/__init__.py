"""More memory than the machine has, for a running Python.

>>> import farfield
>>> job = farfield.enable(near="4G", far="tcp://big:7400")

From then on, memory that the process maps (arrays, frames, Arrow buffers) is near or far: at most
`near` bytes of it are in this machine's memory, and the rest is where `far` says. What was
allocated before stays near and does not count. Far memory cannot be switched off again.

Tables that are much larger than memory have a door of their own, without page faults:

>>> heap = farfield.Heap(near="1G", far="tcp://big:7400")
>>> trips = heap.read_parquet("trips.parquet")
>>> trips.filter(farfield.col("fare") > 0).group_by("zone").agg(n="count", fare="mean").to_polars()

`with farfield.near():` and `with farfield.far():` choose for the arrays of NumPy that are made
inside; after `enable(what="arrays")`, only those of `far()` are far.
"""

from ._arrays import ArrayPlace, far, near
from ._frames import Expression, Frame, Groups, Heap, HeapStats, Totals, col, lit
from ._job import Job, Stats, current_job, doctor, enable
from ._errors import (
    BudgetError,
    ConflictError,
    FarfieldError,
    FarfieldWarning,
    JobEndedError,
    NotEnabledError,
    NotSupportedError,
    QueryError,
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
    "Expression",
    "FarfieldError",
    "FarfieldWarning",
    "Frame",
    "Groups",
    "Heap",
    "HeapStats",
    "Job",
    "JobEndedError",
    "NotEnabledError",
    "NotSupportedError",
    "QueryError",
    "ServerError",
    "Stats",
    "Totals",
    "col",
    "command",
    "current_job",
    "doctor",
    "enable",
    "far",
    "lit",
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
