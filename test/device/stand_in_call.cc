// SPDX-License-Identifier: MIT
#include "device/stand_in_call.h"

namespace stand_in {

using namespace tandem;

Counts counts;

void check_layer(const Layer& layer) {
  const auto refuse = [](const char* field, const char* message) {
    throw Failure{TANDEM_ERROR_UNSUPPORTED, 0, field, message};
  };
  if (layer.v_aliases_k) refuse("v_aliases_k", "v_aliases_k = 1: there is no kernel for MLA");
  if (layer.k_head_dim == 192 && layer.v_head_dim == 128)
    refuse("v_head_dim", "k_head_dim = 192 with v_head_dim = 128: there is no kernel for these two");
  if (layer.k_type == TANDEM_Q4_64) refuse("k_type", "there is no kernel for K in q4_64");
  if (layer.v_type == TANDEM_Q4_64) refuse("v_type", "there is no kernel for V in q4_64");
}

void check_pages(const DevicePages& pages) {
  require(pages.page_len > 0 && pages.page_len % 64 == 0, "page_len is no multiple of 64");
  for (int32_t p = 0; p < kPlanes; ++p)
    require(reinterpret_cast<uintptr_t>(pages.planes[p]) % 16 == 0 && pages.head_stride[p] % 16 == 0,
            "planes and their strides are no multiples of 16 bytes");
}

void check_sequences(const DeviceSequences& all) {
  require(all.n_sequences >= 0 && all.max_q_len >= 0 && all.max_keys >= 0,
          "a negative number of sequences, queries or keys");
  on_device(all.sequences, all.n_sequences * static_cast<int64_t>(sizeof *all.sequences),
            "the sequences are no device memory");
}

const DeviceSequence* read_sequences(const DeviceSequences& all, int64_t n_rows) {
  for (int32_t i = 0; i < all.n_sequences; ++i) {
    const DeviceSequence& sequence = all.sequences[i];
    const int64_t n_keys = sequence.end - sequence.begin;
    require(sequence.begin >= 0 && n_keys >= 0 && n_keys <= all.max_keys, "a sequence has more than max_keys keys");
    require(sequence.q_len >= 0 && sequence.q_len <= all.max_q_len, "a sequence has more than max_q_len queries");
    require(sequence.n_after >= 0 && sequence.q_len <= sequence.end + sequence.n_after,
            "a sequence has more queries than tokens");
    require(sequence.first_row >= 0 && (n_rows < 0 || sequence.first_row + int64_t{sequence.q_len} <= n_rows),
            "a sequence has rows that the call has not");
    require(sequence.has_host_part == 0 || sequence.has_host_part == 1, "has_host_part is not 0 or 1");
    require(sequence.wants_lse == 0 || sequence.wants_lse == 1, "wants_lse is not 0 or 1");
  }
  return all.sequences;
}

void check_table(const DeviceSequences& all, const DeviceSequence& sequence, int32_t page_len) {
  if (sequence.begin == sequence.end) return;
  require((sequence.end - 1) / page_len - sequence.begin / page_len < sequence.table_len,
          "a sequence's keys are more than its page table holds");
  require(sequence.table_begin >= 0, "a page table begins before all of them");
  on_device(all.page_tables + sequence.table_begin, sequence.table_len * int64_t{8}, "a page table is no device memory");
}

std::byte* WindowRows::row(Plane plane, int32_t kv_head, int64_t token) const {
  const int64_t bytes = plane_bytes(window_layer(layer)).of[plane], page = table[token / pages.page_len % table_len];
  require(page % 16 == 0, "a page is not at a multiple of 16 bytes");
  std::byte* head = pages.planes[plane] + page + kv_head * pages.head_stride[plane];
  return on_device(head + token % pages.page_len * bytes, bytes, "a page is no device memory");
}

float* WindowRows::maw(int32_t head, int64_t token) const {
  auto* page = reinterpret_cast<std::byte*>(pages.maw) + table[token / pages.page_len % table_len];
  float* row = reinterpret_cast<float*>(page) + int64_t{head} * pages.page_len;
  return on_device(row + token % pages.page_len, 4, "a page's moving averages are no device memory");
}

void write_granules(const GranulePlace& to, const std::vector<int64_t>& tokens, DeviceKeys* keys) {
  for (const int64_t token : tokens) {
    const auto first = static_cast<int32_t>(token / kGranuleKeys * kGranuleKeys);
    if (keys->n == 0 || to.granules[keys->n - 1].token != first) {
      require(keys->n < to.n_granules, "a list has more granules than there is room for");
      to.granules[keys->n++] = {first, 0, to.table[token / to.page_len % to.table_len]};
    }
    to.granules[keys->n - 1].keys |= 1u << (token - first);
  }
}

}  // namespace stand_in
