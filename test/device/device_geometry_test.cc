// SPDX-License-Identifier: MIT
// The layers that a session on a device takes. Layers that the device cannot attend are refused when the session is made,
// with field and value. Every layer of a session that is made can be appended to and attended on the device.
#include <array>

#include "device/device_side.h"

using namespace tandem_test;
using Parts = std::vector<std::string>;

namespace {

struct Geometry {
  int32_t k_dim = 64, v_dim = 64, k_type = TANDEM_BF16, v_type = TANDEM_BF16;
  int32_t rotation = TANDEM_ROTATION_NONE, rope = TANDEM_ROPE_CALLER;
  bool has_caps = false;  // with a soft cap, sinks and a sliding window
  const char* policy = "all";

  bool aliases() const { return k_dim == 576 || k_dim == 2 * v_dim; }
  tandem_layer_options layer() const {
    static constexpr std::array<float, kQHeads> kSinks = {0.5f, -1.0f, 0.0f, 1.0f};
    tandem_layer_options options = TANDEM_LAYER_OPTIONS_INIT;
    options.n_q_heads = kQHeads;
    options.n_kv_heads = kKvHeads;
    options.k_head_dim = k_dim;
    options.v_head_dim = v_dim;
    options.v_aliases_k = aliases();
    options.rope = rope;
    if (has_caps) {
      options.soft_cap = 30.0f;
      options.sinks = kSinks.data();
      options.sliding_window_tokens = 40;
    }
    return options;
  }
  tandem_cache_options cache() const {
    tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
    options.k_type = k_type;
    options.v_type = v_type;
    options.k_rotation = rotation;
    return options;
  }
  tandem_session_options session() const { return Side::options_of(policy); }
  std::string text() const {
    char out[160];
    std::snprintf(out, sizeof out, "K type %d of %d, V type %d of %d, rotation %d, rope %d, caps %d, policy %s", k_type,
                  k_dim, v_type, v_dim, rotation, rope, has_caps, policy);
    return out;
  }
};

struct Refusal {
  int32_t status = TANDEM_OK;
  std::string field, message;

  void keep(int32_t got, tandem_error* error) {
    status = got;
    field = tandem_error_field(error);
    message = tandem_error_message(error);
    tandem_error_release(error);
  }
};

tandem_engine* engine_of(bool has_device) {
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.n_threads = 1;
  options.matmul_rows = 1;
  if (has_device) {
    options.backend = stand_in::kName;
    options.backend_path = STAND_IN_MODULES "/libtandem-standin.so";
  }
  return make_engine(options);
}

// A cache and a session of one layer. is_possible: model and cache could be made.
struct OneLayer {
  Geometry of;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  bool is_possible = false;
  Refusal refusal;  // why the session was refused

  OneLayer(tandem_engine* engine, const Geometry& geometry) : of(geometry) {
    const tandem_layer_options layer = of.layer();
    const tandem_cache_options cache_options = of.cache();
    const tandem_session_options session_options = of.session();
    tandem_error* error = nullptr;
    is_possible = tandem_model_create(&model, &layer, 1, nullptr) == TANDEM_OK &&
                  tandem_cache_create(&cache, engine, model, &cache_options, nullptr) == TANDEM_OK;
    if (!is_possible) return;
    const int32_t got = tandem_session_create(&session, cache, &session_options, &error);
    refusal.keep(got, error);
  }
  OneLayer(const OneLayer&) = delete;
  ~OneLayer() {
    tandem_session_release(session);
    tandem_cache_release(cache);
    tandem_model_release(model);
  }

  // Attends an append and a decode on device tensors.
  void attend() const {
    int64_t sequence = 0;
    OK(tandem_sequence_create, &sequence, cache);
    for (const int64_t n : {70, 1}) {
      Tensor q({n, kQHeads, of.k_dim}, 1), k({n, kKvHeads, of.k_dim}, 2), v({n, kKvHeads, of.v_dim}, 3),
          o({n, kQHeads, of.v_dim}, 4);
      std::vector<void*> memory;
      for (Tensor* tensor : {&q, &k, &v, &o}) {
        const auto bytes = static_cast<int64_t>(tensor->values.size() * sizeof(float));
        memory.push_back(device->allocate(bytes));
        device->upload(memory.back(), tensor->values.data(), bytes);
        tensor->view.device_type = TANDEM_DEVICE_CUDA;
        tensor->view.data = memory.back();
      }
      tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
      args.n_sequences = 1;
      args.sequences = &sequence;
      args.q_lens = &n;
      args.q = &q.view;
      args.k = &k.view;
      args.v = of.aliases() ? nullptr : &v.view;
      args.o = &o.view;
      tandem_error* error = nullptr;
      const int32_t status = tandem_attend(session, &args, &error);
      if (status != TANDEM_OK)
        fail_msg("%s: %lld tokens: %s", of.text().c_str(), static_cast<long long>(n), tandem_error_message(error));
      device->wait();
      for (void* data : memory) device->release(data);
    }
  }
};

void assert_named(const Refusal& refusal, const Geometry& of, const Parts& parts) {
  bool is_good = refusal.status == TANDEM_ERROR_UNSUPPORTED && refusal.field == parts.front();
  for (const std::string& part : parts) is_good = is_good && refusal.message.find(part) != std::string::npos;
  if (!is_good)
    fail_msg("%s: %s, %s: %s", of.text().c_str(), tandem_status_name(refusal.status), refusal.field.c_str(),
             refusal.message.c_str());
}

// Every refusal comes when the session is made, and says what the device lacks.
void every_session_can_attend(void**) {
  tandem_engine* const engine = engine_of(true);
  const char* const kPolicies[] = {"all", "hgca", "streaming"};
  const int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};
  const std::array<int32_t, 2> kDims[] = {{64, 64}, {192, 128}, {128, 192}, {96, 256}, {576, 512}, {128, 64}, {256, 128}};
  int n_served = 0, n_refused = 0;
  Geometry of;
  const auto try_one = [&] {
    of.policy = kPolicies[(n_served + n_refused) % 3];
    const OneLayer one(engine, of);
    if (!one.is_possible) return;
    if (one.session == nullptr) {
      ++n_refused;
      assert_int_equal(one.refusal.status, TANDEM_ERROR_UNSUPPORTED);
      const tandem_layer_options layer = of.layer();
      const tandem_cache_options cache = of.cache();
      const tandem_session_options session = of.session();
      assert_int_equal(tandem_supports(engine, &layer, &cache, &session, nullptr), TANDEM_ERROR_UNSUPPORTED);
      return;
    }
    ++n_served;
    one.attend();
  };
  for (const auto& [k_dim, v_dim] : kDims)
    for (const int32_t k_type : kTypes)
      for (const int32_t v_type : kTypes)
        for (const int32_t rotation : {TANDEM_ROTATION_NONE, TANDEM_ROTATION_HADAMARD})
          for (const int32_t rope : {TANDEM_ROPE_CALLER, TANDEM_ROPE_INTERLEAVED})
            for (const bool has_caps : {false, true}) {
              of = {k_dim, v_dim, k_type, v_type, rotation, rope, has_caps};
              try_one();
            }
  print_message("%d sessions served, %d refused\n", n_served, n_refused);
  assert_true(n_served > 200 && n_refused > 200);
  tandem_engine_release(engine);
}

// A refusal names the layer, its types and dims, and the module's reason. An engine without a device takes the same layer.
void refusals_name_field_and_value(void**) {
  tandem_engine *const engine = engine_of(true), *const without = engine_of(false);
  const struct {
    Geometry of;
    Parts parts;
  } kCases[] = {
      {{.k_dim = 192, .v_dim = 128},
       {"v_head_dim", "layer 0", "k_head_dim = 192", "v_head_dim = 128", "there is no kernel"}},
      {{.k_dim = 576, .v_dim = 512}, {"v_aliases_k", "layer 0", "v_aliases_k = 1", "k_head_dim = 576"}},
  };
  for (const auto& one : kCases) {
    const OneLayer refused(engine, one.of), served(without, one.of);
    assert_named(refused.refusal, one.of, one.parts);
    assert_non_null(served.session);
    const tandem_layer_options layer = one.of.layer();
    const tandem_cache_options cache = one.of.cache();
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    tandem_error* error = nullptr;
    Refusal of_supports, of_plan;
    const int32_t supported = tandem_supports(engine, &layer, &cache, nullptr, &error);
    of_supports.keep(supported, error);
    assert_named(of_supports, one.of, one.parts);
    error = nullptr;
    const int32_t planned = tandem_plan_memory(&plan, engine, refused.model, &cache, nullptr, nullptr, 0, &error);
    of_plan.keep(planned, error);
    assert_named(of_plan, one.of, one.parts);
  }
  tandem_engine_release(engine);
  tandem_engine_release(without);
}

// The refused layer is named if it is one of several, also with more layers than tickets can name.
void the_layer_is_named(void**) {
  tandem_engine* const engine = engine_of(true);
  for (const int32_t n_layers : {3, 4097}) {
    std::vector<tandem_layer_options> layers(static_cast<size_t>(n_layers), Geometry().layer());
    if (n_layers == 3) layers[2].k_head_dim = 192, layers[2].v_head_dim = 128;
    tandem_model* model = nullptr;
    tandem_cache* cache = nullptr;
    tandem_session* session = nullptr;
    OK(tandem_model_create, &model, layers.data(), n_layers);
    OK(tandem_cache_create, &cache, engine, model, nullptr);
    tandem_error* error = nullptr;
    const int32_t got = tandem_session_create(&session, cache, nullptr, &error);
    assert_refused(got, error, TANDEM_ERROR_UNSUPPORTED, n_layers == 3 ? "v_head_dim" : "model",
                   n_layers == 3 ? "layer 2 (" : "4097 layers");
    assert_null(session);
    tandem_cache_release(cache);
    tandem_model_release(model);
  }
  tandem_engine_release(engine);
}

// Host tensors still work. A lost device cannot say what it supports, which is no reason to refuse.
void a_lost_device_refuses_no_session(void**) {
  tandem_engine* const engine = engine_of(true);
  controls.lose_device();
  const OneLayer one(engine, Geometry());
  assert_non_null(one.session);
  controls.reset();
  tandem_engine_release(engine);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(every_session_can_attend, forget),
      cmocka_unit_test_teardown(refusals_name_field_and_value, forget),
      cmocka_unit_test_teardown(the_layer_is_named, forget),
      cmocka_unit_test_teardown(a_lost_device_refuses_no_session, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
