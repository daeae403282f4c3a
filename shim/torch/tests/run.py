"""Runs the tests of the PyTorch backend, some classes at a time, because they mostly wait:

    python run.py [--abreast N] [test_elastic.Elastic ...]

With CI=true in the environment, a test that is skipped for want of something counts as failed.
"""

import argparse
import concurrent.futures
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import sys
import tempfile
import unittest

import harness

COUNTS = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$")


def run(tests):
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    for rank in multiprocessing.active_children():  # of tests that failed; this process would wait for them
        rank.kill()
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    passed = result.testsRun - failed - len(result.skipped)
    if os.environ.get("CI") == "true":
        for test, why in result.skipped:
            if "module" not in why:  # not for one of the two forms of the backend alone
                print(f"{test}: skipped although everything is installed: {why}")
                failed += 1
    return passed, failed, len(result.skipped)


def classes(tests):
    """Yields the names of the classes of a test suite, and those of modules that cannot be imported."""
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from classes(test)
        elif isinstance(test, unittest.loader._FailedTest):
            yield test._testMethodName
        else:
            yield f"{type(test).__module__}.{type(test).__qualname__}"


def main_of_class(name, output, server):
    """Runs a class, and writes to a file. The server at that address has forked this process, and forks its ranks."""
    os.environ[harness.OUTPUT] = output
    harness.write_to_output()
    ranks = multiprocessing.forkserver._forkserver
    ranks._forkserver_address, ranks.ensure_running = server, multiprocessing.resource_tracker.ensure_running
    end(run(unittest.defaultTestLoader.loadTestsFromName(name)))


def run_class(name):
    """Runs a class in a process of its own. Returns its output, and its counts, or None if there are none."""
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        server = multiprocessing.forkserver._forkserver._forkserver_address
        done = harness.forked().Process(target=main_of_class, args=(name, output.name, server))
        done.start()
        done.join()
        text = output.read()
    lines, counts = text.splitlines(), None
    for at in reversed(range(len(lines))):  # processes that end later may warn behind it
        if counts := COUNTS.match(lines[at]):
            del lines[at]
            break
    if not counts:
        return text + f"{name} ended with {done.exitcode} and no result\n", None
    return "\n".join(lines) + "\n", [int(n) for n in counts.groups()]


def end(total):
    """Prints the counts, and exits."""
    print("{} passed, {} failed, {} skipped".format(*total), flush=True)
    sys.exit(1 if total[1] or not any(total) else 0)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--abreast", type=int, default=3)
    options.add_argument("classes", nargs="*")
    options = options.parse_args()
    loader = unittest.defaultTestLoader
    if options.classes:
        total = run(loader.loadTestsFromNames(options.classes))
    else:
        total, names = [0, 0, 0], list(dict.fromkeys(classes(loader.discover("."))))
        harness.forked()
        multiprocessing.forkserver.ensure_running()
        with concurrent.futures.ThreadPoolExecutor(options.abreast) as pool:
            for name, (text, counts) in zip(names, pool.map(run_class, names)):
                print(f"----- {name}\n{text}", end="", flush=True)
                total = [a + b for a, b in zip(total, counts or [0, 1, 0])]
    end(total)


if __name__ == "__main__":
    main()
