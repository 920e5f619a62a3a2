// SPDX-License-Identifier: MIT
// Moving averages of attention weights (MAW) and selections of calls on a device. The device keeps the MAW of the window's
// keys, the host those of all others, each counting what its own processor attends; a call hands over the MAW of the keys
// that leave the window with it.
//
// Calls are prepared long before their turn, and what they attend depends on what was selected by then. So their host part
// completes them when the ticket has arrived, and learns from them when the device has observed (lib/host_part.h,
// lib/select/hgca_observe.cc).
//
// The results are those of calls on host tensors but for rounding. While tickets are under way the state belongs to the
// thread that meets the device. The calling thread looks at the state when none is (Cache::settle), and at window_begin and
// is_unjudged, which are its own.
#include <algorithm>
#include <cmath>

#include "lib/attend_call.h"
#include "lib/device_session.h"
#include "lib/device_status.h"

namespace tandem {
namespace {

// Rows of [n_q_heads][kDevicePageLen] from or to the MAW of a page's tokens [begin, end).
template <typename F>
void for_page(const SelectState& state, int32_t n_q_heads, TokenRange range, float* page, F move) {
  for (int32_t h = 0; h < n_q_heads; ++h)
    move(state.weights(h, range.begin), page + int64_t{h} * kDevicePageLen + range.begin % kDevicePageLen,
         range.end - range.begin);
}

// part(range) for the parts of [begin, end) in each page.
template <typename F>
Status for_pages(TokenRange range, F part) {
  for (int64_t t = range.begin; t < range.end;) {
    const int64_t end = std::min(range.end, (t / kDevicePageLen + 1) * kDevicePageLen);
    TANDEM_TRY(part(TokenRange{t, end}));
    t = end;
  }
  return {};
}

}  // namespace

void Session::fetch_maw(const Sequence& sequence) {
  SequenceState* found = state(sequence.id);
  if (found == nullptr || device_ == nullptr) return;
  DeviceWindow& window = found->window;
  for (size_t l = 0; l < found->layers.size(); ++l) {
    if (!window.has_maw(l)) continue;
    device_->hand_over().drain();
    const LayerState& state = found->layers[l];
    const int32_t n_q_heads = cache_->layers()[l].n_q_heads;
    const TokenRange valid = window.valid(l);
    // Where a call is taken back, the window begins before what it had given to the device.
    const int64_t begin = std::max({state.window_begin, window.maw_begin(l), valid.begin});
    float* const page = device_->maw_page().data();
    window.forget_maw(l);
    const Status fetched = for_pages({begin, valid.end}, [&](TokenRange range) {
      const auto* from =
          reinterpret_cast<const std::byte*>(window.page_of(range.begin)) + device_->geometry().layers[l].maw_at;
      void* const stream = nullptr;
      TANDEM_TRY(call_device(device_->device(), &DeviceTable::copy, page, from,
                             int64_t{n_q_heads} * kDevicePageLen * static_cast<int64_t>(sizeof(float)), stream));
      for_page(*state.selection, n_q_heads, range, page,
               [](float* to, const float* of, int64_t n) { std::copy_n(of, n, to); });
      return Status();
    });
    if (!fetched.ok())
      cache_->engine().log(TANDEM_LOG_WARNING, "the device is lost: attention weights of keys in the window are forgotten");
  }
}

// Appends on the host that wait to be counted: nothing of the layer is under way then.
Status AttendCall::flush_host_appends(const SequenceCall& call) {
  if (!policy_.keeps_maw || call.window->has_maw(layer_idx_)) return {};
  return session_.flush_layer(*call.sequence, *call.state);
}

// Of all tokens that the window has before the call's own, where those there are out of date: queries of tokens that are
// there already may not see the newest.
Status AttendCall::give_maw(const SequenceCall& call) {
  const int64_t end = args_.k != nullptr ? call.first_query : call.sequence->lengths[layer_idx_];
  if (call.window->has_maw(layer_idx_) || call.window_begin >= end) return {};
  DeviceSession& device = *session_.device_;
  device.hand_over().drain();
  std::vector<float> page(static_cast<size_t>(int64_t{layer_.n_q_heads} * kDevicePageLen), 0.0f);
  return for_pages({call.window_begin, end}, [&](TokenRange range) {
    for_page(*call.state->selection, layer_.n_q_heads, range, page.data(),
             [](const float* from, float* to, int64_t n) { std::copy_n(from, n, to); });
    auto* to = reinterpret_cast<std::byte*>(call.window->page_of(range.begin)) + device.geometry().layers[layer_idx_].maw_at;
    return call_device(device.device(), &DeviceTable::copy, to, page.data(),
                       static_cast<int64_t>(page.size() * sizeof(float)), args_.stream);
  });
}

// Queries of tokens that are there already, in several parts: to the keys behind a part its queries give nothing, but older
// weights fade with them. Where enough queries follow nothing would be left of these anyway.
void AttendCall::fade_newer(const SequenceCall& call) {
  const int64_t end = call.sequence->lengths[layer_idx_], n_left = end - call.length;
  const float alpha = session_.options_.alpha;
  if (n_left <= 0 || n_left >= counted_queries(alpha)) return;
  session_.device_->hand_over().drain();
  session_.fetch_maw(*call.sequence);
  const auto keep = static_cast<float>(std::pow(1.0 - alpha, static_cast<double>(call.q_len)));
  for (int32_t h = 0; h < layer_.n_q_heads; ++h)
    for (int64_t t = call.length; t < end; ++t) *call.state->selection->weights(h, t) *= keep;
}

// Copies of what the ticket's host part needs, while the sequences cannot grow.
void AttendCall::prepare_selection() {
  int64_t n_evicted = 0;
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    SequenceCall& call = scratch_.calls[i];
    call.state->selection->prepare_on_device(&call, args_.speculative, &scratch_.host.keep_late(i, call.selected),
                                             &n_evicted);
  }
}

}  // namespace tandem
