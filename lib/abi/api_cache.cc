// SPDX-License-Identifier: MIT
// Entry points: cache and its sequences.
#include <algorithm>
#include <iterator>

#include "lib/abi/api.h"
#include "lib/base/options.h"
#include "lib/store/cache_read.h"
#include "lib/tensors/tensor.h"

namespace tandem {
namespace {

Status check_layer_idx(const Cache& cache, int32_t layer_idx) {
  return require_range("layer_idx", layer_idx, 0, static_cast<int64_t>(cache.layers().size()) - 1);
}

// k: [n_tokens, n_kv_heads, k_head_dim] and v: [n_tokens, n_kv_heads, v_head_dim] of an append or a read.
struct KeyValue {
  CheckedTensor k, v;
  TensorView k_view, v_view;
  const TensorView* k_ptr = nullptr;  // null if not given
  const TensorView* v_ptr = nullptr;
};

Status check_key_value(const Layer& layer, const tandem_tensor* k, const tandem_tensor* v, KeyValue* out) {
  int64_t n_tokens = kAnyLength;
  if (k != nullptr) {
    const TensorSpec spec{"k",
                          3,
                          {{"n_tokens", kAnyLength}, {"n_kv_heads", layer.n_kv_heads}, {"k_head_dim", layer.k_head_dim}},
                          TensorTypes::kKeys};
    TANDEM_TRY(check_tensor(k, spec, &out->k));
    out->k_view = view_of(out->k);
    out->k_ptr = &out->k_view;
    n_tokens = out->k_view.n_tokens;
    TANDEM_TRY(require_tokens("k.shape[0]", n_tokens));
  }
  if (v != nullptr) {
    if (layer.v_aliases_k)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "v", "v = %p, must be NULL: V aliases K in this layer",
                  static_cast<const void*>(v));
    const TensorSpec spec{"v",
                          3,
                          {{"n_tokens", n_tokens}, {"n_kv_heads", layer.n_kv_heads}, {"v_head_dim", layer.v_head_dim}},
                          TensorTypes::kKeys};
    TANDEM_TRY(check_tensor(v, spec, &out->v));
    out->v_view = view_of(out->v);
    out->v_ptr = &out->v_view;
    TANDEM_TRY(require_tokens("v.shape[0]", out->v_view.n_tokens));
  }
  return {};
}

struct AppendedTensors {
  const tandem_tensor *k, *v, *x;
};

// Checks x: [n_tokens, hidden_dim] in a layer that keeps hidden states, null in other layers. n_tokens: kAnyLength if x
// defines it.
Status check_hidden(const Layer& layer, const tandem_tensor* x, int64_t n_tokens, CheckedTensor* checked) {
  TANDEM_TRY(refuse_hidden(layer, x));
  if (x == nullptr) return {};
  TANDEM_TRY(check_tensor(x, {"x", 2, {{"n_tokens", n_tokens}, {"hidden_dim", layer.hidden_dim()}}}, checked));
  return require_tokens("x.shape[0]", checked->length(0));
}

// Appends k, v and, if the layer keeps hidden states, x.
Status append(tandem_cache* cache, int64_t sequence, int32_t layer_idx, const AppendedTensors& tensors, void* stream) {
  std::shared_ptr<Cache> object;
  TANDEM_TRY(resolve(cache, "cache", &object));
  TANDEM_TRY(check_layer_idx(*object, layer_idx));
  TANDEM_TRY(require_host_stream(stream));
  const Layer& layer = object->layers()[static_cast<size_t>(layer_idx)];
  TANDEM_TRY(require(tensors.k, "k"));
  if (!layer.v_aliases_k) TANDEM_TRY(require(tensors.v, "v"));
  KeyValue kv;
  TANDEM_TRY(check_key_value(layer, tensors.k, tensors.v, &kv));
  CheckedTensor x;
  TensorView x_view;
  TANDEM_TRY(check_hidden(layer, tensors.x, kv.k_view.n_tokens, &x));
  if (tensors.x != nullptr) x_view = view_of(x);
  return object->append(sequence, layer_idx,
                        {&kv.k_view, kv.v_ptr, tensors.x != nullptr ? &x_view : nullptr, 0, kv.k_view.n_tokens});
}

}  // namespace
}  // namespace tandem

using namespace tandem;

int32_t tandem_cache_create(tandem_cache** cache, tandem_engine* engine, const tandem_model* model,
                            const tandem_cache_options* options, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(cache, "cache"));
    std::shared_ptr<Engine> engine_object;
    std::shared_ptr<const Model> model_object;
    TANDEM_TRY(resolve(engine, "engine", &engine_object));
    TANDEM_TRY(resolve(model, "model", &model_object));
    tandem_cache_options copy;
    TANDEM_TRY(copy_in_or_default(options, "", &copy));
    std::shared_ptr<Cache> object;
    TANDEM_TRY(Cache::create(std::move(engine_object), std::move(model_object), copy, &object));
    *cache = publish<tandem_cache>(std::move(object));
    return {};
  });
}

void tandem_cache_release(tandem_cache* cache) { release_handle(cache, HandleKind::kCache); }

int32_t tandem_sequence_create(int64_t* sequence, tandem_cache* cache, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(sequence, "sequence"));
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    return object->create_sequence(sequence);
  });
}

int32_t tandem_sequence_fork(int64_t* fork, tandem_cache* cache, int64_t sequence, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(fork, "fork"));
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    return object->fork(sequence, fork);
  });
}

int32_t tandem_sequence_drop(tandem_cache* cache, int64_t sequence, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    return object->drop(sequence);
  });
}

int32_t tandem_sequence_reserve(tandem_cache* cache, int64_t sequence, int64_t n_tokens, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    TANDEM_TRY(require_tokens("n_tokens", n_tokens));
    return object->reserve(sequence, n_tokens);
  });
}

int32_t tandem_sequence_truncate(tandem_cache* cache, int64_t sequence, int64_t n_tokens, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    return object->truncate(sequence, n_tokens);
  });
}

int32_t tandem_sequence_remove(tandem_cache* cache, int64_t sequence, int64_t first, int64_t n_tokens,
                               int32_t shift_positions, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    TANDEM_TRY(require_range("shift_positions", shift_positions, 0, 1));
    return object->remove(sequence, first, n_tokens, shift_positions == 1);
  });
}

int32_t tandem_sequence_append(tandem_cache* cache, int64_t sequence, int32_t layer_idx, const tandem_tensor* k,
                               const tandem_tensor* v, void* stream, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status { return append(cache, sequence, layer_idx, {k, v, nullptr}, stream); });
}

int32_t tandem_sequence_append_x(tandem_cache* cache, int64_t sequence, int32_t layer_idx, const tandem_tensor* k,
                                 const tandem_tensor* v, const tandem_tensor* x, void* stream, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(x, "x"));
    return append(cache, sequence, layer_idx, {k, v, x}, stream);
  });
}

int32_t tandem_sequence_read_x(const tandem_tensor* x, const tandem_cache* cache, int64_t sequence, int32_t layer_idx,
                               int64_t first, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    TANDEM_TRY(check_layer_idx(*object, layer_idx));
    TANDEM_TRY(require(x, "x"));
    CheckedTensor checked;
    TANDEM_TRY(check_hidden(object->layers()[static_cast<size_t>(layer_idx)], x, kAnyLength, &checked));
    return read_hidden(*object, sequence, layer_idx, first, view_of(checked));
  });
}

int32_t tandem_sequence_read(const tandem_tensor* k, const tandem_tensor* v, const tandem_cache* cache, int64_t sequence,
                             int32_t layer_idx, int64_t first, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    TANDEM_TRY(check_layer_idx(*object, layer_idx));
    if (v == nullptr) TANDEM_TRY(require(k, "k"));
    KeyValue kv;
    TANDEM_TRY(check_key_value(object->layers()[static_cast<size_t>(layer_idx)], k, v, &kv));
    if (k != nullptr && v != nullptr) TANDEM_TRY(check_disjoint(kv.k, kv.v));
    return read_rows(*object, sequence, layer_idx, first, kv.k_ptr, kv.v_ptr);
  });
}

int32_t tandem_sequence_length(int64_t* n_tokens, const tandem_cache* cache, int64_t sequence, int32_t layer_idx,
                               tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(n_tokens, "n_tokens"));
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    TANDEM_TRY(check_layer_idx(*object, layer_idx));
    return object->length(sequence, layer_idx, n_tokens);
  });
}

int32_t tandem_sequence_digest(uint64_t* digest, const tandem_cache* cache, int64_t sequence, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(digest, "digest"));
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    return hash_rows(*object, sequence, digest);
  });
}

int32_t tandem_cache_sequences(int64_t* sequences, int64_t capacity, int64_t* n_sequences, const tandem_cache* cache,
                               tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(n_sequences, "n_sequences"));
    TANDEM_TRY(require_range("capacity", capacity, 0, INT64_MAX));
    TANDEM_TRY(capacity > 0 ? require(sequences, "sequences") : require_aligned(sequences, "sequences"));
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    const std::vector<int64_t> ids = object->list_sequences();
    std::copy_n(ids.begin(), std::min(capacity, std::ssize(ids)), sequences);
    *n_sequences = std::ssize(ids);
    return {};
  });
}

int32_t tandem_cache_trim(int64_t* n_bytes, tandem_cache* cache, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require_aligned(n_bytes, "n_bytes"));
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    const int64_t n_given = object->trim();
    if (n_bytes != nullptr) *n_bytes = n_given;
    return {};
  });
}

int32_t tandem_cache_get_stats(tandem_cache_stats* stats, const tandem_cache* cache, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(check_out(stats, "stats"));
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    tandem_cache_stats known = AbiStruct<tandem_cache_stats>::defaults();
    object->stats(&known);
    copy_out(known, stats);
    return {};
  });
}
