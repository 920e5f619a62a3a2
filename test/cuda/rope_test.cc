// SPDX-License-Identifier: MIT
// Keys and queries that a module rotates as they are appended, attended against double precision. The rotation is RoPE or,
// in layers without it, a Walsh-Hadamard matrix, whose rows must be the host's to the last bit.
//
//   rope_test [MODULE]
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "device/layer_of.h"
#include "device/open_device.h"
#include "lib/model/dtype.h"
#include "lib/model/hadamard.h"
#include "reference/gate.h"
#include "reference/random.h"
#include "reference/stored_row.h"
#include "with_cmocka.h"

namespace {

using namespace tandem;

constexpr int32_t kPageLen = 128, kMostRows = 256;

const test::OpenDevice* device = nullptr;
reference::GateShares shares;

struct RopeOptions {
  reference::RefLayer layer;
  int64_t n_before = 0, position = 0;  // tokens before the queries, and the first one's position
  int32_t q_len = 1;
  uint64_t seed = 1;
};

// One sequence. Several calls append its tokens, and the queries of the last call attend.
class RopeCase {
 public:
  explicit RopeCase(const RopeOptions& options) : options_(options), random_(options.seed) {
    const reference::RefLayer& from = options_.layer;
    std::vector<double> inv_freq;
    for (int32_t i = 0; i < from.rotated_dims() / 2; ++i) inv_freq.push_back(from.frequency(i) * from.scaled(1));
    table_ = make_rope_table(inv_freq.data(), static_cast<int32_t>(inv_freq.size()), from.rope == TANDEM_ROPE_INTERLEAVED,
                             static_cast<float>(from.attn_factor()));
    layer_ = test::layer_of(from);
    if (from.rope == TANDEM_ROPE_CALLER)
      layer_.k_rotation = TANDEM_ROTATION_HADAMARD;
    else
      layer_.rope = &table_;
    make_window();
    make_exchange();
  }
  ~RopeCase() {
    device->wait();
    for (void* data : owned_) device->table->release(device->self, data);
    for (void* data : shared_) device->table->release_shared(device->self, data);
  }
  RopeCase(const RopeCase&) = delete;

  reference::GateVerdict run() {
    for (int64_t first = 0; first < options_.n_before; first += kMostRows)
      append(first, static_cast<int32_t>(std::min<int64_t>(kMostRows, options_.n_before - first)));
    append(options_.n_before, options_.q_len);
    return attend();
  }

 private:
  template <class T>
  T* own(const T* from, int64_t n) {
    owned_.push_back(device->allocate(n * static_cast<int64_t>(sizeof(T))));
    if (from != nullptr) device->upload(owned_.back(), from, n * static_cast<int64_t>(sizeof(T)));
    return static_cast<T*>(owned_.back());
  }

  void make_window() {
    const int64_t n_tokens = options_.n_before + options_.q_len, n_pages = (n_tokens + kPageLen - 1) / kPageLen;
    const PlaneBytes bytes = plane_bytes(window_layer(layer_));
    int64_t page_bytes = 0, at[kPlanes];
    append_.pages.page_len = kPageLen;
    for (int32_t p = 0; p < kPlanes; ++p) {
      at[p] = page_bytes;
      append_.pages.head_stride[p] = bytes.of[p] * kPageLen;
      page_bytes += append_.pages.head_stride[p] * layer_.n_kv_heads;
    }
    auto* pool = own<std::byte>(nullptr, page_bytes * n_pages);
    for (int32_t p = 0; p < kPlanes; ++p) append_.pages.planes[p] = pool + at[p];
    std::vector<int64_t> tables;
    for (int64_t i = n_pages; i > 0; --i) tables.push_back((i - 1) * page_bytes);
    append_.sequences.page_tables = own(tables.data(), n_pages);
    append_.sequences.sequences = own<DeviceSequence>(nullptr, 1);
    append_.sequences.n_sequences = 1;
    append_.sequences.max_keys = n_tokens;
    append_.layer = &layer_;
    if (layer_.rope != nullptr) append_.rope = own(table_.cos_sin.get(), n_floats(table_));
    append_.rotated_q = own<float>(nullptr, int64_t{kMostRows} * layer_.n_q_heads * layer_.k_head_dim);
  }

  void make_exchange() {
    DeviceExchange& exchange = append_.exchange;
    int64_t bytes = 4096;
    const auto take = [&](int64_t n) {
      const int64_t at = bytes;
      bytes += (n + 255) / 256 * 256;
      return at;
    };
    exchange.q_at = take(int64_t{kMostRows} * layer_.n_q_heads * layer_.k_head_dim * 4);
    exchange.o_at = take(int64_t{kMostRows} * layer_.n_q_heads * layer_.v_head_dim * 4);
    exchange.lse_at = take(int64_t{kMostRows} * layer_.n_q_heads * 4);
    const PlaneBytes stored = plane_bytes(layer_);
    for (int32_t p = 0; p < kPlanes; ++p) exchange.rows_at[p] = take(int64_t{kMostRows} * layer_.n_kv_heads * stored.of[p]);
    exchange.slot_bytes = bytes;
    exchange.n_slots = 2;
    exchange.n_rows = kMostRows;
    exchange.timeout_ns = 20'000'000'000;
    DeviceError error;
    const auto share = [&](int64_t n, void** there) {
      void* host = nullptr;
      device->must(device->table->allocate_shared(device->self, n, &host, there, &error), error);
      shared_.push_back(host);
      return host;
    };
    void* there = nullptr;
    flags_ = static_cast<ExchangeFlags*>(share(sizeof(ExchangeFlags), &there));
    exchange.flags = static_cast<ExchangeFlags*>(there);
    slots_ = static_cast<std::byte*>(share(2 * bytes, &there));
    exchange.slots = static_cast<std::byte*>(there);
    const int64_t zeros[kExchangeWords] = {};
    exchange.state = own(zeros, kExchangeWords);
  }

  std::vector<float> draw(int64_t n) {
    std::vector<float> numbers(static_cast<size_t>(n));
    for (float& x : numbers) x = static_cast<float>(random_.normal());
    return numbers;
  }

  // Appends to *kept the rows as they read back from the store.
  void keep(int32_t dtype, int64_t dim, const std::vector<float>& rows, std::vector<float>* kept) const {
    std::vector<std::byte> codes(4096), scales(4096);
    std::vector<double> x(static_cast<size_t>(dim));
    for (size_t at = 0; at < rows.size(); at += x.size()) {
      std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(at), dim, x.begin());
      reference::store_row(dtype, x.data(), dim, codes.data(), scales.data());
      reference::load_row(dtype, codes.data(), scales.data(), dim, x.data());
      kept->insert(kept->end(), x.begin(), x.end());
    }
  }

  bool is_hadamard() const { return layer_.k_rotation == TANDEM_ROTATION_HADAMARD; }

  void append(int64_t first, int32_t n) {
    DeviceSequence sequence;
    sequence.end = first + n;
    sequence.q_len = append_.n_tokens = append_.sequences.max_q_len = n;
    sequence.table_len = static_cast<int32_t>((options_.n_before + options_.q_len + kPageLen - 1) / kPageLen);
    sequence.has_host_part = 1;
    sequence.position = options_.position + first;
    device->upload(const_cast<DeviceSequence*>(append_.sequences.sequences), &sequence, sizeof sequence);
    const auto rows = [&](const std::vector<float>& numbers, int64_t n_heads, int64_t dim) {
      return DeviceRows{own(numbers.data(), static_cast<int64_t>(numbers.size())), TANDEM_F32, 0, n_heads * dim, dim};
    };
    const std::vector<float> k = draw(int64_t{n} * layer_.n_kv_heads * layer_.k_head_dim);
    const std::vector<float> v = draw(int64_t{n} * layer_.n_kv_heads * layer_.v_head_dim);
    q_ = draw(int64_t{n} * layer_.n_q_heads * layer_.k_head_dim);
    append_.k = rows(k, layer_.n_kv_heads, layer_.k_head_dim);
    append_.v = rows(v, layer_.n_kv_heads, layer_.v_head_dim);
    append_.q = rows(q_, layer_.n_q_heads, layer_.k_head_dim);
    // The reference attends rotated keys with rotated queries.
    std::vector<float> keys = k;
    for (std::vector<float>* of : {&keys, &q_})
      for (size_t at = 0; is_hadamard() && at < of->size(); at += static_cast<size_t>(layer_.k_head_dim))
        hadamard_rotate(of->data() + at, layer_.k_head_dim);
    keep(layer_.k_type, layer_.k_head_dim, keys, &k_);
    keep(layer_.v_type, layer_.v_head_dim, v, &v_);
    DeviceError error;
    device->must(device->table->append(device->self, &append_, nullptr, &error), error);
    device->wait();
    check_queries(n);
    if (is_hadamard()) check_keys(n, keys);
    std::atomic_ref<uint64_t>(flags_->answered).store(++n_appended_);
  }

  // Asserts that host and device get the same queries.
  void check_queries(int32_t n) const {
    const int64_t dim = layer_.k_head_dim, group = layer_.group_size;
    std::vector<float> rotated(static_cast<size_t>(n * layer_.n_q_heads * dim));
    device->download(rotated.data(), append_.rotated_q, static_cast<int64_t>(rotated.size() * sizeof(float)));
    assert_true(!is_hadamard() || rotated == q_);
    const std::byte* slot = slots_ + static_cast<int64_t>(n_appended_ % 2) * append_.exchange.slot_bytes;
    const auto* handed = reinterpret_cast<const float*>(slot + append_.exchange.q_at);
    for (int64_t t = 0; t < n; ++t)
      for (int64_t head = 0; head < layer_.n_q_heads; ++head) {
        const auto row = rotated.begin() + (t * layer_.n_q_heads + head) * dim;
        assert_true(std::equal(row, row + dim, handed + ((head / group * n + t) * group + head % group) * dim));
      }
  }

  // Asserts that the slot has the keys as the host would round them. keys: rotated.
  void check_keys(int32_t n, const std::vector<float>& keys) const {
    const int64_t dim = layer_.k_head_dim, n_heads = layer_.n_kv_heads;
    const PlaneBytes bytes = plane_bytes(layer_);
    const std::byte* slot = slots_ + static_cast<int64_t>(n_appended_ % 2) * append_.exchange.slot_bytes;
    for (int64_t row = 0; row < n * n_heads; ++row) {
      std::vector<std::byte> codes(4096), scales(4096);
      const std::vector<double> x(keys.begin() + row * dim, keys.begin() + (row + 1) * dim);
      reference::store_row(layer_.k_type, x.data(), dim, codes.data(), scales.data());
      const int64_t at = row % n_heads * append_.exchange.n_rows + row / n_heads;
      const auto in_slot = [&](Plane plane) { return slot + append_.exchange.rows_at[plane] + at * bytes.of[plane]; };
      assert_memory_equal(in_slot(kPlaneK), codes.data(), static_cast<size_t>(bytes.of[kPlaneK]));
      assert_memory_equal(in_slot(kPlaneKScales), scales.data(), static_cast<size_t>(bytes.of[kPlaneKScales]));
    }
  }

  reference::GateVerdict attend() {
    const int64_t n_rows = int64_t{options_.q_len} * layer_.n_q_heads;
    DeviceAttend call;
    call.layer = &layer_;
    call.pages = append_.pages;
    call.sequences = append_.sequences;
    call.q = {append_.rotated_q, TANDEM_F32, 0, int64_t{layer_.n_q_heads} * layer_.k_head_dim, layer_.k_head_dim};
    call.o = {own<float>(nullptr, n_rows * layer_.v_head_dim), TANDEM_F32, 0, int64_t{layer_.n_q_heads} * layer_.v_head_dim,
              layer_.v_head_dim};
    call.lse = own<float>(nullptr, n_rows);
    call.lse_token_stride = layer_.n_q_heads;
    call.lse_head_stride = 1;
    const int64_t bytes = device->table->workspace_bytes(device->self, &call);
    call.workspace = own(std::vector<std::byte>(static_cast<size_t>(bytes)).data(), bytes);
    DeviceError error;
    device->must(device->table->supports(device->self, &layer_, options_.q_len, &error), error);
    device->must(device->table->attend(device->self, &call, nullptr, &error), error);
    device->wait();
    std::vector<float> o(static_cast<size_t>(n_rows * layer_.v_head_dim)), lse(static_cast<size_t>(n_rows));
    device->download(o.data(), call.o.data, static_cast<int64_t>(o.size() * sizeof(float)));
    device->download(lse.data(), call.lse, n_rows * 4);
    return judge(o, lse);
  }

  reference::GateVerdict judge(const std::vector<float>& o, const std::vector<float>& lse) const {
    const int64_t n_keys = options_.n_before + options_.q_len;
    std::vector<int64_t> positions(static_cast<size_t>(n_keys));
    std::iota(positions.begin(), positions.end(), options_.position);
    reference::Queries queries;
    queries.n_tokens = options_.q_len;
    queries.q = q_.data();
    queries.positions = positions.data() + options_.n_before;
    queries.visible = [&](int64_t token, int32_t, std::vector<int64_t>* keys) {
      for (int64_t t = 0; t <= options_.n_before + token; ++t) keys->push_back(t);
    };
    const reference::Truth truth =
        reference::attend_reference({&options_.layer, n_keys, k_.data(), v_.data(), positions.data()}, queries);
    reference::GateCall call;
    call.truth = &truth;
    call.layer = &options_.layer;
    call.o_type = TANDEM_F32;
    if (reference::has_groups(layer_.v_type)) call.mass_epsilon = 0x1p-16;
    call.o = [&](int64_t token, int32_t head, int32_t dim) {
      return static_cast<double>(o[static_cast<size_t>((token * layer_.n_q_heads + head) * layer_.v_head_dim + dim)]);
    };
    call.lse = [&](int64_t token, int32_t head) {
      return static_cast<double>(lse[static_cast<size_t>(token * layer_.n_q_heads + head)]);
    };
    return reference::check_gate(call);
  }

  RopeOptions options_;
  reference::Random random_;
  RopeTable table_;
  Layer layer_;
  DeviceAppend append_;
  ExchangeFlags* flags_ = nullptr;
  std::byte* slots_ = nullptr;
  uint64_t n_appended_ = 0;
  std::vector<float> k_, v_, q_;  // as stored; q_ of the last call
  std::vector<void*> owned_, shared_;
};

RopeOptions options_of(int32_t k_type, int32_t v_type, int32_t dim) {
  RopeOptions options;
  options.layer.n_kv_heads = 2;
  options.layer.n_q_heads = 8;
  options.layer.k_head_dim = options.layer.v_head_dim = dim;
  options.layer.k_type = k_type;
  options.layer.v_type = v_type;
  options.layer.rope = TANDEM_ROPE_HALVES;
  options.n_before = 333;
  return options;
}

void assert_right(const RopeOptions& options) {
  const reference::GateVerdict verdict = RopeCase(options).run();
  shares.include(verdict.shares);
  if (!verdict.pass)
    fail_msg("%s/%s of %d dims, rope %d of %d dims, position %lld, %d queries: %s", find_dtype(options.layer.k_type)->name,
             find_dtype(options.layer.v_type)->name, options.layer.k_head_dim, options.layer.rope,
             options.layer.rotated_dims(), static_cast<long long>(options.position), options.q_len, verdict.message.c_str());
}

void types_and_dims(void**) {
  uint64_t seed = 1;
  for (const int32_t k_type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0})
    for (const int32_t v_type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_Q8_0})
      for (const int32_t dim : {64, 96, 128, 256})
        for (const int32_t q_len : {1, 40}) {
          RopeOptions options = options_of(k_type, v_type, dim);
          options.layer.rope = seed % 2 == 0 ? TANDEM_ROPE_HALVES : TANDEM_ROPE_INTERLEAVED;
          options.q_len = q_len;
          options.position = seed % 3 == 0 ? 100'000 : 0;
          options.seed = seed++;
          assert_right(options);
        }
}

void rotated_before_they_are_stored(void**) {
  uint64_t seed = 500;
  for (const int32_t type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0})
    for (const int32_t dim : {64, 128, 256})
      for (const int32_t q_len : {1, 40}) {
        RopeOptions options = options_of(type, type, dim);
        options.layer.rope = TANDEM_ROPE_CALLER;
        options.q_len = q_len;
        options.seed = seed++;
        assert_right(options);
      }
}

void long_positions(void**) {
  for (const int64_t position : {int64_t{255}, int64_t{65'000}, int64_t{1'000'000}, int64_t{16'777'000}})
    for (const int32_t rope : {TANDEM_ROPE_HALVES, TANDEM_ROPE_INTERLEAVED})
      for (const int32_t q_len : {1, 3, 70}) {
        RopeOptions options = options_of(TANDEM_BF16, TANDEM_BF16, 128);
        options.layer.rope = rope;
        options.layer.rope_theta = 500'000.0;
        options.position = position;
        options.n_before = 400;
        options.q_len = q_len;
        assert_right(options);
      }
}

void parts_of_rows_factors_and_scales(void**) {
  for (const int32_t rope_dims : {2, 6, 50, 94, 96})
    for (const int32_t rope : {TANDEM_ROPE_HALVES, TANDEM_ROPE_INTERLEAVED}) {
      RopeOptions options = options_of(TANDEM_F16, TANDEM_F16, 96);
      options.layer.rope = rope;
      options.layer.rope_dims = rope_dims;
      options.layer.rope_attn_factor = 1.25;
      options.layer.rope_position_scale = 4.0;
      options.layer.soft_cap = 20.0f;
      options.position = 5000;
      options.q_len = 5;
      assert_right(options);
    }
}

void a_grid_of_many_rows(void**) {
  RopeOptions options = options_of(TANDEM_BF16, TANDEM_BF16, 64);
  options.layer.n_kv_heads = 8;
  options.layer.n_q_heads = 40;
  options.n_before = 2 * kMostRows;
  options.q_len = kMostRows;
  assert_right(options);
}

}  // namespace

int main(int argc, char** argv) {
  const test::OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  const CMUnitTest tests[] = {cmocka_unit_test(types_and_dims), cmocka_unit_test(rotated_before_they_are_stored),
                              cmocka_unit_test(long_positions), cmocka_unit_test(parts_of_rows_factors_and_scales),
                              cmocka_unit_test(a_grid_of_many_rows)};
  const int n_failed = cmocka_run_group_tests(tests, nullptr, nullptr);
  std::printf("shares of the bounds used: naive %.3f, eps mass %.3f, lse %.3f\n", shares.naive, shares.mass, shares.lse);
  return n_failed;
}
