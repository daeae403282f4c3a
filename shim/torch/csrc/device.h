// The memory of CUDA devices that the library uses as it is, in the order of streams.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <initializer_list>
#include <string>

namespace tutti_torch {

// Has tensors on devices of another type taken for those of the CUDA devices with the same numbers.
// Their addresses and the native handles of their streams must be those of the CUDA driver. It is
// for tests, which have a device over a fake driver.
void take_for_cuda(const std::string& type);

// Reports whether operations accept tensors on devices of a type.
bool accepted(c10::DeviceType type);

// Returns where the memory of an operation on tensors is: on their device if it is the same one and
// the library uses its memory, else on the host.
c10::Device place_of(std::initializer_list<at::TensorList> lists);

// Returns the CUDA stream that stream stands for.
void* handle_of(const c10::Stream& stream);

// Reports whether the work of stream goes into a graph.
bool capturing(const c10::Stream& stream);

// Returns the stream of this thread on a device.
c10::Stream current_stream(c10::Device device);

// Returns a stream of the device's pool, of high priority if so asked, for the work of a group. No
// other one that was taken is the same, unless all of the pool were.
c10::Stream take_stream(c10::Device device, bool high);

// Says that a stream that was taken is not used any more.
void give_back(const c10::Stream& stream);

// Has the memory of tensor not used again, when it is freed, before stream has done what it was
// given.
void record_use(const at::Tensor& tensor, const c10::Stream& stream);

} // namespace tutti_torch
