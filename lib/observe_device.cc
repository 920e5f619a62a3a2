// SPDX-License-Identifier: MIT
// Moving averages of attention weights (MAW) and selections of calls on a device. The device keeps the MAW of the window's
// keys, the host those of all others, each counting what its own processor attends; a call hands over the MAW of the keys
// that leave the window with it.
//
// Calls are prepared long before their turn, and what they attend depends on what was selected by then. So the thread that
// meets the device completes them (lib/hand_over.h):
//
//   arrived    refreshes of earlier calls are joined, or done where appends have waited for it; the selected keys become
//              part of the jobs
//   observed   an append's queries count in the MAW of the host's keys; those handed over are taken; then the evicted keys
//              are judged, or after an append all keys. The pool's workers are awake and have nothing else to do until the
//              next call's part: a background thread would have to get a CPU first, and the next call to wait for it
//
// The results are those of calls on host tensors but for rounding. While anything is under way the state is the thread's;
// the caller's looks at it when nothing is (Session::settle_device), and at window_begin and is_unjudged, which are its own.
#include <algorithm>
#include <cmath>

#include "lib/attend_call.h"
#include "lib/device_session.h"
#include "lib/device_status.h"

namespace tandem {
namespace {

void take_keys(LateCall* late, Refresh* refresh) {
  if (late->keys.length == 0) return;
  std::swap(refresh->keys, late->keys);
  late->keys.length = 0;
  reserve_refresh(*refresh);
}

// Rows of [n_q_heads][kDevicePageLen] from or to the MAW of a page's tokens [begin, end).
template <typename F>
void for_page(const Maw& maw, int32_t n_q_heads, TokenRange range, float* page, F move) {
  for (int32_t h = 0; h < n_q_heads; ++h)
    move(maw.at(h, range.begin), page + int64_t{h} * kDevicePageLen + range.begin % kDevicePageLen, range.end - range.begin);
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
    const LayerState& state = *found->layers[l];
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
      for_page(state.maw, n_q_heads, range, page, [](float* to, const float* of, int64_t n) { std::copy_n(of, n, to); });
      return Status();
    });
    if (!fetched.ok())
      cache_->engine().log(TANDEM_LOG_WARNING, "the device is lost: attention weights of keys in the window are forgotten");
  }
}

// Appends on the host that wait to be counted: nothing of the layer is under way then.
Status AttendCall::flush_host_appends(const SequenceCall& call) {
  if (!policy_.keeps_maw || call.window->has_maw(layer_idx_)) return {};
  return session_.flush_layer(*call.sequence, args_.layer_idx, *call.state);
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
    for_page(call.state->maw, layer_.n_q_heads, range, page.data(),
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
  if (n_left <= 0 || n_left >= refresh_queries(alpha)) return;
  session_.device_->hand_over().drain();
  session_.fetch_maw(*call.sequence);
  const auto keep = static_cast<float>(std::pow(1.0 - alpha, static_cast<double>(call.q_len)));
  for (int32_t h = 0; h < layer_.n_q_heads; ++h)
    for (int64_t t = call.length; t < end; ++t) *call.state->maw.at(h, t) *= keep;
}

void AttendCall::prepare_observation(HandOverTask* task) {
  task->session = &session_;
  task->arrived = [](HandOverTask& arrived) {
    AttendArgs args;
    args.layer_idx = arrived.shape.layer_idx;
    AttendCall(*arrived.session, args, arrived.scratch).choose_late(&arrived);
  };
  task->observed = [](HandOverTask& observed) {
    AttendArgs args;
    args.layer_idx = observed.shape.layer_idx;
    AttendCall(*observed.session, args, observed.scratch).take_observation(&observed);
  };
  if (args_.speculative) {
    prepare_guess();
    task->observed = [](HandOverTask& observed) {
      AttendArgs args;
      args.layer_idx = observed.shape.layer_idx;
      AttendCall(*observed.session, args, observed.scratch).take_guess(observed);
    };
  }
  if (task->late.size() < scratch_.calls.size()) task->late.resize(scratch_.calls.size());
  task->bases = cache_.store().bases();
  task->judged.reserve(scratch_.calls.size());  // no memory is asked for once keys have left
  int64_t n_evicted = 0;
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    SequenceCall& call = scratch_.calls[i];
    LateCall& late = task->late[i];
    const bool evicts = !args_.speculative;  // when it is committed
    // Queries of tokens that are there already may all be older than the window: from these nothing leaves.
    const int64_t evicted = evicts ? std::min(session_.evicted_to(*call.state, call.length), call.length) : 0;
    call.evict_end = std::max(evicted, call.resident_begin);
    call.first_evicted = n_evicted;
    n_evicted += call.evict_end - call.resident_begin;
    call.flushes = !call.is_append && call.state->is_unjudged;
    late.keys.length = 0;
    const bool needs_all = call.is_append || call.flushes || call.state->refresh.wants_all;
    if (call.is_append || call.flushes || (evicts && call.evict_end > call.found_begin))
      session_.fill_runs(*call.sequence, args_.layer_idx, needs_all ? 0 : call.found_begin, call.length, &late.keys);
    if (call.selected) late.pages = call.sequence->pages;
    if (call.selected && layer_.rope != nullptr) late.positions = call.sequence->positions;
    bind_refresh(session_, *call.state, layer_);
  }
}

// The jobs' runs again, with those of the selected keys.
void AttendCall::choose_late(HandOverTask* task) {
  task->runs.clear();
  task->selected_kv_bytes = 0;
  size_t j = 0;
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    const SequenceCall& call = scratch_.calls[i];
    Refresh& refresh = call.state->refresh;
    session_.join(*call.state);
    if (call.flushes && refresh.due) {
      take_keys(&task->late[i], &refresh);
      refresh.host_end = call.found_begin;
      re_evaluate(refresh);
    }
    if (!call.has_host) continue;
    for (int32_t h = 0; h < layer_.n_kv_heads; ++h, ++j) {
      const size_t first = task->runs.size();
      task->runs.insert(task->runs.end(), scratch_.jobs[j].runs, scratch_.jobs[j].runs + scratch_.jobs[j].n_runs);
      scratch_.job_runs[j] = first;
      if (!call.selected) continue;
      scratch_.runs.swap(task->runs);
      add_selected_runs(call, {task->late[i].pages, task->bases, task->late[i].positions}, h);
      scratch_.runs.swap(task->runs);
      task->selected_kv_bytes += call.state->heads[static_cast<size_t>(h)].n_tokens * task->planes->row_bytes.total();
    }
  }
  scratch_.job_runs[j] = task->runs.size();
  scratch_.runs.swap(task->runs);
  for (size_t job = 0; job < j; ++job) finish_runs(job);
}

void AttendCall::take_observation(HandOverTask* task) {
  const DeviceExchange exchange = session_.device_->exchange(layer_idx_);
  const std::byte* slot = session_.device_->slot(task->ticket);
  const auto* maw = reinterpret_cast<const float*>(slot + exchange.maw_at);
  task->judged.clear();
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    const SequenceCall& call = scratch_.calls[i];
    Refresh& refresh = call.state->refresh;
    session_.join(*call.state);
    take_keys(&task->late[i], &refresh);
    if (call.counts_on_host()) count_host_weights(call, exchange, slot);
    for (int64_t t = call.resident_begin; t < call.evict_end;) {
      const int64_t n = std::min(Maw::kBlock - t % Maw::kBlock, call.evict_end - t);
      for (int32_t h = 0; h < layer_.n_q_heads; ++h)
        std::copy_n(maw + h * int64_t{exchange.n_evicted} + call.first_evicted + t - call.resident_begin, n,
                    call.state->maw.at(h, t));
      t += n;
    }
    refresh.host_end = call.evict_end;
    if (call.is_append) {
      refresh.due = true;
      if (call.is_last) re_evaluate(refresh);
    } else if (call.evict_end > call.found_begin) {
      refresh.evict_begin = call.found_begin;
      refresh.evict_end = call.evict_end;
      task->judged.push_back(&refresh);
    }
  }
  judge_evicted_by_all(task->judged);
}

// Of an append over all the host's keys; of a single query over those that the session has just found.
void AttendCall::count_host_weights(const SequenceCall& call, const DeviceExchange& exchange, const std::byte* slot) {
  const int64_t n = std::min(call.q_len, refresh_queries(session_.options_.alpha)), skipped = call.q_len - n;
  const int64_t row = (call.first_row * layer_.n_kv_heads + skipped) * layer_.group_size;
  CountedQueries queries;
  queries.q = reinterpret_cast<const float*>(slot + exchange.q_at) + row * layer_.k_head_dim;
  queries.lse = reinterpret_cast<const float*>(slot + exchange.lse_at) + row;
  queries.head_stride = call.q_len * layer_.group_size;
  queries.n = n;
  queries.n_skipped = skipped;
  queries.begin = call.visibility.begin + skipped;
  queries.end = call.visibility.end + skipped;
  queries.first_token = call.is_append ? 0 : call.found_begin;
  queries.end_token = call.resident_begin;
  count_weights(call.state->refresh, queries);
}

}  // namespace tandem
