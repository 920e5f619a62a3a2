// SPDX-License-Identifier: MIT
// A model on an engine with one cache, the base of tandem-generate and tandem-demo.
#ifndef EXAMPLES_GENERATE_RUNTIME_H_
#define EXAMPLES_GENERATE_RUNTIME_H_

#include <tandem/tandem.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "failure.h"
#include "flags.h"
#include "pruning_options.h"
#include "route_options.h"
#include "transformer.h"

namespace generate {

constexpr int32_t kCpu = 0, kCuda = 1;         // place of a model
constexpr int32_t kOnDevice = 0, kOnHost = 1;  // place of its weights, or of K and V, if it runs on a device

std::vector<std::string> policy_names();
// Returns the names of the storage types, numbered from 1.
std::vector<std::string> storage_types();
std::vector<std::string> key_types();  // types of keys and values

struct EngineOptions {
  std::string model_directory;
  std::string isa;             // empty: Tandem decides
  int64_t n_threads = 0;       // 0: Tandem decides
  int64_t chunk_tokens = 512;  // prefill goes in chunks of this many tokens
  int32_t k_type = TANDEM_BF16;
  int32_t v_type = 0;  // 0: k_type
  int32_t k_rotation = TANDEM_ROTATION_DEFAULT;
  int32_t rope = 0;  // 0: this runtime rotates, 1: Tandem rotates
  int32_t place = kCpu;
  std::string backend_path;           // path of Tandem's module; empty: Tandem searches for it
  int32_t compute = 0;                // weights and activations on a device. 1: f32, 2: bf16; 0: f32, and bf16 with shapes
  bool eager = false;                 // decode kernel by kernel, without graphs
  int32_t weights_place = kOnDevice;  // place of the layers' matrices
  double resident_share = 0;          // share of matrices on the host that stays on the device all the same
  int32_t kv_place = kOnDevice;       // kOnHost: decode in single calls, with a route for K and V outside the window
  bool keeps_hidden = false;          // the cache keeps the hidden states that K and V were made of
  int32_t x_type = 0;                 // their type; 0: 16 bits, as the products take them
  std::string shapes;                 // shapes for random weights, instead of a model
  int64_t seed = 0;                   // seed of the random weights
  bool progress = false;              // a progress bar on stderr even if it is not a terminal
  void declare(Flags* flags);
  Failure check() const;          // checks the flags together
  Failure check_machine() const;  // checks that the build and this processor support them
  // Returns the model's name for messages.
  const std::string& name() const { return shapes.empty() ? model_directory : shapes; }
};

struct PolicyOptions {
  std::string policy = "all";
  int64_t window_tokens = -1, sink_tokens = -1;  // -1: Tandem's default
  double alpha = 0, beta = -1;                   // 0, -1: Tandem's default
  int64_t halo_tokens = -1;                      // -1: Tandem's default
  std::string pruning;                           // for policy "hip" (pruning_options.h); empty: Tandem's default
  std::string patterns;                          // for policy "patterns": path of a file
  int64_t max_distance = 0;                      // for policy "patterns", of its heads
  RouteOptions routes;                           // for kv_place kOnHost
  void declare(Flags* flags);                    // declares all but the policy itself and its routes
  Failure check(const char* flag = "--policy") const;
  void set(const std::string& name);  // sets "hgca", or "hip=PRUNING"
};

// Refuses flags of policies that are not in `policies`, because no run would use them.
Failure check_policy_flags(const Flags& flags, const std::vector<std::string>& policies, bool on_device);

// Returns whether a GPU's window has all keys under the policy.
bool has_all_keys(const EngineOptions& engine, const PolicyOptions& policy);
// Returns the window of a session whose sequences have up to `longest` tokens (0: unknown). If a GPU prunes, its window must
// have all keys of a sequence, so a shorter window is lengthened.
int64_t window_of(const EngineOptions& engine, const PolicyOptions& policy, int64_t longest);

struct ReleaseTandem {
  void operator()(tandem_engine* engine) const { tandem_engine_release(engine); }
  void operator()(tandem_model* model) const { tandem_model_release(model); }
  void operator()(tandem_cache* cache) const { tandem_cache_release(cache); }
  void operator()(tandem_session* session) const { tandem_session_release(session); }
};
using Engine = std::unique_ptr<tandem_engine, ReleaseTandem>;
using Model = std::unique_ptr<tandem_model, ReleaseTandem>;
using Cache = std::unique_ptr<tandem_cache, ReleaseTandem>;
using Session = std::unique_ptr<tandem_session, ReleaseTandem>;

// A sequence, as seen by one session.
struct Context {
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  int64_t n_tokens = 0;
};

struct AppendOptions {
  std::string label;          // label of the progress bar; empty: no bar
  bool more_follows = false;  // another append continues this one, so keys are not re-evaluated at its end
  // Called after every chunk with its position in `text` and its length. logits() then gives that chunk's logits.
  std::function<void(int64_t first, int64_t n)> on_chunk;
};

struct DeviceMemoryReport {
  DeviceUse use;
  struct Parts {
    int64_t window_bytes = 0, work_bytes = 0, stream_bytes = 0, weights_bytes = 0;
    int64_t total() const { return window_bytes + work_bytes + stream_bytes + weights_bytes; }
  };
  // The driver's page tables on the device for the pinned part of Tandem's store: 8 bytes for each 4 KiB.
  int64_t page_table_bytes = 0;
  Parts planned;  // Tandem's plan for decode; with kv_place kOnHost for chunks too
  Parts held;     // memory that Tandem reports
};

// Returns a failure after Ctrl-C or SIGTERM. Every append and step calls it first.
Failure check_interrupted();

class Runtime {
 public:
  Failure open(const EngineOptions& options);

  Failure new_session(const PolicyOptions& policy, Session* session);
  Failure new_sequence(int64_t* sequence);
  Failure fork(const Context& from, tandem_session* session, Context* to);
  Failure drop(const Context& context);

  // Prefills a text chunk by chunk.
  Failure append(Context* context, std::string_view text, const AppendOptions& options = {});
  // Decodes one token.
  Failure step(Context* context, int32_t token);
  Failure step_byte(Context* context, char byte) { return step(context, static_cast<uint8_t>(byte)); }
  // Appends n_tokens keys and values to every layer without computing them: the same few thousand random rows repeated.
  Failure fill(Context* context, int64_t n_tokens);
  // Removes the last n_tokens tokens.
  Failure take_back(Context* context, int64_t n_tokens);
  // Return logits of the last chunk: of its tokens [first, first + n), or of its last token.
  const float* logits(int64_t first, int64_t n) { return transformer_->logits(first, n); }
  const float* last_logits() { return transformer_->logits(last_chunk_tokens_ - 1, 1); }
  // Returns the most likely token after the last one; -1: logits are not finite.
  int32_t most_likely() { return transformer_->most_likely(last_chunk_tokens_ - 1); }

  // Reports the device's memory, against the plan for a sequence of n_tokens.
  Failure device_memory(const PolicyOptions& policy, int64_t n_tokens, DeviceMemoryReport* report);
  // Plans the next call of a layer from Tandem's measurements: n_tokens tokens, the last n_queries of them new.
  Failure plan_layer(const Context& context, int64_t n_tokens, int64_t n_queries, tandem_route_plan* plan);
  const ModelConfig& config() const { return transformer_->config(); }
  const EngineOptions& options() const { return options_; }

 private:
  Failure open_engine();
  Failure open_transformer(const ModelConfig& config);
  Failure open_model(const ModelConfig& config);
  // Options of a session, with the structs that they point to.
  struct OptionsOfSession {
    Pruning parsed;
    tandem_pruning pruning = TANDEM_PRUNING_INIT;
    std::vector<tandem_head_pattern> heads;
    tandem_patterns patterns = TANDEM_PATTERNS_INIT;
    tandem_session_options made = TANDEM_SESSION_OPTIONS_INIT;
  };
  Failure make_options(const PolicyOptions& policy, OptionsOfSession* options) const;
  Failure read_patterns(const std::string& file, OptionsOfSession* options) const;

  EngineOptions options_;
  std::unique_ptr<Transformer> transformer_;
  // Members are released in reverse order.
  Engine engine_;
  Model model_;
  tandem_cache_options cache_options_ = TANDEM_CACHE_OPTIONS_INIT;
  Cache cache_;
  std::vector<int32_t> tokens_;  // tokens of the current text
  int64_t last_chunk_tokens_ = 0;
};

Failure session_stats(const tandem_session* session, tandem_session_stats* stats);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_RUNTIME_H_
