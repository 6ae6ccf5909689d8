"""The compiled loops and the tag of the wheel, which depend on the Python that builds it. pyproject.toml has the rest."""

import os
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

# The limited API has buffers from 3.11 on, and builds without the lock have no such API.
LIMITED = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")


class Wheel(bdist_wheel):
    """A wheel for all Pythons that it works on: if the loops were not built, for every one."""

    def get_tag(self) -> tuple[str, str, str]:
        is_built = any(map(os.path.exists, self.get_finalized_command("build_ext").get_outputs()))
        return super().get_tag() if is_built else ("py3", "none", "any")


setup(
    # Without a compiler tierfs installs, too, and NumPy does what the loops do.
    ext_modules=[
        Extension(
            "tierfs._kernels",
            ["tierfs/_kernels.c"],
            extra_compile_args=["-O3", "-std=c11"],
            py_limited_api=LIMITED,
            optional=True,
        )
    ],
    cmdclass={"bdist_wheel": Wheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"} if LIMITED else {}},
)
