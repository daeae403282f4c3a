// One-sided operations: c10d's Window over a window of Tutti.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef C10D_BACKEND_HAS_WINDOW

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "api.h"

namespace tutti_torch {

// Closes the windows of this process again whose close has failed, because a peer was in the middle
// of an access. It does not wait as the first close has.
void close_windows_again() noexcept;

// A Window makes the memory of a tensor accessible to the other ranks: tensor_register moves the
// tensor's storage to memory of Tutti, and tensor_deregister moves it back, unless an operation
// uses it. Views of the storage move with it; numpy arrays and raw pointers stay with the old
// memory.
class Window final : public c10d::Window {
 public:
  // group returns the group, or throws if that is not usable any more. barrier is one of it. bytes
  // counts the memory of the group's windows.
  Window(std::function<tutti_group()> group, int rank, int size, std::chrono::milliseconds timeout,
         std::function<void()> barrier, std::shared_ptr<std::atomic<uint64_t>> bytes);
  ~Window() override;

  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;
  c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t rank, int64_t offset, bool async,
                                     const c10d::PutOptions& opts) override;

  // A tensor with the memory of another rank of this machine, which cannot be written: a write ends
  // the process with SIGSEGV.
  at::Tensor map_remote_tensor(int64_t rank) override;

  // A signal comes after the data of all earlier puts to the same rank. The n-th wait for a rank
  // ends with its n-th signal; one that fails does not count.
  c10::intrusive_ptr<c10d::Work> signal(int64_t rank, bool async, const c10d::SignalOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> wait_signal(int64_t rank, bool async, const c10d::WaitSignalOptions& opts) override;
  c10d::WindowAttr get_attr(int64_t rank) override;

 private:
  class Errand; // an operation on a thread of its own
  struct Memory;

  std::shared_ptr<Memory> memory(const char* what, int64_t rank);
  c10::intrusive_ptr<c10d::Work> run(const char* title, bool async, std::function<void()> body);
  int64_t nanoseconds_of(std::chrono::milliseconds timeout) const;
  void finish_errands() noexcept;
  void restore() noexcept;

  const std::function<tutti_group()> group_;
  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  const std::function<void()> barrier_;
  const std::shared_ptr<std::atomic<uint64_t>> bytes_;

  std::mutex mutex_; // protects what follows
  std::shared_ptr<Memory> memory_;
  std::vector<c10::intrusive_ptr<Errand>> errands_; // that may be running
};

} // namespace tutti_torch

#endif
