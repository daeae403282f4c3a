"""Puts what `make torch` has built into the package: Tutti's library, and the C++ module for the
installed torch with its sources, so that it can be compiled again for another version."""

import os
import shutil
import sys

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))
SHIM = os.path.dirname(HERE)
LIBRARY = os.path.join(os.path.dirname(SHIM), "bin", "libtutti.so")


class Build(build_py):
    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not os.path.exists(LIBRARY):
            raise SystemExit(f"{LIBRARY} is missing: run `make shim` first")
        target = os.path.join(self.build_lib, "tutti_torch")
        sources = os.path.join(target, "csrc")
        shutil.copytree(os.path.join(HERE, "csrc"), sources)
        for header in ("tutti.h", "tutti_dl.h"):
            shutil.copy(os.path.join(SHIM, header), sources)
        shutil.copy(LIBRARY, target)
        sys.path.insert(0, HERE)
        from tutti_torch import build

        try:
            import torch  # noqa: F401
        except ImportError:
            print(
                "torch is not visible to this build: pip install --no-build-isolation, or run "
                "`python -m tutti_torch.build` after the installation",
                file=sys.stderr,
            )
        else:
            build.main(os.path.abspath(target))


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": Build}, distclass=Binary)
