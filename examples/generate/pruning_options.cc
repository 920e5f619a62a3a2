// SPDX-License-Identifier: MIT
#include "pruning_options.h"

#include <charconv>
#include <string_view>

namespace generate {
namespace {

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (size_t first = 0; first <= text.size();) {
    const size_t end = std::min(text.find(at, first), text.size());
    parts.push_back(text.substr(first, end - first));
    first = end + 1;
  }
  return parts;
}

Failure number(const std::string& text, const std::string& where, int64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (error == std::errc() && end == text.data() + text.size() && !text.empty()) return {};
  return {where + "\"" + text + "\" is not a number"};
}

}  // namespace

Failure Pruning::parse_stage(const std::string& text, const std::string& where) {
  constexpr std::string_view kNext = "+next";
  std::string numbers = text;
  tandem_pruning_stage stage = TANDEM_PRUNING_STAGE_INIT;
  if (numbers.size() > kNext.size() && numbers.ends_with(kNext)) {
    stage.plus_next = 1;
    numbers.resize(numbers.size() - kNext.size());
  }
  const std::vector<std::string> parts = split(numbers, ':');
  if (parts.size() != 4) return {where + "\"" + text + "\" is not JUDGE:CHUNK:KEEP:INTERVAL"};
  if (parts[0] == "descent")
    stage.judge = TANDEM_JUDGE_DESCENT;
  else if (parts[0] == "bounds")
    stage.judge = TANDEM_JUDGE_BOUNDS;
  else if (parts[0] == "exact")
    stage.judge = TANDEM_JUDGE_EXACT;
  else
    return {where + "\"" + parts[0] + "\" is none of descent, bounds, exact"};
  GENERATE_TRY(number(parts[1], where, &stage.chunk_tokens));
  GENERATE_TRY(number(parts[2], where, &stage.keep_tokens));
  GENERATE_TRY(number(parts[3], where, &stage.refresh_interval));
  stages_.push_back(stage);
  return {};
}

Failure Pruning::parse(const std::string& text, const char* flag) {
  constexpr std::string_view kDense = "dense+";
  const std::string where = std::string(flag) + ": ";
  *this = {};
  appends_all_ = text.starts_with(kDense);
  const std::string rest = appends_all_ ? text.substr(kDense.size()) : text;
  if (rest.find('/') == std::string::npos) {
    preset_ = rest;
    return {};
  }
  const std::vector<std::string> parts = split(rest, '/');
  if (parts.size() < 3) return {where + "\"" + rest + "\" is neither a preset nor SINKS/WINDOW/STAGE..."};
  GENERATE_TRY(number(parts[0], where, &record_.sink_tokens));
  GENERATE_TRY(number(parts[1], where, &record_.window_tokens));
  for (size_t i = 2; i < parts.size(); ++i) GENERATE_TRY(parse_stage(parts[i], where));
  return {};
}

tandem_pruning Pruning::get() {
  constexpr int64_t kAll = int64_t{1} << 30;  // tokens, more than any sequence has
  tandem_pruning pruning = TANDEM_PRUNING_INIT;
  if (!preset_.empty()) pruning.preset = preset_.c_str();
  if (!stages_.empty()) {
    record_.stages = stages_.data();
    record_.n_stages = static_cast<int64_t>(stages_.size());
    pruning.decode = pruning.append = &record_;
    pruning.n_decode = pruning.n_append = 1;
  }
  if (appends_all_) {
    all_stage_.judge = TANDEM_JUDGE_EXACT;
    all_stage_.chunk_tokens = 64;
    all_stage_.keep_tokens = kAll;
    all_.stages = &all_stage_;
    all_.n_stages = 1;
    pruning.append = &all_;
    pruning.n_append = 1;
  }
  return pruning;
}

}  // namespace generate
