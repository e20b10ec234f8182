"""`python -m farfield`: the command `farfield` of this package."""

from __future__ import annotations

import os
import sys

from ._errors import FarfieldError
from ._programs import command


def main() -> None:
    """Becomes the command, except for `farfield jupyter`, which is about this Python."""
    try:
        if sys.argv[1:2] == ["jupyter"]:
            from . import _jupyter

            return _jupyter.main(sys.argv[2:])
        path = command()
        os.execv(path, ["farfield", *sys.argv[1:]])
    except (FarfieldError, OSError) as error:
        sys.exit(f"farfield: {error}")


if __name__ == "__main__":
    main()
