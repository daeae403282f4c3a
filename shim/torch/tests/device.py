"""A device of torch for tests, whose memory and streams are those of the fake CUDA driver: see device.cpp.

It is built once, into .build/torch. load makes it the device "privateuseone" of a process.
"""

import contextlib
import ctypes
import itertools
import os
import shlex
import subprocess
import time
import types

import torch
import tutti_torch
from tutti_torch import build

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "..", "..", ".."))
FAKE = os.path.join(ROOT, "device", "cuda", "fake", "fake.c")
KERNELS = os.path.join(ROOT, "kernels", "cuda", "src")
OUT = os.path.join(ROOT, ".build", "torch", "device")
# The name by which libtutti.so and device.cpp open the driver finds the one that is loaded.
DRIVER = os.path.join(OUT, "libcuda.so.1")
# The arithmetic is that of the device, as in kernels/cuda/cudatest.
COMPILED = os.path.join(OUT, "kernels.so")
MODULE = os.path.join(OUT, f"device-{torch.__version__}.so")


def _make(target, sources, command):
    """Runs a command that makes a library, unless that is newer than its sources."""
    if os.path.exists(target) and os.path.getmtime(target) >= max(map(os.path.getmtime, sources)):
        return
    os.makedirs(OUT, exist_ok=True)
    subprocess.run([*command, "-o", target + ".new"], check=True)
    os.replace(target + ".new", target)


def possible():
    """Reports whether this version of torch gives the handles of streams, which the backend needs."""
    headers = os.path.join(os.path.dirname(torch.__file__), "include", "c10", "core", "impl")
    with open(os.path.join(headers, "DeviceGuardImplInterface.h")) as f:
        return "getStreamNativeHandle" in f.read()


def make():
    """Builds the driver, its kernels and the device."""
    cc, cxx = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
    flags = "-shared -fPIC -pthread -fvisibility=hidden -O1 -Wall -Wl,-soname,libcuda.so.1"
    _make(DRIVER, [FAKE], [cc, *shlex.split(flags), FAKE, "-ldl"])
    flags = "-std=c++17 -O1 -Wno-unknown-pragmas -ffp-contract=off -pthread -fPIC -shared -x c++ -include"
    sources = [os.path.join(KERNELS, name) for name in sorted(os.listdir(KERNELS))]
    _make(COMPILED, sources, [cxx, *shlex.split(flags), f"{KERNELS}/host.h", f"{KERNELS}/kernels.cu"])
    source = os.path.join(HERE, "device.cpp")
    libraries = ["-L" + os.path.join(os.path.dirname(torch.__file__), "lib"), "-ltorch_cpu", "-lc10", "-ldl"]
    _make(MODULE, [source], [cxx, *build.flags(torch), "-O1", "-shared", source, *libraries])


_module = _driver = None
number = 0


def load(chosen):
    """Makes the device that of this process, and a number the device of this thread."""
    global _module, _driver, number
    number = chosen
    _driver = ctypes.CDLL(DRIVER)
    torch.ops.load_library(MODULE)
    _module = ctypes.CDLL(MODULE)
    _module.device_open.restype = ctypes.c_char_p
    _module.device_new_stream.restype = _module.device_use_stream.restype = ctypes.c_int64
    _module.device_use_stream.argtypes = _module.device_idle.argtypes = [ctypes.c_int64]
    _module.device_end_capture.restype = ctypes.c_void_p
    _module.device_launch.argtypes = [ctypes.c_void_p]
    why = _module.device_open(COMPILED.encode())
    if why is not None:
        raise RuntimeError(why.decode())
    _module.device_set(number)
    module = types.ModuleType("torch.privateuseone")
    module._is_in_bad_fork = lambda: False
    module.is_available = lambda: True
    module.current_device = lambda: number
    torch._register_device_module("privateuseone", module)
    tutti_torch._load()._take_for_cuda("privateuseone")


def fail(call, code):
    """Has the next calls of a function of the driver fail."""
    for _ in range(8):
        _driver.fake_fail(call.encode(), 1, code)


def calls(function):
    """Returns how often a function of the driver was called."""
    n = ctypes.c_int()
    _driver.fake_calls.restype = ctypes.c_char_p
    for i in itertools.count():
        name = _driver.fake_calls(i, ctypes.byref(n))
        if name is None or name.decode() == function:
            return n.value


@contextlib.contextmanager
def stream(number):
    """Makes a stream the current one."""
    before = _module.device_use_stream(number)
    try:
        yield
    finally:
        _module.device_use_stream(before)


class Graph:
    """What a function gives a stream of its own, to be done any number of times."""

    def __init__(self, function):
        self._stream = new_stream()
        with stream(self._stream):
            _module.device_begin_capture()
            try:
                function()
            finally:
                self._graph = _module.device_end_capture()

    def launch(self):
        """Has the graph's stream do it, and waits for that."""
        with stream(self._stream):
            _module.device_launch(self._graph)
            while not idle(self._stream):
                time.sleep(0.001)


def new_stream():
    return _module.device_new_stream()


def idle(number=0):
    """Reports whether a stream has done what it was given."""
    return _module.device_idle(number) == 1


class Gate:
    """The current stream waits from here on until the gate is opened."""

    def __init__(self):
        self._number = _module.device_gate()

    def open(self):
        _module.device_open_gate(self._number)
