"""Installs what `import torch` needs, or what another package needs besides torch: requirements.py [NAME].

torch depends on several GB of CUDA libraries. Most of them are loaded with it, even on machines
without a GPU. Those that newer versions load when they are used are left out, and installed only if
the import fails without.
"""

import importlib.metadata
import subprocess
import sys

from packaging.requirements import Requirement

NEVER = ("triton", "cuda-bindings", "cuda-pathfinder")
LATE = ("cusolver", "nvtx")


def install(*arguments):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-warn-conflicts",
            *arguments,
        ],
        check=True,
    )


def required(distribution, extras=()):
    """Yields the requirements of an installed distribution."""
    for line in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(line)
        if any(name in requirement.name for name in NEVER):
            continue
        if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
            continue
        yield requirement


def main():
    plain, cuda = [], []
    for requirement in required("torch"):
        if requirement.name == "cuda-toolkit":  # has no files, but a requirement for each library
            extras = requirement.extras
            requirement.extras = set()
            install("--no-deps", str(requirement).split(";")[0])
            cuda += [str(r).split(";")[0] for r in required("cuda-toolkit", extras)]
        elif requirement.name.startswith("nvidia-"):
            cuda.append(str(requirement).split(";")[0])
        else:
            plain.append(str(requirement).split(";")[0])
    install(*plain)
    late = [line for line in cuda if any(name in line for name in LATE)]
    install("--no-deps", *(line for line in cuda if line not in late))
    if late and subprocess.run([sys.executable, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode != 0:
        install("--no-deps", *late)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        install(*(str(r).split(";")[0] for r in required(sys.argv[1]) if r.name != "torch"))
    else:
        main()
