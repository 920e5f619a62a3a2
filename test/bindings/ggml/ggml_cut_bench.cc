// SPDX-License-Identifier: MIT
// The cost of Tandem's attention in a graph on ggml's CUDA backend, in decode steps of a stack of layers (32 / 8 heads of
// 128, f32 weights). Four ways are timed: no attention (a copy of q); the same graph cut at each layer, with nothing done
// there; Tandem's device in the cuts; and the node, which the scheduler puts on the CPU. First the outputs of the last two
// are compared with those of the CPU backend.
//
//   ggml_cut_bench /path/to/libtandem-cuda.so [layers] [keys] [steps]
#include <cuda_runtime_api.h>
#include <ggml-alloc.h>
#include <ggml-cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "ggml_world.h"

namespace {

using namespace ggml_test;

constexpr int64_t kDim = 128, kQHeads = 32, kKvHeads = 8, kHidden = kQHeads * kDim;
const char* module_path = nullptr;
int n_layers = 16, n_keys = 2048, n_steps = 64;

int32_t wait(void* stream) { return static_cast<int32_t>(cudaStreamSynchronize(static_cast<cudaStream_t>(stream))); }
bool only_cuts(ggml_tensor* node, bool ask, void*) { return !ask || tandem_ggml_marked(node) != nullptr; }

enum class Way { kCopy, kCut, kDevice, kNode };

std::unique_ptr<World> open_world(Way way) {
  tandem_engine_options engine = TANDEM_ENGINE_OPTIONS_INIT;
  if (way == Way::kDevice) engine.backend = "cuda", engine.backend_path = module_path;
  auto world = std::make_unique<World>(
      std::vector<tandem_layer_options>(static_cast<size_t>(n_layers), plain_layer(kQHeads, kKvHeads, kDim)),
      stored_as(TANDEM_F16), engine);
  tandem_ggml_options options = world->options();
  options.wait = way == Way::kDevice ? wait : nullptr;
  tandem_ggml* made = nullptr;
  assert_int_equal(tandem_ggml_create(&made, &options, nullptr), TANDEM_OK);
  world->state.reset(made);
  const tandem_test::Tensor k({n_keys, kKvHeads, kDim}, 1), v({n_keys, kKvHeads, kDim}, 2);
  for (int32_t layer = 0; layer < n_layers; ++layer) world->cache.append(world->sequences[0], layer, &k.view, &v.view);
  return world;
}

// All layers share their weights, because the cuts between products are what is measured.
class Stack {
 public:
  Stack(Way way, bool has_cuda) : way_(way), world_(open_world(way)) {
    if (has_cuda) {
      backends_.push_back(ggml_backend_cuda_init(0));
      if (backends_[0] == nullptr) std::exit(1);  // ggml has printed the reason
    }
    backends_.push_back(ggml_backend_cpu_init());
    weights_ = ggml_init({ggml_tensor_overhead() * 16, nullptr, true});
    for (ggml_tensor** weight : {&q_, &k_, &v_, &o_})
      *weight =
          ggml_new_tensor_2d(weights_, GGML_TYPE_F32, kHidden, (weight == &k_ || weight == &v_ ? kKvHeads : kQHeads) * kDim);
    data_ = ggml_backend_alloc_ctx_tensors(weights_, backends_[0]);
    int64_t seed = 10;
    for (ggml_tensor* weight : {q_, k_, v_, o_}) {
      std::vector<float> values(static_cast<size_t>(ggml_nelements(weight)));
      for (size_t i = 0; i < values.size(); ++i) values[i] = 0.05f * noise(static_cast<int64_t>(i), seed);
      ggml_backend_tensor_set(weight, values.data(), 0, ggml_nbytes(weight));
      ++seed;
    }
    scheduler_ = ggml_backend_sched_new(backends_.data(), nullptr, static_cast<int>(backends_.size()), 2048, false, true);
    if (way == Way::kCut) ggml_backend_sched_set_eval_callback(scheduler_, only_cuts, nullptr);
    if (way == Way::kDevice) ggml_backend_sched_set_eval_callback(scheduler_, tandem_ggml_eval, nullptr);
    make_graph();
  }
  Stack(const Stack&) = delete;
  ~Stack() {
    ggml_backend_sched_free(scheduler_);
    ggml_free(graph_ctx_);
    ggml_backend_buffer_free(data_);
    ggml_free(weights_);
    for (ggml_backend_t backend : backends_) ggml_backend_free(backend);
  }
  // Returns the microseconds of a step. If Tandem attends, its sequences then have one more token.
  double step(int64_t seed) {
    std::vector<float> x(kHidden);
    for (size_t i = 0; i < x.size(); ++i) x[i] = noise(static_cast<int64_t>(i), seed);
    const bool attends = way_ == Way::kDevice || way_ == Way::kNode;
    const Batch batch({0}, {1});
    const auto begin = std::chrono::steady_clock::now();
    if (attends) expect_ok(world_->state.get(), tandem_ggml_begin(world_->state.get(), &batch.view));
    ggml_backend_tensor_set(x_, x.data(), 0, x.size() * sizeof(float));
    assert_int_equal(ggml_backend_sched_graph_compute(scheduler_, graph_), GGML_STATUS_SUCCESS);
    if (attends) expect_ok(world_->state.get(), tandem_ggml_end(world_->state.get()));
    output.resize(kHidden);
    ggml_backend_tensor_get(last_, output.data(), 0, output.size() * sizeof(float));
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  }
  std::vector<float> output;

 private:
  ggml_tensor* attention(int32_t i, ggml_tensor* q, ggml_tensor* k, ggml_tensor* v) const {
    if (way_ == Way::kNode) return tandem_ggml_attend(graph_ctx_, world_->state.get(), i, q, k, v);
    ggml_tensor* node = tandem_ggml_attend_cut(graph_ctx_, world_->state.get(), i, q, k, v);
    if (way_ == Way::kCopy) std::memset(node->op_params, 0, sizeof node->op_params);
    return node;
  }
  void make_graph() {
    graph_ctx_ = ggml_init({ggml_tensor_overhead() * 2048 + ggml_graph_overhead_custom(2048, false), nullptr, true});
    ggml_context* c = graph_ctx_;
    graph_ = ggml_new_graph_custom(c, 2048, false);
    x_ = ggml_new_tensor_2d(c, GGML_TYPE_F32, kHidden, 1);
    ggml_set_input(x_);
    ggml_tensor* x = x_;
    for (int32_t i = 0; i < n_layers; ++i) {
      ggml_tensor* h = ggml_rms_norm(c, x, 1e-5f);
      ggml_tensor* q = ggml_reshape_3d(c, ggml_mul_mat(c, q_, h), kDim, kQHeads, 1);
      ggml_tensor* k = ggml_reshape_3d(c, ggml_mul_mat(c, k_, h), kDim, kKvHeads, 1);
      ggml_tensor* v = ggml_reshape_3d(c, ggml_mul_mat(c, v_, h), kDim, kKvHeads, 1);
      ggml_tensor* o = ggml_reshape_2d(c, attention(i, q, k, v), kHidden, 1);
      x = ggml_add(c, x, ggml_mul_mat(c, o_, o));
    }
    last_ = x;
    ggml_set_output(last_);
    ggml_build_forward_expand(graph_, last_);
    assert_true(ggml_backend_sched_alloc_graph(scheduler_, graph_));
  }

  Way way_;
  std::unique_ptr<World> world_;
  std::vector<ggml_backend_t> backends_;
  ggml_context *weights_ = nullptr, *graph_ctx_ = nullptr;
  ggml_backend_buffer_t data_ = nullptr;
  ggml_backend_sched_t scheduler_ = nullptr;
  ggml_tensor *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *o_ = nullptr, *x_ = nullptr, *last_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
};

// Returns the largest difference after two steps, relative to the largest number.
double error_of(Stack* stack, const std::vector<float>& expected) {
  stack->step(1);
  stack->step(2);
  double worst = 0.0, size = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::fabs(double{stack->output[i]} - double{expected[i]});
    if (!(error <= worst)) worst = error;
    size = std::max(size, std::fabs(double{expected[i]}));
  }
  return worst / size;
}

double median_of(Stack* stack) {
  std::vector<double> us;
  for (int i = 0; i < n_steps; ++i) us.push_back(stack->step(3 + i));
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

int run() {
  std::vector<float> expected;
  {
    Stack on_cpu(Way::kNode, false);
    on_cpu.step(1);
    on_cpu.step(2);
    expected = on_cpu.output;
  }
  struct Named {
    Way way;
    const char* name;
  };
  for (const Named& each : {Named{Way::kCopy, "a copy of q for attention"}, Named{Way::kCut, "that, cut"},
                            Named{Way::kDevice, "Tandem's device in the cuts"}, Named{Way::kNode, "the node, on the CPU"}}) {
    Stack stack(each.way, true);
    const double error = error_of(&stack, expected);
    if ((each.way == Way::kDevice || each.way == Way::kNode) && !(error <= 1e-3)) {
      std::printf("%s is wrong: relative error %g\n", each.name, error);
      return 1;
    }
    std::printf("%-28s %8.1f us a layer (relative error %.1e)\n", each.name, median_of(&stack) / n_layers, error);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  int* const numbers[] = {&n_layers, &n_keys, &n_steps};
  if (argc > 1) module_path = argv[1];
  for (int i = 0; i < 3 && i + 2 < argc; ++i) *numbers[i] = std::atoi(argv[i + 2]);
  if (module_path == nullptr || n_layers < 1 || n_keys < 1 || n_steps < 1) {
    std::fprintf(stderr, "usage: ggml_cut_bench /path/to/libtandem-cuda.so [layers] [keys] [steps]\n");
    return 2;
  }
  return run();
}
