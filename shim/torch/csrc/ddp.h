// What a communication hook of DistributedDataParallel needs.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tutti_torch {

// Adds first_result(work) to a module: a future of the first tensor of a result. DDP takes a Python
// object. Unlike then of Python's futures it keeps an error's type.
void add_first_result(pybind11::module_& m);

} // namespace tutti_torch
