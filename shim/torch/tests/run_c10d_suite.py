"""Runs PyTorch's tests of backends: run_c10d_suite.py BACKEND [-o RESULTS] [-k PATTERN] [--third N].

It writes the outcome of each case to RESULTS, a JSON file. It fails if a case does, or if none ran.
"""

import argparse
import json
import os
import sys
import time
import unittest


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=["gloo", "tutti"])
    parser.add_argument("-o", dest="results")
    parser.add_argument("-k", dest="pattern", default="")
    parser.add_argument("--third", type=int, choices=[0, 1, 2], help="only a third of the cases")
    options = parser.parse_args()
    os.environ["TUTTI_SUITE"] = options.backend
    import c10d_suite

    names = [n for n in unittest.TestLoader().getTestCaseNames(c10d_suite.Suite) if options.pattern in n]
    if options.third is not None:
        names = names[options.third :: 3]
    outcomes = {}
    for name in names:
        result = unittest.TestResult()
        begun = time.monotonic()
        c10d_suite.Suite(name).run(result)
        outcome = "passed"
        text = ""
        if result.skipped:
            outcome, text = "skipped", result.skipped[0][1]
        elif not result.wasSuccessful():
            outcome, text = "failed", (result.failures + result.errors)[0][1]
            if options.backend == "tutti" and name in c10d_suite.DIFFERENT:
                outcome = "different"
        outcomes[name] = {"outcome": outcome, "text": text, "seconds": round(time.monotonic() - begun, 2)}
        if outcome != "skipped":
            print(f"{name} {outcome} {outcomes[name]['seconds']}", flush=True)
        if options.results:
            with open(options.results, "w") as f:
                json.dump(outcomes, f, indent=1)
    kinds = ("passed", "failed", "skipped", "different")
    count = {kind: sum(o["outcome"] == kind for o in outcomes.values()) for kind in kinds}
    if count["different"]:
        print(f"{count['different']} different, for a known reason")
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    if count["skipped"] == len(names):
        sys.exit("no case ran")
    sys.exit(1 if count["failed"] else 0)


if __name__ == "__main__":
    main()
