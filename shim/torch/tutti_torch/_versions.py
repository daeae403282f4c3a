"""The C++ module is compiled against one version of torch, and named after it. It carries a hash of what it was
compiled from, which must be that of the sources beside this package."""

import hashlib
import importlib
import os
import re
import sysconfig


HERE = os.path.dirname(os.path.abspath(__file__))


class Missing(ImportError):
    """There is no C++ module for the installed torch and these sources."""


def release(version):
    """Returns the release of a version of torch: 2.15.0 of 2.15.0+cu130."""
    return re.match(r"[0-9]+(\.[0-9]+)*", version).group()


def module_name(version):
    return "_glue_" + release(version).replace(".", "_")


def file_name(version):
    return module_name(version) + sysconfig.get_config_var("EXT_SUFFIX")


def built(directory):
    """Returns the versions of torch for which directory has a module, of any Python."""
    found = set()
    for name in os.listdir(directory):
        match = re.match(r"_glue_([0-9_]+)\..*so$", name)
        if match:
            found.add(match.group(1).replace("_", "."))
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def sources(package=HERE):
    """Returns the directory of the sources: in an installed package, or beside it in the source tree. None: there is
    none."""
    paths = [os.path.join(package, "csrc")]
    if os.path.exists(os.path.join(package, "..", "..", "tutti.h")):
        paths.append(os.path.join(package, "..", "csrc"))
    for path in paths:
        if os.path.exists(os.path.join(path, "backend.cpp")):
            return os.path.normpath(path)
    return None


def fingerprint(directory):
    """Returns a hash of the sources in directory, and of the headers beside them or in shim."""
    paths = [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith((".cpp", ".h"))]
    if "tutti.h" not in map(os.path.basename, paths):
        paths += [os.path.join(directory, "..", "..", name) for name in ("tutti.h", "tutti_dl.h")]
    whole = hashlib.sha256()
    for path in sorted(paths, key=os.path.basename):
        with open(path, "rb") as f:
            content = f.read()
        whole.update(f"{os.path.basename(path)} {len(content)}\n".encode())
        whole.update(content)
    return whole.hexdigest()


def load():
    """Imports the module for the installed torch."""
    import torch

    without = os.environ.get("TUTTI_TORCH_CTYPES", "")
    if without not in ("", "0", "1"):
        raise ValueError(f"TUTTI_TORCH_CTYPES is {without!r}, expected 1 or 0")
    if without == "1":
        raise Missing("TUTTI_TORCH_CTYPES is set, so that the C++ module of tutti_torch is not used.")
    if not os.path.exists(os.path.join(HERE, file_name(torch.__version__))):
        versions = built(HERE)
        have = "for torch " + ", ".join(versions) if versions else "for no version of torch"
        raise Missing(
            f"tutti_torch in {HERE} was built {have}, and not for torch {release(torch.__version__)} with Python "
            f"{sysconfig.get_python_version()}, which runs now. Build it with `python -m tutti_torch.build`, or "
            "`make torch` in Tutti's source tree."
        )
    module = importlib.import_module("tutti_torch." + module_name(torch.__version__))
    source = sources()
    try:
        current = source and fingerprint(source)
    except OSError as e:
        raise Missing(f"The sources of tutti_torch in {source} cannot be read: install the package again. ({e})") from e
    if source is not None and getattr(module, "_sources", None) != current:
        raise Missing(
            f"{file_name(torch.__version__)} in {HERE} was built from other sources of tutti_torch than those in "
            f"{source}: build it again with `python -m tutti_torch.build`, or `make torch` in Tutti's source tree."
        )
    return module
