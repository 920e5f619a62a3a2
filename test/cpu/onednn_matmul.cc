// SPDX-License-Identifier: MIT
#include "onednn_matmul.h"

#include <sys/mman.h>

#include <bit>
#include <cstring>
#include <dnnl.hpp>
#include <new>

#include "cpu/aligned_bytes.h"

namespace tandem::cpu {

bool onednn_has_fast_bf16() {
  constexpr auto kNeeded = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & kNeeded) == kNeeded;
}

namespace {

using Dims = dnnl::memory::dims;

// strict: DNNL_DEFAULT_FPMATH_MODE of the environment must not turn f32 products into bf16 ones.
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

// oneDNN writes machine code when a primitive is made, and more when one of its kind first runs: to address 0 where it gets
// no memory for that. So both happen in create() and prepare(), behind a look whether several times as much is there.
constexpr size_t kCodeBytes = size_t{16} << 20;

Status require_room_for_code() {
  void* room = mmap(nullptr, kCodeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "no memory for the code of a matrix product");
  munmap(room, kCodeBytes);
  return {};
}

float element(const void* data, int64_t i, bool bf16) {
  if (!bf16) return static_cast<const float*>(data)[i];
  return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16);
}

}  // namespace

// Handles of one worker; where their data is, is set before each call.
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
  TANDEM_TRY(require_room_for_code());
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

// Zeros, for the code that comes of it.
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
  TANDEM_TRY(require_room_for_code());
  if (run(0, data[0].get(), data[1].get(), reinterpret_cast<float*>(data[2].get()), data[3].get())) return {};
  impl_->arguments.clear();
  return fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "oneDNN had no memory for a matrix product");
}

size_t Matmul::scratchpad_bytes() const { return impl_->description.scratchpad_desc().get_size(); }

// oneDNN's containers throw before a product is computed and behind it, and what C holds does not say which it was: a
// product may be 0 wherever one looks.
bool Matmul::run(int32_t worker_idx, const void* a, const void* b, float* c, void* scratchpad) const {
  Arguments& arguments = impl_->arguments[static_cast<size_t>(worker_idx)];
  const dnnl_exec_arg_t list[] = {{DNNL_ARG_SRC, arguments.a.get()},
                                  {DNNL_ARG_WEIGHTS, arguments.b.get()},
                                  {DNNL_ARG_DST, arguments.c.get()},
                                  {DNNL_ARG_SCRATCHPAD, arguments.scratchpad.get()}};
  void* const data[] = {const_cast<void*>(a), const_cast<void*>(b), c, scratchpad};
  bool done = true;
  try {
    for (int i = 0; i < 4; ++i) done = done && dnnl_memory_set_data_handle(list[i].memory, data[i]) == dnnl_success;
    done = done && dnnl_primitive_execute(impl_->primitive.get(), arguments.stream.get(), 4, list) == dnnl_success;
  } catch (const std::bad_alloc&) {  // of C functions
    done = false;
  }
  if (done) return true;
  if (impl_->shape.accumulate) return false;
  run_plainly(a, b, c);
  return true;
}

void Matmul::run_plainly(const void* a, const void* b, float* c) const { plain_matmul(impl_->shape, a, b, c); }

void plain_matmul(const MatmulShape& shape, const void* a, const void* b, float* c) {
  for (int64_t i = 0; i < shape.m; ++i) {
    for (int64_t j = 0; j < shape.n; ++j) {
      float sum = shape.accumulate ? c[i * shape.stride_c + j] : 0.0f;
      for (int64_t l = 0; l < shape.k; ++l)
        sum += element(a, i * shape.stride_a + l, shape.bf16) *
               element(b, l * shape.stride_bk + j * shape.stride_bn, shape.bf16);
      c[i * shape.stride_c + j] = sum;
    }
  }
}

}  // namespace tandem::cpu
