// SPDX-License-Identifier: MIT
// Copies structs across the ABI by the rule of struct_size.
//
// A caller built against an older header passes a smaller struct. The members that it lacks get their defaults. A caller
// built against a newer header passes a larger struct. It is accepted if its unknown part is zero, so no request is silently
// dropped. A struct is never smaller than in the version that introduced it.
//
// When a struct grows, its tandem_*_init() gets a new symbol version. Older programs keep the older function, which writes
// only the members that they know.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/base/abi_layout.h"
#include "lib/base/caller_pointer.h"
#include "lib/base/status.h"

namespace tandem {

inline constexpr uint32_t kMaxStructBytes = 4096;

// Facts of a struct of the ABI: its size in the version that introduced it, and its current defaults.
template <typename T>
struct AbiStruct;

#define TANDEM_ABI_STRUCT(type, init, first_bytes)                    \
  template <>                                                         \
  struct AbiStruct<type> {                                            \
    static constexpr const char* kName = #type;                       \
    static constexpr uint32_t kFirstBytes = first_bytes;              \
    static constexpr type defaults() { return init; }                 \
  };                                                                  \
  static_assert(sizeof(void*) != 8 || sizeof(type) >= (first_bytes)); \
  static_assert(sizeof(void*) != 8 || TANDEM_VERSION_MINOR > 2 || sizeof(type) == (first_bytes));

#define TANDEM_TENSOR_INIT_                               \
  {                                                       \
    sizeof(tandem_tensor), 0, 0, 0, nullptr, 0, 0, {}, {} \
  }
TANDEM_ABI_STRUCT(tandem_tensor, TANDEM_TENSOR_INIT_, 96)
TANDEM_ABI_DEFAULTS(TANDEM_ABI_STRUCT)
#undef TANDEM_TENSOR_INIT_
#undef TANDEM_ABI_STRUCT

// Untyped forms. Messages put `prefix` before "struct_size": "", "q.", "layers[3].". The prefix without its dot names the
// struct itself, and "" stands for "options". `known` holds the defaults of a struct of known_bytes.
struct StructSizes {
  const char* type_name;
  uint32_t first_bytes;
  uint32_t known_bytes;
  uint32_t alignment;
};
Status check_struct_size(const void* data, const std::string& prefix, const StructSizes& sizes, uint32_t* struct_size);
Status check_stride(const void* element, const std::string& prefix, const std::string& array, uint32_t stride);
Status copy_struct_in(const void* from, const std::string& prefix, const StructSizes& sizes, void* known);
void copy_struct_out(const void* known, uint32_t known_bytes, void* to);

template <typename T>
constexpr StructSizes struct_sizes() {
  const uint32_t first = sizeof(void*) == 8 ? AbiStruct<T>::kFirstBytes : static_cast<uint32_t>(sizeof(T));
  return {AbiStruct<T>::kName, first, static_cast<uint32_t>(sizeof(T)), alignof(T)};
}

Status check_reserved(const char* field, int64_t value);  // refuses a value other than 0

// Copies the caller's struct to *to, in this version's size. `from` must not be null.
template <typename T>
Status copy_in(const void* from, const char* prefix, T* to) {
  *to = AbiStruct<T>::defaults();
  return copy_struct_in(from, prefix, struct_sizes<T>(), to);
}

// Copies the caller's array of n > 0 structs. Its stride is the size of the caller's struct, which may differ from ours.
// name: "layers".
template <typename T>
Status copy_array_in(const T* from, const std::string& name, int64_t n, std::vector<T>* to) {
  uint32_t stride = 0;
  TANDEM_TRY(check_struct_size(from, name + "[0].", struct_sizes<T>(), &stride));
  to->resize(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const char* const element = reinterpret_cast<const char*>(from) + i * stride;
    const std::string prefix = name + "[" + std::to_string(i) + "].";
    TANDEM_TRY(check_stride(element, prefix, name, stride));
    TANDEM_TRY(copy_in(element, prefix.c_str(), &(*to)[static_cast<size_t>(i)]));
  }
  return {};
}

// Like copy_in(), but null means all defaults.
template <typename T>
Status copy_in_or_default(const T* from, const char* prefix, T* to) {
  *to = AbiStruct<T>::defaults();
  return from == nullptr ? Status() : copy_struct_in(from, prefix, struct_sizes<T>(), to);
}

// For a struct that the library fills in. check_out() checks it before the call does anything, copy_out() writes it at the
// end. struct_size keeps its value.
template <typename T>
Status check_out(const T* to, const char* parameter) {
  TANDEM_TRY(require(to, parameter));
  T current;
  TANDEM_TRY(copy_in<T>(to, "", &current));
  return check_reserved("reserved", current.reserved);
}
template <typename T>
void copy_out(const T& known, T* to) {
  copy_struct_out(&known, sizeof(T), to);
}

// Check members that the core does not check itself: reserved members, empty strings, sizes that no machine has.
Status check_engine_options(const tandem_engine_options& options);
Status check_session_options(const tandem_session_options& options);

}  // namespace tandem
