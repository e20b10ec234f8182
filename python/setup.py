"""What pyproject.toml cannot say: the wheel holds programs for Linux on x86-64, for any Python 3.

`cargo x wheel` puts the programs into farfield/bin and the version into the environment.
"""

import os
from pathlib import Path

from setuptools import Distribution, setup
from wheel.bdist_wheel import bdist_wheel

PROGRAMS = [Path(__file__).parent / "farfield" / "bin" / name for name in ("farfield", "libfarfield_preload.so")]
for program in PROGRAMS:
    if not program.is_file():
        raise SystemExit(f"{program} is not there: make the wheel with `cargo x wheel`")


class BinaryDistribution(Distribution):
    """A distribution whose files depend on the platform."""

    def has_ext_modules(self):
        return True


class AnyPython(bdist_wheel):
    """A wheel that depends on the platform and on no version of Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    version=os.environ["FARFIELD_VERSION"],
    distclass=BinaryDistribution,
    cmdclass={"bdist_wheel": AnyPython},
)
