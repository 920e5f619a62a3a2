// SPDX-License-Identifier: MIT
#include "runtime.h"

#include <omp.h>

#include <algorithm>

#include "byte_tokenizer.h"
#include "progress_bar.h"

namespace generate {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 40;

// The names that Tandem knows, by index.
template <typename Name>
bool is_known(const std::string& word, Name name, std::string* known) {
  for (int32_t i = 0; name(i) != nullptr; ++i) {
    if (word == name(i)) return true;
    *known += (i ? ", " : "") + std::string(name(i));
  }
  return false;
}

}  // namespace

std::vector<std::string> storage_types() {
  std::vector<std::string> names;
  for (int32_t type = 1; tandem_dtype_name(type) != nullptr; ++type) names.emplace_back(tandem_dtype_name(type));
  return names;
}

void EngineOptions::declare(Flags* flags) {
  flags->text("--model", "DIR", "Hugging Face model: config.json and model.safetensors (or its index and shards)",
              &model_directory);
  flags->choice("--kv-type", "storage type of keys and values (default bf16)", storage_types(), &k_type, 1);
  flags->choice("--v-type", "storage type of values where it differs", storage_types(), &v_type, 1);
  flags->choice("--k-rotation", "rotation of keys before they are stored, for 4-bit types (default none)",
                {"none", "hadamard"}, &k_rotation);
  flags->choice("--rope", "who rotates keys and queries (default runtime)", {"runtime", "library"}, &rope);
  flags->integer("--chunk", "tokens per prefill chunk (default 512)", 1, 65536, &chunk_tokens);
  flags->integer("--threads", "worker threads (default: what the process may use)", 1, 4096, &n_threads);
  flags->text("--isa", "NAME", "instruction set of the attention kernels (default: the best this processor has)", &isa);
  flags->toggle("--progress", "progress bar even when stderr is no terminal", &progress);
}

Failure EngineOptions::check() const {
  std::string known;
  if (isa.empty()) return {};
  if (!is_known(isa, tandem_cpu_isa_name, &known)) return {"--isa: \"" + isa + "\" is none of " + known};
  if (!tandem_cpu_isa_available(isa.c_str())) return {"--isa: this processor does not have \"" + isa + "\""};
  return {};
}

void PolicyOptions::declare(Flags* flags) {
  flags->integer("--window", "newest tokens, always attended (default: the library's)", 0, kMaxTokens, &window_tokens);
  flags->integer("--sinks", "first tokens, always attended (default: the library's)", 0, kMaxTokens, &sink_tokens);
  flags->real("--alpha", "hgca: factor of the moving average of attention weights, MAW", 1e-6, 1, &alpha);
  flags->real("--beta", "hgca: keep a key when its MAW > beta / tokens", 0, 1e6, &beta);
  flags->choice("--evict-by", "hgca: tokens in the rule at eviction", {"window", "host"}, &evict_by);
  flags->integer("--halo", "hgca: keys kept after a strongly attended one (default: the library's)", 0, kMaxTokens,
                 &halo_tokens);
  flags->choice("--group", "hgca: a KV head keeps what any, or the mean, of its query heads keeps", {"union", "mean"},
                &group_mode);
}

Failure PolicyOptions::check(const char* flag) const {
  std::string known;
  if (!is_known(policy, tandem_policy_name, &known)) return {std::string(flag) + ": \"" + policy + "\" is none of " + known};
  return {};
}

Failure Runtime::open(const EngineOptions& options) {
  options_ = options;
  ModelConfig config;
  GENERATE_TRY(read_model_config(&config, options.model_directory));
  GENERATE_TRY(check_vocabulary(config, options.model_directory));
  const int32_t n_threads = options.n_threads ? static_cast<int32_t>(options.n_threads) : omp_get_num_procs();
  {
    WeightFiles weights;
    GENERATE_TRY(weights.open_directory(options.model_directory));
    GENERATE_TRY(transformer_.load(config, weights, options.rope == 1, n_threads));
  }
  tandem_engine_options engine_options = TANDEM_ENGINE_OPTIONS_INIT;
  engine_options.n_threads = static_cast<int32_t>(options.n_threads);
  engine_options.cpu_isa = options.isa.empty() ? nullptr : options.isa.c_str();
  tandem_engine* engine = nullptr;
  GENERATE_TANDEM(tandem_engine_create(&engine, &engine_options, &error));
  engine_.reset(engine);

  const std::vector<tandem_layer_options> layers(config.n_layers, transformer_.layer_options());
  tandem_model* model = nullptr;
  GENERATE_TANDEM(tandem_model_create(&model, layers.data(), static_cast<int32_t>(layers.size()), &error));
  model_.reset(model);

  tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
  cache_options.k_type = options.k_type;
  cache_options.v_type = options.v_type;
  cache_options.k_rotation = options.k_rotation;
  tandem_cache* cache = nullptr;
  GENERATE_TANDEM(tandem_cache_create(&cache, engine, model, &cache_options, &error));
  cache_.reset(cache);
  return {};
}

Failure Runtime::new_session(const PolicyOptions& policy, Session* session) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = policy.policy.c_str();
  options.window_tokens = policy.window_tokens;
  options.sink_tokens = policy.sink_tokens;
  options.alpha = static_cast<float>(policy.alpha);
  options.beta = static_cast<float>(policy.beta);
  options.group_mode = policy.group_mode;
  options.evict_by = policy.evict_by;
  options.halo_tokens = policy.halo_tokens;
  tandem_session* created = nullptr;
  GENERATE_TANDEM(tandem_session_create(&created, cache_.get(), &options, &error));
  session->reset(created);
  return {};
}

Failure Runtime::new_sequence(int64_t* sequence) {
  GENERATE_TANDEM(tandem_sequence_create(sequence, cache_.get(), &error));
  return {};
}

Failure Runtime::fork(const Context& from, tandem_session* session, Context* to) {
  int64_t sequence = 0;
  GENERATE_TANDEM(tandem_sequence_fork(&sequence, cache_.get(), from.sequence, &error));
  *to = {session, sequence, from.n_tokens};
  return {};
}

Failure Runtime::drop(const Context& context) {
  GENERATE_TANDEM(tandem_sequence_drop(cache_.get(), context.sequence, &error));
  return {};
}

Failure Runtime::append(Context* context, std::string_view text, const AppendOptions& options) {
  const int64_t n_tokens = static_cast<int64_t>(text.size());
  ProgressBar bar(options.label, n_tokens, options_.progress);
  for (int64_t first = 0; first < n_tokens; first += options_.chunk_tokens) {
    Chunk chunk;
    chunk.session = context->session;
    chunk.sequence = context->sequence;
    chunk.position = context->n_tokens;
    chunk.tokens = text.substr(first, options_.chunk_tokens);
    const int64_t n = static_cast<int64_t>(chunk.tokens.size());
    if (first + n < n_tokens || options.more_follows) chunk.flags = TANDEM_ATTEND_PARTIAL;
    GENERATE_TRY(transformer_.forward(chunk));
    context->n_tokens += n;
    last_chunk_tokens_ = n;
    if (options.on_chunk) options.on_chunk(first, n);
    bar.show(first + n);
  }
  pause_linear_threads();
  return {};
}

Failure Runtime::step(Context* context, char token) {
  Chunk chunk;
  chunk.session = context->session;
  chunk.sequence = context->sequence;
  chunk.position = context->n_tokens;
  chunk.tokens = std::string_view(&token, 1);
  GENERATE_TRY(transformer_.forward(chunk));
  ++context->n_tokens;
  last_chunk_tokens_ = 1;
  return {};
}

Failure session_stats(const tandem_session* session, tandem_session_stats* stats) {
  *stats = TANDEM_SESSION_STATS_INIT;
  GENERATE_TANDEM(tandem_session_get_stats(stats, session, &error));
  return {};
}

}  // namespace generate
