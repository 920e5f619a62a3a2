// SPDX-License-Identifier: MIT
// Geometry of layers: accepted values, and refused ones with their messages.
#include <algorithm>
#include <memory>

#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT, kUnsupported = TANDEM_ERROR_UNSUPPORTED;
constexpr float kNan = NAN, kInf = INFINITY;

struct LayerCase {
  int32_t status;
  const char* member;
  const char* value;
  std::function<void(tandem_layer_options&)> change;
};

// Sets the shape of MLA.
void set_latent(tandem_layer_options& l) { l.k_head_dim = 576, l.v_head_dim = 512, l.v_aliases_k = 1; }

const float kNanSinks[] = {0.0f, -INFINITY, NAN, 0.0f}, kInfSinks[] = {0.0f, INFINITY, 0.0f, 0.0f};
float nan_freq[32], inf_freq[32];

const std::vector<LayerCase> kCases = {
    {kInvalid, "n_q_heads", "0", [](auto& l) { l.n_q_heads = 0; }},
    {kInvalid, "n_q_heads", "-4", [](auto& l) { l.n_q_heads = -4; }},
    {kInvalid, "n_q_heads", "65537", [](auto& l) { l.n_q_heads = 65537; }},
    {kInvalid, "n_q_heads", "2147483647", [](auto& l) { l.n_q_heads = l.n_kv_heads = INT32_MAX; }},
    {kInvalid, "n_q_heads", "n_kv_heads = 3", [](auto& l) { l.n_kv_heads = 3; }},
    {kInvalid, "n_q_heads", "n_kv_heads = 8", [](auto& l) { l.n_kv_heads = 8; }},
    {kInvalid, "n_kv_heads", "0", [](auto& l) { l.n_kv_heads = 0; }},
    {kInvalid, "n_kv_heads", "-2147483648", [](auto& l) { l.n_kv_heads = INT32_MIN; }},
    {kInvalid, "k_head_dim", "0", [](auto& l) { l.k_head_dim = 0; }},
    {kInvalid, "k_head_dim", "-64", [](auto& l) { l.k_head_dim = -64; }},
    {kUnsupported, "k_head_dim", "65", [](auto& l) { l.k_head_dim = 65; }},
    {kUnsupported, "k_head_dim", "1024", [](auto& l) { l.k_head_dim = 1024; }},
    {kUnsupported, "k_head_dim", "64, 80, 96, 112, 128, 192, 256", [](auto& l) { l.k_head_dim = 160; }},
    {kUnsupported, "k_head_dim", "not with 512 and 0", [](auto& l) { l.k_head_dim = 576, l.v_head_dim = 512; }},
    {kUnsupported, "k_head_dim", "not with 576 and 0", [](auto& l) { l.k_head_dim = 576; }},
    {kUnsupported, "k_head_dim", "not with 576 and 1", [](auto& l) { l.k_head_dim = 576, l.v_aliases_k = 1; }},
    {kUnsupported, "k_head_dim", "not with 256 and 1",
     [](auto& l) { l.k_head_dim = 576, l.v_head_dim = 256, l.v_aliases_k = 1; }},
    {kUnsupported, "k_head_dim", "512", [](auto& l) { l.k_head_dim = 512, l.v_aliases_k = 1; }},
    {kUnsupported, "v_head_dim", "512", [](auto& l) { l.k_head_dim = 256, l.v_head_dim = 512; }},
    {kUnsupported, "rope", "last 64", [](auto& l) { set_latent(l), l.rope = TANDEM_ROPE_INTERLEAVED, l.rope_dims = 64; }},
    {kInvalid, "v_head_dim", "-1", [](auto& l) { l.v_head_dim = -1; }},
    {kUnsupported, "v_head_dim", "32", [](auto& l) { l.v_head_dim = 32; }},
    {kInvalid, "v_head_dim", "128", [](auto& l) { l.v_head_dim = 128, l.v_aliases_k = 1; }},
    {kInvalid, "v_aliases_k", "2", [](auto& l) { l.v_aliases_k = 2; }},
    {kInvalid, "v_aliases_k", "-1", [](auto& l) { l.v_aliases_k = -1; }},
    {kInvalid, "sm_scale", "nan", [](auto& l) { l.sm_scale = kNan; }},
    {kInvalid, "sm_scale", "inf", [](auto& l) { l.sm_scale = kInf; }},
    {kInvalid, "sm_scale", "-0.5", [](auto& l) { l.sm_scale = -0.5f; }},
    {kInvalid, "soft_cap", "nan", [](auto& l) { l.soft_cap = kNan; }},
    {kInvalid, "soft_cap", "inf", [](auto& l) { l.soft_cap = kInf; }},
    {kInvalid, "soft_cap", "-50", [](auto& l) { l.soft_cap = -50.0f; }},
    {kInvalid, "soft_cap", "1e-39", [](auto& l) { l.soft_cap = 1e-39f; }},  // its inverse is not finite
    {kInvalid, "sliding_window_tokens", "-1", [](auto& l) { l.sliding_window_tokens = -1; }},
    {kInvalid, "sinks[2]", "nan", [](auto& l) { l.sinks = kNanSinks; }},
    {kInvalid, "sinks[1]", "inf", [](auto& l) { l.sinks = kInfSinks; }},
    {kInvalid, "rope", "3", [](auto& l) { l.rope = 3; }},
    {kInvalid, "rope", "-1", [](auto& l) { l.rope = -1; }},
    {kInvalid, "rope_dims", "7", [](auto& l) { l.rope_dims = 7; }},
    {kInvalid, "rope_dims", "-2", [](auto& l) { l.rope_dims = -2; }},
    {kInvalid, "rope_dims", "66", [](auto& l) { l.rope_dims = 66; }},
    {kInvalid, "rope_theta", "nan", [](auto& l) { l.rope_theta = NAN; }},
    {kInvalid, "rope_theta", "-10000", [](auto& l) { l.rope_theta = -10000; }},
    {kInvalid, "rope_theta", "inf", [](auto& l) { l.rope_theta = INFINITY; }},
    {kInvalid, "rope_theta", "makes angles infinite", [](auto& l) { l.rope = 1, l.rope_theta = 1e-320; }},
    {kInvalid, "rope_position_scale", "nan", [](auto& l) { l.rope_position_scale = NAN; }},
    {kInvalid, "rope_position_scale", "-1", [](auto& l) { l.rope_position_scale = -1; }},
    {kInvalid, "rope_position_scale", "inf", [](auto& l) { l.rope_position_scale = INFINITY; }},
    {kInvalid, "rope_attn_factor", "nan", [](auto& l) { l.rope_attn_factor = NAN; }},
    {kInvalid, "rope_attn_factor", "1e+300", [](auto& l) { l.rope = 2, l.rope_attn_factor = 1e300; }},
    {kInvalid, "rope_attn_factor", "1e-300", [](auto& l) { l.rope = 2, l.rope_attn_factor = 1e-300; }},
    {kInvalid, "rope_inv_freq[5]", "nan", [](auto& l) { l.rope = 1, l.rope_inv_freq = nan_freq; }},
    {kInvalid, "rope_inv_freq[31]", "inf", [](auto& l) { l.rope = 1, l.rope_inv_freq = inf_freq; }},
};

void set_frequencies() {
  for (int i = 0; i < 32; ++i) nan_freq[i] = inf_freq[i] = 0.01f;
  nan_freq[5] = NAN;
  inf_freq[31] = INFINITY;
}

void test_refused(void**) {
  World world;
  Outputs out;
  set_frequencies();
  for (const LayerCase& c : kCases) {
    // Tests the layer as the third of three layers, and alone in tandem_supports().
    std::vector<tandem_layer_options> layers(3, plain_layer());
    c.change(layers[2]);
    const std::string field = std::string("layers[2].") + c.member, alone = std::string("layer.") + c.member;
    const std::vector<Refused> cases = {
        {c.member, "tandem_model_create", c.status, field.c_str(), c.value,
         [&](tandem_error** e) { return tandem_model_create(out.at<tandem_model*>(), layers.data(), 3, e); }},
        {c.member, "tandem_supports", c.status, alone.c_str(), c.value,
         [&](tandem_error** e) { return tandem_supports(world.engine, &layers[2], nullptr, nullptr, e); }},
    };
    check_all_refused(world, cases, &out);
  }
  const tandem_layer_options layer = plain_layer();
  check_all_refused(world,
                    {{"null out", "tandem_model_create", kInvalid, "model", "NULL",
                      [&](tandem_error** e) { return tandem_model_create(nullptr, &layer, 1, e); }},
                     {"null layers", "tandem_model_create", kInvalid, "layers", "NULL",
                      [&](tandem_error** e) { return tandem_model_create(out.at<tandem_model*>(), nullptr, 1, e); }},
                     {"no layers", "tandem_model_create", kInvalid, "n_layers", "0",
                      [&](tandem_error** e) { return tandem_model_create(out.at<tandem_model*>(), &layer, 0, e); }},
                     {"negative", "tandem_model_create", kInvalid, "n_layers", "-1",
                      [&](tandem_error** e) { return tandem_model_create(out.at<tandem_model*>(), &layer, -1, e); }},
                     {"too many", "tandem_model_create", kInvalid, "n_layers", "65537",
                      [&](tandem_error** e) { return tandem_model_create(out.at<tandem_model*>(), &layer, 65537, e); }}},
                    &out);
}

void test_accepted(void**) {
  World world;
  set_frequencies();
  static const float sinks[] = {0.0f, -INFINITY, 30.0f, -1.0f};
  const std::vector<std::function<void(tandem_layer_options&)>> changes = {
      [](auto&) {},
      [](auto& l) { l.n_kv_heads = 1; },
      [](auto& l) { l.n_kv_heads = 4; },
      [](auto& l) { l.n_q_heads = 7, l.n_kv_heads = 1; },
      [](auto& l) { l.k_head_dim = 192, l.v_head_dim = 128; },
      [](auto& l) { l.k_head_dim = 192, l.v_head_dim = 128, l.v_aliases_k = 1; },
      [](auto& l) { set_latent(l); },
      [](auto& l) { set_latent(l), l.n_q_heads = 128, l.n_kv_heads = 1, l.rope_dims = 64; },
      [](auto& l) { l.sm_scale = 1.0f, l.soft_cap = 50.0f, l.sliding_window_tokens = 1; },
      [](auto& l) { l.sinks = sinks; },
      [](auto& l) { l.rope = TANDEM_ROPE_HALVES, l.rope_dims = 2; },
      [](auto& l) { l.rope = TANDEM_ROPE_INTERLEAVED, l.rope_theta = 500000.0, l.rope_position_scale = 8.0; },
      [](auto& l) { l.rope_inv_freq = nan_freq; },  // not checked, because the caller rotates
  };
  for (const auto& change : changes) {
    tandem_layer_options layer = plain_layer();
    change(layer);
    tandem_model* model = nullptr;
    OK(tandem_model_create, &model, &layer, 1);
    assert_non_null(model);
    tandem_model_release(model);
    OK(tandem_supports, world.engine, &layer, nullptr, nullptr);
  }
  for (const int32_t head_dim : {64, 80, 96, 112, 128, 192, 256}) {
    tandem_layer_options layer = plain_layer();
    layer.k_head_dim = head_dim;
    OK(tandem_supports, world.engine, &layer, nullptr, nullptr);
  }
}

// Many layers of one description share their tables. Otherwise they would take 32 GB and much time instead of a few
// megabytes.
void test_many_layers(void**) {
  std::vector<tandem_layer_options> layers(65536, plain_layer());
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].rope = TANDEM_ROPE_HALVES;
    layers[i].rope_theta = i % 2 == 0 ? 10000.0 : 1000000.0;
  }
  tandem_model* model = nullptr;
  OK(tandem_model_create, &model, layers.data(), 65536);
  tandem_model_release(model);
}

// Sinks and frequencies are copied, so the caller may free the arrays.
void test_copies(void**) {
  World world;
  auto sinks = std::make_unique<float[]>(kQHeads);
  auto frequencies = std::make_unique<float[]>(kDim / 2);
  std::fill_n(sinks.get(), kQHeads, std::log(3.0f));
  tandem_layer_options layer = plain_layer();
  layer.sinks = sinks.get();
  layer.rope = TANDEM_ROPE_HALVES;
  layer.rope_inv_freq = frequencies.get();
  tandem_model* model = nullptr;
  OK(tandem_model_create, &model, &layer, 1);
  sinks.reset();
  frequencies.reset();

  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  OK(tandem_cache_create, &cache, world.engine, model, nullptr);
  OK(tandem_session_create, &session, cache, nullptr);
  OK(tandem_sequence_create, &sequence, cache);
  // With one key, its weight is e^l / (e^l + e^sink) = 1 / 4.
  Tensor q({1, kQHeads, kDim}), k({1, kKvHeads, kDim}), v({1, kKvHeads, kDim}), o({1, kQHeads, kDim}), lse({1, kQHeads});
  for (float& value : q.values) value = 0.0f;  // l = 0
  for (float& value : v.values) value = 1.0f;
  const int64_t q_len = 1;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &q.view;
  args.k = &k.view;
  args.v = &v.view;
  args.o = &o.view;
  args.lse = &lse.view;
  OK(tandem_attend, session, &args);
  for (const float value : o.values) assert_true(std::fabs(value - 0.25f) < 1e-6f);
  for (const float value : lse.values) assert_true(std::fabs(value - std::log(4.0f)) < 1e-6f);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_refused),
      cmocka_unit_test(test_accepted),
      cmocka_unit_test(test_many_layers),
      cmocka_unit_test(test_copies),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
