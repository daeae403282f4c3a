#include "jobstore.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <random>

#include "interrupt.h"
#include "work.h"

namespace tutti_torch {

namespace {

using Bytes = std::vector<uint8_t>;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// How long a wait for a key, and another request that may be repeated, goes without a look at
// signals.
constexpr milliseconds kKey{100};
constexpr milliseconds kRequest{1000};
constexpr milliseconds kLongest{8000}; // of requests whose answers take long

// The most bytes of a key of the library's store. A hash stands for a longer one.
constexpr size_t kLongestKey = 248;

// A stored value begins with one of these bytes, because an empty one counts as missing. A sum has
// some random bytes then, so that ranks that write the same sum at the same time differ.
constexpr uint8_t kValue = '=';
constexpr uint8_t kSum = '+';
constexpr size_t kRandom = 8;

Bytes stored(const Bytes& value) {
  Bytes with(1 + value.size(), kValue);
  std::copy(value.begin(), value.end(), with.begin() + 1);
  return with;
}

Bytes stored_sum(int64_t sum) {
  static thread_local std::random_device random;
  Bytes with = {kSum};
  while (with.size() < 1 + kRandom) {
    with.push_back(static_cast<uint8_t>(random()));
  }
  const std::string text = std::to_string(sum);
  with.insert(with.end(), text.begin(), text.end());
  return with;
}

Bytes shown(const Bytes& value) {
  const size_t head = value.empty() ? 0 : value[0] == kSum ? 1 + kRandom : 1;
  return Bytes(value.begin() + static_cast<ptrdiff_t>(std::min(head, value.size())), value.end());
}

// Returns when a wait that begins now ends.
Clock::time_point end_of(milliseconds timeout) {
  return timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
}

} // namespace

JobStore::JobStore(const std::string& address, milliseconds timeout) : c10d::Store(timeout) {
  const Api& tutti = open_library();
  WithoutGil released;
  tutti_config config{};
  config.struct_size = sizeof config;
  config.store = address.empty() ? nullptr : address.c_str();
  config.timeout_ns = timeout.count() > 0 ? nanoseconds(timeout).count() : 0;
  tutti_kv kv{};
  kv.struct_size = sizeof kv;
  Interruptible interruptible(tutti);
  interruptible.check(tutti.tutti_store_open(&config, &kv), [&] { kv.release(kv.ctx); });
  kv_ = std::shared_ptr<tutti_kv>(new tutti_kv(kv), [](tutti_kv* kv) {
    kv->release(kv->ctx);
    delete kv;
  });
}

c10::intrusive_ptr<c10d::Store> JobStore::clone() {
  return c10::make_intrusive<JobStore>(*this);
}

bool JobStore::ask(Function f, const std::string& key, milliseconds time, Bytes& result, const Bytes& value,
                   const Bytes& expected) {
  Bytes room(TUTTI_MAX_VALUE);
  char why[512] = "";
  const std::string name = key.size() <= kLongestKey ? key : "sha1/" + c10::sha1(key).str();
  tutti_kv_call call{};
  call.struct_size = sizeof call;
  call.key = name.c_str();
  call.value = value.data();
  call.value_len = value.size();
  call.expected = expected.data();
  call.expected_len = expected.size();
  call.timeout_ns = std::max<int64_t>(1, nanoseconds(time).count());
  call.result = room.data();
  call.result_cap = room.size();
  call.error = why;
  call.error_cap = sizeof why;
  const int code = f(kv_->ctx, &call);
  if (code == TUTTI_OK) {
    room.resize(call.result_len);
    result = std::move(room);
    return true;
  }
  if (code != TUTTI_ETIMEOUT) {
    C10_THROW_ERROR(DistStoreError, c10::str("the job's store, key ", key, ": ", why));
  }
  return false;
}

bool JobStore::repeat(Function f, const std::string& key, milliseconds pace, Clock::time_point end, Bytes& result,
                      const Bytes& value) {
  for (;;) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    if (ask(f, key, std::clamp(left, milliseconds(1), pace), result, value)) {
      return true;
    }
    check_signals();
    if (Clock::now() >= end) {
      return false;
    }
    if (f != kv_->wait) {
      pace = std::min(2 * pace, kLongest);
    }
  }
}

// Makes a request that does not wait for other ranks. It is repeated unless expected is given: a
// compare and set may have happened.
Bytes JobStore::request(Function f, const std::string& key, const Bytes& value, const Bytes* expected) {
  Bytes result;
  const milliseconds time = timeout_.count() > 0 ? timeout_ : milliseconds(c10d::Store::kDefaultTimeout);
  const bool answered = expected == nullptr ? repeat(f, key, kRequest, end_of(time), result, value)
                                            : ask(f, key, time, result, value, *expected);
  if (!answered) {
    C10_THROW_ERROR(DistStoreError, c10::str("the job's store, key ", key, ": no answer in ", time.count(), " ms"));
  }
  return result;
}

void JobStore::set(const std::string& key, const Bytes& value) {
  request(kv_->set, key, stored(value));
}

Bytes JobStore::exchange(const std::string& key, const Bytes& expected, const Bytes& desired) {
  return request(kv_->compare_and_set, key, desired, &expected);
}

// As TCPStore: an empty expected value stands for a missing key, and a missing key for which
// another one is expected gives the expected one.
Bytes JobStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  Bytes now = peek(key);
  for (;;) {
    if (now.empty() ? !expected.empty() : shown(now) != expected) {
      return now.empty() ? expected : shown(now);
    }
    Bytes then = exchange(key, now, stored(desired));
    if (shown(then) == desired) {
      return desired;
    }
    check_signals();
    now = std::move(then);
  }
}

// Returns the stored value of key, empty if there is none.
Bytes JobStore::peek(const std::string& key) {
  return request(kv_->get, key);
}

// Waits for a key, and returns its stored value.
Bytes JobStore::await(const std::string& key, milliseconds timeout, Clock::time_point end) {
  Bytes value;
  if (!repeat(kv_->wait, key, kKey, end, value)) {
    C10_THROW_ERROR(DistStoreError, c10::str("wait timeout after ", timeout.count(), " ms for key ", key,
                                             " in the job's store"));
  }
  return value;
}

Bytes JobStore::get(const std::string& key) {
  return shown(await(key, timeout_, end_of(timeout_)));
}

int64_t JobStore::add(const std::string& key, int64_t value) {
  Bytes now = peek(key);
  for (;;) {
    const Bytes number = shown(now);
    const int64_t sum = (number.empty() ? 0 : std::stoll(std::string(number.begin(), number.end()))) + value;
    const Bytes desired = stored_sum(sum);
    Bytes then = exchange(key, now, desired);
    if (then == desired) {
      return sum;
    }
    check_signals();
    now = std::move(then);
  }
}

bool JobStore::deleteKey(const std::string& key) {
  const Bytes now = peek(key);
  return !now.empty() && exchange(key, now, {}).empty();
}

bool JobStore::check(const std::vector<std::string>& keys) {
  return std::none_of(keys.begin(), keys.end(), [this](const std::string& key) { return peek(key).empty(); });
}

int64_t JobStore::getNumKeys() {
  C10_THROW_ERROR(NotImplementedError, "the job's store does not count its keys");
}

void JobStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void JobStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const Clock::time_point end = end_of(timeout);
  for (const std::string& key : keys) {
    await(key, timeout, end);
  }
}

} // namespace tutti_torch
