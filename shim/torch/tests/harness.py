"""Runs a function as several ranks, each in a process of its own."""

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import sys
import time
import traceback
import unittest

import torch
import torch.distributed as dist
import tutti_torch  # noqa: F401


OUTPUT = "TUTTI_TEST_OUTPUT"  # names the file that a process and its ranks write to


def write_to_output():
    """Has this process write to the file that the environment names, if it does."""
    if path := os.environ.get(OUTPUT):
        with open(path, "a") as f:
            os.dup2(f.fileno(), 1)
            os.dup2(f.fileno(), 2)


def has(method):
    """Reports whether c10d's Backend has a method, which depends on the version of torch."""
    return hasattr(torch._C._distributed_c10d.Backend, method)


# The program asks for the backend without the C++ module: make test-torch FALLBACK=1.
FALLBACK = os.environ.get("TUTTI_TORCH_CTYPES") == "1"

LIMIT = float(os.environ.get("TUTTI_TEST_LIMIT", "300"))  # seconds, for a function that hangs


def needs_module(why):
    """Skips a test without the C++ module."""
    return unittest.skipIf(FALLBACK, f"without the C++ module {why}")


def store(port):
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def meet(port, name, size):
    """Waits until size ranks have called it with this name. Unlike a barrier, no rank is within an operation then."""
    common = store(port)
    if common.add(name, 1) == size:
        common.set(name + "/all", "")
    common.wait([name + "/all"])


@contextlib.contextmanager
def reserved_port(host="127.0.0.1"):
    """Reserves a port for listeners that are made meanwhile. The kernel gives it to nobody who asks for any.

    It is bound and does not listen, so that a listener which sets SO_REUSEADDR, as Go's do, succeeds.
    """
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((host, 0))
        yield s.getsockname()[1]


def handle_later(handler):
    """Has a signal handler call handler once the call that the main thread makes next has begun.

    It is called in the fourth tick of a timer. Where the process makes no progress, for however long, there
    is one tick: only what waits has several.
    """
    ticks = 0

    def tick(number, frame):
        nonlocal ticks
        ticks += 1
        if ticks == 4:
            signal.setitimer(signal.ITIMER_REAL, 0)
            handler(number, frame)

    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)


def _rank(function, rank, size, port, results, environment, arguments):
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    write_to_output()
    try:
        results.put((rank, "ok", function(rank, size, port, *arguments)))
    except BaseException:  # noqa: BLE001
        results.put((rank, "failed", traceback.format_exc()))
        sys.exit(1)


def forked():
    """Returns the context of processes that are forked by a server.

    The server has imported what takes longer than most tests. It has no group, and so no Go runtime.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness", "torch._dynamo"])
    return context


def start(function, size, *arguments):
    """Starts function(rank, size, port, *arguments) for each rank; port is that of a TCPStore."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forked()
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(function, rank, size, server.port, results, {**os.environ}, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return server, processes, results


def result(processes, results, values, killed=()):
    """Returns the next result. It raises if none comes, also when a rank without one in values has ended.

    The ranks in killed may end by SIGKILL.
    """
    late = time.monotonic() + LIMIT
    while True:
        codes = {rank: process.exitcode for rank, process in enumerate(processes) if rank not in values}
        try:
            return results.get(timeout=0.1)
        except queue.Empty:  # a rank that had ended by then has put nothing
            ended = {rank: code for rank, code in codes.items() if code is not None}
            ended = {rank: code for rank, code in ended.items() if rank not in killed or code != -signal.SIGKILL}
            if ended:
                raise AssertionError(f"ranks ended without a result, with these exit codes: {ended}") from None
            if time.monotonic() > late:
                raise AssertionError(f"ranks {sorted(codes)} did not end") from None


def run(function, size, *arguments, killed=()):
    """Runs function as ranks and returns what each returned. It raises what a rank has raised.

    The ranks in killed return nothing: SIGKILL must end them.
    """
    server, processes, results = start(function, size, *arguments)
    values = {}
    try:
        while len(values) < size - len(killed):
            rank, outcome, value = result(processes, results, values, killed)
            if outcome == "failed":
                raise AssertionError(f"rank {rank}:\n{value}")
            values[rank] = value
        for rank, process in enumerate(processes):
            process.join(LIMIT)
            expected = -signal.SIGKILL if rank in killed else 0
            assert process.exitcode == expected, f"rank {rank}: exit code {process.exitcode}, not {expected}"
    finally:
        for process in processes:
            process.kill()
            process.join()
        del server
    return [values.get(rank) for rank in range(size)]


def init(rank, size, port, backend="tutti", **options):
    dist.init_process_group(backend, store=store(port), rank=rank, world_size=size, **options)
