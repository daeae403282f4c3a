#include "hooks.h"

#include <c10/util/Exception.h>

#include <utility>

namespace tutti_torch {

namespace {

template <class F, class... Arguments>
void call(const F& hook, const char* kind, Arguments&&... arguments) noexcept {
  try {
    hook(arguments...);
  } catch (const std::exception& e) {
    TORCH_WARN("tutti: ", kind, " has failed: ", e.what());
  } catch (...) {
    TORCH_WARN("tutti: ", kind, " has failed");
  }
}

// The clock of WorkInfo depends on the version of torch.
using Time = decltype(c10d::WorkInfo::timeStarted);

Time time_of(std::chrono::steady_clock::time_point time) {
  return Time::clock::now() + std::chrono::duration_cast<Time::duration>(time - std::chrono::steady_clock::now());
}

} // namespace

void Hooks::count() {
  watches_ = !ended_.empty() || info_ != nullptr;
}

void Hooks::add_failed(int64_t id, Failed hook) {
  auto held = std::make_shared<const Failed>(std::move(hook));
  std::lock_guard<std::mutex> guard(mutex_);
  failed_[id].swap(held);
}

void Hooks::add_ended(int64_t id, Ended hook) {
  auto held = std::make_shared<const Ended>(std::move(hook));
  std::lock_guard<std::mutex> guard(mutex_);
  ended_[id].swap(held);
  count();
}

void Hooks::remove_failed(int64_t id) {
  decltype(failed_)::node_type removed;
  std::lock_guard<std::mutex> guard(mutex_);
  removed = failed_.extract(id);
}

void Hooks::remove_ended(int64_t id) {
  decltype(ended_)::node_type removed;
  std::lock_guard<std::mutex> guard(mutex_);
  removed = ended_.extract(id);
  count();
}

void Hooks::set_info(Info hook) {
  auto held = std::make_shared<const Info>(std::move(hook));
  std::lock_guard<std::mutex> guard(mutex_);
  info_.swap(held);
  count();
}

void Hooks::clear() {
  decltype(failed_) failed;
  decltype(ended_) ended;
  decltype(info_) info;
  std::lock_guard<std::mutex> guard(mutex_);
  failed.swap(failed_);
  ended.swap(ended_);
  info.swap(info_);
  count();
}

void Hooks::failed() noexcept {
  decltype(failed_) hooks;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    hooks = failed_;
  }
  for (const auto& [id, hook] : hooks) {
    call(*hook, "an abort hook");
  }
}

void Hooks::ended(c10d::OpType type, uint64_t seq, uint64_t key, std::chrono::steady_clock::time_point begun,
                  std::chrono::steady_clock::time_point over) noexcept {
  if (!watches()) {
    return;
  }
  decltype(ended_) hooks;
  decltype(info_) info;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    hooks = ended_;
    info = info_;
  }
  const std::chrono::duration<float> duration = over - begun;
  for (const auto& [id, hook] : hooks) {
    call(*hook, "a completion hook", key, 1000 * duration.count());
  }
  if (info) {
    call(*info, "a completion hook",
         std::make_shared<c10d::WorkInfo>(type, seq, time_of(begun), time_of(over), duration));
  }
}

} // namespace tutti_torch
