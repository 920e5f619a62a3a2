// SPDX-License-Identifier: MIT
// What the route "recompute" keeps on a device, on the stand-in: projections, which are uploaded once for all users, and the
// time that a rebuild of keys takes.
#include "device/stand_in_tier.h"
#include "lib/pieces/device_projections.h"
#include "lib/pieces/rebuilt_pieces.h"

namespace {

using namespace tandem;
using namespace stand_in;

constexpr int32_t kHidden = 64, kHeads = 2, kDim = 64;
constexpr int64_t kOut = int64_t{kHeads} * kDim;

// Two layers of one shape. One table of angles rotates the keys of both.
struct Layers {
  std::vector<uint16_t> w = std::vector<uint16_t>(static_cast<size_t>(kHidden * kOut));
  std::vector<float> b = std::vector<float>(static_cast<size_t>(kOut), 0.25f);
  RopeTable table;
  Projection projections[2];
  std::vector<Layer> layers{2};

  Layers() {
    for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<uint16_t>(0x2c00 + i % 512);
    const std::vector<double> inv_freq(kDim / 2, 0.01);
    table = make_rope_table(inv_freq.data(), kDim / 2, false, 1.0f);
    for (size_t l = 0; l < 2; ++l) {
      Projection& p = projections[l];
      p.hidden_dim = kHidden;
      p.w_type = TANDEM_F16;
      p.b_k = b.data();
      p.rope = &table;
      Layer& layer = layers[l];
      layer.n_q_heads = layer.n_kv_heads = kHeads;
      layer.group_size = 1;
      layer.k_head_dim = layer.v_head_dim = kDim;
      layer.k_type = layer.v_type = layer.x_type = TANDEM_F16;
      layer.projection = &p;
    }
    w.push_back(0x3c00);
    for (Projection& p : projections)
      p.w_k = w.data(), p.w_v = w.data() + (&p - projections);  // each layer has other weights
  }
};

void uploads_once(void**) {
  OnStandIn on;
  const Layers of;
  {
    ProjectionsOnDevice projections;
    const DeviceProjection* there[2] = {};
    for (size_t l = 0; l < 2; ++l) assert_true(projections.get(on.device, on.tier, of.layers[l], &there[l]).ok());
    assert_int_equal(on.tier.used(Use::kWeights), ProjectionsOnDevice::bytes_of(of.layers));
    const DeviceProjection* again = nullptr;
    assert_true(projections.get(on.device, on.tier, of.layers[0], &again).ok());
    assert_ptr_equal(again, there[0]);
    assert_int_equal(on.tier.used(Use::kWeights), ProjectionsOnDevice::bytes_of(of.layers));
    assert_ptr_equal(there[0]->rope, there[1]->rope);
    assert_null(there[0]->b_v);
    assert_null(there[0]->norm_weight);
    for (size_t l = 0; l < 2; ++l) {  // the stand-in's memory is host memory
      assert_memory_equal(there[l]->w_k, of.projections[l].w_k, 2 * kHidden * kOut);
      assert_memory_equal(there[l]->w_v, of.projections[l].w_v, 2 * kHidden * kOut);
      assert_memory_equal(there[l]->b_k, of.b.data(), 4 * kOut);
    }
    assert_memory_equal(there[0]->rope, of.table.cos_sin.get(), 4 * n_floats(of.table));
  }
  assert_int_equal(on.tier.used(Use::kWeights), 0);
}

void leaves_the_caller_s_where_they_are(void**) {
  OnStandIn on;
  Layers of;
  of.projections[0].is_on_device = true;
  ProjectionsOnDevice projections;
  const DeviceProjection* there = nullptr;
  assert_true(projections.get(on.device, on.tier, of.layers[0], &there).ok());
  assert_ptr_equal(there->w_k, of.w.data());
  assert_true(on.tier.used(Use::kWeights) < 2 * kHidden * kOut + 4 * n_floats(of.table));
}

void says_what_is_missing(void**) {
  OnStandIn on;
  const Layers of;
  ProjectionsOnDevice projections;
  const DeviceProjection* there = nullptr;
  for (int64_t nth = 1; nth <= 2; ++nth) {
    on.host.controls.fail_call(kAllocate, nth, TANDEM_ERROR_OUT_OF_MEMORY);
    assert_int_equal(projections.get(on.device, on.tier, of.layers[0], &there).code(), TANDEM_ERROR_OUT_OF_MEMORY);
  }
  on.host.controls.fail_call(kAnyCall, INT64_MAX, TANDEM_OK);
  assert_true(projections.get(on.device, on.tier, of.layers[0], &there).ok());
}

void measures(void**) {
  OnStandIn on;
  const Layers of;
  const auto& counts = *find_function<CountsFn>(kCountsSymbol)();
  std::vector<RebuildLayout> layouts;
  assert_true(make_rebuild_layouts(of.layers, 3 * RebuildLayout::kPageLen * 2 * kHidden, &layouts).ok());
  ProjectionsOnDevice projections;
  const DeviceProjection* there = nullptr;
  assert_true(projections.get(on.device, on.tier, of.layers[1], &there).ok());
  std::unique_ptr<RebuildBuffers> buffers;
  assert_true(RebuildBuffers::create(on.device, on.tier, of.layers, layouts, &buffers).ok());
  assert_int_equal(on.tier.used(Use::kStream), RebuildBuffers::bytes_of(on.device, of.layers, layouts));
  const int64_t before = counts.n_rebuilt;
  double ns[2] = {};
  assert_true(buffers->measure(of.layers[1], layouts[1], *there, &ns[0]).ok());
  assert_true(counts.n_rebuilt > before);
  on.host.controls.set_delay(20'000'000);
  assert_true(buffers->measure(of.layers[1], layouts[1], *there, &ns[1]).ok());
  on.host.controls.set_delay(0);
  const auto n_rows = static_cast<double>(layouts[1].n_rows());
  assert_true(ns[0] > 0.0 && ns[1] >= 20e6 / n_rows / static_cast<double>(RebuildBuffers::kLanes));
  on.host.controls.fail_call(kRebuild, 1, TANDEM_ERROR_BACKEND);
  assert_int_equal(buffers->measure(of.layers[1], layouts[1], *there, &ns[1]).code(), TANDEM_ERROR_BACKEND);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(uploads_once), cmocka_unit_test(leaves_the_caller_s_where_they_are),
                              cmocka_unit_test(says_what_is_missing), cmocka_unit_test(measures)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
