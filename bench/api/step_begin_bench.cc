// SPDX-License-Identifier: MIT
// Times the host's work for a planned decode step: tandem_step_begin(), the attend calls of all layers, and
// tandem_step_end(), each separately. Each step finishes before the next one begins, so no call waits for an earlier one.
//
//   all       every key is in the window, and all sequences have the same length
//   ragged    as all, but sequences have different lengths
//   outside   policy all; most keys are outside the window, and the host attends them
//   hgca      as outside, but a selector chooses among these keys
//
// After the steps of each line, some answers are compared with attention in double precision over the keys in the cache. If
// an answer is wrong, no time is printed. Only hgca attends fewer keys. There the bench checks that every step's tokens have
// arrived and that answers are finite.
//
//   step_begin_bench MODULE [steps [case [sequences [layers]]]]
//
// MODULE: a device module, the stand-in's, which needs no device, or the CUDA module. steps 0: a few steps in small cases,
// which are checked and not timed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "bench/cpu/bench_clock.h"
#include "device/open_device.h"
#include "reference/attention_reference.h"
#include "reference/random.h"
#include "tandem/tandem.hpp"

namespace {

using tandem::test::median;
using tandem::test::now_ns;
using tandem::test::OpenDevice;

constexpr int64_t kHeads = 1, kGroup = 2, kDim = 64, kQHeads = kHeads * kGroup, kPrompt = 48, kRagged = 37;

constexpr double kAwakeNs = 100'000.0;  // the thread spins this long before a step, like one that has just sampled tokens

struct Settings {
  const char* module = nullptr;
  int n_steps = 0;
  const char* only = "";  // name of a case
  int64_t n_sequences = 0;
  int32_t n_layers = 32;
};

struct Case {
  const char* name;
  const char* policy;
  int64_t window;
  bool is_ragged;
};
constexpr Case kCases[] = {
    {"all", "all", 4096, false}, {"ragged", "all", 4096, true}, {"outside", "all", 16, false}, {"hgca", "hgca", 16, false}};

std::vector<float> random_rows(int64_t n, uint64_t seed) {
  reference::Random random(seed);
  std::vector<float> rows(static_cast<size_t>(n));
  for (float& x : rows) x = static_cast<float>(2.0 * random.uniform() - 1.0);
  return rows;
}

// A tensor [n_tokens, n_heads, kDim] in device memory.
struct DeviceTensor {
  const OpenDevice& device;
  std::vector<float> values;
  tandem_tensor view;

  DeviceTensor(const OpenDevice& at, int64_t n_tokens, int64_t n_heads, uint64_t seed)
      : device(at), values(random_rows(n_tokens * n_heads * kDim, seed)) {
    void* const data = device.allocate(bytes());
    device.upload(data, values.data(), bytes());
    view = tandem::tensor(static_cast<float*>(data), {n_tokens, n_heads, kDim});
    view.device_type = TANDEM_DEVICE_CUDA;
  }
  DeviceTensor(const DeviceTensor&) = delete;
  ~DeviceTensor() { device.release(view.data); }
  void download() { device.download(values.data(), view.data, bytes()); }
  int64_t bytes() const { return static_cast<int64_t>(values.size() * sizeof(float)); }
};

tandem_engine_options engine_options(const Settings& settings, const OpenDevice& device) {
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.n_threads = 1;
  options.backend = device.table->name;
  options.backend_path = settings.module;
  return options;
}

std::vector<tandem_layer_options> layer_options(int32_t n_layers) {
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = kQHeads, layer.n_kv_heads = kHeads, layer.k_head_dim = kDim;
  return std::vector<tandem_layer_options>(static_cast<size_t>(n_layers), layer);
}

tandem_session_options session_options(const Case& of) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = of.policy;
  options.window_tokens = of.window;
  return options;
}

// Sequences with a prompt each, and the steps after it.
class World {
 public:
  World(const Settings& settings, const Case& of, const OpenDevice& device, int64_t n_sequences);
  World(const World&) = delete;
  ~World() { device_.table->destroy_stream(device_.self, stream_); }

  struct Times {
    double begin = 0.0, attend = 0.0, end = 0.0;
  };
  Times step();
  bool check();

 private:
  void append_prompts();
  int64_t prompt_of(size_t i) const;
  bool check_rows(int64_t i, int32_t layer_idx);

  const Case& case_;
  const OpenDevice& device_;
  const int32_t n_layers_;
  tandem::Engine engine_;
  tandem::Model model_;
  tandem::Cache cache_;
  tandem::Session session_;
  std::vector<int64_t> ids_, ones_;
  std::vector<std::unique_ptr<DeviceTensor>> q_, k_, v_, o_;
  void* stream_ = nullptr;
  int64_t n_steps_ = 0;
};

World::World(const Settings& settings, const Case& of, const OpenDevice& device, int64_t n_sequences)
    : case_(of),
      device_(device),
      n_layers_(settings.n_layers),
      engine_(engine_options(settings, device)),
      model_(layer_options(settings.n_layers)),
      cache_(engine_, model_),
      session_(cache_, session_options(of)),
      ones_(static_cast<size_t>(n_sequences), 1) {
  tandem::DeviceError error;
  device.must(device.table->create_stream(device.self, &stream_, &error), error);
  for (int64_t i = 0; i < n_sequences; ++i) ids_.push_back(cache_.create_sequence());
  for (int32_t l = 0; l < n_layers_; ++l) {
    const auto seed = static_cast<uint64_t>(4 * l);
    q_.push_back(std::make_unique<DeviceTensor>(device, n_sequences, kQHeads, seed));
    k_.push_back(std::make_unique<DeviceTensor>(device, n_sequences, kHeads, seed + 1));
    v_.push_back(std::make_unique<DeviceTensor>(device, n_sequences, kHeads, seed + 2));
    o_.push_back(std::make_unique<DeviceTensor>(device, n_sequences, kQHeads, seed + 3));
  }
  append_prompts();
}

// Returns the length of a sequence before the first step.
int64_t World::prompt_of(size_t i) const {
  return kPrompt + (case_.is_ragged ? reference::Random(i).integer(0, kRagged - 1) : 0);
}

void World::append_prompts() {
  for (size_t i = 0; i < ids_.size(); ++i) {
    const int64_t n = prompt_of(i);
    std::vector<float> k = random_rows(n * kHeads * kDim, 1000 + 2 * i), v = random_rows(n * kHeads * kDim, 1001 + 2 * i);
    const tandem_tensor k_rows = tandem::tensor(k.data(), {n, kHeads, kDim}),
                        v_rows = tandem::tensor(v.data(), {n, kHeads, kDim});
    for (int32_t l = 0; l < n_layers_; ++l) cache_.append(ids_[i], l, &k_rows, &v_rows);
  }
}

// Every step has the same rows, as their cost does not depend on the numbers.
World::Times World::step() {
  for (const double awake = now_ns() + kAwakeNs; now_ns() < awake;) {
  }
  const double begun = now_ns();
  tandem::Step step(session_, ids_, ones_, stream_);
  const double planned = now_ns();
  for (int32_t l = 0; l < n_layers_; ++l) {
    const auto at = static_cast<size_t>(l);
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = l;
    args.n_sequences = static_cast<int32_t>(ids_.size());
    args.sequences = ids_.data();
    args.q_lens = ones_.data();
    args.q = &q_[at]->view, args.k = &k_[at]->view, args.v = &v_[at]->view, args.o = &o_[at]->view;
    args.stream = stream_;
    session_.attend(args);
  }
  const double attended = now_ns();
  step.end();
  const double ended = now_ns();
  tandem::DeviceError error;
  device_.must(device_.table->wait(device_.self, stream_, &error), error);
  engine_.drain();
  ++n_steps_;
  return {planned - begun, attended - planned, ended - attended};
}

// Checks the last step's answer of a sequence in a layer.
bool World::check_rows(int64_t i, int32_t layer_idx) {
  const auto at = static_cast<size_t>(layer_idx);
  const int64_t id = ids_[static_cast<size_t>(i)], n = cache_.length(id, layer_idx);
  std::vector<float> k(static_cast<size_t>(n * kHeads * kDim)), v(k.size());
  const tandem_tensor k_rows = tandem::tensor(k.data(), {n, kHeads, kDim}),
                      v_rows = tandem::tensor(v.data(), {n, kHeads, kDim});
  cache_.read(&k_rows, &v_rows, id, layer_idx);
  o_[at]->download();
  std::vector<int64_t> positions(static_cast<size_t>(n));
  std::iota(positions.begin(), positions.end(), 0);
  reference::RefLayer layer;
  layer.n_q_heads = kQHeads, layer.n_kv_heads = kHeads, layer.k_head_dim = layer.v_head_dim = kDim;
  reference::Queries queries;
  queries.n_tokens = 1;
  queries.q = q_[at]->values.data() + i * kQHeads * kDim;
  queries.positions = &positions.back();
  queries.naive_rows = 0;
  queries.visible = [&](int64_t, int32_t, std::vector<int64_t>* keys) { *keys = positions; };
  const reference::Truth truth = attend_reference({&layer, n, k.data(), v.data(), positions.data()}, queries);
  const bool is_exact = std::strcmp(case_.policy, "all") == 0;
  for (int64_t d = 0; d < kQHeads * kDim; ++d) {
    const auto got = double{o_[at]->values[static_cast<size_t>(i * kQHeads * kDim + d)]};
    if (is_exact ? std::fabs(got - truth.o[static_cast<size_t>(d)]) <= 1e-4 : std::isfinite(got)) continue;
    std::fprintf(stderr, "%s: o of sequence %lld, layer %d, head %lld, dim %lld is wrong\n", case_.name,
                 static_cast<long long>(i), layer_idx, static_cast<long long>(d / kDim), static_cast<long long>(d % kDim));
    return false;
  }
  return true;
}

bool World::check() {
  const int64_t last = std::ssize(ids_) - 1;
  for (const int64_t i : {int64_t{0}, last / 2, last})
    for (const int32_t l : {0, n_layers_ / 2, n_layers_ - 1}) {
      const auto at = static_cast<size_t>(i);
      if (cache_.length(ids_[at], l) != prompt_of(at) + n_steps_ || !check_rows(i, l)) return false;
    }
  return true;
}

bool run_line(const Settings& settings, const Case& of, const OpenDevice& device, int64_t n_sequences, int n_steps) {
  constexpr int kWarmUp = 3;
  World world(settings, of, device, n_sequences);
  std::vector<double> begin, attend, end;
  for (int i = 0; i < kWarmUp + n_steps; ++i) {
    const World::Times times = world.step();
    if (i < kWarmUp) continue;
    begin.push_back(times.begin / 1e3);
    attend.push_back(times.attend / 1e3);
    end.push_back(times.end / 1e3);
  }
  if (!world.check()) return false;
  if (settings.n_steps == 0) return true;
  std::sort(begin.begin(), begin.end());
  std::printf("| %-7s | %4lld | %7.1f | %7.1f | %7.1f | %7.1f |\n", of.name, static_cast<long long>(n_sequences),
              median(begin), begin[begin.size() / 10], median(attend), median(end));
  std::fflush(stdout);
  return true;
}

constexpr int64_t kSequences[] = {1, 4, 16, 64, 256};

// Returns whether all arguments that must be numbers are numbers.
bool are_words(int argc, char** argv) {
  const auto is_number = [&](int i) { return argc <= i || std::strspn(argv[i], "0123456789") == std::strlen(argv[i]); };
  return argc > 1 && argc < 7 && is_number(2) && is_number(4) && is_number(5);
}

// Returns whether the settings name an existing case and number of sequences.
bool is_line(const Settings& settings) {
  const bool has_case = *settings.only == '\0' || std::any_of(std::begin(kCases), std::end(kCases), [&](const Case& of) {
    return std::strcmp(settings.only, of.name) == 0;
  });
  return has_case && (settings.n_sequences == 0 ||
                      std::find(std::begin(kSequences), std::end(kSequences), settings.n_sequences) != std::end(kSequences));
}

int run(const Settings& settings) {
  const OpenDevice device(settings.module);
  if (settings.n_steps == 0) {
    Settings small = settings;
    small.n_layers = 3;
    for (const Case& of : kCases)
      if (!run_line(small, of, device, 5, 4)) return 1;
    return 0;
  }
  std::printf("%s, %d layers, microseconds\n\n", device.info.name, settings.n_layers);
  std::printf("| case | sequences | begin | begin, best tenth | attend, all layers | end |\n|---|--:|--:|--:|--:|--:|\n");
  for (const Case& of : kCases)
    for (const int64_t n : kSequences) {
      if (*settings.only != '\0' && std::strcmp(settings.only, of.name) != 0) continue;
      if (settings.n_sequences != 0 && settings.n_sequences != n) continue;
      // Lines with many sequences have fewer steps, as the untimed work grows with the sequences.
      const int n_steps = n <= 16 ? settings.n_steps : std::max(10, settings.n_steps * 16 / static_cast<int>(n));
      if (!run_line(settings, of, device, n, n_steps)) return 1;
    }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  if (argc > 1) settings.module = argv[1];
  settings.n_steps = argc > 2 ? std::atoi(argv[2]) : 200;
  if (argc > 3) settings.only = argv[3];
  if (argc > 4) settings.n_sequences = std::atoll(argv[4]);
  if (argc > 5) settings.n_layers = std::atoi(argv[5]);
  if (!are_words(argc, argv) || !is_line(settings) || settings.n_layers < 1) {
    std::fprintf(stderr, "step_begin_bench MODULE [steps [case [sequences [layers]]]]\n");
    return 2;
  }
  try {
    return run(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
