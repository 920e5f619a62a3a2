// SPDX-License-Identifier: MIT
// Attention of an append's query blocks under policy "hip" (lib/attend/search_call.h), without the search: microseconds per
// call, and FLOPs over the named keys.
//
//   query_blocks_bench MODULE [types [dims [keys [unit]]]]     lists with commas; unit: tokens that are named together
//
// 2,048 queries of 32 heads over 8 KV heads belong to the last keys. A block has 64 of them and, for each KV head, its own
// list: 256 sinks, 2,048 scattered tokens, and as its range the newest 1,024 before the block's first query. "parts" attends
// 64 query rows at a time, each a sequence with the block's list; "blocks" attends a block at a time. Their outputs are
// compared. "dense" attends as many keys per query without lists.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "cuda/graph_time.h"
#include "cuda/window_case.h"
#include "lib/model/dtype.h"

namespace {

using namespace tandem;
using namespace tandem::test;

constexpr int32_t kQueries = 2048, kBlock = 64, kBlocks = kQueries / kBlock, kHeads = 32, kKvHeads = 8;
constexpr int64_t kSinks = 256, kNamed = 2048, kNewest = 1024, kKeys = kSinks + kNamed + kNewest;

WindowOptions options_of(int32_t type, int dim, int64_t n_keys) {
  WindowOptions options;
  options.layer.k_type = options.layer.v_type = options.q_type = type;
  options.layer.n_q_heads = kHeads;
  options.layer.n_kv_heads = kKvHeads;
  options.layer.k_head_dim = options.layer.v_head_dim = dim;
  options.sequences = {{0, n_keys, kQueries}};
  options.n_distinct = 1000;
  return options;
}

// Lists of all blocks and KV heads.
struct Lists {
  std::vector<DeviceKeys> keys;  // [kBlocks][kKvHeads]
  std::vector<KeyGranule> granules;

  Lists(const std::vector<int64_t>& pages, int32_t page_len, int64_t n_keys, int64_t unit) {
    reference::Random random(1);
    for (int32_t list = 0; list < kBlocks * kKvHeads; ++list) {
      const int64_t begin = n_keys - kQueries + list / kKvHeads * kBlock + 1 - kNewest;
      std::set<int64_t> units;
      while (std::ssize(units) < kNamed / unit) units.insert(random.integer(kSinks / unit, begin / unit - 1));
      DeviceKeys of;
      of.first = static_cast<int32_t>(granules.size());
      of.begin = static_cast<int32_t>(begin);
      const auto add = [&](int64_t first, int64_t n) {
        for (int64_t t = first; t < first + n; t += kGranuleKeys)
          granules.push_back({static_cast<int32_t>(t), 0xff, pages[static_cast<size_t>(t / page_len)]});
      };
      add(0, kSinks);
      for (const int64_t u : units) add(u * unit, unit);
      of.n = static_cast<int32_t>(granules.size()) - of.first;
      keys.push_back(of);
    }
  }
};

struct Measured {
  double us;
  std::vector<uint8_t> output;
};

Measured measure(const OpenDevice& device, WindowCase& window, const Lists& lists, int64_t n_keys, int32_t part) {
  std::vector<DeviceSequence> sequences(1);
  DeviceAttend& call = window.call();
  const DeviceSequences whole = call.sequences;
  device.download(sequences.data(), whole.sequences, sizeof(DeviceSequence));
  const DeviceSequence all = sequences[0];
  std::vector<DeviceKeys> keys;
  sequences.clear();
  for (int32_t first = 0; first < kQueries; first += part) {
    DeviceSequence& some = sequences.emplace_back(all);
    some.first_row = first;
    some.q_len = part;
    some.end = n_keys - kQueries + first + part;
    const auto own = lists.keys.begin() + first / kBlock * kKvHeads;
    keys.insert(keys.end(), own, own + kKvHeads);
  }
  std::vector<void*> memory;
  const auto upload = [&](const auto& from) {
    const auto bytes = static_cast<int64_t>(from.size() * sizeof from[0]);
    memory.push_back(device.allocate(bytes));
    device.upload(memory.back(), from.data(), bytes);
    return memory.back();
  };
  call.sequences = {static_cast<const DeviceSequence*>(upload(sequences)), whole.page_tables,
                    static_cast<int32_t>(sequences.size()), part, n_keys};
  call.lists = {static_cast<const DeviceKeys*>(upload(keys)),
                static_cast<const KeyGranule*>(upload(lists.granules)),
                kKvHeads,
                kKvHeads,
                1,
                0};
  const int64_t bytes = window.workspace_bytes();
  const std::vector<char> zeros(static_cast<size_t>(bytes));
  void* const before = call.workspace;
  window.use_workspace(upload(zeros));
  window.clear_output();
  Measured measured;
  measured.us = time_of([&](cudaStream_t stream) {
                  for (int i = 0; i < 10; ++i) window.attend(0, stream);
                }) /
                10;
  measured.output = window.output();
  call.sequences = whole;
  call.lists = {};
  window.use_workspace(before);
  for (void* data : memory) device.release(data);
  return measured;
}

double largest_difference(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  double largest = 0.0;
  for (size_t i = 0; i + 4 <= a.size(); i += 4) {
    const double x = static_cast<double>(*reinterpret_cast<const float*>(&a[i])),
                 y = static_cast<double>(*reinterpret_cast<const float*>(&b[i]));
    if (!(std::abs(x - y) <= largest)) largest = std::isnan(x - y) ? INFINITY : std::abs(x - y);
  }
  return largest;
}

// Times attention over the same number of contiguous keys per query.
double time_dense(const OpenDevice& device, int32_t type, int dim) {
  WindowCase window(device, options_of(type, dim, kKeys + kQueries / 2));
  return time_of([&](cudaStream_t stream) {
           for (int i = 0; i < 10; ++i) window.attend(0, stream);
         }) /
         10;
}

bool compare(const OpenDevice& device, const std::string& type, int dim, int64_t n_keys, int64_t unit) {
  constexpr double kMost = 0.02;
  const auto* info = std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const auto& of) { return type == of.name; });
  WindowCase window(device, options_of(info->dtype, dim, n_keys));
  std::vector<int64_t> pages(static_cast<size_t>(n_keys / 128 + 1));
  device.download(pages.data(), window.call().sequences.page_tables, static_cast<int64_t>(pages.size() * sizeof pages[0]));
  const Lists lists(pages, 128, n_keys, unit);
  const Measured parts = measure(device, window, lists, n_keys, kBlock * kKvHeads / kHeads),
                 blocks = measure(device, window, lists, n_keys, kBlock);
  const double error = largest_difference(parts.output, blocks.output), flops = 4.0 * kQueries * kHeads * kKeys * dim;
  std::printf("%-5s %3d  %7lld keys, units of %3lld: parts %8.1f us, blocks %8.1f us %6.1f TFLOP/s, dense %8.1f us%s\n",
              type.c_str(), dim, static_cast<long long>(n_keys), static_cast<long long>(unit), parts.us, blocks.us,
              flops / blocks.us * 1e-6, time_dense(device, info->dtype, dim), error > kMost ? "  WRONG" : "");
  std::fflush(stdout);
  return error <= kMost;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "query_blocks_bench MODULE [types [dims [keys [unit]]]]\n");
    return 2;
  }
  const OpenDevice device(argv[1]);
  std::printf("%s\n", device.info.name);
  bool all_right = true;
  for (const std::string& type : words_of(argc > 2 ? argv[2] : "bf16,f16"))
    for (const std::string& dim : words_of(argc > 3 ? argv[3] : "64,128,256"))
      for (const std::string& n_keys : words_of(argc > 4 ? argv[4] : "32768,131072"))
        for (const std::string& unit : words_of(argc > 5 ? argv[5] : "8,64"))
          all_right &= compare(device, type, std::atoi(dim.c_str()), std::atoll(n_keys.c_str()), std::atoll(unit.c_str()));
  return all_right ? 0 : 1;
}
