// What a communication hook of DistributedDataParallel needs.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" // in the next header
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "ddp.h"

namespace tutti_torch {

namespace py = pybind11;

void add_first_result(py::module_& m) {
  m.def(
      "first_result",
      [](const c10::intrusive_ptr<c10d::Work>& work) {
        auto first = work->getFuture()->then(
            [](c10::ivalue::Future& done) -> c10::IValue {
              const at::Tensor tensor = done.value().toTensorVector().at(0);
              py::gil_scoped_acquire gil;
              return torch::jit::toIValue(py::cast(tensor), c10::PyObjectType::get());
            },
            c10::PyObjectType::get());
        return std::make_shared<torch::jit::PythonFutureWrapper>(first);
      },
      py::arg("work"), py::call_guard<py::gil_scoped_release>());
}

} // namespace tutti_torch
