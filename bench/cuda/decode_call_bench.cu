// SPDX-License-Identifier: MIT
// Whole decode calls and appends over keys in the window, through the C ABI: microseconds per layer.
//
//   decode_call_bench MODULE [threads [cases]] [--heads 32/8] [--dim 128] [--mib 600] [--ms 1500] [--kernel]
//
// cases: a list with commas of KEYS[xSEQUENCES[xQUERIES]][@HEADS/KVxDIM]. KEYS are there before the call; 17+4096x2 means
// two sequences of each length. --heads and --dim are the defaults of cases.
//
// bf16 layers run one after the other as a step that a graph replays. There are enough layers for --mib of keys or more, at
// least two and at most 64. There are eight if that is at most four times --mib, as a step of few layers says little about
// its calls. Each call appends its rows and attends them with the rest. The same calls are also timed without a plan, or
// only so if a planned step cannot take them. Prints medians of rounds that take turns, about --ms in all, until the stream
// is done, divided by the layers. After each round the new tokens are removed. Before a case is timed, its output is
// compared with the CPU's over the same keys in the host store. A JSON line for each case. bench/rivals/run.py times the
// rivals.
//
// --kernel: only the attention of the window, over at least two layers of contiguous keys, which include those of the
// queries. Checked against double precision, in a smaller case with the same heads if there are many pairs of query head and
// key.
#include <cctype>
#include <numeric>

#include "cuda/hybrid_case.h"
#include "cuda/window_case.h"

using namespace tandem::test;

namespace {

constexpr int64_t kFewestLayers = 2, kFewLayers = 8, kMostLayers = 64;
constexpr int kFewestRounds = 5, kMostRounds = 21;
constexpr int64_t kMostPlanned = 512, kMostPlannedInAll = 1024;  // queries of a sequence, and of a step
// Pairs of query head and key. Computing the truth takes long.
constexpr int64_t kMostChecked = int64_t{70'000} * 32;

struct Case {
  std::string word;
  std::vector<int64_t> lengths;
  int64_t queries = 1;
  HybridShape shape;

  int64_t n_sequences() const { return static_cast<int64_t>(lengths.size()); }
  int64_t longest() const { return *std::max_element(lengths.begin(), lengths.end()); }
  bool can_be_planned() const { return queries <= kMostPlanned && queries * n_sequences() <= kMostPlannedInAll; }
  int64_t n_tokens() const { return std::accumulate(lengths.begin(), lengths.end(), queries * n_sequences()); }
  int32_t n_layers(int64_t least_bytes, bool is_step) const {
    const int64_t bytes = n_tokens() * shape.token_bytes();
    const int64_t fewest = is_step ? std::clamp(4 * least_bytes / bytes, kFewestLayers, kFewLayers) : kFewestLayers;
    return static_cast<int32_t>(std::clamp((least_bytes + bytes - 1) / bytes, fewest, kMostLayers));
  }
  // Returns pairs of query head and key, as if no key were hidden.
  int64_t n_pairs() const { return queries * shape.n_q_heads * n_tokens(); }
};

struct Terms {
  HybridShape shape;
  int64_t least_bytes = int64_t{600} << 20;
  double most_us = 1.5e6;
  bool is_kernel = false;
};

// Parses a text from its start. The text must outlive the reader.
class Reader {
 public:
  explicit Reader(const std::string& text) : at_(text.c_str()) {}
  bool takes(char c) {
    if (*at_ != c) return false;
    ++at_;
    return true;
  }
  // Reads a number from `least` to 2^30.
  template <class Number>
  bool number(int64_t least, Number* n) {
    int64_t value = 0;
    const char* const begin = at_;
    for (; std::isdigit(static_cast<unsigned char>(*at_)) != 0 && value <= kMost; ++at_) value = value * 10 + (*at_ - '0');
    *n = static_cast<Number>(value);
    return at_ != begin && value >= least && value <= kMost;
  }
  bool heads(HybridShape* shape) {
    return number(1, &shape->n_q_heads) && takes('/') && number(1, &shape->n_kv_heads) &&
           shape->n_q_heads % shape->n_kv_heads == 0;
  }
  bool is_done() const { return *at_ == '\0'; }

 private:
  static constexpr int64_t kMost = int64_t{1} << 30;
  const char* at_;
};

bool read_case(Reader reader, Case* of) {
  std::vector<int64_t> lengths(1);
  if (!reader.number(0, &lengths[0])) return false;
  while (reader.takes('+'))
    if (!reader.number(0, &lengths.emplace_back())) return false;
  int64_t n_sequences = 1;
  if (reader.takes('x') && !reader.number(1, &n_sequences)) return false;
  if (reader.takes('x') && !reader.number(1, &of->queries)) return false;
  if (reader.takes('@') && !(reader.heads(&of->shape) && reader.takes('x') && reader.number(1, &of->shape.dim)))
    return false;
  for (int64_t i = 0; i < n_sequences; ++i) of->lengths.insert(of->lengths.end(), lengths.begin(), lengths.end());
  return reader.is_done();
}

[[noreturn]] void refuse(const std::string& word, const char* what) {
  std::fprintf(stderr, "%s is no %s\n", word.c_str(), what);
  std::exit(2);
}

std::vector<Case> cases_of(const std::string& list, const HybridShape& shape) {
  std::vector<Case> cases;
  for (const std::string& word : words_of(list.c_str())) {
    Case of{word, {}, 1, shape};
    if (!read_case(Reader(word), &of)) refuse(word, "KEYS[xSEQUENCES[xQUERIES]][@HEADS/KVxDIM]");
    cases.push_back(of);
  }
  if (cases.empty()) refuse("\"\"", "list of cases");
  return cases;
}

// Runs a case, its layers in turn.
class CaseRun {
 public:
  CaseRun(tandem_engine* engine, const Case& of, int64_t least_bytes)
      : of_(of),
        cache_(engine, of.n_layers(least_bytes, true), of.longest(), of.n_sequences(), keys_of(of)),
        session_(cache_, options_of(of)),
        call_(of.n_sequences() * of.queries, 1, of.shape) {
    session_.q_lens.assign(of.lengths.size(), of.queries);
  }
  int32_t n_layers() const { return cache_.n_layers; }

  // Returns microseconds per layer. The new tokens stay.
  double pass(bool replays) {
    remove_new_tokens();
    const auto begin = Clock::now();
    if (replays)
      session_.step(call_.device_view, true);
    else
      session_.attend_layers(call_.device_view, true, true);
    session_.wait();
    return us_since(begin) / n_layers();
  }
  // Returns the distance between the last layer's output and the CPU's output for the same queries.
  double error_of_pass(bool replays) {
    must(cudaMemset(call_.device[3], 0xff, call_.o.size() * sizeof call_.o[0]));  // NaN until this pass writes
    pass(replays);
    session_.attend(n_layers() - 1, call_.host_view, false, false);
    return distance_of(call_);
  }

 private:
  static HybridKeys keys_of(const Case& of) {
    HybridKeys keys;
    keys.shape = of.shape;
    keys.lengths = of.lengths;
    return keys;
  }
  static tandem_session_options options_of(const Case& of) {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.window_tokens = of.longest() + 2 * of.queries + 128;
    if (of.can_be_planned()) options.route = "host";
    return options;
  }
  void remove_new_tokens() {
    for (size_t i = 0; i < of_.lengths.size(); ++i) {
      TANDEM(tandem_sequence_truncate, cache_.cache, cache_.sequences[i], of_.lengths[i]);
      TANDEM(tandem_sequence_reserve, cache_.cache, cache_.sequences[i], of_.queries);
    }
    must(cudaDeviceSynchronize());
  }

  const Case& of_;
  const HybridCache cache_;
  HybridSession session_;
  Call call_;
};

std::string number_of(const std::vector<double>& times) {
  if (times.empty()) return "null";
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", median(times));
  return text;
}

bool measure_calls(tandem_engine* engine, const Case& of, const Terms& terms, const char* card) {
  CaseRun run(engine, of, terms.least_bytes);
  run.pass(false);  // fills the windows
  double error = run.error_of_pass(false);
  for (int i = 0; i < 2 && of.can_be_planned(); ++i) {
    const double next = run.error_of_pass(true);
    if (!std::isnan(error) && !(next <= error)) error = next;  // NaN is larger than any number and is kept
  }
  const double us = run.pass(false) * run.n_layers() * (of.can_be_planned() ? 2 : 1);
  const int n_rounds = static_cast<int>(std::clamp<double>(terms.most_us / us, kFewestRounds, kMostRounds));
  std::vector<double> planned, eager;
  for (int i = 0; i < n_rounds; ++i) {
    if (of.can_be_planned()) planned.push_back(run.pass(true));
    eager.push_back(run.pass(false));
  }
  const bool is_right = error < 1e-2;  // false for NaN
  std::printf(
      "{\"case\": \"%s\", \"card\": \"%s\", \"keys\": %lld, \"sequences\": %lld, \"queries\": %lld, \"q_heads\": %d, "
      "\"kv_heads\": %d, \"dim\": %d, \"layers\": %d, \"planned_us\": %s, \"eager_us\": %s, \"error\": %.1e, \"is_right\": "
      "%s}\n",
      of.word.c_str(), card, static_cast<long long>(of.longest()), static_cast<long long>(of.n_sequences()),
      static_cast<long long>(of.queries), of.shape.n_q_heads, of.shape.n_kv_heads, of.shape.dim, run.n_layers(),
      number_of(planned).c_str(), number_of(eager).c_str(), std::isfinite(error) ? error : 1e9, is_right ? "true" : "false");
  std::fflush(stdout);
  return is_right;
}

WindowOptions window_of(const Case& of, const Terms& terms) {
  WindowOptions options;
  options.layer.n_q_heads = of.shape.n_q_heads;
  options.layer.n_kv_heads = of.shape.n_kv_heads;
  options.layer.k_head_dim = options.layer.v_head_dim = of.shape.dim;
  options.layer.k_type = options.layer.v_type = options.q_type = options.o_type = TANDEM_BF16;
  for (const int64_t length : of.lengths)
    options.sequences.push_back({0, length + of.queries, static_cast<int32_t>(of.queries)});
  options.shuffled = false;
  options.n_distinct = 1000;
  options.n_layers = of.n_layers(terms.least_bytes, false);
  return options;
}

bool is_right_kernel(const OpenDevice& device, const Case& of, const Terms& terms) {
  Case checked = of;
  if (of.n_pairs() > kMostChecked) {
    checked.lengths = {std::min<int64_t>(of.longest(), 400)};
    checked.queries = std::min<int64_t>(of.queries, 300);
  }
  WindowOptions options = window_of(checked, terms);
  options.n_layers = 1;
  WindowCase window(device, options);
  window.clear_output();
  window.attend(0);
  must(cudaDeviceSynchronize());
  return window.check().pass;
}

bool measure_kernel(const OpenDevice& device, const Case& of, const Terms& terms) {
  const bool is_right = is_right_kernel(device, of, terms);
  const WindowOptions options = window_of(of, terms);
  WindowCase window(device, options);
  window.attend(0);
  const auto us_of = [&](int n_calls) {
    return time_of([&](cudaStream_t stream) {
             for (int i = 0; i < n_calls; ++i) window.attend(i % options.n_layers, stream);
           }) /
           n_calls;
  };
  const int n_calls = static_cast<int>(std::clamp<double>(terms.most_us / 12 / us_of(1), 1, std::max(32, options.n_layers)));
  std::printf("{\"case\": \"%s\", \"card\": \"%s\", \"layers\": %d, \"kernel_us\": %.2f, \"is_right\": %s}\n",
              of.word.c_str(), device.info.name, options.n_layers, us_of(n_calls), is_right ? "true" : "false");
  std::fflush(stdout);
  return is_right;
}

bool measure_all_calls(const char* module, int n_threads, const std::vector<Case>& cases, const Terms& terms) {
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0));
  tandem_engine* engine = make_engine(module, n_threads);
  bool are_right = true;
  for (const Case& of : cases) are_right = measure_calls(engine, of, terms, device.name) && are_right;
  tandem_engine_release(engine);
  return are_right;
}

// Removes the options from the words.
Terms terms_of(std::vector<std::string>* words) {
  Terms terms;
  std::vector<std::string> others;
  for (size_t i = 0; i < words->size(); ++i) {
    const std::string word = (*words)[i], next = i + 1 < words->size() ? (*words)[i + 1] : "";
    Reader reader(next);
    int64_t n = 0;
    if (word.rfind("--", 0) != 0) {
      others.push_back(word);
      continue;
    }
    if (word == "--kernel") {
      terms.is_kernel = true;
      continue;
    }
    const bool is_heads = word == "--heads", is_dim = word == "--dim", is_mib = word == "--mib";
    if (!is_heads && !is_dim && !is_mib && word != "--ms") refuse(word, "option");
    if (!(is_heads ? reader.heads(&terms.shape) : reader.number(1, &n)) || !reader.is_done())
      refuse(word + " " + next, is_heads ? "HEADS/KV" : "number from 1");
    if (is_dim) terms.shape.dim = static_cast<int32_t>(n);
    if (is_mib) terms.least_bytes = n << 20;
    if (word == "--ms") terms.most_us = 1e3 * static_cast<double>(n);
    ++i;
  }
  *words = others;
  return terms;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  const Terms terms = terms_of(&words);
  int n_threads = 0;
  const std::string text = words.size() > 1 ? words[1] : "0";
  Reader threads(text);
  if (!threads.number(0, &n_threads) || !threads.is_done()) refuse(text, "number of threads");
  if (words.empty() || words.size() > 3) {
    std::fprintf(
        stderr,
        "decode_call_bench MODULE [threads [cases]] [--heads 32/8] [--dim 128] [--mib 600] [--ms 1500] [--kernel]\n");
    return 2;
  }
  const std::vector<Case> cases =
      cases_of(words.size() > 2 ? words[2] : "4096x1x1,16384x1x1,65536x1x1,131072x1x1,4096x16x1", terms.shape);
  bool are_right = true;
  if (terms.is_kernel) {
    const OpenDevice device(words[0].c_str());
    for (const Case& of : cases) are_right = measure_kernel(device, of, terms) && are_right;
  } else {
    are_right = measure_all_calls(words[0].c_str(), n_threads, cases, terms);
  }
  return are_right ? 0 : 1;
}
