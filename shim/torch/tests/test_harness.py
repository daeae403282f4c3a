"""harness.py tells which rank has crashed."""

import os
import signal
import unittest

import harness


def ends(rank, size, port, code):
    """Rank 1 kills itself, rank 0 ends with a code, and rank 2 waits for them in vain."""
    if rank == 0:
        os._exit(code)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def survives(rank, size, port):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def returns(rank, size, port):
    return rank


class Killed(unittest.TestCase):
    def test_rank_that_crashes_beside_one_that_is_killed_is_named(self):
        with self.assertRaisesRegex(AssertionError, "ended without a result, .*: {0: 3}"):
            harness.run(ends, 3, 3, killed=[1])

    def test_rank_that_ends_before_it_is_killed_is_named(self):
        with self.assertRaisesRegex(AssertionError, "ended without a result, .*: {0: 3}"):
            harness.run(ends, 3, 3, killed=[0, 1])

    def test_rank_that_is_not_killed_is_named(self):
        with self.assertRaisesRegex(AssertionError, "rank 1: exit code 0"):
            harness.run(returns, 2, killed=[1])

    def test_results_of_the_others(self):
        self.assertEqual(harness.run(survives, 3, killed=[1]), [0, None, 2])


if __name__ == "__main__":
    unittest.main()
