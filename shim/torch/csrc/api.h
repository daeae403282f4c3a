// The functions of libtutti.so. The library is never linked: it is opened when the first group is
// made, so that a process without a group has no Go runtime.
#pragma once

#include <string>

#include "tutti_dl.h"

namespace tutti_torch {

using Api = tutti_dl;

// Sets the path of the library that open_library opens.
void set_library(const std::string& path);

// Opens the library, once, and returns its functions. It throws std::runtime_error with what to do
// if that is not possible.
const Api& open_library();

// Returns the functions of the library, which must be open.
const Api& api();

// Reports whether this process is a forked child of the one that opened the library.
bool forked();

} // namespace tutti_torch
