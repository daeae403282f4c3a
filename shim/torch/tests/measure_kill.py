"""Measures how long a group stands still when a rank is killed: python measure_kill.py [KILLS] [ELEMENTS]

Four ranks call all_reduce without a pause, on_failure is "shrink". One after the other is killed with
SIGKILL, and started again. The time is that from the kill to the end of the first all_reduce among the
others, at the slowest of them.
"""

import os
import queue
import random
import re
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TUTTI = os.path.normpath(os.path.join(HERE, "..", "..", "..", "bin", "tutti"))
SIZE = 4
LIMIT = 180  # seconds for any line of the ranks


def rank(elements):
    import torch
    import torch.distributed as dist
    import tutti_torch

    torch.set_num_threads(1)
    dist.init_process_group("tutti", init_method="tutti://")
    me = dist.get_rank()
    x = torch.zeros(elements)
    active = 0
    while True:
        try:
            dist.all_reduce(x)
        except dist.DistBackendError:
            continue
        now = time.monotonic()
        if len(tutti_torch.active_ranks()) != active:
            active = len(tutti_torch.active_ranks())
            sys.stdout.write(f"rank {me} pid {os.getpid()} has {active} at {now}\n")
            sys.stdout.flush()


def measure(kills, elements):
    """Returns the times in milliseconds."""
    command = [
        TUTTI,
        "run",
        "-n",
        str(SIZE),
        "--on-failure",
        "shrink",
        "--auto-admit",
        "--max-restarts",
        str(kills),
        "--no-prefix",
        "--",
        sys.executable,
        os.path.abspath(__file__),
        "rank",
        str(elements),
    ]
    environment = dict(os.environ, PYTHONPATH=os.path.normpath(os.path.join(HERE, "..")))
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    lines = queue.Queue()
    errors = []
    readers = [
        threading.Thread(target=lambda: [lines.put(line) for line in run.stdout]),
        threading.Thread(target=lambda: errors.extend(run.stderr)),
    ]
    for reader in readers:
        reader.start()
    pids = {}

    def reports(number, ranks):
        """Waits until ranks have seen a view of a number of ranks; returns the time of the last."""
        seen = {}
        while set(seen) != ranks:
            try:
                line = lines.get(timeout=LIMIT)
            except queue.Empty:
                silent = sorted(ranks - set(seen))
                raise SystemExit(f"ranks {silent} are silent; standard error:\n{''.join(errors)}") from None
            match = re.fullmatch(r"rank (\d) pid (\d+) has (\d) at ([0-9.]+)\n", line)
            who, pids[int(match[1])] = int(match[1]), int(match[2])
            if int(match[3]) == number:
                seen[who] = float(match[4])
        return max(seen.values())

    times = []
    everyone = set(range(SIZE))
    try:
        reports(SIZE, everyone)
        for kill in range(kills):
            time.sleep(random.uniform(0.1, 0.3))  # so that kills meet operations anywhere
            victim = kill % SIZE
            begin = time.monotonic()
            os.kill(pids[victim], 9)
            times.append(1000 * (reports(SIZE - 1, everyone - {victim}) - begin))
            reports(SIZE, everyone)
    finally:
        run.terminate()
        for reader in readers:
            reader.join()
        run.communicate()
    return times


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[2]))
    elements = int(sys.argv[2]) if len(sys.argv) > 2 else 1024
    times = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 11, elements)
    print(
        f"{SIZE} ranks, all_reduce of {elements} float32, {len(times)} kills: median "
        f"{statistics.median(times):.1f} ms, "
        f"of {', '.join(f'{t:.1f}' for t in sorted(times))}"
    )
