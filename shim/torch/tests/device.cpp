// A device of torch, "privateuseone", for tests only. Its memory and its streams are those of the
// CUDA driver that is loaded: the fake one of device/cuda/fake. So an operation of the backend on
// its tensors takes the whole road of a CUDA tensor: torch, the backend, libtutti.so, libcuda.so.1.
//
// It has what the tests need of a device: an allocator that uses memory again as that of CUDA does,
// streams, events, and copies, fills, sums and products as work of streams. What a kernel would do,
// a function of the host does, when the stream has come to it.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
constexpr int kDevices = 4, kPool = 4, kNotReady = 600;

// What is used of the driver.
#define DRIVER(X)                                                       \
  X(cuInit, (unsigned))                                                 \
  X(cuDevicePrimaryCtxRetain, (void**, int))                            \
  X(cuCtxPushCurrent_v2, (void*))                                       \
  X(cuCtxPopCurrent_v2, (void**))                                       \
  X(cuMemAlloc_v2, (uint64_t*, size_t))                                 \
  X(cuMemHostAlloc, (void**, size_t, unsigned))                         \
  X(cuStreamCreate, (void**, unsigned))                                 \
  X(cuStreamQuery, (void*))                                             \
  X(cuStreamIsCapturing, (void*, int*))                                 \
  X(cuThreadExchangeStreamCaptureMode, (int*))                          \
  X(cuStreamBeginCapture_v2, (void*, int))                              \
  X(cuStreamEndCapture, (void*, void**))                                \
  X(cuGraphInstantiateWithFlags, (void**, void*, unsigned long long))   \
  X(cuGraphLaunch, (void*, void*))                                      \
  X(cuStreamWaitValue64_v2, (void*, uint64_t, uint64_t, unsigned))      \
  X(cuStreamWriteValue64_v2, (void*, uint64_t, uint64_t, unsigned))     \
  X(cuLaunchHostFunc, (void*, void (*)(void*), void*))
#define FIELD(name, args) int(*name) args;
struct {
  DRIVER(FIELD)
} cu;
void* (*contents)(uint64_t, size_t); // where the host finds memory of a device

#define CU(call)                                             \
  do {                                                       \
    const int result_ = (call);                              \
    TORCH_CHECK(result_ == 0, #call, " gives ", result_);    \
  } while (0)

// Relaxed allows calls beside a capture that are no part of it, as torch's own allocator does.
struct Relaxed {
  int mode = 2; // CU_STREAM_CAPTURE_MODE_RELAXED; then the thread's
  Relaxed() {
    CU(cu.cuThreadExchangeStreamCaptureMode(&mode));
  }
  ~Relaxed() {
    cu.cuThreadExchangeStreamCaptureMode(&mode);
  }
};

struct Gpu {
  void* context = nullptr;
  std::vector<void*> streams; // by number; 0 is the default stream
};
std::mutex mutex; // protects what follows
Gpu gpus[kDevices];

thread_local int device = 0;
thread_local c10::StreamId current[kDevices] = {};

// In makes the context of a device current.
struct In {
  explicit In(int number) {
    std::lock_guard<std::mutex> guard(mutex);
    Gpu& gpu = gpus[number];
    if (gpu.context == nullptr) {
      CU(cu.cuDevicePrimaryCtxRetain(&gpu.context, number));
      gpu.streams.push_back(nullptr);
    }
    CU(cu.cuCtxPushCurrent_v2(gpu.context));
  }
  ~In() {
    void* context;
    cu.cuCtxPopCurrent_v2(&context);
  }
};

void* handle_of(int number, c10::StreamId id) {
  In in(number);
  std::lock_guard<std::mutex> guard(mutex);
  return gpus[number].streams.at(id);
}

c10::StreamId new_stream(int number) {
  In in(number);
  Relaxed relaxed;
  void* stream;
  CU(cu.cuStreamCreate(&stream, 1));
  std::lock_guard<std::mutex> guard(mutex);
  gpus[number].streams.push_back(stream);
  return static_cast<c10::StreamId>(gpus[number].streams.size()) - 1;
}

// Gives the streams of a pool one after the other, as torch does of CUDA's, which has more.
c10::StreamId pooled_stream(int number, bool high) {
  static std::mutex drawing; // protects what follows
  static std::vector<c10::StreamId> pools[kDevices][2];
  static size_t drawn[kDevices][2] = {};
  std::lock_guard<std::mutex> guard(drawing);
  std::vector<c10::StreamId>& pool = pools[number][high];
  if (pool.size() < kPool) {
    pool.push_back(new_stream(number));
  }
  return pool[drawn[number][high]++ % kPool];
}

bool idle(int number, c10::StreamId id) {
  void* stream = handle_of(number, id);
  In in(number);
  const int result = cu.cuStreamQuery(stream);
  TORCH_CHECK(result == 0 || result == kNotReady, "cuStreamQuery gives ", result);
  return result == 0;
}

bool captured(int number, c10::StreamId id) {
  void* stream = handle_of(number, id);
  In in(number);
  int status;
  CU(cu.cuStreamIsCapturing(stream, &status));
  return status != 0;
}

// Has a stream run a function. A graph keeps it.
void launch(int number, c10::StreamId id, std::function<void()> work) {
  const bool graph = captured(number, id);
  void* stream = handle_of(number, id);
  In in(number);
  if (graph) {
    CU(cu.cuLaunchHostFunc(
        stream,
        [](void* arg) { (*static_cast<std::function<void()>*>(arg))(); },
        new std::function<void()>(std::move(work))));
    return;
  }
  CU(cu.cuLaunchHostFunc(
      stream,
      [](void* arg) {
        std::unique_ptr<std::function<void()>> work(static_cast<std::function<void()>*>(arg));
        (*work)();
      },
      new std::function<void()>(std::move(work))));
}

// A Word is pinned memory that streams wait for. Its values only grow.
struct Word {
  std::atomic<uint64_t>* at;
  uint64_t last = 0;
};
std::vector<Word> words; // that are free

Word take_word(int number) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    if (!words.empty()) {
      Word word = words.back();
      words.pop_back();
      return word;
    }
  }
  In in(number);
  Relaxed relaxed;
  void* at;
  CU(cu.cuMemHostAlloc(&at, 8, 3));
  static_cast<std::atomic<uint64_t>*>(at)->store(0);
  return {static_cast<std::atomic<uint64_t>*>(at)};
}

struct Event {
  explicit Event(Word word) : word(word) {}
  Event(const Event&) = delete;

  Word word;

  bool reached() const {
    return word.at->load() >= word.last;
  }
  // A word that a stream is still to write cannot be used again.
  ~Event() {
    if (reached()) {
      std::lock_guard<std::mutex> guard(mutex);
      words.push_back(word);
    }
  }
};

// In a graph, which is of one stream here, an event is nothing.
std::unique_ptr<Event> record(int number, c10::StreamId id) {
  auto event = std::make_unique<Event>(take_word(number));
  if (captured(number, id)) {
    return event;
  }
  event->word.last++;
  void* stream = handle_of(number, id);
  In in(number);
  CU(cu.cuStreamWriteValue64_v2(stream, reinterpret_cast<uint64_t>(event->word.at), event->word.last, 0));
  return event;
}

// The allocator gives the memory of the size that was freed last: an operation that uses memory
// after its end finds what is written there next.
struct Memory final : c10::Allocator {
  struct Block {
    int number;
    uint64_t at;
    size_t size;
    c10::StreamId stream;            // that it was made for
    std::set<c10::StreamId> streams; // others that use it
    std::unique_ptr<Event> end;      // of what stream had when it was freed, which other streams wait for
    std::vector<std::unique_ptr<Event>> ends;
  };

  c10::DataPtr allocate(size_t n) override {
    const int number = device;
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(number));
    if (n == 0) {
      return {nullptr, nullptr, &forget, where};
    }
    Block* block = nullptr;
    {
      std::lock_guard<std::mutex> guard(mutex);
      for (auto at = freed().begin(); at != freed().end(); ++at) {
        Block& b = **at;
        bool usable = b.number == number && b.size == n && (b.stream == current[number] || b.end->reached());
        for (const auto& end : b.ends) {
          usable = usable && end->reached();
        }
        if (usable) {
          block = *at;
          freed().erase(at);
          break;
        }
      }
    }
    if (block == nullptr) {
      block = new Block{number, 0, n, 0, {}, {}, {}};
      In in(number);
      Relaxed relaxed;
      CU(cu.cuMemAlloc_v2(&block->at, n));
    }
    block->stream = current[number];
    block->streams.clear();
    block->end.reset(); // without the lock, as the others
    block->ends.clear();
    return {reinterpret_cast<void*>(block->at), block, &free, where};
  }

  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "not on this device");
  }

  static std::vector<Block*>& freed() {
    static auto* all = new std::vector<Block*>();
    return *all;
  }
  static void forget(void*) {}
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    block->end = record(block->number, block->stream);
    for (c10::StreamId stream : block->streams) {
      block->ends.push_back(record(block->number, stream));
    }
    std::lock_guard<std::mutex> guard(mutex);
    freed().insert(freed().begin(), block);
  }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(device)};
  }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < kDevices, "there is no device ", d);
    device = d.index() < 0 ? device : d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    device = d.index() < 0 ? device : d.index();
  }
  c10::Stream getStream(c10::Device d) const override {
    const int number = d.index() < 0 ? device : d.index();
    return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(number)}, current[number]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool high) const override {
    return c10::Stream(c10::Stream::UNSAFE, d, pooled_stream(d.index(), high));
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, d, new_stream(d.index()));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const c10::Stream old = getStream(s.device());
    current[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override {
    return handle_of(s.device_index(), s.id());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto next = ::record(s.device_index(), s.id());
    delete static_cast<Event*>(*event);
    *event = next.release();
  }
  void block(void* event, const c10::Stream& s) const override {
    const auto* e = static_cast<Event*>(event);
    void* stream = handle_of(s.device_index(), s.id());
    In in(s.device_index());
    CU(cu.cuStreamWaitValue64_v2(stream, reinterpret_cast<uint64_t>(e->word.at), e->word.last, 0));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->reached();
  }
  void synchronizeEvent(void* event) const override {
    while (!queryEvent(event)) {
      std::this_thread::yield();
    }
  }
  bool isStreamCapturing(const c10::Stream& s) const override {
    return captured(s.device_index(), s.id());
  }
  bool queryStream(const c10::Stream& s) const override {
    return idle(s.device_index(), s.id());
  }
  void synchronizeStream(const c10::Stream& s) const override {
    while (!queryStream(s)) {
      std::this_thread::yield();
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    if (auto* block = static_cast<Memory::Block*>(data.get_context())) {
      std::lock_guard<std::mutex> guard(mutex);
      block->streams.insert(s.id());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Returns tensor as the host sees it: as it is, or the contents of the device's memory.
at::Tensor seen(const at::Tensor& tensor) {
  if (tensor.is_cpu() || tensor.numel() == 0) {
    return tensor.is_cpu() ? tensor : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  }
  size_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  void* at = contents(reinterpret_cast<uint64_t>(tensor.data_ptr()), (last + 1) * tensor.element_size());
  TORCH_CHECK(at != nullptr, "the memory of a tensor is not allocated");
  return at::from_blob(at, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// Has the current stream of a device do what a kernel would do, which does not keep the memory.
void kernel(const at::Tensor& on, std::function<void()> work) {
  launch(on.device().index(), current[on.device().index()], [work = std::move(work)] {
    c10::InferenceMode unseen_by_autograd;
    work();
  });
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(where.value_or(c10::Device(kType)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool>) {
  const c10::DeviceGuard guard(where.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           kKeys, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

// Like CUDA's copies: one to the host waits for the stream, unless it may not block.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const at::Tensor from = self.is_cpu() ? self.clone() : seen(self), to = seen(dst);
  const at::Tensor& on = self.is_cpu() ? dst : self;
  const c10::StreamId stream = current[on.device().index()];
  kernel(on, [from, to] { to.copy_(from); });
  if (dst.is_cpu() && !non_blocking) {
    while (!idle(on.device().index(), stream)) {
      std::this_thread::yield();
    }
  }
  return dst;
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  kernel(self, [to = seen(self), value] { to.fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) {
  return fill(self, 0);
}

at::Tensor& add(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  kernel(self, [to = seen(self), from = seen(other), alpha] { to.add_(from, alpha); });
  return self;
}

at::Tensor& multiply(at::Tensor& self, const at::Tensor& other) {
  kernel(self, [to = seen(self), from = seen(other)] { to.mul_(from); });
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_copy_from", copy_from);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("add_.Tensor", add);
  m.impl("mul_.Tensor", multiply);
}

// The words of gates, which streams wait for until a test opens them.
std::vector<Word> gates;

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Finds the driver, which the process has loaded. It returns an error, or NULL.
EXPORT const char* device_open(const char* kernels) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    return "libcuda.so.1 is not loaded";
  }
#define LOOK_UP(name, args) \
  if ((cu.name = reinterpret_cast<decltype(cu.name)>(dlsym(library, #name))) == nullptr) return dlerror();
  DRIVER(LOOK_UP)
  contents = reinterpret_cast<decltype(contents)>(dlsym(library, "fake_bytes"));
  auto load = reinterpret_cast<const char* (*)(const char*)>(dlsym(library, "fake_kernels"));
  auto configure = reinterpret_cast<void (*)(int, int, int, int, int, int, int)>(dlsym(library, "fake_configure"));
  configure(kDevices, 1, 9, 0, 0, 100, 0);
  if (const char* why = load(kernels)) {
    return why;
  }
  return cu.cuInit(0) == 0 ? nullptr : "cuInit fails";
}

// Chooses the device of this thread.
EXPORT void device_set(int number) {
  device = number;
  In in(number);
}

EXPORT int64_t device_new_stream() {
  return new_stream(device);
}

// Makes a stream the current one, and returns the number of the one before.
EXPORT int64_t device_use_stream(int64_t id) {
  return std::exchange(current[device], id);
}

EXPORT int device_idle(int64_t id) {
  return idle(device, id);
}

// Begins to record what the current stream of this thread is given, and ends that with a graph.
EXPORT void device_begin_capture() {
  void* stream = handle_of(device, current[device]);
  In in(device);
  CU(cu.cuStreamBeginCapture_v2(stream, 0));
}

EXPORT void* device_end_capture() {
  void* stream = handle_of(device, current[device]);
  In in(device);
  void *graph, *executable;
  CU(cu.cuStreamEndCapture(stream, &graph));
  CU(cu.cuGraphInstantiateWithFlags(&executable, graph, 0));
  return executable;
}

EXPORT void device_launch(void* graph) {
  void* stream = handle_of(device, current[device]);
  In in(device);
  CU(cu.cuGraphLaunch(graph, stream));
}

// Has the current stream wait for a gate.
EXPORT int device_gate() {
  Word word = take_word(device);
  word.last++;
  void* stream = handle_of(device, current[device]);
  {
    In in(device);
    CU(cu.cuStreamWaitValue64_v2(stream, reinterpret_cast<uint64_t>(word.at), word.last, 0));
  }
  std::lock_guard<std::mutex> guard(mutex);
  gates.push_back(word);
  return static_cast<int>(gates.size()) - 1;
}

EXPORT void device_open_gate(int number) {
  std::lock_guard<std::mutex> guard(mutex);
  gates[number].at->store(gates[number].last);
}
