// SPDX-License-Identifier: MIT
// What a device is told of head patterns (policy "patterns"; patterns.h of the ABI has the rules). The device finds which
// keys each block of queries attends, and writes key lists for attend() (lib/tables/key_list.h). kDeviceAbi changes with the
// structs here, too.
//
// The queries of a sequence are the last q_len tokens of [0, end), kPatternChunk of them at most. All keys [0, end) are in
// the window: begin and n_after are 0. The queries are cut into blocks of kPatternBlock, from the first query on; the last
// block may be shorter. Of a block whose first query is token p0, a query head attends what any of its patterns says:
//
//   the range [range_begin, own token], where range_begin is the least of
//     p0
//     FULL            0
//     A_SHAPE         max(0, p0 + 1 - window_len)
//     BLOCK_SPARSE    p0, rounded down to a key block
//   units of 8 tokens that begin before range_begin, and of these the tokens before range_begin:
//     A_SHAPE         units [0, sink_len rounded up to a unit)
//     VERTICAL_SLASH  the unit of each chosen token that is before p0; units with a key before p0 whose distance from some
//                     query of the block is in a chosen band
//     BLOCK_SPARSE    the units of the chosen key blocks
//
// VERTICAL_SLASH chooses once for all blocks of the sequence, BLOCK_SPARSE for each block. The n with the largest scores are
// chosen, of equal scores the lower ones first, and scores that are NaN last; all of them, where there are no more than n.
//
//   n          candidates                          score
//   n_tokens   tokens [0, end)                     the sum of the weights that the probes give the key
//   n_bands    distances [16 d, 16 d + 16)         the sum of the weights of a probe and a key that are so far apart; band 0
//              up to end - 1                       is always chosen, as one of the n
//   n_blocks   key blocks of 64 tokens that end    the logit of the mean of the block's queries and the mean of the key
//              at p0 or before                     block's keys
//
// The probes are the last min(64, q_len) queries. A probe's weight for a key up to its own token is exp(logit - lse), where
// lse is the log-sum-exp of its logits with all these keys. Logits are layer->sm_scale * q . k in f32, before soft caps and
// without a sliding window.
#pragma once

#include <cstdint>

namespace tandem {

inline constexpr int32_t kPatternKeyBlock = 64, kPatternBand = 16, kPatternProbes = 64;

struct DeviceHeadPattern {
  uint32_t kinds = 0;  // TANDEM_PATTERN_*
  int32_t n_tokens = 0, n_bands = 0, n_blocks = 0;
  int64_t sink_len = 0, window_len = 0;
};

// What index_patterns() leaves for list_patterns(): bits of what is chosen. For each sequence and each query head
//   [tokens] [bands] [blocks of queries][key blocks]
// where each row of bits begins with a word of its own.
struct PatternChoices {
  int64_t token_words, band_words, block_words, n_blocks;  // n_blocks: of queries

  constexpr PatternChoices(int64_t most_keys, int64_t most_queries, int64_t query_block)
      : token_words((most_keys + 31) / 32),
        band_words((most_keys / kPatternBand + 1 + 31) / 32),
        block_words((most_keys / kPatternKeyBlock + 31) / 32),
        n_blocks((most_queries + query_block - 1) / query_block) {}
  constexpr int64_t bands_at() const { return token_words; }
  constexpr int64_t blocks_at() const { return token_words + band_words; }
  constexpr int64_t n_words() const { return blocks_at() + n_blocks * block_words; }  // of a sequence and query head
};

}  // namespace tandem
