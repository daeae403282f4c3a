#include "tensors.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace tutti_torch {

namespace {

using at::ScalarType;

template <class... Args>
[[noreturn]] void invalid(const char* what, const Args&... args) {
  throw std::invalid_argument(c10::str("tutti ", what, ": ", args...));
}

// Reports whether an operation at a place can use the memory of tensor.
bool usable(const at::Tensor& tensor, c10::Device place) {
  return (place.is_cpu() ? tensor.is_cpu() : tensor.device() == place) && tensor.is_contiguous() &&
         !tensor.is_conj() && !tensor.is_neg();
}

// Throws std::invalid_argument if elements of an output share memory. Those of an expanded one do.
void check_output(const at::Tensor& tensor) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw std::invalid_argument(c10::str("tutti: elements of an output with strides ", tensor.strides(),
                                         " share memory: clone it"));
  }
}

// Returns the memory of parts as one tensor if they lie one after the other at a place, else none.
std::optional<at::Tensor> joined(const std::vector<at::Tensor>& parts, c10::Device place) {
  if (parts.empty()) {
    return std::nullopt;
  }
  const at::Tensor& first = parts[0];
  int64_t count = 0;
  for (const at::Tensor& part : parts) {
    if (!usable(part, place) || part.storage().unsafeGetStorageImpl() != first.storage().unsafeGetStorageImpl() ||
        part.storage_offset() != first.storage_offset() + count || part.scalar_type() != first.scalar_type()) {
      return std::nullopt;
    }
    count += part.numel();
  }
  return parts.size() == 1 ? first : first.as_strided({count}, {1});
}

const char* name_of(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return "SUM";
    case c10d::ReduceOp::AVG:
      return "AVG";
    case c10d::ReduceOp::PRODUCT:
      return "PRODUCT";
    case c10d::ReduceOp::MIN:
      return "MIN";
    case c10d::ReduceOp::MAX:
      return "MAX";
    case c10d::ReduceOp::BAND:
      return "BAND";
    case c10d::ReduceOp::BOR:
      return "BOR";
    case c10d::ReduceOp::BXOR:
      return "BXOR";
    case c10d::ReduceOp::PREMUL_SUM:
      return "PREMUL_SUM";
    default:
      return "UNUSED";
  }
}

} // namespace

Wire wire_of(ScalarType type) {
  if (const ScalarType part = c10::toRealValueType(type); part != type) { // a complex number is two others
    const Wire wire = wire_of(part);
    return {wire.dtype, 2 * wire.per};
  }
  switch (type) {
    case ScalarType::Char:
      return {TUTTI_INT8, 1};
    case ScalarType::Short:
      return {TUTTI_INT16, 1};
    case ScalarType::Int:
      return {TUTTI_INT32, 1};
    case ScalarType::Long:
      return {TUTTI_INT64, 1};
    case ScalarType::Byte:
      return {TUTTI_UINT8, 1};
    case ScalarType::UInt16:
      return {TUTTI_UINT16, 1};
    case ScalarType::UInt32:
      return {TUTTI_UINT32, 1};
    case ScalarType::UInt64:
      return {TUTTI_UINT64, 1};
    case ScalarType::Float:
      return {TUTTI_FLOAT32, 1};
    case ScalarType::Double:
      return {TUTTI_FLOAT64, 1};
    case ScalarType::Half:
      return {TUTTI_FLOAT16, 1};
    case ScalarType::BFloat16:
      return {TUTTI_BFLOAT16, 1};
    case ScalarType::Float8_e4m3fn:
      return {TUTTI_FLOAT8_E4M3, 1};
    case ScalarType::Float8_e5m2:
      return {TUTTI_FLOAT8_E5M2, 1};
    case ScalarType::Bool:
      return {TUTTI_BOOL, 1};
    default:
      return {TUTTI_UINT8, c10::elementSize(type)};
  }
}

Reduction reduction_of(const char* what, const c10d::ReduceOp& op, ScalarType type) {
  using c10d::ReduceOp;
  // float4 is two numbers in a byte, with which torch cannot calculate.
  const bool packed = c10::isFloatingType(type) && c10::elementSize(type) == 1 && !c10::isFloat8Type(type);
  const bool number = (c10::isFloatingType(type) && !packed) || c10::isIntegralType(type, false);
  Reduction r{0, wire_of(type), std::nullopt, std::nullopt};
  switch (op.op_) {
    case ReduceOp::PREMUL_SUM: {
      const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (factor == nullptr) {
        invalid(what, "ReduceOp.PREMUL_SUM has no factor: make it with torch.distributed._make_nccl_premul_sum");
      }
      r.factor = factor->tensor_factor.defined() ? factor->tensor_factor.reshape({})
                                                 : at::scalar_tensor(factor->double_factor, at::kDouble);
      if (!c10::isComplexType(type) && (!c10::isFloatingType(type) || r.factor->is_complex())) {
        invalid(what, "ReduceOp.PREMUL_SUM multiplies floating-point tensors by a real number, and complex ones by "
                      "any, got a tensor of type ", c10::toString(type), " and a factor of type ",
                c10::toString(r.factor->scalar_type()));
      }
      r.op = TUTTI_SUM;
      break;
    }
    case ReduceOp::SUM:
      r.op = TUTTI_SUM;
      break;
    case ReduceOp::AVG:
      r.op = TUTTI_AVG;
      break;
    case ReduceOp::PRODUCT:
      r.op = TUTTI_PRODUCT;
      break;
    case ReduceOp::MIN:
      r.op = TUTTI_MIN;
      break;
    case ReduceOp::MAX:
      r.op = TUTTI_MAX;
      break;
    case ReduceOp::BAND:
      r.op = TUTTI_BIT_AND;
      break;
    case ReduceOp::BOR:
      r.op = TUTTI_BIT_OR;
      break;
    case ReduceOp::BXOR:
      r.op = TUTTI_BIT_XOR;
      break;
    default:
      invalid(what, "unknown reduction ", static_cast<int>(op.op_));
  }
  const bool adds = r.op == TUTTI_SUM || r.op == TUTTI_AVG;
  const bool bits = r.op == TUTTI_BIT_AND || r.op == TUTTI_BIT_OR || r.op == TUTTI_BIT_XOR;
  bool known = number && !(bits && c10::isFloatingType(type));
  if (type == ScalarType::Bool) { // a sum is "any", a product is "all"
    known = r.op != TUTTI_AVG;
  } else if (c10::isComplexType(type)) {
    known = adds && r.wire.dtype != TUTTI_UINT8; // not bytes, as types that wire_of does not know
  } else if (c10::isFloat8Type(type) && (r.wire.dtype == TUTTI_UINT8 || r.op != TUTTI_SUM || r.factor)) {
    r.as = ScalarType::Float;
    r.wire = wire_of(ScalarType::Float);
  }
  if (!known) {
    invalid(what, "ReduceOp.", name_of(op.op_), " cannot reduce tensors of type ", c10::toString(type));
  }
  return r;
}

void check_dense(const char* what, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    invalid(what, "the tensor is undefined");
  }
  if (tensor.layout() != at::kStrided) {
    invalid(what, "only supports dense tensors, got one with layout ", tensor.layout());
  }
  if (!tensor.is_cpu() && !accepted(tensor.device().type())) {
    invalid(what, "the tensor is on ", tensor.device(), ", expected cpu or cuda");
  }
}

const at::Tensor& only(const char* what, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1) {
    invalid(what, "requires a single tensor, got ", tensors.size());
  }
  check_dense(what, tensors[0]);
  return tensors[0];
}

void check_alike(const char* what, const at::Tensor& like, const std::vector<at::Tensor>& tensors, bool shapes) {
  for (size_t i = 0; i < tensors.size(); i++) {
    check_dense(what, tensors[i]);
    if (tensors[i].scalar_type() != like.scalar_type()) {
      invalid(what, "invalid tensor type at index ", i, ": expected ", c10::toString(like.scalar_type()), ", got ",
              c10::toString(tensors[i].scalar_type()));
    }
    if (shapes && tensors[i].sizes() != like.sizes()) {
      invalid(what, "invalid tensor size at index ", i, ": expected ", like.sizes(), ", got ", tensors[i].sizes());
    }
  }
}

Staged::Staged(const at::Tensor& tensor, c10::Device place, Use use, std::optional<ScalarType> as) {
  if (!as && usable(tensor, place)) {
    memory_ = tensor;
    return;
  }
  if (use & kWrite) {
    check_output(tensor);
    tensors_ = {tensor};
  }
  at::AutoDispatchBelowADInplaceOrView raw;
  copied_ = true;
  memory_ = at::empty(tensor.sizes(), at::TensorOptions().dtype(as.value_or(tensor.scalar_type())).device(place));
  if (use & kRead) {
    memory_.copy_(tensor);
  }
}

Staged::Staged(const std::vector<at::Tensor>& parts, c10::Device place, Use use, std::optional<ScalarType> as) {
  at::AutoDispatchBelowADInplaceOrView raw;
  if (auto whole = joined(parts, place); whole && !as) {
    memory_ = *whole;
    return;
  }
  if (use & kWrite) {
    std::for_each(parts.begin(), parts.end(), check_output);
    tensors_ = parts;
  }
  copied_ = true;
  int64_t count = 0;
  for (const at::Tensor& part : parts) {
    count += part.numel();
  }
  ScalarType type = parts.empty() ? at::kByte : parts[0].scalar_type();
  memory_ = at::empty({count}, at::TensorOptions().dtype(as.value_or(type)).device(place));
  if (use & kRead) {
    int64_t at = 0;
    for (const at::Tensor& part : parts) {
      memory_.narrow(0, at, part.numel()).view(part.sizes()).copy_(part);
      at += part.numel();
    }
  }
}

void Staged::copy() {
  if (!copied_) {
    at::AutoDispatchBelowADInplaceOrView raw;
    memory_ = memory_.clone();
    copied_ = true;
  }
}

tutti_buffer Staged::buffer(Wire wire) const {
  tutti_buffer b{};
  b.data = memory_.numel() == 0 ? nullptr : memory_.data_ptr();
  b.count = static_cast<uint64_t>(memory_.numel()) * wire.per;
  b.dtype = wire.dtype;
  b.device = memory_.is_cpu() ? TUTTI_HOST : memory_.device().index();
  return b;
}

void overflow(const at::Tensor& values, ScalarType type) {
  if (type == ScalarType::Float8_e4m3fn && values.scalar_type() != type) {
    values.masked_fill_(values.abs() > 464, std::numeric_limits<double>::quiet_NaN()); // 464 is rounded to 448
  }
}

void Staged::restore() const {
  if (!tensors_.empty()) {
    overflow(memory_, tensors_[0].scalar_type());
  }
  if (tensors_.size() == 1) {
    tensors_[0].copy_(memory_.view(tensors_[0].sizes()));
    return;
  }
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors_) {
    tensor.copy_(memory_.narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
  }
}

bool overlap(const Staged& a, const Staged& b) {
  const auto* a0 = static_cast<const char*>(a.memory().data_ptr());
  const auto* b0 = static_cast<const char*>(b.memory().data_ptr());
  return a0 < b0 + b.memory().nbytes() && b0 < a0 + a.memory().nbytes();
}

} // namespace tutti_torch
