// SPDX-License-Identifier: MIT
// Decode over a selection of keys, as a share of the speed of the dense scan in the same run: 32 query heads over 8 KV heads
// of 128.
//
//   tokens   runs of one key, drawn without replacement, sorted, different for each KV head
//   pages    runs of a page of 16, 64 or 128 keys, drawn in the same way
//   copy     the keys of the token list, copied into one run
//   dense    all keys
//   read     no attention: a byte of every cache line of a token list's rows, the fastest that memory gives such rows
//
// First every selection is checked against attention in double precision over the same keys. If one is wrong, no times are
// printed. A round runs every selection once over all layers. So all of K and V, eight last-level caches or more, pass
// through the caches before a selection is read again. The pool writes the lists of runs just before a call, untimed, as a
// policy would. GB/s count the selected K and V. A share is the median over rounds of the selection's speed divided by the
// dense scan's speed in the same round. Rounds in which a thread waited for a core are left out. Not a test.
//
//   sparse_bench [threads] [isa] [keys] [type] [rounds] [md|csv] [selection]
//
// rounds 0: only the check; type "" checks all types. selection: a name; runs that one, the dense scan and "read".
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "bench/cpu/bench_clock.h"
#include "cpu/isa.h"
#include "lib/model/dtype.h"

namespace tandem::test {
namespace {

constexpr int32_t kHeads = 8, kGroup = 4, kDim = 128;
constexpr int64_t kHugePage = 2 << 20, kMinLayers = 4, kFewCopied = 4000, kShares = 16;

struct Settings {
  CpuOptions cpu;
  int64_t n_keys = 131072;
  int n_rounds = 20;
  bool csv = false;
  std::string only;  // a selection's name: that one, the dense scan and "read"
};

// The keys of a layer that are read. Layer l gives head h the list of head (h + l) % kHeads.
struct Selection {
  std::string name;
  double density = 1.0;
  int64_t run_len = 0;  // 0: one run
  bool only_read = false;
  bool copied = false;                       // the keys are the heads' copies, from copy_at on
  int64_t copy_at = 0, n_keys = 0;           // per head
  std::vector<std::vector<int64_t>> firsts;  // [head list] -> first key of each run, ascending
  std::vector<double> ns, shares;            // one for each round
};

// One KV head of a layer: K, its scales, V, its scales.
struct Planes {
  uint8_t *k, *k_scales, *v, *v_scales;
};

struct Bench {
  Backend backend;
  Layer layer;
  int64_t n_keys = 0, n_copied = 0, n_layers = 0;
  int64_t codes = 0, scales = 0;  // bytes of a row
  uint8_t* memory = nullptr;      // [n_layers][heads] planes of n_keys + n_copied keys
  int64_t n_bytes = 0;
  void* mapping = nullptr;
  std::vector<float> noise, q, o, lse;
  std::vector<std::vector<KvRun>> runs;  // per head
  std::vector<AttendJob> jobs;
  std::vector<Selection> selections;
  std::atomic<uint64_t> checksum{0};  // sum of the rows that "read" reads
};

uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return x ^ x >> 31;
}

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Draws n numbers of [0, of), ascending. Every set is equally likely.
std::vector<int64_t> draw(int64_t n, int64_t of, uint64_t seed) {
  std::vector<int64_t> drawn;
  for (int64_t i = 0; i < of && n > 0; ++i) {
    if (static_cast<int64_t>(mix(seed + static_cast<uint64_t>(i)) % static_cast<uint64_t>(of - i)) >= n) continue;
    drawn.push_back(i);
    --n;
  }
  return drawn;
}

int64_t plane_bytes(const Bench& b, int64_t row) { return round_up((b.n_keys + b.n_copied) * row, 4096); }

Planes planes_of(const Bench& b, int64_t layer_idx, int32_t head) {
  const int64_t codes = plane_bytes(b, b.codes), scales = plane_bytes(b, b.scales);
  uint8_t* at = b.memory + (layer_idx * kHeads + head) * 2 * (codes + scales);
  return {at, at + codes, at + codes + scales, at + 2 * codes + scales};
}

// Writes noise from another place for each key, so that a wrong key gives a wrong answer.
void write_row(const Bench& b, uint8_t* codes, uint8_t* scales, int64_t key, uint64_t seed) {
  const uint64_t place = mix(seed + static_cast<uint64_t>(key)) % (b.noise.size() - kDim);
  b.backend.table->from_f32(b.backend.self, b.layer.k_type, b.noise.data() + place, codes + key * b.codes,
                            scales + key * b.scales, kDim);
}

KvRun run_at(const Bench& b, const Planes& planes, int64_t first, int64_t n) {
  KvRun run;
  run.k = planes.k + first * b.codes;
  run.v = planes.v + first * b.codes;
  run.k_scales = planes.k_scales + first * b.scales;
  run.v_scales = planes.v_scales + first * b.scales;
  run.n_tokens = n;
  run.token_idx = first;
  return run;
}

void write_head(Bench& b, const Selection& s, int64_t layer_idx, int32_t h) {
  std::vector<KvRun>& runs = b.runs[static_cast<size_t>(h)];
  const Planes planes = planes_of(b, layer_idx, h);
  runs.clear();
  if (s.run_len == 0)
    runs.push_back(run_at(b, planes, s.copy_at, s.n_keys));
  else
    for (const int64_t first : s.firsts[static_cast<size_t>(h + layer_idx) % kHeads])
      runs.push_back(run_at(b, planes, first, s.run_len));
  AttendJob& job = b.jobs[static_cast<size_t>(h)];
  job.runs = runs.data();
  job.n_runs = static_cast<int32_t>(runs.size());
  job.n_keys = s.n_keys;
  job.runs_are_keys = s.run_len == 1;
}

// Runs on the pool, so that the call finds the workers awake, as after a policy that has just chosen.
void write_runs(Bench& b, const Selection& s, int64_t layer_idx) {
  struct Lists {
    Bench& b;
    const Selection& s;
    int64_t layer_idx;
  } lists{b, s, layer_idx};
  const auto write = [](void* context, int64_t h, int32_t) {
    const Lists& of = *static_cast<Lists*>(context);
    write_head(of.b, of.s, of.layer_idx, static_cast<int32_t>(h));
  };
  b.backend.table->run(b.backend.self, kHeads, write, &lists);
}

void attend(Bench& b) {
  if (!b.backend.table->attend(b.backend.self, b.jobs.data(), kHeads).ok()) std::abort();
}

// Reads a share of the rows of one head, K and V, and prefetches every cache line.
void read_rows(void* context, int64_t task_idx, int32_t) {
  constexpr int64_t kAhead = 16;
  Bench& b = *static_cast<Bench*>(context);
  const AttendJob& job = b.jobs[static_cast<size_t>(task_idx / kShares)];
  const int64_t begin = job.n_runs * (task_idx % kShares) / kShares, end = job.n_runs * (task_idx % kShares + 1) / kShares;
  uint64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    const KvRun &run = job.runs[i], &ahead = job.runs[std::min(i + kAhead, end - 1)];
    for (int64_t at = 0; at + 64 <= b.codes; at += 64) {
      for (const void* row : {ahead.k, ahead.v}) __builtin_prefetch(static_cast<const uint8_t*>(row) + at);
      for (const void* row : {run.k, run.v}) sum += static_cast<const uint8_t*>(row)[at];
    }
  }
  b.checksum += sum;
}

void add_selection(Bench& b, const std::string& name, double density, int64_t run_len) {
  Selection s{name, density, run_len, false, false, 0, 0, {}, {}, {}};
  const int64_t n_runs = b.n_keys / run_len;
  const auto wanted = static_cast<int64_t>(density * static_cast<double>(n_runs) + 0.5);
  for (uint64_t list = 0; list < kHeads; ++list) {
    s.firsts.push_back(draw(std::max<int64_t>(wanted, 1), n_runs, mix(b.selections.size() * kHeads + list)));
    for (int64_t& first : s.firsts.back()) first *= run_len;
  }
  s.n_keys = static_cast<int64_t>(s.firsts[0].size()) * run_len;
  b.selections.push_back(s);
}

void add_selections(Bench& b) {
  b.selections.push_back({"dense", 1.0, 0, false, false, 0, b.n_keys, {}, {}, {}});
  for (const int64_t run_len : {1, 16, 64, 128})
    for (const double density : {0.01, 0.05, 0.2})
      if (run_len <= b.n_keys)
        add_selection(b, run_len == 1 ? "tokens" : "pages of " + std::to_string(run_len), density, run_len);
  for (const double density : {0.01, 0.05, 0.2}) {
    add_selection(b, "read", density, 1);
    b.selections.back().only_read = true;
  }
  const double few = static_cast<double>(std::min(kFewCopied, b.n_keys / 2)) / static_cast<double>(b.n_keys);
  for (const double density : {few, 0.05, 0.2}) {
    add_selection(b, "copy", density, 1);
    Selection& s = b.selections.back();
    s.run_len = 0;
    s.copied = true;
    s.copy_at = b.n_keys + b.n_copied;
    b.n_copied += s.n_keys;
  }
}

void fill_head(const Bench& b, int64_t layer_idx, int32_t h) {
  const Planes planes = planes_of(b, layer_idx, h);
  const uint64_t seed = mix(static_cast<uint64_t>(layer_idx * kHeads + h));
  for (int64_t i = 0; i < b.n_keys; ++i) {
    write_row(b, planes.k, planes.k_scales, i, seed);
    write_row(b, planes.v, planes.v_scales, i, ~seed);
  }
  const auto copy = [](uint8_t* plane, int64_t to, int64_t from, int64_t row) {
    std::memcpy(plane + to * row, plane + from * row, static_cast<size_t>(row));
  };
  for (const Selection& s : b.selections) {
    if (!s.copied) continue;
    int64_t to = s.copy_at;
    for (const int64_t from : s.firsts[static_cast<size_t>(h + layer_idx) % kHeads]) {
      copy(planes.k, to, from, b.codes), copy(planes.k_scales, to, from, b.scales);
      copy(planes.v, to, from, b.codes), copy(planes.v_scales, to, from, b.scales);
      ++to;
    }
  }
}

int64_t cache_bytes() {
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? bytes : int64_t{32} << 20;
}

bool make(Bench& b, int32_t dtype, const Settings& settings) {
  b.n_keys = settings.n_keys;
  b.layer.n_q_heads = kHeads * kGroup, b.layer.n_kv_heads = kHeads, b.layer.group_size = kGroup;
  b.layer.k_head_dim = b.layer.v_head_dim = kDim;
  b.layer.k_type = b.layer.v_type = dtype;
  b.layer.sm_scale = 0.088f;
  b.codes = row_bytes(dtype, kDim), b.scales = scale_bytes(dtype, kDim);
  add_selections(b);
  if (!settings.only.empty())
    std::erase_if(b.selections,
                  [&](const Selection& s) { return s.name != "dense" && s.name != "read" && s.name != settings.only; });
  const int64_t layer_bytes = 2 * kHeads * (plane_bytes(b, b.codes) + plane_bytes(b, b.scales));
  const int64_t available = int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE) / 2;
  b.n_layers = std::max<int64_t>(kMinLayers, 8 * cache_bytes() / layer_bytes + 1);
  if (settings.n_rounds == 0) b.n_layers = 1;
  b.n_layers = std::max<int64_t>(1, std::min(b.n_layers, available / layer_bytes));
  b.n_bytes = round_up(b.n_layers * layer_bytes, kHugePage) + kHugePage;
  b.mapping = mmap(nullptr, static_cast<size_t>(b.n_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (b.mapping == MAP_FAILED) return false;
  madvise(b.mapping, static_cast<size_t>(b.n_bytes), MADV_HUGEPAGE);
  b.memory =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(b.mapping) + kHugePage - 1) & ~uintptr_t{kHugePage - 1});
  b.noise.resize(1 << 20), b.q.resize(kHeads * kGroup * kDim), b.o.resize(b.q.size()), b.lse.resize(kHeads * kGroup);
  for (size_t i = 0; i < b.noise.size(); ++i) b.noise[i] = static_cast<float>(mix(i) >> 40) / 8388608.0f - 1.0f;
  for (size_t i = 0; i < b.q.size(); ++i) b.q[i] = 4.0f * b.noise[i];
  b.runs.resize(kHeads), b.jobs.resize(kHeads);
  for (size_t h = 0; h < kHeads; ++h) {
    AttendJob& job = b.jobs[h];
    job.layer = &b.layer, job.q = b.q.data() + h * kGroup * kDim, job.n_rows = kGroup;
    job.o = b.o.data() + h * kGroup * kDim, job.lse = b.lse.data() + h * kGroup;
  }
  for (int64_t l = 0; l < b.n_layers; ++l)
    for (int32_t h = 0; h < kHeads; ++h) fill_head(b, l, h);
  return true;
}

// Attention of one query row in double precision.
struct Truth {
  double sum = 0.0, lse = 0.0;
  std::vector<double> o = std::vector<double>(kDim, 0.0);

  void add(const float* q, const float* k, const float* v, double sm_scale) {
    double logit = 0.0;
    for (int32_t i = 0; i < kDim; ++i) logit += double{q[i]} * double{k[i]};
    const double weight = std::exp(logit * sm_scale);  // logits are small
    sum += weight;
    for (size_t i = 0; i < kDim; ++i) o[i] += weight * double{v[i]};
  }
};

// Returns the wrong result, or "". Finds keys by their number, not by the runs.
std::string check_head(const Bench& b, const Selection& s, int32_t h) {
  const Planes planes = planes_of(b, 0, h);
  const auto read = [&](const uint8_t* codes, const uint8_t* scales, int64_t key, float* to) {
    b.backend.table->to_f32(b.backend.self, b.layer.k_type, codes + key * b.codes, scales + key * b.scales, to, kDim);
  };
  std::vector<int64_t> keys;
  for (int64_t i = 0; s.firsts.empty() && i < s.n_keys; ++i) keys.push_back(i);
  if (!s.firsts.empty())
    for (const int64_t first : s.firsts[static_cast<size_t>(h)])
      for (int64_t i = 0; i < std::max<int64_t>(s.run_len, 1); ++i) keys.push_back(first + i);
  std::vector<Truth> truths(kGroup);
  float k[kDim], v[kDim];
  const float* q = b.q.data() + h * kGroup * kDim;
  for (const int64_t key : keys) {
    read(planes.k, planes.k_scales, key, k);
    read(planes.v, planes.v_scales, key, v);
    for (size_t r = 0; r < kGroup; ++r) truths[r].add(q + r * kDim, k, v, double{b.layer.sm_scale});
  }
  for (size_t r = 0; r < kGroup; ++r) {
    const size_t row = static_cast<size_t>(h) * kGroup + r;
    const double lse = std::log(truths[r].sum);
    if (!(std::fabs(double{b.lse[row]} - lse) <= 1e-5 * (1.0 + std::fabs(lse)))) return "lse of row " + std::to_string(row);
    for (size_t i = 0; i < kDim; ++i)
      if (!(std::fabs(double{b.o[row * kDim + i]} - truths[r].o[i] / truths[r].sum) <= 1e-5))
        return "o of row " + std::to_string(row);
  }
  return "";
}

bool check(Bench& b) {
  for (const Selection& s : b.selections) {
    if (s.only_read) continue;
    write_runs(b, s, 0);
    attend(b);
    for (int32_t h = 0; h < kHeads; ++h) {
      const std::string wrong = check_head(b, s, h);
      if (wrong.empty()) continue;
      std::fprintf(stderr, "%s, %s, density %.3f: %s is wrong\n", find_dtype(b.layer.k_type)->name, s.name.c_str(),
                   s.density, wrong.c_str());
      return false;
    }
  }
  return true;
}

// Times every selection over all layers. Returns false if a thread waited for a core.
bool run_round(Bench& b, int32_t n_threads, std::vector<double>& ns) {
  bool undisturbed = true;
  ns.clear();
  for (const Selection& s : b.selections) {
    double wall = 0.0;
    for (int64_t l = 0; l < b.n_layers; ++l) {
      write_runs(b, s, l);
      Stretch stretch;
      if (s.only_read)
        b.backend.table->run(b.backend.self, kHeads * kShares, read_rows, &b);
      else
        attend(b);
      stretch.end();
      wall += stretch.wall;
      undisturbed = undisturbed && stretch.was_undisturbed(n_threads);
    }
    ns.push_back(wall);
  }
  return undisturbed;
}

void measure(Bench& b, int32_t n_threads, int n_rounds) {
  std::vector<double> ns;
  int n_kept = 0;
  b.backend.table->wake(b.backend.self);
  for (int i = 0; n_kept < n_rounds; ++i) {
    const bool undisturbed = run_round(b, n_threads, ns);
    const int n_left = 4 * n_rounds - i;  // on a busy machine the last rounds count even if they were disturbed
    if (i == 0 || (!undisturbed && n_left > n_rounds - n_kept)) continue;
    ++n_kept;
    for (size_t s = 0; s < ns.size(); ++s) {
      const double keys = static_cast<double>(b.selections[s].n_keys) / static_cast<double>(b.n_keys);
      b.selections[s].ns.push_back(ns[s]);
      b.selections[s].shares.push_back(keys * ns[0] / ns[s]);
    }
  }
  b.backend.table->rest(b.backend.self);
}

void print(const Bench& b, const Settings& settings) {
  const double caches = static_cast<double>(b.n_bytes) / static_cast<double>(cache_bytes());
  const char* type = find_dtype(b.layer.k_type)->name;
  if (settings.csv)
    std::printf("type,selection,density,keys,layers,memory_caches,median_us,gbps,share_of_dense\n");
  else
    std::printf(
        "%s: %lld keys, %lld layers in turns, %.1f last-level caches%s\n\n| selection | density | keys | us | GB/s | share "
        "of dense |\n"
        "|---|--:|--:|--:|--:|--:|\n",
        type, static_cast<long long>(b.n_keys), static_cast<long long>(b.n_layers), caches,
        caches < 8.0 ? " (fewer than 8: there is not enough memory)" : "");
  for (const Selection& s : b.selections) {
    const double ns = median(s.ns) / static_cast<double>(b.n_layers);
    const double gbps = static_cast<double>(2 * kHeads * s.n_keys * (b.codes + b.scales)) / ns;
    if (settings.csv)
      std::printf("%s,%s,%.4f,%lld,%lld,%.1f,%.2f,%.3f,%.4f\n", type, s.name.c_str(), s.density,
                  static_cast<long long>(s.n_keys), static_cast<long long>(b.n_layers), caches, ns / 1e3, gbps,
                  median(s.shares));
    else
      std::printf("| %-12s | %5.1f %% | %6lld | %9.1f | %5.2f | %.2f |\n", s.name.c_str(), 100.0 * s.density,
                  static_cast<long long>(s.n_keys), ns / 1e3, gbps, median(s.shares));
  }
}

bool bench_type(int32_t dtype, const Settings& settings) {
  Bench b;
  if (!create_cpu_backend(settings.cpu, &b.backend).ok() || !make(b, dtype, settings)) return false;
  const bool ok = check(b);
  if (ok && settings.n_rounds > 0) {
    measure(b, settings.cpu.n_threads, settings.n_rounds);
    print(b, settings);
  }
  b.backend.table->destroy(b.backend.self);
  munmap(b.mapping, static_cast<size_t>(b.n_bytes));
  return ok;
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) {
  using namespace tandem;
  test::Settings settings;
  settings.cpu.n_threads = argc > 1 ? std::atoi(argv[1]) : static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN));
  settings.cpu.isa = argc > 2 && *argv[2] ? argv[2] : nullptr;
  if (argc > 3) settings.n_keys = std::atoll(argv[3]);
  const char* type = argc > 4 ? argv[4] : "bf16";
  if (argc > 5) settings.n_rounds = std::atoi(argv[5]);
  settings.csv = argc > 6 && std::strcmp(argv[6], "csv") == 0;
  if (argc > 7) settings.only = argv[7];
  if (settings.cpu.n_threads < 1 || settings.n_keys < 1 || settings.n_rounds < 0) {
    std::fprintf(stderr, "sparse_bench [threads] [isa] [keys] [type] [rounds] [md|csv] [selection]\n");
    return 2;
  }
  bool ok = true, any = false;
  for (const DtypeInfo& dtype : kDtypes) {
    if (!is_key_type(dtype.dtype) || (*type != '\0' && std::strcmp(type, dtype.name) != 0)) continue;
    ok = test::bench_type(dtype.dtype, settings) && ok;
    any = true;
  }
  if (!any) std::fprintf(stderr, "no storage type \"%s\"\n", type);
  return ok && any ? 0 : 1;
}
