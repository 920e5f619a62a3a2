// SPDX-License-Identifier: MIT
// Head patterns for a device (policy "patterns"; the ABI's patterns.h has the rules). The device finds the keys that each
// block of queries attends, and writes key lists for attend() (lib/tables/key_list.h). kDeviceAbi changes when these structs
// change.
//
// The queries of a sequence are the last q_len tokens of [0, end), at most kPatternChunk. All keys [0, end) are in the
// window: begin and n_after are 0. The queries are cut into blocks of kPatternBlock, from the first query on; the last block
// may be shorter. For a block whose first query is token p0, a query head attends the keys that any of its patterns names:
//
//   the range [range_begin, own token], where range_begin is the least of
//     p0
//     FULL            0
//     A_SHAPE         max(0, p0 + 1 - window_len)
//     BLOCK_SPARSE    p0, rounded down to a key block
//   units of 8 tokens that begin before range_begin; of these only the tokens before range_begin:
//     A_SHAPE         units [0, sink_len rounded up to a unit)
//     VERTICAL_SLASH  the unit of each chosen token that is before p0; units with a key before p0 whose distance from some
//                     query of the block is in a chosen band
//     BLOCK_SPARSE    the units of the chosen key blocks
//
// VERTICAL_SLASH chooses once for all blocks of the sequence, BLOCK_SPARSE for each block. The n candidates with the largest
// scores are chosen, or all if there are at most n. Ties go to the lower candidate. NaN ranks last.
//
//   n          candidates                          score
//   n_tokens   tokens [0, end)                     the sum of the weights that the probes give the key
//   n_bands    distances [16 d, 16 d + 16)         the sum of the weights of a probe and a key that are so far apart; band 0
//              up to end - 1                       is always chosen, as one of the n
//   n_blocks   key blocks of 64 tokens that end    the logit of the mean of the block's queries and the mean of the key
//              at p0 or before                     block's keys
//
// The probes are the last min(64, q_len) queries. A probe's weight for a key up to the probe's own token is exp(logit -
// lse), where lse is the log-sum-exp of the probe's logits with all these keys. Logits are layer->sm_scale * q . k in f32,
// before soft caps and without a sliding window.
#pragma once

#include <cstdint>

namespace tandem {

inline constexpr int32_t kPatternKeyBlock = 64, kPatternBand = 16, kPatternProbes = 64;

struct DeviceHeadPattern {
  uint32_t kinds = 0;  // TANDEM_PATTERN_*
  int32_t n_tokens = 0, n_bands = 0, n_blocks = 0;
  int64_t sink_len = 0, window_len = 0;
};

// Bits of the chosen candidates, which index_patterns() writes for list_patterns(). For each sequence and query head:
//   [tokens] [bands] [blocks of queries][key blocks]
// Each row of bits begins with a new word.
struct PatternChoices {
  int64_t token_words, band_words, block_words, n_blocks;  // n_blocks: blocks of queries

  constexpr PatternChoices(int64_t most_keys, int64_t most_queries, int64_t query_block)
      : token_words((most_keys + 31) / 32),
        band_words((most_keys / kPatternBand + 1 + 31) / 32),
        block_words((most_keys / kPatternKeyBlock + 31) / 32),
        n_blocks((most_queries + query_block - 1) / query_block) {}
  constexpr int64_t bands_at() const { return token_words; }
  constexpr int64_t blocks_at() const { return token_words + band_words; }
  constexpr int64_t n_words() const { return blocks_at() + n_blocks * block_words; }  // for a sequence and query head
};

}  // namespace tandem
