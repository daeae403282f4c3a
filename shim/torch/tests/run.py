"""Runs the tests of the PyTorch backend."""

import sys
import unittest


def main():
    result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.discover("."))
    failed = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - failed - len(result.skipped)} passed, {failed} failed, {len(result.skipped)} skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
