"""Programs that tutti run starts as ranks, and that die and are replaced as a test says."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
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

# Rank lost dies, when the others are through with what they have called: the loss would fail a rank
# that is still in an operation which this one has left.
def loses(lost):
    store = dist.distributed_c10d._get_default_store()
    names = {r: f"through with {lost}/{r}" for r in range(dist.get_world_size()) if r != lost}
    if dist.get_rank() == lost:
        store.wait(list(names.values()))
        die()
    store.set(names[dist.get_rank()], "")

# An operation during which rank lost dies fails at all ranks. It succeeds without lost at all
# ranks if none had begun it when the loss was noticed. Returns whether it failed.
def outlives(lost, function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except dist.DistBackendError as e:
        assert f"rank {lost}" in str(e), f"{e!r} does not name rank {lost}"
        return True
    return False
"""


def run(size, flags, code, arguments=(), environment=()):
    """Runs a program, its text or its path, and returns the standard output, and that of errors.

    The program must end well at all ranks that are left.
    """
    program = [code] if os.path.exists(code) else ["-c", HEADER + textwrap.dedent(code)]
    command = [TUTTI, "run", "-n", str(size), *flags, "--", sys.executable, *program, *arguments]
    variables = dict(os.environ, PYTHONPATH=os.path.dirname(HERE), **dict(environment))
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=harness.LIMIT, env=variables)
    except subprocess.TimeoutExpired as e:  # its outputs are bytes, or None
        out, err = ((output or b"").decode(errors="replace") for output in (e.stdout, e.stderr))
        raise AssertionError(f"it does not end:\n{out}\n{err}") from None
    if ended.returncode != 0:
        raise AssertionError(f"exit code {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout, ended.stderr


@contextlib.contextmanager
def etcd():
    """Serves a plain etcd, such as a site has, and gives its address, for TUTTI_STORE."""
    port = harness.reserved_port
    with tempfile.TemporaryDirectory() as directory, port() as client, port() as peer:
        at = [f"127.0.0.1:{client}", f"127.0.0.1:{peer}"]
        member = {"Name": "site", "Dir": directory, "Client": at[0], "Peer": at[1]}
        # The tutti command serves a member, to measure stores, until its standard input ends.
        variables = dict(os.environ, TUTTI_ETCD_MEMBER=json.dumps({"All": [member], "Own": 0}))
        server = subprocess.Popen([TUTTI], stdin=subprocess.PIPE, env=variables)
        try:
            yield "etcd://" + at[0]
        finally:
            server.stdin.close()
            server.wait(harness.LIMIT)


def alone(rank, size, code, environment, stdin=None):
    """Starts a program as a rank of a job without a launcher."""
    variables = dict(os.environ, PYTHONPATH=os.path.dirname(HERE), RANK=str(rank), WORLD_SIZE=str(size), **environment)
    program = [sys.executable, "-c", HEADER + textwrap.dedent(code)]
    return subprocess.Popen(program, env=variables, stdin=stdin, stdout=subprocess.PIPE, text=True)
