// SPDX-License-Identifier: MIT
#include "tools/bench/matmul_rate.h"

#include <omp.h>

#include <algorithm>
#include <dnnl.hpp>
#include <mutex>

namespace tools {
namespace {

struct Shape {
  int64_t m, k, n;  // [m, k] x [k, n]
};
constexpr Shape kShapes[] = {{128, 128, 512}, {512, 128, 4096}, {512, 512, 128}, {512, 2048, 512}};
constexpr double kPassSeconds = 5e-3;
constexpr int64_t kCalibrationPasses = 3;

double flops(const Shape& shape) { return 2.0 * static_cast<double>(shape.m * shape.k * shape.n); }

dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const dnnl::memory::desc& a, const dnnl::memory::desc& b,
                                      const dnnl::memory::desc& c) {
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::matmul::primitive_desc(engine, a, b, c);
#else
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), engine);
#endif
}

}  // namespace

// One thread's matrices and the primitive that multiplies them.
struct MatmulRate::Product {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  dnnl::memory a, b, c;
  dnnl::matmul multiply;

  Product(const Shape& shape, dnnl::memory::data_type type) {
    using Desc = dnnl::memory::desc;
    using Tag = dnnl::memory::format_tag;
    const Desc a_desc({shape.m, shape.k}, type, Tag::ab);
    const Desc c_desc({shape.m, shape.n}, dnnl::memory::data_type::f32, Tag::ab);
    const auto primitive = describe(engine, a_desc, Desc({shape.k, shape.n}, type, Tag::any), c_desc);
    a = filled(a_desc);
    b = filled(primitive.weights_desc());
    c = filled(c_desc);
    multiply = dnnl::matmul(primitive);
  }

  void run() {
    multiply.execute(stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
    stream.wait();
  }

 private:
  // Small normal numbers in either type: 0x3c3c is 0.0115 as bf16, 0x3c3c3c3c is about the same as f32.
  dnnl::memory filled(const dnnl::memory::desc& desc) {
    dnnl::memory memory(desc, engine);
    std::fill_n(static_cast<char*>(memory.get_data_handle()), desc.get_size(), static_cast<char>(0x3c));
    return memory;
  }
};

MatmulRate::MatmulRate(PinnedTeam* team) : team_(team) {}
MatmulRate::~MatmulRate() = default;

Result MatmulRate::create(PinnedTeam* team, int32_t dtype, std::unique_ptr<MatmulRate>* probe) {
  std::unique_ptr<MatmulRate> made(new MatmulRate(team));
  TOOL_TRY(made->prepare(dtype));
  made->calibrate();
  *probe = std::move(made);
  return {};
}

std::string MatmulRate::best_shape() const {
  const Shape& shape = kShapes[best_shape_];
  return text("%lldx%lldx%lld", static_cast<long long>(shape.m), static_cast<long long>(shape.k),
              static_cast<long long>(shape.n));
}

double MatmulRate::measure() { return pass(best_shape_); }

// oneDNN takes the number of threads from OpenMP when a primitive is created and when it runs. Here it is one on each
// thread.
Result MatmulRate::prepare(int32_t dtype) {
  const auto type = dtype == TANDEM_BF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  for (const Shape& shape : kShapes) {
    std::vector<std::unique_ptr<Product>> products(static_cast<size_t>(team_->size()));
    std::mutex making;  // oneDNN guards its cache of primitives, but ThreadSanitizer does not see that
    bool failed = false;
    team_->run([&](int32_t thread_idx) {
      omp_set_num_threads(1);
      std::lock_guard lock(making);
      try {
        products[static_cast<size_t>(thread_idx)] = std::make_unique<Product>(shape, type);
      } catch (const dnnl::error&) {
        failed = true;
      }
    });
    if (failed) return refuse("oneDNN has no matrix product of this type on this processor");
    products_.push_back(std::move(products));
  }
  n_rounds_.assign(std::size(kShapes), 1);
  return {};
}

void MatmulRate::calibrate() {
  std::vector<std::vector<double>> gflops(std::size(kShapes));
  for (int64_t i = 0; i <= kCalibrationPasses; ++i) {
    for (size_t shape_idx = 0; shape_idx < std::size(kShapes); ++shape_idx) {
      const double rate = pass(shape_idx);
      const double seconds = flops(kShapes[shape_idx]) * team_->size() / (rate * 1e9);
      n_rounds_[shape_idx] = std::max<int64_t>(1, static_cast<int64_t>(kPassSeconds / seconds));
      if (i > 0) gflops[shape_idx].push_back(rate);  // the first pass is cold
    }
  }
  double best = 0;
  for (size_t shape_idx = 0; shape_idx < std::size(kShapes); ++shape_idx) {
    std::sort(gflops[shape_idx].begin(), gflops[shape_idx].end());
    const double median = gflops[shape_idx][kCalibrationPasses / 2];
    if (median > best) best_shape_ = shape_idx;
    best = std::max(best, median);
  }
}

double MatmulRate::pass(size_t shape_idx) {
  const int64_t n_rounds = n_rounds_[shape_idx];
  const double seconds = team_->run([&](int32_t thread_idx) {
    omp_set_num_threads(1);
    for (int64_t i = 0; i < n_rounds; ++i) products_[shape_idx][static_cast<size_t>(thread_idx)]->run();
  });
  return flops(kShapes[shape_idx]) * static_cast<double>(n_rounds * team_->size()) / seconds * 1e-9;
}

}  // namespace tools
