// Groups whose members the program names: reconfigure of c10d.
#include <c10/util/hash.h>

#include <algorithm>
#include <cstdlib>
#include <variant>

#include "backend.h"
#include "interrupt.h"
#include "store.h"

namespace tutti_torch {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

namespace {

// The key under which the processes that share a store agree on the secret of their members.
const char* const kSecret = "tutti/members/secret";

bool set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

} // namespace

tutti_member Backend::member() const {
  refuse_if_closed("tutti reconfigure");
  {
    std::lock_guard<std::mutex> guard(member_mutex_);
    if (member_ != 0) {
      return member_;
    }
  }
  const Api& tutti = open_library();
  tutti_config config = this->config(true); // the groups that it forms listen too
  config.on_failure = TUTTI_REPORT_ALWAYS; // those end with the first lost rank
  if (single(options_->ports)) { // it is the group's
    config.ports = "0";
  }
  std::string secret;
  if (!set("TUTTI_SECRET") && !set("TUTTI_SECRET_FILE")) { // the first one to come makes it
    const std::string mine = hex_of_random_bytes(32);
    secret = without_prefixes(store_)->compareSet(kSecret, std::string(), mine);
    config.secret = secret.data();
    config.secret_len = secret.size();
  }
  tutti_member made = 0;
  { // without a lock: a signal handler may end the group
    Interruptible interruptible(tutti);
    interruptible.check(tutti.tutti_member_new(&config, &made), [&] { tutti.tutti_member_close(made); });
  }
  std::lock_guard<std::mutex> guard(member_mutex_);
  if (closed_ || member_ != 0) { // close has come, or another thread was faster
    tutti.tutti_member_close(made);
    refuse_if_closed("tutti reconfigure");
    return member_;
  }
  member_timeout_ = std::chrono::duration_cast<milliseconds>(nanoseconds(config.timeout_ns));
  return member_ = made;
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
bool Backend::supportsReconfigure() const {
  return true;
}

c10d::ReconfigureHandle Backend::get_reconfigure_handle() const {
  WithoutGil released;
  const tutti_member own = member();
  uint64_t length = 0;
  std::string handle;
  int code = api().tutti_member_handle(own, nullptr, 0, &length);
  if (code == TUTTI_OK) {
    handle.resize(length + 1);
    code = api().tutti_member_handle(own, handle.data(), handle.size(), &length);
  }
  if (code != TUTTI_OK) {
    raise(code, api().tutti_last_error());
  }
  handle.resize(length);
  return handle;
}

// The new group is made before the old one ends, so that an error leaves that as it was.
c10::intrusive_ptr<c10d::Work> Backend::reconfigure(const c10d::ReconfigureOptions& opts) {
  WithoutGil released;
  const tutti_member own = member();
  std::vector<std::string> handles;
  std::visit([&](const auto& given) { handles.assign(given.begin(), given.end()); }, opts.handles);
  if (std::holds_alternative<std::unordered_set<c10d::ReconfigureHandle>>(opts.handles)) {
    std::sort(handles.begin(), handles.end()); // the same order at all members
  }
  std::vector<const char*> texts;
  for (const std::string& handle : handles) {
    texts.push_back(handle.c_str());
  }
  const std::string uuid = std::to_string(opts.uuid);
  const Api& tutti = api();
  tutti_group fresh = 0;
  int32_t rank = 0, size = 0;
  milliseconds formed_with{0};
  {
    {
      std::lock_guard<std::mutex> guard(member_mutex_);
      forming_++;
    }
    Interruptible interruptible(tutti);
    int code = tutti.tutti_form(own, uuid.c_str(), texts.data(), static_cast<uint32_t>(texts.size()),
                                nanoseconds(opts.timeout.value_or(options_->timeout)).count(), &fresh);
    if (code == TUTTI_OK && (code = tutti.tutti_rank(fresh, &rank)) == TUTTI_OK) {
      code = tutti.tutti_size(fresh, &size);
    }
    const std::string why = code == TUTTI_OK ? "" : tutti.tutti_last_error();
    bool aborted = false;
    {
      std::lock_guard<std::mutex> guard(member_mutex_);
      forming_--;
      formed_with = member_timeout_;
      aborted = member_ != own;
    }
    interruptible.rethrow([&] { tutti.tutti_close(fresh); });
    if (code != TUTTI_OK) {
      tutti.tutti_close(fresh);
      refuse_if_closed("tutti reconfigure");
      if (aborted) {
        raise(TUTTI_ECLOSED, "tutti reconfigure: the process group was aborted");
      }
      raise(code, "tutti reconfigure: " + why);
    }
  }
  replacing_++;
  const tutti_group before = group_;
  tutti.tutti_close(before); // ends all operations, also one that a thread is starting, with mutex_ held
  tutti_group old = 0;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    replacing_--;
    if (!closed_) {
      old = group_.exchange(fresh);
      running_->recovered();
      rank_ = rank;
      size_ = size;
      joined_ = formed_with;
      // Other groups may have the uuid, and the store: handles[0] is in none of them.
      prefix_ = "tutti/members/" + uuid + "/" + c10::sha1(handles[0]).str() + "/";
      seq_ = barriers_ = shrinks_ = 0;
      formed_ = true;
      outlives_ = false;
      options_->global_ranks_in_group.clear(); // they are not known
      running_->name("", {});
      suspended_ = false;
    } else {
      old = fresh;
      fresh = 0;
    }
  }
  if (old != before) { // another call had made it, or the process group was shut down
    tutti.tutti_close(old);
  }
  if (fresh == 0) {
    raise(TUTTI_ECLOSED, "tutti reconfigure: the process group was shut down");
  }
  for (const auto& work : running_->all()) {
    work->await(kClose);
  }
  auto work = c10::make_intrusive<Work>(rank, 0, Task(c10d::OpType::UNKNOWN, "tutti:reconfigure"), ordered_, running_);
  work->poll(); // it is over
  return work;
}
#endif

} // namespace tutti_torch
