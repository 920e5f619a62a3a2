// SPDX-License-Identifier: MIT
#include "onednn_matmul.h"

#include <cstring>
#include <dnnl.hpp>

#include "cpu/aligned_bytes.h"

namespace tandem::cpu {

bool onednn_has_fast_bf16() {
  constexpr auto kNeeded = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & kNeeded) == kNeeded;
}

namespace {

using Dims = dnnl::memory::dims;

// strict: DNNL_DEFAULT_FPMATH_MODE in the environment must not turn f32 products into bf16 ones.
dnnl::primitive_attr attributes(const MatmulShape& shape) {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attr.set_fpmath_mode(dnnl::fpmath_mode::strict);
  if (shape.accumulate) {
    dnnl::post_ops ops;
    ops.append_sum(1.0f);
    attr.set_post_ops(ops);
  }
  return attr;
}

dnnl::matmul::primitive_desc describe(const MatmulShape& shape, const dnnl::engine& engine) {
  const auto type = shape.bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  const dnnl::memory::desc a({shape.m, shape.k}, type, Dims{shape.stride_a, 1});
  const dnnl::memory::desc b({shape.k, shape.n}, type, Dims{shape.stride_bk, shape.stride_bn});
  const dnnl::memory::desc c({shape.m, shape.n}, dnnl::memory::data_type::f32, Dims{shape.stride_c, 1});
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::matmul::primitive_desc(engine, a, b, c, attributes(shape));
#else
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes(shape), engine);
#endif
}

}  // namespace

// Handles of one worker. Their data addresses are set before each call.
struct Arguments {
  dnnl::stream stream;
  dnnl::memory a, b, c, scratchpad;
};

struct Matmul::Impl {
  MatmulShape shape;
  dnnl::engine engine;
  dnnl::matmul::primitive_desc description;
  dnnl::matmul primitive;
  mutable std::vector<Arguments> arguments;  // [n_workers]
};

Matmul::Matmul() = default;
Matmul::~Matmul() = default;
Matmul::Matmul(Matmul&&) noexcept = default;
Matmul& Matmul::operator=(Matmul&&) noexcept = default;

Status Matmul::create(const MatmulShape& shape, Matmul* matmul) {
  const SingleThread single;
  auto impl = std::make_unique<Impl>();
  try {
    impl->shape = shape;
    impl->engine = dnnl::engine(dnnl::engine::kind::cpu, 0);
    impl->description = describe(shape, impl->engine);
    impl->primitive = dnnl::matmul(impl->description);
  } catch (const dnnl::error& error) {
    const bool memory = error.status == dnnl_out_of_memory;
    return fail_system(memory ? TANDEM_ERROR_OUT_OF_MEMORY : TANDEM_ERROR_UNSUPPORTED, error.status, "",
                       "oneDNN has no %s matmul of %lld x %lld x %lld: %s", shape.bf16 ? "bf16" : "f32",
                       static_cast<long long>(shape.m), static_cast<long long>(shape.n), static_cast<long long>(shape.k),
                       error.what());
  }
  matmul->impl_ = std::move(impl);
  return {};
}

Status Matmul::prepare(int32_t n_workers) {
  const SingleThread single;
  Impl& impl = *impl_;
  const bool is_new = impl.arguments.empty();
  const auto memory = [&](const dnnl::memory::desc& desc) { return dnnl::memory(desc, impl.engine, DNNL_MEMORY_NONE); };
  try {
    while (impl.arguments.size() < static_cast<size_t>(n_workers)) {
      const dnnl::matmul::primitive_desc& desc = impl.description;
      impl.arguments.push_back({dnnl::stream(impl.engine), memory(desc.src_desc()), memory(desc.weights_desc()),
                                memory(desc.dst_desc()), memory(desc.scratchpad_desc())});
    }
  } catch (const dnnl::error& error) {
    return fail_system(TANDEM_ERROR_OUT_OF_MEMORY, error.status, "", "oneDNN could not make its handles: %s", error.what());
  }
  return is_new ? run_first() : Status();
}

// Runs the product once on zeros, so that oneDNN generates its code.
Status Matmul::run_first() {
  const MatmulShape& shape = impl_->shape;
  const int64_t element_bytes = shape.bf16 ? sizeof(uint16_t) : sizeof(float);
  const int64_t b_elements = (shape.k - 1) * shape.stride_bk + (shape.n - 1) * shape.stride_bn + 1;
  const int64_t bytes[] = {shape.m * shape.stride_a * element_bytes, b_elements * element_bytes,
                           shape.m * shape.stride_c * int64_t{sizeof(float)}, static_cast<int64_t>(scratchpad_bytes())};
  AlignedBytes data[4];
  for (int i = 0; i < 4; ++i) {
    const auto n = static_cast<size_t>(bytes[i]);
    TANDEM_TRY(allocate_aligned(n, &data[i]));
    std::memset(data[i].get(), 0, n);
  }
  if (run(0, data[0].get(), data[1].get(), reinterpret_cast<float*>(data[2].get()), data[3].get())) return {};
  impl_->arguments.clear();
  return fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "oneDNN had no memory for a matrix product");
}

size_t Matmul::scratchpad_bytes() const { return impl_->description.scratchpad_desc().get_size(); }

bool Matmul::run(int32_t worker_idx, const void* a, const void* b, float* c, void* scratchpad) const {
  Arguments& arguments = impl_->arguments[static_cast<size_t>(worker_idx)];
  const dnnl_exec_arg_t list[] = {{DNNL_ARG_SRC, arguments.a.get()},
                                  {DNNL_ARG_WEIGHTS, arguments.b.get()},
                                  {DNNL_ARG_DST, arguments.c.get()},
                                  {DNNL_ARG_SCRATCHPAD, arguments.scratchpad.get()}};
  void* const data[] = {const_cast<void*>(a), const_cast<void*>(b), c, scratchpad};
  for (int i = 0; i < 4; ++i)
    if (dnnl_memory_set_data_handle(list[i].memory, data[i]) != dnnl_success) return false;
  return dnnl_primitive_execute(impl_->primitive.get(), arguments.stream.get(), 4, list) == dnnl_success;
}

}  // namespace tandem::cpu
