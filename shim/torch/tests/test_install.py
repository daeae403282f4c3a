"""The package as pip installs it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest

import harness
from tutti_torch import _versions

SOURCE = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
ROOT = os.path.normpath(os.path.join(SOURCE, "..", ".."))

UNSET = ("PYTHONPATH", "TUTTI_LIBRARY", "TUTTI_TORCH_CTYPES")

# It does not import tutti_torch: torch does.
PROGRAM = """
import sys
import torch
import torch.distributed as dist
assert "tutti_torch" in sys.modules, "torch has not imported the package"
assert "site-packages" in sys.modules["tutti_torch"].__file__
assert not any("libtutti" in line for line in open("/proc/self/maps")), "the import has opened the library"
dist.init_process_group("tutti", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
dist.destroy_process_group()
library = {line.split()[-1] for line in open("/proc/self/maps") if "libtutti" in line}
print(*library)
"""

# It shows how a package answers that has no module for the installed torch: older ones cannot do
# without.
WITHOUT = f"""
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        exec({PROGRAM!r})
    except ImportError as e:
        print(e)
print(*(w.message for w in caught))
"""


class Install(unittest.TestCase):
    @unittest.skipUnless(shutil.which(os.environ.get("CXX", "g++")), "needs a C++ compiler")
    @unittest.skipUnless(os.path.exists(os.path.join(ROOT, "bin", "libtutti.so")), "needs bin/libtutti.so: make shim")
    def test_installed_package(self):
        with tempfile.TemporaryDirectory() as directory:
            # An environment of its own with the packages of this one.
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
            python = os.path.join(directory, "bin", "python")
            path = subprocess.run(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
            with open(os.path.join(path, "torch.pth"), "w") as f:
                f.write(sysconfig.get_path("purelib") + "\n")
            environment = {n: v for n, v in os.environ.items() if n not in UNSET}
            environment.setdefault("TUTTI_OBJECTS", os.path.join(ROOT, ".build", "torch"))  # has most of it compiled

            def run(*command):
                result = subprocess.run(
                    [python, *command],
                    env=environment,
                    cwd=directory,
                    capture_output=True,
                    text=True,
                    timeout=4 * harness.LIMIT,
                )
                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                return result.stdout.strip()

            run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", SOURCE)
            package = os.path.join(path, "tutti_torch")
            self.assertEqual(run("-c", PROGRAM), os.path.join(package, "libtutti.so"))

            # Sources beside the package are not its own, unless they are in Tutti's source tree.
            os.mkdir(os.path.join(path, "csrc"))
            with open(os.path.join(path, "csrc", "backend.cpp"), "w") as f:
                f.write("// Of another package.\n")
            self.assertEqual(run("-c", PROGRAM), os.path.join(package, "libtutti.so"))

            # A package whose module is for another torch names both versions, and works without it.
            [module] = [name for name in os.listdir(package) if name.startswith("_glue_")]
            os.rename(os.path.join(package, module), os.path.join(package, "_glue_1_2_3." + module.split(".", 1)[1]))
            text = run("-c", WITHOUT)
            self.assertIn("built for torch 1.2.3", text)
            self.assertIn("python -m tutti_torch.build", text)
            run("-m", "tutti_torch.build")  # against the sources that were installed
            self.assertIn(module, os.listdir(package))
            self.assertEqual(run("-c", PROGRAM), os.path.join(package, "libtutti.so"))

            # So does one whose module was compiled from other sources, as those of an older Tutti.
            with open(os.path.join(package, "csrc", "later.h"), "w") as f:
                f.write("// What an older module does not have.\n")
            text = run("-c", WITHOUT)
            self.assertIn(module + " in", text)
            self.assertIn("built from other sources", text)
            run("-m", "tutti_torch.build")
            self.assertEqual(run("-c", PROGRAM), os.path.join(package, "libtutti.so"))

            # And one whose sources are not complete.
            os.remove(os.path.join(package, "csrc", "tutti.h"))
            self.assertIn("cannot be read", run("-c", WITHOUT))


class Sources(unittest.TestCase):
    def test_documented_commands_name_the_version(self):
        def read(name):
            with open(os.path.join(ROOT, name)) as f:
                return f.read()

        version = re.search(r"(?m)^TORCH +\?= (\S+)$", read("Makefile"))[1]
        for name in ("README.md", "docs/pytorch.md", "examples/torch_elastic.py"):
            self.assertEqual(set(re.findall(r"/torch-([0-9.]+)/bin/python", read(name))), {version}, name)

    def test_sources(self):
        with tempfile.TemporaryDirectory() as directory:
            package = os.path.join(directory, "torch", "tutti_torch")
            beside, inside = os.path.join(directory, "torch", "csrc"), os.path.join(package, "csrc")

            def write(*names):
                for name in names:
                    os.makedirs(os.path.dirname(name), exist_ok=True)
                    with open(name, "w"):
                        pass

            os.makedirs(package)
            write(os.path.join(beside, "backend.cpp"))
            self.assertIsNone(_versions.sources(package))
            write(os.path.join(directory, "tutti.h"))
            self.assertEqual(_versions.sources(package), beside)
            write(os.path.join(inside, "backend.cpp"))
            self.assertEqual(_versions.sources(package), inside)


if __name__ == "__main__":
    unittest.main()
