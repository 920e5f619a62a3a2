// SPDX-License-Identifier: MIT
// Layers that are run batch by batch (KVPR's column-by-column schedule), with W_K and W_V among the weights that cross the
// bus, on the stand-in. One session has all sequences, and each call attends one batch. Outputs must be those of a CPU twin
// that has the weights. Keys are rebuilt while the caller's stream does other work. Blocks cross the bus once a round.
#include <array>
#include <functional>
#include <thread>

#include "device/gate.h"
#include "device/hidden_side.h"
#include "lib/pieces/rebuilt_pieces.h"

using namespace tandem_test;

namespace {

constexpr int32_t kLayers = 3, kBatches = 4, kBlocks = 4;  // blocks of a layer: W_K, W_V, and two that are used after them
constexpr int64_t kWeightBytes = int64_t{kKvHeads} * kDim * kHidden * 2, kOtherBytes = 5000;

struct Layers {
  std::vector<std::unique_ptr<Projected>> made;

  explicit Layers(int32_t rope = 0) {
    for (int32_t l = 0; l < kLayers; ++l) made.push_back(std::make_unique<Projected>(rope, TANDEM_NORM_LAYER, 71 + 10 * l));
  }
  const Projected& operator[](int32_t l) const { return *made[static_cast<size_t>(l)]; }
};

tandem_cache_options hidden_cache() {
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.x_type = TANDEM_BF16;
  return options;
}

// A side of several layers. On a device their projections have no weights, because the weights are blocks that cross the
// bus.
struct Columns : Side {
  tandem_weights* weights = nullptr;

  explicit Columns(const Layers& layers, bool has_device = true, bool is_told = true, const char* route = "recompute",
                   int64_t other_bytes = kOtherBytes)
      : Side(has_device, "all") {
    tandem_session_release(session);
    tandem_cache_release(cache);
    tandem_model_release(model);
    std::vector<tandem_layer_projection> projections;
    std::vector<tandem_layer_options> options;
    for (int32_t l = 0; l < kLayers; ++l) {
      projections.push_back(layers[l].options);
      if (has_device) projections.back().w_k = projections.back().w_v = nullptr;
    }
    for (int32_t l = 0; l < kLayers; ++l) {
      tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
      layer.n_q_heads = kQHeads;
      layer.n_kv_heads = kKvHeads;
      layer.k_head_dim = kDim;
      layer.projection = &projections[static_cast<size_t>(l)];
      options.push_back(layer);
    }
    OK(tandem_model_create, &model, options.data(), kLayers);
    const tandem_cache_options cache_options = hidden_cache();
    OK(tandem_cache_create, &cache, engine, model, &cache_options);
    const tandem_session_options session_options = options_of_session(has_device ? route : "host");
    OK(tandem_session_create, &session, cache, &session_options);
    OK(tandem_sequence_create, &sequence, cache);
    if (!has_device) return;
    const std::vector<unsigned char> other(static_cast<size_t>(other_bytes), 0xff);
    std::vector<const void*> data;
    std::vector<int64_t> n_bytes;
    for (int32_t l = 0; l < kLayers; ++l) {
      for (const void* block : {layers[l].options.w_k, layers[l].options.w_v, static_cast<const void*>(other.data()),
                                static_cast<const void*>(other.data())})
        data.push_back(block);
      for (const int64_t bytes : {kWeightBytes, kWeightBytes, other_bytes, other_bytes}) n_bytes.push_back(bytes);
    }
    tandem_weights_options weights_options = TANDEM_WEIGHTS_OPTIONS_INIT;
    weights_options.buffer_bytes = 4 * (kWeightBytes + (other_bytes + 255) / 256 * 256);  // room for two layers
    OK(tandem_weights_create, &weights, engine, data.data(), n_bytes.data(), kLayers * kBlocks, &weights_options);
    for (int32_t l = 0; is_told && l < kLayers; ++l)
      OK(tandem_session_use_weights, session, l, weights, kBlocks * l, kBlocks * l + 1);
  }
  ~Columns() {
    tandem_session_release(session);
    session = nullptr;
    tandem_weights_release(weights);
  }
  static tandem_session_options options_of_session(const char* route) {
    tandem_session_options options = route_options();
    options.route = route;
    if (std::string(route) != "recompute") options.recompute_share = 0.0;
    return options;
  }
  tandem_weights_stats weights_stats() const {
    tandem_weights_stats stats = TANDEM_WEIGHTS_STATS_INIT;
    OK(tandem_weights_get_stats, &stats, weights);
    return stats;
  }
  void use(int32_t l, void* stream = nullptr) const {
    void* data = nullptr;
    for (int32_t b = 0; b < kBlocks; ++b) OK(tandem_weights_use, &data, weights, kBlocks * l + b, stream);
  }
  void done(int32_t l, void* stream = nullptr) const {
    for (int32_t b = 0; b < kBlocks; ++b) OK(tandem_weights_done, weights, kBlocks * l + b, stream);
  }
};

struct Shape {
  int64_t n_sequences, q_len, length;
};

// The sequences of a batch on both sides. The host appends their prompts.
struct Batch {
  std::vector<int64_t> ids[2];
  std::vector<int64_t> q_lens;

  Batch(const Layers& layers, const Columns& side, const Columns& twin, const Shape& shape, int64_t seed)
      : q_lens(static_cast<size_t>(shape.n_sequences), shape.q_len) {
    for (int64_t i = 0; i < shape.n_sequences; ++i) {
      for (const Columns* one : {&side, &twin}) OK(tandem_sequence_create, &ids[one == &twin].emplace_back(), one->cache);
      for (int32_t l = 0; l < kLayers; ++l) {
        const HiddenCall prompt(layers[l], shape.length, 0, seed + 10 * i + l);
        for (const Columns* one : {&side, &twin})
          OK(tandem_sequence_append_x, one->cache, ids[one == &twin].back(), l, &prompt.k.view, &prompt.v.view,
             &prompt.x.view, nullptr);
      }
    }
  }
  tandem_attend_args args(const HiddenCall& call, const Columns& one, bool is_twin, int32_t l) const {
    tandem_attend_args args = call.args(one);
    args.layer_idx = l;
    args.sequences = ids[is_twin].data();
    args.q_lens = q_lens.data();
    args.n_sequences = static_cast<int32_t>(q_lens.size());
    return args;
  }
};

void attend_batch(const Batch& batch, const HiddenCall& call, const Columns& one, bool is_twin, int32_t l,
                  void* stream = nullptr) {
  tandem_attend_args args = batch.args(call, one, is_twin, l);
  args.stream = stream;
  OK(tandem_attend, one.session, &args);
}

bool comes(const std::function<bool()>& is_there) {
  for (int i = 0; i < 20'000 && !is_there(); ++i) std::this_thread::sleep_for(std::chrono::microseconds(500));
  return is_there();
}

// ---- tests -------------------------------------------------------------------------------------------------------------

// Two steps through all layers, each layer batch by batch. The test waits for nothing before the end.
void answers_are_right(void**) {
  for (const int32_t rope : {0, TANDEM_ROPE_HALVES})
    for (const int64_t delay_ns : {0, 100'000}) {
      const Layers layers(rope);
      const Columns side(layers), twin(layers, false);
      const int64_t n_sequences = rope != 0 ? 1 : 3, q_len = rope != 0 ? 2 : 1, length = 330;
      std::vector<Batch> batches;
      for (int32_t b = 0; b < kBatches; ++b)
        batches.emplace_back(layers, side, twin, Shape{n_sequences, q_len, length + 7 * b}, 1000 * b);
      const tandem_weights_stats before = side.weights_stats();
      controls.set_delay(delay_ns);
      std::vector<std::unique_ptr<HiddenCall>> made, on_host;
      for (int step = 0; step < 2; ++step)
        for (int32_t l = 0; l < kLayers; ++l) {
          side.use(l);
          for (int32_t b = 0; b < kBatches; ++b) {
            const int64_t position = length + 7 * b + step * q_len, seed = 5000 + 100 * step + 10 * l + b;
            for (auto* calls : {&made, &on_host})
              calls->push_back(std::make_unique<HiddenCall>(layers[l], n_sequences * q_len, position, seed));
            made.back()->to_device();
            attend_batch(batches[static_cast<size_t>(b)], *made.back(), side, false, l);
            attend_batch(batches[static_cast<size_t>(b)], *on_host.back(), twin, true, l);
          }
          side.done(l);
        }
      for (size_t i = 0; i < made.size(); ++i) assert_near(made[i]->output(), on_host[i]->output());
      const tandem_session_stats stats = side.stats();
      assert_int_equal(stats.n_host_parts, 0);
      assert_int_equal(stats.streamed_kv_bytes, 0);
      assert_int_equal(stats.n_stream_parts, 2 * kLayers * kBatches);
      // Each block crosses once a round, before it is asked for.
      const tandem_weights_stats after = side.weights_stats();
      assert_int_equal(after.n_ahead - before.n_ahead, after.n_streamed_uses - before.n_streamed_uses);
      assert_int_equal(after.n_streamed_uses, 2 * kLayers * (kBlocks + 2 * kBatches));
      assert_in_range(after.streamed_bytes, 4 * kLayers * (kWeightBytes + kOtherBytes),
                      4 * (kLayers + 1) * (kWeightBytes + kOtherBytes));
      controls.set_delay(0);
    }
}

// The caller's stream is held before it reaches a call. Meanwhile the call's first pieces, one for each lane, arrive and are
// rebuilt. No further piece is, because these two are not yet attended.
void makes_keys_before_queries_are_there(void**) {
  const Layers layers;
  const Columns side(layers), twin(layers, false);
  const Batch batch(layers, side, twin, {2, 1, 400}, 1);
  HiddenCall first(layers[0], 2, 400, 7), first_host(layers[0], 2, 400, 7), next(layers[0], 2, 401, 8),
      next_host(layers[0], 2, 401, 8);
  first.to_device();
  next.to_device();
  side.use(0);
  attend_batch(batch, first, side, false, 0);  // takes the memory that later calls need
  attend_batch(batch, first_host, twin, true, 0);
  assert_near(first.output(), first_host.output());
  const int64_t rebuilt = counts.n_rebuilt, attended = counts.n_attended;
  stand_in::Gate gate(controls);
  attend_batch(batch, next, side, false, 0);
  assert_true(comes([&] { return counts.n_rebuilt == rebuilt + tandem::RebuildBuffers::kLanes; }));
  assert_int_equal(counts.n_attended, attended);
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  assert_int_equal(counts.n_attended, attended);
  assert_int_equal(counts.n_rebuilt, rebuilt + tandem::RebuildBuffers::kLanes);
  assert_false(gate.is_open());
  gate.open();
  attend_batch(batch, next_host, twin, true, 0);
  assert_near(next.output(), next_host.output());
  side.done(0);
}

// The same for the next batch, while the stream is held after the first one.
void makes_keys_of_the_next_batch(void**) {
  const Layers layers;
  const Columns side(layers), twin(layers, false);
  const int64_t length = 128 + kWindow;  // one piece
  std::vector<Batch> batches;
  for (int32_t b = 0; b < 2; ++b) batches.emplace_back(layers, side, twin, Shape{1, 1, length}, 1000 * b);
  std::vector<std::unique_ptr<HiddenCall>> calls, on_host;
  for (int64_t i = 0; i < 4; ++i) {
    for (auto* to : {&calls, &on_host}) to->push_back(std::make_unique<HiddenCall>(layers[0], 1, length + i / 2, 50 + i));
    calls.back()->to_device();
  }
  side.use(0);
  for (const size_t b : {0, 1}) attend_batch(batches[b], *calls[b], side, false, 0);
  device->wait();
  const int64_t rebuilt = counts.n_rebuilt, attended = counts.n_attended, sent = counts.strided_bytes;
  attend_batch(batches[0], *calls[2], side, false, 0);
  stand_in::Gate gate(controls);
  attend_batch(batches[1], *calls[3], side, false, 0);
  assert_true(comes([&] { return counts.n_rebuilt == rebuilt + 2; }));
  assert_true(comes([&] { return counts.n_attended == attended + 2; }));  // the window and the piece of the first batch
  assert_int_equal(counts.strided_bytes - sent, 2 * 128 * kXBytes);
  assert_false(gate.is_open());
  gate.open();
  for (const size_t i : {0, 1, 2, 3}) attend_batch(batches[i % 2], *on_host[i], twin, true, 0);
  for (const size_t i : {0, 1, 2, 3}) assert_near(calls[i]->output(), on_host[i]->output());
  side.done(0);
}

// The weights of a layer have room as soon as the layer before the previous one is done. They cross the bus in even shares,
// each after the pieces of a batch of the previous layer. All of them arrive before they are used.
void weights_take_turns(void**) {
  constexpr int64_t kOther = int64_t{32} << 20, kLayerBytes = 2 * (kWeightBytes + kOther), kLength = 330, kSteps = 4;
  const Layers layers;
  const Columns side(layers, true, true, "recompute", kOther), twin(layers, false);
  std::vector<Batch> batches;
  for (int32_t b = 0; b < kBatches; ++b) batches.emplace_back(layers, side, twin, Shape{1, 1, kLength}, 1000 * b);
  std::vector<std::unique_ptr<HiddenCall>> made, on_host;
  for (int64_t step = 0; step < kSteps; ++step)
    for (int32_t l = 0; l < kLayers; ++l) {
      side.use(l);
      const int64_t before = side.weights_stats().streamed_bytes;
      for (int32_t b = 0; b < kBatches; ++b) {
        for (auto* calls : {&made, &on_host})
          calls->push_back(std::make_unique<HiddenCall>(layers[l], 1, kLength + step, 5000 + 100 * step + 10 * l + b));
        made.back()->to_device();
        attend_batch(batches[static_cast<size_t>(b)], *made.back(), side, false, l);
        attend_batch(batches[static_cast<size_t>(b)], *on_host.back(), twin, true, l);
        const int64_t sent = side.weights_stats().streamed_bytes - before, share = kLayerBytes * (b + 1) / kBatches;
        if (step >= 2)
          assert_in_range(sent, share - kOther / 4 - kWeightBytes,
                          share + kOther / 25);  // the first step tells how many bytes come
      }
      side.done(l);
    }
  for (size_t i = 0; i < made.size(); ++i) assert_near(made[i]->output(), on_host[i]->output());
  const tandem_weights_stats stats = side.weights_stats();
  assert_int_equal(stats.n_ahead, stats.n_streamed_uses);
}

// Weights that fall due while the caller's stream is held go after pieces that have not been sent. They wait for these
// pieces.
void weights_wait_for_pieces(void**) {
  constexpr int64_t kOther = int64_t{32} << 20, kLength = 1500;
  const Layers layers;
  const Columns side(layers, true, true, "recompute", kOther), twin(layers, false);
  const Batch batch(layers, side, twin, {1, 1, kLength}, 1);  // more pieces than buffers
  std::vector<std::unique_ptr<HiddenCall>> calls;
  for (int64_t step = 0; step < 3; ++step)
    for (int32_t l = 0; l < kLayers; ++l) {
      calls.push_back(std::make_unique<HiddenCall>(layers[l], 1, kLength + step, 5000 + 100 * step + 10 * l));
      calls.back()->to_device();
      side.use(l);
      std::unique_ptr<stand_in::Gate> gate;
      if (step == 2 && l == 1) {
        device->wait();
        gate = std::make_unique<stand_in::Gate>(controls);
      }
      const int64_t copied = counts.strided_bytes;
      attend_batch(batch, *calls.back(), side, false, l);
      if (gate != nullptr) {
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        assert_false(gate->is_open());
        assert_in_range(counts.strided_bytes - copied, 1, kOther * 9 / 5);
        gate->open();
        assert_true(comes([&] { return counts.strided_bytes - copied > 2 * kOther; }));
      }
      side.done(l);
    }
}

// The time that a call's keys take is learned for the next plan, except from calls that share the bus with weights.
void weights_leave_plans_as_they_are(void**) {
  constexpr int64_t kLength = 20'000;
  const Layers layers;
  for (const bool has_weights : {true, false}) {
    Columns side(layers, true, false, "stream");
    const Columns twin(layers, false);
    const Batch batch(layers, side, twin, {1, 1, kLength}, 1);
    if (!has_weights) tandem_weights_release(std::exchange(side.weights, nullptr));
    tandem_route_plan plans[2] = {TANDEM_ROUTE_PLAN_INIT, TANDEM_ROUTE_PLAN_INIT};
    OK(tandem_plan, &plans[0], side.session, 0, &kLength, nullptr, 1);
    controls.set_delay(2'000'000);
    std::vector<std::unique_ptr<HiddenCall>> calls;
    for (int64_t i = 0; i < 3; ++i) {
      calls.push_back(std::make_unique<HiddenCall>(layers[0], 1, kLength + i, 5000 + i));
      calls.back()->to_device();
      attend_batch(batch, *calls.back(), side, false, 0);
      device->wait();
    }
    controls.set_delay(0);
    OK(tandem_plan, &plans[1], side.session, 0, &kLength, nullptr, 1);
    assert_true(plans[0].bus_ns > 0);
    assert_int_equal(plans[0].bus_ns == plans[1].bus_ns, has_weights);
  }
}

// The layers have biases but no weights of their own.
void takes_what_is_planned(void**) {
  const Layers layers;
  const Columns side(layers), twin(layers, false);
  const Batch batch(layers, side, twin, {3, 1, 399}, 1);
  for (int32_t l = 0; l < kLayers; ++l) {
    HiddenCall call(layers[l], 3, 399, 7);
    call.to_device();
    attend_batch(batch, call, side, false, l);
    device->wait();
  }
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const tandem_session_options options = Columns::options_of_session("recompute");
  const tandem_cache_options cache = hidden_cache();
  const int64_t lengths[] = {400, 400, 400};
  OK(tandem_plan_memory, &plan, side.engine, side.model, &cache, &options, lengths, 3);
  assert_held(side, plan);
  assert_in_range(plan.device_weights_bytes, 1, kWeightBytes);
}

void refuses(void**) {
  const Layers layers;
  const Columns side(layers, true, false), twin(layers, false), other(layers);
  const Projected projected;
  const Rebuilding owns(projected);
  tandem_error* error = nullptr;
  const auto refused = [](tandem_session* session, int32_t l, tandem_weights* weights, std::array<int32_t, 2> blocks,
                          int32_t wanted, const char* field, const char* text) {
    tandem_error* why = nullptr;
    const int32_t status = tandem_session_use_weights(session, l, weights, blocks[0], blocks[1], &why);
    assert_refused(status, why, wanted, field, text);
  };
  constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
  refused(side.session, kLayers, side.weights, {0, 1}, kInvalid, "layer_idx", "layer_idx = 3");
  refused(side.session, 0, side.weights, {-1, 1}, kInvalid, "w_k_block", "w_k_block = -1 is not in [0, 11]");
  refused(side.session, 0, side.weights, {0, 2}, kInvalid, "w_v_block", "w_v_block = 2 has 5000 bytes");
  refused(side.session, 0, other.weights, {0, 1}, kInvalid, "weights", "another engine");
  refused(side.session, 0, nullptr, {0, 1}, TANDEM_ERROR_INVALID_HANDLE, "weights", "");
  refused(owns.session, 0, other.weights, {0, 1}, TANDEM_ERROR_UNSUPPORTED, "layer_idx", "of its own");
  // A call of a layer whose weights were never named is refused without effect. Once they are named, the call succeeds.
  const Batch batch(layers, side, twin, {1, 1, 300}, 1);
  HiddenCall call(layers[1], 1, 300, 7), on_host(layers[1], 1, 300, 7);
  call.to_device();
  OK(tandem_session_use_weights, side.session, 0, side.weights, 0, 1);
  const tandem_attend_args args = batch.args(call, side, false, 1);
  error = nullptr;
  const int32_t status = tandem_attend(side.session, &args, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_STATE, "layer_idx", "layer_idx = 1: its projection has no w_k");
  tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
  const int64_t length = 20'000;
  error = nullptr;
  const int32_t planned = tandem_plan(&plan, side.session, 1, &length, nullptr, 1, &error);
  assert_refused(planned, error, TANDEM_ERROR_INVALID_STATE, "layer_idx", "layer_idx = 1");
  OK(tandem_session_use_weights, side.session, 1, side.weights, kBlocks, kBlocks + 1);
  OK(tandem_plan, &plan, side.session, 1, &length, nullptr, 1);
  assert_true(plan.recompute_tokens > 0 && plan.device_ns > 0);
  // The time of a rebuild is known by now, but a session that was not told of the weights cannot plan the layer.
  tandem_session* untold = nullptr;
  const tandem_session_options options = Columns::options_of_session("recompute");
  OK(tandem_session_create, &untold, side.cache, &options);
  error = nullptr;
  const int32_t still = tandem_plan(&plan, untold, 1, &length, nullptr, 1, &error);
  tandem_session_release(untold);
  assert_refused(still, error, TANDEM_ERROR_INVALID_STATE, "layer_idx", "layer_idx = 1");
  attend_batch(batch, call, side, false, 1);
  attend_batch(batch, on_host, twin, true, 1);
  assert_near(call.output(), on_host.output());
  // When the planner may choose, it does not choose a rebuild that is impossible.
  const Columns plans(layers, true, false, "auto");
  plan = TANDEM_ROUTE_PLAN_INIT;
  OK(tandem_plan, &plan, plans.session, 1, &length, nullptr, 1);
  assert_int_equal(plan.recompute_tokens, 0);
}

// Every call of the device fails in turn while a call starts. The call reports the failure, no sequence grows, and no block
// stays in use.
void survives_failing_calls(void**) {
  using namespace stand_in;
  const Layers layers;
  for (const stand_in::Call failing :
       {kCreateStream, kCreateEvent, kRecordEvent, kWaitEvent, kCopyStrided, kRebuild, kAttend})
    for (int64_t nth = 1, n_failed = 0;; ++nth) {
      const Columns side(layers), twin(layers, false);
      const Batch batch(layers, side, twin, {1, 1, 500}, 1);
      HiddenCall call(layers[0], 1, 500, 7), on_host(layers[0], 1, 500, 7);
      call.to_device();
      const int32_t status = attend_failing(side, batch.args(call, side, false, 0), failing, nth);
      int64_t length = 0;
      OK(tandem_sequence_length, &length, side.cache, batch.ids[0][0], 0);
      assert_int_equal(length, status == TANDEM_OK ? 501 : 500);
      for (int32_t b = 0; b < kBlocks; ++b)
        assert_int_equal(tandem_weights_done(side.weights, b, nullptr, nullptr), TANDEM_ERROR_INVALID_STATE);
      if (status != TANDEM_OK) attend_batch(batch, call, side, false, 0);
      attend_batch(batch, on_host, twin, true, 0);
      assert_near(call.output(), on_host.output());
      if (status != TANDEM_OK) ++n_failed;
      if (status != TANDEM_OK) continue;
      if (n_failed == 0) fail_msg("call %d was never made to fail", failing);
      break;
    }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(answers_are_right, forget),
      cmocka_unit_test_teardown(makes_keys_before_queries_are_there, forget),
      cmocka_unit_test_teardown(makes_keys_of_the_next_batch, forget),
      cmocka_unit_test_teardown(weights_take_turns, forget),
      cmocka_unit_test_teardown(weights_wait_for_pieces, forget),
      cmocka_unit_test_teardown(weights_leave_plans_as_they_are, forget),
      cmocka_unit_test_teardown(takes_what_is_planned, forget),
      cmocka_unit_test_teardown(refuses, forget),
      cmocka_unit_test_teardown(survives_failing_calls, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
