// A c10d store as the store in which the ranks of a group meet.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include "api.h"

namespace tutti_torch {

// Returns the value of a key, empty if it has none. It does not wait, even if another rank deletes
// the key meanwhile, as check and get would.
std::vector<uint8_t> peek(c10d::Store& store, const std::string& key);

// Returns callbacks over store, which they own until their release is called.
tutti_kv callbacks_of(const c10::intrusive_ptr<c10d::Store>& store);

// Returns another connection to the same store if it can be had: a client that waits in the store
// blocks the others of its connection.
c10::intrusive_ptr<c10d::Store> another(const c10::intrusive_ptr<c10d::Store>& store);

// Returns the store that is behind prefixes, which torch gives each group.
c10::intrusive_ptr<c10d::Store> without_prefixes(const c10::intrusive_ptr<c10d::Store>& store);

// Returns n bytes from the system's source of randomness as hexadecimal digits.
std::string hex_of_random_bytes(size_t n);

} // namespace tutti_torch
