// SPDX-License-Identifier: MIT
#include "tools/plan/plan_options.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "tools/plan/model_config.h"

namespace tools {
namespace {

enum Route : int32_t { kAuto, kHost, kStream, kHostAndStream, kRecompute };
constexpr Choice kRoutes[] = {
    {"auto", kAuto}, {"host", kHost}, {"stream", kStream}, {"host+stream", kHostAndStream}, {"recompute", kRecompute}};

bool has(const std::vector<std::string>& given, const char* name) {
  return std::find(given.begin(), given.end(), name) != given.end();
}

}  // namespace

void PlanOptions::declare(std::vector<Flag>* flags) {
  constexpr int64_t kMaxLen = INT64_C(1) << 40;
  const std::vector<Flag> added = {
      text_flag("--model", "DIR", &model_dir, "geometry from DIR/config.json (Hugging Face), instead of the five below"),
      number_flag("--layers", &n_layers, 1, 65536, "layers (32)"),
      number_flag("--q-heads", &n_q_heads, 1, 4096, "query heads (32)"),
      number_flag("--kv-heads", &n_kv_heads, 1, 4096, "KV heads, a divisor of the query heads (8)"),
      number_flag("--head-dim", &head_dim, 1, 4096, "dimensions of a key (128)"),
      number_flag("--hidden-dim", &hidden_dim, 1, 65536, "dimensions of a hidden state (query heads times head dim)"),
      number_flag("--v-head-dim", &v_head_dim, 1, 4096, "dimensions of a value (those of a key)"),
      switch_flag("--v-aliases-k", &v_aliases_k, "a value is the first dimensions of its key, as with MLA: 576 and 512"),
      numbers_flag("--kv-len", &kv_lens, 0, kMaxLen, "tokens of a sequence, a plan for each (32768,131072)"),
      numbers_flag("--context", &kv_lens, 0, kMaxLen, "the same as --kv-len"),
      number_flag("--batch", &batch, 1, 1 << 20, "sequences of that length (1)"),
      number_flag("--q-len", &q_len, 1, 1 << 20, "new tokens of each in a call: 1 decodes, more are an append (1)"),
      choice_flag("--kv-type", &kv_type, key_type_choices(), "storage type of K and V (bf16)"),
      choice_flag("--v-type", &v_type, key_type_choices(), "storage type of V where it differs"),
      choice_flag("--x-type", &x_type, dtype_choices(), "storage type of hidden states, which recompute needs (none kept)"),
      number_flag("--page-tokens", &page_tokens, 16, 4096, "tokens of a page, a power of two (128)"),
      choice_flag("--policy", &policy, library_choices(tandem_policy_name), "which keys are attended (all)"),
      text_flag("--pruning", "PRESET", &pruning, "hip: what it prunes (small)"),
      text_flag("--patterns", "FILE", &patterns_path, "patterns, which needs it: a file of head patterns, of all layers"),
      number_flag(
          "--window", &window, 0, kMaxLen,
          "newest tokens, always attended, on the device (4096; with --backend, hip: at least, patterns: the longest "
          "length)"),
      number_flag("--sinks", &sinks, 0, kMaxLen, "first tokens, always attended (64)"),
      choice_flag("--route", &route, {std::begin(kRoutes), std::end(kRoutes)},
                  "which processor attends keys outside the window, with --backend (auto)"),
      real_flag("--stream-share", &stream_share, 0, 1, "host+stream, which needs it: share of these keys that is streamed"),
      real_flag("--recompute-share", &recompute_share, 1e-9, 1, "recompute: share of these keys that is recomputed (1)"),
      real_flag("--host-cap-gib", &host_cap_gib, 1e-6, 1e6, "refuse plans that take more host memory (no cap)"),
      real_flag("--device-cap-gib", &device_cap_gib, 1e-6, 1e6, "refuse plans that take more device memory (no cap)"),
  };
  flags->insert(flags->end(), added.begin(), added.end());
}

bool PlanOptions::prunes() const { return std::string_view(tandem_policy_name(policy)) == "hip"; }

bool PlanOptions::follows_patterns() const { return std::string_view(tandem_policy_name(policy)) == "patterns"; }

const char* PlanOptions::route_name() const { return route < 0 ? nullptr : kRoutes[route].name; }

// Refuses flags that would change nothing.
Result PlanOptions::check_policy(const std::vector<std::string>& given, const EngineFlags& engine) const {
  const std::string_view name = tandem_policy_name(policy);
  const bool keeps_ends = name == "streaming" || name == "hgca";
  if (!prunes()) TOOL_TRY(refuse_given(given, {"--pruning"}, "is for --policy hip alone"));
  if (!follows_patterns()) TOOL_TRY(refuse_given(given, {"--patterns"}, "is for --policy patterns alone"));
  if (!keeps_ends) TOOL_TRY(refuse_given(given, {"--sinks"}, "is for --policy streaming and hgca alone"));
  if (!keeps_ends && engine.backend.empty())
    TOOL_TRY(refuse_given(given, {"--window"}, "is for --policy streaming and hgca, or a device (--backend is missing)"));
  if (follows_patterns() && patterns_path.empty()) return usage_error("--policy = patterns: --patterns FILE is missing");
  return {};
}

Result PlanOptions::check(const std::vector<std::string>& given, const EngineFlags& engine) {
  const auto is_given = [&](const char* name) { return has(given, name); };
  for (const char* name : {"--layers", "--q-heads", "--kv-heads", "--head-dim", "--hidden-dim"})
    if (is_given(name) && !model_dir.empty())
      return usage_error("%s contradicts --model = %s, whose config.json says that", name, model_dir.c_str());
  if (is_given("--kv-len") && is_given("--context")) return usage_error("--context and --kv-len are the same: give one");
  for (const char* name : {"--route", "--device-cap-gib"})
    if (is_given(name) && engine.backend.empty()) return usage_error("%s is about a device: --backend is missing", name);
  TOOL_TRY(check_policy(given, engine));
  if (route == kHostAndStream && !is_given("--stream-share"))
    return usage_error("--route = host+stream needs --stream-share");
  if (route != kHostAndStream && is_given("--stream-share"))
    return usage_error("--stream-share is for --route host+stream alone");
  if (is_given("--recompute-share") && route != kRecompute)
    return usage_error("--recompute-share is for --route recompute alone");
  if (route == kRecompute && x_type == 0) x_type = TANDEM_BF16;
  if (x_type == 0) TOOL_TRY(refuse_given(given, {"--hidden-dim"}, "is for --x-type and --route recompute alone"));
  if (kv_lens.empty()) kv_lens = {32768, 131072};
  for (const int64_t kv_len : kv_lens)
    if (q_len > 1 && q_len > kv_len)
      return usage_error("--q-len = %lld is more than --kv-len = %lld: new tokens are among these",
                         static_cast<long long>(q_len), static_cast<long long>(kv_len));
  if (kv_type == 0) kv_type = TANDEM_BF16;
  if (v_type == 0) v_type = kv_type;
  if (!model_dir.empty()) TOOL_TRY(read_model_config(model_dir, this));
  if (v_head_dim == 0) v_head_dim = head_dim;
  if (hidden_dim == 0) hidden_dim = n_q_heads * head_dim;
  if (n_q_heads % n_kv_heads != 0)
    return usage_error("--q-heads = %lld is not a multiple of --kv-heads = %lld", static_cast<long long>(n_q_heads),
                       static_cast<long long>(n_kv_heads));
  if (follows_patterns()) TOOL_TRY(read_model_heads(patterns_path, {n_layers, n_q_heads, n_kv_heads}, &heads));
  return {};
}

}  // namespace tools
