"""Programs that tutti run starts as ranks, and that die and are replaced as a test says."""

import os
import subprocess
import sys
import textwrap

import harness

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "..", "..", ".."))
TUTTI = os.path.join(ROOT, "bin", "tutti")

HEADER = """
import os, signal, sys, time
import torch, torch.distributed as dist, tutti_torch
torch.set_num_threads(1)
restarted = "TUTTI_RESTART" in os.environ

def raises(kind, text, function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except kind as e:
        assert text in str(e), f"{e!r} lacks {text!r}"
        return str(e)
    raise AssertionError(f"{function} did not raise {kind}")

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(size, flags, code, arguments=(), environment=()):
    """Runs a program, its text or its path, and returns the standard output, and that of errors.

    The program must end well at all ranks that are left.
    """
    program = [code] if os.path.exists(code) else ["-c", HEADER + textwrap.dedent(code)]
    command = [TUTTI, "run", "-n", str(size), *flags, "--", sys.executable, *program, *arguments]
    variables = dict(os.environ, PYTHONPATH=os.path.dirname(HERE), **dict(environment))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=harness.LIMIT, env=variables)
    if ended.returncode != 0:
        raise AssertionError(f"exit code {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout, ended.stderr
