// SPDX-License-Identifier: MIT
// Shared by the entry points of the C ABI: the guard around every body, handles by type, and small checks.
//
// An entry point resolves its handles, copies its options, checks its arguments and calls the core. It writes to the
// caller's memory only after all of that has succeeded. It has no logic of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "lib/base/caller_pointer.h"
#include "lib/base/handle.h"
#include "lib/base/status.h"

namespace tandem {

class Engine;
class Model;
class Cache;
class Weights;
struct SessionObject;  // lib/abi/api_session.cc

// Runs body(context) and turns its result into a status and an error object. Catches all exceptions.
int32_t run_guarded(const char* function, tandem_error** error, Status (*body)(void* context), void* context) noexcept;

template <typename Body>
int32_t guarded(const char* function, tandem_error** error, Body&& body) noexcept {
  using Plain = std::remove_reference_t<Body>;
  return run_guarded(
      function, error, [](void* context) -> Status { return (*static_cast<Plain*>(context))(); }, &body);
}

template <typename Public>
struct HandleTraits;
template <>
struct HandleTraits<tandem_engine> {
  using Object = Engine;
  static constexpr HandleKind kKind = HandleKind::kEngine;
};
template <>
struct HandleTraits<tandem_model> {
  using Object = const Model;
  static constexpr HandleKind kKind = HandleKind::kModel;
};
template <>
struct HandleTraits<tandem_cache> {
  using Object = Cache;
  static constexpr HandleKind kKind = HandleKind::kCache;
};
template <>
struct HandleTraits<tandem_session> {
  using Object = SessionObject;
  static constexpr HandleKind kKind = HandleKind::kSession;
};
template <>
struct HandleTraits<tandem_weights> {
  using Object = Weights;
  static constexpr HandleKind kKind = HandleKind::kWeights;
};

template <typename Public>
Status resolve(const Public* handle, const char* parameter, std::shared_ptr<typename HandleTraits<Public>::Object>* object) {
  std::shared_ptr<void> any;
  TANDEM_TRY(find_handle(handle, HandleTraits<Public>::kKind, parameter, &any));
  *object = std::static_pointer_cast<typename HandleTraits<Public>::Object>(std::move(any));
  return {};
}

template <typename Public>
Public* publish(std::shared_ptr<typename HandleTraits<Public>::Object> object) {
  using Plain = std::remove_const_t<typename HandleTraits<Public>::Object>;
  return static_cast<Public*>(make_handle(HandleTraits<Public>::kKind, std::const_pointer_cast<Plain>(std::move(object))));
}

Status require_range(const char* field, int64_t value, int64_t low, int64_t high);  // low <= value <= high
// Refuses a stream other than NULL, as the tensors are in host memory.
Status require_host_stream(const void* stream);
// The most tokens that a caller may ask for at once. No sequence holds more.
inline constexpr int64_t kMaxTokens = INT32_MAX;
Status require_tokens(const char* field, int64_t value);  // INVALID_ARGUMENT below 0, CAPACITY above

// Texts for callers: at most buffer_bytes, final 0 included. *needed_bytes (may be null) gets the full size.
Status check_text_buffer(const char* buffer, size_t buffer_bytes, const size_t* needed_bytes);
void write_text(const std::string& text, char* buffer, size_t buffer_bytes, size_t* needed_bytes);

}  // namespace tandem
