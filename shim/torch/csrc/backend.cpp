#include "backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <thread>

#include "interrupt.h"
#include "store.h"
#include "window.h"

namespace tutti_torch {

namespace {

using c10d::OpType;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// Coalesced tensors of up to this many bytes in all are reduced in one operation.
constexpr int64_t kFlatten = 1 << 20;

// What the description of a rank's sparse tensor begins with if there is no such rank.
constexpr int64_t kEmptySlot = -1;

// How long an operation that the program waits for may take in the call that starts it, with the
// group's lock held. Longer ones are waited for without.
constexpr nanoseconds kAtOnce = std::chrono::microseconds(100);

// Whether options say if the program waits for the operation.
template <class Given, class = void>
constexpr bool kSaysAsync = false;
template <class Given>
constexpr bool kSaysAsync<Given, std::void_t<decltype(Given::asyncOp)>> = true;

// Returns asyncOp of options, true of those without it. Since all options have it, those of
// allreduce too, torch's Python expects no work of an operation that has ended; before, it always
// waits for one.
template <class Given>
bool asynchronous(const Given& opts) {
  if constexpr (kSaysAsync<Given> && kSaysAsync<c10d::AllreduceOptions>) {
    return opts.asyncOp;
  }
  return true;
}

// The key under which rank 0 publishes the secret of the turn in which it meets the others, and
// those under which each of them keeps the last turn that it has taken. Without a turn under way
// kTurn is missing, or kNoTurn after a failure.
const char* const kTurn = "tutti/turn";
const char* const kTurns = "tutti/turns/";
const char* const kNoTurn = "0";

// How many digits of a secret, which are hexadecimal, are the turn: it is a number of a store.
constexpr size_t kTurnDigits = 15;

// How long rank 0 of a monitored barrier may take to publish its outcome.
constexpr milliseconds kAnswer{5000};

std::mutex backends_mutex;
// Those of this process, in the order in which they were made.
std::vector<Backend*>& backends() {
  static auto* all = new std::vector<Backend*>(); // lives as long as the process
  return *all;
}

tutti_op op_of(int32_t kind) {
  tutti_op op{};
  op.struct_size = sizeof op;
  op.kind = kind;
  return op;
}

int64_t total_bytes(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

// Adds what task needs to write staged back.
void restore_after(Task& task, const Staged& staged) {
  if (staged.copied()) {
    task.after = [staged, before = std::move(task.after)] {
      if (before) {
        before();
      }
      staged.restore();
    };
  }
}

const char* or_null(const std::string& text) {
  return text.empty() ? nullptr : text.c_str();
}

// Returns an environment variable, "" if it is not set.
std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Returns on_failure of a tutti_config for an option's text.
int32_t on_failure_of(const std::string& name) {
  if (name == "shrink") {
    return TUTTI_SHRINK;
  }
  if (name == "retry") {
    return TUTTI_RETRY;
  }
  if (!name.empty() && name != "report") {
    throw std::invalid_argument("tutti: on_failure is \"" + name + "\", expected report, shrink or retry");
  }
  return name.empty() ? TUTTI_REPORT : TUTTI_REPORT_ALWAYS;
}

// Together is the work of several works.
class Together final : public c10d::Work {
 public:
  Together(int rank, std::vector<c10::intrusive_ptr<tutti_torch::Work>> works)
      : c10d::Work(rank, OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto error = work->exception()) {
        return error;
      }
    }
    return nullptr;
  }
  Tensors result() override {
    Tensors all;
    for (const auto& work : works_) {
      Tensors some = work->result();
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }
  void synchronize() override {
    wait();
  }
  bool wait(milliseconds timeout = kNoTimeout) override {
    const Clock::time_point end = Clock::now() + timeout;
    for (const auto& work : works_) {
      milliseconds left = timeout;
      if (timeout != kNoTimeout) {
        left = std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(end - Clock::now()));
      }
      work->wait(left);
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(type));
    for (const auto& work : works_) {
      futures.push_back(work->getFuture());
    }
    auto self = c10::intrusive_ptr<Together>::reclaim_copy(this);
    return c10::collectAll(futures)->then(
        [self](c10::ivalue::Future& all) -> c10::IValue {
          for (const c10::IValue& one : all.value().toListRef()) {
            one.toFuture()->value(); // throws the error of a future that has failed
          }
          return self->result();
        },
        type);
  }

 private:
  const std::vector<c10::intrusive_ptr<tutti_torch::Work>> works_;
};

} // namespace

bool single(const std::string& ports) {
  return !ports.empty() && ports != "0" && ports.find('-') == std::string::npos;
}

// ---- Joining and leaving ----

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options)
    : c10d::Backend(rank, size), options_(std::move(options)), store_(another(store)), further_(exist()) {
  WithoutGil released;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (options_->global_ranks_in_group.size() == static_cast<size_t>(size)) {
    running_->name(options_->group_name, options_->global_ranks_in_group);
  }
  if (options_->enable_reconfigure) {
    member();
  } else {
    join();
  }
#else
  join();
#endif
  std::lock_guard<std::mutex> guard(backends_mutex);
  backends().push_back(this);
}

Backend::~Backend() {
  if (forked()) { // the threads and what they hold belong to the parent
    new std::shared_ptr<Completer>(ordered_);
    new std::shared_ptr<Completer>(unordered_);
    new std::shared_ptr<Running>(running_);
    return;
  }
  WithoutGil released;
  close(); // until then uses sees its operations
  std::lock_guard<std::mutex> guard(backends_mutex);
  backends().erase(std::find(backends().begin(), backends().end(), this));
}

void Backend::wait_for(const std::string& key, Clock::time_point end, const std::function<bool()>& ready) {
  milliseconds pause{1};
  while (ready ? !ready() : !store_->check({key})) {
    if (Clock::now() >= end) {
      C10_THROW_ERROR(DistBackendError, c10::str("no value of ", key, " in the store"));
    }
    check_signals();
    std::this_thread::sleep_for(pause); // a store has no wait that signals end
    pause = std::min(2 * pause, milliseconds(20));
  }
}

bool Backend::exist() {
  if (forked()) { // the groups are the parent's
    return false;
  }
  std::lock_guard<std::mutex> guard(backends_mutex);
  return std::any_of(backends().begin(), backends().end(), [](const Backend* backend) { return !backend->closed_; });
}

// Returns what a group and a member have in common. further says that the process listens
// elsewhere too: a single port of the environment is not for it. The texts are options_'.
tutti_config Backend::config(bool further) const {
  tutti_config config{};
  config.struct_size = sizeof config;
  config.transport = or_null(options_->transport);
  config.interfaces = or_null(options_->interfaces);
  config.ports = or_null(options_->ports);
  if (further && options_->ports.empty() && single(variable("TUTTI_PORT"))) {
    config.ports = "0";
  }
  config.algorithm = or_null(options_->algorithm);
  config.log_dir = or_null(options_->log_dir);
  config.metrics = or_null(options_->metrics);
  config.timeout_ns = nanoseconds(options_->timeout).count();
  config.on_failure = on_failure_of(options_->on_failure);
  config.uniform = options_->uniform ? 1 : 0;
  config.max_procs = options_->max_procs;
  return config;
}

static std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string Backend::meet(milliseconds timeout) {
  // Each attempt of rank 0 is a turn. The others take another one than the last that they have
  // taken, which may be there still. A store may hold the keys of earlier groups of these ranks.
  const std::string own = kTurns + std::to_string(rank_);
  std::string secret;
  int64_t turn = 0;
  if (rank_ == 0) {
    secret = hex_of_random_bytes(48);
  } else {
    const int64_t last = store_->add(own, 0);
    const auto begun = [&] {
      const std::vector<uint8_t> value = peek(*store_, kTurn);
      secret.assign(value.begin(), value.end());
      turn = secret.empty() ? 0 : std::stoll(secret.substr(0, kTurnDigits), nullptr, 16);
      return turn != 0 && turn != last;
    };
    try {
      wait_for(kTurn, Clock::now() + timeout, begun);
    } catch (const c10::DistBackendError&) {
      C10_THROW_ERROR(DistBackendError, c10::str("rank ", rank_, ": rank 0 has not come to the store in ",
                                                 timeout.count(), " ms"));
    }
  }
  prefix_ = "tutti/" + secret.substr(0, kTurnDigits) + "/";
  if (rank_ == 0) {
    store_->set(kTurn, bytes_of(secret));
  } else {
    store_->set(own, bytes_of(std::to_string(turn)));
  }
  return secret;
}

void Backend::withdraw(const std::string& job, bool joined) noexcept {
  if (rank_ != 0 || prefix_.empty()) {
    return;
  }
  if (joined && erase({kTurn})) { // all have taken the turn, and none finds it again
    std::vector<std::string> keys;
    for (int rank = 1; rank < size_; rank++) {
      keys.push_back(kTurns + std::to_string(rank));
    }
    if (!job.empty()) { // of the library, which reads them only before the ranks meet
      keys.push_back("/tutti/" + job + "/size");
      keys.push_back("/tutti/" + job + "/terms");
    }
    erase(keys);
    return;
  }
  try {
    store_->set(kTurn, bytes_of(kNoTurn));
  } catch (const std::exception&) { // the program gets the outcome of the join
  }
}

bool Backend::erase(const std::vector<std::string>& keys) noexcept {
  if (!deletes_) {
    return false;
  }
  try {
    for (const std::string& key : keys) {
      store_->deleteKey(key);
    }
    return true;
  } catch (const std::exception&) {
    deletes_ = false;
    return false;
  }
}

// Returns what a group with these options does when a rank is lost.
static std::string mode_of(const Options& options) {
  if (!options.on_failure.empty()) {
    return options.on_failure;
  }
  std::string mode = variable("TUTTI_ON_FAILURE"); // is read as the library reads it
  const auto space = [](unsigned char c) { return std::isspace(c) != 0; };
  mode.erase(std::find_if_not(mode.rbegin(), mode.rend(), space).base(), mode.end());
  mode.erase(mode.begin(), std::find_if_not(mode.begin(), mode.end(), space));
  std::transform(mode.begin(), mode.end(), mode.begin(), [](unsigned char c) { return std::tolower(c); });
  return mode;
}

// Reports whether a group goes on without lost ranks.
static bool outlives(const std::string& mode) {
  return mode != "end" && on_failure_of(mode) > TUTTI_REPORT;
}

void Options::part_from(const Options& other, bool closed) {
  if (!closed && single(ports) && ports == other.ports) {
    ports.clear();
  }
  if (!closed && metrics == other.metrics) {
    metrics.clear();
  }
  if (!outlives(mode_of(*this)) && store == other.store) {
    store.clear();
  }
}

void Backend::join() {
  const Api& tutti = open_library();
  const milliseconds timeout = joined_ = options_->timeout;
  const std::string mode = mode_of(*options_);
  const bool site = !options_->store.empty() || !variable("TUTTI_STORE").empty();
  outlives_ = outlives(mode);
  if (outlives_ && !site) {
    throw std::invalid_argument(
        "tutti: on_failure \"" + mode + "\" needs a store that knows which ranks are alive, which c10d's does not: "
        "start the program with tutti run --on-failure " + mode +
        ", or set TUTTI_STORE or Options.store to that of an etcd");
  }

  tutti_config config = this->config(further_);
  config.size = size_;
  config.rank = rank_;

  // A rank that comes into a running job cannot agree on anything with the others in the c10d
  // store.
  std::string secret, job;
  if (!options_->environment || !outlives_) {
    secret = meet(timeout);
  }
  bool joined = false;
  tutti_kv kv = {};
  const auto over = c10::make_scope_exit([&] { // all have taken the turn, or none is to
    withdraw(kv.struct_size > 0 ? job : std::string(), joined);
  });
  if (!options_->environment) {
    job = "torch-" + secret.substr(0, 24);
    config.job = job.c_str();
    // The store that tutti run serves wants the secret of the environment.
    if (!outlives_ || (variable("TUTTI_SECRET").empty() && variable("TUTTI_SECRET_FILE").empty())) {
      config.secret = secret.data() + 24;
      config.secret_len = secret.size() - 24;
    }
  }
  if (options_->environment || outlives_ || !options_->store.empty()) {
    config.store = or_null(options_->store);
  } else {
    kv = callbacks_of(another(store_));
    config.kv = &kv;
  }
  Interruptible interruptible(tutti);
  tutti_group group = 0;
  interruptible.check(tutti.tutti_join(&config, &group), [&] { tutti.tutti_close(group); });
  group_ = group;
  joined = true;
}

// The parts of empty slots are left as they were, so that a copy needs what was there. In a group
// that ends with the first lost rank there are none.
Staged::Use Backend::gathered() const {
  return outlives_ ? Staged::kReadWrite : Staged::kWrite;
}

std::function<void()> Backend::leave() {
  if (closed_.exchange(true)) {
    return [] {};
  }
  tutti_group group = group_;
  decltype(streams_) streams;
  api().tutti_close(group); // ends all operations, also one that a thread is starting, with mutex_ held
  {
    std::lock_guard<std::mutex> guard(mutex_);
    group = group_ == group ? 0 : group_.load();
    streams.swap(streams_);
  }
  api().tutti_close(group); // reconfigure had made another one
  {
    std::lock_guard<std::mutex> guard(member_mutex_);
    api().tutti_member_close(member_);
  }
  return [running = running_, ordered = ordered_, unordered = unordered_, streams = std::move(streams)] {
    for (const auto& work : running->all()) {
      work->await(kClose);
    }
    for (const auto& [use, stream] : streams) {
      give_back(stream);
    }
    ordered->stop();
    unordered->stop();
    running->hooks.clear();
#ifdef C10D_BACKEND_HAS_WINDOW
    close_windows_again();
#endif
  };
}

void Backend::close() {
  leave()();
}

void Backend::close_all() {
  if (forked()) {
    return;
  }
  interpreter_ends();
  std::vector<std::function<void()>> ends;
  {
    std::lock_guard<std::mutex> guard(backends_mutex);
    for (Backend* backend : backends()) { // in the same order at all ranks, for which it may wait
      ends.push_back(backend->leave());
    }
  }
  for (const auto& end : ends) {
    end();
  }
}

bool Backend::uses(const c10::StorageImpl* storage) {
  std::vector<std::shared_ptr<Running>> runnings;
  {
    std::lock_guard<std::mutex> guard(backends_mutex);
    for (Backend* backend : backends()) {
      runnings.push_back(backend->running_);
    }
  }
  for (const auto& running : runnings) {
    for (const auto& work : running->all()) {
      work->poll(); // callbacks may start operations, which are looked at below
    }
  }
  return std::any_of(runnings.begin(), runnings.end(), [storage](const auto& running) {
    const auto works = running->all();
    return std::any_of(works.begin(), works.end(), [storage](const auto& work) { return work->uses(storage); });
  });
}

void Backend::shutdown() {
  if (forked()) { // the group is the parent's
    return;
  }
  WithoutGil released;
  close();
}

// Ends calls of reconfigure that wait for other members. Their handle is no longer of use then.
void Backend::end_forming() {
  tutti_member member = 0;
  {
    std::lock_guard<std::mutex> guard(member_mutex_);
    if (forming_ > 0) {
      std::swap(member, member_);
    }
  }
  api().tutti_member_close(member);
}

void Backend::abort() {
  refuse_if_forked("tutti abort");
  WithoutGil released;
  if (closed_) { // without mutex_, which a thread has that waits for ranks in a start
    return;
  }
  if (group_ == 0) {
    end_forming();
    return;
  }
  running_->hooks.failed();
  api().tutti_abort(group_, c10::str("rank ", rank_, " has aborted the process group").c_str());
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
c10d::ErrorType Backend::getError() {
  refuse_if_forked("tutti get_error");
  {
    WithoutGil released;
    for (const auto& work : running_->all()) { // the program may not have waited on the host
      work->poll();
    }
  }
  switch (running_->error()) {
    case TUTTI_OK:
      return c10d::ErrorType::SUCCESS;
    case TUTTI_ETIMEOUT:
      return c10d::ErrorType::TIMEOUT;
    case TUTTI_ERANK:
    case TUTTI_EABORTED:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}
#endif

milliseconds Backend::timeout_of(milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
}

template <class Given>
void Backend::bound(Task& task, const Given& opts) const {
  set_timeout(task, opts.timeout);
  task.waits = !asynchronous(opts);
}

void Backend::set_timeout(Task& task, milliseconds timeout) const {
  task.limit = timeout_of(timeout);
  task.timeout = task.limit == joined_ ? milliseconds(0) : task.limit;
}

void Backend::setTimeout(milliseconds timeout) {
  std::lock_guard<std::mutex> guard(mutex_);
  options_->timeout = timeout;
}

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions() {
  return options_;
}

bool Backend::supportsSplitting() const {
  return true;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) {
    return nullptr;
  }
  return part(store, ranks, opts);
}

c10::intrusive_ptr<c10d::Backend> Backend::part(const c10::intrusive_ptr<c10d::Store>& store,
                                                const std::vector<int>& ranks,
                                                const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  auto options = options_beside(opts);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (const auto& places = options_->global_ranks_in_group; !places.empty()) {
    for (int rank : ranks) {
      options->global_ranks_in_group.push_back(places.at(rank));
    }
  }
#endif
  const auto here = std::find(ranks.begin(), ranks.end(), rank_);
  return c10::make_intrusive<Backend>(store, static_cast<int>(here - ranks.begin()), static_cast<int>(ranks.size()),
                                      options);
}

c10::intrusive_ptr<c10d::Backend> Backend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                 const int& rank, const int& size) {
  return c10::make_intrusive<Backend>(store, rank, size, options_beside(opts));
}

// Returns the options of another group of the process, for which c10d gives these.
c10::intrusive_ptr<Options> Backend::options_beside(const c10::intrusive_ptr<c10d::Backend::Options>& opts) const {
  const auto own = c10::dynamic_intrusive_pointer_cast<Options>(opts);
  auto options = c10::make_intrusive<Options>(own ? *own : *options_);
  if (opts) {
    options->timeout = opts->timeout;
  }
  options->part_from(*options_, closed_); // c10d gives a copy of these if the program gives none
  options->environment = false; // the new group is not the job of the environment
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  options->enable_reconfigure = false; // it has its members
  options->group_name = opts ? opts->group_name : "";
  options->global_ranks_in_group.clear();
#endif
  return options;
}

uint64_t Backend::getSequenceNumberForGroup() {
  std::lock_guard<std::mutex> guard(mutex_);
  return seq_;
}

std::pair<uint64_t, std::vector<int64_t>> Backend::view() const {
  const tutti_group group = this->group("tutti active_ranks");
  uint64_t epoch = 0;
  uint32_t n = 0;
  std::vector<int32_t> ranks(size_);
  if (int code = api().tutti_view(group, &epoch, ranks.data(), static_cast<uint32_t>(ranks.size()), &n);
      code != TUTTI_OK) {
    raise(code, api().tutti_last_error());
  }
  return {epoch, {ranks.begin(), ranks.begin() + std::min<size_t>(n, ranks.size())}};
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const auto item = static_cast<int64_t>(options.dtype().itemsize());
  TORCH_CHECK_VALUE(size >= 0 && size <= std::numeric_limits<int64_t>::max() / item,
                    "tutti allocateTensor: the size is ", size, ", expected 0 or more elements that fit in memory");
  TORCH_CHECK_VALUE(options.device().is_cpu(), "tutti allocateTensor: the device is ", options.device(),
                    ", expected cpu");
  void* memory = nullptr;
  const auto bytes = static_cast<uint64_t>(size * item);
  if (bytes > 0) {
    if (int code = api().tutti_alloc(group("tutti allocateTensor"), bytes, &memory); code != TUTTI_OK) {
      raise(code, api().tutti_last_error());
    }
  }
  return at::from_blob(memory, {size}, [](void* memory) { api().tutti_free(memory); }, options);
}

bool Backend::supportsTensorAlloc(c10::DeviceIndex device) {
  return device < 0; // the CPU has no number
}

// ---- Starting operations ----

c10::intrusive_ptr<Work> Backend::begin(Task task) {
  refuse_if_forked(task.title);
  running_->reap();
  running_->rethrow_missed();
  std::lock_guard<std::mutex> guard(mutex_); // collectives start in the order of their numbers
  number(task);
  place(task);
  return start(std::move(task), 0);
}

void Backend::refuse_if_closed(const char* title) const {
  if (closed_) {
    raise(TUTTI_ECLOSED, std::string(title) + ": the process group was shut down");
  }
}

// Returns the group, or throws an error that says why there is none.
tutti_group Backend::group(const char* title) const {
  refuse_if_closed(title);
  const tutti_group group = group_;
  if (replacing_ > 0) {
    raise(TUTTI_ECLOSED, std::string(title) + ": the process group is being reconfigured");
  }
  if (suspended_) {
    raise(TUTTI_ECLOSED, std::string(title) + ": the process group is suspended: call resume");
  }
  if (group == 0) {
    raise(TUTTI_ECLOSED, std::string(title) + ": the process group has no members yet: call reconfigure");
  }
  return group;
}

// Gives a task the next number, and its operations their time. With mutex_ held.
void Backend::number(Task& task) {
  group(task.title);
  if (!task.message()) {
    seq_++;
  }
  extend(task);
  for (tutti_op& op : task.ops) {
    op.timeout_ns = task.timeout.count() <= 0 ? 0 : nanoseconds(task.timeout).count();
  }
}

// Chooses the stream of a task whose memory is on a device. If the program waits for the end, it is
// the stream of this thread, and nothing is between the two. Else it is one of the group, which is
// made to wait for that of the thread, so that this goes on beside the task. With mutex_ held.
void Backend::place(Task& task) {
  const std::optional<c10::Device> device = task.device();
  if (!device) {
    return;
  }
  for (const at::Tensor& tensor : task.keep) { // place_of is called with all tensors of a task
    TORCH_INTERNAL_ASSERT(tensor.device() == *device, task.title, " uses the memory of ", tensor.device(), " and ",
                          *device);
  }
  const c10::Stream current = current_stream(*device);
  const c10::Stream stream = task.waits ? current : stream_for(task, *device);
  if (stream != current) {
    c10::Event before(device->type());
    before.record(current);
    before.block(stream);
  }
  for (tutti_op& op : task.ops) {
    op.stream = handle_of(stream);
  }
  task.stream = stream;
  // A program that goes on without lost ranks depends on the outcome of each operation, and one
  // that receives from any rank on the sender.
  task.blocks = outlives_ || task.type == OpType::RECVANYSOURCE;
}

// Returns the group's stream for a task that the program goes on beside: that of collectives, that
// of sends, or that of receives from a rank. A send does not wait for a receive then. With mutex_
// held.
c10::Stream Backend::stream_for(const Task& task, c10::Device device) {
  constexpr int kCollectives = -3, kSends = -2; // not the number of a peer, or TUTTI_ANY_RANK
  const int use = !task.message() ? kCollectives : task.type == OpType::SEND ? kSends : task.ops[0].peer;
  const auto key = std::make_pair(device.index(), use);
  auto found = streams_.find(key);
  if (found == streams_.end()) {
    found = streams_.emplace(key, take_stream(device, use == kSends)).first;
  }
  return found->second;
}

// Makes the work of a task that has a number, and starts its operations, unless there is one that
// runs already, as handle. With mutex_ held.
c10::intrusive_ptr<Work> Backend::start(Task task, tutti_work handle) {
  const auto& completer = task.message() ? unordered_ : ordered_;
  const char* title = task.title;
  auto work = c10::make_intrusive<Work>(rank_, seq_, std::move(task), completer, running_);
  try {
    work->start(group_, handle);
  } catch (const std::invalid_argument&) {
    group(title); // throws if it was closed meanwhile
    throw;
  }
  for (Extension& extension : extensions_) {
    if (!extension.first) {
      extension.first = work;
    }
  }
  if (coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

// Returns the work of an operation, or null if the program waits for it and it has ended already.
WorkPtr Backend::launch(Task task) {
  WithoutGil released;
  if (!task.waits || !task.brief() || at::hasCallbacks() || running_->hooks.watches()) {
    return begin(std::move(task));
  }
  refuse_if_forked(task.title);
  running_->reap();
  running_->rethrow_missed();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    number(task);
    tutti_work handle = 0;
    if (!coalescing_ && extensions_.empty()) {
      const int code = api().tutti_run(group_, task.ops.data(), kAtOnce.count(), &handle);
      if (code != TUTTI_OK && code != TUTTI_EBUSY) {
        const std::string why = api().tutti_last_error();
        group(task.title); // throws if it was closed meanwhile
        raise(code, running_->of_group(code, why, {rank_}));
      }
    }
    if (coalescing_ || !extensions_.empty() || handle != 0) {
      return start(std::move(task), handle);
    }
  }
  task.end();
  return nullptr;
}

void Backend::startCoalescing() {
  std::lock_guard<std::mutex> guard(mutex_);
  coalesced_.clear();
  coalescing_ = true;
}

WorkPtr Backend::endCoalescing() {
  std::lock_guard<std::mutex> guard(mutex_);
  coalescing_ = false;
  return c10::make_intrusive<Together>(rank_, std::move(coalesced_));
}

// ---- Operations ----

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only("broadcast", tensors);
  TORCH_CHECK_VALUE(opts.rootRank >= 0 && opts.rootRank < size_, "tutti broadcast: the root is ", opts.rootRank,
                    ", expected 0 to ", size_ - 1);
  TORCH_CHECK_VALUE(opts.rootTensor == 0, "tutti broadcast: the root tensor is ", opts.rootTensor, ", expected 0");
  const bool root = opts.rootRank == rank_;
  Staged staged(tensor, place_of({tensor}), root ? Staged::kRead : Staged::kWrite);
  Task task(OpType::BROADCAST, "tutti:broadcast");
  tutti_op op = op_of(TUTTI_OP_BROADCAST);
  op.dst = op.src = staged.buffer(wire_of(tensor.scalar_type()));
  op.peer = static_cast<int32_t>(opts.rootRank);
  task.ops = {op};
  task.inputs = tensors;
  task.keep = {staged.memory()};
  task.outputs = {tensors};
  bound(task, opts);
  if (!root) {
    restore_after(task, staged);
  }
  return launch(std::move(task));
}

// Multiplies the copy that stands for a tensor.
static void multiply(const Staged& staged, const at::Tensor& factor) {
  at::AutoDispatchBelowADInplaceOrView raw;
  const c10::Device place = staged.memory().device();
  staged.memory().mul_(factor.device() == place || (factor.is_cpu() && factor.dim() == 0) ? factor : factor.to(place));
}

// Prepares the input of a reduction.
static Staged reduced(const at::Tensor& tensor, c10::Device place, const Reduction& how, Staged::Use use) {
  if (!how.factor) {
    return Staged(tensor, place, use, how.as);
  }
  Staged staged(tensor, place, use, how.as.value_or(tensor.scalar_type())); // a copy
  multiply(staged, *how.factor);
  return staged;
}

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].layout() == at::kSparse) {
    return allreduce_sparse(tensors, opts);
  }
  const at::Tensor& tensor = only("all_reduce", tensors);
  const Reduction how = reduction_of("all_reduce", opts.reduceOp, tensor.scalar_type());
  Staged staged = reduced(tensor, place_of({tensor}), how, Staged::kReadWrite);
  Task task(OpType::ALLREDUCE, "tutti:all_reduce");
  tutti_op op = op_of(TUTTI_OP_ALLREDUCE);
  op.dst = op.src = staged.buffer(how.wire);
  op.reduction = how.op;
  task.ops = {op};
  task.inputs = tensors;
  task.keep = {staged.memory()};
  task.outputs = {tensors};
  bound(task, opts);
  restore_after(task, staged);
  return launch(std::move(task));
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  if (tensors.empty()) {
    throw std::invalid_argument("tutti all_reduce_coalesced: requires tensors");
  }
  check_alike("all_reduce_coalesced", tensors[0], tensors, false);
  const Reduction how = reduction_of("all_reduce_coalesced", opts.reduceOp, tensors[0].scalar_type());
  Task task(OpType::ALLREDUCE_COALESCED, "tutti:all_reduce_coalesced");
  const c10::Device place = place_of({tensors});
  std::vector<Staged> parts;
  if (total_bytes(tensors) <= kFlatten && !how.factor) {
    parts.emplace_back(tensors, place, Staged::kReadWrite, how.as);
  } else {
    for (const auto& tensor : tensors) {
      parts.push_back(reduced(tensor, place, how, Staged::kReadWrite));
    }
  }
  for (const Staged& part : parts) {
    tutti_op op = op_of(TUTTI_OP_ALLREDUCE);
    op.dst = op.src = part.buffer(how.wire);
    op.reduction = how.op;
    task.ops.push_back(op);
    task.keep.push_back(part.memory());
    restore_after(task, part);
  }
  task.inputs = tensors;
  task.outputs = {tensors};
  bound(task, opts);
  return launch(std::move(task));
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only("reduce", tensors);
  TORCH_CHECK_VALUE(opts.rootRank >= 0 && opts.rootRank < size_, "tutti reduce: the root is ", opts.rootRank,
                    ", expected 0 to ", size_ - 1);
  TORCH_CHECK_VALUE(opts.rootTensor == 0, "tutti reduce: the root tensor is ", opts.rootTensor, ", expected 0");
  const Reduction how = reduction_of("reduce", opts.reduceOp, tensor.scalar_type());
  const bool root = opts.rootRank == rank_;
  Staged staged = reduced(tensor, place_of({tensor}), how, root ? Staged::kReadWrite : Staged::kRead);
  Task task(OpType::REDUCE, "tutti:reduce");
  tutti_op op = op_of(TUTTI_OP_REDUCE);
  op.dst = op.src = staged.buffer(how.wire);
  op.reduction = how.op;
  op.peer = static_cast<int32_t>(opts.rootRank);
  task.ops = {op};
  task.inputs = tensors;
  task.keep = {staged.memory()};
  task.outputs = {tensors};
  bound(task, opts);
  if (root) {
    restore_after(task, staged);
  }
  return launch(std::move(task));
}

// Checks that there is one list of a tensor for each rank, all of the type of the single tensor of
// ones. Its shape is that of all, or, if rank is given, that of the rank's own.
static void check_lists(const char* what, const Tensors& ones, const std::vector<Tensors>& lists, int size,
                        std::optional<int> rank = std::nullopt) {
  const at::Tensor& one = only(what, ones);
  if (lists.size() != 1) {
    throw std::invalid_argument(
        c10::str("tutti ", what, ": requires a single list of tensors for the ranks, got ", lists.size()));
  }
  if (lists[0].size() != static_cast<size_t>(size)) {
    throw std::invalid_argument(c10::str("tutti ", what, ": requires a tensor for each of the ", size,
                                         " ranks, got a list of ", lists[0].size()));
  }
  check_alike(what, one, lists[0], !rank);
  if (rank) {
    const at::Tensor& own = lists[0][*rank];
    TORCH_CHECK_VALUE(own.sizes() == one.sizes(), "tutti ", what, ": invalid tensor size at index ", *rank,
                      ", which is of this rank: expected ", one.sizes(), ", got ", own.sizes());
  }
}

// Reports whether the tensors of a list have different shapes.
static bool uneven(const Tensors& list) {
  return std::any_of(list.begin(), list.end(), [&](const auto& tensor) { return tensor.sizes() != list[0].sizes(); });
}

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  check_lists("all_gather", inputs, outputs, size_, rank_);
  const Wire wire = wire_of(inputs[0].scalar_type());
  const c10::Device place = place_of({inputs, outputs[0]});
  Staged source(inputs[0], place, Staged::kRead);
  Staged target(outputs[0], place, gathered());
  if (!target.copied() && overlap(source, target) && source.memory().data_ptr() != outputs[0][rank_].data_ptr()) {
    source.copy();
  }
  Task task(OpType::ALLGATHER, "tutti:all_gather");
  tutti_op op = op_of(TUTTI_OP_ALLGATHER);
  op.dst = target.buffer(wire);
  op.src = source.buffer(wire);
  std::vector<int64_t> counts;
  if (uneven(outputs[0])) {
    for (const at::Tensor& output : outputs[0]) {
      counts.push_back(output.numel() * static_cast<int64_t>(wire.per));
    }
    op.kind = TUTTI_OP_ALLGATHERV;
    op.dst_counts = counts.data();
    op.counts_len = counts.size();
  }
  task.ops = {op};
  task.inputs = inputs;
  task.keep = {source.memory(), target.memory()};
  task.outputs = outputs;
  bound(task, opts);
  restore_after(task, target);
  return launch(std::move(task)); // copies the counts
}

// Adds to task the gathering of input in output.
static void gather_into(Task& task, const char* what, const at::Tensor& output, const at::Tensor& input,
                        c10::Device place, int rank, int size, Staged::Use use) {
  check_dense(what, input);
  check_alike(what, input, {output}, false);
  if (output.numel() != input.numel() * size) {
    throw std::invalid_argument(c10::str("tutti ", what, ": the output has ", output.numel(), " elements, expected ",
                                         input.numel() * size, ": ", input.numel(), " for each of the ", size,
                                         " ranks"));
  }
  const Wire wire = wire_of(input.scalar_type());
  Staged source(input, place, Staged::kRead);
  Staged target(output, place, use);
  const auto* own = static_cast<const char*>(target.memory().data_ptr()) + rank * source.memory().nbytes();
  if (overlap(source, target) && source.memory().data_ptr() != own) {
    source.copy();
  }
  tutti_op op = op_of(TUTTI_OP_ALLGATHER);
  op.dst = target.buffer(wire);
  op.src = source.buffer(wire);
  task.ops.push_back(op);
  task.keep.push_back(source.memory());
  task.keep.push_back(target.memory());
  restore_after(task, target);
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  Task task(OpType::_ALLGATHER_BASE, "tutti:_all_gather_base");
  gather_into(task, "all_gather_into_tensor", output, input, place_of({input, output}), rank_, size_, gathered());
  task.inputs = {input};
  task.outputs = {{output}};
  bound(task, opts);
  return launch(std::move(task));
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  if (outputs.size() != inputs.size()) {
    throw std::invalid_argument(c10::str("tutti all_gather_into_tensor_coalesced: ", outputs.size(), " outputs and ",
                                         inputs.size(), " inputs"));
  }
  Task task(OpType::COALESCED, "tutti:all_gather_into_tensor_coalesced");
  const c10::Device place = place_of({inputs, outputs});
  for (size_t i = 0; i < inputs.size(); i++) {
    gather_into(task, "all_gather_into_tensor_coalesced", outputs[i], inputs[i], place, rank_, size_, gathered());
  }
  task.inputs = inputs;
  task.outputs = {outputs};
  bound(task, opts);
  return launch(std::move(task));
}

WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  const char* what = "all_gather_coalesced";
  if (inputs.empty()) {
    throw std::invalid_argument(c10::str("tutti ", what, ": requires tensors"));
  }
  if (outputs.size() != static_cast<size_t>(size_)) {
    throw std::invalid_argument(
        c10::str("tutti ", what, ": requires a list for each of the ", size_, " ranks, got ", outputs.size()));
  }
  Task task(OpType::ALLGATHER_COALESCED, "tutti:all_gather_coalesced");
  Tensors all = inputs;
  for (const Tensors& list : outputs) {
    if (list.size() != inputs.size()) {
      throw std::invalid_argument(
          c10::str("tutti ", what, ": a list of outputs has ", list.size(), " tensors, expected ", inputs.size()));
    }
    all.insert(all.end(), list.begin(), list.end());
  }
  const c10::Device place = place_of({all});
  for (size_t i = 0; i < inputs.size(); i++) {
    Tensors ranks;
    for (const Tensors& list : outputs) {
      ranks.push_back(list[i]);
    }
    check_dense(what, inputs[i]);
    check_alike(what, inputs[i], ranks, true);
    const Wire wire = wire_of(inputs[i].scalar_type());
    Staged source(inputs[i], place, Staged::kRead);
    Staged target(ranks, place, gathered());
    if (overlap(source, target)) {
      source.copy();
    }
    tutti_op op = op_of(TUTTI_OP_ALLGATHER);
    op.dst = target.buffer(wire);
    op.src = source.buffer(wire);
    task.ops.push_back(op);
    task.keep.push_back(source.memory());
    task.keep.push_back(target.memory());
    restore_after(task, target);
  }
  task.inputs = inputs;
  task.outputs = outputs;
  bound(task, opts);
  return launch(std::move(task));
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const at::Tensor& input = only("gather", inputs);
  TORCH_CHECK_VALUE(opts.rootRank >= 0 && opts.rootRank < size_, "tutti gather: the root is ", opts.rootRank,
                    ", expected 0 to ", size_ - 1);
  const Wire wire = wire_of(input.scalar_type());
  const bool root = opts.rootRank == rank_;
  if (root) {
    check_lists("gather", inputs, outputs, size_);
  }
  const c10::Device place = root ? place_of({input, outputs[0]}) : place_of({input});
  Staged source(input, place, Staged::kRead);
  Task task(OpType::GATHER, "tutti:gather");
  tutti_op op = op_of(TUTTI_OP_GATHER);
  op.src = source.buffer(wire);
  op.peer = static_cast<int32_t>(opts.rootRank);
  op.dst.dtype = wire.dtype;
  op.dst.device = TUTTI_HOST;
  task.keep = {source.memory()};
  if (root) {
    Staged target(outputs[0], place, gathered());
    if (!target.copied() && overlap(source, target) && source.memory().data_ptr() != outputs[0][rank_].data_ptr()) {
      source.copy();
      op.src = source.buffer(wire);
      task.keep = {source.memory()};
    }
    op.dst = target.buffer(wire);
    task.keep.push_back(target.memory());
    restore_after(task, target);
  } else if (!outputs.empty()) {
    throw std::invalid_argument("tutti gather: requires empty output on non-root");
  }
  task.ops = {op};
  task.inputs = inputs;
  task.outputs = outputs;
  bound(task, opts);
  return launch(std::move(task));
}

WorkPtr Backend::gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  const char* what = "gather_into_tensor";
  Tensors inputs = {input};
  std::vector<Tensors> outputs;
  if (opts.rootRank == rank_) {
    check_dense(what, input);
    check_alike(what, input, {output}, false);
    if (output.numel() != input.numel() * size_ || !output.is_contiguous()) {
      throw std::invalid_argument(c10::str("tutti ", what, ": the output has ", output.numel(), " elements, expected ",
                                           input.numel() * size_, " contiguous ones"));
    }
    const at::Tensor flat = output.view({size_, input.numel()});
    outputs.emplace_back();
    for (int r = 0; r < size_; r++) {
      outputs[0].push_back(flat[r].view(input.sizes()));
    }
  }
  return gather(outputs, inputs, opts);
}

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only("scatter", outputs);
  TORCH_CHECK_VALUE(opts.rootRank >= 0 && opts.rootRank < size_, "tutti scatter: the root is ", opts.rootRank,
                    ", expected 0 to ", size_ - 1);
  const Wire wire = wire_of(output.scalar_type());
  const bool root = opts.rootRank == rank_;
  if (root) {
    check_lists("scatter", outputs, inputs, size_);
  }
  const c10::Device place = root ? place_of({output, inputs[0]}) : place_of({output});
  Staged target(output, place, Staged::kWrite);
  Task task(OpType::SCATTER, "tutti:scatter");
  tutti_op op = op_of(TUTTI_OP_SCATTER);
  op.dst = target.buffer(wire);
  op.peer = static_cast<int32_t>(opts.rootRank);
  op.src.dtype = wire.dtype;
  op.src.device = TUTTI_HOST;
  task.keep = {target.memory()};
  if (root) {
    Staged source(inputs[0], place, Staged::kRead);
    if (!source.copied() && overlap(source, target) && target.memory().data_ptr() != inputs[0][rank_].data_ptr()) {
      source.copy();
    }
    op.src = source.buffer(wire);
    task.keep.push_back(source.memory());
    task.inputs = inputs[0];
  } else if (!inputs.empty()) {
    throw std::invalid_argument("tutti scatter: requires empty input on non-root");
  }
  task.ops = {op};
  task.outputs = {outputs};
  bound(task, opts);
  restore_after(task, target);
  return launch(std::move(task));
}

// Adds to task the reduction of source, a part for each rank, to output.
static void scatter_into(Task& task, const Reduction& how, const at::Tensor& output, c10::Device place,
                         Staged source) {
  if (how.factor) {
    source.copy();
    multiply(source, *how.factor);
  }
  Staged target(output, place, Staged::kWrite, how.as);
  if (overlap(source, target)) {
    source.copy();
  }
  tutti_op op = op_of(TUTTI_OP_REDUCE_SCATTER);
  op.dst = target.buffer(how.wire);
  op.src = source.buffer(how.wire);
  op.reduction = how.op;
  task.ops.push_back(op);
  task.keep.push_back(source.memory());
  task.keep.push_back(target.memory());
  restore_after(task, target);
}

// Adds to task the reduction of a part for each rank to that rank, and of this rank's to output.
static void reduce_each(Task& task, const Reduction& how, const at::Tensor& output, c10::Device place,
                        const Tensors& parts, int rank) {
  const Staged target(output, place, Staged::kWrite, how.as);
  for (int r = 0; r < static_cast<int>(parts.size()); r++) {
    Staged part = reduced(parts[r], place, how, Staged::kRead);
    if (r == rank) { // the sum is written to it
      part.copy();
      task.after = [target, part] { target.memory().copy_(part.memory()); };
    }
    tutti_op op = op_of(TUTTI_OP_REDUCE);
    op.dst = op.src = part.buffer(how.wire);
    op.reduction = how.op;
    op.peer = r;
    task.ops.push_back(op);
    task.keep.push_back(part.memory());
  }
  task.keep.push_back(target.memory());
  restore_after(task, target);
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& opts) {
  check_lists("reduce_scatter", outputs, inputs, size_, rank_);
  const Reduction how = reduction_of("reduce_scatter", opts.reduceOp, outputs[0].scalar_type());
  Task task(OpType::REDUCE_SCATTER, "tutti:reduce_scatter");
  const c10::Device place = place_of({outputs, inputs[0]});
  if (uneven(inputs[0])) {
    reduce_each(task, how, outputs[0], place, inputs[0], rank_);
  } else {
    scatter_into(task, how, outputs[0], place, Staged(inputs[0], place, Staged::kRead, how.as));
  }
  task.inputs = inputs[0];
  task.outputs = {outputs};
  bound(task, opts);
  return launch(std::move(task));
}

static void check_scatter(const char* what, const at::Tensor& output, const at::Tensor& input, int size) {
  check_dense(what, output);
  check_alike(what, output, {input}, false);
  if (input.numel() != output.numel() * size) {
    throw std::invalid_argument(c10::str("tutti ", what, ": the input has ", input.numel(), " elements, expected ",
                                         output.numel() * size, ": ", output.numel(), " for each of the ", size,
                                         " ranks"));
  }
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  check_scatter("reduce_scatter_tensor", output, input, size_);
  const Reduction how = reduction_of("reduce_scatter_tensor", opts.reduceOp, output.scalar_type());
  Task task(OpType::_REDUCE_SCATTER_BASE, "tutti:_reduce_scatter_base");
  const c10::Device place = place_of({output, input});
  scatter_into(task, how, output, place, Staged(input, place, Staged::kRead, how.as));
  task.inputs = {input};
  task.outputs = {{output}};
  bound(task, opts);
  return launch(std::move(task));
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& opts) {
  const char* what = "reduce_scatter_tensor_coalesced";
  if (outputs.size() != inputs.size()) {
    throw std::invalid_argument(
        c10::str("tutti ", what, ": ", outputs.size(), " outputs and ", inputs.size(), " inputs"));
  }
  Task task(OpType::COALESCED, "tutti:reduce_scatter_tensor_coalesced");
  const c10::Device place = place_of({outputs, inputs});
  for (size_t i = 0; i < inputs.size(); i++) {
    check_scatter(what, outputs[i], inputs[i], size_);
    const Reduction how = reduction_of(what, opts.reduceOp, outputs[i].scalar_type());
    scatter_into(task, how, outputs[i], place, Staged(inputs[i], place, Staged::kRead, how.as));
  }
  task.inputs = inputs;
  task.outputs = {outputs};
  bound(task, opts);
  return launch(std::move(task));
}

// Adds to task an exchange of parts of different lengths, in elements of a tensor.
static void exchange(Task& task, const Staged& target, Staged source, Wire wire, std::vector<int64_t>& to,
                     std::vector<int64_t>& from) {
  if (overlap(source, target)) {
    source.copy();
  }
  for (auto* counts : {&to, &from}) {
    for (int64_t& count : *counts) {
      count *= static_cast<int64_t>(wire.per);
    }
  }
  tutti_op op = op_of(to.empty() ? TUTTI_OP_ALLTOALL : TUTTI_OP_ALLTOALLV);
  op.dst = target.buffer(wire);
  op.src = source.buffer(wire);
  op.src_counts = to.data();
  op.dst_counts = from.data();
  op.counts_len = to.size();
  task.ops = {op};
  task.keep = {source.memory(), target.memory()};
  restore_after(task, target);
}

// Returns the number of elements for each rank of splits, which divide the first dimension of
// tensor.
static std::vector<int64_t> counts_of(const char* which, const std::vector<int64_t>& splits, const at::Tensor& tensor,
                                      int size) {
  const char* what = "tutti all_to_all_single: ";
  const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<int64_t> counts(size);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, what, "the first dimension of the ", which, " is ", rows,
                      ", which does not divide equally across the group of ", size, " ranks");
    std::fill(counts.begin(), counts.end(), rows / size * row);
    return counts;
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(size), what, "there are ", splits.size(), " splits of the ",
                    which, ", expected one for each of the ", size, " ranks");
  int64_t sum = 0;
  for (int i = 0; i < size; i++) {
    TORCH_CHECK_VALUE(splits[i] >= 0, what, "split ", i, " of the ", which, " is ", splits[i], ", expected 0 or more");
    sum += splits[i];
    counts[i] = splits[i] * row;
  }
  TORCH_CHECK_VALUE(sum == rows, what, "the splits of the ", which, " doesn't match total dim 0 size: their sum is ",
                    sum, ", the first dimension is ", rows);
  return counts;
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  check_dense("all_to_all_single", input);
  check_alike("all_to_all_single", input, {output}, false);
  std::vector<int64_t> to = counts_of("input", input_splits, input, size_);
  std::vector<int64_t> from = counts_of("output", output_splits, output, size_);
  if (input_splits.empty() && output_splits.empty()) {
    TORCH_CHECK_VALUE(input.numel() == output.numel(), "tutti all_to_all_single: the output has ", output.numel(),
                      " elements, the input ", input.numel(), ": without splits they must be equal");
    to.clear();
    from.clear();
  }
  Task task(OpType::ALLTOALL_BASE, "tutti:all_to_all");
  const c10::Device place = place_of({output, input});
  exchange(task, Staged(output, place, gathered()), Staged(input, place, Staged::kRead), wire_of(input.scalar_type()),
           to, from);
  task.inputs = {input};
  task.outputs = {{output}};
  bound(task, opts);
  return launch(std::move(task)); // copies the counts
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const char* what = "all_to_all";
  for (const Tensors* list : {&inputs, &outputs}) {
    if (list->size() != static_cast<size_t>(size_)) {
      throw std::invalid_argument(c10::str("tutti ", what, ": requires a tensor for each of the ", size_,
                                           " ranks, got a list of ", list->size()));
    }
    check_alike(what, inputs[0], *list, false);
  }
  std::vector<int64_t> to, from;
  for (int i = 0; i < size_; i++) {
    to.push_back(inputs[i].numel());
    from.push_back(outputs[i].numel());
  }
  Task task(OpType::ALLTOALL, "tutti:all_to_all");
  const c10::Device place = place_of({outputs, inputs});
  exchange(task, Staged(outputs, place, gathered()), Staged(inputs, place, Staged::kRead),
           wire_of(inputs[0].scalar_type()), to, from);
  task.inputs = inputs;
  task.outputs = {outputs};
  bound(task, opts);
  return launch(std::move(task)); // copies the counts
}

static void check_peer(const char* what, int peer, int size) {
  TORCH_CHECK_VALUE(peer >= 0 && peer < size, "tutti ", what, ": the rank is ", peer, ", expected 0 to ", size - 1);
}

static Task message(OpType type, const char* title, int32_t kind, Staged::Use use, const Tensors& tensors, int peer,
                    int tag) {
  const char* what = use == Staged::kRead ? "send" : "recv";
  TORCH_CHECK_VALUE(tag >= 0, "tutti ", what, ": the tag is ", tag, ", expected 0 to ",
                    std::numeric_limits<int>::max());
  const at::Tensor& tensor = only(what, tensors);
  const Staged staged(tensor, place_of({tensor}), use);
  Task task(type, title);
  tutti_op op = op_of(kind);
  op.dst = op.src = staged.buffer(wire_of(tensor.scalar_type()));
  op.peer = peer;
  op.tag = tag;
  task.ops = {op};
  task.inputs = tensors;
  task.keep = {staged.memory()};
  task.outputs = {tensors};
  restore_after(task, staged);
  return task;
}

WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  group("tutti:send");
  check_peer("send", to, size_);
  Task task = message(OpType::SEND, "tutti:send", TUTTI_OP_SEND, Staged::kRead, tensors, to, tag);
  set_timeout(task, c10d::kUnsetTimeout);
  return launch(std::move(task));
}

WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  group("tutti:recv");
  check_peer("recv", from, size_); // TUTTI_ANY_RANK is for recvAnysource alone
  Task task = message(OpType::RECV, "tutti:recv", TUTTI_OP_RECV, Staged::kWrite, tensors, from, tag);
  set_timeout(task, c10d::kUnsetTimeout);
  return launch(std::move(task));
}

WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  Task task = message(OpType::RECVANYSOURCE, "tutti:recvAnySource", TUTTI_OP_RECV, Staged::kWrite, tensors,
                      TUTTI_ANY_RANK, tag);
  set_timeout(task, c10d::kUnsetTimeout);
  return launch(std::move(task));
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  Task task(OpType::BARRIER, "tutti:barrier");
  task.ops = {op_of(TUTTI_OP_BARRIER)};
  bound(task, opts);
  return launch(std::move(task));
}

// The ranks report to rank 0 in the store, so that the group stays usable when one does not come.
// In a group that goes on without lost ranks, rank 0 may be one of those.
void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  refuse_if_forked("tutti monitored_barrier");
  if (outlives_) {
    if (WorkPtr work = barrier(opts)) {
      work->wait();
    }
    return;
  }
  WithoutGil released;
  const milliseconds timeout = timeout_of(opts.timeout);
  uint64_t n = 0;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    n = ++barriers_;
  }
  const std::string prefix = prefix_ + "barriers/" + std::to_string(n) + "/";
  const auto left = c10::make_scope_exit([&] { leave_barrier(prefix); });
  const std::string here = prefix + std::to_string(rank_);
  const std::string outcome = prefix + "outcome";
  const auto set = [this](const std::string& key, const std::string& value) {
    store_->set(key, bytes_of(value));
  };
  Clock::time_point end = Clock::now() + timeout;
  set(here, "here");
  if (rank_ != 0) {
    const auto failed = [&](const std::string& why) { // the beginning is that of Gloo's text
      C10_THROW_ERROR(DistBackendError, c10::str("Rank ", rank_, " successfully reached monitoredBarrier, but received "
                                                 "errors while waiting for send/recv from rank 0: ", why));
    };
    for (const std::string& key : {prefix + "0", outcome}) {
      try {
        wait_for(key, end);
      } catch (const c10::DistBackendError&) {
        failed(c10::str("it has not answered in ", timeout.count(), " ms"));
      }
      end = Clock::now() + timeout + kAnswer; // rank 0 may have come later
    }
    const std::vector<uint8_t> value = store_->get(outcome);
    if (const std::string ranks(value.begin(), value.end()); ranks != "ok") {
      failed((ranks.find(',') == std::string::npos ? "rank " : "ranks ") + ranks + " did not come");
    }
    return;
  }
  if (timeout.count() <= 0 && size_ > 1) {
    C10_THROW_ERROR(DistBackendError, c10::str("Rank 0 timed out in monitoredBarrier after ", timeout.count(), " ms"));
  }
  std::string missing;
  int lost = 0;
  for (int rank = 1; rank < size_ && (lost == 0 || wait_all_ranks); rank++) {
    try {
      wait_for(prefix + std::to_string(rank), end);
    } catch (const c10::DistBackendError&) {
      missing += (lost++ == 0 ? "" : ", ") + std::to_string(rank);
    }
  }
  set(outcome, lost == 0 ? "ok" : missing);
  if (lost > 0) {
    C10_THROW_ERROR(DistBackendError, c10::str("[Rank 0]: Rank", lost == 1 ? " " : "s ", missing,
                                               " failed to pass monitoredBarrier in ", timeout.count(), " ms"));
  }
}

// Counts this rank among those that have left the monitored barrier with these keys, with or
// without an error. The last one deletes the keys: no other asks for them again. They stay if a
// rank does not come, or the store fails.
void Backend::leave_barrier(const std::string& prefix) noexcept {
  const std::string left = prefix + "left";
  try {
    if (!deletes_ || store_->add(left, 1) < size_) {
      return;
    }
  } catch (const std::exception&) { // the program gets the outcome of the barrier
    return;
  }
  std::vector<std::string> keys = {left, prefix + "outcome"};
  for (int rank = 0; rank < size_; rank++) {
    keys.push_back(prefix + std::to_string(rank));
  }
  erase(keys);
}

// Returns the type in which numbers of a type are added up.
static at::ScalarType sums_of(at::ScalarType type) {
  if (!c10::isReducedFloatingType(c10::toRealValueType(type))) {
    return type;
  }
  return c10::isComplexType(type) ? at::kComplexFloat : at::kFloat;
}

// Returns a hash of a shape, the same as without the module: FNV-1a, without its last bit.
static int64_t hash_of(at::IntArrayRef sizes) {
  uint64_t hash = 14695981039346656037U;
  for (int64_t size : sizes) {
    hash = (hash ^ static_cast<uint64_t>(size)) * 1099511628211U;
  }
  return static_cast<int64_t>(hash >> 1);
}

// The indices and the values of all ranks are gathered and added up by rank.
WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const char* what = "all_reduce of a sparse tensor";
  if (tensors.size() != 1 || !tensors[0].defined() || tensors[0].layout() != at::kSparse) {
    throw std::invalid_argument(c10::str("tutti ", what, ": requires a single tensor with layout Sparse"));
  }
  if (opts.reduceOp.op_ != c10d::ReduceOp::SUM) {
    throw std::invalid_argument(c10::str("tutti ", what, ": only works with ReduceOp.SUM"));
  }
  WithoutGil released;
  at::AutoDispatchBelowADInplaceOrView raw;
  const at::Tensor tensor = tensors[0];
  const at::ScalarType type = tensor.scalar_type(), sums = sums_of(type);
  const at::Tensor own = tensor.cpu().to(sums).coalesce();
  const at::Tensor indices = own.indices().contiguous();
  const at::Tensor values = own.values().contiguous();
  reduction_of(what, opts.reduceOp, type);

  // What each rank has: sparse and dense dimensions, elements, type, a hash of the shape. It is as
  // long at all ranks, whatever their tensors are.
  const Wire own_wire = wire_of(type);
  const std::vector<int64_t> shape = {own.sparse_dim(), own.dense_dim(), own._nnz(), own_wire.dtype,
                                      static_cast<int64_t>(own_wire.per), hash_of(own.sizes())};
  const at::Tensor mine = at::tensor(shape, at::kLong);
  const at::Tensor all = at::full({size_, static_cast<int64_t>(shape.size())}, kEmptySlot, at::kLong);
  Task meta(OpType::_ALLREDUCE_SPARSE, "tutti:sparse_all_reduce");
  gather_into(meta, what, all, mine, at::kCPU, rank_, size_, gathered());
  bound(meta, opts);
  begin(std::move(meta))->wait();
  std::vector<int64_t> elements, index_counts, value_counts; // by rank
  int64_t width = 1;
  for (int64_t d = own.sparse_dim(); d < own.dim(); d++) {
    width *= own.size(d);
  }
  int64_t nnz = 0;
  for (int r = 0; r < size_; r++) {
    const int64_t* theirs = all.data_ptr<int64_t>() + r * static_cast<int64_t>(shape.size());
    elements.push_back(theirs[0] == kEmptySlot ? 0 : theirs[2]);
    if (theirs[0] == kEmptySlot) {
      index_counts.push_back(0);
      value_counts.push_back(0);
      continue;
    }
    for (size_t i = 0; i < shape.size(); i++) {
      TORCH_CHECK_VALUE(i == 2 || theirs[i] == shape[i], "tutti ", what, ": the tensors of ranks ", rank_, " and ", r,
                        " have different types, shapes or numbers of sparse dimensions");
    }
    nnz += theirs[2];
    index_counts.push_back(theirs[2] * own.sparse_dim());
    value_counts.push_back(theirs[2] * width);
  }

  const at::Tensor all_indices = at::empty({nnz * own.sparse_dim()}, at::kLong);
  const at::Tensor all_values = at::empty({nnz * width}, values.options());
  Task task(OpType::_ALLREDUCE_SPARSE, "tutti:sparse_all_reduce");
  const Wire wire = wire_of(sums);
  std::vector<int64_t> value_wires = value_counts;
  for (int64_t& count : value_wires) {
    count *= static_cast<int64_t>(wire.per);
  }
  const auto gather = [&](const at::Tensor& to, const at::Tensor& from, Wire as, const std::vector<int64_t>& counts) {
    tutti_op op = op_of(TUTTI_OP_ALLGATHERV);
    op.dst = Staged(to, at::kCPU, Staged::kWrite).buffer(as);
    op.src = Staged(from, at::kCPU, Staged::kRead).buffer(as);
    op.dst_counts = counts.data();
    op.counts_len = counts.size();
    task.ops.push_back(op);
    task.keep.push_back(to);
    task.keep.push_back(from);
  };
  gather(all_indices, indices, {TUTTI_INT64, 1}, index_counts);
  gather(all_values, values, wire, value_wires);
  task.outputs = {tensors};
  bound(task, opts);
  task.after = [tensor, own, all_indices, all_values, elements, index_counts, value_counts] {
    at::Tensor sum;
    int64_t index = 0, value = 0;
    for (size_t r = 0; r < elements.size(); r++) {
      std::vector<int64_t> sizes = {elements[r]};
      sizes.insert(sizes.end(), own.sizes().begin() + own.sparse_dim(), own.sizes().end());
      const at::Tensor part = at::sparse_coo_tensor(
          all_indices.narrow(0, index, index_counts[r]).view({own.sparse_dim(), elements[r]}),
          all_values.narrow(0, value, value_counts[r]).view(sizes), own.sizes());
      sum = sum.defined() ? sum + part : part;
      index += index_counts[r];
      value += value_counts[r];
    }
    sum = sum.coalesce();
    const at::Tensor values = sum._values();
    overflow(values, tensor.scalar_type());
    tensor.copy_(sum.to(tensor.device()));
  };
  auto work = begin(std::move(task)); // copies the counts
  work->wait();
  return work;
}

} // namespace tutti_torch
