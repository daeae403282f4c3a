"""What bench.py measures is checked, and it keeps figures until there are others."""

import json
import os
import tempfile
import unittest

import bench
import torch


class Results(unittest.TestCase):
    def deliver(self, call):
        """Makes the result of a call whose other ranks have written, too."""
        inputs = [call.source - call.rank + rank for rank in range(call.ranks)]
        if call.op in ("all_reduce", "reduce_scatter_tensor"):
            call.result.copy_(sum(inputs)[: call.result.numel()])
        elif call.op == "all_gather_into_tensor":
            call.result.copy_(torch.cat(inputs))
        else:
            part = call.source.numel() // call.ranks
            call.result.copy_(torch.cat([x[:part] for x in inputs]))

    def test_a_call_that_delivers_nothing_is_wrong(self):
        for op in bench.OPS:
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(op=op, dtype=dtype):
                    call = bench.Call(op, 256, dtype, 4, 2)
                    for _ in range(11):
                        call.write()
                        self.deliver(call)
                        call.check()
                        call.write()
                        with self.assertRaises(SystemExit):
                            call.check()

    def test_rows_are_kept_where_there_are_no_others(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "new", "torch.json")
            bench.save(path, [])
            self.assertFalse(os.path.exists(path))
            bench.save(path, [{"op": "all_reduce"}])
            bench.save(path, [])  # --floor, --ddp
            with open(path) as f:
                self.assertEqual(json.load(f)["rows"], [{"op": "all_reduce"}])
