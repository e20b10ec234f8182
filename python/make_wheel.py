#!/usr/bin/env python3
"""Makes the wheel of the package from programs that are built already.

Usage: make_wheel.py FOLDER_OF_PROGRAMS OUTPUT_FOLDER VERSION

It needs setuptools and wheel (Debian: python3-pip, python3-setuptools, python3-wheel) and no network.
`cargo x wheel` builds the programs first.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = ("farfield", "libfarfield_preload.so")
# The extension module of heaps and frames, which the wheel may lack.
MODULE = ("libfarfield_native.so", "_native.abi3.so")


def main(programs: str, output: str, version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # In a copy, so that nothing that the build leaves behind is packed the next time.
        source = Path(folder) / "python"
        ignored = shutil.ignore_patterns("bin", "build", "*.so", "*.egg-info", "__pycache__")
        shutil.copytree(Path(__file__).parent, source, ignore=ignored)
        bin_folder = source / "farfield" / "bin"
        bin_folder.mkdir()
        for name in PROGRAMS:
            shutil.copy(Path(programs) / name, bin_folder / name)
            subprocess.run(["strip", "--strip-unneeded", bin_folder / name], check=True)
        built, module = Path(programs) / MODULE[0], source / "farfield" / MODULE[1]
        if built.is_file():
            shutil.copy(built, module)
            subprocess.run(["strip", "--strip-unneeded", module], check=True)
        words = ["wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", output, source]
        environment = {**os.environ, "FARFIELD_VERSION": version}
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words], check=True, env=environment)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
