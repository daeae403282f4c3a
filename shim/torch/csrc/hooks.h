// Functions of the program that are called when operations end and when a group fails.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace tutti_torch {

// Hooks are those of one group. Their functions run on the thread that notices the event, without
// any lock of the backend. What they throw becomes a warning.
class Hooks {
 public:
  using Failed = std::function<void()>;
  using Ended = std::function<void(uint64_t key, float milliseconds)>;
  using Info = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  // A number that a caller chooses names a function. Adding a number again replaces its function.
  void add_failed(int64_t id, Failed hook);
  void add_ended(int64_t id, Ended hook);
  void remove_failed(int64_t id);
  void remove_ended(int64_t id);
  void set_info(Info hook);
  void clear();

  // Reports whether a function wants to know of every end. Works are watched then, so that their
  // end is noticed although the program does not ask for it. Functions for failures do not: newer
  // versions of torch add one to every group, and watching takes longer than a small operation.
  bool watches() const {
    return watches_.load(std::memory_order_relaxed);
  }

  // An operation or the group has failed.
  void failed() noexcept;

  // An operation has succeeded. key is its completion key.
  void ended(c10d::OpType type, uint64_t seq, uint64_t key, std::chrono::steady_clock::time_point begun,
             std::chrono::steady_clock::time_point over) noexcept;

 private:
  void count(); // with mutex_ held

  std::atomic<bool> watches_{false};
  std::mutex mutex_;
  // Copies and destructors of functions may need the interpreter's lock: not with mutex_ held.
  std::map<int64_t, std::shared_ptr<const Failed>> failed_;
  std::map<int64_t, std::shared_ptr<const Ended>> ended_;
  std::shared_ptr<const Info> info_;
};

} // namespace tutti_torch
