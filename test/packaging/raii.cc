// SPDX-License-Identifier: MIT
// A program that uses tandem.hpp: one decode step, a refused one, pruned keys, a file of head patterns, and releases in the
// wrong order.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "tandem/tandem.hpp"

static_assert(!std::is_copy_constructible<tandem::Session>::value, "a session has one owner");
static_assert(std::is_nothrow_move_constructible<tandem::Session>::value, "a session can be handed on");

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
      return 1;                                                             \
    }                                                                       \
  } while (0)

namespace {

constexpr int64_t kHeads = 2, kDim = 64;

tandem_layer_options two_heads() {
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = layer.n_kv_heads = static_cast<int32_t>(kHeads);
  layer.k_head_dim = static_cast<int32_t>(kDim);
  return layer;
}

// One token attends itself, so o = v for any q and k.
int attend_one(tandem::Session& session, int64_t sequence, float value, float* seen) {
  std::vector<float> q(kHeads * kDim, 0.5f), k(kHeads * kDim, 0.25f), v(kHeads * kDim, value), o(kHeads * kDim);
  const tandem_tensor qt = tandem::tensor(q.data(), {1, kHeads, kDim}), kt = tandem::tensor(k.data(), {1, kHeads, kDim});
  const tandem_tensor vt = tandem::tensor(v.data(), {1, kHeads, kDim}), ot = tandem::tensor(o.data(), {1, kHeads, kDim});
  const int64_t q_len = 1;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &qt;
  args.k = &kt;
  args.v = &vt;
  args.o = &ot;
  tandem::Step step(session, {sequence}, {q_len});
  session.attend(args);
  step.end();
  *seen = o[0];
  return 0;
}

// The last token attends the named key and gets its value. An index of no token is refused.
int attend_named(tandem::Session& session, int64_t sequence, int32_t named, float expected) {
  std::vector<float> q(kHeads * kDim, 0.5f), o(kHeads * kDim);
  const tandem_tensor qt = tandem::tensor(q.data(), {1, kHeads, kDim}), ot = tandem::tensor(o.data(), {1, kHeads, kDim});
  const tandem_tensor idx = tandem::tensor(TANDEM_I32, &named, {1, 1, 1});
  const int64_t q_len = 1;
  tandem_selection selection = TANDEM_SELECTION_INIT;
  selection.idx = &idx;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &qt;
  args.o = &ot;
  args.selection = &selection;
  session.attend(args);
  CHECK(std::fabs(o[0] - expected) < 1e-6f);
  try {
    named = 1000;
    session.attend(args);
    CHECK(!"there is no token 1000");
  } catch (const tandem::Error& error) {
    CHECK(error.status() == TANDEM_ERROR_INVALID_ARGUMENT && error.field() == "selection.idx");
  }
  return 0;
}

void run_in_turn(int64_t n_tasks, tandem_task_fn task, void* context, void* user) {
  ++*static_cast<int*>(user);
  for (int64_t i = 0; i < n_tasks; ++i) task(i, context);
}

// On a lent thread: each of 40 queries sees the keys up to its own. Each value is the number of its key.
int attend_tensors() {
  const int64_t n = 40;
  int n_rounds = 0;
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  tandem::lend_threads(options, 2, run_in_turn, &n_rounds);
  tandem::Engine engine(options);
  std::vector<float> q(n * kHeads * kDim, 0.5f), k(n * kHeads * kDim, 0.25f), v(n * kHeads * kDim), o(n * kHeads * kDim);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / (kHeads * kDim));
  const tandem_tensor qt = tandem::tensor(q.data(), {n, kHeads, kDim}), kt = tandem::tensor(k.data(), {n, kHeads, kDim});
  const tandem_tensor vt = tandem::tensor(v.data(), {n, kHeads, kDim}), ot = tandem::tensor(o.data(), {n, kHeads, kDim});
  tandem_attend_tensors_args args = TANDEM_ATTEND_TENSORS_ARGS_INIT;
  args.flags = TANDEM_TENSORS_CAUSAL;
  args.q = &qt;
  args.k = &kt;
  args.v = &vt;
  args.o = &ot;
  engine.attend_tensors(args);
  for (int64_t t = 0; t < n; ++t)
    CHECK(std::fabs(o[static_cast<std::size_t>(t * kHeads * kDim)] - static_cast<float>(t) / 2) < 1e-4f);
  CHECK(n_rounds > 0);
  try {
    args.o = &qt;
    engine.attend_tensors(args);
    CHECK(!"o overlaps q");
  } catch (const tandem::Error& error) {
    CHECK(error.status() == TANDEM_ERROR_INVALID_ARGUMENT && error.field() == "o.data");
  }
  return 0;
}

constexpr int64_t kPruned = 3000, kNeedle = 1234;  // tokens; kNeedle is outside sinks and window

// Keeps 16 sinks, a window of 64 tokens, and keep_tokens others, in chunks of 8.
tandem::Pruning pruning_that_keeps(int64_t keep_tokens) {
  tandem::PruningRecord record;
  record.sink_tokens = 16;
  record.window_tokens = 64;
  record.stages = {{tandem::Judge::kBounds, 8, keep_tokens}};
  tandem::Pruning pruning;
  pruning.decode = pruning.append = {record};
  return pruning;
}

tandem_session_options with_policy(const char* policy) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = policy;
  return options;
}

// Returns numbers from -1 to 1.
std::vector<float> numbers(int64_t n, uint32_t seed) {
  std::vector<float> made(static_cast<std::size_t>(n));
  for (float& x : made)
    x = static_cast<float>((seed = seed * 1664525u + 1013904223u) >> 8) / static_cast<float>(1 << 23) - 1.0f;
  return made;
}

// Appends kPruned tokens to a new sequence and decodes one more. Returns its o. In the first head the key of kNeedle is a
// multiple of the last query. *needle is its value.
std::vector<float> append_and_decode(tandem::Cache& cache, tandem::Session& session, std::vector<float>* needle) {
  constexpr int64_t kToken = kHeads * kDim;
  std::vector<float> q = numbers((kPruned + 1) * kToken, 1), k = numbers((kPruned + 1) * kToken, 2);
  std::vector<float> v = numbers((kPruned + 1) * kToken, 3), o(q.size(), NAN);
  for (int64_t i = 0; i < kDim; ++i)
    k[static_cast<std::size_t>(kNeedle * kToken + i)] = 16.0f * q[static_cast<std::size_t>(kPruned * kToken + i)];
  needle->assign(v.begin() + kNeedle * kToken, v.begin() + kNeedle * kToken + kDim);
  const int64_t sequence = cache.create_sequence();
  for (const int64_t first : {int64_t{0}, kPruned}) {
    const int64_t q_len = first == 0 ? kPruned : 1;
    const auto view = [&](std::vector<float>& of) {
      return tandem::tensor(&of[static_cast<std::size_t>(first * kToken)], {q_len, kHeads, kDim});
    };
    const tandem_tensor qt = view(q), kt = view(k), vt = view(v), ot = view(o);
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &q_len;
    args.q = &qt;
    args.k = &kt;
    args.v = &vt;
    args.o = &ot;
    session.attend(args);
  }
  return std::vector<float>(o.begin() + kPruned * kToken, o.end());
}

// Returns the largest difference over the common numbers, or NaN if a number is NaN.
float difference(const std::vector<float>& a, const std::vector<float>& b) {
  float most = 0.0f;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const float apart = std::fabs(a[i] - b[i]);
    if (apart > most || std::isnan(apart)) most = apart;
    if (std::isnan(most)) break;
  }
  return most;
}

int refused_pruning(tandem::Cache& cache, const char* policy, const tandem::Pruning& pruning, int32_t status,
                    const char* field) {
  try {
    tandem::Session refused(cache, with_policy(policy), pruning);
    CHECK(!"was not refused");
  } catch (const tandem::Error& error) {
    CHECK(error.status() == status && error.field() == field);
  }
  return 0;
}

int refuse_prunings(tandem::Cache& cache) {
  tandem::Pruning pruning;
  CHECK(refused_pruning(cache, "all", pruning, TANDEM_ERROR_INVALID_ARGUMENT, "pruning") == 0);
  pruning.preset = "4k";
  CHECK(refused_pruning(cache, "hip", pruning, TANDEM_ERROR_NOT_FOUND, "pruning.preset") == 0);
  pruning = pruning_that_keeps(64);
  pruning.append.resize(2);
  CHECK(refused_pruning(cache, "hip", pruning, TANDEM_ERROR_INVALID_ARGUMENT, "pruning.n_append") == 0);
  pruning = pruning_that_keeps(64);
  pruning.decode[0].stages.push_back({tandem::Judge::kDescent, 3, 64});
  const char* const field = "pruning.decode[0].stages[1].chunk_tokens";
  CHECK(refused_pruning(cache, "hip", pruning, TANDEM_ERROR_INVALID_ARGUMENT, field) == 0);
  return 0;
}

int attend_pruned(tandem::Cache& cache) {
  std::vector<float> needle;
  tandem::Session dense(cache, with_policy("all"));
  const std::vector<float> all = append_and_decode(cache, dense, &needle);
  tandem::Session everything(cache, with_policy("hip"), pruning_that_keeps(4096));
  CHECK(difference(append_and_decode(cache, everything, &needle), all) < 1e-5f);
  tandem::Pruning pruning;
  pruning.preset = "3k";  // keeps 4096 tokens in the first layers of a model
  tandem::Session paper(cache, with_policy("hip"), pruning);
  CHECK(difference(append_and_decode(cache, paper, &needle), all) < 1e-5f);
  pruning = pruning_that_keeps(64);
  pruning.preset = "5k";
  tandem::Session few(cache, with_policy("hip"), pruning);
  pruning = tandem::Pruning();  // the session does not read it any more
  const std::vector<float> pruned = append_and_decode(cache, few, &needle);
  CHECK(difference(pruned, needle) < 1e-5f && difference(pruned, all) > 1e-2f);
  CHECK(few.stats().n_refreshes > 0);

  // PruningCopy is a struct of C.
  const tandem::PruningCopy copy(pruning_that_keeps(64));
  tandem_session_options session_options = with_policy("hip");
  session_options.pruning = copy.get();
  tandem::Session of_copy(cache, session_options);
  CHECK(append_and_decode(cache, of_copy, &needle) == pruned);
  return 0;
}

// Reads a file of gates that it writes into the working directory.
int read_patterns() {
  const char* const path = "raii_gates.tsv";
  std::FILE* const file = std::fopen(path, "w");
  CHECK(file != nullptr && std::fputs("0.5\t0.25\n0.1\t0.75\n", file) >= 0 && std::fclose(file) == 0);
  const tandem::Patterns patterns = tandem::Patterns::read(path);
  CHECK(patterns.n_layers == 2 && patterns.heads.size() == 4 && patterns.raw().n_heads == 4);
  CHECK(patterns.heads[0].kinds == TANDEM_PATTERN_FULL && patterns.heads[1].kinds == TANDEM_PATTERN_A_SHAPE);
  CHECK(patterns.raw().heads[2].window_tokens == 256 && patterns.raw().heads[3].kinds == TANDEM_PATTERN_FULL);
  tandem_pattern_file_options options = TANDEM_PATTERN_FILE_OPTIONS_INIT;
  options.group_size = 2;
  CHECK(tandem::Patterns::read(path, &options).heads.size() == 8);
  CHECK(std::remove(path) == 0);
  try {
    tandem::Patterns::read(path);
    CHECK(!"the file is gone");
  } catch (const tandem::Error& error) {
    CHECK(error.status() == TANDEM_ERROR_IO && error.field() == "path");
  }
  return 0;
}

// Saves a sequence to a file in the folder of test files and loads it.
int save_and_load(tandem::Cache& cache, const tandem::Session& session, int64_t sequence) {
  const char* folder = std::getenv("TMPDIR");
  const std::string path = std::string(folder != nullptr ? folder : "/tmp") + "/tandem-raii-" + std::to_string(::getpid());
  tandem::SavedWith with(&session, 7);
  with.blobs["state"] = std::string("a\0b", 3);
  with.blobs["empty"] = "";
  tandem::save_sequence(cache, sequence, path, with);
  tandem::save_sequence(cache, sequence, path, with);  // replaces the first file
  std::map<std::string, std::string> blobs;
  const int64_t loaded = tandem::load_sequence(cache, path, {&session, 7}, &blobs);
  CHECK(cache.digest(loaded) == cache.digest(sequence) && blobs == with.blobs);
  cache.drop(loaded);
  try {
    tandem::load_sequence(cache, path);
    CHECK(!"the model is another");
  } catch (const tandem::Error& error) {
    CHECK(error.field() == "model_id");
  }
  CHECK(std::remove(path.c_str()) == 0);
  for (const std::string& none : {path, path + "/none"}) try {
      tandem::load_sequence(cache, none);
      CHECK(!"there is no such file");
    } catch (const std::system_error& error) {
      CHECK(error.code() == std::errc::no_such_file_or_directory);
    }
  try {
    tandem::save_sequence(cache, sequence, path + "/none");
    CHECK(!"there is no such folder");
  } catch (const std::system_error& error) {
    CHECK(error.code() == std::errc::no_such_file_or_directory);
  }
  return 0;
}

int run() {
  CHECK(attend_tensors() == 0);
  CHECK(read_patterns() == 0);
  tandem::Engine engine;
  tandem::Model model({two_heads()});
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.k_type = TANDEM_F32;
  tandem::Cache cache(engine, model, options);
  CHECK(attend_pruned(cache) == 0 && refuse_prunings(cache) == 0);
  tandem::Session first(cache);
  tandem::Session session(std::move(first));
  CHECK(first.get() == nullptr && session.get() != nullptr);  // NOLINT(bugprone-use-after-move): null by its contract

  const int64_t sequence = cache.create_sequence();
  float seen = 0;
  CHECK(attend_one(session, sequence, 3.0f, &seen) == 0 && std::fabs(seen - 3.0f) < 1e-6f);
  CHECK(attend_one(session, sequence, 5.0f, &seen) == 0 && std::fabs(seen - 4.0f) < 1e-6f);
  CHECK(cache.length(sequence) == 2 && session.stats().n_attends == 2);
  CHECK(attend_named(session, sequence, 0, 3.0f) == 0 && attend_named(session, sequence, 1, 5.0f) == 0);
  CHECK(session.selection(sequence, 0, 0) == std::vector<int64_t>{1});
  CHECK(save_and_load(cache, session, sequence) == 0);
  const int64_t fork = cache.fork(sequence);
  CHECK(cache.digest(fork) == cache.digest(sequence));
  cache.truncate(fork, 1);
  CHECK(cache.length(fork) == 1 && cache.length(sequence) == 2);
  CHECK(engine.report().front() == '{' && engine.report().back() == '}');

  try {
    cache.length(sequence + 1000);
    CHECK(!"an unknown sequence has no length");
  } catch (const tandem::Error& error) {
    CHECK(error.status() == TANDEM_ERROR_NOT_FOUND && error.message() == error.what() && !error.message().empty());
  }
  try {
    options.k_type = 99;
    tandem::Cache refused(engine, model, options);
    CHECK(!"there is no storage type 99");
  } catch (const tandem::Error& error) {
    CHECK(error.field() == "k_type");
  }
  tandem::Engine taken(std::move(engine));
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
