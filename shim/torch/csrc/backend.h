// The backend "tutti" of c10d.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api.h"
#include "tensors.h"
#include "work.h"

namespace tutti_torch {

// How long the end of a group waits for each of its operations: the library bounds their end
// itself.
constexpr std::chrono::milliseconds kClose{10000};

// What init_process_group takes as pg_options. An empty text stands for the environment's value or
// the default: the fields are those of tutti_config in tutti.h.
struct Options : c10d::Backend::Options {
  explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("tutti", timeout) {}

  Options(const Options&) = default;

  // A virtual function of newer versions, which split and merge use.
  c10::intrusive_ptr<c10d::Backend::Options> clone() const {
    return c10::make_intrusive<Options>(*this);
  }

  // Takes out what these options have from those of another group of the process and cannot share
  // with it: its port and the address of its metrics, unless it is closed, and the store, in which
  // only the job of the environment and groups that go on without lost ranks meet.
  void part_from(const Options& other, bool closed = false);

  std::string store; // "etcd://host:port" instead of the c10d store
  std::string transport;
  std::string interfaces;
  std::string ports;
  std::string algorithm;
  std::string log_dir;
  std::string metrics;
  std::string on_failure; // "report", "shrink", "retry"
  bool uniform = false;
  int max_procs = 0;
  // The group is the job that the environment describes, in a store that outlives its ranks, and
  // not one that these ranks agree on in the c10d store.
  bool environment = false;
};

// Reports whether ports name a port of which a process has but one.
bool single(const std::string& ports);

class Backend final : public c10d::Backend {
 public:
  using Options = tutti_torch::Options;

  // Joins the group of the ranks that make a Backend over the same store. It returns when all have.
  // With Options::enable_reconfigure it joins no group: reconfigure does.
  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~Backend() override;

  const std::string getBackendName() const override {
    return "tutti";
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // supportsCoalescing stays false: else c10d opens a coalescing for a batch of messages, which
  // needs none, and leaves it open if one of them fails.
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  // These are virtual functions of c10d's Backend from some version on.
  c10::intrusive_ptr<c10d::Work> gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                    const c10d::GatherOptions& opts);
  bool supportsSplitting() const;
  void setTimeout(std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions();
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts);
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank,
                                          const int& size);
  void abort();
  void shutdown();

  // The ranks that remain call shrink, in the same order, and get a new group.
  bool supportsShrinking() const;
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts_override);

  // All ranks call suspend, and later resume. In between the group has no memory, connections or
  // threads, and its operations fail.
  void suspend();
  void resume();

  std::unordered_map<std::string, uint64_t> getMemoryStats();
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override {} // always on
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout);
#ifdef C10D_BACKEND_HAS_HOOKS
  bool supportsAbortHooks() const override;
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;
  bool supportsCompletionHooks() const override;
  void registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t hook_id) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override;
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  c10d::ErrorType getError() override;

  // The members whose handles are given become the group, with new ranks. The others need not take
  // part, nor do they learn of it.
  bool supportsReconfigure() const override;
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif

  // Returns memory on which collectives copy nothing, as a tensor of one dimension.
  at::Tensor allocateTensor(long size, at::TensorOptions options = {});
  bool supportsTensorAlloc(c10::DeviceIndex device);

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
#endif

  // Returns the number of the view, and its ranks.
  std::pair<uint64_t, std::vector<int64_t>> view() const;

  // Membership: see tutti.h. A timeout of 0 is the group's.
  void recover(std::chrono::milliseconds timeout);
  int admit(std::chrono::milliseconds timeout); // returns how many ranks came in
  bool agree(bool yes, std::chrono::milliseconds timeout);

  // Closes the groups of this process. It is called when the interpreter ends.
  static void close_all();

  // Reports whether an operation under way of a group of this process uses a storage.
  static bool uses(const c10::StorageImpl* storage);

 private:
  c10::intrusive_ptr<c10d::Work> launch(Task task);
  c10::intrusive_ptr<Work> begin(Task task);
  c10::intrusive_ptr<Work> start(Task task, tutti_work handle);
  void number(Task& task);
  void place(Task& task);
  void refuse_if_closed(const char* title) const;
  tutti_group group(const char* title) const;
  c10::Stream stream_for(const Task& task, c10::Device device);
  template <class Given>
  void bound(Task& task, const Given& opts) const; // by the options of c10d
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds timeout) const;
  void set_timeout(Task& task, std::chrono::milliseconds timeout) const;
  int64_t bound_of(std::chrono::milliseconds timeout) const;
  static bool exist(); // reports whether this process has a group that is not closed
  tutti_config config(bool further) const;
  c10::intrusive_ptr<Options> options_beside(const c10::intrusive_ptr<c10d::Backend::Options>& opts) const;
  // Makes the group of some ranks of this one, of which this rank is one.
  c10::intrusive_ptr<c10d::Backend> part(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts);
  void extend(Task& task);
  void join();
  tutti_member member() const; // makes it when it is first called
  std::string meet(std::chrono::milliseconds timeout); // in store_; returns what the ranks agree on
  // The join after meet is over, with or without success: no rank that comes later takes that turn.
  // job is its name, if store_ has its keys and no other has that.
  void withdraw(const std::string& job, bool joined) noexcept;
  // Deletes keys in store_, and returns whether it could. After an error the keys stay, and later
  // calls delete nothing.
  bool erase(const std::vector<std::string>& keys) noexcept;
  Staged::Use gathered() const;
  // Waits until store_ has the key or, if ready is not empty, until that holds.
  void wait_for(const std::string& key, std::chrono::steady_clock::time_point end,
                const std::function<bool()>& ready = {});
  void leave_barrier(const std::string& prefix) noexcept;
  // Leaves the group, once. It runs no hooks and no callbacks of futures. What it returns waits for
  // the operations and those, and does not need the Backend.
  std::function<void()> leave();
  void close(); // does both
  void end_forming();

  // Time that is added to the timeouts of operations until the first of them has ended.
  struct Extension {
    std::chrono::milliseconds time;
    c10::intrusive_ptr<Work> first;
  };

  const c10::intrusive_ptr<Options> options_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const bool further_; // the process had a group when it made this one
  std::string prefix_; // of this group's keys in store_
  bool outlives_ = false; // the group goes on without lost ranks
  std::chrono::milliseconds joined_{0}; // what group_ was made with; setTimeout leaves it
  std::atomic<int> replacing_{0}; // calls of reconfigure that have closed group_, and put another there
  std::atomic<tutti_group> group_{0}; // 0: there is none
  std::atomic<bool> closed_{false};
  std::atomic<bool> suspended_{false};
  std::atomic<bool> deletes_{true}; // store_ does

  mutable std::mutex member_mutex_; // protects what follows
  mutable tutti_member member_ = 0;
  mutable std::chrono::milliseconds member_timeout_{0}; // of member_, and of groups that it forms
  int forming_ = 0; // calls of reconfigure that wait for other members

  mutable std::mutex mutex_; // protects what follows
  std::vector<c10::intrusive_ptr<Work>> coalesced_;
  bool coalescing_ = false;
  bool formed_ = false; // by reconfigure
  uint64_t seq_ = 0;
  uint64_t barriers_ = 0; // monitored ones that have begun
  uint64_t shrinks_ = 0;
  std::vector<Extension> extensions_;
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> streams_; // by device, and what they are for

  const std::shared_ptr<std::atomic<uint64_t>> window_bytes_ = std::make_shared<std::atomic<uint64_t>>(0);
  std::shared_ptr<Running> running_ = std::make_shared<Running>();
  // Futures of collectives, which end in their order, and of messages.
  std::shared_ptr<Completer> ordered_ = std::make_shared<Completer>(true);
  std::shared_ptr<Completer> unordered_ = std::make_shared<Completer>(false);
};

} // namespace tutti_torch
