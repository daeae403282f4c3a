#include "device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <type_traits>
#include <unordered_map>

#include "api.h"

namespace tutti_torch {

namespace {

using c10::impl::VirtualGuardImpl;

// The type of devices that are taken for CUDA devices, besides those.
std::atomic<c10::DeviceType> also{c10::DeviceType::CUDA};

// Whether the library uses the memory of a device, by its number: it was asked for these.
enum Known : int8_t { kUnknown, kHost, kDirect };
std::array<std::atomic<Known>, 64> known{};

// How many streams a pool of CUDA has. It gives one after the other, also those that are in use.
constexpr int kPool = 32;

std::mutex taken_mutex;
// How often each stream was taken.
std::unordered_map<c10::Stream, int>& taken() {
  static auto* all = new std::unordered_map<c10::Stream, int>(); // lives as long as the process
  return *all;
}

// Older versions of torch do not give the CUDA stream of a stream, nor tell whether it is captured.
template <class Guard>
auto handle(const Guard& guard, const c10::Stream& stream, int) -> decltype(guard.getStreamNativeHandle(stream)) {
  return guard.getStreamNativeHandle(stream);
}
template <class Guard>
std::nullptr_t handle(const Guard&, const c10::Stream&, long) {
  return nullptr;
}
template <class Guard>
auto captured(const Guard& guard, const c10::Stream& stream, int) -> decltype(guard.isStreamCapturing(stream)) {
  return guard.isStreamCapturing(stream);
}
template <class Guard>
bool captured(const Guard&, const c10::Stream&, long) {
  return false;
}

constexpr bool kHandles = std::is_same_v<
    void*, decltype(handle(std::declval<const VirtualGuardImpl&>(), std::declval<const c10::Stream&>(), 0))>;

// Reports whether the library uses the memory of a device as it is.
bool direct(c10::Device device) {
  const auto number = static_cast<size_t>(device.index());
  if (!kHandles || number >= known.size() || !accepted(device.type())) {
    return false;
  }
  Known is = known[number].load();
  if (is == kUnknown) {
    is = api().tutti_has(c10::str("cuda:", number).c_str()) == 1 ? kDirect : kHost;
    known[number].store(is);
    if (is == kHost) {
      TORCH_WARN("tutti cannot use the memory of ", device, ": operations on it copy through host memory. "
                 "tutti doctor looks for the reason.");
    }
  }
  return is == kDirect;
}

} // namespace

void take_for_cuda(const std::string& type) {
  also.store(c10::Device(type).type());
}

bool accepted(c10::DeviceType type) {
  return type == c10::DeviceType::CUDA || type == also.load();
}

c10::Device place_of(std::initializer_list<at::TensorList> lists) {
  const at::Tensor* first = nullptr;
  for (const at::TensorList& list : lists) {
    for (const at::Tensor& tensor : list) {
      if (!tensor.defined() || tensor.is_cpu()) {
        return at::kCPU;
      }
      if (first == nullptr) {
        first = &tensor;
      } else if (tensor.device() != first->device()) {
        return at::kCPU;
      }
    }
  }
  return first != nullptr && direct(first->device()) ? first->device() : c10::Device(at::kCPU);
}

void* handle_of(const c10::Stream& stream) {
  return handle(VirtualGuardImpl(stream.device_type()), stream, 0);
}

bool capturing(const c10::Stream& stream) {
  return captured(VirtualGuardImpl(stream.device_type()), stream, 0);
}

c10::Stream current_stream(c10::Device device) {
  return VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream take_stream(c10::Device device, bool high) {
  const VirtualGuardImpl guard(device.type());
  std::lock_guard<std::mutex> lock(taken_mutex);
  c10::Stream stream = guard.getStreamFromGlobalPool(device, high);
  for (int drawn = 1; drawn < kPool && taken().count(stream) != 0; drawn++) {
    stream = guard.getStreamFromGlobalPool(device, high);
  }
  taken()[stream]++;
  return stream;
}

void give_back(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(taken_mutex);
  if (const auto found = taken().find(stream); --found->second == 0) {
    taken().erase(found);
  }
}

void record_use(const at::Tensor& tensor, const c10::Stream& stream) {
  if (tensor.device() == stream.device()) {
    VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

} // namespace tutti_torch
