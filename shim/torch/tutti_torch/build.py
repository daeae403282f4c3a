"""Compiles the C++ module against the installed torch: python -m tutti_torch.build [DIRECTORY]."""

import concurrent.futures
import os
import subprocess
import sys
import sysconfig
import tempfile

from tutti_torch import _versions

# The sources, in an order in which they could be one file. Each processor compiles an equal share
# of them as one translation unit: torch's headers take the compiler most of the time.
SOURCES = [
    "api.cpp",
    "interrupt.cpp",
    "store.cpp",
    "jobstore.cpp",
    "device.cpp",
    "tensors.cpp",
    "hooks.cpp",
    "work.cpp",
    "backend.cpp",
    "elastic.cpp",
    "lifecycle.cpp",
    "reconfigure.cpp",
    "window.cpp",
    "ddp.cpp",
    "module.cpp",
]

# What module.cpp shows of the sources, in a unit of its own because it changes with each of them:
# see fingerprint in _versions.py.
FINGERPRINT = """namespace tutti_torch {
extern const char* const fingerprint;
const char* const fingerprint = "%s";
}
"""


def current(compiled):
    """Reports whether an object is newer than what it was compiled from, as the compiler wrote it down."""
    try:
        with open(compiled + ".d") as f:
            paths = f.read().split(":", 1)[1].replace("\\\n", " ").split()
        return all(os.path.getmtime(path) <= os.path.getmtime(compiled) for path in paths)
    except FileNotFoundError:
        return False


def flags(torch):
    """Returns what the compiler needs for code that uses the C++ of torch."""
    from torch.utils import cpp_extension

    version = tuple(int(part) for part in _versions.release(torch.__version__).split(".")[:2])
    found = [
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wno-subobject-linkage",  # which takes files that are included for headers
        "-std=c++20" if version >= (2, 10) else "-std=c++17",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    # Modules share types only if they were compiled for the same ABI, as pybind11 knows it. Torch
    # says which one it was.
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value is not None:
            found.append(f'-DPYBIND11_{name}="{value}"')
    for path in [sysconfig.get_path("include"), *cpp_extension.include_paths()]:
        found += ["-isystem", path]
    return found


def main(directory=_versions.HERE, objects=None):
    import torch

    # setup.py copies the sources into the package that it builds, from this file's tree.
    source = _versions.sources()
    if source is None:
        raise SystemExit("the C++ sources are missing: build in Tutti's source tree")
    fingerprint = _versions.fingerprint(source)
    output = os.path.join(directory, _versions.file_name(torch.__version__))
    own = [*flags(torch), "-DTUTTI_GLUE=" + _versions.module_name(torch.__version__)]
    own += ["-I", source, "-I", os.path.join(source, "..", "..")]  # tutti_dl.h is beside them, or in shim
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory() as scratch:
        objects = objects or os.environ.get("TUTTI_OBJECTS") or scratch
        os.makedirs(objects, exist_ok=True)

        units = min(len(os.sched_getaffinity(0)), len(SOURCES))

        def compile_text(name, text, flags, what):
            """Compiles text, which is called what, unless the object is current."""
            path = os.path.join(objects, name)
            try:
                with open(path) as f:
                    same = f.read() == text
            except FileNotFoundError:
                same = False
            if not same:
                with open(path, "w") as f:
                    f.write(text)
            compiled = path + ".o"
            if not current(compiled):
                print(f"{compiler} {what}\n", end="", flush=True)
                command = [compiler, *flags, "-MMD", "-MF", compiled + ".d", "-c", path, "-o", compiled + ".new"]
                subprocess.run(command, check=True)
                os.replace(compiled + ".new", compiled)
            return compiled

        def compile_unit(number):
            names = SOURCES[number::units]
            text = "".join(f'#include "{name}"\n' for name in names)
            name = f"{number}-of-{units}-{_versions.file_name(torch.__version__)}.cpp"
            return compile_text(name, text, own, " ".join(names))

        with concurrent.futures.ThreadPoolExecutor(units) as compilers:
            linked = list(compilers.map(compile_unit, range(units)))
        linked.append(compile_text("fingerprint.cpp", FINGERPRINT % fingerprint, ["-fPIC"], "fingerprint.cpp"))
        if os.path.exists(output) and os.path.getmtime(output) >= max(map(os.path.getmtime, linked)):
            return
        libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
        subprocess.run(
            [
                compiler,
                "-shared",
                *linked,
                "-L" + libraries,
                "-ltorch_python",
                "-ltorch_cpu",
                "-lc10",
                "-ldl",
                "-o",
                output + ".new",
            ],
            check=True,
        )
        os.replace(output + ".new", output)
        print(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
