// SPDX-License-Identifier: MIT
// Entry points: tensor, engine, model, names of dtypes, policies and CPU instruction sets.
#include <algorithm>
#include <cstring>
#include <vector>

#include "lib/abi/api.h"
#include "lib/base/options.h"
#include "lib/machine/engine.h"
#include "lib/model/dtype.h"
#include "lib/model/model.h"
#include "lib/policy/policy.h"
#include "lib/tensors/tensor.h"

namespace tandem {
namespace {

constexpr int32_t kMaxLayers = 65536;

// Makes the contiguous tensor that the arguments describe, and checks it as a call would.
Status make_contiguous(int32_t dtype, void* data, int32_t n_dims, const int64_t* shape, tandem_tensor* made) {
  TANDEM_TRY(require(shape, "shape"));
  TANDEM_TRY(require_range("n_dims", n_dims, 1, 4));
  *made = AbiStruct<tandem_tensor>::defaults();
  made->dtype = dtype;
  made->data = data;
  made->n_dims = n_dims;
  TensorSpec spec{"tensor", n_dims, {}};
  int64_t stride = 1;
  for (int32_t d = n_dims - 1; d >= 0; --d) {
    spec.dims[d] = {"", kAnyLength};
    made->shape[d] = shape[d];
    made->stride[d] = stride;
    if (shape[d] > 1 && __builtin_mul_overflow(stride, shape[d], &stride))
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "shape", "shape[%d] = %lld makes more elements than memory can hold", d,
                  static_cast<long long>(shape[d]));
  }
  CheckedTensor checked;
  spec.types = TensorTypes::kAll;
  return check_tensor(made, spec, &checked);
}

}  // namespace
}  // namespace tandem

using namespace tandem;

int32_t tandem_tensor_init(tandem_tensor* tensor, int32_t dtype, void* data, int32_t n_dims, const int64_t* shape,
                           tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(tensor, "tensor"));
    tandem_tensor made;
    TANDEM_TRY(make_contiguous(dtype, data, n_dims, shape, &made));
    *tensor = made;
    return {};
  });
}

int32_t tandem_engine_create(tandem_engine** engine, const tandem_engine_options* options, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(engine, "engine"));
    tandem_engine_options copy;
    TANDEM_TRY(copy_in_or_default(options, "", &copy));
    TANDEM_TRY(check_engine_options(copy));
    watch_fork();
    std::shared_ptr<Engine> object;
    TANDEM_TRY(Engine::create(copy, &object));
    *engine = publish<tandem_engine>(std::move(object));
    return {};
  });
}

void tandem_engine_release(tandem_engine* engine) { release_handle(engine, HandleKind::kEngine); }

int32_t tandem_engine_drain(tandem_engine* engine, int64_t timeout_ns, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Engine> object;
    TANDEM_TRY(resolve(engine, "engine", &object));
    return object->drain(timeout_ns);
  });
}

int32_t tandem_engine_report(char* buffer, size_t buffer_bytes, size_t* needed_bytes, const tandem_engine* engine,
                             tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Engine> object;
    TANDEM_TRY(resolve(engine, "engine", &object));
    TANDEM_TRY(check_text_buffer(buffer, buffer_bytes, needed_bytes));
    write_text(object->report(), buffer, buffer_bytes, needed_bytes);
    return {};
  });
}

int32_t tandem_model_create(tandem_model** model, const tandem_layer_options* layers, int32_t n_layers,
                            tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(model, "model"));
    TANDEM_TRY(require(layers, "layers"));
    TANDEM_TRY(require_range("n_layers", n_layers, 1, kMaxLayers));
    std::vector<tandem_layer_options> copies;
    TANDEM_TRY(copy_array_in(layers, "layers", n_layers, &copies));
    watch_fork();
    std::shared_ptr<const Model> object;
    TANDEM_TRY(Model::create(copies, &object));
    *model = publish<tandem_model>(std::move(object));
    return {};
  });
}

void tandem_model_release(tandem_model* model) { release_handle(model, HandleKind::kModel); }

const char* tandem_dtype_name(int32_t dtype) {
  const DtypeInfo* info = find_dtype(dtype);
  return info == nullptr ? nullptr : info->name;
}

int64_t tandem_dtype_row_bytes(int32_t dtype, int32_t head_dim) {
  if (find_dtype(dtype) == nullptr || head_dim < 1) return 0;
  return row_bytes(dtype, head_dim) + scale_bytes(dtype, head_dim);
}

const char* tandem_policy_name(int32_t idx) {
  const std::span<const Policy* const> table = policy_table();
  const Policy* policy = idx >= 0 && idx < std::ssize(table) ? table[static_cast<size_t>(idx)] : nullptr;
  return policy == nullptr ? nullptr : policy->name;
}

const char* tandem_cpu_isa_name(int32_t idx) { return idx < 0 ? nullptr : cpu_isa_name(idx); }

int32_t tandem_cpu_isa_available(const char* name) { return name != nullptr && cpu_isa_available(name) ? 1 : 0; }
