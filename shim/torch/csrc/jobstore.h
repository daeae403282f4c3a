// The job's own store as a store of c10d.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "api.h"

namespace tutti_torch {

// A JobStore is a map that the ranks of a job share, in the store that TUTTI_STORE names. No rank
// hosts it, so that it outlives all of them.
class JobStore final : public c10d::Store {
 public:
  // Connects to the store of the job that the environment describes; address overrides TUTTI_STORE
  // unless it is empty.
  JobStore(const std::string& address, std::chrono::milliseconds timeout);

  using c10d::Store::compareSet;
  using c10d::Store::set;

  c10::intrusive_ptr<c10d::Store> clone(); // a virtual function of newer versions
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  using Bytes = std::vector<uint8_t>;
  using Clock = std::chrono::steady_clock;
  using Function = int (*)(void*, tutti_kv_call*);

  // Makes a request. It returns false when time is up, and throws after other failures.
  bool ask(Function f, const std::string& key, std::chrono::milliseconds time, Bytes& result,
           const Bytes& value = {}, const Bytes& expected = {});
  // Makes a request again after each pace, and runs the handlers of signals in between. It returns
  // false if there was no result until end.
  bool repeat(Function f, const std::string& key, std::chrono::milliseconds pace, Clock::time_point end,
              Bytes& result, const Bytes& value = {});
  Bytes request(Function f, const std::string& key, const Bytes& value = {}, const Bytes* expected = nullptr);
  Bytes await(const std::string& key, std::chrono::milliseconds timeout, Clock::time_point end);
  Bytes peek(const std::string& key);
  // Sets the stored value of key to desired if it is expected, and returns the resulting one.
  Bytes exchange(const std::string& key, const Bytes& expected, const Bytes& desired);

  std::shared_ptr<tutti_kv> kv_;
};

} // namespace tutti_torch
