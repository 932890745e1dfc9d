"""Builds the native kernels for `pip install` and wheels (daemon/llmd/kernels/build.py says how). All else is in pyproject.toml.

Where they cannot be built (no C++ compiler, not x86-64) the installation succeeds without them; llmd then computes with torch and says so when it starts.
"""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

BUILD = Path(__file__).parent / "daemon" / "llmd" / "kernels" / "build.py"
LIBRARY = Extension("llmd.kernels.libllmd_kernels", sources=[], optional=True)  # optional: editable installs copy it only if it exists


def load_build():
    """build.py, by its path: llmd is not installed yet."""
    spec = importlib.util.spec_from_file_location("llmd_kernels_build", BUILD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Makes a plain shared library where setuptools would make a Python module."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext):
        kernels = load_build()
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            kernels.build(target)
        except kernels.BuildError as error:
            self.warn(f"llmd is installed without its native kernels: {error}")
            target.unlink(missing_ok=True)

    def get_outputs(self):
        return [output for output in super().get_outputs() if Path(output).exists()]


class Wheel(bdist_wheel):
    """The library knows nothing of Python: one wheel for each platform serves all versions."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[LIBRARY], cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel})
