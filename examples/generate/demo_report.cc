// SPDX-License-Identifier: MIT
// Shared by the modes of tandem-demo.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "data_file.h"
#include "demo.h"
#include "picture.h"
#include "text_file.h"

namespace generate {

Failure load_haystack(const DemoOptions& options, int64_t n_bytes, std::string* text) {
  const std::string path = options.text_file.empty() ? data_file("data/haystack.txt") : options.text_file;
  std::string source;
  GENERATE_TRY(read_text_file(path, &source));
  if (source.empty()) return {path + ": is empty"};
  *text = long_text(source, n_bytes, static_cast<uint64_t>(options.seed));
  return {};
}

Failure picture_path(const DemoOptions& options, const char* name, std::string* path) {
  std::error_code error;
  std::filesystem::create_directories(options.picture_directory, error);
  if (error) return {"--pictures: \"" + options.picture_directory + "\": " + error.message()};
  *path = options.picture_directory + "/" + name;
  return {};
}

Failure check_picture_place(const DemoOptions& options, const char* name) {
  std::string path;
  GENERATE_TRY(picture_path(options, name, &path));
  if (access(options.picture_directory.c_str(), W_OK | X_OK) != 0)
    return {"--pictures: \"" + options.picture_directory + "\": " + std::strerror(errno)};
  GENERATE_TRY(refuse_irregular(path));
  if (access(path.c_str(), F_OK) == 0 && access(path.c_str(), W_OK) != 0) return {path + ": " + std::strerror(errno)};
  return {};
}

bool draws_pictures(const DemoOptions& options) {
  const bool draws = have_pictures() && !options.picture_directory.empty();
  if (!draws)
    std::fprintf(stderr, "No picture: %s.\n",
                 have_pictures() ? "--pictures DIR names a folder for it"
                                 : "this tandem-demo was built without Cairo (libcairo2-dev)");
  return draws;
}

void print_contestants(const std::vector<Contestant>& contestants) {
  std::printf("%-30s", "");
  for (const Contestant& c : contestants) std::printf("  %12s", c.policy.policy.c_str());
  const auto row = [&](const char* name, const auto& print) {
    std::printf("\n%-30s", name);
    for (const Contestant& c : contestants) print(c);
  };
  if (contestants[0].n_asked > 0)
    row("right answers", [](const Contestant& c) {
      std::printf("  %6lld of %2lld", static_cast<long long>(c.n_right), static_cast<long long>(c.n_asked));
    });
  if (contestants[0].scored.n_tokens > 0)
    row("bits per byte", [](const Contestant& c) { std::printf("  %12.4f", c.bits_per_byte()); });
  row("decoded tokens per second", [](const Contestant& c) { std::printf("  %12.0f", c.decode.tokens_per_second()); });
  row("KV read per token", [](const Contestant& c) { std::printf("  %9.2f MB", c.decode.bytes_per_token() / 1e6); });
  row("share of what dense reads", [](const Contestant& c) { std::printf("  %10.1f %%", 100 * c.decode.share()); });
  std::printf("\n");
}

std::string contestants_json(const std::vector<Contestant>& contestants) {
  nlohmann::ordered_json json;
  for (const Contestant& c : contestants) {
    nlohmann::ordered_json& one = json[c.policy.policy];
    one["right"] = c.n_right;
    one["asked"] = c.n_asked;
    if (c.scored.n_tokens > 0) one["bits_per_byte"] = c.bits_per_byte();
    one["decode_tokens_per_second"] = c.decode.tokens_per_second();
    one["kv_bytes_per_token"] = c.decode.bytes_per_token();
    one["dense_kv_bytes_per_token"] = c.decode.dense_bytes_per_token();
    one["kv_read_share"] = c.decode.share();
  }
  return json.dump();
}

}  // namespace generate
