// Waiting in a Python process: without the interpreter's lock, and so that signal handlers run.
#pragma once

#include <Python.h>

#include <chrono>
#include <functional>
#include <thread>

#include "api.h"

namespace tutti_torch {

// How long a wait goes without a look at signals.
constexpr std::chrono::milliseconds kSlice{50};

// Releases the interpreter's lock in a scope, if this thread holds it. The scope of every call that
// may block: after interpreter_ends, a thread of the program does not leave it.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// Says that the interpreter is about to end. A thread that asks for its lock after that is ended by
// Python (before 3.14), which unwinds the thread's stack; destructors that take the lock, like
// those of pybind11, make that an abort of the process. So daemon threads stay where they wait.
void interpreter_ends();

// Starts a thread of the backend. It also returns from waits after interpreter_ends, because a
// backend that is closed waits for its threads, except in their callbacks.
std::thread start_thread(std::function<void()> body);

// Reports whether Python runs signal handlers on this thread.
bool on_main_thread();

// Runs the handlers of signals that have arrived. It throws what a handler has raised, such as
// KeyboardInterrupt. It does nothing on other threads than the main one.
void check_signals();

// Makes blocking calls of the library on this thread end when a signal handler raises.
class Interruptible {
 public:
  explicit Interruptible(const Api& api);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // Throws what a handler has raised, if one has, also when the call has succeeded meanwhile. Then
  // undo is called first, without that exception and the interpreter's lock.
  void rethrow(const std::function<void()>& undo = {}) const;
  // Is rethrow after a call with this result, which undo takes back, and then throws the error of a
  // call that has failed.
  void check(int code, const std::function<void()>& undo = {}) const;

 private:
  const Api& api_;
  bool raised_ = false;
  bool main_;
  Interruptible* outer_ = nullptr; // that of the call in which a signal handler makes this one
};

} // namespace tutti_torch
