// SPDX-License-Identifier: MIT
// Tokens per second of decode steps that go through a layer's batches one after the other (KVPR's column-by-column
// schedule). All weights, keys and hidden states are in host memory.
//
//   throughput_bench MODULE [threads [lengths [geometries [batches [batch [routes [orders [buffers]]]]]]]]   lists with
//   commas
//
// Four decoder layers of OPT-6.7B or OPT-13B in f16. A step has `batches` of `batch` sequences of one length, with one new
// token each. Weights go through tandem_weights, and W_K and W_V through tandem_session_use_weights. `orders`: these two
// come "first" of a layer's weights or "last" of its attention's (KVPR's ablation). `buffers`: the number of layers whose
// weights fit on the device. Compared with full streaming by plain CUDA calls (full_streaming.cuh), with room for two
// layers. Steps follow each other, and the time includes copies that run ahead for later steps. Before anything is timed,
// all hidden states after a step are compared with the CPU's.
#include "full_streaming.cuh"

using namespace tandem::test;

namespace {

constexpr int kLayers = 4, kSteps = 4, kRounds = 5, kWarm = 1;
enum Part { kK, kV, kQo, kMlp, kParts };

struct Wanted {
  int64_t length, n_batches, batch;
  double buffer_layers;
  bool k_v_first;

  int block(int l, Part part) const {
    constexpr int kLast[kParts] = {1, 2, 0, 3};
    return kParts * l + (k_v_first ? part : kLast[part]);
  }
};

// The cache of all sequences, and the weights of all layers.
class Columns {
 public:
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_weights* weights = nullptr;
  std::vector<int64_t> ids, ones;

  Columns(tandem_engine* on, OptLayer& layer, const HostWeights& host, const Wanted& wanted) : engine_(on), wanted_(wanted) {
    const Geometry& g = layer.geometry;
    tandem_layer_projection projection = projection_of(layer);
    tandem_layer_options options = TANDEM_LAYER_OPTIONS_INIT;
    options.n_q_heads = options.n_kv_heads = g.n_heads;
    options.k_head_dim = kHeadDim;
    options.projection = &projection;
    const std::vector<tandem_layer_options> layers(kLayers, options);
    TANDEM(tandem_model_create, &model, layers.data(), kLayers);
    const tandem_cache_options cache_options = options_of_cache();
    TANDEM(tandem_cache_create, &cache, engine_, model, &cache_options);
    for (int64_t i = 0; i < wanted.n_batches * wanted.batch; ++i) fill(layer, i);
    ones.assign(static_cast<size_t>(wanted.batch), 1);
    create_weights(layer, host);
  }
  Columns(const Columns&) = delete;
  ~Columns() {
    tandem_weights_release(weights);
    tandem_cache_release(cache);
    tandem_model_release(model);
  }
  static tandem_cache_options options_of_cache() {
    tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
    options.k_type = options.x_type = TANDEM_F16;
    return options;
  }
  void truncate(int64_t n) {
    for (const int64_t id : ids) TANDEM(tandem_sequence_truncate, cache, id, n);
  }
  // Returns the bytes of one call's work space and of all windows.
  int64_t planned_bytes(const tandem_session_options& options) const {
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    const tandem_cache_options cache_options = options_of_cache();
    const std::vector<int64_t> lengths(static_cast<size_t>(wanted_.batch), wanted_.length);
    TANDEM(tandem_plan_memory, &plan, engine_, model, &cache_options, &options, lengths.data(), wanted_.batch);
    return wanted_.n_batches * plan.device_window_bytes + plan.device_work_bytes + plan.device_stream_bytes +
           plan.device_weights_bytes;
  }
  int64_t held_bytes() const {
    tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
    TANDEM(tandem_cache_get_stats, &stats, cache);
    return stats.device_window_bytes + stats.device_work_bytes + stats.device_stream_bytes + stats.device_weights_bytes;
  }

 private:
  void fill(OptLayer& layer, int64_t i) {
    const int32_t n_heads = layer.geometry.n_heads, hidden = layer.geometry.hidden;
    const int64_t n = wanted_.length - 1, first = first_token(i), row = int64_t{n_heads} * kHeadDim;
    int64_t id = 0;
    TANDEM(tandem_sequence_create, &id, cache);
    TANDEM(tandem_sequence_reserve, cache, id, n + 64);
    ids.push_back(id);
    const tandem_tensor k = half_tensor(layer.k.data() + first * row, {n, n_heads, kHeadDim}, false),
                        v = half_tensor(layer.v.data() + first * row, {n, n_heads, kHeadDim}, false),
                        x = half_tensor(layer.x.data() + first * hidden, {n, hidden}, false);
    for (int l = 0; l < kLayers; ++l) TANDEM(tandem_sequence_append_x, cache, id, l, &k, &v, &x, nullptr);
  }
  void create_weights(const OptLayer& layer, const HostWeights& host) {
    const std::vector<__half>* parts[kParts] = {&layer.w_k, &layer.w_v, &host.qo, &host.mlp};
    std::vector<const void*> data(kLayers * kParts);
    std::vector<int64_t> n_bytes(data.size());
    for (int l = 0; l < kLayers; ++l)
      for (const Part part : {kK, kV, kQo, kMlp}) {
        const auto b = static_cast<size_t>(wanted_.block(l, part));
        data[b] = parts[part]->data();
        n_bytes[b] = static_cast<int64_t>(parts[part]->size()) * 2;
      }
    tandem_weights_options options = TANDEM_WEIGHTS_OPTIONS_INIT;
    options.buffer_bytes =
        static_cast<int64_t>(wanted_.buffer_layers * static_cast<double>(layer_weight_bytes(layer.geometry)));
    TANDEM(tandem_weights_create, &weights, engine_, data.data(), n_bytes.data(), static_cast<int32_t>(data.size()),
           &options);
  }

  tandem_engine* engine_;
  Wanted wanted_;
};

// Runs steps on one of the library's routes.
class Stepper {
 public:
  tandem_session* session = nullptr;

  Stepper(Columns& columns, OptStep& step, const Wanted& wanted, const tandem_session_options& options)
      : on_(columns), step_(step), wanted_(wanted) {
    TANDEM(tandem_session_create, &session, on_.cache, &options);
    for (int l = 0; l < kLayers; ++l)
      TANDEM(tandem_session_use_weights, session, l, on_.weights, wanted.block(l, kK), wanted.block(l, kV));
  }
  Stepper(const Stepper&) = delete;
  ~Stepper() { tandem_session_release(session); }

  void step() {
    step_.reset();
    for (int l = 0; l < kLayers; ++l) {
      if (!wanted_.k_v_first) use(l, kQo, &there_.qo);
      use(l, kK, &there_.k);
      use(l, kV, &there_.v);
      for (int64_t b = 0; b < wanted_.n_batches; ++b) {
        step_.make_k_v(b, there_);
        if (b == 0 && wanted_.k_v_first) use(l, kQo, &there_.qo);
        step_.make_q(there_);
        attend(l, b);
        step_.add_attention(b, there_);
        if (b == 0) use(l, kMlp, &there_.mlp);
        step_.add_mlp(b, there_);
      }
      for (const Part part : {kK, kV, kQo, kMlp})
        TANDEM(tandem_weights_done, on_.weights, wanted_.block(l, part), step_.stream);
    }
  }

 private:
  void use(int l, Part part, const __half** there) {
    void* data = nullptr;
    TANDEM(tandem_weights_use, &data, on_.weights, wanted_.block(l, part), step_.stream);
    *there = static_cast<const __half*>(data);
  }
  void attend(int l, int64_t b) {
    const tandem_tensor x = half_tensor(step_.x(b), {wanted_.batch, step_.geometry.hidden}, true);
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = l;
    args.n_sequences = static_cast<int32_t>(wanted_.batch);
    args.sequences = on_.ids.data() + b * wanted_.batch;
    args.q_lens = on_.ones.data();
    args.q = &step_.views[0];
    args.k = &step_.views[1];
    args.v = &step_.views[2];
    args.o = &step_.views[3];
    args.x = &x;
    args.stream = step_.stream;
    TANDEM(tandem_attend, session, &args);
  }

  Columns& on_;
  OptStep& step_;
  Wanted wanted_;
  WeightsThere there_;
};

// Returns milliseconds per step. prepare: runs before each round, untimed.
template <class Step, class Prepare>
double time_steps(Step step, Prepare prepare) {
  std::vector<double> times;
  for (int i = 0; i < kWarm + kRounds; ++i) {
    prepare();
    must(cudaDeviceSynchronize());
    const auto begin = Clock::now();
    for (int s = 0; s < kSteps; ++s) step();
    must(cudaDeviceSynchronize());  // waits for copies that run ahead, too
    if (i >= kWarm) times.push_back(us_since(begin) * 1e-3 / kSteps);
  }
  return median(times);
}

// Returns the relative distance.
double check(const char* what, const std::vector<__half>& got, const std::vector<__half>& wanted) {
  constexpr double kMostDistance = 0.01;
  const double error = distance(got, wanted);
  if (error < kMostDistance) return error;
  std::printf("%s: relative distance %.2e from the CPU's answer\n", what, error);
  std::exit(1);
}

// Returns the predicted ms of a step, on average over consecutive steps: the time of the bus, the device or the host,
// whichever is longest.
double predicted_ms(tandem_session* session, const Wanted& wanted, const Geometry& g, double bus_bytes_per_us) {
  const auto n = static_cast<double>(wanted.n_batches);
  const double weights_ns = static_cast<double>(layer_weight_bytes(g)) / bus_bytes_per_us * 1e3;
  double sum_ns = 0.0;
  for (int s = 0; s < kSteps; ++s) {
    tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
    const std::vector<int64_t> lengths(static_cast<size_t>(wanted.batch), wanted.length + s);
    TANDEM(tandem_plan, &plan, session, 0, lengths.data(), nullptr, wanted.batch);
    const double bus_ns = weights_ns + n * static_cast<double>(plan.bus_ns);
    sum_ns += std::max({bus_ns, n * static_cast<double>(plan.device_ns), n * static_cast<double>(plan.host_ns)});
  }
  return kLayers * sum_ns / kSteps * 1e-6;
}

struct Bench {
  tandem_engine* engine;
  const OpenDevice& device;
  double bus_bytes_per_us;
  std::vector<std::string> routes, orders;
};

tandem_session_options options_of(const char* route) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = 16;
  options.route = route;
  return options;
}

double time_route(const Bench& bench, Columns& columns, OptStep& step, const Wanted& wanted, const std::string& route,
                  const std::vector<__half>& answer) {
  const tandem_session_options options = options_of(route.c_str());
  Stepper stepper(columns, step, wanted, options);
  stepper.step();
  const double error = check(route.c_str(), step.result(), answer);
  // Never truncates below the prompt: rows that steps then appended there would differ from the keys that the next route is
  // checked with.
  const double ms = time_steps([&] { stepper.step(); }, [&] { columns.truncate(wanted.length - 1); });
  const double predicted = predicted_ms(stepper.session, wanted, step.geometry, bench.bus_bytes_per_us);
  tandem_weights_stats weights = TANDEM_WEIGHTS_STATS_INIT;
  TANDEM(tandem_weights_get_stats, &weights, columns.weights);
  std::printf("  %-9s w_k, w_v %-5s %8.2f ms a step (predicted %.2f), %8.1f tokens/s, blocks ahead %.3f", route.c_str(),
              wanted.k_v_first ? "first" : "last", ms, predicted / ms,
              static_cast<double>(wanted.n_batches * wanted.batch) / ms * 1e3,
              static_cast<double>(weights.n_ahead) / static_cast<double>(weights.n_streamed_uses));
  std::printf(", error %.0e, device memory %.1f MB (planned %.4f) and %.1f for weights\n", error,
              static_cast<double>(columns.held_bytes()) * 1e-6,
              static_cast<double>(columns.planned_bytes(options)) / static_cast<double>(columns.held_bytes()),
              static_cast<double>(weights.device_bytes) * 1e-6);
  std::fflush(stdout);
  columns.truncate(wanted.length - 1);
  stepper.step();  // checks a step after consecutive steps
  check(route.c_str(), step.result(), answer);
  columns.truncate(wanted.length - 1);
  return ms;
}

void measure(const Bench& bench, OptLayer& layer, const HostWeights& host, Wanted wanted) {
  OptStep step(layer, wanted.batch, wanted.n_batches);
  std::vector<__half> answer;
  double streaming = 0.0, best = INFINITY;
  for (const std::string& order : bench.orders) {
    wanted.k_v_first = order == "first";
    Columns columns(bench.engine, layer, host, wanted);
    if (answer.empty()) {
      Stepper on_host(columns, step, wanted, options_of("host"));
      on_host.step();
      answer = step.result();
      columns.truncate(wanted.length - 1);
    }
    if (streaming == 0.0) {
      FullStreaming rival(bench.device, layer, host, &step, kLayers, wanted.length);
      rival.step();
      check("full streaming", step.result(), answer);
      streaming = time_steps([&] { rival.step(); }, [] {});
      std::printf(
          "%s, %lld x %lld sequences, %lld tokens, %.1f layers' weights: full streaming %.2f ms a step, %.1f tokens/s\n",
          layer.geometry.name, static_cast<long long>(wanted.n_batches), static_cast<long long>(wanted.batch),
          static_cast<long long>(wanted.length), wanted.buffer_layers, streaming,
          static_cast<double>(wanted.n_batches * wanted.batch) / streaming * 1e3);
    }
    for (const std::string& route : bench.routes)
      best = std::min(best, time_route(bench, columns, step, wanted, route, answer));
  }
  std::printf("  best %.2f ms, %.2f times the tokens of full streaming\n", best, streaming / best);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "throughput_bench MODULE [threads [lengths [geometries [batches [batch [routes [orders [buffers]]]]]]]]\n");
    return 2;
  }
  const auto word = [&](int i, const char* otherwise) { return argc > i ? argv[i] : otherwise; };
  const OpenDevice device(argv[1]);
  Bench bench{make_engine(argv[1], std::atoi(word(2, "0"))), device, 0.0, words_of(word(7, "recompute")),
              words_of(word(8, "first"))};
  {
    constexpr int64_t kBytes = int64_t{1} << 28;
    const Pinned from(kBytes);
    const OnDevice<char> to(std::vector<char>(kBytes, 0));
    bench.bus_bytes_per_us = time_bus(from, kBytes, reinterpret_cast<std::byte*>(to.data));
    std::printf("the bus alone: %.1f GB/s\n", bench.bus_bytes_per_us * 1e-3);
  }
  const std::vector<std::string> names = words_of(word(4, "opt-6.7b,opt-13b"));
  for (const Geometry& geometry : kGeometries) {
    if (std::find(names.begin(), names.end(), geometry.name) == names.end()) continue;
    OptLayer layer(geometry);
    const HostWeights host(geometry);
    for (const int64_t length : numbers_of(word(3, "128,256,512,1024")))
      for (const int64_t batch : numbers_of(word(6, "32")))
        for (const std::string& buffer : words_of(word(9, "2")))
          measure(bench, layer, host, {length, std::atoll(word(5, "8")), batch, std::atof(buffer.c_str()), true});
  }
  tandem_engine_release(bench.engine);
  return 0;
}
