// What happens to a group besides its operations: it is made smaller, suspended, watched.
#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <set>

#include "backend.h"
#include "interrupt.h"
#include "store.h"

namespace tutti_torch {

using std::chrono::milliseconds;

namespace {

// The flag of shrink that ends operations under way: SHRINK_ABORT of torch.distributed.
constexpr int kShrinkAbort = 1;

} // namespace

bool Backend::supportsShrinking() const {
  return true;
}

// The remaining ranks make a new group, in a part of the store that the excluded ranks do not know.
c10::intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                                  const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) {
  const std::set<int64_t> excluded(ranks_to_exclude.begin(), ranks_to_exclude.end());
  TORCH_CHECK_VALUE(!excluded.empty(), "tutti shrink: there are no ranks to exclude, expected at least one");
  for (int64_t rank : excluded) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "tutti shrink: a rank to exclude is ", rank, ", expected 0 to ",
                      size_ - 1);
  }
  TORCH_CHECK_VALUE(excluded.count(rank_) == 0, "tutti shrink: rank ", rank_,
                    " excludes itself: only the ranks that remain call shrink");
  TORCH_CHECK_VALUE((shrink_flags & ~kShrinkAbort) == 0, "tutti shrink: the flags are ", shrink_flags,
                    ", expected SHRINK_DEFAULT or SHRINK_ABORT");
  if ((shrink_flags & kShrinkAbort) != 0) {
    abort();
  }
  std::string place = prefix_ + "shrunk/";
  {
    std::lock_guard<std::mutex> guard(mutex_);
    place += std::to_string(++shrinks_);
  }
  std::vector<int> remaining;
  std::string list;
  for (int r = 0; r < size_; r++) {
    if (excluded.count(r) == 0) {
      list += "-" + std::to_string(r);
      remaining.push_back(r);
    }
  }
  place += "-" + c10::sha1(list).str(); // as long for any number of ranks: stores bound their keys
  auto store = c10::make_intrusive<c10d::PrefixStore>(place, another(store_));
  return part(store, remaining, opts_override);
}

void Backend::suspend() {
  refuse_if_forked("tutti suspend");
  WithoutGil released;
  for (const auto& work : running_->all()) {
    TORCH_CHECK(work->poll(), "tutti suspend: an operation is under way: wait for it first");
  }
  tutti_group group = 0;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK(!closed_, "tutti suspend: the process group was shut down");
    TORCH_CHECK(!outlives_, "tutti suspend: a group that goes on without lost ranks cannot be suspended, because its "
                            "ranks would be lost: destroy the group, and make it again");
    TORCH_CHECK(!formed_, "tutti suspend: a group that reconfigure has made cannot be suspended: reconfigure it when "
                          "it is needed again");
    if (suspended_) {
      return;
    }
    TORCH_CHECK(group_ != 0, "tutti suspend: the process group has no members yet: call reconfigure");
    suspended_ = true;
    group = group_.exchange(0);
  }
  api().tutti_close(group);
}

void Backend::resume() {
  refuse_if_forked("tutti resume");
  WithoutGil released;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK(!closed_, "tutti resume: the process group was shut down");
    if (!suspended_) {
      return;
    }
  }
  join();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!closed_) {
      running_->recovered();
      suspended_ = false;
      return;
    }
  }
  api().tutti_close(group_); // close may have come before the join had made it
  raise(TUTTI_ECLOSED, "tutti resume: the process group was shut down");
}

std::unordered_map<std::string, uint64_t> Backend::getMemoryStats() {
  refuse_if_forked("tutti memory_stats");
  uint64_t operations = 0, bytes = 0;
  for (const auto& work : running_->all()) {
    if (!work->poll()) {
      operations++;
      bytes += work->held();
    }
  }
  return {{"operations", operations}, {"operation_bytes", bytes}, {"window_bytes", window_bytes_->load()}};
}

void Backend::waitForPendingWorks() {
  refuse_if_forked("tutti wait_for_pending_works");
  WithoutGil released;
  for (const auto& work : running_->all()) {
    while (!work->await(kSlice) || !running_->await_removal(work.get(), kSlice)) {
      check_signals();
    }
  }
}

void Backend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(onCompletionHook_ == nullptr, "tutti: the group has an on-completion hook already, expected one at most");
  onCompletionHook_ = [](const std::shared_ptr<c10d::WorkInfo>&) {}; // says that there is one; running_ calls it
  running_->hooks.set_info(std::move(hook));
}

void Backend::addEphemeralTimeout(const milliseconds& timeout) {
  std::lock_guard<std::mutex> guard(mutex_);
  extensions_.push_back({timeout, nullptr});
}

// With mutex_ held.
void Backend::extend(Task& task) {
  extensions_.erase(std::remove_if(extensions_.begin(), extensions_.end(),
                                   [](const Extension& e) { return e.first && e.first->over(); }),
                    extensions_.end());
  for (const Extension& e : extensions_) {
    if (task.limit.count() > 0) {
      task.limit += e.time;
      task.timeout = task.limit;
    }
  }
}

#ifdef C10D_BACKEND_HAS_HOOKS
bool Backend::supportsAbortHooks() const {
  return true;
}

void Backend::registerAbortHook(int64_t hook_id, c10d::AbortHook hook) {
  running_->hooks.add_failed(hook_id, std::move(hook));
}

void Backend::unregisterAbortHook(int64_t hook_id) {
  running_->hooks.remove_failed(hook_id);
}

bool Backend::supportsCompletionHooks() const {
  return true;
}

void Backend::registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) {
  running_->hooks.add_ended(hook_id, [hook = std::move(hook)](uint64_t key, float milliseconds) {
    c10d::CompletionHookArgs arguments;
    arguments.completionKey = key;
    arguments.duration_ms = milliseconds;
    hook(arguments);
  });
}

void Backend::unregisterCompletionHook(int64_t hook_id) {
  running_->hooks.remove_ended(hook_id);
}
#endif

} // namespace tutti_torch
