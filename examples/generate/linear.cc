// SPDX-License-Identifier: MIT
#include "linear.h"

#include <omp.h>

#include <dnnl.hpp>
#include <unordered_map>

namespace generate {
namespace {

using dnnl::algorithm;
using dnnl::matmul;
using dnnl::memory;

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

dnnl::stream& cpu_stream() {
  static dnnl::stream stream(cpu_engine());
  return stream;
}

memory::desc rows_desc(int64_t n_rows, int64_t n_columns) {
  return {{n_rows, n_columns}, memory::data_type::f32, memory::format_tag::ab};
}

// Covers one of the two differences between oneDNN 2 and 3. append_silu() covers the other.
matmul::primitive_desc describe(const memory::desc& x, const memory::desc& weight, const memory::desc& bias,
                                const memory::desc& y, const dnnl::primitive_attr& attributes) {
#if DNNL_VERSION_MAJOR >= 3
  return bias.get_size() ? matmul::primitive_desc(cpu_engine(), x, weight, bias, y, attributes)
                         : matmul::primitive_desc(cpu_engine(), x, weight, y, attributes);
#else
  return bias.get_size() ? matmul::primitive_desc(matmul::desc(x, weight, bias, y), attributes, cpu_engine())
                         : matmul::primitive_desc(matmul::desc(x, weight, y), attributes, cpu_engine());
#endif
}

void append_silu(dnnl::post_ops* post_ops) {
#if DNNL_VERSION_MAJOR >= 3
  post_ops->append_eltwise(algorithm::eltwise_swish, 1, 0);
#else
  post_ops->append_eltwise(1, algorithm::eltwise_swish, 1, 0);
#endif
}

dnnl::primitive_attr attributes_of(After after, int64_t n_rows, int64_t n_out) {
  dnnl::post_ops post_ops;
  if (after == After::kAddToOutput) post_ops.append_sum(1);
  if (after == After::kSilu) append_silu(&post_ops);
  if (after == After::kTimes) post_ops.append_binary(algorithm::binary_mul, rows_desc(n_rows, n_out));
  dnnl::primitive_attr attributes;
  attributes.set_post_ops(post_ops);
  return attributes;
}

// oneDNN never writes to an input, but its C++ interface takes no const pointer.
memory input(const memory::desc& desc, const float* data) { return {desc, cpu_engine(), const_cast<float*>(data)}; }

}  // namespace

struct Linear::Parts {
  int64_t n_in, n_out;
  After after;
  int32_t n_threads;
  memory weight;  // [n_in, n_out] in the layout that is fastest for a single row
  std::vector<float> bias;
  memory::desc bias_desc;
  std::unordered_map<int64_t, matmul> by_rows;  // creating a primitive costs more than a decode call

  matmul::primitive_desc describe_rows(int64_t n_rows, const memory::desc& weight_desc) const {
    return describe(rows_desc(n_rows, n_in), weight_desc, bias_desc, rows_desc(n_rows, n_out),
                    attributes_of(after, n_rows, n_out));
  }
  const matmul& primitive(int64_t n_rows) {
    auto it = by_rows.find(n_rows);
    if (it != by_rows.end()) return it->second;
    if (by_rows.size() >= 8) by_rows.clear();  // otherwise odd lengths of last chunks accumulate
    return by_rows.emplace(n_rows, matmul(describe_rows(n_rows, weight.get_desc()))).first->second;
  }
};

Linear::Linear(const std::vector<float>& weight, const std::vector<float>& bias, int64_t n_in, int64_t n_out, After after,
               int32_t n_threads)
    : parts_(std::make_unique<Parts>(Parts{n_in, n_out, after, n_threads, {}, bias, {}, {}})) {
  omp_set_num_threads(1);
  if (!bias.empty()) parts_->bias_desc = rows_desc(1, n_out);
  const memory::desc any({n_in, n_out}, memory::data_type::f32, memory::format_tag::any);
  const memory::desc given({n_in, n_out}, memory::data_type::f32, memory::format_tag::ba);  // stored as [n_out, n_in]
  parts_->weight = memory(parts_->describe_rows(1, any).weights_desc(), cpu_engine());
  memory source = input(given, weight.data());
  dnnl::reorder(source, parts_->weight).execute(cpu_stream(), source, parts_->weight);
  cpu_stream().wait();
}

Linear::Linear(Linear&&) noexcept = default;
Linear& Linear::operator=(Linear&&) noexcept = default;
Linear::~Linear() = default;

void Linear::apply(float* y, const float* x, int64_t n_rows, const float* other) {
  if (n_rows == 0) return;
  Parts& parts = *parts_;
  omp_set_num_threads(n_rows == 1 ? 1 : parts.n_threads);  // before creating: oneDNN plans for these threads
  const memory::desc y_desc = rows_desc(n_rows, parts.n_out);
  std::unordered_map<int, memory> args = {{DNNL_ARG_SRC, input(rows_desc(n_rows, parts.n_in), x)},
                                          {DNNL_ARG_WEIGHTS, parts.weight},
                                          {DNNL_ARG_DST, memory(y_desc, cpu_engine(), y)}};
  if (!parts.bias.empty()) args.emplace(DNNL_ARG_BIAS, input(parts.bias_desc, parts.bias.data()));
  if (parts.after == After::kTimes) args.emplace(DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1, input(y_desc, other));
  parts.primitive(n_rows).execute(cpu_stream(), args);
  cpu_stream().wait();
}

void pause_linear_threads() { omp_pause_resource_all(omp_pause_soft); }

}  // namespace generate
