#include "store.h"

#include <sys/random.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <type_traits>

namespace tutti_torch {

namespace {

using Bytes = std::vector<uint8_t>;

// Kept is a store of the library. What ends a rank's keys may come when the store's host has ended:
// a TCPStore then takes one request that it need not answer, and torch writes a warning about
// others; a deletion in a FileStore whose file is gone waits for that until its timeout.
class Kept {
 public:
  explicit Kept(c10::intrusive_ptr<c10d::Store> store) : store(std::move(store)) {
    c10d::Store* inner = this->store.get();
    while (auto* prefix = dynamic_cast<c10d::PrefixStore*>(inner)) {
      inner = prefix->getUnderlyingStore().get();
    }
    fragile_ = dynamic_cast<c10d::TCPStore*>(inner) != nullptr || dynamic_cast<c10d::FileStore*>(inner) != nullptr;
  }

  // Gives a key an empty value, which stands for a missing one, or deletes it.
  void remove(const std::string& key) {
    if (fragile_ || !erase(key)) {
      store->set(key, Bytes());
    }
  }

  const c10::intrusive_ptr<c10d::Store> store;

 private:
  // Returns false if the store cannot, and throws if the store has failed.
  bool erase(const std::string& key) {
    try {
      store->deleteKey(key);
      return true;
    } catch (const c10::DistError&) {
      throw;
    } catch (const std::exception&) {
      return false;
    }
  }

  bool fragile_ = false;
};

Bytes bytes(const void* data, uint64_t size) {
  const auto* first = static_cast<const uint8_t*>(data);
  return size == 0 ? Bytes() : Bytes(first, first + size);
}

// Runs f(kept, key) and turns an exception into a code and a text.
template <class F>
int guarded(void* ctx, tutti_kv_call* call, F f) noexcept {
  try {
    f(*static_cast<Kept*>(ctx), std::string(call->key));
    return TUTTI_OK;
  } catch (const std::exception& e) {
    std::snprintf(call->error, call->error_cap, "%s", e.what());
  } catch (...) {
    std::snprintf(call->error, call->error_cap, "unknown exception");
  }
  return TUTTI_EINTERNAL;
}

void answer(tutti_kv_call* call, const Bytes& value) {
  TORCH_CHECK(value.size() <= call->result_cap, "the value of ", call->key, " has ", value.size(), " bytes, more than ",
              call->result_cap);
  std::copy(value.begin(), value.end(), static_cast<uint8_t*>(call->result));
  call->result_len = value.size();
}

int set(void* ctx, tutti_kv_call* call) {
  return guarded(ctx, call, [&](Kept& kept, const std::string& key) {
    if (call->value_len > 0) {
      kept.store->set(key, bytes(call->value, call->value_len));
    } else {
      kept.remove(key);
    }
  });
}

int get(void* ctx, tutti_kv_call* call) {
  return guarded(ctx, call, [&](Kept& kept, const std::string& key) {
    answer(call, peek(*kept.store, key));
  });
}

int compare_and_set(void* ctx, tutti_kv_call* call) {
  return guarded(ctx, call, [&](Kept& kept, const std::string& key) {
    answer(call, kept.store->compareSet(key, bytes(call->expected, call->expected_len),
                                        bytes(call->value, call->value_len)));
  });
}

void release(void* ctx) {
  delete static_cast<Kept*>(ctx);
}

// Newer stores can be cloned.
template <class S>
auto clone(S& store, int) -> decltype(store.clone()) {
  return store.clone();
}

template <class S>
c10::intrusive_ptr<S> clone(S&, long) {
  return {};
}

} // namespace

Bytes peek(c10d::Store& store, const std::string& key) {
  static const Bytes none = {0}; // is no value of the library; stores give it back for a missing key
  Bytes value = store.compareSet(key, none, none);
  return value == none ? Bytes() : value;
}

tutti_kv callbacks_of(const c10::intrusive_ptr<c10d::Store>& store) {
  tutti_kv kv{};
  kv.struct_size = sizeof kv;
  kv.ctx = new Kept(store);
  kv.set = set;
  kv.get = get;
  kv.compare_and_set = compare_and_set;
  kv.release = release;
  return kv;
}

std::string hex_of_random_bytes(size_t n) {
  std::vector<unsigned char> raw(n);
  TORCH_CHECK(getentropy(raw.data(), n) == 0, "cannot get random bytes from the system");
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (unsigned char byte : raw) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

c10::intrusive_ptr<c10d::Store> another(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    if (auto other = clone(*store, 0)) {
      return other;
    }
  } catch (const std::exception&) { // a store in Python, for example
  }
  return store;
}

c10::intrusive_ptr<c10d::Store> without_prefixes(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store);
  return prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
}

} // namespace tutti_torch
