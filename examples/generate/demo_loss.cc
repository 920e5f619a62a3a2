// SPDX-License-Identifier: MIT
// --loss: measures the cost of each pair of storage types for K and V. The same text goes through the model once with f16,
// whose predictions are kept, and once with every pair, or with the requested one. Measured over the second half of the text
// are the mean divergence from the f16 predictions (Kullback-Leibler, in bits) and bits per byte. First K is not rotated.
// Then some pairs run again with K rotated: by default those of 4-bit keys, with --k-rotation hadamard all, with none no
// pair.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "demo.h"
#include "sampler.h"
#include "text_file.h"

namespace generate {
namespace {

struct Storage {
  int32_t k = 0, v = 0, k_rotation = TANDEM_ROTATION_NONE;
};

const char* rotation_name(int32_t k_rotation) { return k_rotation == TANDEM_ROTATION_HADAMARD ? "hadamard" : "none"; }

struct Loss {
  Storage storage;
  int64_t token_bytes = 0;  // K and V of one token, all layers
  double divergence = 0, worst_divergence = 0, bits_per_byte = 0;
};

// Computes log2 of the probabilities of one prediction.
void log_probabilities(const float* logits, int64_t n, double* out) {
  const double max = *std::max_element(logits, logits + n);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(logits[i] - max);
  for (int64_t i = 0; i < n; ++i) out[i] = (logits[i] - max - std::log(sum)) / std::log(2.0);
}

// Predictions of the second half of a text, as log2 probabilities: [n / 2, vocab_size].
struct Predictions {
  std::vector<double> log_p;
  double bits = 0;
};

Failure predict(const DemoOptions& options, const Storage& storage, std::string_view text, Predictions* predictions,
                int64_t* token_bytes) {
  EngineOptions engine = options.engine;
  engine.k_type = storage.k;
  engine.v_type = storage.v;
  engine.k_rotation = storage.k_rotation;
  Runtime runtime;
  GENERATE_TRY(runtime.open(engine));
  Session session;
  Context context;
  GENERATE_TRY(runtime.new_session({}, &session));
  context.session = session.get();
  GENERATE_TRY(runtime.new_sequence(&context.sequence));
  const ModelConfig& config = runtime.config();
  const int64_t n_context = static_cast<int64_t>(text.size()) - 1, first_scored = n_context / 2;
  const int64_t vocab_size = config.vocab_size;
  predictions->log_p.resize(static_cast<size_t>((n_context - first_scored) * vocab_size));
  AppendOptions append;
  append.label = "score";
  append.on_chunk = [&](int64_t first, int64_t n) {
    for (int64_t i = std::max(first, first_scored); i < first + n; ++i) {
      double* log_p = predictions->log_p.data() + (i - first_scored) * vocab_size;
      log_probabilities(runtime.logits(i - first, 1), vocab_size, log_p);
      predictions->bits -= log_p[static_cast<uint8_t>(text[i + 1])];
    }
  };
  GENERATE_TRY(runtime.append(&context, text.substr(0, n_context), append));
  const auto head_dim = static_cast<int32_t>(config.head_dim);
  *token_bytes = config.n_layers * config.n_kv_heads *
                 (tandem_dtype_row_bytes(storage.k, head_dim) + tandem_dtype_row_bytes(storage.v, head_dim));
  return check_bits(runtime, context, predictions->bits);
}

void compare(const Predictions& predictions, const Predictions& exact, std::string_view text, Loss* loss) {
  const auto n_scored = static_cast<int64_t>(text.size() - 1) - static_cast<int64_t>(text.size() - 1) / 2;
  const int64_t vocab_size = static_cast<int64_t>(exact.log_p.size()) / n_scored;
  for (int64_t i = 0; i < n_scored; ++i) {
    double divergence = 0;
    for (int64_t j = i * vocab_size; j < (i + 1) * vocab_size; ++j)
      divergence += std::exp2(exact.log_p[j]) * (exact.log_p[j] - predictions.log_p[j]);
    loss->divergence += divergence / static_cast<double>(n_scored);
    loss->worst_divergence = std::max(loss->worst_divergence, divergence);
  }
  loss->bits_per_byte = predictions.bits / static_cast<double>(n_scored);
}

void print_loss(const Loss& loss, double exact_bits) {
  std::printf("%-6s %-6s %-10s %12lld  %14.6f  %15.6f %14.5f %+12.3f %%\n", tandem_dtype_name(loss.storage.k),
              tandem_dtype_name(loss.storage.v), rotation_name(loss.storage.k_rotation),
              static_cast<long long>(loss.token_bytes), loss.divergence, loss.worst_divergence, loss.bits_per_byte,
              100 * (loss.bits_per_byte / exact_bits - 1));
  std::fflush(stdout);
}

void print_json(const std::vector<Loss>& losses) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const Loss& loss : losses)
    json.push_back({{"k_type", tandem_dtype_name(loss.storage.k)},
                    {"v_type", tandem_dtype_name(loss.storage.v)},
                    {"k_rotation", rotation_name(loss.storage.k_rotation)},
                    {"kv_token_bytes", loss.token_bytes},
                    {"divergence_bits", loss.divergence},
                    {"worst_divergence_bits", loss.worst_divergence},
                    {"bits_per_byte", loss.bits_per_byte}});
  std::printf("%s\n", json.dump().c_str());
}

// Returns every type for both K and V, and pairs whose keys are stored more, or less, exactly than values.
std::vector<Storage> every_pair() {
  std::vector<Storage> pairs;
  for (int32_t type = 1; tandem_dtype_name(type) != nullptr; ++type)
    if (type != TANDEM_F16 && type != TANDEM_Q4_64) pairs.push_back({type, type});
  pairs.push_back({TANDEM_F16, TANDEM_Q8_0});
  pairs.push_back({TANDEM_Q8_0, TANDEM_F16});
  pairs.push_back({TANDEM_Q8_0, TANDEM_Q4_0});
  pairs.push_back({TANDEM_Q4_0, TANDEM_Q8_0});
  return pairs;
}

bool is_tried_rotated(const Storage& storage, const EngineOptions& engine) {
  const bool is_default = engine.k_rotation == TANDEM_ROTATION_DEFAULT && storage.k == TANDEM_Q4_0 && engine.rope == 0;
  return engine.k_rotation == TANDEM_ROTATION_HADAMARD || is_default;
}

// Returns all pairs, or the requested one, followed by those to run again with K rotated.
std::vector<Storage> storages_to_try(const DemoOptions& options) {
  const EngineOptions& engine = options.engine;
  std::vector<Storage> pairs = every_pair();
  if (options.one_pair) pairs = {{engine.k_type, engine.v_type == 0 ? engine.k_type : engine.v_type}};
  const size_t n_pairs = pairs.size();
  for (size_t i = 0; i < n_pairs; ++i)
    if (is_tried_rotated(pairs[i], engine)) pairs.push_back({pairs[i].k, pairs[i].v, TANDEM_ROTATION_HADAMARD});
  return pairs;
}

}  // namespace

Failure run_loss(const DemoOptions& options) {
  std::string file;
  GENERATE_TRY(read_text_file(options.loss_file, &file));
  std::string_view text;
  GENERATE_TRY(slice_text(file, options.loss_file, options, &text));
  Predictions exact;
  std::vector<Loss> losses(1);
  losses[0].storage = {TANDEM_F16, TANDEM_F16};
  GENERATE_TRY(predict(options, losses[0].storage, text, &exact, &losses[0].token_bytes));
  compare(exact, exact, text, &losses[0]);
  const double exact_bits = losses[0].bits_per_byte;
  if (!options.json) {
    std::printf("K      V      rotation K  bytes/token  KL from f16    at its largest  bits per byte   against f16\n");
    print_loss(losses[0], exact_bits);
  }
  for (const Storage& storage : storages_to_try(options)) {
    Predictions predictions;
    Loss& loss = losses.emplace_back();
    loss.storage = storage;
    GENERATE_TRY(predict(options, storage, text, &predictions, &loss.token_bytes));
    compare(predictions, exact, text, &loss);
    if (!options.json) print_loss(losses.back(), exact_bits);
  }
  if (options.json) print_json(losses);
  return {};
}

}  // namespace generate
