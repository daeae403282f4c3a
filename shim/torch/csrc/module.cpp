// The Python module of the glue.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"
#include "ddp.h"
#include "jobstore.h"

namespace tutti_torch {
extern const char* const fingerprint; // a hash of the sources, which build.py compiles
} // namespace tutti_torch

namespace py = pybind11;
using namespace tutti_torch;

template <class C>
static void define_options(C options) {
  options
      .def(py::init([](std::chrono::milliseconds timeout) { return c10::make_intrusive<Options>(timeout); }),
           py::arg("timeout") = kBackendDefaultTimeout)
      .def("copy", [](const Options& options) { return c10::make_intrusive<Options>(options); })
      .def("part_from", &Options::part_from, py::arg("other"), py::arg("closed") = false)
      .def_readwrite("store", &Options::store)
      .def_readwrite("transport", &Options::transport)
      .def_readwrite("interfaces", &Options::interfaces)
      .def_readwrite("ports", &Options::ports)
      .def_readwrite("algorithm", &Options::algorithm)
      .def_readwrite("log_dir", &Options::log_dir)
      .def_readwrite("metrics", &Options::metrics)
      .def_readwrite("on_failure", &Options::on_failure)
      .def_readwrite("uniform", &Options::uniform)
      .def_readwrite("max_procs", &Options::max_procs)
      .def_readwrite("environment", &Options::environment);
}

// TUTTI_GLUE is the module's name, which has the version of torch: _glue_2_15_0.
PYBIND11_MODULE(TUTTI_GLUE, m) {
  py::module_::import("torch._C._distributed_c10d"); // has the base classes

  m.attr("_sources") = fingerprint;
  m.def("set_library", &set_library, py::arg("path"));
  m.def("_take_for_cuda", &take_for_cuda, py::arg("type")); // for tests
  m.def("close_all", &Backend::close_all, py::call_guard<py::gil_scoped_release>());
  m.def(
      "failed_ranks",
      [](const c10::intrusive_ptr<c10d::Work>& work) {
        auto own = c10::dynamic_intrusive_pointer_cast<tutti_torch::Work>(work);
        TORCH_CHECK_TYPE(own, "failed_ranks expects a work of an operation of the tutti backend");
        TORCH_CHECK_VALUE(own->isCompleted(), "failed_ranks: the operation has not ended: call wait first");
        return own->failed_ranks();
      },
      py::arg("work"), py::call_guard<py::gil_scoped_release>());

  add_first_result(m);

  // Older versions do not show the base class to Python.
  if (py::detail::get_type_info(typeid(c10d::Backend::Options)) != nullptr) {
    define_options(py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(m, "Options"));
  } else {
    define_options(py::class_<Options, c10::intrusive_ptr<Options>>(m, "Options")
                       .def_readwrite("_timeout", &Options::timeout)
                       .def_readonly("backend", &Options::backend));
  }

  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend> backend(m, "ProcessGroupTutti");
  backend
      .def(py::init<const c10::intrusive_ptr<c10d::Store>&, int, int, c10::intrusive_ptr<Options>>(), py::arg("store"),
           py::arg("rank"), py::arg("size"), py::arg("options"), py::call_guard<py::gil_scoped_release>())
      // c10d calls it at ranks that are not in a new group: only NCCL needs them.
      .def("perform_nocolor_split", [](const Backend&, c10::Device) {}, py::arg("device"))
      .def("view", &Backend::view, py::call_guard<py::gil_scoped_release>())
      .def("recover", &Backend::recover, py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("admit", &Backend::admit, py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("agree", &Backend::agree, py::arg("yes"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
  if (!py::hasattr(backend, "options")) { // as above
    backend.def_property_readonly("options", [](Backend& self) {
      return c10::dynamic_intrusive_pointer_cast<Options>(self.getBackendOptions());
    });
  }
  if (!py::hasattr(backend, "allocate_tensor")) { // of c10d's Backend in newer versions
    backend.def(
        "allocate_tensor",
        [](Backend& self, long size, c10::ScalarType dtype, c10::Device device) {
          return self.allocateTensor(size, at::TensorOptions().dtype(dtype).device(device));
        },
        py::arg("size"), py::kw_only(), py::arg("dtype"), py::arg("device"));
  }

  py::class_<JobStore, c10::intrusive_ptr<JobStore>, c10d::Store>(m, "JobStore")
      .def(py::init<const std::string&, std::chrono::milliseconds>(), py::arg("address") = "",
           py::arg("timeout") = c10d::Store::kDefaultTimeout, py::call_guard<py::gil_scoped_release>());
}
