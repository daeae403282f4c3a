// Works of c10d over works of Tutti.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "api.h"
#include "device.h"
#include "hooks.h"

namespace tutti_torch {

class Completer;
class Running;

// Throws the exception that c10d uses for a code: ValueError for an argument, else a
// DistBackendError.
[[noreturn]] void raise(int code, const std::string& text);

// Throws in a forked child: the works, and who holds the locks, are those of the parent.
void refuse_if_forked(const char* title);

// What an operation is made of.
struct Task {
  Task(c10d::OpType type, const char* title) : type(type), title(title) {}

  c10d::OpType type;
  const char* title;                            // "tutti:all_reduce", for the profiler
  std::vector<tutti_op> ops;                    // run one after the other
  std::vector<at::Tensor> inputs;               // shown by the profiler
  std::vector<at::Tensor> keep;                 // the memory of ops
  std::function<void()> after; // puts results into outputs, at the end, or on stream; may be empty
  std::vector<std::vector<at::Tensor>> outputs; // what the future gives; the work holds them
  std::chrono::milliseconds limit{0};           // how long the operation may run
  std::chrono::milliseconds timeout{0};         // the same, 0 if it is the group's
  bool waits = false;                           // the program waits for the end before it goes on
  std::optional<c10::Stream> stream;            // in whose order ops use the memory of a device
  bool blocks = false;                          // with stream: a wait is one of the host, not of a stream

  bool message() const {
    return type == c10d::OpType::SEND || type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
  }

  // Reports whether the task is one small operation on the memory of the host.
  bool brief() const;

  // Returns the device whose memory the operations use, if they do.
  std::optional<c10::Device> device() const;

  // Puts results into outputs. What it throws is the outcome.
  void end();
};

// A Work is one Task under way. It may be used by several threads.
//
// A task with a stream is in the order of that stream: wait makes the stream of the calling thread
// wait, and the host goes on. If the operation fails after that, Running::missed is told.
class Work final : public c10d::Work {
 public:
  // completer marks futures: that of collectives or that of messages of the group.
  Work(int rank, uint64_t seq, Task task, std::shared_ptr<Completer> completer, std::shared_ptr<Running> running);
  ~Work() override;

  // Starts the operations, unless handle is the only one, and adds the work to running. If one of
  // them cannot be started, it throws.
  void start(tutti_group group, tutti_work handle);

  bool isCompleted() override; // throws in a forked child, unless the end was noticed before
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;
  float getDuration() const override; // in milliseconds, from the start until the end was noticed

  // These are virtual functions of c10d's Work from some version on.
  uint64_t getCompletionKey() const;
  std::chrono::milliseconds getTimeout() const;

  // The code of the outcome, and the ranks that failed, were waited for or disagree. The operation
  // must be over.
  int code() const;
  std::vector<int64_t> failed_ranks() const;

  // Waits at most this long, and reports whether the operation is over. It throws nothing.
  bool await(std::chrono::nanoseconds time) noexcept;

  // Reports whether the operation is over. It does not wait.
  bool poll() noexcept;

  // Reports whether the end of the operation has been noticed.
  bool over() const noexcept {
    return over_.load(std::memory_order_acquire);
  }

  // The bytes of the operation's memory, 0 when it is over.
  uint64_t held() const;

  // Reports whether the operation uses a storage, false when it is over.
  bool uses(const c10::StorageImpl* storage) const;

 private:
  void refuse_if_parents() const; // in a forked child, unless the end was noticed before
  void finish() noexcept;
  void conclude() noexcept; // with lock_ held
  void mark(bool over) noexcept;
  void follow();              // gives the stream what comes after the operations
  void record_uses() const;   // of the memory, by the stream
  bool passed() noexcept;     // whether the stream has done that
  bool await_stream(std::chrono::steady_clock::time_point end) noexcept;
  void order() const;         // makes the stream of this thread wait
  bool rely();                // the program goes on without the outcome; false: it is known

  const uint64_t seq_;
  const uint64_t key_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  Task task_;
  const std::shared_ptr<Completer> completer_;
  const std::shared_ptr<Running> running_;
  const uint64_t era_; // of running_
  std::vector<tutti_work> handles_; // released by the destructor, so that waiting needs no lock
  std::atomic<bool> over_{false};
  std::atomic<bool> starting_{false}; // the operations, or what follows on the stream
  std::optional<c10::Event> followed_; // with a stream: what it does for the task
  bool copies_ = false;                // some of that comes after the operations
  bool refused_ = false;               // start throws: the program gets no work

  // What follows is written once, before over_ becomes true.
  int code_ = TUTTI_OK;
  int source_ = -1;
  std::vector<int64_t> failed_;
  std::exception_ptr error_;
  std::chrono::steady_clock::time_point ended_;

  mutable std::mutex lock_; // protects what follows
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool marked_ = false; // or about to be
  bool relied_ = false; // the program went on before the outcome was known
};

// Running holds works, and so the memory of their operations, until they have ended: the program
// may have dropped them.
class Running {
 public:
  void add(c10::intrusive_ptr<Work> work);

  // Returns the reference that add was given, or null.
  c10::intrusive_ptr<Work> remove(const Work* work) noexcept;

  // Waits until a work was removed, which follows its hooks, but not longer than limit; false: it
  // was not. It does not wait in a hook of the work itself.
  bool await_removal(const Work* work, std::chrono::milliseconds limit);

  // Finishes works that have ended.
  void reap() noexcept;

  std::vector<c10::intrusive_ptr<Work>> all();

  // The code of the first operation that failed, other than for its arguments.
  int error() const;
  // An operation that was begun in this era has failed.
  void failed(uint64_t era, int code) noexcept;
  // Forgets the failures, those that are not known yet too: the group is usable again. A new era
  // begins.
  void recovered() noexcept;
  uint64_t era() const;

  // Says what the program calls the group, and what its ranks are in the job; empty: not known. The
  // default group has no name, and the ranks of the job.
  void name(std::string group, std::vector<uint64_t> ranks);
  // Returns the text of an error, and after it which ranks of the job the group has, unless that is
  // the default group, or the error one of an argument. Of a large group it tells those of ranks.
  std::string of_group(int code, std::string text, std::vector<int64_t> ranks) const;

  // Keeps the error of an operation of an era with which the program did not wait on the host.
  void missed(uint64_t era, std::exception_ptr error) noexcept;
  // Throws the first of those, once.
  void rethrow_missed();

  Hooks hooks;

 private:
  mutable std::mutex mutex_; // protects what follows
  std::condition_variable removed_;
  int error_ = TUTTI_OK;
  uint64_t era_ = 0;
  std::deque<c10::intrusive_ptr<Work>> works_; // in the order of their start
  size_t full_ = 64;                           // the length at which reap looks at all of them
  std::exception_ptr missed_;
  std::string group_;
  std::vector<uint64_t> ranks_; // of the job, by rank of the group
};

// A Completer marks futures of works that have ended. It has a thread once it has a work. That
// thread runs the callbacks of the futures. A callback may wait for works that it adds, so these
// have another thread, and those that their callbacks add a further one.
class Completer : public std::enable_shared_from_this<Completer> {
 public:
  // Works of an ordered Completer end in the order in which they are added, except those that
  // callbacks add, which are in an order of their own.
  explicit Completer(bool ordered) : ordered_(ordered) {}

  void add(c10::intrusive_ptr<Work> work);

  // Ends the threads when the works that were added have ended. It waits for that, except in a
  // callback.
  void stop() noexcept;

 private:
  void run(int depth) noexcept;

  const bool ordered_;
  std::mutex mutex_; // protects what follows
  std::condition_variable changed_;
  // Works by the number of callbacks in which they are added, one within the other. Each entry has
  // a thread, which takes it away at its end.
  std::map<int, std::deque<c10::intrusive_ptr<Work>>> works_;
  std::thread thread_; // that of works_[0]
  bool stopping_ = false;
};

} // namespace tutti_torch
