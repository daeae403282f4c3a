#include "window.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <set>
#include <system_error>
#include <thread>

#include "backend.h"
#include "interrupt.h"

namespace tutti_torch {

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// How long the end of a window waits for peers that write to it, the first time and later.
constexpr milliseconds kWriters{10000};
constexpr milliseconds kWritersAgain{10};

void check(int code) {
  if (code != TUTTI_OK) {
    raise(code, api().tutti_last_error());
  }
}

// A window to close, and what counts its bytes until it is.
struct Closing {
  bool close(milliseconds timeout) const noexcept {
    if (api().tutti_window_close(window, std::chrono::nanoseconds(timeout).count()) != TUTTI_OK) {
      return false;
    }
    *counter -= bytes;
    return true;
  }

  tutti_window window;
  uint64_t bytes;
  std::shared_ptr<std::atomic<uint64_t>> counter;
};

std::mutex failed_mutex;
// Those whose close has failed. They keep their memory.
std::vector<Closing>& failed() {
  static auto* all = new std::vector<Closing>(); // lives as long as the process
  return *all;
}

// The waits for the signals of one rank. The first of them waits for the signal after those that
// others have ended with, so that one that fails takes none from those behind it.
class Waits {
 public:
  // Adds a wait behind the others.
  uint64_t enter() {
    std::lock_guard<std::mutex> guard(mutex_);
    open_.insert(++begun_);
    return begun_;
  }

  // Returns the number of the signal that a wait is for, when it is the first; 0 at the end.
  uint64_t number(uint64_t wait, Clock::time_point end) {
    std::unique_lock<std::mutex> guard(mutex_);
    while (!left_.wait_until(guard, std::min(end, Clock::now() + kSlice), [&] { return *open_.begin() == wait; })) {
      guard.unlock();
      check_signals();
      if (Clock::now() >= end) {
        return 0;
      }
      guard.lock();
    }
    return ended_ + 1;
  }

  // Removes a wait. signalled: it has ended with its signal.
  void leave(uint64_t wait, bool signalled) {
    std::lock_guard<std::mutex> guard(mutex_);
    open_.erase(wait);
    ended_ += signalled ? 1 : 0;
    left_.notify_all();
  }

 private:
  std::mutex mutex_; // protects what follows
  std::condition_variable left_;
  std::set<uint64_t> open_;
  uint64_t begun_ = 0;
  uint64_t ended_ = 0; // with a signal
};

} // namespace

void close_windows_again() noexcept {
  std::vector<Closing> again;
  {
    std::lock_guard<std::mutex> guard(failed_mutex);
    again.swap(failed());
  }
  for (Closing& closing : again) {
    if (!closing.close(kWritersAgain)) {
      std::lock_guard<std::mutex> guard(failed_mutex);
      failed().push_back(std::move(closing));
    }
  }
}

// The deleter of a storage whose memory is that of a window, which frees it.
static void of_window(void*) {}

// The memory of a window, and the storage that was moved to it.
struct Window::Memory {
  ~Memory() {
    if (forked()) {
      return;
    }
    WithoutGil released;
    close_windows_again();
    if (Closing closing{handle, bytes, counter}; !closing.close(kWriters)) {
      std::lock_guard<std::mutex> guard(failed_mutex);
      failed().push_back(std::move(closing));
    }
  }

  tutti_window handle = 0;
  void* data = nullptr;
  uint64_t bytes = 0;
  at::ScalarType type = at::kByte;
  std::vector<Waits> waits; // by rank
  std::shared_ptr<std::atomic<uint64_t>> counter;
  c10::Storage storage;                // if the window owns it
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> weak;
  c10::DataPtr old; // the storage's own memory
};

class Window::Errand final : public c10d::Work {
 public:
  Errand(int rank, const char* title)
      : c10d::Work(rank), title_(title),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}
  ~Errand() override {
    if (forked() && thread_.joinable()) { // the thread is the parent's
      thread_.detach();
    } else {
      join();
    }
  }

  void run(const std::function<void()>& body) {
    std::exception_ptr error;
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
    const auto future = future_; // a callback may drop the last reference to this errand
    finish(error);
    ended_ = true;
    if (error) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    }
  }

  void start(std::function<void()> body) {
    thread_ = start_thread([this, body = std::move(body)] { run(body); });
  }

  void join() {
    if (thread_.joinable()) {
      WithoutGil released;
      if (thread_.get_id() == std::this_thread::get_id()) {
        thread_.detach();
      } else {
        thread_.join();
      }
    }
  }

  bool wait(milliseconds timeout) override {
    if (!ended_) {
      refuse_if_forked(title_);
    }
    if (forked()) { // a thread of the parent may hold mutex_ for ever
      if (exception_) {
        std::rethrow_exception(exception_);
      }
      return true;
    }
    WithoutGil released;
    const Clock::time_point end = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
    std::unique_lock<std::mutex> guard(mutex_);
    while (!cv_.wait_until(guard, std::min(end, Clock::now() + kSlice), [this] { return completed_; })) {
      guard.unlock();
      check_signals();
      if (Clock::now() >= end) {
        C10_THROW_ERROR(DistBackendError, c10::str(title_, ": the wait timed out after ",
                                                   std::max<int64_t>(0, timeout.count()),
                                                   " ms; the operation continues"));
      }
      guard.lock();
    }
    if (exception_) {
      std::rethrow_exception(exception_);
    }
    return true;
  }

  void synchronize() override {
    wait(kNoTimeout);
  }

  std::vector<at::Tensor> result() override {
    return {};
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const char* const title_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

Window::Window(std::function<tutti_group()> group, int rank, int size, milliseconds timeout,
               std::function<void()> barrier, std::shared_ptr<std::atomic<uint64_t>> bytes)
    : group_(std::move(group)), rank_(rank), size_(size), timeout_(timeout), barrier_(std::move(barrier)),
      bytes_(std::move(bytes)) {}

Window::~Window() {
  if (forked()) {
    return;
  }
  WithoutGil released;
  finish_errands();
  restore();
}

void Window::tensor_register(const at::Tensor& tensor, bool owning) {
  const char* what = "tutti window: ";
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu(), what,
                    "the tensor must be a dense one in host memory");
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.nbytes() > 0 && tensor.nbytes() == tensor.storage().nbytes(), what,
                    "the tensor must be contiguous, not empty, and not part of a larger one: clone it");
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), what,
                    "the tensor must not be a conjugated or negated view, whose memory has other values: clone it");
  TORCH_CHECK_VALUE(tensor.const_data_ptr() != nullptr, what, "the tensor has no memory, as in FakeTensorMode");
  TORCH_CHECK_VALUE(tensor.storage().data_ptr().get_deleter() != &of_window, what,
                    "the memory of the tensor is registered already: call tensor_deregister first, or clone it");
  WithoutGil released;
  const tutti_group group = group_();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK_VALUE(!memory_, what, "a tensor is registered already: call tensor_deregister first");
  }
  close_windows_again();
  auto memory = std::make_shared<Memory>();
  memory->type = tensor.scalar_type();
  memory->waits = std::vector<Waits>(size_);
  memory->counter = bytes_;
  {
    Interruptible interruptible(api());
    const int code = api().tutti_window_new(group, tensor.nbytes(), nanoseconds_of(timeout_), &memory->handle);
    interruptible.rethrow();
    check(code);
  }
  memory->bytes = tensor.nbytes();
  *bytes_ += memory->bytes;
  check(api().tutti_window_bytes(memory->handle, &memory->data, nullptr));
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  std::memcpy(memory->data, storage->data(), memory->bytes);
  // The window owns the memory until restore. Without a context torch makes no lazy copies of it.
  memory->old = storage->set_data_ptr(c10::DataPtr(memory->data, nullptr, &of_window, tensor.device()));
  if (owning) {
    memory->storage = tensor.storage();
  }
  memory->weak.emplace(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  {
    std::lock_guard<std::mutex> guard(mutex_);
    memory_ = std::move(memory);
  }
  try {
    barrier_(); // every rank's values are there before another one puts
  } catch (...) {
    restore();
    throw;
  }
}

void Window::tensor_deregister() {
  WithoutGil released;
  memory("tensor_deregister", rank_);
  finish_errands();
  barrier_(); // no rank puts any more
  restore();
}

// Gives the storage its own memory, with what the window has. If an operation under way uses the
// window's, the storage stays there, and owns it from then on.
void Window::restore() noexcept {
  std::shared_ptr<Memory> memory;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    memory.swap(memory_);
  }
  if (!memory) {
    return;
  }
  const auto storage = memory->weak->lock();
  if (!storage || storage->data() != memory->data) {
    return;
  }
  if (Backend::uses(storage.get())) {
    memory->storage = {};
    memory->old.clear();
    const auto release = [](void* owner) { delete static_cast<std::shared_ptr<Memory>*>(owner); };
    storage->set_data_ptr_noswap({memory->data, new std::shared_ptr<Memory>(memory), release, at::kCPU});
    return;
  }
  std::memcpy(memory->old.get(), memory->data, memory->bytes);
  storage->set_data_ptr_noswap(std::move(memory->old));
}

std::shared_ptr<Window::Memory> Window::memory(const char* what, int64_t rank) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "tutti window ", what, ": the rank is ", rank, ", expected 0 to ",
                    size_ - 1);
  std::lock_guard<std::mutex> guard(mutex_);
  TORCH_CHECK_VALUE(memory_, "tutti window ", what, ": no tensor is registered: call ",
                    "tensor_register at all ranks first");
  return memory_;
}

int64_t Window::nanoseconds_of(milliseconds timeout) const {
  return std::chrono::nanoseconds(timeout == c10d::kUnsetTimeout ? timeout_ : timeout).count();
}

void Window::finish_errands() noexcept {
  std::vector<c10::intrusive_ptr<Errand>> errands;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    errands.swap(errands_);
  }
  for (const auto& errand : errands) {
    errand->join(); // its timeout bounds it
  }
}

c10::intrusive_ptr<c10d::Work> Window::run(const char* title, bool async, std::function<void()> body) {
  auto errand = c10::make_intrusive<Errand>(rank_, title);
  if (async) {
    errand->start(std::move(body));
    std::vector<c10::intrusive_ptr<Errand>> ended; // its end waits for callbacks, which may need mutex_
    std::lock_guard<std::mutex> guard(mutex_);
    const auto at = std::stable_partition(errands_.begin(), errands_.end(),
                                          [](const auto& other) { return !other->isCompleted(); });
    ended.assign(std::make_move_iterator(at), std::make_move_iterator(errands_.end()));
    errands_.erase(at, errands_.end());
    errands_.push_back(errand);
    return errand;
  }
  Interruptible interruptible(api());
  errand->run(body);
  interruptible.rethrow();
  errand->wait(kNoTimeout); // throws its error
  return errand;
}

c10::intrusive_ptr<c10d::Work> Window::put(const at::Tensor& tensor, int64_t rank, int64_t offset, bool async,
                                           const c10d::PutOptions& opts) {
  WithoutGil released;
  auto window = memory("put", rank);
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu(),
                    "tutti window put: the tensor must be a dense one in host memory");
  TORCH_CHECK_VALUE(tensor.scalar_type() == window->type, "tutti window put: the tensor has type ",
                    tensor.scalar_type(), ", expected that of the registered one, ", window->type);
  const uint64_t item = tensor.element_size();
  const uint64_t elements = window->bytes / item;
  TORCH_CHECK_VALUE(offset >= 0 && static_cast<uint64_t>(offset) <= elements &&
                        static_cast<uint64_t>(tensor.numel()) <= elements - static_cast<uint64_t>(offset),
                    "tutti window put: ", tensor.numel(), " elements at offset ", offset, " do not fit into the ",
                    elements, " elements of the window");
  at::Tensor source = tensor.resolve_conj().resolve_neg().contiguous();
  if (source.storage().data_ptr().get_deleter() == &of_window && source.storage().data() != window->data) {
    source = source.clone(); // that window may end before the put
  }
  const int64_t limit = nanoseconds_of(opts.timeout);
  const auto target = static_cast<int32_t>(rank);
  if (source.numel() > 0) { // begun here: signals that follow come after it
    Interruptible interruptible(api());
    const int code = api().tutti_window_put(window->handle, target, offset * item, source.const_data_ptr(),
                                            source.nbytes(), limit);
    interruptible.check(code, [&] { // given up at once, before source goes
      api().tutti_window_flush(window->handle, target, limit);
    });
  }
  try {
    return run("tutti:put", async, [window, source, target, limit] {
      check(api().tutti_window_flush(window->handle, target, limit));
    });
  } catch (const std::system_error&) { // no thread: the put ends here, before source goes
    Interruptible interruptible(api());
    api().tutti_window_flush(window->handle, target, limit);
    interruptible.rethrow();
    throw;
  }
}

at::Tensor Window::map_remote_tensor(int64_t rank) {
  WithoutGil released;
  auto window = memory("map_remote_tensor", rank);
  const void* data = window->data;
  if (rank != rank_) {
    Interruptible interruptible(api());
    const int code =
        api().tutti_window_map(window->handle, static_cast<int32_t>(rank), nanoseconds_of(timeout_), &data);
    interruptible.rethrow();
    check(code);
  }
  // The tensor keeps the mapping.
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(window->bytes / c10::elementSize(window->type))},
                       [window](void*) {}, at::TensorOptions(window->type));
}

c10::intrusive_ptr<c10d::Work> Window::signal(int64_t rank, bool async, const c10d::SignalOptions& opts) {
  WithoutGil released;
  auto window = memory("signal", rank);
  const int64_t limit = nanoseconds_of(opts.timeout);
  const auto target = static_cast<int32_t>(rank);
  {
    Interruptible interruptible(api());
    interruptible.check(api().tutti_window_signal(window->handle, target, 0, limit));
  }
  return run("tutti:signal", async, [window, target, limit] {
    check(api().tutti_window_flush(window->handle, target, limit));
  });
}

c10::intrusive_ptr<c10d::Work> Window::wait_signal(int64_t rank, bool async, const c10d::WaitSignalOptions& opts) {
  WithoutGil released;
  refuse_if_forked("tutti:wait_signal"); // the waits before this one may be the parent's
  auto window = memory("wait_signal", rank);
  const int64_t limit = nanoseconds_of(opts.timeout);
  const Clock::time_point end =
      limit > 0 ? Clock::now() + std::chrono::nanoseconds(limit) : Clock::time_point::max();
  const auto source = static_cast<int32_t>(rank);
  const uint64_t wait = window->waits[rank].enter();
  try {
    return run("tutti:wait_signal", async, [window, source, wait, limit, end] {
      Waits& waits = window->waits[source];
      bool signalled = false;
      const auto leave = c10::make_scope_exit([&] { waits.leave(wait, signalled); });
      const uint64_t n = waits.number(wait, end);
      if (n == 0) {
        raise(TUTTI_ETIMEOUT, c10::str("tutti:wait_signal: the timeout of ", limit / 1'000'000,
                                       " ms has passed: earlier waits for rank ", source, " have not ended"));
      }
      const int64_t left = std::max<int64_t>(1, std::chrono::nanoseconds(end - Clock::now()).count());
      Interruptible interruptible(api());
      interruptible.check(api().tutti_window_wait_signal(window->handle, source, 0, n, limit > 0 ? left : limit));
      signalled = true;
    });
  } catch (const std::system_error&) { // there is no thread
    window->waits[source].leave(wait, false);
    throw;
  }
}

c10d::WindowAttr Window::get_attr(int64_t rank) {
  memory("get_attr", rank);
  return {c10d::WindowAccessType::UNIFIED};
}

bool Backend::supportsWindow() const {
  return true;
}

c10::intrusive_ptr<c10d::Window> Backend::new_window(const std::optional<at::Tensor>& tensor) {
  const tutti_group group = this->group("tutti new_window");
  auto self = c10::intrusive_ptr<Backend>::reclaim_copy(this);
  auto window = c10::make_intrusive<Window>(
      [self, group] {
        if (self->group("tutti window") != group) {
          raise(TUTTI_ECLOSED, "tutti window: the process group was made anew since new_window: make another window");
        }
        return group;
      },
      rank_, size_, options_->timeout, [self] { self->barrier(c10d::BarrierOptions())->wait(); }, window_bytes_);
  if (tensor) {
    window->tensor_register(*tensor, true);
  }
  return window;
}

} // namespace tutti_torch

#endif
