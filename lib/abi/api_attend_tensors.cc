// SPDX-License-Identifier: MIT
// Entry point: attention over K and V that the caller owns. All arguments are checked here.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "lib/abi/api.h"
#include "lib/base/layer_refusal.h"
#include "lib/base/options.h"
#include "lib/machine/engine.h"
#include "lib/model/dtype.h"
#include "lib/model/model.h"
#include "lib/tensors/attend_tensors.h"
#include "lib/tensors/tensor.h"

namespace tandem {
namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
constexpr int32_t kMaxSequences = 65536;

// Padded tensors have one more dimension than packed ones: that of the sequences.
constexpr int32_t kPaddedDims = 4;

struct TensorsRequest {
  tandem_attend_tensors_args args;
  bool padded = false;
  int64_t n_sequences = 0, n_tokens = 0, n_keys = 0, n_columns = 0;  // n_tokens, n_keys: of a sequence where padded
  int64_t n_q_heads = 0, n_kv_heads = 0;
  int64_t k_head_dim = 0, v_head_dim = 0;
  CheckedTensor q, k, v, mask, o, lse;
  std::vector<int64_t> q_lens, kv_lens;

  bool has_v() const { return args.v != nullptr; }
};

Status check_flags(const tandem_attend_tensors_args& args) {
  TANDEM_TRY(require_aligned(args.sinks, "sinks"));
  TANDEM_TRY(require_aligned(args.alibi_slopes, "alibi_slopes"));
  TANDEM_TRY(require_aligned(args.q_lens, "q_lens"));
  TANDEM_TRY(require_aligned(args.kv_lens, "kv_lens"));
  TANDEM_TRY(require_aligned(args.cancel, "cancel"));
  TANDEM_TRY(check_reserved("reserved", args.reserved));
  TANDEM_TRY(require_host_stream(args.stream));
  if ((args.flags & ~TANDEM_TENSORS_CAUSAL) != 0)
    return fail(kInvalid, "flags", "flags = 0x%x has unknown bits", args.flags);
  const bool causal = (args.flags & TANDEM_TENSORS_CAUSAL) != 0;
  if (causal && args.mask != nullptr)
    return fail(kInvalid, "mask", "mask = %p with TANDEM_TENSORS_CAUSAL: the mask says what a query sees",
                static_cast<const void*>(args.mask));
  if (!causal && args.sliding_window_tokens != 0)
    return fail(kInvalid, "sliding_window_tokens", "sliding_window_tokens = %lld without TANDEM_TENSORS_CAUSAL",
                static_cast<long long>(args.sliding_window_tokens));
  if (args.progress == nullptr && args.progress_user != nullptr)
    return fail(kInvalid, "progress_user", "progress_user = %p without progress", args.progress_user);
  return {};
}

// Checks a tensor [tokens, heads, dim], or [n_sequences, tokens, heads, dim].
Status check_rows(const tandem_tensor* tensor, const char* name, const TensorDim (&dims)[3], TensorTypes types,
                  const TensorsRequest& call, CheckedTensor* checked) {
  TensorSpec spec{name, call.padded ? kPaddedDims : 3, {}, types};
  spec.any_order = true;
  int32_t n = 0;
  if (call.padded) spec.dims[n++] = {"n_sequences", call.n_sequences};
  for (const TensorDim& dim : dims) spec.dims[n++] = dim;
  return check_tensor(tensor, spec, checked);
}

// Finds the number of sequences, and whether tensors have a dimension for them.
Status find_form(TensorsRequest* call) {
  const tandem_attend_tensors_args& args = call->args;
  TANDEM_TRY(require(args.q, "q"));
  tandem_tensor q;
  TANDEM_TRY(copy_in(args.q, "q.", &q));
  if (q.n_dims != 3 && q.n_dims != kPaddedDims)
    return fail(kInvalid, "q.n_dims", "q.n_dims = %d, must be 3 (packed) or 4 (padded)", q.n_dims);
  call->padded = q.n_dims == kPaddedDims;
  TANDEM_TRY(require_range("n_sequences", args.n_sequences, 0, kMaxSequences));
  call->n_sequences = args.n_sequences > 0 ? args.n_sequences : call->padded ? q.shape[0] : 1;
  return require_range(call->padded ? "q.shape[0]" : "n_sequences", call->n_sequences, 0, kMaxSequences);
}

Status check_tensors(TensorsRequest* call) {
  const tandem_attend_tensors_args& args = call->args;
  const int32_t first = call->padded ? 1 : 0;  // dimension of the tokens
  TANDEM_TRY(check_rows(args.q, "q", {{"n_tokens", kAnyLength}, {"n_q_heads", kAnyLength}, {"k_head_dim", kAnyLength}},
                        TensorTypes::kFloat, *call, &call->q));
  call->n_tokens = call->q.length(first);
  call->n_q_heads = call->q.length(first + 1);
  call->k_head_dim = call->q.length(first + 2);
  TANDEM_TRY(check_rows(args.k, "k", {{"n_keys", kAnyLength}, {"n_kv_heads", kAnyLength}, {"k_head_dim", call->k_head_dim}},
                        TensorTypes::kKeys, *call, &call->k));
  call->n_keys = call->k.length(first);
  call->n_kv_heads = call->k.length(first + 1);
  // check_layer() refuses n_kv_heads = 0 and too many query heads.
  if (call->n_kv_heads > 0 && call->n_q_heads <= INT32_MAX && call->n_q_heads % call->n_kv_heads != 0)
    return fail(
        kInvalid, "n_q_heads",
        "n_q_heads = %lld is not a multiple of n_kv_heads = %lld: the axes of q are [%sn_tokens, n_q_heads, k_head_dim], "
        "of k [%sn_keys, n_kv_heads, k_head_dim]",
        static_cast<long long>(call->n_q_heads), static_cast<long long>(call->n_kv_heads),
        call->padded ? "n_sequences, " : "", call->padded ? "n_sequences, " : "");
  TANDEM_TRY(check_rows(args.o, "o",
                        {{"n_tokens", call->n_tokens}, {"n_q_heads", call->n_q_heads}, {"v_head_dim", kAnyLength}},
                        TensorTypes::kFloat, *call, &call->o));
  call->v_head_dim = call->o.length(first + 2);
  if (call->has_v())
    TANDEM_TRY(check_rows(args.v, "v",
                          {{"n_keys", call->n_keys}, {"n_kv_heads", call->n_kv_heads}, {"v_head_dim", call->v_head_dim}},
                          TensorTypes::kKeys, *call, &call->v));
  if (args.lse == nullptr) return {};
  TensorSpec spec{"lse", call->padded ? 3 : 2, {}, TensorTypes::kF32};
  spec.any_order = true;
  if (call->padded) spec.dims[0] = {"n_sequences", call->n_sequences};
  spec.dims[first] = {"n_tokens", call->n_tokens};
  spec.dims[first + 1] = {"n_q_heads", call->n_q_heads};
  return check_tensor(args.lse, spec, &call->lse);
}

// Copies q_lens or kv_lens. If they are not given, every sequence has n_rows.
Status copy_lengths(const TensorsRequest& call, const int64_t* given, const char* name, int64_t n_rows,
                    std::vector<int64_t>* lengths) {
  const char* rows = name[0] == 'q' ? "tokens of q" : "keys of k";
  if (given == nullptr && !call.padded && call.n_sequences != 1)
    return fail(kInvalid, name, "%s = NULL with n_sequences = %lld in packed tensors", name,
                static_cast<long long>(call.n_sequences));
  lengths->assign(static_cast<size_t>(call.n_sequences), n_rows);
  int64_t sum = 0;
  for (int64_t i = 0; given != nullptr && i < call.n_sequences; ++i) {
    const std::string field = element_name(name, i);
    if (given[i] < 0 || given[i] > n_rows)
      return fail(kInvalid, field.c_str(), "%s = %lld is not from 0 to the %lld %s", field.c_str(),
                  static_cast<long long>(given[i]), static_cast<long long>(n_rows), rows);
    sum += given[i];
    (*lengths)[static_cast<size_t>(i)] = given[i];
  }
  if (given == nullptr || call.padded || sum == n_rows) return {};
  return fail(kInvalid, name, "%s add up to %lld, must be the %lld %s", name, static_cast<long long>(sum),
              static_cast<long long>(n_rows), rows);
}

Status check_mask(TensorsRequest* call) {
  if (call->args.mask == nullptr) return {};
  int64_t longest = 0;
  for (const int64_t kv_len : call->kv_lens) longest = std::max(longest, kv_len);
  TensorSpec spec{"mask", call->padded ? 4 : 2, {}, TensorTypes::kFloat};
  spec.any_order = true;
  const int32_t rows = call->padded ? 2 : 0;
  spec.dims[0] = {"n_sequences or 1", kAnyLength}, spec.dims[1] = {"n_q_heads or 1", kAnyLength};
  spec.dims[rows] = {"n_tokens", call->n_tokens};
  spec.dims[rows + 1] = {"n_columns", kAnyLength};
  TANDEM_TRY(check_tensor(call->args.mask, spec, &call->mask));
  const tandem_tensor& mask = call->mask.tensor;
  if (mask.dtype == TANDEM_BF16)
    return fail(kInvalid, "mask.dtype", "mask.dtype = %d (bf16), must be f32 or f16", mask.dtype);
  call->n_columns = mask.shape[rows + 1];
  if (call->n_columns < longest) {
    const std::string field = element_name("mask.shape", rows + 1);
    return fail(kInvalid, field.c_str(), "%s = %lld is less than the %lld keys of a sequence", field.c_str(),
                static_cast<long long>(call->n_columns), static_cast<long long>(longest));
  }
  const int64_t most[2] = {call->n_sequences, call->n_q_heads};
  for (int32_t d = 0; call->padded && d < 2; ++d) {
    if (mask.shape[d] == 1 || mask.shape[d] == most[d]) continue;
    const std::string field = element_name("mask.shape", d);
    return fail(kInvalid, field.c_str(), "%s = %lld, must be 1 or %lld", field.c_str(),
                static_cast<long long>(mask.shape[d]), static_cast<long long>(most[d]));
  }
  return {};
}

Status check_slopes(const TensorsRequest& call) {
  const float* slopes = call.args.alibi_slopes;
  for (int64_t h = 0; slopes != nullptr && h < call.n_q_heads; ++h) {
    if (std::isfinite(slopes[h])) continue;
    const std::string field = element_name("alibi_slopes", h);
    return fail(kInvalid, field.c_str(), "%s = %g is not finite", field.c_str(), static_cast<double>(slopes[h]));
  }
  return {};
}

Status check_output(const TensorsRequest& call, const CheckedTensor& output) {
  const tandem_attend_tensors_args& args = call.args;
  const auto n = static_cast<int64_t>(call.q_lens.size());
  TANDEM_TRY(check_disjoint(output, call.q));
  TANDEM_TRY(check_disjoint(output, call.k));
  if (call.has_v()) TANDEM_TRY(check_disjoint(output, call.v));
  if (args.mask != nullptr) TANDEM_TRY(check_disjoint(output, call.mask));
  TANDEM_TRY(check_disjoint(output, array_footprint(args.q_lens, n, sizeof(int64_t)), "q_lens"));
  TANDEM_TRY(check_disjoint(output, array_footprint(args.kv_lens, n, sizeof(int64_t)), "kv_lens"));
  TANDEM_TRY(check_disjoint(output, array_footprint(args.sinks, call.n_q_heads, sizeof(float)), "sinks"));
  TANDEM_TRY(check_disjoint(output, array_footprint(args.alibi_slopes, call.n_q_heads, sizeof(float)), "alibi_slopes"));
  return check_disjoint(output, array_footprint(args.cancel, 1, sizeof(int32_t)), "cancel");
}

Status check_outputs(const TensorsRequest& call) {
  TANDEM_TRY(check_output(call, call.o));
  if (call.args.lse == nullptr) return {};
  TANDEM_TRY(check_output(call, call.lse));
  return check_disjoint(call.o, call.lse);
}

// Makes the layer that the tensors' shapes describe, checked like a layer of a model.
Status make_layer(const TensorsRequest& call, Layer* layer) {
  const tandem_attend_tensors_args& args = call.args;
  tandem_layer_options options = AbiStruct<tandem_layer_options>::defaults();
  const auto length = [](int64_t n) { return static_cast<int32_t>(std::min<int64_t>(n, INT32_MAX)); };
  options.n_q_heads = length(call.n_q_heads);
  options.n_kv_heads = length(call.n_kv_heads);
  options.k_head_dim = length(call.k_head_dim);
  options.v_head_dim = length(call.v_head_dim);
  options.v_aliases_k = call.has_v() ? 0 : 1;
  options.sm_scale = args.sm_scale;
  options.soft_cap = args.soft_cap;
  options.sliding_window_tokens = args.sliding_window_tokens;
  options.sinks = args.sinks;
  TANDEM_TRY(check_layer(options, LayerRefusal("")));
  TANDEM_TRY(check_slopes(call));  // reads n_q_heads slopes, so after check_layer()
  if (options.v_head_dim == 0) return fail(kInvalid, "v_head_dim", "v_head_dim = 0 is not positive");
  *layer = resolve_layer(options);
  layer->sinks = args.sinks;
  const int32_t tokens = call.padded ? 1 : 0;
  layer->k_type = in_blocks(call.k.tensor.dtype);
  layer->v_type = call.has_v() ? in_blocks(call.v.tensor.dtype) : layer->k_type;
  layer->k_stride = stride_bytes(call.k, tokens);
  if (call.has_v()) layer->v_stride = stride_bytes(call.v, tokens);
  return {};
}

Status check_counts(const TensorsRequest& call) {
  TANDEM_TRY(require_tokens("n_keys", call.n_keys));
  // Keeps n_tokens * n_q_heads over all sequences within kMaxTokens.
  const int64_t most = kMaxTokens / std::max<int64_t>(1, call.n_q_heads);
  const int64_t n_blocks = call.padded ? std::max<int64_t>(1, call.n_sequences) : 1;
  if (call.n_tokens <= most / n_blocks) return {};
  return fail(TANDEM_ERROR_CAPACITY, "n_tokens", "n_tokens = %lld of %lld sequences is more than one call can attend (%lld)",
              static_cast<long long>(call.n_tokens), static_cast<long long>(n_blocks), static_cast<long long>(most));
}

// Returns the address of a sequence's n_rows rows. In a packed tensor they begin with row `row`. Without rows, returns the
// tensor's own address, as there may be no valid address after its last row.
std::byte* first_row(const TensorsRequest& call, const CheckedTensor& t, int64_t sequence_idx, int64_t row, int64_t n_rows) {
  auto* data = static_cast<std::byte*>(t.tensor.data);
  return n_rows == 0 ? data : data + (call.padded ? sequence_idx : row) * stride_bytes(t, 0);
}

TensorView view_of_sequence(const TensorsRequest& call, const CheckedTensor& t, int64_t sequence_idx, int64_t row,
                            int64_t n_rows) {
  const int32_t tokens = call.padded ? 1 : 0;
  TensorView view;
  view.dtype = t.tensor.dtype;
  view.n_tokens = n_rows;
  view.n_heads = t.length(tokens + 1);
  view.head_dim = t.length(tokens + 2);
  view.token_stride = stride_bytes(t, tokens);
  view.head_stride = stride_bytes(t, tokens + 1);
  view.data = first_row(call, t, sequence_idx, row, n_rows);
  return view;
}

void add_sequences(const TensorsRequest& call, TensorsArgs* out) {
  int64_t first_token = 0, first_key = 0;
  for (size_t i = 0; i < call.q_lens.size(); ++i) {
    const auto idx = static_cast<int64_t>(i);
    TensorSequence sequence;
    sequence.q_len = call.q_lens[i];
    sequence.kv_len = call.kv_lens[i];
    sequence.q = view_of_sequence(call, call.q, idx, first_token, sequence.q_len);
    sequence.o = view_of_sequence(call, call.o, idx, first_token, sequence.q_len);
    sequence.k = view_of_sequence(call, call.k, idx, first_key, sequence.kv_len);
    if (call.has_v()) sequence.v = view_of_sequence(call, call.v, idx, first_key, sequence.kv_len);
    if (call.args.lse != nullptr)
      sequence.lse = reinterpret_cast<float*>(first_row(call, call.lse, idx, first_token, sequence.q_len));
    if (call.args.mask != nullptr) {
      const bool shared = call.padded && call.mask.length(0) == 1;
      sequence.mask = first_row(call, call.mask, shared ? 0 : idx, first_token, sequence.q_len);
    }
    first_token += sequence.q_len;
    first_key += sequence.kv_len;
    out->sequences.push_back(sequence);
  }
}

Status make_args(const TensorsRequest& call, int32_t* cancel_was_seen, TensorsArgs* out) {
  TANDEM_TRY(make_layer(call, &out->layer));
  out->causal = (call.args.flags & TANDEM_TENSORS_CAUSAL) != 0;
  out->alibi_slopes = call.args.alibi_slopes;
  out->watch = {call.args.cancel, call.args.progress, call.args.progress_user, cancel_was_seen};
  if (call.args.lse != nullptr) {
    out->lse_token_stride = call.lse.tensor.stride[call.padded ? 1 : 0];
    out->lse_head_stride = call.lse.tensor.stride[call.padded ? 2 : 1];
  }
  if (call.args.mask != nullptr) {
    out->mask.dtype = call.mask.tensor.dtype;
    out->mask.row_stride = stride_bytes(call.mask, call.padded ? 2 : 0);
    out->mask.per_head = call.padded && call.mask.length(1) > 1;
    if (out->mask.per_head) {
      out->mask.head_stride = stride_bytes(call.mask, 1);
      out->heads_per_k = out->layer.group_size;
      out->layer.n_kv_heads = out->layer.n_q_heads;
      out->layer.group_size = 1;
    }
  }
  add_sequences(call, out);
  return {};
}

}  // namespace
}  // namespace tandem

using namespace tandem;

int32_t tandem_attend_tensors(tandem_engine* engine, const tandem_attend_tensors_args* args, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Engine> object;
    TANDEM_TRY(resolve(engine, "engine", &object));
    TANDEM_TRY(require(args, "args"));
    TensorsRequest call;
    TANDEM_TRY(copy_in(args, "", &call.args));
    TANDEM_TRY(check_flags(call.args));
    TANDEM_TRY(find_form(&call));
    TANDEM_TRY(check_tensors(&call));
    TANDEM_TRY(check_counts(call));
    TANDEM_TRY(copy_lengths(call, call.args.q_lens, "q_lens", call.n_tokens, &call.q_lens));
    TANDEM_TRY(copy_lengths(call, call.args.kv_lens, "kv_lens", call.n_keys, &call.kv_lens));
    TANDEM_TRY(check_mask(&call));
    int32_t cancel_was_seen = 0;
    TensorsArgs core;
    TANDEM_TRY(make_args(call, &cancel_was_seen, &core));
    TANDEM_TRY(check_outputs(call));
    return object->tensors().attend(object->cpu(), core);
  });
}
