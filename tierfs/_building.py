"""setuptools imports this alone: the tag of the wheel depends on the Python that builds it.

The limited API has buffers from Python 3.11 on, and a Python without the lock has no such API.
"""

import os
import sys
import sysconfig

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIMITED = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")


class Loops(build_ext):
    """Builds the compiled loops. Without a compiler tierfs installs, too, and NumPy does what they do."""

    def finalize_options(self) -> None:
        super().finalize_options()
        for each in self.extensions:
            each.py_limited_api = LIMITED


class Wheel(bdist_wheel):
    """A wheel for all Pythons that it works on: if the loops were not built, for every one."""

    def finalize_options(self) -> None:
        if LIMITED:
            self.py_limited_api = "cp311"
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        is_built = any(map(os.path.exists, self.get_finalized_command("build_ext").get_outputs()))
        return super().get_tag() if is_built else ("py3", "none", "any")
