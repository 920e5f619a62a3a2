// SPDX-License-Identifier: MIT
// append() and merge(): rows into the window, and the handshake with the host. Slots are filled with NaN before they are
// written. So a host that reads bytes it was not given becomes visible, as does a merge of states that the host has not
// left.
#include "device/stand_in_exchange.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "device/stand_in_rotate.h"
#include "reference/stored_row.h"

namespace stand_in {
using namespace tandem;

// ---- shared by the calls -----------------------------------------------------------------------------------------------

void check_parts(const std::vector<Part>& parts, int64_t slot_bytes) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    require(part.bytes == 0 || (part.begin >= static_cast<int64_t>(sizeof(SlotHeader)) && part.begin % 4 == 0 &&
                                part.begin + part.bytes <= slot_bytes),
            "a part of the slot is not in it");
    for (size_t j = 0; j < i; ++j)
      require(part.bytes == 0 || parts[j].bytes == 0 || part.begin >= parts[j].begin + parts[j].bytes ||
                  parts[j].begin >= part.begin + part.bytes,
              "parts of the slot overlap");
  }
}

std::vector<Part> state_parts(const Layer& layer, const DeviceExchange& exchange, int64_t n_tokens) {
  const int64_t n_rows = n_tokens * layer.n_q_heads;
  return {{exchange.o_at, n_rows * layer.v_head_dim * 4},
          {exchange.lse_at, n_rows * 4},
          {exchange.maw_at, int64_t{4} * layer.n_q_heads * exchange.n_evicted},
          {exchange.idx_at, 4 * exchange.n_idx}};
}

std::vector<Part> row_parts(const Layer& layer, const DeviceExchange& exchange, int64_t n_tokens, bool has_rows) {
  std::vector<Part> parts = {{exchange.q_at, n_tokens * layer.n_q_heads * layer.k_head_dim * 4}};
  const PlaneBytes bytes = plane_bytes(layer);
  for (int32_t p = 0; p < kPlanes && has_rows; ++p)
    parts.push_back({exchange.rows_at[p], int64_t{exchange.n_rows} * layer.n_kv_heads * bytes.of[p]});
  if (has_rows) parts.push_back({exchange.x_at, n_tokens * layer.x_bytes()});
  return parts;
}

// With a single slot, no slot would ever become free.
void check_exchange(const DeviceExchange& exchange) {
  require(exchange.n_slots >= 2, "there are fewer than two slots");
  require(exchange.slot_bytes >= static_cast<int64_t>(sizeof(SlotHeader)), "a slot has no room for its header");
  require(exchange.timeout_ns > 0, "a wait that never ends");
  require(exchange.n_evicted >= 0, "a slot has room for fewer evicted tokens than none");
  require(exchange.flags != nullptr && exchange.state != nullptr && exchange.slots != nullptr, "an exchange without memory");
  on_device(exchange.flags, sizeof *exchange.flags, "the flags are no device memory");
  on_device(exchange.slots, exchange.n_slots * exchange.slot_bytes, "the slots are no device memory");
  on_device(exchange.state, kExchangeWords * int64_t{8}, "the exchange's state is no device memory");
  require(reinterpret_cast<uintptr_t>(exchange.slots) % 8 == 0 && exchange.slot_bytes % 8 == 0, "slots are not aligned");
}

// ---- append and merge --------------------------------------------------------------------------------------------------

namespace {

constexpr char kNotInK[] = "k is no device memory", kNotInV[] = "v is no device memory", kNotInQ[] = "q is no device memory",
               kNotInX[] = "x is no device memory";

int64_t position_of(const DeviceAppend& call, const DeviceSequence& sequence, int32_t t) {
  if (call.positions == nullptr) return sequence.position + t;
  return *on_device(call.positions + sequence.first_row + t, 4, "positions are no device memory");
}

// Writes the queries to the slot, rotated if the library rotates them, whether or not the host has a part.
void hand_over_queries(const DeviceAppend& call, const DeviceSequence& sequence, std::byte* slot) {
  const Layer& layer = *call.layer;
  std::vector<double> q(static_cast<size_t>(layer.k_head_dim));
  for (int32_t kv_head = 0; kv_head < layer.n_kv_heads; ++kv_head) {
    std::byte* to = slot + call.exchange.q_at + first_slot_row(layer, sequence, kv_head) * layer.k_head_dim * 4;
    for (int32_t t = 0; t < sequence.q_len; ++t) {
      for (int32_t g = 0; g < layer.group_size; ++g, to += layer.k_head_dim * int64_t{4}) {
        const int32_t head = kv_head * layer.group_size + g;
        reference::load_all(call.q.dtype, row_at(call.q, sequence.first_row + t, head, layer.k_head_dim, kNotInQ),
                            layer.k_head_dim, q.data());
        if (layer.rope != nullptr) rotate(*layer.rope, call.rope, position_of(call, sequence, t), q.data());
        if (layer.k_rotation == TANDEM_ROTATION_HADAMARD) hadamard(&q);
        if (rotates_queries(layer)) {
          const int64_t row = (sequence.first_row + t) * int64_t{layer.n_q_heads} + head;
          reference::store_all(TANDEM_F32, q.data(), layer.k_head_dim,
                               reinterpret_cast<std::byte*>(call.rotated_q + row * layer.k_head_dim));
        }
        if (sequence.has_host_part != 0) reference::store_all(TANDEM_F32, q.data(), layer.k_head_dim, to);
      }
    }
  }
}

// One token's row of K or V in one KV head. It goes to the slot, and to the window if the token is resident.
struct NewRow {
  const DeviceAppend& call;
  const DeviceSequence& sequence;
  std::byte* slot;
  int32_t t, kv_head;

  void store(Plane codes, int32_t dtype, const DeviceRows& rows, int32_t dim, const char* otherwise) const {
    std::vector<double> x(static_cast<size_t>(dim));
    reference::load_all(rows.dtype, row_at(rows, sequence.first_row + t, kv_head, dim, otherwise), dim, x.data());
    const auto scales = static_cast<Plane>(codes + 1);
    if (codes == kPlaneK && call.layer->k_rotation == TANDEM_ROTATION_HADAMARD) hadamard(&x);
    reference::store_row(dtype, x.data(), dim, in_slot(codes), in_slot(scales));
    if (codes == kPlaneK && call.layer->rope != nullptr) return put_rotated(std::move(x));
    put(codes);
    if (reference::has_groups(dtype)) put(scales);
  }

 private:
  std::byte* in_slot(Plane plane) const {
    const int64_t row = int64_t{kv_head} * call.exchange.n_rows + sequence.first_row + t;
    return slot + call.exchange.rows_at[plane] + row * plane_bytes(*call.layer).of[plane];
  }

  void put_rotated(std::vector<double> x) const {
    const int64_t token = sequence.end - sequence.q_len + t, bytes = 4 * static_cast<int64_t>(x.size());
    if (token < sequence.begin) return;
    const Layer& layer = *call.layer;
    reference::load_row(layer.k_type, in_slot(kPlaneK), in_slot(kPlaneKScales), layer.k_head_dim, x.data());
    rotate(*layer.rope, call.rope, position_of(call, sequence, t), x.data());
    reference::store_all(TANDEM_F32, x.data(), layer.k_head_dim, WindowRows(call, sequence).row(kPlaneK, kv_head, token));
    counts.window_bytes += bytes;
  }

  void put(Plane plane) const {
    const int64_t token = sequence.end - sequence.q_len + t, bytes = plane_bytes(*call.layer).of[plane];
    if (token < sequence.begin) return;
    std::memcpy(WindowRows(call, sequence).row(plane, kv_head, token), in_slot(plane), static_cast<size_t>(bytes));
    counts.window_bytes += bytes;
  }
};

void hand_over_hidden(const DeviceAppend& call, const DeviceSequence& sequence, std::byte* slot) {
  const int32_t dim = call.layer->hidden_dim();
  std::vector<double> x(static_cast<size_t>(dim));
  for (int32_t t = 0; t < sequence.q_len && dim > 0; ++t) {
    const int64_t row = sequence.first_row + t;
    reference::load_all(call.x.dtype, row_at(call.x, row, 0, dim, kNotInX), dim, x.data());
    std::byte* const codes = slot + call.exchange.x_at + row * call.layer->x_bytes();
    reference::store_row(call.layer->x_type, x.data(), dim, codes, codes + call.layer->x_code_bytes());
  }
}

void hand_over_indices(const DeviceAppend& call, const DeviceSequence& sequence, std::byte* slot) {
  const DeviceIndices& idx = call.idx;
  for (int32_t t = sequence.first_row; t < sequence.first_row + sequence.q_len; ++t)
    for (int32_t head = 0; head < idx.n_heads && idx.n_idx > 0; ++head) {
      const int32_t* from = idx.data + t * idx.token_stride + head * idx.head_stride;
      on_device(from, idx.n_idx * int64_t{4}, "indices are no device memory");
      std::copy_n(from, idx.n_idx,
                  reinterpret_cast<int32_t*>(slot + call.exchange.idx_at) + (int64_t{t} * idx.n_heads + head) * idx.n_idx);
    }
}

void append_rows(const DeviceAppend& call, const DeviceSequence& sequence, std::byte* slot) {
  const Layer& layer = *call.layer;
  hand_over_hidden(call, sequence, slot);
  for (int32_t kv_head = 0; kv_head < layer.n_kv_heads; ++kv_head) {
    for (int32_t t = 0; t < sequence.q_len; ++t) {
      const NewRow row{call, sequence, slot, t, kv_head};
      row.store(kPlaneK, layer.k_type, call.k, layer.k_head_dim, kNotInK);
      row.store(kPlaneV, layer.v_type, call.v, layer.v_head_dim, kNotInV);
    }
  }
}

// A state in double precision.
struct State {
  std::vector<double> o;
  double lse = -INFINITY;

  // Adds a state. An empty state has no weight, whatever its o is. other_o null: zeros.
  void add(const float* other_o, double other_lse) {
    if (other_lse == -INFINITY) return;
    const double m = std::max(lse, other_lse), mine = lse == -INFINITY ? 0.0 : std::exp(lse - m);
    const double theirs = std::exp(other_lse - m);
    for (size_t c = 0; c < o.size(); ++c)
      o[c] = (mine * o[c] + (other_o != nullptr ? theirs * static_cast<double>(other_o[c]) : 0.0)) / (mine + theirs);
    lse = m + std::log(mine + theirs);
  }
};

// slot_row: row of the host's state in the slot. slot null: the host has no state.
void merge_row(const DeviceMerge& call, int64_t token, int32_t head, std::byte* slot, int64_t slot_row, bool wants_lse) {
  const Layer& layer = *call.layer;
  const int64_t row = token * layer.n_q_heads + head;
  State state{std::vector<double>(static_cast<size_t>(layer.v_head_dim), 0.0)};
  state.add(call.o + row * layer.v_head_dim, static_cast<double>(call.lse[row]));
  if (slot != nullptr)
    state.add(reinterpret_cast<const float*>(slot + call.exchange.o_at) + slot_row * layer.v_head_dim,
              static_cast<double>(reinterpret_cast<const float*>(slot + call.exchange.lse_at)[slot_row]));
  if (call.sinks != nullptr) state.add(nullptr, static_cast<double>(call.sinks[head]));
  reference::store_all(call.o_out.dtype, state.o.data(), layer.v_head_dim,
                       row_at(call.o_out, token, head, layer.v_head_dim, "o is no device memory"));
  if (call.is_observed != 0) call.lse[row] = static_cast<float>(state.lse);
  if (call.is_observed != 0 && slot != nullptr && wants_lse)
    reinterpret_cast<float*>(slot + call.exchange.lse_at)[slot_row] = static_cast<float>(state.lse);
  if (call.lse_out == nullptr) return;
  float* lse = call.lse_out + token * call.lse_token_stride + head * call.lse_head_stride;
  *on_device(lse, 4, "lse is no device memory") = static_cast<float>(state.lse);
}

void merge_sequence(const DeviceMerge& call, const DeviceSequence& sequence, std::byte* slot) {
  if (sequence.has_host_part == 0 && call.leaves_finished != 0) return;
  const Layer& layer = *call.layer;
  for (int32_t kv_head = 0; kv_head < layer.n_kv_heads; ++kv_head) {
    int64_t slot_row = first_slot_row(layer, sequence, kv_head);
    for (int32_t t = 0; t < sequence.q_len; ++t)
      for (int32_t g = 0; g < layer.group_size; ++g, ++slot_row)
        merge_row(call, sequence.first_row + t, kv_head * layer.group_size + g, sequence.has_host_part != 0 ? slot : nullptr,
                  slot_row, sequence.wants_lse != 0);
  }
}

}  // namespace

void check(const DeviceAccumulate& call) {
  const Layer& layer = *call.layer;
  require(call.first_row >= 0 && call.n_rows >= 0 && call.first_head >= 0 && call.n_heads >= 0 &&
              call.first_head + call.n_heads <= layer.n_q_heads,
          "states of heads that the layer has not");
  const int64_t n = (int64_t{call.first_row} + call.n_rows) * layer.n_q_heads;
  for (const float* o : {static_cast<const float*>(call.o), call.part_o})
    on_device(o, n * layer.v_head_dim * 4, "a state's o is no device memory");
  for (const float* lse : {static_cast<const float*>(call.lse), call.part_lse})
    on_device(lse, n * 4, "a state's lse is no device memory");
}

bool perform(const DeviceAccumulate& call) {
  const Layer& layer = *call.layer;
  const auto dim = static_cast<size_t>(layer.v_head_dim);
  for (int64_t token = call.first_row; token < call.first_row + call.n_rows; ++token)
    for (int64_t head = call.first_head; head < call.first_head + call.n_heads; ++head) {
      const int64_t row = token * layer.n_q_heads + head;
      State state{std::vector<double>(dim, 0.0)};
      state.add(call.o + row * layer.v_head_dim, static_cast<double>(call.lse[row]));
      state.add(call.part_o + row * layer.v_head_dim, static_cast<double>(call.part_lse[row]));
      std::copy(state.o.begin(), state.o.end(), call.o + row * layer.v_head_dim);
      call.lse[row] = static_cast<float>(state.lse);
    }
  return true;
}

// Checks the buffer of an append that takes no ticket.
static void check_buffer(const DeviceAppend& call) {
  const DeviceExchange& to = call.exchange;
  const PlaneBytes bytes = plane_bytes(*call.layer);
  for (int32_t p = 0; p < kPlanes; ++p)
    on_device(to.slots + to.rows_at[p], int64_t{to.n_rows} * call.layer->n_kv_heads * bytes.of[p],
              "a buffer of rows is no device memory");
  on_device(to.slots + to.x_at, call.n_tokens * call.layer->x_bytes(), "a buffer of hidden states is no device memory");
}

void check(const DeviceAppend& call) {
  const Layer& layer = *call.layer;
  check_layer(layer);
  check_sequences(call.sequences);
  if (call.exchange.flags != nullptr)
    check_exchange(call.exchange);
  else
    check_buffer(call);
  require(call.n_tokens >= 0, "a negative number of tokens");
  require(call.n_tokens <= call.exchange.n_rows, "more tokens than a slot has rows for");
  require(int64_t{call.n_tokens} * call.idx.n_heads * call.idx.n_idx <= call.exchange.n_idx,
          "there are more indices than a slot has room for");
  require((call.k.data == nullptr) == (call.v.data == nullptr), "one of k and v is appended");
  require((call.x.data != nullptr) == (call.k.data != nullptr && layer.x_type != 0),
          "hidden states where the layer keeps none, or none where it does");
  if (call.k.data != nullptr) check_pages(call.pages);
  if (layer.rope != nullptr && call.n_tokens > 0) {
    require(call.rope != nullptr, "rotation without angles");
    on_device(call.rope, 4 * n_floats(*layer.rope), "the angles are no device memory");
  }
  if (rotates_queries(layer) && call.n_tokens > 0) {
    require(call.q.data != nullptr && call.rotated_q != nullptr, "rotation without queries, or without room for them");
    on_device(call.rotated_q, int64_t{4} * call.n_tokens * layer.n_q_heads * layer.k_head_dim,
              "rotated queries are no device memory");
  }
  if (call.exchange.flags == nullptr) return;
  std::vector<Part> parts = state_parts(layer, call.exchange, call.n_tokens);
  for (const Part& part : row_parts(layer, call.exchange, call.n_tokens, call.k.data != nullptr)) parts.push_back(part);
  check_parts(parts, call.exchange.slot_bytes);
}

static void write_new(const DeviceAppend& call, const DeviceSequence* sequences, std::byte* slot) {
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) {
    if (sequences[i].has_host_part != 0 || rotates_queries(*call.layer)) hand_over_queries(call, sequences[i], slot);
    hand_over_indices(call, sequences[i], slot);
    if (call.k.data == nullptr) continue;
    check_table(call.sequences, sequences[i], call.pages.page_len);
    append_rows(call, sequences[i], slot);
  }
}

bool perform(const DeviceAppend& call) {
  if (call.exchange.flags == nullptr) {
    const DeviceSequence* sequences = read_sequences(call.sequences, call.n_tokens);
    for (int32_t i = 0; i < call.sequences.n_sequences; ++i)
      require(sequences[i].has_host_part == 0, "a host part without a ticket");
    write_new(call, sequences, call.exchange.slots);
    return true;
  }
  const Exchange exchange(call.exchange);
  const uint64_t ticket = exchange.next_ticket();
  if (!exchange.wait_for(static_cast<int64_t>(ticket) + 2 - call.exchange.n_slots, kFaultSlot)) return false;
  const DeviceSequence* sequences = read_sequences(call.sequences, call.n_tokens);
  std::byte* slot = exchange.slot(ticket);
  std::memset(slot, 0xff, static_cast<size_t>(call.exchange.slot_bytes));
  const DeviceIndices& idx = call.idx;
  *reinterpret_cast<SlotHeader*>(slot) = {ticket,
                                          call.tag,
                                          call.sequences.n_sequences,
                                          call.sequences.n_sequences > 0 ? call.sequences.sequences[0].step : 0,
                                          idx.n_idx,
                                          idx.n_heads,
                                          static_cast<int16_t>(idx.unit_shift),
                                          static_cast<int16_t>(idx.plus_window)};
  write_new(call, sequences, slot);
  exchange.take_ticket();
  exchange.arrive(ticket + 1);
  return true;
}

void check(const DeviceMerge& call) {
  check_layer(*call.layer);
  check_sequences(call.sequences);
  check_exchange(call.exchange);
  require(call.n_tokens >= 0, "a negative number of tokens");
  require(call.is_observed == 0 || call.is_observed == 1, "is_observed is not 0 or 1");
  if (call.n_tokens <= call.exchange.n_rows)  // otherwise no sequence has a host part
    check_parts(state_parts(*call.layer, call.exchange, call.n_tokens), call.exchange.slot_bytes);
  const int64_t n_rows = int64_t{call.n_tokens} * call.layer->n_q_heads;
  on_device(call.o, n_rows * call.layer->v_head_dim * 4, "the window's o is no device memory");
  on_device(call.lse, n_rows * 4, "the window's lse is no device memory");
  on_device(call.sinks, call.sinks != nullptr ? int64_t{4} * call.layer->n_q_heads : 0, "the sinks are no device memory");
}

bool perform(const DeviceMerge& call) {
  const Exchange exchange(call.exchange);
  const DeviceSequence* sequences = read_sequences(call.sequences, call.n_tokens);
  const uint64_t n_tickets = exchange.next_ticket();
  require(n_tickets > 0, "merge() without an append()");
  const bool has_host_part = std::any_of(sequences, sequences + call.sequences.n_sequences,
                                         [](const DeviceSequence& sequence) { return sequence.has_host_part != 0; });
  require(!has_host_part || call.n_tokens <= call.exchange.n_rows, "a host part of more tokens than a slot has rows for");
  if (!exchange.wait_for(has_host_part ? static_cast<int64_t>(n_tickets) : 0, kFaultAnswer)) return false;
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) merge_sequence(call, sequences[i], exchange.slot(n_tickets - 1));
  return true;
}

}  // namespace stand_in
