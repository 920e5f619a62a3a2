// SPDX-License-Identifier: MIT
// Tensors in device memory: tandem_ggml_attend_device() and the scheduler's callback, whose outputs on a device module are
// compared with the node's on the host. Also errors and a lost device. On the stand-in, or on the named module:
//
//   ggml_device_test [/path/to/libtandem-NAME.so NAME]    then also what a call and a wait cost, layer by layer
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "device/open_device.h"
#include "device/stand_in.h"
#include "ggml_world.h"

namespace {

using namespace ggml_test;

constexpr int64_t kDim = 64, kQHeads = 4, kKvHeads = 2;
const char *module_path = STAND_IN_MODULES "/libtandem-standin.so", *module_name = stand_in::kName;
std::unique_ptr<tandem::test::OpenDevice> device;

int32_t n_waits = 0, wait_result = 0;
int32_t wait(void* stream) {
  assert_null(stream);
  ++n_waits;
  device->wait();
  return wait_result;
}

tandem_engine_options with_device() {
  tandem_engine_options options = two_threads();
  options.backend = module_name;
  options.backend_path = module_path;
  return options;
}

tandem_session_options windowed() {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = 64;  // the host attends the rest
  return options;
}

// q, k, v and o of ggml. Their data is on the device and belongs to no buffer, as between two graphs.
struct DeviceTensors {
  Graph graph;
  ggml_tensor* all[4];  // q, k, v, o
  std::vector<float> values[4];

  DeviceTensors(int64_t n_tokens, int64_t seed) {
    const int64_t heads[4] = {kQHeads, kKvHeads, kKvHeads, kQHeads};
    for (int i = 0; i < 4; ++i) {
      ggml_tensor* host = graph.heads(GGML_TYPE_F32, kDim, heads[i], n_tokens, seed * 4 + i);
      values[i] = values_of(host);
      host->data = device->allocate(static_cast<int64_t>(ggml_nbytes(host)));
      device->upload(host->data, values[i].data(), static_cast<int64_t>(ggml_nbytes(host)));
      all[i] = host;
    }
  }
  DeviceTensors(const DeviceTensors&) = delete;
  ~DeviceTensors() {
    for (const ggml_tensor* tensor : all) device->release(tensor->data);
  }
  std::vector<float> output() const {
    std::vector<float> o(values[3].size());
    device->wait();
    device->download(o.data(), all[3]->data, static_cast<int64_t>(o.size() * sizeof(float)));
    return o;
  }
};

// Returns the node's output for the same tensors on the host.
std::vector<float> on_host(const World& world, const DeviceTensors& tensors, const Batch& batch) {
  const Graph graph;
  ggml_tensor* qkv[3];
  for (int i = 0; i < 3; ++i) {
    qkv[i] = ggml_new_tensor_3d(graph.ctx(), GGML_TYPE_F32, kDim, tensors.all[i]->ne[1], tensors.all[i]->ne[2]);
    Graph::round_into(qkv[i], tensors.values[i].data());
  }
  expect_ok(world.state.get(), tandem_ggml_begin(world.state.get(), &batch.view));
  ggml_tensor* o = tandem_ggml_attend(graph.ctx(), world.state.get(), 0, qkv[0], qkv[1], qkv[2]);
  graph.compute(o);
  expect_ok(world.state.get(), tandem_ggml_end(world.state.get()));
  return values_of(o);
}

std::unique_ptr<World> device_world(const tandem_session_options& session = windowed()) {
  auto world = std::make_unique<World>(std::vector<tandem_layer_options>{plain_layer()}, stored_as(TANDEM_F32),
                                       with_device(), session);
  world->state.reset();
  tandem_ggml* made = nullptr;
  tandem_ggml_options options = world->options();
  options.wait = wait;
  assert_int_equal(tandem_ggml_create(&made, &options, nullptr), TANDEM_OK);
  world->state.reset(made);
  return world;
}

void assert_close(const std::vector<float>& got, const std::vector<float>& expected) {
  for (size_t i = 0; i < expected.size(); ++i)
    if (!(std::fabs(got[i] - expected[i]) <= 2e-5f)) fail_msg("element %zu: %g instead of %g", i, got[i], expected[i]);
}

// Compares two sequences attended by a call and by the callback.
void give_what_the_host_gives(const tandem_session_options& session) {
  const auto world = device_world(session);
  const World host({plain_layer()}, stored_as(TANDEM_F32), two_threads(), session);
  tandem_ggml* state = world->state.get();
  int64_t seed = 0;
  n_waits = 0;
  for (const std::vector<int64_t>& q_lens : std::vector<std::vector<int64_t>>{{150, 40}, {1, 1}, {9, 1}, {1, 1}}) {
    DeviceTensors tensors(q_lens[0] + q_lens[1], ++seed);
    const Batch batch({0, 1}, q_lens, {host.length(0), host.length(1)});
    ggml_tensor** all = tensors.all;
    expect_ok(state, tandem_ggml_begin(state, &batch.view));
    if (seed % 2 == 0) {
      expect_ok(state, tandem_ggml_attend_device(state, 0, all[0], all[1], all[2], all[3]));
    } else {
      ggml_tensor* node = tandem_ggml_attend_cut(tensors.graph.ctx(), state, 0, all[0], all[1], all[2]);
      node->data = all[3]->data;  // as a scheduler's allocator does
      assert_true(tandem_ggml_eval(node, true, nullptr));
      assert_true(tandem_ggml_eval(node, false, nullptr));
    }
    const std::vector<float> o = tensors.output();
    expect_ok(state, tandem_ggml_end(state));
    assert_close(o, on_host(host, tensors, batch));
  }
  assert_int_equal(n_waits, 2);
  assert_int_equal(world->length(0), 161);
  tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
  OK(tandem_session_get_stats, &stats, world->session.get());
  assert_int_equal(stats.n_refreshes > 0 && stats.judged_kv_bytes > 0, session.pruning != nullptr);
  assert_int_equal(stats.pattern_pairs < stats.pattern_dense_pairs, session.patterns != nullptr);
}

// Prompts are longer than the window.
void gives_what_the_host_gives(void**) { give_what_the_host_gives(windowed()); }

// The window has all keys, and few of them are attended.
void gives_what_the_host_gives_where_it_prunes(void**) {
  tandem_pruning_stage stage = TANDEM_PRUNING_STAGE_INIT;
  stage.judge = TANDEM_JUDGE_BOUNDS;
  stage.chunk_tokens = 8;
  stage.keep_tokens = 32;
  stage.refresh_interval = 2;
  tandem_pruning_record record = TANDEM_PRUNING_RECORD_INIT;
  record.sink_tokens = 8;
  record.window_tokens = 32;
  record.stages = &stage;
  record.n_stages = 1;
  tandem_pruning pruning = TANDEM_PRUNING_INIT;
  pruning.decode = pruning.append = &record;
  pruning.n_decode = pruning.n_append = 1;
  tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;
  session.policy = "hip";
  session.pruning = &pruning;
  session.window_tokens = 256;
  give_what_the_host_gives(session);
}

// As above. The heads of an append search for their keys on the device.
void gives_what_the_host_gives_by_head_patterns(void**) { give_what_the_host_gives(FourPatterns().session); }

void other_nodes_are_not_the_callback_s(void**) {
  const Graph graph;
  ggml_tensor* plain = ggml_cont(graph.ctx(), graph.heads(GGML_TYPE_F32, kDim, 1, 1, 1));
  assert_false(tandem_ggml_eval(plain, true, nullptr));
  assert_true(tandem_ggml_eval(plain, false, nullptr));
}

// Keys that the call would not append, and V with longer heads than q, are refused when the cut is built and again when it
// is computed.
void cuts_that_cannot_be(void**) {
  tandem_layer_options wide = plain_layer(kQHeads, kKvHeads, 64);
  wide.v_head_dim = 128;
  const World world({plain_layer(), wide});
  tandem_ggml* state = world.state.get();
  const Batch batch({0}, {1});
  for (const bool is_wide : {false, true}) {
    const Graph graph;
    ggml_tensor* q = graph.heads(GGML_TYPE_F32, kDim, kQHeads, 1, 1);
    ggml_tensor* node = tandem_ggml_attend_cut(graph.ctx(), state, is_wide, q, is_wide ? q : nullptr, nullptr);
    assert_int_equal(tandem_ggml_begin(state, &batch.view), TANDEM_ERROR_UNSUPPORTED);
    assert_string_equal(tandem_ggml_field(state), is_wide ? "v_head_dim" : "k");
    expect_ok(state, tandem_ggml_begin(state, &batch.view));
    assert_true(tandem_ggml_eval(node, false, nullptr));
    assert_true(all_nan(node));
    assert_int_equal(tandem_ggml_end(state), TANDEM_ERROR_INVALID_ARGUMENT);
    assert_string_equal(tandem_ggml_field(state), "layer_idx");
  }
  assert_null(tandem_ggml_attend_cut(nullptr, state, 0, nullptr, nullptr, nullptr));
}

void errors(void**) {
  const auto world = device_world();
  tandem_ggml* state = world->state.get();
  const Batch batch({0}, {3});
  const auto failing = [&](int32_t status, const char* field, const std::function<int32_t(DeviceTensors*)>& call) {
    DeviceTensors tensors(3, 1);
    expect_ok(state, tandem_ggml_begin(state, &batch.view));
    call(&tensors);
    const int32_t got = tandem_ggml_end(state);
    if (got != status || std::strcmp(tandem_ggml_field(state), field) != 0)
      fail_msg("%s: %s", tandem_status_name(got), tandem_ggml_message(state));
    assert_int_equal(world->length(0), 0);
  };
  failing(TANDEM_ERROR_INVALID_ARGUMENT, "o", [&](DeviceTensors* t) {
    const int32_t status = tandem_ggml_attend_device(state, 0, t->all[0], t->all[1], t->all[2], nullptr);
    assert_int_equal(status, TANDEM_ERROR_INVALID_ARGUMENT);
    return status;
  });
  failing(TANDEM_ERROR_INVALID_ARGUMENT, "layer_idx",
          [&](DeviceTensors* t) { return tandem_ggml_attend_device(state, 3, t->all[0], t->all[1], t->all[2], t->all[3]); });
  failing(TANDEM_ERROR_INVALID_ARGUMENT, "q", [&](DeviceTensors* t) {  // a buffer of the host
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_buffer_t buffer = ggml_backend_alloc_buffer(cpu, 64);
    t->all[0]->buffer = buffer;
    const int32_t status = tandem_ggml_attend_device(state, 0, t->all[0], t->all[1], t->all[2], t->all[3]);
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(cpu);
    return status;
  });
  const int32_t flag = 0;
  Batch stoppable({0}, {3});
  stoppable.view.cancel = &flag;
  DeviceTensors tensors(3, 1);
  expect_ok(state, tandem_ggml_begin(state, &stoppable.view));
  assert_int_equal(tandem_ggml_attend_device(state, 0, tensors.all[0], tensors.all[1], tensors.all[2], tensors.all[3]),
                   TANDEM_ERROR_UNSUPPORTED);
  assert_int_equal(tandem_ggml_end(state), TANDEM_ERROR_UNSUPPORTED);
  assert_int_equal(world->length(0), 0);

  const World without;  // an engine without a device
  expect_ok(without.state.get(), tandem_ggml_begin(without.state.get(), &batch.view));
  assert_int_equal(
      tandem_ggml_attend_device(without.state.get(), 0, tensors.all[0], tensors.all[1], tensors.all[2], tensors.all[3]),
      TANDEM_ERROR_UNSUPPORTED);
  assert_int_equal(tandem_ggml_end(without.state.get()), TANDEM_ERROR_UNSUPPORTED);
}

// A wait fails, and on the stand-in the device is lost. Host tensors still work.
void a_device_that_is_lost(void**) {
  const auto world = device_world();
  tandem_ggml* state = world->state.get();
  const Batch batch({0}, {3});
  DeviceTensors tensors(3, 1);
  ggml_tensor* node = tandem_ggml_attend_cut(tensors.graph.ctx(), state, 0, tensors.all[0], tensors.all[1], tensors.all[2]);
  node->data = tensors.all[3]->data;
  expect_ok(state, tandem_ggml_begin(state, &batch.view));
  wait_result = 700;
  tandem_ggml_eval(node, false, nullptr);
  wait_result = 0;
  assert_int_equal(tandem_ggml_end(state), TANDEM_ERROR_DEVICE_LOST);
  assert_string_equal(tandem_ggml_field(state), "wait");
  assert_int_equal(world->length(0), 0);
  if (std::strcmp(module_name, stand_in::kName) != 0) return;

  void* module = dlopen(module_path, RTLD_NOW | RTLD_LOCAL);
  const auto* controls = reinterpret_cast<stand_in::ControlsFn>(dlsym(module, stand_in::kControlsSymbol))();
  expect_ok(state, tandem_ggml_begin(state, &batch.view));
  controls->lose_device();
  const int32_t status = tandem_ggml_attend_device(state, 0, tensors.all[0], tensors.all[1], tensors.all[2], tensors.all[3]);
  assert_int_equal(status, TANDEM_ERROR_DEVICE_LOST);
  assert_int_equal(tandem_ggml_end(state), TANDEM_ERROR_DEVICE_LOST);
  controls->reset();
  const Batch unchecked({0}, {3});
  on_host(*world, tensors, unchecked);
}

double microseconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

// Prints the cost per layer of a step of one token: with one wait after all calls, and with a wait after each call.
void print_costs() {
  constexpr int32_t kLayers = 32;
  const World made(std::vector<tandem_layer_options>(kLayers, plain_layer(32, 8, 128)), stored_as(TANDEM_BF16),
                   with_device());
  tandem_ggml* state = made.state.get();
  const Graph graph;
  ggml_tensor* all[4];
  const int64_t heads[4] = {32, 8, 8, 32};
  for (int i = 0; i < 4; ++i) {
    all[i] = graph.heads(GGML_TYPE_F32, 128, heads[i], 1, i);
    const std::vector<float> values = values_of(all[i]);
    all[i]->data = device->allocate(static_cast<int64_t>(ggml_nbytes(all[i])));
    device->upload(all[i]->data, values.data(), static_cast<int64_t>(ggml_nbytes(all[i])));
  }
  const Batch batch({0}, {1});
  std::vector<double> us[2];
  for (int step = 0; step < 60; ++step) {
    expect_ok(state, tandem_ggml_begin(state, &batch.view));
    us[step % 2].push_back(microseconds([&] {
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        expect_ok(state, tandem_ggml_attend_device(state, layer, all[0], all[1], all[2], all[3]));
        if (step % 2 == 1 || layer == kLayers - 1) device->wait();
      }
    }));
    expect_ok(state, tandem_ggml_end(state));
  }
  for (ggml_tensor* tensor : all) device->release(tensor->data);
  for (std::vector<double>& times : us) std::sort(times.begin(), times.end());
  std::printf("a layer of a decode step: %.1f us, with a wait after each call %.1f us\n", us[0][15] / kLayers,
              us[1][15] / kLayers);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) module_path = argv[1], module_name = argv[2];
  device = std::make_unique<tandem::test::OpenDevice>(module_path);
  const CMUnitTest tests[] = {cmocka_unit_test(gives_what_the_host_gives),
                              cmocka_unit_test(gives_what_the_host_gives_where_it_prunes),
                              cmocka_unit_test(gives_what_the_host_gives_by_head_patterns),
                              cmocka_unit_test(other_nodes_are_not_the_callback_s),
                              cmocka_unit_test(cuts_that_cannot_be),
                              cmocka_unit_test(errors),
                              cmocka_unit_test(a_device_that_is_lost)};
  const int n_failed = cmocka_run_group_tests(tests, nullptr, nullptr);
  if (n_failed == 0 && argc == 3) print_costs();
  device.reset();
  return n_failed;
}
