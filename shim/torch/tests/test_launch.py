"""Programs started by torchrun, on this host and on two, which are network namespaces of this machine."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import unittest

import harness
import launched

EXAMPLE = os.path.join(launched.ROOT, "examples", "launch", "torchrun.sh")

# With the command torchrun of this torch.
PATH = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import tutti_torch

dist.init_process_group("tutti")
rank, size = dist.get_rank(), dist.get_world_size()
ranks = [None] * size
dist.all_gather_object(ranks, (rank, int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"])))
torch.manual_seed(1)
net = DistributedDataParallel(torch.nn.Linear(1000, 100))
net(torch.full((2, 1000), float(rank))).sum().backward()
want = 2 * sum(range(size)) / size
assert torch.all(net.module.weight.grad == want), net.module.weight.grad
peer = torch.full((3,), float(rank))
dist.broadcast(peer, 0)
assert peer[0] == 0
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"rank-{rank}"), "w") as f:
    print(*sorted(ranks), file=f)
dist.destroy_process_group()
"""


class Hosts:
    """Two network namespaces with a link between them."""

    def __enter__(self):
        self.names = [f"tutti-torch-{secrets.token_hex(4)}-{i}" for i in range(2)]
        try:
            self.ip("netns", "add", self.names[0])
        except subprocess.CalledProcessError as e:
            raise unittest.SkipTest(f"needs network namespaces: {e.stderr.strip()}") from None
        try:
            self.ip("netns", "add", self.names[1])
            for name in self.names:
                self.ip("-n", name, "link", "set", "lo", "up")
            a, b = self.names
            self.ip("-n", a, "link", "add", "data", "type", "veth", "peer", "name", "data", "netns", b)
            for i, name in enumerate(self.names):
                self.ip("-n", name, "address", "add", f"10.77.9.{i + 1}/24", "dev", "data")
                self.ip("-n", name, "link", "set", "data", "up")
        except BaseException:
            self.__exit__()
            raise
        return self.names

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@unittest.skipUnless(hasattr(os, "geteuid") and os.geteuid() == 0, "needs root: it makes network namespaces")
@unittest.skipUnless(shutil.which("ip"), "needs the command ip")
class Torchrun(unittest.TestCase):
    def launch(self, *rendezvous):
        """Runs the program on both hosts; rendezvous has the options of each for torchrun."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        self.run_on_hosts([[*torchrun, *options] for options in rendezvous])

    def run_on_hosts(self, commands, files=(), **variables):
        """Runs a command on each host, with the path of the program behind it.

        Arguments, and the values of variables, have {directory} for the directory of the files, which are given by
        name and text.
        """
        with Hosts() as hosts, tempfile.TemporaryDirectory() as directory:
            program = os.path.join(directory, "train.py")
            for name, text in [("train.py", PROGRAM), *files]:
                with open(os.path.join(directory, name), "w") as f:
                    f.write(text)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": directory}
            environment |= {name: value.format(directory=directory) for name, value in variables.items()}
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                environment.pop(name, None)
            agents = []
            try:
                for node, (host, command) in enumerate(zip(hosts, commands, strict=True)):
                    command = [argument.format(directory=directory) for argument in command]
                    with open(os.path.join(directory, str(node)), "w") as output:
                        agents.append(
                            subprocess.Popen(
                                ["ip", "netns", "exec", host, *command, program],
                                env=environment,
                                stdout=output,
                                stderr=output,
                            )
                        )
                codes = [agent.wait(harness.LIMIT) for agent in agents]
            finally:
                for agent in agents:
                    agent.terminate()  # it ends its ranks
                    agent.wait(harness.LIMIT)
                outputs = []
                for node in range(len(agents)):
                    with open(os.path.join(directory, str(node))) as f:
                        outputs.append(f.read())
            self.assertEqual(codes, [0, 0], "\n".join(outputs))
            # Which host is the first is up to the rendezvous; the ranks of a host follow one
            # another.
            ranks = " ".join(str((rank, rank % 2, rank // 2)) for rank in range(4))
            for rank in range(4):
                with open(os.path.join(directory, f"rank-{rank}")) as f:
                    self.assertEqual(f.read().strip(), ranks)

    def test_static_rendezvous(self):
        self.launch(
            *(["--node-rank", str(node), "--master-addr", "10.77.9.1", "--master-port", "29511"] for node in range(2))
        )

    def test_elastic_rendezvous(self):
        options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.9.1:29512", "--rdzv-id", "job"]
        # The name of this machine does not lead to an address of a namespace.
        self.launch(
            *(
                [*options, "--rdzv-conf", f"is_host={1 - node}", "--local-addr", f"10.77.9.{node + 1}"]
                for node in range(2)
            )
        )

    def test_example_on_two_hosts(self):
        names = ["first", "second"]
        hosts = "127.0.0.1 localhost\n" + "".join(f"10.77.9.{i + 1} {name}\n" for i, name in enumerate(names))
        named = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        named = ["unshare", "--uts", "--mount", "sh", "-c", named]
        self.run_on_hosts(
            [[*named, name, "{directory}/hosts", EXAMPLE, "2", sys.executable] for name in names],
            files=[("hosts", hosts), ("secret", secrets.token_hex(32))],
            PATH=PATH,
            HOSTS=",".join(names),
            ID="example",
            TUTTI_SECRET_FILE="{directory}/secret",
        )


class Example(unittest.TestCase):
    def test_example_on_one_host(self):
        with tempfile.TemporaryDirectory() as directory:
            program = os.path.join(directory, "train.py")
            with open(program, "w") as f:
                f.write(PROGRAM)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": PATH}
            environment.pop("HOSTS", None)
            command = [EXAMPLE, "2", sys.executable, program]
            ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=harness.LIMIT)
            self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
            for rank in range(2):
                with open(os.path.join(directory, f"rank-{rank}")) as f:
                    self.assertEqual(f.read().strip(), "(0, 0, 0) (1, 1, 0)")


if __name__ == "__main__":
    unittest.main()
