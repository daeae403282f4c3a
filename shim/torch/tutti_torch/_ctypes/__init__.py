"""The backend without its C++ module: the same in Python over ctypes, slower.

It is used where no module was compiled for the installed torch, and has the names of the module.
Its files are named like those of the C++ sources, csrc, where they do the same; groups.py has what
only Python needs. docs/pytorch.md lists what torch does not let a backend in Python do.
"""

from .api import set_library
from .backend import Backend as ProcessGroupTutti
from .backend import Options, close_all
from .jobstore import JobStore
from .work import failed_ranks, first_result

__all__ = [
    "JobStore",
    "Options",
    "ProcessGroupTutti",
    "close_all",
    "failed_ranks",
    "first_result",
    "set_library",
]
