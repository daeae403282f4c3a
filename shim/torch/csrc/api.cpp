#include "api.h"

#include <unistd.h>

#include <mutex>
#include <stdexcept>

namespace tutti_torch {

namespace {

std::mutex mutex;
std::string library = "libtutti.so";
Api functions;
bool opened = false;
pid_t opener = 0;

} // namespace

void set_library(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex);
  library = path;
}

const Api& open_library() {
  std::lock_guard<std::mutex> lock(mutex);
  if (opened) {
    return functions;
  }
  Api found;
  char why[1024];
  if (tutti_dl_open(&found, library.c_str(), why, sizeof why) != 0) {
    throw std::runtime_error(std::string(why) + " (TUTTI_LIBRARY gives the path of Tutti's library)");
  }
  functions = found;
  opener = getpid();
  opened = true;
  return functions;
}

const Api& api() {
  return functions;
}

bool forked() {
  return opened && opener != getpid();
}

} // namespace tutti_torch
