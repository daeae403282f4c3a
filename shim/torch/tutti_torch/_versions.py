"""The C++ module is compiled against one version of torch, and named after it."""

import importlib
import os
import re
import sysconfig


class Missing(ImportError):
    """There is no C++ module for the installed torch."""


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


def load():
    """Imports the module for the installed torch."""
    import torch

    if os.environ.get("TUTTI_TORCH_CTYPES"):
        raise Missing("TUTTI_TORCH_CTYPES is set, so that the C++ module of tutti_torch is not used.")
    here = os.path.dirname(os.path.abspath(__file__))
    if not os.path.exists(os.path.join(here, file_name(torch.__version__))):
        versions = built(here)
        have = "for torch " + ", ".join(versions) if versions else "for no version of torch"
        raise Missing(
            f"tutti_torch in {here} was built {have}, and not for torch {release(torch.__version__)} with Python "
            f"{sysconfig.get_python_version()}, which runs now. Build it with `python -m tutti_torch.build`, or "
            "`make torch` in Tutti's source tree."
        )
    return importlib.import_module("tutti_torch." + module_name(torch.__version__))
