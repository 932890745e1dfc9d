// What the C ABI has in common. Python binds it in ../shared_library.py; raise ABI_VERSION there and here together when a signature changes.
#pragma once

#define LLMD_API extern "C" __attribute__((visibility("default")))

namespace llmd {
constexpr int ABI_VERSION = 5;
}
