// SPDX-License-Identifier: MIT
// tandem-generate: continues or scores a text with a Llama-family model and Tandem's attention.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>

#include "generation.h"
#include "interrupt.h"
#include "llama_config.h"
#include "model_shapes.h"
#include "program.h"
#include "shapes_run.h"
#include "text_file.h"

namespace generate {
namespace {

struct Request {
  EngineOptions engine;
  PolicyOptions policy;
  SamplingOptions sampling;
  std::string prompt, prompt_file, score_file;
  int64_t score_offset = 0, score_context = 0, decode_last = 0, n_prefill = 0;
  bool json = false;
};

Failure check_shapes(const Request& request) {
  if (request.engine.place == kCpu) return {"--shapes: needs --device cuda"};
  if (request.score_context == 0) return {"--context: is missing, --shapes needs it"};
  if (request.n_prefill > request.score_context)
    return {"--prefill: \"" + std::to_string(request.n_prefill) +
            "\" is above --context = " + std::to_string(request.score_context)};
  if (!request.prompt.empty() || !request.prompt_file.empty() || !request.score_file.empty())
    return {"--shapes: has nothing to do with --prompt, --prompt-file and --score"};
  if (!request.engine.model_directory.empty()) return {"--shapes, --model: one of the two"};
  GENERATE_TRY(request.policy.check());
  return request.engine.check();
}

Failure check(const Request& request) {
  if (!request.engine.shapes.empty()) return check_shapes(request);
  const int n_inputs = !request.prompt.empty() + !request.prompt_file.empty() + !request.score_file.empty();
  if (request.engine.model_directory.empty()) return {"--model is missing (--help lists the flags)"};
  if (n_inputs != 1)
    return {"--prompt, --prompt-file, --score: one of the three is needed, " + std::to_string(n_inputs) + " given"};
  if (!request.score_file.empty() && request.score_context == 0) return {"--context: is missing, --score needs it"};
  if (request.score_file.empty() && (request.score_context || request.score_offset || request.decode_last))
    return {"--context, --offset, --decode-last: are for --score (and --context for --shapes)"};
  if (request.decode_last >= std::max<int64_t>(request.score_context, 1))
    return {"--decode-last: \"" + std::to_string(request.decode_last) +
            "\" is not below --context = " + std::to_string(request.score_context)};
  if (request.policy.max_distance > 0 && request.engine.rope == 0)
    return {"--max-distance: is for --rope library alone (keys that are rotated here carry their position)"};
  GENERATE_TRY(request.policy.check());
  return request.engine.check();
}

// Returns text[offset, offset + context], one byte more than the context, for the last prediction.
Failure score_slice(const Request& request, const std::string& text, std::string_view* slice) {
  const int64_t size = static_cast<int64_t>(text.size());
  if (request.score_offset >= size || request.score_context + 1 > size - request.score_offset)
    return {request.score_file + ": has " + std::to_string(size) + " bytes, --offset " +
            std::to_string(request.score_offset) + " with --context " + std::to_string(request.score_context) + " needs " +
            std::to_string(request.score_offset + request.score_context + 1)};
  *slice = std::string_view(text).substr(request.score_offset, request.score_context + 1);
  return {};
}

// Under --max-distance, distances are those of a text of max_distance + 1 tokens at most.
Failure check_tokens(const Request& request, const std::string& text) {
  const std::string& directory = request.engine.model_directory;
  const int64_t most = request.policy.max_distance > 0 ? request.policy.max_distance + 1 : INT64_MAX;
  if (!request.score_file.empty())
    return check_length(directory, "--context: \"" + std::to_string(request.score_context) + "\"",
                        std::min(request.score_context, most));
  const int64_t n_prompt = static_cast<int64_t>(text.size()), n_predict = request.sampling.n_predict;
  return check_length(
      directory,
      "--n-predict: \"" + std::to_string(n_predict) + "\" after a prompt of " + std::to_string(n_prompt) + " tokens",
      std::min(n_prompt + n_predict, most));
}

using Json = nlohmann::ordered_json;

void add_device(const DeviceMemoryReport& device, Json* json) {
  if (!device.use.is_used) return;
  (*json)["device"] = {{"steps_replayed", device.use.n_replayed},
                       {"steps_launched", device.use.n_launched},
                       {"runtime_bytes", device.use.runtime_bytes},
                       {"measured_loaded_bytes", device.use.loaded_bytes},
                       {"measured_bytes", device.use.now_bytes},
                       {"planned_window_bytes", device.planned.window_bytes},
                       {"planned_work_bytes", device.planned.work_bytes},
                       {"window_bytes", device.held.window_bytes},
                       {"work_bytes", device.held.work_bytes}};
  if (device.planned.stream_bytes > 0) {
    (*json)["device"]["planned_stream_bytes"] = device.planned.stream_bytes;
    (*json)["device"]["stream_bytes"] = device.held.stream_bytes;
    (*json)["device"]["planned_projection_bytes"] = device.planned.weights_bytes;
    (*json)["device"]["projection_bytes"] = device.held.weights_bytes;
  }
  const tandem_weights_stats& weights = device.use.weights;
  if (weights.n_blocks == 0) return;
  (*json)["device"]["weights"] = {{"blocks", weights.n_blocks},
                                  {"resident_bytes", weights.resident_bytes},
                                  {"host_bytes", weights.host_bytes},
                                  {"pinned_bytes", weights.pinned_bytes},
                                  {"buffer_bytes", weights.buffer_bytes},
                                  {"streamed_bytes", weights.streamed_bytes},
                                  {"streamed_uses", weights.n_streamed_uses},
                                  {"uses_ahead", weights.n_ahead}};
}

void print_device(const DeviceMemoryReport& device) {
  if (!device.use.is_used) return;
  const auto mb = [](int64_t bytes) { return static_cast<double>(bytes) * 1e-6; };
  std::fprintf(stderr, "decode steps: %lld replayed as a graph, %lld kernel by kernel\n",
               static_cast<long long>(device.use.n_replayed), static_cast<long long>(device.use.n_launched));
  std::fprintf(stderr, "device memory: runtime %.1f MB (measured at loading: %.1f)\n", mb(device.use.runtime_bytes),
               mb(device.use.loaded_bytes));
  std::fprintf(stderr,
               "  Tandem planned %.1f MB of windows and %.1f of work space, has %.1f and %.1f (measured: %.1f more)\n",
               mb(device.planned.window_bytes), mb(device.planned.work_bytes), mb(device.held.window_bytes),
               mb(device.held.work_bytes), mb(device.use.now_bytes - device.use.loaded_bytes));
  if (device.planned.stream_bytes > 0)
    std::fprintf(stderr, "  and %.1f MB of buffers and %.1f of projections, has %.1f and %.1f\n",
                 mb(device.planned.stream_bytes), mb(device.planned.weights_bytes), mb(device.held.stream_bytes),
                 mb(device.held.weights_bytes));
  const tandem_weights_stats& weights = device.use.weights;
  if (weights.n_blocks == 0) return;
  std::fprintf(
      stderr,
      "  matrices: %.1f MB stay, %.1f on the host (%.1f pinned) go through %.1f; %.1f have crossed the bus, %lld of %lld\n"
      "  blocks ahead of their use\n",
      mb(weights.resident_bytes), mb(weights.host_bytes), mb(weights.pinned_bytes), mb(weights.buffer_bytes),
      mb(weights.streamed_bytes), static_cast<long long>(weights.n_ahead), static_cast<long long>(weights.n_streamed_uses));
}

// is_part: the numbers cover only the work done until Ctrl-C.
void print_json(const Request& request, const Outcome& outcome, const DeviceMemoryReport& device, bool is_part) {
  Json json;
  if (is_part) json["interrupted"] = true;
  if (request.score_file.empty()) json["answer"] = outcome.answer;
  if (outcome.bits_per_byte >= 0) json["bits_per_byte"] = outcome.bits_per_byte;
  if (outcome.bits_per_byte >= 0) json["scored_bytes"] = outcome.n_scored;
  json["policy"] = request.policy.policy;
  json["prefill_tokens"] = outcome.prefill.n_tokens;
  json["prefill_tokens_per_second"] = outcome.prefill.tokens_per_second();
  json["decode_tokens"] = outcome.decode.n_tokens;
  if (outcome.decode.n_tokens > 0) {
    const double n = static_cast<double>(outcome.decode.n_tokens);
    json["decode_tokens_per_second"] = outcome.decode.tokens_per_second();
    json["kv_bytes_per_token"] = outcome.decode.bytes_per_token();
    json["resident_kv_bytes_per_token"] = static_cast<double>(outcome.decode.resident_bytes) / n;
    json["host_kv_bytes_per_token"] = static_cast<double>(outcome.decode.host_bytes) / n;
    json["dense_kv_bytes_per_token"] = outcome.decode.dense_bytes_per_token();
    json["kv_read_share"] = outcome.decode.share();
  }
  if (outcome.selected_share >= 0) json["selected_share"] = outcome.selected_share;
  if (outcome.pair_share >= 0) json["pair_share"] = outcome.pair_share;
  add_device(device, &json);
  // A byte model's answer may be invalid UTF-8. Invalid bytes become U+FFFD.
  std::printf("%s\n", json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

void print_text(const Request& request, const Outcome& outcome, bool is_part) {
  if (request.score_file.empty() && !outcome.answer.empty()) std::printf("\n");
  if (outcome.bits_per_byte >= 0) std::printf("bits per byte %.5f\n", outcome.bits_per_byte);
  std::fflush(stdout);
  if (is_part && outcome.n_scored > 0)
    std::fprintf(stderr, "of %lld bytes only\n", static_cast<long long>(outcome.n_scored));
  std::fprintf(stderr, "prefill %lld tokens, %.0f tokens/s\n", static_cast<long long>(outcome.prefill.n_tokens),
               outcome.prefill.tokens_per_second());
  if (outcome.pair_share >= 0) std::fprintf(stderr, "its heads attended %.1f %% of the pairs\n", 100 * outcome.pair_share);
  if (outcome.decode.n_tokens == 0) return;
  std::fprintf(stderr, "decode %lld tokens, %.0f tokens/s, KV read %.0f bytes per token, %.1f %% of dense\n",
               static_cast<long long>(outcome.decode.n_tokens), outcome.decode.tokens_per_second(),
               outcome.decode.bytes_per_token(), 100 * outcome.decode.share());
}

Failure serve_shapes(const Request& request) {
  const ShapesRun shapes{request.score_context, request.n_prefill, request.sampling.n_predict, request.policy.routes.route};
  PolicyOptions policy = request.policy;
  policy.window_tokens = window_of(request.engine, policy, shapes.longest());
  catch_interrupts();
  Runtime runtime;
  GENERATE_TRY(runtime.open(request.engine));
  Session session;
  GENERATE_TRY(runtime.new_session(policy, &session));
  Context context{session.get()};
  GENERATE_TRY(runtime.new_sequence(&context.sequence));
  ShapesOutcome outcome;
  DeviceMemoryReport device;
  GENERATE_TRY(run_shapes(&runtime, &context, shapes, &outcome));
  GENERATE_TRY(runtime.device_memory(policy, context.n_tokens, &device));
  if (request.json) {
    Json json = {{"shapes", request.engine.shapes},           {"policy", request.policy.policy},
                 {"context_tokens", request.score_context},   {"steps", request.sampling.n_predict},
                 {"step_ms_median", outcome.median_ms},       {"step_ms_most", outcome.most_ms},
                 {"step_ms_mean", outcome.mean_ms},           {"decode_tokens_per_second", outcome.tokens_per_second},
                 {"replay_distance", outcome.replay_distance}};
    if (!request.policy.routes.route.empty()) json["route"] = request.policy.routes.route;
    if (request.n_prefill > 0) {
      json["prefill_tokens"] = request.n_prefill;
      json["prefill_tokens_per_second"] = outcome.prefill_tokens_per_second;
    }
    add_device(device, &json);
    std::printf("%s\n", json.dump().c_str());
    return {};
  }
  std::printf("%s, random weights, context of %lld random keys and values (nothing computed them), policy %s:\n",
              request.engine.shapes.c_str(), static_cast<long long>(request.score_context), request.policy.policy.c_str());
  std::printf("%.3f ms per step (median of %lld; most %.3f, mean %.3f), %.1f tokens/s; replay against launches: %.1e\n",
              outcome.median_ms, static_cast<long long>(request.sampling.n_predict), outcome.most_ms, outcome.mean_ms,
              outcome.tokens_per_second, outcome.replay_distance);
  if (request.n_prefill > 0)
    std::printf("prefill of the last %lld of these tokens: %.1f tokens/s\n", static_cast<long long>(request.n_prefill),
                outcome.prefill_tokens_per_second);
  std::fflush(stdout);
  print_device(device);
  return {};
}

Failure serve(Request* request) {
  GENERATE_TRY(as_usage(check(*request)));
  GENERATE_TRY(request->engine.check_machine());
  if (!request->engine.shapes.empty()) return serve_shapes(*request);
  std::string text = request->prompt;
  if (!request->prompt_file.empty()) GENERATE_TRY(read_text_file(request->prompt_file, &text));
  if (!request->score_file.empty()) GENERATE_TRY(read_text_file(request->score_file, &text));
  if (text.empty()) return {request->prompt_file + request->score_file + ": is empty"};
  std::string_view slice;
  if (!request->score_file.empty()) GENERATE_TRY(score_slice(*request, text, &slice));
  GENERATE_TRY(check_tokens(*request, text));

  catch_interrupts();
  Runtime runtime;
  GENERATE_TRY(runtime.open(request->engine));
  Session session;
  GENERATE_TRY(runtime.new_session(request->policy, &session));
  Context context{session.get()};
  GENERATE_TRY(runtime.new_sequence(&context.sequence));

  Outcome outcome;
  Failure stopped;
  if (request->score_file.empty()) {
    if (request->json) {
      request->sampling.label = "decode";
    } else {
      request->sampling.on_token = [](char token) -> Failure {
        std::putchar(static_cast<unsigned char>(token));
        return std::fflush(stdout) == 0 ? Failure{} : Failure{"stdout: cannot be written"};
      };
    }
    stopped = generate_text(&runtime, &context, text, request->sampling, &outcome);
  } else if (request->decode_last > 0) {
    stopped = score_decode(&runtime, &context, slice, request->decode_last, &outcome);
  } else {
    stopped = score_text(&runtime, &context, slice, &outcome);
  }
  if (stopped.is_error()) return stopped;
  DeviceMemoryReport device;
  GENERATE_TRY(runtime.device_memory(request->policy, context.n_tokens, &device));
  if (request->json) {
    print_json(*request, outcome, device, static_cast<bool>(stopped));
  } else {
    print_text(*request, outcome, static_cast<bool>(stopped));
    print_device(device);
  }
  return stopped;
}

// Refuses flags that would have no effect.
Failure check_flags(const Flags& flags, const Request& request) {
  const bool scores_alone = !request.score_file.empty() && request.prompt.empty() && request.prompt_file.empty();
  if (scores_alone) GENERATE_TRY(flags.refuse_given({"--n-predict", "--temperature", "--seed"}, "is unused with --score"));
  if (request.engine.shapes.empty()) {
    GENERATE_TRY(flags.refuse_given({"--tokens", "--prefill"}, "is for --shapes alone"));
    if (request.sampling.temperature == 0)
      GENERATE_TRY(flags.refuse_given({"--seed"}, "is unused with --temperature 0: the most likely token is taken"));
  } else {
    GENERATE_TRY(
        flags.refuse_given({"--n-predict", "--temperature", "--offset", "--decode-last"}, "is unused with --shapes"));
  }
  GENERATE_TRY(as_usage(request.policy.routes.check(flags, request.engine, request.policy)));
  return check_policy_flags(flags, {request.policy.policy}, request.engine.place != kCpu);
}

Failure run(int argc, char** argv) {
  constexpr int64_t kMax = int64_t{1} << 40;
  Request request;
  Flags flags(
      "tandem generate --model DIR (--prompt TEXT | --prompt-file FILE) [flags]\n"
      "tandem generate --model DIR --score FILE --context T [--offset N] [--decode-last N] [flags]\n"
      "tandem generate --device cuda --shapes NAME --context T [--tokens N] [flags]\n\n"
      "The model's tokens are bytes (examples/models/pico). For models with a tokenizer take Hugging Face Transformers\n"
      "with Tandem's Python package; python -m tandem.eval MODEL measures what a setting loses on them.");
  request.engine.declare(&flags);
  flags.text("--prompt", "TEXT", "text to continue", &request.prompt);
  flags.text("--prompt-file", "FILE", "the same from a file", &request.prompt_file);
  flags.integer("--n-predict", "tokens to predict (default 64)", 1, kMax, &request.sampling.n_predict);
  flags.integer("--tokens", "the same, with --shapes", 1, kMax, &request.sampling.n_predict);
  flags.integer("--prefill", "with --shapes: the last N tokens of --context are computed, and timed", 1, kMax,
                &request.n_prefill);
  flags.choice("--shapes", "time decode steps of random weights in the shapes of a model", model_shape_names(),
               &request.engine.shapes);
  flags.real("--temperature", "0 (default): the most likely token; above: sampling", 0, 100, &request.sampling.temperature);
  flags.integer("--seed", "of the sampling, or of random weights (default 0)", 0, INT64_MAX, &request.sampling.seed);
  flags.text("--score", "FILE", "bits per byte over the second half of --context bytes", &request.score_file);
  flags.integer("--offset", "first byte of the text to score (default 0)", 0, kMax, &request.score_offset);
  flags.integer("--context", "bytes to score over; with --shapes: tokens that are there", 2, kMax, &request.score_context);
  flags.integer("--decode-last", "instead of the second half: the last N bytes, one decode step each", 1, kMax,
                &request.decode_last);
  flags.choice("--policy", "which keys are attended (default all)", policy_names(), &request.policy.policy);
  request.policy.declare(&flags);
  request.policy.routes.declare(&flags);
  flags.toggle("--json", "one JSON object instead of text", &request.json);
  Asked asked = Asked::kNothing;
  GENERATE_TRY(flags.parse(argc, argv, &asked));
  if (asked != Asked::kNothing) {
    std::fputs(asked == Asked::kVersion ? version_text("tandem-generate").c_str() : flags.help().c_str(), stdout);
    return {};
  }
  GENERATE_TRY(check_flags(flags, request));
  request.engine.keeps_hidden = request.policy.routes.recomputes();
  request.engine.x_type = request.policy.routes.x_type;
  request.engine.seed = request.sampling.seed;
  return serve(&request);
}

}  // namespace
}  // namespace generate

int main(int argc, char** argv) { return generate::run_program("tandem-generate", argc, argv, generate::run); }
