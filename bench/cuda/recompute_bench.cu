// SPDX-License-Identifier: MIT
// Decode steps over caches in host memory, with keys streamed or recomputed from hidden states: milliseconds of an attention
// layer.
//
//   recompute_bench MODULE [threads [lengths [shares [buffers [geometries [batch [window [layers [x_type]]]]]]]]]
//     lists with commas; buffers in MiB; x_type: f16, q8_0, q4_0 or q4_64
//
// A step is a call for each layer, one after the other as in a model. The bench prints the time of one of them. "alone" is
// the time of a call without other calls before or after it, so no copy is ahead of its queries.
//
// Attention layers of OPT-6.7B and OPT-13B (32 and 40 heads of 128, hidden states of 4,096 and 5,120; layer norm, biases, no
// RoPE) in f16. A batch of sequences of one length has one new token each. The bench's own kernel makes K and V of the cache
// in double precision, from random hidden states and weights. Before anything is timed, the outputs of a route are compared
// with the CPU's. The appended tokens are truncated away after each call, untimed.
#include "opt_layer.cuh"

using namespace tandem::test;

namespace {

constexpr int kRounds = 9, kWarm = 2;

class Sequences {
 public:
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  std::vector<int64_t> ids, ones;
  int64_t length = 0;
  int32_t n_layers = 1;

  Sequences(tandem_engine* engine, OptLayer& layer, int64_t batch, int64_t most, int32_t layers, int32_t x_type)
      : length(most), n_layers(layers) {
    const Geometry& g = layer.geometry;
    tandem_layer_projection projection = projection_of(layer);
    projection.w_k = layer.w_k.data();
    projection.w_v = layer.w_v.data();
    tandem_layer_options options = TANDEM_LAYER_OPTIONS_INIT;
    options.n_q_heads = options.n_kv_heads = g.n_heads;
    options.k_head_dim = kHeadDim;
    options.projection = &projection;
    const std::vector<tandem_layer_options> alike(static_cast<size_t>(n_layers), options);
    TANDEM(tandem_model_create, &model, alike.data(), n_layers);
    tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
    cache_options.k_type = TANDEM_F16;
    cache_options.x_type = x_type;
    TANDEM(tandem_cache_create, &cache, engine, model, &cache_options);
    for (int64_t i = 0; i < batch; ++i) {
      int64_t id = 0;
      TANDEM(tandem_sequence_create, &id, cache);
      TANDEM(tandem_sequence_reserve, cache, id, most + 64);
      ids.push_back(id);
      const int64_t first = first_token(i), row = int64_t{g.n_heads} * kHeadDim;
      for (int64_t t = 0; t < most; t += kUniqueTokens) {
        const int64_t n = std::min(kUniqueTokens, most - t);
        const tandem_tensor k = half_tensor(layer.k.data() + first * row, {n, g.n_heads, kHeadDim}, false),
                            v = half_tensor(layer.v.data() + first * row, {n, g.n_heads, kHeadDim}, false),
                            x = half_tensor(layer.x.data() + first * g.hidden, {n, g.hidden}, false);
        for (int32_t l = 0; l < n_layers; ++l) TANDEM(tandem_sequence_append_x, cache, id, l, &k, &v, &x, nullptr);
      }
    }
    ones.assign(static_cast<size_t>(batch), 1);
  }
  Sequences(const Sequences&) = delete;
  ~Sequences() {
    tandem_cache_release(cache);
    tandem_model_release(model);
  }
  void truncate(int64_t n) {
    for (const int64_t id : ids) TANDEM(tandem_sequence_truncate, cache, id, n);
    length = n;
  }
};

// New tokens of all sequences, on the device.
struct Step {
  OnDevice<__half> q, k, v, x, o;
  std::vector<__half> before;
  tandem_tensor views[5];

  Step(const OptLayer& layer, int64_t batch)
      : q(random_halves(batch * layer.geometry.n_heads * kHeadDim, 1.0f, 8)),
        k(std::vector<__half>(layer.k.begin(), layer.k.begin() + batch * layer.geometry.n_heads * kHeadDim)),
        v(std::vector<__half>(layer.v.begin(), layer.v.begin() + batch * layer.geometry.n_heads * kHeadDim)),
        x(std::vector<__half>(layer.x.begin(), layer.x.begin() + batch * layer.geometry.hidden)),
        o(random_halves(batch * layer.geometry.n_heads * kHeadDim, 1.0f, 9)),
        before(static_cast<size_t>(batch * layer.geometry.n_heads * kHeadDim)) {
    const Geometry& g = layer.geometry;
    __half* rows[] = {q.data, k.data, v.data, o.data};
    for (int i = 0; i < 4; ++i) views[i] = half_tensor(rows[i], {batch, g.n_heads, kHeadDim}, true);
    views[4] = half_tensor(x.data, {batch, g.hidden}, true);
  }
  std::vector<__half> output() const {
    std::vector<__half> rows(before.size());
    must(cudaMemcpy(rows.data(), o.data, rows.size() * 2, cudaMemcpyDeviceToHost));
    return rows;
  }
};

struct Measured {
  double us = 0.0, alone_us = 0.0, bytes = 0.0, x_bytes = 0.0;  // for a layer
  double planned_us = 0.0, bus_us = 0.0, device_us = 0.0;       // by the plan
  std::vector<__half> o;
};

Measured time_route(Sequences& on, const Step& step, tandem_session_options options) {
  tandem_session* session = nullptr;
  TANDEM(tandem_session_create, &session, on.cache, &options);
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = static_cast<int32_t>(on.ids.size());
  args.sequences = on.ids.data();
  args.q_lens = on.ones.data();
  args.q = &step.views[0];
  args.k = &step.views[1];
  args.v = &step.views[2];
  args.o = &step.views[3];
  args.x = &step.views[4];
  must(cudaMemset(step.o.data, 0xff, step.before.size() * 2));
  Measured measured;
  const auto time_calls = [&](int32_t n_calls) {
    const auto begin = Clock::now();
    for (args.layer_idx = 0; args.layer_idx < n_calls; ++args.layer_idx) TANDEM(tandem_attend, session, &args);
    must(cudaDeviceSynchronize());
    return us_since(begin) / n_calls;
  };
  std::vector<double> alone, times;
  for (int i = 0; i < kWarm + kRounds; ++i) {
    alone.push_back(time_calls(1));
    if (i == 0) measured.o = step.output();
    on.truncate(on.length);
  }
  tandem_session_stats before = TANDEM_SESSION_STATS_INIT, stats = TANDEM_SESSION_STATS_INIT;
  TANDEM(tandem_session_get_stats, &before, session);
  for (int i = 0; i < kWarm + kRounds; ++i) {
    times.push_back(time_calls(on.n_layers));
    on.truncate(on.length);
  }
  TANDEM(tandem_session_get_stats, &stats, session);
  tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
  const std::vector<int64_t> lengths(on.ids.size(), on.length + 1);
  // The first call of a row has no work before it during which copies could run ahead.
  for (int32_t l = 0; l < on.n_layers; ++l) {
    TANDEM(tandem_plan, &plan, session, l, lengths.data(), nullptr, static_cast<int64_t>(lengths.size()));
    measured.planned_us += static_cast<double>(plan.total_ns) * 1e-3 / on.n_layers;
    measured.bus_us += static_cast<double>(plan.bus_ns) * 1e-3 / on.n_layers;
    measured.device_us += static_cast<double>(plan.device_ns) * 1e-3 / on.n_layers;
  }
  tandem_session_release(session);
  measured.us = median({times.begin() + kWarm, times.end()});
  measured.alone_us = median({alone.begin() + kWarm, alone.end()});
  const double n_calls = on.n_layers * (kWarm + kRounds);
  measured.x_bytes = static_cast<double>(stats.streamed_x_bytes - before.streamed_x_bytes) / n_calls;
  measured.bytes = measured.x_bytes + static_cast<double>(stats.streamed_kv_bytes - before.streamed_kv_bytes) / n_calls;
  return measured;
}

struct Wanted {
  std::vector<double> shares;
  std::vector<int64_t> buffers;  // MiB
  int64_t window;
};

void measure(Sequences& on, const Step& step, const Geometry& g, const Wanted& wanted) {
  constexpr double kMostDistance = 0.01;
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = wanted.window;
  options.route = "host";
  const Measured host = time_route(on, step, options);
  std::printf("%s x %zu, %lld tokens: host %.3f ms\n", g.name, on.ids.size(), static_cast<long long>(on.length),
              host.us * 1e-3);
  const auto time_checked = [&] {
    Measured got = time_route(on, step, options);
    const double error = distance(got.o, host.o);
    if (!(error < kMostDistance)) {
      std::printf("%s: relative distance %.2e from the CPU's answer\n", options.route, error);
      std::exit(1);
    }
    std::printf(
        "\n    %-9s %.2f %7.3f ms (planned %.2f: bus %.3f, device %.3f), alone %.3f, %5.1f GB/s, %.0f MB of x, error %.0e",
        options.route, options.recompute_share, got.us * 1e-3, got.planned_us / got.us, got.bus_us * 1e-3,
        got.device_us * 1e-3, got.alone_us * 1e-3, got.bytes / got.us * 1e-3, got.x_bytes * 1e-6, error);
    return got.us;
  };
  double best_stream = INFINITY, best = INFINITY;
  for (const int64_t buffer : wanted.buffers) {
    options.stream_buffer_bytes = buffer << 20;
    options.route = "stream";
    options.recompute_share = 0.0;
    std::printf("  %3lld MiB", static_cast<long long>(buffer));
    best_stream = std::min(best_stream, time_checked());
    options.route = "recompute";
    for (const double share : wanted.shares) {
      options.recompute_share = share;
      best = std::min(best, time_checked());
    }
    options.route = "auto";
    options.recompute_share = 0.0;
    time_checked();
    std::printf("\n");
  }
  std::printf("  best %.3f ms, %.1f %% below streaming everything (%.3f ms)\n", best * 1e-3,
              100.0 * (1.0 - best / best_stream), best_stream * 1e-3);
  std::fflush(stdout);
}

int32_t dtype_of(const std::string& name) {
  for (int32_t dtype = 1; tandem_dtype_name(dtype) != nullptr; ++dtype)
    if (name == tandem_dtype_name(dtype)) return dtype;
  std::fprintf(stderr, "recompute_bench: %s is no storage type\n", name.c_str());
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(
        stderr,
        "recompute_bench MODULE [threads [lengths [shares [buffers [geometries [batch [window [layers [x_type]]]]]]]]]\n");
    return 2;
  }
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  std::vector<int64_t> lengths = numbers_of(argc > 3 ? argv[3] : "128,256,512,1024");
  std::sort(lengths.rbegin(), lengths.rend());
  Wanted wanted;
  for (const std::string& word : words_of(argc > 4 ? argv[4] : "1,0.9,0.8"))
    wanted.shares.push_back(std::atof(word.c_str()));
  wanted.buffers = numbers_of(argc > 5 ? argv[5] : "16");
  const std::vector<std::string> names = words_of(argc > 6 ? argv[6] : "opt-6.7b,opt-13b");
  const int64_t batch = argc > 7 ? std::atoll(argv[7]) : 64;
  wanted.window = argc > 8 ? std::atoll(argv[8]) : 16;
  const int32_t n_layers = argc > 9 ? std::atoi(argv[9]) : 4, x_type = argc > 10 ? dtype_of(argv[10]) : TANDEM_F16;
  for (const Geometry& geometry : kGeometries) {
    if (std::find(names.begin(), names.end(), geometry.name) == names.end()) continue;
    OptLayer layer(geometry, x_type);
    Sequences sequences(engine, layer, batch, lengths[0], n_layers, x_type);
    const Step step(layer, batch);
    for (const int64_t length : lengths) {
      sequences.truncate(length);
      measure(sequences, step, geometry, wanted);
    }
  }
  tandem_engine_release(engine);
  return 0;
}
