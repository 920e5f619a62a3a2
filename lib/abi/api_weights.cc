// SPDX-License-Identifier: MIT
// Entry points: offloaded weights.
#include "lib/abi/api_session.h"
#include "lib/base/options.h"
#include "lib/weights/weights.h"

namespace tandem {
namespace {

constexpr int32_t kMaxBlocks = 1 << 20;
constexpr int64_t kMaxBytes = int64_t{1} << 42;  // of a block, a buffer, a cap: their sums stay far from 2^63

Status check_options(const tandem_weights_options& options) {
  TANDEM_TRY(check_reserved("reserved", options.reserved));
  TANDEM_TRY(require_range("resident_bytes", options.resident_bytes, 0, kMaxBytes));
  TANDEM_TRY(require_range("buffer_bytes", options.buffer_bytes, 0, kMaxBytes));
  TANDEM_TRY(require_range("host_cap_bytes", options.host_cap_bytes, 0, INT64_MAX));
  return require_range("device_cap_bytes", options.device_cap_bytes, 0, INT64_MAX);
}

Status copy_blocks(const void* const* data, const int64_t* n_bytes, int32_t n_blocks, std::vector<WeightBlock>* blocks) {
  TANDEM_TRY(require_range("n_blocks", n_blocks, 1, kMaxBlocks));
  TANDEM_TRY(require(data, "data"));
  TANDEM_TRY(require(n_bytes, "n_bytes"));
  blocks->reserve(static_cast<size_t>(n_blocks));
  for (int32_t i = 0; i < n_blocks; ++i) {
    TANDEM_TRY(require(data[i], element_name("data", i).c_str()));
    TANDEM_TRY(require_range(element_name("n_bytes", i).c_str(), n_bytes[i], 1, kMaxBytes));
    blocks->push_back({data[i], n_bytes[i]});
  }
  return {};
}

}  // namespace
}  // namespace tandem

using namespace tandem;

int32_t tandem_weights_create(tandem_weights** weights, tandem_engine* engine, const void* const* data,
                              const int64_t* n_bytes, int32_t n_blocks, const tandem_weights_options* options,
                              tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(weights, "weights"));
    std::shared_ptr<Engine> engine_object;
    TANDEM_TRY(resolve(engine, "engine", &engine_object));
    tandem_weights_options copy;
    TANDEM_TRY(copy_in_or_default(options, "", &copy));
    TANDEM_TRY(check_options(copy));
    std::vector<WeightBlock> blocks;
    TANDEM_TRY(copy_blocks(data, n_bytes, n_blocks, &blocks));
    std::shared_ptr<Weights> object;
    TANDEM_TRY(Weights::create(std::move(engine_object), blocks, copy, &object));
    *weights = publish<tandem_weights>(std::move(object));
    return {};
  });
}

void tandem_weights_release(tandem_weights* weights) { release_handle(weights, HandleKind::kWeights); }

int32_t tandem_weights_use(void** data, tandem_weights* weights, int32_t block_idx, void* stream, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(data, "data"));
    std::shared_ptr<Weights> object;
    TANDEM_TRY(resolve(weights, "weights", &object));
    return object->use(block_idx, stream, data);
  });
}

int32_t tandem_weights_done(tandem_weights* weights, int32_t block_idx, void* stream, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Weights> object;
    TANDEM_TRY(resolve(weights, "weights", &object));
    return object->done(block_idx, stream);
  });
}

int32_t tandem_weights_get_stats(tandem_weights_stats* stats, const tandem_weights* weights, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(check_out(stats, "stats"));
    std::shared_ptr<Weights> object;
    TANDEM_TRY(resolve(weights, "weights", &object));
    tandem_weights_stats known = AbiStruct<tandem_weights_stats>::defaults();
    object->get_stats(&known);
    copy_out(known, stats);
    return {};
  });
}

int32_t tandem_session_use_weights(tandem_session* session, int32_t layer_idx, tandem_weights* weights, int32_t w_k_block,
                                   int32_t w_v_block, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    SessionCall call;
    TANDEM_TRY(call.begin(session));
    TANDEM_TRY(require_range("layer_idx", layer_idx, 0, static_cast<int64_t>(call->cache().layers().size()) - 1));
    ProjectionBlocks blocks;
    TANDEM_TRY(resolve(weights, "weights", &blocks.weights));
    blocks.w_k = w_k_block;
    blocks.w_v = w_v_block;
    return call->set_weights(static_cast<size_t>(layer_idx), blocks);
  });
}
