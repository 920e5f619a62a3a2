// SPDX-License-Identifier: MIT
#include "runtime.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <random>

#include "byte_tokenizer.h"
#include "cpu_transformer.h"
#include "cuda/cuda_transformer.h"
#include "interrupt.h"
#include "model_shapes.h"
#include "progress_bar.h"

namespace generate {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 40;

std::vector<std::string> names_by_index(const char* (*name)(int32_t idx)) {
  std::vector<std::string> names;
  for (int32_t i = 0; name(i) != nullptr; ++i) names.emplace_back(name(i));
  return names;
}

}  // namespace

std::vector<std::string> policy_names() { return names_by_index(tandem_policy_name); }

std::vector<std::string> storage_types() {
  std::vector<std::string> names;
  for (int32_t type = 1; tandem_dtype_name(type) != nullptr; ++type) names.emplace_back(tandem_dtype_name(type));
  return names;
}

std::vector<std::string> key_types() {
  std::vector<std::string> names = storage_types();
  names.resize(TANDEM_Q4_64 - 1);  // without the last, which is for hidden states only
  return names;
}

void EngineOptions::declare(Flags* flags) {
  flags->text("--model", "DIR",
              "Llama-family model whose tokens are bytes, as Hugging Face stores it: config.json and model.safetensors\n"
              "(or its index and shards)",
              &model_directory);
  flags->choice("--kv-type", "storage type of keys and values (default bf16)", key_types(), &k_type, 1);
  flags->choice("--v-type", "storage type of values where it differs", key_types(), &v_type, 1);
  flags->choice("--k-rotation", "rotation of keys before they are stored (default: hadamard for 4-bit types, else none)",
                {"default", "hadamard", "none"}, &k_rotation);
  flags->choice("--rope", "who rotates keys and queries (default runtime)", {"runtime", "library"}, &rope);
  flags->integer("--chunk", "tokens per prefill chunk (default 512)", 1, 65536, &chunk_tokens);
  flags->integer("--threads", "CPU workers (default 0: affinity mask and quota decide)", 0, 4096, &n_threads);
  flags->choice("--device", "where the model runs (default cpu); with cuda Tandem's window is there as well",
                {"cpu", "cuda"}, &place);
  flags->text("--backend-path", "FILE", "Tandem's module for --device cuda (looked for by the library)", &backend_path);
  flags->choice("--compute", "with --device cuda: weights and activations (default f32)", {"f32", "bf16"}, &compute, 1);
  flags->toggle("--eager", "with --device cuda: decode kernel by kernel instead of replaying a graph", &eager);
  flags->choice("--weights",
                "with --device cuda: where the layers' matrices are (default device); from the host they cross\n"
                "the bus for every step, and decode goes kernel by kernel",
                {"device", "host"}, &weights_place);
  flags->real("--resident-share", "with --weights host: share of them that stays on the device (default 0)", 0, 1,
              &resident_share);
  flags->choice("--kv",
                "with --device cuda: where keys and values are; device (default): those of the window, and the CPU\n"
                "attends the others; host: in host memory beyond the window, attended by --route, decode in calls",
                {"device", "host"}, &kv_place);
  flags->choice("--isa", "instruction set of the attention kernels (default: the best this processor has)",
                names_by_index(tandem_cpu_isa_name), &isa);
  flags->toggle("--progress", "progress bar even when stderr is no terminal", &progress);
}

Failure EngineOptions::check() const {
  if (place == kCpu) {
    const std::string why = ": is for --device cuda alone";
    if (!backend_path.empty()) return {"--backend-path" + why};
    if (compute != 0) return {"--compute" + why};
    if (eager) return {"--eager" + why};
    if (weights_place != kOnDevice) return {"--weights" + why};
    if (kv_place != kOnDevice) return {"--kv: \"host\" is for --device cuda alone (on the CPU K and V always are)"};
  }
  if (resident_share > 0 && weights_place == kOnDevice) return {"--resident-share: is for --weights host alone"};
  return {};
}

Failure EngineOptions::check_machine() const {
  if (place != kCpu) GENERATE_TRY(check_cuda_built());
  if (isa.empty() || tandem_cpu_isa_available(isa.c_str())) return {};
  return {"--isa: this processor does not have \"" + isa + "\""};
}

void PolicyOptions::declare(Flags* flags) {
  flags->integer("--window",
                 "newest tokens, always attended (default: the library's, and with --device cuda under hip and patterns\n"
                 "as many as the model was made for; under hip at least as many)",
                 0, kMaxTokens, &window_tokens);
  flags->integer("--sinks", "first tokens, always attended (default: the library's)", 0, kMaxTokens, &sink_tokens);
  flags->real("--alpha", "hgca: factor of the moving average of attention weights, MAW", 1e-6, 1, &alpha);
  flags->real("--beta", "hgca: keep a key when its MAW > beta / tokens", 0, 1e6, &beta);
  flags->integer("--halo", "hgca: keys kept after a strongly attended one (default: the library's)", 0, kMaxTokens,
                 &halo_tokens);
  flags->text("--pruning", "PRUNING",
              "hip: what it prunes, a preset (small, the default, 3k, 3k-fast, 3k-flash, 5k, 3k-5k, 16k-shallow)\n"
              "or SINKS/WINDOW/STAGE..., each stage JUDGE:CHUNK:KEEP:INTERVAL with descent, bounds or exact as judge,\n"
              "+next behind the last; with dense+ before it appends are not pruned: "
              "dense+64/1024/bounds:64:16384:16/exact:8:2048:4+next",
              &pruning);
  flags->text("--patterns", "FILE",
              "patterns: a file of head patterns, as MInference publishes them, or of gates, as DuoAttention does;\n"
              "tandem patterns show FILE says what is in it",
              &patterns);
  flags->integer("--max-distance",
                 "patterns: keys further from a query are attended as at this distance, for texts longer than the model\n"
                 "was made for; with --rope library, and heads that attend sinks and a window alone (default 0: no limit)",
                 0, kMaxTokens, &max_distance);
}

void PolicyOptions::set(const std::string& name) {
  const size_t end = std::min(name.find('='), name.size());
  policy = name.substr(0, end);
  if (end < name.size()) pruning = name.substr(end + 1);
}

Failure PolicyOptions::check(const char* flag) const {
  const std::vector<std::string> known = policy_names();
  if (std::find(known.begin(), known.end(), policy) == known.end()) return none_of(flag, policy, known);
  if (policy == "patterns" && patterns.empty()) return {"--patterns: policy \"patterns\" needs a file"};
  Pruning parsed;
  return parsed.parse(pruning, "--pruning");
}

Failure check_policy_flags(const Flags& flags, const std::vector<std::string>& policies, bool on_device) {
  const auto has = [&](const char* name) { return std::find(policies.begin(), policies.end(), name) != policies.end(); };
  if (!has("hip")) GENERATE_TRY(flags.refuse_given({"--pruning"}, "is for --policy hip alone"));
  if (!has("patterns")) GENERATE_TRY(flags.refuse_given({"--patterns", "--max-distance"}, "is for --policy patterns alone"));
  if (has("hgca")) return {};
  GENERATE_TRY(flags.refuse_given({"--alpha", "--beta", "--halo"}, "is for --policy hgca alone"));
  if (has("streaming")) return {};
  GENERATE_TRY(flags.refuse_given({"--sinks"}, "is for --policy streaming and hgca alone"));
  if (on_device) return {};
  return flags.refuse_given({"--window"}, "is for --policy streaming and hgca, and for --device cuda");
}

// Under patterns, a prompt brings the keys that its window lacks to the device, unless the library rotates keys.
bool has_all_keys(const EngineOptions& engine, const PolicyOptions& policy) {
  const bool is_window_given = policy.window_tokens >= 0 || engine.kv_place == kOnHost;
  return policy.policy == "hip" || (policy.policy == "patterns" && (!is_window_given || engine.rope != 0));
}

int64_t window_of(const EngineOptions& engine, const PolicyOptions& policy, int64_t longest) {
  const bool has_all = engine.place == kCuda && has_all_keys(engine, policy) && longest > 0;
  return has_all ? std::max(policy.window_tokens, longest) : policy.window_tokens;
}

Failure Runtime::open(const EngineOptions& options) {
  options_ = options;
  ModelConfig config;
  if (options.shapes.empty()) {
    GENERATE_TRY(read_model_config(&config, options.model_directory));
    GENERATE_TRY(check_vocabulary(config, options.model_directory));
  } else {
    GENERATE_TRY(as_usage(find_model_shapes(&config, options.shapes)));
  }
  // This order reports errors in the model's files before errors of the device.
  if (options.place == kCpu) GENERATE_TRY(open_transformer(config));
  GENERATE_TRY(open_engine());
  if (options.place != kCpu) GENERATE_TRY(open_transformer(config));

  GENERATE_TRY(open_model(config));
  cache_options_.k_type = options.k_type;
  cache_options_.v_type = options.v_type;
  cache_options_.k_rotation = options.k_rotation;
  if (options.keeps_hidden) cache_options_.x_type = options.x_type != 0 ? options.x_type : transformer_->hidden_type();
  tandem_cache* cache = nullptr;
  GENERATE_TANDEM(tandem_cache_create(&cache, engine_.get(), model_.get(), &cache_options_, &error));
  cache_.reset(cache);
  return {};
}

// Tandem copies the projections, except matrices that are on the device and stay there.
Failure Runtime::open_model(const ModelConfig& config) {
  std::vector<tandem_layer_options> layers(config.n_layers, layer_options(config, options_.rope == 1));
  std::vector<LayerProjection> projections(options_.keeps_hidden ? config.n_layers : 0);
  for (size_t i = 0; i < projections.size(); ++i) {
    GENERATE_TRY(transformer_->projection(static_cast<int64_t>(i), &projections[i]));
    layers[i].projection = &projections[i].options;
  }
  tandem_model* model = nullptr;
  GENERATE_TANDEM(tandem_model_create(&model, layers.data(), static_cast<int32_t>(layers.size()), &error));
  model_.reset(model);
  return {};
}

Failure Runtime::open_engine() {
  tandem_engine_options engine_options = TANDEM_ENGINE_OPTIONS_INIT;
  engine_options.n_threads = static_cast<int32_t>(options_.n_threads);
  engine_options.cpu_isa = options_.isa.empty() ? nullptr : options_.isa.c_str();
  if (options_.place == kCuda) engine_options.backend = "cuda";
  if (!options_.backend_path.empty()) engine_options.backend_path = options_.backend_path.c_str();
  tandem_engine* engine = nullptr;
  tandem_error* error = nullptr;
  const int32_t status = tandem_engine_create(&engine, &engine_options, &error);
  Failure failure = from_tandem(status, error);
  if (failure && options_.place == kCuda) failure.message = "--device: \"cuda\": " + failure.message;
  engine_.reset(engine);
  return failure;
}

Failure Runtime::open_transformer(const ModelConfig& config) {
  WeightFiles weights;
  if (options_.shapes.empty()) GENERATE_TRY(weights.open_directory(options_.model_directory));
  if (options_.place == kCpu) {
    const int32_t n_threads = options_.n_threads ? static_cast<int32_t>(options_.n_threads) : omp_get_num_procs();
    auto transformer = std::make_unique<CpuTransformer>(config, options_.rope == 1, n_threads);
    GENERATE_TRY(transformer->load(weights));
    transformer_ = std::move(transformer);
    return {};
  }
  CudaOptions cuda;
  const bool is_bf16 = options_.compute != 0 ? options_.compute == 2 : !options_.shapes.empty();
  cuda.dtype = is_bf16 ? TANDEM_BF16 : TANDEM_F32;
  cuda.chunk_tokens = options_.chunk_tokens;
  cuda.library_rope = options_.rope == 1;
  cuda.eager = options_.eager;
  cuda.engine = options_.weights_place == kOnHost ? engine_.get() : nullptr;
  cuda.resident_share = options_.resident_share;
  cuda.by_calls = options_.kv_place == kOnHost;
  cuda.keeps_hidden = options_.keeps_hidden;
  cuda.weights = options_.shapes.empty() ? &weights : nullptr;
  cuda.seed = static_cast<uint64_t>(options_.seed);
  return make_cuda_transformer(config, cuda, &transformer_);
}

// Files of gates have one per KV head, so the group size is needed. Patterns are per query head.
Failure Runtime::read_patterns(const std::string& file, OptionsOfSession* options) const {
  tandem_pattern_file_options how = TANDEM_PATTERN_FILE_OPTIONS_INIT;
  how.group_size = config().n_q_heads / config().n_kv_heads;
  std::vector<tandem_head_pattern>& heads = options->heads;
  int64_t n_heads = 0, n_layers = 0;
  do {
    heads.assign(static_cast<size_t>(n_heads), tandem_head_pattern(TANDEM_HEAD_PATTERN_INIT));
    GENERATE_TANDEM(tandem_patterns_read(heads.data(), std::ssize(heads), &n_heads, &n_layers, file.c_str(), &how, &error));
  } while (n_heads > std::ssize(heads));
  options->patterns.heads = heads.data();
  options->patterns.n_heads = n_heads;
  options->made.patterns = &options->patterns;
  return {};
}

Failure Runtime::make_options(const PolicyOptions& policy, OptionsOfSession* of) const {
  tandem_session_options& options = of->made;
  GENERATE_TRY(of->parsed.parse(policy.pruning, "--pruning"));
  of->pruning = of->parsed.get();
  options.policy = policy.policy.c_str();
  options.window_tokens = window_of(options_, policy, config().max_tokens);
  options.sink_tokens = policy.sink_tokens;
  options.alpha = static_cast<float>(policy.alpha);
  options.beta = static_cast<float>(policy.beta);
  options.halo_tokens = policy.halo_tokens;
  if (policy.policy == "hip") options.pruning = &of->pruning;
  if (policy.policy == "patterns") GENERATE_TRY(read_patterns(policy.patterns, of));
  of->patterns.max_distance = policy.max_distance;
  if (options_.kv_place != kOnHost) return {};
  const RouteOptions& routes = policy.routes;
  if (!routes.route.empty()) options.route = routes.route.c_str();
  options.stream_fraction = routes.stream_share;
  options.recompute_share = routes.recompute_share;
  options.stream_buffer_bytes = routes.buffer_bytes;
  options.append_tokens = options_.chunk_tokens;
  return {};
}

Failure Runtime::new_session(const PolicyOptions& policy, Session* session) {
  OptionsOfSession options;
  GENERATE_TRY(make_options(policy, &options));
  tandem_session* created = nullptr;
  GENERATE_TANDEM(tandem_session_create(&created, cache_.get(), &options.made, &error));
  session->reset(created);
  transformer_->meet(created);
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

Failure check_interrupted() {
  if (!is_interrupted()) return {};
  Failure failure{"interrupted"};
  failure.is_interruption = true;
  return failure;
}

Failure Runtime::append(Context* context, std::string_view text, const AppendOptions& options) {
  const int64_t n_tokens = static_cast<int64_t>(text.size());
  ProgressBar bar(options.label, n_tokens, "tokens", options_.progress);
  tokens_.assign(reinterpret_cast<const uint8_t*>(text.data()), reinterpret_cast<const uint8_t*>(text.data()) + n_tokens);
  for (int64_t first = 0; first < n_tokens; first += options_.chunk_tokens) {
    GENERATE_TRY(check_interrupted());
    Chunk chunk;
    chunk.session = context->session;
    chunk.sequence = context->sequence;
    chunk.position = context->n_tokens;
    const int64_t n = std::min(options_.chunk_tokens, n_tokens - first);
    chunk.tokens = std::span(tokens_).subspan(first, n);
    if (first + n < n_tokens || options.more_follows) chunk.flags = TANDEM_ATTEND_PARTIAL;
    GENERATE_TRY(transformer_->forward(chunk));
    context->n_tokens += n;
    last_chunk_tokens_ = n;
    if (options.on_chunk) options.on_chunk(first, n);
    bar.show(first + n);
  }
  transformer_->rest();
  return {};
}

Failure Runtime::step(Context* context, int32_t token) {
  GENERATE_TRY(check_interrupted());
  Chunk chunk;
  chunk.session = context->session;
  chunk.sequence = context->sequence;
  chunk.position = context->n_tokens;
  chunk.tokens = std::span(&token, 1);
  GENERATE_TRY(transformer_->forward(chunk));
  ++context->n_tokens;
  last_chunk_tokens_ = 1;
  return {};
}

Failure Runtime::fill(Context* context, int64_t n_tokens) {
  constexpr int64_t kPiece = 4096;
  const int64_t n_heads = config().n_kv_heads, head_dim = config().head_dim, row_size = n_heads * head_dim;
  std::mt19937_64 random(static_cast<uint64_t>(options_.seed));
  std::normal_distribution<float> normal;
  std::vector<uint16_t> rows(2 * std::min(kPiece, n_tokens) * row_size);  // bf16
  std::vector<uint16_t> hidden(options_.keeps_hidden ? std::min(kPiece, n_tokens) * config().hidden_size : 0);
  for (std::vector<uint16_t>* numbers : {&rows, &hidden})
    for (uint16_t& x : *numbers) x = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
  GENERATE_TANDEM(tandem_sequence_reserve(cache_.get(), context->sequence, n_tokens, &error));
  ProgressBar bar("fill", config().n_layers * n_tokens, "rows");
  for (int64_t layer_idx = 0; layer_idx < config().n_layers; ++layer_idx) {
    for (int64_t first = 0; first < n_tokens; first += kPiece) {
      GENERATE_TRY(check_interrupted());
      bar.show(layer_idx * n_tokens + first);
      const int64_t n = std::min(kPiece, n_tokens - first);
      const tandem_tensor k = heads_view(rows.data(), TANDEM_BF16, n, n_heads, head_dim, row_size);
      const tandem_tensor v = heads_view(rows.data() + n * row_size, TANDEM_BF16, n, n_heads, head_dim, row_size);
      const auto layer = static_cast<int32_t>(layer_idx);
      const tandem_tensor x = rows_view(hidden.data(), TANDEM_BF16, n, config().hidden_size);
      if (options_.keeps_hidden) {
        GENERATE_TANDEM(tandem_sequence_append_x(cache_.get(), context->sequence, layer, &k, &v, &x, nullptr, &error));
      } else {
        GENERATE_TANDEM(tandem_sequence_append(cache_.get(), context->sequence, layer, &k, &v, nullptr, &error));
      }
    }
  }
  context->n_tokens += n_tokens;
  return {};
}

Failure Runtime::take_back(Context* context, int64_t n_tokens) {
  GENERATE_TANDEM(tandem_sequence_truncate(cache_.get(), context->sequence, context->n_tokens - n_tokens, &error));
  context->n_tokens -= n_tokens;
  return {};
}

Failure Runtime::device_memory(const PolicyOptions& policy, int64_t n_tokens, DeviceMemoryReport* report) {
  report->use = transformer_->device_use();
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  OptionsOfSession session;
  GENERATE_TRY(make_options(policy, &session));
  GENERATE_TANDEM(
      tandem_plan_memory(&plan, engine_.get(), model_.get(), &cache_options_, &session.made, &n_tokens, 1, &error));
  report->planned = {plan.device_window_bytes, plan.device_work_bytes, plan.device_stream_bytes, plan.device_weights_bytes};
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  GENERATE_TANDEM(tandem_cache_get_stats(&stats, cache_.get(), &error));
  report->page_table_bytes = stats.pinned_bytes / 4096 * 8;
  report->held = {stats.device_window_bytes, stats.device_work_bytes, stats.device_stream_bytes, stats.device_weights_bytes};
  return {};
}

Failure Runtime::plan_layer(const Context& context, int64_t n_tokens, int64_t n_queries, tandem_route_plan* plan) {
  *plan = TANDEM_ROUTE_PLAN_INIT;
  GENERATE_TANDEM(tandem_plan(plan, context.session, 0, &n_tokens, &n_queries, 1, &error));
  return {};
}

Failure session_stats(const tandem_session* session, tandem_session_stats* stats) {
  *stats = TANDEM_SESSION_STATS_INIT;
  GENERATE_TANDEM(tandem_session_get_stats(stats, session, &error));
  return {};
}

}  // namespace generate
