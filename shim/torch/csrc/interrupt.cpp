#include "interrupt.h"

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <utility>

#include "work.h"

namespace tutti_torch {

namespace {

std::atomic<bool> ending{false};
thread_local bool started = false; // by start_thread

bool main_thread() {
  return syscall(SYS_gettid) == getpid();
}

// That of the call that the main thread makes, the inner one if a signal handler makes another.
Interruptible* current = nullptr;

// Looks at signals for the call whose raised_ is given.
int look(void* raised) {
  if (*static_cast<bool*>(raised)) { // by an earlier look: no other handler runs before rethrow
    return 1;
  }
  PyGILState_STATE gil = PyGILState_Ensure();
  // The exception stays set in this thread's state, for rethrow.
  bool interrupted = PyErr_CheckSignals() != 0;
  PyGILState_Release(gil);
  *static_cast<bool*>(raised) = interrupted;
  return interrupted ? 1 : 0;
}

} // namespace

void interpreter_ends() {
  ending.store(true, std::memory_order_release);
}

std::thread start_thread(std::function<void()> body) {
  return std::thread([body = std::move(body)] {
    started = true;
    body();
  });
}

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    state_ = PyEval_SaveThread();
  }
}

WithoutGil::~WithoutGil() {
  if (ending.load(std::memory_order_acquire) && PyGILState_GetThisThreadState() != nullptr && !started &&
      !main_thread()) {
    for (;;) {
      pause(); // until the process ends
    }
  }
  if (state_ != nullptr) {
    PyEval_RestoreThread(state_);
  }
}

bool on_main_thread() {
  return main_thread() && Py_IsInitialized();
}

void check_signals() {
  if (!on_main_thread()) {
    return;
  }
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

Interruptible::Interruptible(const Api& api) : api_(api), main_(on_main_thread()) {
  if (main_) {
    outer_ = std::exchange(current, this);
    api_.tutti_set_interrupt(look, &raised_);
  }
}

Interruptible::~Interruptible() {
  if (main_) {
    current = outer_;
    api_.tutti_set_interrupt(outer_ == nullptr ? nullptr : look, outer_ == nullptr ? nullptr : &outer_->raised_);
  }
}

void Interruptible::rethrow(const std::function<void()>& undo) const {
  if (!raised_) {
    return;
  }
  try {
    pybind11::gil_scoped_acquire gil;
    if (PyErr_Occurred() != nullptr) {
      throw pybind11::error_already_set(); // takes the exception from the thread's state
    }
  } catch (const pybind11::error_already_set&) {
    if (undo) {
      undo();
    }
    throw;
  }
}

void Interruptible::check(int code, const std::function<void()>& undo) const {
  const std::string why = code == TUTTI_OK ? "" : api_.tutti_last_error();
  rethrow(code == TUTTI_OK ? undo : std::function<void()>());
  if (code != TUTTI_OK) {
    raise(code, why);
  }
}

} // namespace tutti_torch
