// SPDX-License-Identifier: MIT
#include "lib/attend/host_lane.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <mutex>
#include <new>
#include <shared_mutex>

#include "lib/attend/call_keys.h"
#include "lib/attend/commit.h"
#include "lib/attend/named_call.h"
#include "lib/attend/session_states.h"
#include "lib/model/hadamard.h"
#include "lib/tensors/convert.h"

namespace tandem {
namespace {

// Places a sequence's rows of floats. Calls take(n) for each array of n floats.
template <typename F>
void place_rows(const Call& call, SequenceCall& of, F take) {
  const Layer& layer = call.row_layer();
  const int64_t n_rows = layer.n_q_heads * of.q_len;
  of.q = take(n_rows * layer.k_head_dim);
  of.o = take(n_rows * layer.v_head_dim);
  of.lse = take(n_rows);
  if (of.has_host) {
    of.host_o = take(n_rows * layer.v_head_dim);
    of.host_lse = take(n_rows);
  }
  if (of.capped.any) {
    of.capped.q = take(n_rows * layer.k_head_dim);
    of.capped.o = take(n_rows * layer.v_head_dim);
    of.capped.lse = take(n_rows);
  }
  if (of.observes) of.logits = take(n_rows * (of.length - of.resident_begin));
}

// Runs place_rows() twice: first to count the floats, then to set the addresses.
void place_all_rows(const Call& call) {
  AttendScratch& scratch = call.scratch;
  scratch.n_floats = 0;
  for (SequenceCall& of : scratch.calls) place_rows(call, of, [&](int64_t n) -> float* { return scratch.take(n), nullptr; });
  scratch.floats.reserve(scratch.n_floats);
  scratch.n_floats = 0;
  for (SequenceCall& of : scratch.calls) place_rows(call, of, [&](int64_t n) { return scratch.at(scratch.take(n)); });
}

const SequenceCall& call_of(const AttendScratch& scratch, int64_t row) {
  const auto after = std::upper_bound(scratch.calls.begin(), scratch.calls.end(), row,
                                      [](int64_t wanted, const SequenceCall& of) { return wanted < of.first_row; });
  return *std::prev(after);
}

// Returns the row of query head `head` of query t in rows of [n_kv_heads][q_len][group_size].
int64_t row_of(const Layer& layer, const SequenceCall& of, int64_t t, int32_t head) {
  return (head / layer.group_size * of.q_len + t) * layer.group_size + head % layer.group_size;
}

// cos and sin of the pairs of a row of at most 576 dims, with some reserve.
constexpr int64_t kMostAngles = int64_t{2} * 320;

void pack_token(const Call& call, int64_t row) {
  const Layer& layer = call.row_layer();
  const Backend& cpu = call.cpu();
  const TensorView& from = call.args.q;
  const SequenceCall& of = call_of(call.scratch, row);
  const int64_t t = row - of.first_row;
  float angles[kMostAngles];
  if (layer.rope != nullptr) {
    const int64_t position = of.visibility.tree_words > 0 ? of.tree_positions[t] : of.sequence->position(of.first_query + t);
    rope_angles(*layer.rope, position, angles);
  }
  for (int32_t h = 0; h < layer.n_q_heads; ++h) {
    float* q = of.q + row_of(layer, of, t, h) * layer.k_head_dim;
    convert_row(cpu, from.dtype, from.row(row, h), TANDEM_F32, q, layer.k_head_dim);
    if (layer.rope != nullptr) rope_apply(*layer.rope, angles, q);
    if (layer.k_rotation == TANDEM_ROTATION_HADAMARD) hadamard_rotate(q, layer.k_head_dim);
  }
}

// Packs the queries that attend capped keys, rotated by the largest distance. As capped keys are not rotated, their
// attention factor is applied to the queries.
void pack_capped(const Call& call, int64_t row) {
  const SequenceCall& of = call_of(call.scratch, row);
  if (!of.capped.any) return;
  const Layer& layer = call.row_layer();
  const TensorView& from = call.args.q;
  const int64_t t = row - of.first_row;
  const bool has_keys = of.capped.end[t] > 0;
  float angles[kMostAngles];
  if (has_keys) {
    rope_angles(*layer.rope, call.session.options.patterns[call.facts.idx].max_distance, angles);
    for (int32_t i = 0; i < 2 * layer.rope->n_pairs; ++i) angles[i] *= layer.rope->attn_factor;
  }
  for (int32_t h = 0; h < layer.n_q_heads; ++h) {
    const int64_t at = row_of(layer, of, t, h);
    of.capped.lse[at] = -HUGE_VALF;  // for rows that no job has
    if (!has_keys) continue;
    float* q = of.capped.q + at * layer.k_head_dim;
    convert_row(call.cpu(), from.dtype, from.row(row, h), TANDEM_F32, q, layer.k_head_dim);
    rope_apply(*layer.rope, angles, q);
  }
}

void write_token(const Call& call, int64_t row) {
  const Layer& layer = call.row_layer();
  const Backend& cpu = call.cpu();
  const AttendArgs& args = call.args;
  const SequenceCall& of = call_of(call.scratch, row);
  for (int32_t h = 0; h < layer.n_q_heads; ++h) {
    const int64_t at = row_of(layer, of, row - of.first_row, h);
    convert_row(cpu, TANDEM_F32, of.o + at * layer.v_head_dim, args.o.dtype, args.o.row(row, h), layer.v_head_dim);
    if (args.lse != nullptr) args.lse[row * args.lse_token_stride + h * args.lse_head_stride] = of.lse[at];
  }
}

// Calls visit(call, row) for every token of the call, on the pool if there is enough work. Stops after the call has been
// cancelled.
void for_tokens(const Call& call, void (*visit)(const Call& call, int64_t row)) {
  constexpr int64_t kWorthSpreading = 32768;  // elements
  constexpr int64_t kTaskTokens = 16;         // handing out a task costs the same, however short it is
  struct Visit {
    const Call& call;
    void (*visit)(const Call& call, int64_t row);
    int64_t n_tokens, task_tokens;
  };
  const int64_t n_tokens = call.args.q.n_tokens, task_tokens = n_tokens < kManyTokens ? 1 : kTaskTokens;
  Visit visits{call, visit, n_tokens, task_tokens};
  const auto task = [](void* context, int64_t task_idx, int32_t) {
    const Visit& of = *static_cast<const Visit*>(context);
    if (of.call.args.watch.is_cancelled()) return;
    const int64_t end = std::min(of.n_tokens, (task_idx + 1) * of.task_tokens);
    for (int64_t row = task_idx * of.task_tokens; row < end; ++row) of.visit(of.call, row);
  };
  const int64_t n_tasks = (n_tokens + task_tokens - 1) / task_tokens;
  if (n_tokens * call.layer().n_q_heads * call.layer().k_head_dim >= kWorthSpreading)
    return call.cpu().table->run(call.cpu().self, n_tasks, task, &visits);
  for (int64_t i = 0; i < n_tasks; ++i) task(&visits, i, 0);
}

bool has_capped(const Call& call) {
  return std::any_of(call.calls().begin(), call.calls().end(), [](const SequenceCall& of) { return of.capped.any; });
}

// Attends the call's queries batch by batch.
Status attend_named(const Call& call) {
  HostPart& host = call.scratch.host;
  const Watch* const watch = call.args.is_watched ? &call.args.watch : nullptr;
  while (!host.named().had_all()) {
    {
      std::shared_lock lock(call.cache().mutex());
      if (!host.named().next(call.cache())) break;
    }
    TANDEM_TRY(host.named().attend(watch));
    TANDEM_TRY(call.args.watch.check());
  }
  return {};
}

// The call is already committed. Without memory to note its named keys, they cannot be listed.
void note_named(const Call& call) {
  try {
    call.scratch.host.named().note();
  } catch (const std::bad_alloc&) {
    for (const SequenceCall& of : call.calls()) of.state->named.clear();
  }
}

}  // namespace

Status HostLane::start(Call& call, bool*) {
  if (call.session.step.is_planned)
    return fail(TANDEM_ERROR_INVALID_STATE, "q.device_type", "q is in host memory, and the open step was begun on a stream");
  TANDEM_TRY(check_named_layer(call));
  if (call.facts.policy.names_keys() && call.args.parent_idx != nullptr)
    return fail(
        TANDEM_ERROR_UNSUPPORTED, "parent_idx",
        "parent_idx in layer %d, which has policy \"%s\": its queries are a chain of tokens, for which parent_idx is NULL",
        call.args.layer_idx, call.facts.policy.name);
  return call.args.watch.check();
}

Status HostLane::join(Call& call) {
  for (const SequenceCall& of : call.calls()) {
    SequenceState* state = nullptr;
    {
      std::shared_lock lock(call.cache().mutex());
      state = call.session.states->find(of.sequence->id);
    }
    if (state != nullptr)
      call.session.sums.refresh_wait_ns += state->layers[call.facts.idx].selection->join(call.args.watch);
    TANDEM_TRY(call.args.watch.check());
  }
  return {};
}

Status HostLane::reserve(Call& call) { return take_named(call); }

Status HostLane::next_chunk(Call& call, ChunkPlace* place, Chunk* chunk) {
  place->call = call.calls().size();
  chunk->call = &call;
  chunk->work = this;
  return {};
}

Status HostLane::prepare(Call& call) {
  SessionStates& states = *call.session.states;
  const Watch& watch = call.args.watch;
  clear_visibility(call.scratch);
  const auto is_append = [](const SequenceCall& of) { return of.is_append; };
  call.by_q_head = call.facts.policy.follows_patterns && !call.session.options.patterns[call.facts.idx].groups_are_alike &&
                   std::any_of(call.calls().begin(), call.calls().end(), is_append);
  for (SequenceCall& of : call.calls()) {
    of.by_q_head = call.by_q_head;
    Sequence& sequence = *of.sequence;
    // Only tokens that will be written need pages of their own.
    if (call.appends())
      TANDEM_TRY(call.cache().ensure(sequence, std::max(sequence.longest(), of.length), "q_lens", watch));
    else
      TANDEM_TRY(states.on_reserve(sequence, sequence.longest(), watch));
    if (call.args.parent_idx == nullptr)
      sequence.extend_positions(of.length);
    else
      sequence.parents.reserve(static_cast<size_t>(of.q_len));
    of.state = &states.find(sequence.id)->layers[call.facts.idx];
    states.fetch_maw(sequence);
    of.foreign_begin = of.window_begin = of.state->window_begin;
    TANDEM_TRY(see_keys(call, of));
    TANDEM_TRY(of.state->selection->prepare_on_host(&of, call.args.speculative));
  }
  place_all_rows(call);
  point_visibility(call.scratch);
  call.scratch.host.begin(call.host_facts(), {});
  call.scratch.host.lay_out(call.scratch.calls);
  return {};
}

Status HostLane::fill(Call& call) {
  const AttendArgs& args = call.args;
  if (call.appends())
    for (const SequenceCall& of : call.calls())
      write_rows(call.cache(), *of.sequence, args.layer_idx, of.first_query,
                 {args.k, args.v, args.x, of.first_row, of.q_len, args.watch});
  return args.watch.check();
}

Status HostLane::launch(Call& call) {
  HostPart& host = call.scratch.host;
  const Watch& watch = call.args.watch;
  if (!call.calls().empty()) for_tokens(call, pack_token);
  if (has_capped(call)) for_tokens(call, pack_capped);
  TANDEM_TRY(watch.check());
  if (host.selects()) {
    std::shared_lock lock(call.cache().mutex());
    host.choose();
  }
  if (call.facts.policy.names_keys())
    for (const SequenceCall& of : call.calls()) TANDEM_TRY(of.state->selection->name_keys(of, watch));
  if (call.names_keys()) TANDEM_TRY(attend_named(call));
  TANDEM_TRY(host.attend(call.args.is_watched ? &watch : nullptr));
  TANDEM_TRY(watch.check());  // from here on the caller's o and lse change
  if (!call.calls().empty()) for_tokens(call, write_token);
  TANDEM_TRY(watch.check());  // the last check: from here on the call changes what others see
  if (call.facts.policy.keeps_maw) host.observe();
  return {};
}

Status HostLane::commit(Call& call) {
  for (SequenceCall& of : call.calls()) {
    if (call.args.speculative)
      guess_tokens(call, of);
    else
      commit_tokens(call, of);
    of.state->on_device = NamedOnDevice::kNone;
    of.state->selection->committed(of, call.args.speculative);
    count_bytes(call, of);
  }
  HostPart& host = call.scratch.host;
  call.session.sums.host_kv_bytes_read += host.read().host;
  if (!call.names_keys()) {
    for (const SequenceCall& of : call.calls()) of.state->named.clear();
    return {};
  }
  const int64_t key_bytes = plane_bytes(call.layer()).total();
  call.session.sums.resident_kv_bytes_read += host.named().n_resident() * key_bytes;
  call.session.sums.host_kv_bytes_read += host.named().n_outside() * key_bytes;
  return {};
}

// A sequence in flight cannot be changed by other calls, so no lock is needed.
void HostLane::finish(Call& call) {
  if (call.names_keys()) note_named(call);
  if (call.args.partial) return;
  for (const SequenceCall& of : call.calls()) of.state->selection->finish(of, call.args.watch);
}

}  // namespace tandem
