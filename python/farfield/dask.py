"""Far memory for workers of Dask: `dask worker --preload farfield.dask --memory-limit 8GB …`.

The memory limit of a worker is what it may have in its machine's memory. What it keeps beyond that
is far, where Dask's setting `farfield.far` says (a URL or a list of URLs, for example by the
variable DASK_FARFIELD__FAR); without it, a private server on the worker's machine keeps it. Workers
neither spill nor pause then, because Dask counts far bytes as if they were near.
"""

from __future__ import annotations

from typing import Any

from ._job import enable

#: The share of the limit that a worker fills. Its nanny ends it at 0.95 of the limit.
_SHARE = 0.85


def dask_setup(worker: Any) -> None:
    """Switches far memory on in a worker, before it gets tasks. Dask calls this."""
    memory = getattr(worker, "memory_manager", None)
    # A nanny, which starts a worker, is given the same preloads.
    if memory is None or not hasattr(memory, "memory_spill_fraction"):
        return
    import dask

    near = None
    if memory.memory_limit:
        near = int(memory.memory_limit * _SHARE) - _resident_bytes()
        if near <= 0:
            raise MemoryError(
                f"the memory limit of this worker ({memory.memory_limit} bytes) is less than what it uses at its start: "
                "raise --memory-limit"
            )
    enable(
        near=near,
        far=dask.config.get("farfield.far", None),
        slo=dask.config.get("farfield.slo", None),
        token_file=dask.config.get("farfield.token-file", None),
    )
    memory.memory_target_fraction = False
    memory.memory_spill_fraction = False
    memory.memory_pause_fraction = False
    # Its results, which go to files when they are larger than a share of the limit.
    if hasattr(memory.data, "n"):
        memory.data.n = float("inf")


def _resident_bytes() -> int:
    """Returns what this process has in memory: it was allocated before, and stays near."""
    import os

    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
