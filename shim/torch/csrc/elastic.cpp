// Membership of a group, and memory for its collectives.
#include <c10/core/CPUAllocator.h>

#include "backend.h"
#include "interrupt.h"

namespace tutti_torch {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

namespace {

// Memory allocates memory of a group. Tensors may outlive it.
class Memory final : public c10::Allocator {
 public:
  explicit Memory(tutti_group group) : group_(group) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes > 0) {
      if (int code = api().tutti_alloc(group_, bytes, &memory); code != TUTTI_OK) {
        raise(code, api().tutti_last_error());
      }
    }
    return {memory, memory, &free, at::Device(at::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void free(void* memory) {
    api().tutti_free(memory);
  }

  const tutti_group group_;
};

} // namespace

// Returns what bounds a call besides the timeout that group_ was made with, in nanoseconds.
int64_t Backend::bound_of(milliseconds timeout) const {
  const milliseconds limit = timeout.count() > 0 ? timeout : options_->timeout;
  return limit == joined_ || limit.count() <= 0 ? 0 : nanoseconds(limit).count();
}

void Backend::recover(milliseconds timeout) {
  WithoutGil released;
  const tutti_group group = this->group("tutti recover");
  Interruptible interruptible(api());
  const int code = api().tutti_recover(group, bound_of(timeout));
  if (code == TUTTI_OK) { // also when a signal handler has raised meanwhile
    running_->recovered();
  }
  interruptible.check(code);
}

int Backend::admit(milliseconds timeout) {
  WithoutGil released;
  const tutti_group group = this->group("tutti admit");
  Interruptible interruptible(api());
  int32_t admitted = 0;
  interruptible.check(api().tutti_admit(group, bound_of(timeout), &admitted));
  return admitted;
}

bool Backend::agree(bool yes, milliseconds timeout) {
  WithoutGil released;
  const tutti_group group = this->group("tutti agree");
  Interruptible interruptible(api());
  int32_t all = 0;
  interruptible.check(api().tutti_agree(group, yes ? 1 : 0, bound_of(timeout), &all));
  return all != 0;
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
std::shared_ptr<c10::Allocator> Backend::getMemAllocator() {
  return std::make_shared<Memory>(group("tutti mem_allocator"));
}
#endif

} // namespace tutti_torch
