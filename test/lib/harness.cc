// SPDX-License-Identifier: MIT
#include "lib/harness.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "reference/rounding.h"
#include "reference/sequence_model.h"
#include "with_cmocka.h"

namespace harness {

using reference::Random;
using reference::RefLayer;

namespace {
bool stopped = false;
}

bool any_stopped() { return stopped; }

void stop(const std::string& text) {
  stopped = true;
  std::fprintf(stderr, "ERROR: %s\n", text.c_str());  // print_error() would truncate the text
  _fail(__FILE__, __LINE__);
  std::abort();  // not reached: _fail leaves the test
}

void expect(bool condition, const std::string& text) {
  if (!condition) stop(text);
}

void stop_status(int32_t status, int32_t wanted, tandem_error* error, const std::string& context) {
  const std::string message = tandem_error_message(error);
  tandem_error_release(error);
  stop(context + ": got " + tandem_status_name(status) + ", wanted " + tandem_status_name(wanted) + ": " + message);
}

// ---- allocator ----

namespace {
constexpr size_t kGuardBytes = 256;
}

void* NanAllocator::allocate(size_t bytes, size_t alignment, void* self) {
  auto* allocator = static_cast<NanAllocator*>(self);
  Block block;
  constexpr size_t kLarge = 65536, kPage = 4096;  // larger blocks have pages of their own, which can be pinned
  const size_t unit = bytes >= kLarge ? std::max(alignment, kPage) : alignment;
  block.storage.assign(bytes + 2 * kGuardBytes + unit, 0xFF);
  const auto start = reinterpret_cast<uintptr_t>(block.storage.data()) + kGuardBytes;
  block.offset = kGuardBytes + ((unit - start % unit) % unit);
  block.bytes = bytes;
  block.alignment = alignment;
  void* data = block.storage.data() + block.offset;
  const std::lock_guard<std::mutex> lock(allocator->mutex_);
  ++allocator->n_allocated_;
  if (alignment == 0 || (alignment & (alignment - 1)) != 0) allocator->fault_ = "alignment is not a power of two";
  allocator->live_.emplace(data, std::move(block));
  return data;
}

void NanAllocator::check(const Block& block) {
  for (size_t i = 0; i < block.storage.size(); ++i) {
    const bool outside = i < block.offset || i >= block.offset + block.bytes;
    if (outside && block.storage[i] != 0xFF)
      fault_ = "a byte outside a block of " + std::to_string(block.bytes) + " was written";
    if (i == block.offset && block.bytes > 0) i = block.offset + block.bytes - 1;
  }
}

void NanAllocator::release(void* data, size_t bytes, void* self) {
  auto* allocator = static_cast<NanAllocator*>(self);
  const std::lock_guard<std::mutex> lock(allocator->mutex_);
  const auto found = allocator->live_.find(data);
  if (found == allocator->live_.end()) {
    if (data) allocator->fault_ = "free of a pointer that is not live";
    return;
  }
  if (found->second.bytes != bytes)
    allocator->fault_ = "free of " + std::to_string(bytes) + " bytes, allocated were " + std::to_string(found->second.bytes);
  allocator->check(found->second);
  allocator->live_.erase(found);
}

NanAllocator::~NanAllocator() = default;

int64_t NanAllocator::n_live() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(live_.size());
}

std::string NanAllocator::fault() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [data, block] : live_) check(block);
  return fault_;
}

// ---- handles ----

Engine::Engine(const EngineSetup& setup) {
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.n_threads = setup.n_threads;
  options.cpu_isa = setup.isa;
  options.matmul_rows = reference::kMatmulRows;
  options.backend = setup.backend;
  options.backend_path = setup.backend_path;
  if (setup.allocator) {
    options.alloc = NanAllocator::allocate;
    options.free = NanAllocator::release;
    options.alloc_user = setup.allocator;
  }
  TANDEM_EXPECT("engine", TANDEM_OK, tandem_engine_create(&handle_, &options, &error));
}

Engine::~Engine() { tandem_engine_release(handle_); }

void set_latent(reference::RefLayer* layer) {
  layer->k_head_dim = 576;
  layer->v_head_dim = 512;
  layer->v_aliases_k = true;
  layer->v_type = layer->k_type;
  layer->rope = TANDEM_ROPE_CALLER;
  layer->rope_dims = 0;
  layer->rope_inv_freq.clear();
}

tandem_layer_options layer_options(const RefLayer& layer) {
  tandem_layer_options options = TANDEM_LAYER_OPTIONS_INIT;
  options.n_q_heads = layer.n_q_heads;
  options.n_kv_heads = layer.n_kv_heads;
  options.k_head_dim = layer.k_head_dim;
  options.v_head_dim = layer.v_head_dim;
  options.v_aliases_k = layer.v_aliases_k ? 1 : 0;
  options.sm_scale = layer.sm_scale;
  options.soft_cap = layer.soft_cap;
  options.sliding_window_tokens = layer.sliding_window;
  options.sinks = layer.sinks.empty() ? nullptr : layer.sinks.data();
  options.rope = layer.rope;
  options.rope_dims = layer.rope_dims;
  options.rope_theta = layer.rope_theta;
  options.rope_position_scale = layer.rope_position_scale;
  options.rope_inv_freq = layer.rope_inv_freq.empty() ? nullptr : layer.rope_inv_freq.data();
  options.rope_attn_factor = layer.rope_attn_factor;
  return options;
}

Cache::Picking::Picking(const RefLayer& layer) {
  const int32_t dims[] = {layer.n_kv_heads * layer.k_head_dim, layer.n_kv_heads * layer.v_head_dim};
  options.hidden_dim = dims[0] + dims[1];
  options.w_type = TANDEM_BF16;
  options.w_order = TANDEM_WEIGHTS_OUT_IN;
  const void** const weights[] = {&options.w_k, &options.w_v};
  for (int32_t i = 0, first = 0; i < 2; first += dims[i++]) {
    constexpr uint16_t kOne = 0x3f80;
    rows[i].resize(static_cast<size_t>(dims[i]) * static_cast<size_t>(options.hidden_dim));
    for (int32_t row = 0; row < dims[i]; ++row)
      rows[i][static_cast<size_t>(row) * static_cast<size_t>(options.hidden_dim) + static_cast<size_t>(first + row)] = kOne;
    *weights[i] = rows[i].data();
  }
}

Cache::Cache(tandem_engine* engine, const std::vector<RefLayer>& layers, const CacheSetup& setup) : engine_(engine) {
  std::vector<tandem_layer_options> options;
  for (const RefLayer& layer : layers) {
    options.push_back(layer_options(layer));
    if (setup.keeps_hidden) options.back().projection = &projections_.emplace_back(layer).options;
    k_types_.push_back(layer.k_type);
    v_types_.push_back(layer.v_aliases_k ? layer.k_type : layer.v_type);
  }
  TANDEM_EXPECT("model", TANDEM_OK,
                tandem_model_create(&model_, options.data(), static_cast<int32_t>(options.size()), &error));
  options_.page_tokens = setup.page_tokens;
  if (setup.keeps_hidden) options_.x_type = TANDEM_BF16;
  options_.k_rotation = TANDEM_ROTATION_NONE;  // the reference rounds keys without rotating them
  options_.layer_k_types = k_types_.data();
  options_.layer_v_types = v_types_.data();
  TANDEM_EXPECT("cache", TANDEM_OK, tandem_cache_create(&cache_, engine, model_, &options_, &error));
}

tandem_memory_plan Cache::plan(const tandem_session_options& session, int64_t kv_len) const {
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  TANDEM_EXPECT("plan", TANDEM_OK, tandem_plan_memory(&plan, engine_, model_, &options_, &session, &kv_len, 1, &error));
  return plan;
}

Cache::~Cache() {
  tandem_cache_release(cache_);
  tandem_model_release(model_);
}

int64_t Cache::create_sequence(const std::string& context) {
  int64_t id = -1;
  TANDEM_EXPECT(context, TANDEM_OK, tandem_sequence_create(&id, cache_, &error));
  return id;
}

Session::Session(tandem_cache* cache, const tandem_session_options& options) {
  TANDEM_EXPECT("session", TANDEM_OK, tandem_session_create(&session_, cache, &options, &error));
}

Session::~Session() { tandem_session_release(session_); }

tandem_session_options scope_options(const reference::Scope& scope) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = scope.streaming ? "streaming" : "all";
  if (scope.streaming) {
    options.window_tokens = scope.window_tokens;
    options.sink_tokens = scope.sink_tokens;
  }
  return options;
}

// ---- tensors ----

Layout random_layout(Random* random) {
  if (random->chance(0.4)) return {};
  return {random->integer(0, 2), random->integer(0, 9), random->integer(0, 31)};
}

Tensor::Tensor(int32_t dtype, int64_t n_tokens, int64_t n_heads, int64_t head_dim, const Layout& layout)
    : dtype_(dtype), n_dims_(head_dim > 0 ? 3 : 2), offset_(layout.offset) {
  shape_[0] = n_tokens;
  shape_[1] = n_heads;
  shape_[2] = head_dim > 0 ? head_dim : 1;
  stride_[1] = head_dim > 0 ? head_dim + layout.pad_dims : 1;
  stride_[0] = (n_heads + layout.pad_heads) * stride_[1];
  const int64_t last = n_tokens > 0 ? element(n_tokens - 1, n_heads - 1, shape_[2] - 1) : -1;
  bytes_.assign(static_cast<size_t>((offset_ + last + 1) * reference::element_bytes(dtype) + 63), 0xFF);
}

unsigned char* Tensor::base() const {
  auto* start = const_cast<unsigned char*>(bytes_.data());
  const auto address = reinterpret_cast<uintptr_t>(start);
  return start + (64 - address % 64) % 64 + offset_ * reference::element_bytes(dtype_);
}

int64_t Tensor::offset_bytes() const { return offset_ * reference::element_bytes(dtype_); }

int64_t Tensor::element(int64_t token, int64_t head, int64_t dim) const {
  return token * stride_[0] + head * stride_[1] + dim * stride_[2];
}

tandem_tensor Tensor::view() const {
  tandem_tensor tensor = {};
  tensor.struct_size = sizeof tensor;
  tensor.dtype = dtype_;
  tensor.data = base();
  tensor.n_dims = n_dims_;
  for (int32_t i = 0; i < n_dims_; ++i) {
    tensor.shape[i] = shape_[i];
    tensor.stride[i] = stride_[i];
  }
  return tensor;
}

void Tensor::set(int64_t token, int64_t head, int64_t dim, double x) {
  reference::store(dtype_, x, base() + element(token, head, dim) * reference::element_bytes(dtype_));
}

void Tensor::set_row(int64_t token, int64_t head, const double* x) {
  reference::store_all(dtype_, x, shape_[2], base() + element(token, head, 0) * reference::element_bytes(dtype_));
}

double Tensor::get(int64_t token, int64_t head, int64_t dim) const {
  return reference::load(dtype_, base() + element(token, head, dim) * reference::element_bytes(dtype_));
}

bool Tensor::padding_untouched() const {
  std::vector<unsigned char> copy = bytes_;
  const auto start = base() - bytes_.data();
  const auto size = static_cast<size_t>(reference::element_bytes(dtype_));
  for (int64_t t = 0; t < shape_[0]; ++t)
    for (int64_t h = 0; h < shape_[1]; ++h)
      std::memset(copy.data() + start + element(t, h, 0) * static_cast<int64_t>(size), 0xFF,
                  static_cast<size_t>(shape_[2]) * size);
  for (unsigned char byte : copy)
    if (byte != 0xFF) return false;
  return true;
}

bool Tensor::untouched() const {
  for (unsigned char byte : bytes_)
    if (byte != 0xFF) return false;
  return true;
}

std::vector<unsigned char> Tensor::payload() const {
  std::vector<unsigned char> out;
  const int64_t row = shape_[2] * reference::element_bytes(dtype_);
  for (int64_t t = 0; t < shape_[0]; ++t)
    for (int64_t h = 0; h < shape_[1]; ++h) {
      const unsigned char* from = base() + element(t, h, 0) * reference::element_bytes(dtype_);
      out.insert(out.end(), from, from + row);
    }
  return out;
}

double draw_normal(Random* random, double scale) { return scale * random->normal(); }

std::vector<double> fill(Tensor* tensor, int64_t n_heads, int64_t head_dim, double (*draw)(Random*, double), double scale,
                         Random* random) {
  std::vector<double> dense;
  dense.reserve(static_cast<size_t>(tensor->n_tokens() * n_heads * head_dim));
  std::vector<double> row(static_cast<size_t>(head_dim));
  for (int64_t t = 0; t < tensor->n_tokens(); ++t)
    for (int64_t h = 0; h < n_heads; ++h) {
      for (double& x : row) x = draw(random, scale);
      reference::round_all(tensor->dtype(), row.data(), head_dim);
      tensor->set_row(t, h, row.data());
      dense.insert(dense.end(), row.begin(), row.end());
    }
  return dense;
}

std::vector<float> to_float(const std::vector<double>& from) { return std::vector<float>(from.begin(), from.end()); }

std::vector<const char*> available_isas() {
  std::vector<const char*> names;
  for (int32_t i = 0; tandem_cpu_isa_name(i); ++i)
    if (tandem_cpu_isa_available(tandem_cpu_isa_name(i))) names.push_back(tandem_cpu_isa_name(i));
  return names;
}

int full_factor() {
  const char* text = std::getenv("TANDEM_TEST_FULL");
  return text ? std::max(1, std::atoi(text)) : 0;
}

bool full_run() { return full_factor() > 0; }

uint64_t seed_override(uint64_t otherwise) {
  const char* text = std::getenv("TANDEM_TEST_SEED");
  return text ? std::strtoull(text, nullptr, 0) : otherwise;
}

}  // namespace harness
