"""run_c10d_suite.py fails unless cases ran and passed."""

import contextlib
import io
import os
import sys
import types
import unittest
from unittest import mock

import run_c10d_suite


def suite():
    """Returns cases in the place of PyTorch's; the loader of the tests does not find them in here."""

    class Suite(unittest.TestCase):
        def test_different(self):
            self.fail()

        def test_fails(self):
            self.fail()

        def test_passes(self):
            pass

        def test_skips(self):
            self.skipTest("not here")

    return types.SimpleNamespace(Suite=Suite, DIFFERENT={"test_different": "known"})


class ExitCode(unittest.TestCase):
    def code(self, *arguments):
        with (
            mock.patch.dict(os.environ),
            mock.patch.dict(sys.modules, c10d_suite=suite()),
            mock.patch.object(sys, "argv", ["run_c10d_suite.py", "tutti", *arguments]),
            contextlib.redirect_stdout(io.StringIO()),
            self.assertRaises(SystemExit) as end,
        ):
            run_c10d_suite.main()
        return end.exception.code

    def test_cases_decide(self):
        self.assertEqual(self.code("-k", "passes"), 0)
        self.assertEqual(self.code("-k", "different"), 0)
        self.assertEqual(self.code("-k", "s"), 1)

    def test_no_case(self):
        self.assertEqual(self.code("-k", "none_is_called_so"), "no case ran")
        self.assertEqual(self.code("-k", "skips"), "no case ran")
        self.assertEqual(self.code("-k", "passes", "--third", "1"), "no case ran")
