// SPDX-License-Identifier: MIT
// --curve: decodes the same text under every pair of window and beta, from one shared prefill (retrieval.h).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "demo.h"
#include "picture.h"
#include "text_file.h"

namespace generate {
namespace {

struct Reading {
  bool dense = false;  // a reading without window and beta
  double window_percent = 0, beta = 0;
  int64_t window_tokens = 0;
  double bits_per_byte = 0, share = 0, tokens_per_second = 0;
};

Failure read_with(const PolicyOptions& policy, const Context& prefilled, std::string_view text, int64_t n_decode,
                  Runtime* runtime, Reading* reading) {
  Contestant contestant;
  contestant.policy = policy;
  GENERATE_TRY(runtime->new_session(policy, &contestant.session));
  const int64_t n_prefill = static_cast<int64_t>(text.size()) - 1 - n_decode;
  GENERATE_TRY(enter(runtime, prefilled, text.substr(prefilled.n_tokens, n_prefill - prefilled.n_tokens), &contestant));
  GENERATE_TRY(score_known(runtime, text, n_prefill, n_decode, &contestant));
  reading->bits_per_byte = contestant.bits_per_byte();
  reading->share = contestant.decode.share();
  reading->tokens_per_second = contestant.decode.tokens_per_second();
  return runtime->drop(contestant.context);
}

void print_reading(const Reading& reading, const Reading& dense) {
  if (reading.dense)
    std::printf("dense                    ");
  else
    std::printf("%5.1f %% %8lld %8g ", reading.window_percent, static_cast<long long>(reading.window_tokens), reading.beta);
  std::printf(" %8.1f %% %14.5f %+11.2f %% %10.0f\n", 100 * reading.share, reading.bits_per_byte,
              100 * (reading.bits_per_byte / dense.bits_per_byte - 1), reading.tokens_per_second);
  std::fflush(stdout);
}

Failure draw(const DemoOptions& options, const std::vector<Reading>& readings) {
  if (!draws_pictures(options)) return {};
  CurvePicture picture;
  const size_t slash = options.curve_file.rfind('/');
  picture.subtitle = options.curve_file.substr(slash == std::string::npos ? 0 : slash + 1) + ", context " +
                     std::to_string(options.context) + ", the last " + std::to_string(options.n_decode) +
                     " bytes decoded, hgca with " + std::to_string(options.policy.sink_tokens) + " sinks";
  picture.dense_bits_per_byte = readings[0].bits_per_byte;
  for (size_t i = 1; i < readings.size(); ++i)
    picture.points.push_back({readings[i].window_percent, readings[i].beta, readings[i].share, readings[i].bits_per_byte});
  std::string path;
  GENERATE_TRY(picture_path(options, "curve.png", &path));
  GENERATE_TRY(draw_curve(picture, path));
  if (!options.json) std::printf("\nThe curve: %s\n", path.c_str());
  return {};
}

void print_json(const std::vector<Reading>& readings) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const Reading& reading : readings)
    json.push_back({{"policy", reading.dense ? "all" : "hgca"},
                    {"window_tokens", reading.window_tokens},
                    {"beta", reading.beta},
                    {"bits_per_byte", reading.bits_per_byte},
                    {"kv_read_share", reading.share},
                    {"decode_tokens_per_second", reading.tokens_per_second}});
  std::printf("%s\n", json.dump().c_str());
}

}  // namespace

Failure slice_text(const std::string& file, const std::string& name, const DemoOptions& options, std::string_view* text) {
  if (options.text_offset + options.context + 1 > static_cast<int64_t>(file.size()))
    return {name + ": has " + std::to_string(file.size()) + " bytes, --offset " + std::to_string(options.text_offset) +
            " with --context " + std::to_string(options.context) + " needs more"};
  *text = std::string_view(file).substr(options.text_offset, options.context + 1);
  return {};
}

Failure run_curve(const DemoOptions& options, Runtime* runtime) {
  std::string file;
  GENERATE_TRY(read_text_file(options.curve_file, &file));
  std::string_view text;
  GENERATE_TRY(slice_text(file, options.curve_file, options, &text));

  Session dense_session;
  Context prefilled;
  GENERATE_TRY(runtime->new_session({}, &dense_session));
  prefilled.session = dense_session.get();
  GENERATE_TRY(runtime->new_sequence(&prefilled.sequence));
  AppendOptions append;
  append.label = "prefill";
  append.more_follows = true;
  const int64_t n_common = std::max<int64_t>(options.context - options.n_decode - kTailTokens, 1);
  GENERATE_TRY(runtime->append(&prefilled, text.substr(0, n_common), append));

  std::vector<Reading> readings(1);
  readings[0].dense = true;
  GENERATE_TRY(read_with({}, prefilled, text, options.n_decode, runtime, &readings[0]));
  if (!options.json) {
    std::printf(" window   tokens     beta    KV read  bits per byte  against dense   tokens/s\n");
    print_reading(readings[0], readings[0]);
  }
  for (const double window_percent : options.windows) {
    for (const double beta : options.betas) {
      PolicyOptions policy = options.policy;
      policy.policy = "hgca";
      policy.beta = beta;
      policy.window_tokens = std::llround(static_cast<double>(options.context) * window_percent / 100);
      Reading reading;
      reading.window_percent = window_percent;
      reading.beta = beta;
      reading.window_tokens = policy.window_tokens;
      GENERATE_TRY(read_with(policy, prefilled, text, options.n_decode, runtime, &reading));
      if (!options.json) print_reading(reading, readings[0]);
      readings.push_back(reading);
    }
  }
  if (options.json) print_json(readings);
  return draw(options, readings);
}

}  // namespace generate
