// SPDX-License-Identifier: MIT
// Entry point: attend. Checks everything about the arguments that does not depend on the sequences' state.
#include <bit>

#include "lib/abi/api_session.h"
#include "lib/base/options.h"
#include "lib/tensors/tensor.h"

namespace tandem {
namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;

struct AttendRequest {
  tandem_attend_args args;
  const Layer* layer = nullptr;
  int64_t n_tokens = 0;
  bool has_k = false, has_v = false, has_x = false, has_lse = false, on_device = false;
  TensorPlace place;  // of all tensors but q
  CheckedTensor q, k, v, x, o, lse;
  TensorView k_view, v_view, x_view;
  tandem_selection selection;  // valid if has_selection
  bool has_selection = false;
  CheckedTensor idx;
  NamedKeys named;
};

Status check_flags(const AttendRequest& call) {
  const tandem_attend_args& args = call.args;
  TANDEM_TRY(require_aligned(args.parent_idx, "parent_idx"));
  TANDEM_TRY(require_aligned(args.cancel, "cancel"));
  constexpr uint32_t kKnown = TANDEM_ATTEND_SPECULATIVE | TANDEM_ATTEND_PARTIAL;
  if ((args.flags & ~kKnown) != 0) return fail(kInvalid, "flags", "flags = 0x%x has unknown bits", args.flags);
  if ((args.flags & kKnown) == kKnown)
    return fail(kInvalid, "flags", "flags = 0x%x: a speculative append is never a part of another", args.flags);
  const bool speculative = (args.flags & TANDEM_ATTEND_SPECULATIVE) != 0;
  if (speculative && args.k == nullptr)
    return fail(kInvalid, "k", "k = NULL with TANDEM_ATTEND_SPECULATIVE: there is nothing to append");
  if (args.parent_idx != nullptr && !speculative)
    return fail(kInvalid, "parent_idx", "parent_idx = %p without TANDEM_ATTEND_SPECULATIVE",
                static_cast<const void*>(args.parent_idx));
  if (call.layer->v_aliases_k && args.v != nullptr)
    return fail(kInvalid, "v", "v = %p, must be NULL: V aliases K in this layer", static_cast<const void*>(args.v));
  if (!call.layer->v_aliases_k && (args.k == nullptr) != (args.v == nullptr)) {
    const char* missing = args.k == nullptr ? "k" : "v";
    return fail(kInvalid, missing, "%s = NULL: k and v are given together", missing);
  }
  if (args.k != nullptr) return refuse_hidden(*call.layer, args.x);
  if (args.x != nullptr)
    return fail(kInvalid, "x", "x = %p without k: hidden states come with new tokens", static_cast<const void*>(args.x));
  return {};
}

// Checks q. All other tensors must be in the same memory.
Status check_q(const Device* device, AttendRequest* call) {
  const Layer& l = *call->layer;
  TensorSpec spec{"q", 3, {{"n_tokens", kAnyLength}, {"n_q_heads", l.n_q_heads}, {"k_head_dim", l.k_head_dim}}};
  spec.place = {true, device != nullptr, device != nullptr ? device->idx : -1};
  TANDEM_TRY(check_tensor(call->args.q, spec, &call->q));
  call->on_device = call->q.tensor.device_type != TANDEM_DEVICE_HOST;
  call->place = spec.place;
  call->place.host = !call->on_device;
  call->place.device = call->on_device;
  call->place.why = call->on_device ? "q is in device memory" : "q is in host memory";
  return call->on_device ? Status() : require_host_stream(call->args.stream);
}

// A call on a device returns as soon as its work is launched, so it can be neither cancelled nor watched.
Status check_watch(const AttendRequest& call) {
  const tandem_attend_args& args = call.args;
  if (args.progress == nullptr && args.progress_user != nullptr)
    return fail(kInvalid, "progress_user", "progress_user = %p without progress", args.progress_user);
  if (!call.on_device || (args.cancel == nullptr && args.progress == nullptr)) return {};
  const char* field = args.cancel != nullptr ? "cancel" : "progress";
  return fail(TANDEM_ERROR_UNSUPPORTED, field, "%s is given and q is in device memory: such a call only sends its work",
              field);
}

Status check_tensors(AttendRequest* call) {
  const tandem_attend_args& args = call->args;
  const Layer& l = *call->layer;
  const int64_t n = call->n_tokens = call->q.length(0);
  if (n > kMaxTokens / l.group_size)  // rows of one KV head
    return fail(TANDEM_ERROR_CAPACITY, "q.shape[0]", "q.shape[0] = %lld is more than one call can attend (%lld)",
                static_cast<long long>(n), static_cast<long long>(kMaxTokens / l.group_size));
  if ((call->has_k = args.k != nullptr)) {
    TANDEM_TRY(check_tensor(args.k,
                            {"k",
                             3,
                             {{"n_tokens", n}, {"n_kv_heads", l.n_kv_heads}, {"k_head_dim", l.k_head_dim}},
                             TensorTypes::kKeys,
                             call->place},
                            &call->k));
    call->k_view = view_of(call->k);
  }
  if ((call->has_v = args.v != nullptr)) {
    TANDEM_TRY(check_tensor(args.v,
                            {"v",
                             3,
                             {{"n_tokens", n}, {"n_kv_heads", l.n_kv_heads}, {"v_head_dim", l.v_head_dim}},
                             TensorTypes::kKeys,
                             call->place},
                            &call->v));
    call->v_view = view_of(call->v);
  }
  if ((call->has_x = args.x != nullptr)) {
    const TensorSpec spec{"x", 2, {{"n_tokens", n}, {"hidden_dim", l.hidden_dim()}}, TensorTypes::kFloat, call->place};
    TANDEM_TRY(check_tensor(args.x, spec, &call->x));
    call->x_view = view_of(call->x);
  }
  TANDEM_TRY(check_tensor(args.o,
                          {"o",
                           3,
                           {{"n_tokens", n}, {"n_q_heads", l.n_q_heads}, {"v_head_dim", l.v_head_dim}},
                           TensorTypes::kFloat,
                           call->place},
                          &call->o));
  if ((call->has_lse = args.lse != nullptr))
    TANDEM_TRY(check_tensor(
        args.lse, {"lse", 2, {{"n_tokens", n}, {"n_q_heads", l.n_q_heads}}, TensorTypes::kF32, call->place}, &call->lse));
  return {};
}

Status check_selection(AttendRequest* call) {
  constexpr uint32_t kKnown = TANDEM_SELECTION_ANY_ORDER | TANDEM_SELECTION_PLUS_WINDOW;
  call->has_selection = call->args.selection != nullptr;
  if (!call->has_selection) return {};
  tandem_selection& selection = call->selection;
  TANDEM_TRY(copy_in(call->args.selection, "selection.", &selection));
  if ((selection.flags & ~kKnown) != 0)
    return fail(kInvalid, "selection.flags", "selection.flags = 0x%x has unknown bits", selection.flags);
  const int64_t unit = selection.unit_tokens == 0 ? 1 : selection.unit_tokens;
  if (unit < 1 || unit > kMostUnitTokens || (unit & (unit - 1)) != 0)
    return fail(kInvalid, "selection.unit_tokens", "selection.unit_tokens = %lld is no power of two from 1 to %lld",
                static_cast<long long>(selection.unit_tokens), static_cast<long long>(kMostUnitTokens));
  TensorSpec spec{"selection.idx",
                  3,
                  {{"n_tokens", call->n_tokens}, {"n_kv_heads", kAnyLength}, {"n_idx", kAnyLength}},
                  TensorTypes::kIndices,
                  call->place};
  spec.place.host = true;  // a call on device tensors also takes indices in host memory
  TANDEM_TRY(check_tensor(selection.idx, spec, &call->idx));
  const int64_t n_heads = call->idx.length(1), n_kv_heads = call->layer->n_kv_heads;
  if (n_heads != 1 && n_heads != n_kv_heads)
    return fail(kInvalid, "selection.idx.shape[1]", "selection.idx.shape[1] = %lld, must be 1 or n_kv_heads = %lld",
                static_cast<long long>(n_heads), static_cast<long long>(n_kv_heads));
  if (call->idx.length(2) > kMaxTokens)
    return fail(kInvalid, "selection.idx.shape[2]",
                "selection.idx.shape[2] = %lld is more than a sequence has tokens (%lld)",
                static_cast<long long>(call->idx.length(2)), static_cast<long long>(kMaxTokens));
  call->named = {static_cast<const int32_t*>(call->idx.tensor.data),
                 stride_bytes(call->idx, 0) / 4,
                 stride_bytes(call->idx, 1) / 4,
                 call->idx.length(2),
                 static_cast<int32_t>(n_heads),
                 std::countr_zero(static_cast<uint64_t>(unit)),
                 call->idx.tensor.device_type != TANDEM_DEVICE_HOST,
                 (selection.flags & TANDEM_SELECTION_ANY_ORDER) != 0,
                 (selection.flags & TANDEM_SELECTION_PLUS_WINDOW) != 0};
  return {};
}

Status check_lengths(const AttendRequest& call) {
  int64_t sum = 0;  // below 2^62: both factors are below 2^31
  for (int32_t i = 0; i < call.args.n_sequences; ++i) sum += call.args.q_lens[i];
  if (sum == call.n_tokens) return {};
  return fail(kInvalid, "q.shape[0]", "q.shape[0] = %lld, must be the sum of q_lens = %lld",
              static_cast<long long>(call.n_tokens), static_cast<long long>(sum));
}

Status check_parents(const AttendRequest& call) {
  const int32_t* parent = call.args.parent_idx;
  if (parent == nullptr) return {};
  int64_t token = 0;
  for (int32_t i = 0; i < call.args.n_sequences; ++i) {
    for (int64_t own = 0; own < call.args.q_lens[i]; ++own, ++token) {
      if (parent[token] >= -1 && parent[token] < own) continue;
      const std::string field = element_name("parent_idx", token);
      return fail(kInvalid, field.c_str(), "%s = %d is not from -1 to below %lld, its own index in sequence %lld",
                  field.c_str(), parent[token], static_cast<long long>(own), static_cast<long long>(call.args.sequences[i]));
    }
  }
  return {};
}

Status check_output(const AttendRequest& call, const CheckedTensor& output) {
  TANDEM_TRY(check_disjoint(output, call.q));
  if (call.has_k) TANDEM_TRY(check_disjoint(output, call.k));
  if (call.has_v) TANDEM_TRY(check_disjoint(output, call.v));
  if (call.has_x) TANDEM_TRY(check_disjoint(output, call.x));
  if (call.has_selection) TANDEM_TRY(check_disjoint(output, call.idx));
  const tandem_attend_args& args = call.args;
  TANDEM_TRY(check_disjoint(output, array_footprint(args.sequences, args.n_sequences, sizeof(int64_t)), "sequences"));
  TANDEM_TRY(check_disjoint(output, array_footprint(args.q_lens, args.n_sequences, sizeof(int64_t)), "q_lens"));
  TANDEM_TRY(check_disjoint(output, array_footprint(args.cancel, 1, sizeof(int32_t)), "cancel"));
  return check_disjoint(output, array_footprint(args.parent_idx, call.n_tokens, sizeof(int32_t)), "parent_idx");
}

AttendArgs core_args(const AttendRequest& call, int32_t* cancel_was_seen) {
  AttendArgs out;
  out.layer_idx = call.args.layer_idx;
  out.speculative = (call.args.flags & TANDEM_ATTEND_SPECULATIVE) != 0;
  out.partial = (call.args.flags & TANDEM_ATTEND_PARTIAL) != 0;
  out.n_sequences = call.args.n_sequences;
  out.sequences = call.args.sequences;
  out.q_lens = call.args.q_lens;
  out.parent_idx = call.args.parent_idx;
  out.q = view_of(call.q);
  out.o = view_of(call.o);
  out.k = call.has_k ? &call.k_view : nullptr;
  out.v = call.has_v ? &call.v_view : nullptr;
  out.x = call.has_x ? &call.x_view : nullptr;
  if (call.has_lse) {
    out.lse = static_cast<float*>(call.lse.tensor.data);
    out.lse_token_stride = call.lse.tensor.stride[0];
    out.lse_head_stride = call.lse.tensor.stride[1];
  }
  out.on_device = call.on_device;
  out.stream = call.args.stream;
  out.named = call.has_selection ? &call.named : nullptr;
  out.is_watched = call.args.cancel != nullptr || call.args.progress != nullptr;
  out.watch = {call.args.cancel, call.args.progress, call.args.progress_user, cancel_was_seen};
  return out;
}

}  // namespace
}  // namespace tandem

using namespace tandem;

int32_t tandem_attend(tandem_session* session, const tandem_attend_args* args, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    SessionCall session_call;
    TANDEM_TRY(session_call.begin(session));
    TANDEM_TRY(require(args, "args"));
    AttendRequest call;
    TANDEM_TRY(copy_in(args, "", &call.args));
    const std::vector<Layer>& layers = session_call->cache().layers();
    TANDEM_TRY(require_range("layer_idx", call.args.layer_idx, 0, static_cast<int64_t>(layers.size()) - 1));
    call.layer = &layers[static_cast<size_t>(call.args.layer_idx)];
    TANDEM_TRY(check_sequences(call.args.sequences, call.args.q_lens, call.args.n_sequences, session_call.sorted()));
    TANDEM_TRY(check_flags(call));
    if (call.args.n_sequences == 0 && call.args.q == nullptr && call.args.o == nullptr) return {};
    TANDEM_TRY(check_q(session_call->cache().engine().device(), &call));
    TANDEM_TRY(check_watch(call));
    TANDEM_TRY(check_tensors(&call));
    TANDEM_TRY(check_selection(&call));
    TANDEM_TRY(check_lengths(call));
    TANDEM_TRY(check_parents(call));
    TANDEM_TRY(check_output(call, call.o));
    if (call.has_lse) {
      TANDEM_TRY(check_output(call, call.lse));
      TANDEM_TRY(check_disjoint(call.o, call.lse));
    }
    if (call.args.n_sequences == 0) return {};
    int32_t cancel_was_seen = 0;
    return session_call->attend(core_args(call, &cancel_was_seen));
  });
}
