// How tensors travel: as which elements, and from which memory.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>
#include <vector>

#include "api.h"
#include "device.h"

namespace tutti_torch {

// Elements of Tutti that stand for one element of a tensor.
struct Wire {
  int32_t dtype;
  uint64_t per;
};

// Returns the elements as which a data type is moved.
Wire wire_of(at::ScalarType type);

// How elements of a tensor are reduced.
struct Reduction {
  int32_t op;
  Wire wire;
  std::optional<at::ScalarType> as; // the type in which they are reduced, if it is another one
  std::optional<at::Tensor> factor; // multiplies the input
};

// Returns how op reduces tensors of a type; what is the operation's name. It throws
// std::invalid_argument if there is no such reduction.
Reduction reduction_of(const char* what, const c10d::ReduceOp& op, at::ScalarType type);

// Throws std::invalid_argument unless tensor is dense and on a device that what can use.
void check_dense(const char* what, const at::Tensor& tensor);

// Throws std::invalid_argument unless there is exactly one tensor, and it is dense.
const at::Tensor& only(const char* what, const std::vector<at::Tensor>& tensors);

// Throws std::invalid_argument unless all tensors are dense and have the data type of like and, if
// shapes is true, its shape.
void check_alike(const char* what, const at::Tensor& like, const std::vector<at::Tensor>& tensors, bool shapes);

// Contiguous memory that stands for a tensor, or for several one after the other: on the host, or
// on a device whose memory the library uses. Copies on a device are in the order of this thread's
// stream there.
class Staged {
 public:
  enum Use { kRead = 1, kWrite = 2, kReadWrite = 3 };

  Staged() = default;

  // Makes memory for tensor at a place (place_of): its own if possible, else a copy, which holds
  // its elements if use says that they are read. It throws std::invalid_argument if elements that
  // are to be written share memory.
  Staged(const at::Tensor& tensor, c10::Device place, Use use, std::optional<at::ScalarType> as = std::nullopt);

  // Makes memory for several tensors of one data type.
  Staged(const std::vector<at::Tensor>& parts, c10::Device place, Use use,
         std::optional<at::ScalarType> as = std::nullopt);

  // Replaces the memory by a copy.
  void copy();

  bool copied() const {
    return copied_;
  }
  const at::Tensor& memory() const {
    return memory_;
  }

  tutti_buffer buffer(Wire wire) const;

  // Writes the memory to the tensors, if it is a copy.
  void restore() const;

 private:
  at::Tensor memory_;
  std::vector<at::Tensor> tensors_;
  bool copied_ = false;
};

// Makes values NaN that a type is too small for, if it has no infinity: torch would make them its
// largest. So it is in a sum.
void overflow(const at::Tensor& values, at::ScalarType type);

// Reports whether two pieces of memory share a byte.
bool overlap(const Staged& a, const Staged& b);

} // namespace tutti_torch
