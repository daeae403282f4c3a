#include "work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>

#include "interrupt.h"

namespace tutti_torch {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// The most bytes of a task that the call that starts it waits for.
constexpr size_t kBrief = 64 << 10;

// How long a Completer waits for one work before it looks at the others.
constexpr nanoseconds kOrdered = milliseconds(100);
constexpr nanoseconds kUnordered = milliseconds(1);

// The most ranks that an error lists to say which group it is of.
constexpr size_t kListed = 8;

// How long a wait for a stream, which has passed the operations, sleeps before it asks again.
constexpr nanoseconds kStream = std::chrono::microseconds(20);

uint64_t next_key() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

std::string text_of(const Api& api, tutti_work work) {
  char text[4096] = "";
  api.tutti_work_error_text(work, text, sizeof text, nullptr);
  return text;
}

// Returns numbers as "4, 5 and 6".
template <class Numbers>
std::string listed(const Numbers& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size(); i++) {
    text += c10::str(i == 0 ? "" : i + 1 == numbers.size() ? " and " : ", ", numbers[i]);
  }
  return text;
}

std::exception_ptr error_of(int code, const std::string& text) {
  try {
    raise(code, text);
  } catch (...) {
    return std::current_exception();
  }
}

} // namespace

void raise(int code, const std::string& text) {
  if (code == TUTTI_EINVAL) {
    throw std::invalid_argument(text);
  }
  C10_THROW_ERROR(DistBackendError, text);
}

void refuse_if_forked(const char* title) {
  if (forked()) {
    int32_t rank = 0;
    const int code = api().tutti_rank(0, &rank);
    raise(code, std::string(title) + ": " + api().tutti_last_error());
  }
}

Work::Work(int rank, uint64_t seq, Task task, std::shared_ptr<Completer> completer, std::shared_ptr<Running> running)
    : c10d::Work(rank, task.type, at::hasCallbacks() ? task.title : nullptr,
                 at::hasCallbacks() ? std::optional<std::vector<at::Tensor>>(task.inputs) : std::nullopt),
      seq_(seq), key_(next_key()), task_(std::move(task)), completer_(std::move(completer)),
      running_(std::move(running)), era_(running_->era()) {
  task_.inputs.clear();
}

Work::~Work() {
  for (tutti_work handle : handles_) {
    api().tutti_work_release(handle);
  }
}

bool Task::brief() const {
  size_t bytes = 0;
  for (const at::Tensor& tensor : keep) {
    bytes += tensor.nbytes();
  }
  return ops.size() == 1 && bytes <= kBrief && !device();
}

std::optional<c10::Device> Task::device() const {
  for (const at::Tensor& tensor : keep) {
    if (!tensor.is_cpu()) {
      return tensor.device();
    }
  }
  return std::nullopt;
}

void Task::end() {
  if (after) {
    at::AutoDispatchBelowADInplaceOrView raw; // results are written like those of Gloo: unseen by autograd
    after();
  }
}

void Work::start(tutti_group group, tutti_work handle) {
  const Api& tutti = api();
  starting_.store(true, std::memory_order_release);
  handles_.reserve(task_.ops.size());
  if (handle != 0) {
    handles_.push_back(handle);
    task_.ops.clear();
  }
  for (const tutti_op& op : task_.ops) {
    handle = 0;
    if (int code = tutti.tutti_start(group, &op, &handle); code != TUTTI_OK) {
      std::string text = tutti.tutti_last_error();
      refused_ = true;
      starting_.store(false, std::memory_order_release);
      while (!await(kOrdered)) { // those that were started use the memory
      }
      raise(code, running_->of_group(code, text, {rank_}));
    }
    handles_.push_back(handle);
  }
  task_.ops.clear();
  if (!handles_.empty()) {
    running_->add(c10::intrusive_ptr<Work>::reclaim_copy(this));
  }
  if (task_.stream) {
    follow();
  }
  starting_.store(false, std::memory_order_release);
  if (!handles_.empty() && running_->hooks.watches()) {
    completer_->add(c10::intrusive_ptr<Work>::reclaim_copy(this));
  }
}

void Work::follow() {
  c10::StreamGuard on(*task_.stream);
  try {
    const bool graph = capturing(*task_.stream);
    if (task_.after) {
      task_.end();
      task_.after = nullptr;
      copies_ = !graph;
    }
    if (graph) { // the operations are over; the graph uses the memory
      record_uses();
    }
    followed_.emplace(task_.stream->device_type());
    followed_->record(*task_.stream);
  } catch (...) {
    starting_.store(false, std::memory_order_release);
    throw;
  }
}

void Work::record_uses() const {
  for (const at::Tensor& tensor : task_.keep) {
    record_use(tensor, *task_.stream);
  }
  for (const auto& list : task_.outputs) {
    for (const at::Tensor& tensor : list) {
      record_use(tensor, *task_.stream);
    }
  }
}

bool Work::passed() noexcept {
  try {
    return !copies_ || !followed_ || followed_->query();
  } catch (const std::exception&) {
    return true; // the device has failed, and does nothing more
  }
}

bool Work::await_stream(Clock::time_point end) noexcept {
  while (!passed()) {
    if (Clock::now() >= end) {
      return false;
    }
    std::this_thread::sleep_for(kStream);
  }
  return true;
}

void Work::order() const {
  if (const c10::Stream current = current_stream(task_.stream->device()); followed_ && current != *task_.stream) {
    followed_->block(current);
  }
}

bool Work::rely() {
  if (poll()) {
    return false;
  }
  std::lock_guard<std::mutex> guard(lock_);
  relied_ = !over_.load(std::memory_order_relaxed);
  return relied_;
}

bool Work::poll() noexcept {
  if (over_.load(std::memory_order_acquire)) {
    return true;
  }
  if (starting_.load(std::memory_order_acquire)) {
    return false;
  }
  for (tutti_work handle : handles_) {
    if (api().tutti_work_test(handle) == TUTTI_EBUSY) {
      return false;
    }
  }
  if (!passed()) {
    return false;
  }
  finish();
  return true;
}

bool Work::await(nanoseconds time) noexcept {
  if (over_.load(std::memory_order_acquire)) {
    return true;
  }
  if (starting_.load(std::memory_order_acquire)) {
    return false;
  }
  const Clock::time_point end = Clock::now() + time;
  for (tutti_work handle : handles_) {
    int64_t left = std::max<int64_t>(0, nanoseconds(end - Clock::now()).count());
    if (int code = api().tutti_work_wait(handle, left); code == TUTTI_EBUSY || code == TUTTI_ECANCELED) {
      return false; // TUTTI_ECANCELED: a signal handler has raised; the operation runs on
    }
  }
  if (!await_stream(end)) {
    return false;
  }
  finish();
  return true;
}

void Work::refuse_if_parents() const {
  if (!over()) {
    refuse_if_forked(task_.title);
  }
}

bool Work::wait(milliseconds timeout) {
  refuse_if_parents();
  if (task_.stream && !task_.blocks && timeout == kNoTimeout && rely()) {
    order();
    return true;
  }
  if (!over_.load(std::memory_order_acquire)) {
    WithoutGil released;
    const Clock::time_point end = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
    nanoseconds slice = kSlice;
    for (;;) {
      if (timeout != kNoTimeout) {
        slice = std::min<nanoseconds>(kSlice, end - Clock::now());
        slice = std::max<nanoseconds>(slice, nanoseconds(0));
      }
      if (await(slice)) {
        break;
      }
      check_signals();
      if (timeout != kNoTimeout && Clock::now() >= end) {
        C10_THROW_ERROR(DistBackendError, c10::str(task_.title, ": the wait timed out after ",
                                                   std::max<int64_t>(0, timeout.count()),
                                                   " ms; the operation continues"));
      }
    }
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
  if (task_.stream) {
    order();
  }
  return true;
}

void Work::conclude() noexcept {
  const Api& tutti = api();
  for (tutti_work handle : handles_) {
    code_ = tutti.tutti_work_test(handle);
    if (code_ == TUTTI_OK) {
      continue;
    }
    tutti_error_info info{};
    info.struct_size = sizeof info;
    if (tutti.tutti_work_error(handle, &info) == TUTTI_OK) {
      failed_.assign(info.ranks, info.ranks + std::min<uint32_t>(info.ranks_listed, TUTTI_MAX_LISTED));
    }
    running_->failed(era_, code_);
    std::string text = std::string(task_.title) + ": ";
    if (code_ == TUTTI_ETIMEOUT) {
      text += c10::str("the timeout of ", task_.limit.count(), " ms has passed: ");
    }
    std::vector<int64_t> ranks = failed_;
    ranks.push_back(rank_);
    error_ = error_of(code_, running_->of_group(code_, text + text_of(tutti, handle), std::move(ranks)));
    break;
  }
  if (code_ == TUTTI_OK && (opType_ == c10d::OpType::RECV || opType_ == c10d::OpType::RECVANYSOURCE) &&
      !handles_.empty()) {
    tutti_status status{};
    if (tutti.tutti_work_status(handles_[0], &status) == TUTTI_OK) {
      source_ = status.from;
    }
  }
  if (code_ == TUTTI_OK && !task_.stream && !refused_) {
    try {
      task_.end();
    } catch (...) {
      code_ = TUTTI_EINTERNAL;
      error_ = std::current_exception();
    }
  }
  if (error_ && relied_) {
    running_->missed(era_, error_);
  }
}

// The work whose hooks this thread runs.
static thread_local const Work* finishing = nullptr;

void Work::finish() noexcept {
  // Destructors and callbacks may need the interpreter's lock: they run without lock_.
  std::vector<at::Tensor> keep;
  std::function<void()> after, recorded;
  {
    std::lock_guard<std::mutex> guard(lock_);
    if (over_.load(std::memory_order_relaxed)) {
      return;
    }
    conclude();
    if (task_.stream && code_ != TUTTI_OK) { // the stream may still have to pass the operations
      try {
        record_uses();
      } catch (const std::exception&) { // the device has failed, and does nothing more
      }
    }
    ended_ = Clock::now();
    keep.swap(task_.keep);
    after.swap(task_.after);
    recorded.swap(recordFunctionEndCallback_);
    over_.store(true, std::memory_order_release);
  }
  if (recorded) {
    recorded();
  }
  if (refused_) { // start throws; those that were started may have failed
    if (code_ != TUTTI_OK && code_ != TUTTI_EINVAL) {
      running_->hooks.failed();
    }
    return;
  }
  mark(true);
  const Work* outer = std::exchange(finishing, this);
  if (code_ == TUTTI_OK) {
    running_->hooks.ended(opType_, seq_, key_, begun_, ended_);
  } else if (code_ != TUTTI_EINVAL) {
    running_->hooks.failed();
  }
  finishing = outer;
  running_->remove(this); // the caller has another reference
}

void Work::mark(bool over) noexcept {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> guard(lock_);
    if (!future_ || marked_) {
      return;
    }
    marked_ = true;
    future = future_;
  }
  try {
    c10::OptionalStreamGuard on; // a future is in the order of the stream on which it is marked
    if (task_.stream) {
      on.reset_stream(*task_.stream);
    }
    if (over && error_) {
      future->setError(error_);
    } else if (task_.outputs.size() > 1) {
      future->markCompleted(c10::IValue(task_.outputs));
    } else {
      future->markCompleted(
          c10::IValue(task_.outputs.empty() ? std::vector<at::Tensor>() : task_.outputs[0]));
    }
  } catch (const std::exception& e) {
    TORCH_WARN("a callback of the future of ", task_.title, " has failed: ", e.what());
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  refuse_if_parents();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  const bool relies = task_.stream && !task_.blocks;
  bool over = false;
  {
    std::lock_guard<std::mutex> guard(lock_);
    if (future_) {
      return future_;
    }
    c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
    if (task_.outputs.size() > 1) {
      type = c10::ListType::create(type);
    }
    std::vector<c10::Device> devices;
    for (const auto& list : task_.outputs) {
      for (const at::Tensor& tensor : list) {
        if (!tensor.is_cpu() && std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) {
          devices.push_back(tensor.device());
        }
      }
    }
    future = c10::make_intrusive<c10::ivalue::Future>(type, devices);
    over = over_.load(std::memory_order_relaxed);
    if (!over && !relies) {
      completer_->add(c10::intrusive_ptr<Work>::reclaim_copy(this)); // throws if there can be no thread
    }
    future_ = future;
  }
  if (over) {
    mark(true);
  } else if (relies) {
    mark(!rely());
  }
  return future;
}

uint64_t Work::held() const {
  std::lock_guard<std::mutex> guard(lock_);
  uint64_t bytes = 0;
  for (const at::Tensor& tensor : task_.keep) {
    bytes += tensor.nbytes();
  }
  return bytes;
}

bool Work::uses(const c10::StorageImpl* storage) const {
  std::lock_guard<std::mutex> guard(lock_);
  return std::any_of(task_.keep.begin(), task_.keep.end(), [storage](const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl() == storage;
  });
}

bool Work::isCompleted() {
  refuse_if_parents();
  return poll();
}

bool Work::isSuccess() const {
  return over_.load(std::memory_order_acquire) && !error_;
}

std::exception_ptr Work::exception() const {
  return over_.load(std::memory_order_acquire) ? error_ : nullptr;
}

int Work::sourceRank() const {
  TORCH_CHECK(opType_ == c10d::OpType::RECVANYSOURCE || opType_ == c10d::OpType::RECV,
              "sourceRank is only defined for receives");
  TORCH_CHECK(over_.load(std::memory_order_acquire), "sourceRank is known when the receive has ended: call wait first");
  return source_;
}

std::vector<at::Tensor> Work::result() {
  TORCH_CHECK(isCompleted() || (task_.stream && !task_.blocks),
              "the operation has not ended: call wait before result");
  std::vector<at::Tensor> all;
  for (const auto& list : task_.outputs) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

void Work::synchronize() {
  wait();
}

void Work::abort() {
  TORCH_CHECK(false, "a work of tutti cannot be aborted by itself: abort its process group");
}

uint64_t Work::getSequencenumber() const {
  return seq_;
}

uint64_t Work::getCompletionKey() const {
  return key_;
}

milliseconds Work::getTimeout() const {
  return task_.limit;
}

float Work::getDuration() const {
  TORCH_CHECK(over_.load(std::memory_order_acquire),
              "the duration is known when the operation has ended: call wait first");
  return std::chrono::duration<float, std::milli>(ended_ - begun_).count();
}

int Work::code() const {
  return code_;
}

std::vector<int64_t> Work::failed_ranks() const {
  return over_.load(std::memory_order_acquire) ? failed_ : std::vector<int64_t>();
}

void Running::add(c10::intrusive_ptr<Work> work) {
  std::lock_guard<std::mutex> guard(mutex_);
  works_.push_back(std::move(work));
}

c10::intrusive_ptr<Work> Running::remove(const Work* work) noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  auto at = std::find_if(works_.begin(), works_.end(), [work](const auto& other) { return other.get() == work; });
  c10::intrusive_ptr<Work> found;
  if (at != works_.end()) {
    found = std::move(*at);
    works_.erase(at);
    removed_.notify_all();
  }
  return found;
}

bool Running::await_removal(const Work* work, std::chrono::milliseconds limit) {
  if (work == finishing) {
    return true;
  }
  std::unique_lock<std::mutex> guard(mutex_);
  return removed_.wait_for(guard, limit, [this, work] {
    return std::none_of(works_.begin(), works_.end(), [work](const auto& other) { return other.get() == work; });
  });
}

void Running::recovered() noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  era_++;
  error_ = TUTTI_OK;
  missed_ = nullptr;
}

uint64_t Running::era() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return era_;
}

void Running::name(std::string group, std::vector<uint64_t> ranks) {
  uint64_t next = 0;
  const bool same = std::all_of(ranks.begin(), ranks.end(), [&next](uint64_t rank) { return rank == next++; });
  std::lock_guard<std::mutex> guard(mutex_);
  group_ = std::move(group);
  ranks_ = std::move(ranks);
  if (same && group_.empty()) {
    ranks_.clear();
  }
}

std::string Running::of_group(int code, std::string text, std::vector<int64_t> ranks) const {
  std::lock_guard<std::mutex> guard(mutex_);
  if (ranks_.empty() || code == TUTTI_EINVAL) {
    return text;
  }
  text += group_.empty() ? " (" : " (group " + group_ + ": ";
  if (ranks_.size() <= kListed) {
    return text + "its ranks are " + listed(ranks_) + " of the job)";
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  ranks.resize(std::min(ranks.size(), kListed));
  std::vector<uint64_t> places;
  for (int64_t rank : ranks) {
    places.push_back(ranks_.at(rank));
  }
  const bool one = ranks.size() == 1;
  return text + (one ? "its rank " : "its ranks ") + listed(ranks) + (one ? " is " : " are ") + listed(places) +
         " of the job)";
}

void Running::missed(uint64_t era, std::exception_ptr error) noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  if (era == era_ && !missed_) {
    missed_ = std::move(error);
  }
}

void Running::rethrow_missed() {
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    error = std::exchange(missed_, nullptr);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void Running::failed(uint64_t era, int code) noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  if (era == era_ && code != TUTTI_EINVAL && error_ == TUTTI_OK) {
    error_ = code;
  }
}

int Running::error() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return error_;
}

void Running::reap() noexcept {
  bool thorough = false;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    thorough = works_.size() >= full_;
  }
  if (thorough) {
    for (const auto& work : all()) {
      work->poll();
    }
  }
  for (;;) {
    c10::intrusive_ptr<Work> first;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (thorough) {
        full_ = std::max<size_t>(64, 2 * works_.size());
      }
      if (works_.empty()) {
        return;
      }
      first = works_.front();
    }
    if (!first->poll()) {
      return;
    }
    remove(first.get()); // another thread may be finishing it
  }
}

std::vector<c10::intrusive_ptr<Work>> Running::all() {
  std::lock_guard<std::mutex> guard(mutex_);
  return {works_.begin(), works_.end()};
}

// The number of callbacks of works of Completers within which this thread is: 0 unless it is one of
// a Completer.
static thread_local int callbacks = 0;

void Completer::add(c10::intrusive_ptr<Work> work) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto [works, fresh] = works_.try_emplace(callbacks);
  if (fresh) {
    try {
      std::thread thread = start_thread([self = shared_from_this(), depth = callbacks] { self->run(depth); });
      if (callbacks == 0 && !stopping_) {
        thread_ = std::move(thread);
      } else {
        thread.detach();
      }
    } catch (...) {
      works_.erase(works);
      throw;
    }
  }
  works->second.push_back(std::move(work));
  changed_.notify_all();
}

void Completer::stop() noexcept {
  std::thread thread;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
    thread = std::move(thread_);
    changed_.notify_all();
  }
  if (callbacks > 0) {
    if (thread.joinable()) {
      thread.detach();
    }
    return;
  }
  if (thread.joinable()) {
    thread.join();
  }
  std::unique_lock<std::mutex> guard(mutex_);
  changed_.wait(guard, [this] { return works_.empty(); });
}

void Completer::run(int depth) noexcept {
  callbacks = depth + 1;
  std::unique_lock<std::mutex> guard(mutex_);
  auto& all = works_[depth];
  for (;;) {
    if (depth == 0) { // the others are short-lived, so that a chain of callbacks leaves no threads
      changed_.wait(guard, [&] { return stopping_ || !all.empty(); });
    }
    if (all.empty()) {
      works_.erase(depth);
      changed_.notify_all();
      return;
    }
    std::deque<c10::intrusive_ptr<Work>> works = all;
    guard.unlock();
    works[0]->await(ordered_ ? kOrdered : kUnordered);
    works.erase(std::remove_if(works.begin(), works.end(), [](const auto& work) { return !work->poll(); }),
                works.end());
    guard.lock();
    for (const auto& ended : works) {
      all.erase(std::find(all.begin(), all.end(), ended));
    }
    guard.unlock();
    works.clear(); // without the lock: tensors may need the interpreter's
    guard.lock();
  }
}

} // namespace tutti_torch
