"""Reads, writes and batches of reads with NIXL over UCX, between two processes.

nixl.py SIZES DEPTH MICROSECONDS: sizes in bytes, separated by commas. Prints one JSON object a row,
as "tutti bench --op p2p --json" does, with the time of a call in "time_us". A call has ended when
check_xfer_state says so: a write is at the other process then. Buffers are written before the turn
of a row, and read and compared after it.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np
import nixl_cu12

PIECES, PIECE = 64, 4096


def agent(name, size):
    a = nixl_cu12.nixl_agent(name, nixl_cu12.nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(size, dtype=np.uint8)
    a.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    return a, memory


def pattern(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def answer(x):
    print("answer", json.dumps(x), flush=True)


def target(size):
    """The other process: it fills its memory, or compares it, when it is told to."""
    a, memory = agent("target", size)
    answer({"agent": a.get_agent_metadata().hex(), "base": memory.ctypes.data})
    for line in sys.stdin:
        what, n, seed = line.split()
        n, data = int(n), pattern(int(n), int(seed))
        if what == "fill":
            memory[:n] = data
            answer(0)
        else:
            answer(int((memory[:n] != data).sum()))


class Initiator:
    def __init__(self, size, micros):
        self.other = subprocess.Popen([sys.executable, __file__, "target", str(size)], text=True,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        hello = self.answer()
        self.agent, self.memory = agent("initiator", size)
        self.name = self.agent.add_remote_agent(bytes.fromhex(hello["agent"]))
        self.base, self.seconds, self.seed = hello["base"], micros / 1e6, 0

    def order(self, what, n):
        self.other.stdin.write(f"{what} {n} {self.seed}\n")
        self.other.stdin.flush()
        return self.answer()

    def answer(self):
        """Returns the other process's next answer; NIXL prints other lines there."""
        for line in self.other.stdout:
            if line.startswith("answer "):
                return json.loads(line[7:])
        raise RuntimeError("the other process has ended")

    def request(self, kind, ranges):
        local = self.agent.get_xfer_descs([(self.memory.ctypes.data + o, n, 0) for o, n in ranges], "DRAM")
        remote = self.agent.get_xfer_descs([(self.base + o, n, 0) for o, n in ranges], "DRAM")
        return self.agent.initialize_xfer(kind, local, remote, self.name)

    def wait(self, request):
        while True:
            state = self.agent.check_xfer_state(request)
            if state == "DONE":
                return
            if state == "ERR":
                raise RuntimeError("a transfer failed")

    def calls(self, requests, count, abreast):
        """Posts the requests in turn, count in all, of which abreast are under way."""
        transfer, wait, n = self.agent.transfer, self.wait, len(requests)
        start = time.perf_counter()
        for i in range(count + abreast):
            if i >= abreast:
                wait(requests[(i - abreast) % n])
            if i < count:
                transfer(requests[i % n])
        return time.perf_counter() - start

    def row(self, op, size, depth, kind, requests, posts=1):
        """Measures calls of so many posts each."""
        abreast = len(requests) if posts == 1 else 1
        self.seed += 1
        if kind == "READ":
            self.order("fill", size)
            self.memory[:size] = 0
        else:
            self.memory[:size] = pattern(size, self.seed)
        count = max(posts, len(requests))
        while (took := self.calls(requests, count, abreast)) < self.seconds / 4:
            count *= 4
        count = max(count, int(count * self.seconds / took))
        took = self.calls(requests, count, abreast)
        if kind == "READ":
            wrong = int((self.memory[:size] != pattern(size, self.seed)).sum())
        else:
            wrong = self.order("compare", size)
        for r in requests:
            self.agent.release_xfer_handle(r)
        print(json.dumps({"op": op, "bytes": size, "depth": depth, "wrong": wrong,
                          "time_us": took * 1e6 * posts / count}), flush=True)


def main():
    sizes, depth, micros = [int(s) for s in sys.argv[1].split(",")], int(sys.argv[2]), int(sys.argv[3])
    m = Initiator(max(sizes + [PIECES * PIECE]), micros)
    for op, kind in (("read", "READ"), ("write", "WRITE")):
        for size in sizes:
            for d in dict.fromkeys((1, depth)):
                m.row(op, size, d, kind, [m.request(kind, [(0, size)]) for _ in range(d)])
    ranges = [(i * PIECE, PIECE) for i in range(PIECES)]
    m.row("batch", PIECES * PIECE, PIECES, "READ", [m.request("READ", ranges)])
    m.row("batch", PIECES * PIECE, 1, "READ", [m.request("READ", [r]) for r in ranges], PIECES)
    m.other.stdin.close()
    m.other.wait()
    sys.stdout.flush()
    os._exit(0)  # NIXL may crash when the interpreter ends


if __name__ == "__main__":
    if sys.argv[1] == "target":
        target(int(sys.argv[2]))
    else:
        main()
