// SPDX-License-Identifier: MIT
// Planned steps of two sequences on the stand-in, call by call or as a graph.
#pragma once

#include <memory>
#include <vector>

#include "device/device_side.h"

namespace tandem_test {

inline constexpr int32_t kStepLayers = 3;
inline constexpr int64_t kTwo = 2;

// Two sequences, and for each layer the tensors of one call, whose addresses stay the same.
struct Runner {
  Side side;
  int64_t ids[2] = {0, 0};
  std::vector<std::unique_ptr<Call>> calls;
  void* stream = controls.create_stream();
  void* graph = nullptr;

  explicit Runner(int64_t prompt, const char* policy = "all", int64_t device_cap_bytes = 0)
      : side(true, policy, device_cap_bytes, kStepLayers) {
    ids[0] = side.sequence;
    OK(tandem_sequence_create, &ids[1], side.cache);
    for (int32_t l = 0; l < kStepLayers; ++l) {
      for (int i = 0; i < 2; ++i) {
        const Tensor k({prompt + 30 * i, kKvHeads, kDim}, 100 + l), v({prompt + 30 * i, kKvHeads, kDim}, 200 + l);
        OK(tandem_sequence_append, side.cache, ids[i], l, &k.view, &v.view, nullptr);
      }
      calls.push_back(std::make_unique<Call>(kTwo, 10 * l));
      calls.back()->to_device();
    }
  }
  ~Runner() {
    controls.free_graph(graph);
    assert_true(controls.destroy_stream(stream));
  }
  // Uploads new numbers for a step. A step always gets the same numbers.
  void set_inputs(int64_t step) {
    for (int32_t l = 0; l < kStepLayers; ++l) {
      Call fresh(kTwo, 1000 + 10 * step + l);
      Tensor* from[] = {&fresh.q, &fresh.k, &fresh.v};
      for (size_t i = 0; i < 3; ++i)
        device->upload(calls[static_cast<size_t>(l)]->memory[i], from[i]->values.data(),
                       static_cast<int64_t>(from[i]->values.size() * sizeof(float)));
    }
  }
  tandem_attend_args args(int32_t layer, const int64_t* q_lens) {
    tandem_attend_args args = calls[static_cast<size_t>(layer)]->args(side, layer);
    args.n_sequences = 2;
    args.sequences = ids;
    args.q_lens = q_lens;
    args.stream = stream;
    return args;
  }
  void begin(const int64_t* q_lens) { OK(tandem_step_begin, side.session, ids, q_lens, 2, stream); }
  void attend_layers(const int64_t* q_lens, int32_t n_layers = kStepLayers) {
    for (int32_t l = 0; l < n_layers; ++l) {
      const tandem_attend_args call = args(l, q_lens);
      OK(tandem_attend, side.session, &call);
    }
  }
  void end() { OK(tandem_step_end, side.session, stream); }
  void capture(const int64_t* q_lens) {
    assert_true(controls.begin_capture(stream));
    attend_layers(q_lens);
    graph = controls.end_capture(stream);
    assert_non_null(graph);
  }
  // Runs a step with one token of each sequence and the step's inputs.
  void run_step(int64_t step) {
    constexpr int64_t kOneEach[] = {1, 1};
    set_inputs(step);
    begin(kOneEach);
    attend_layers(kOneEach);
    end();
  }
  std::vector<float> outputs() {
    device->must(device->table->wait(device->self, stream, &error), error);
    std::vector<float> all;
    for (const auto& call : calls) {
      const std::vector<float> one = call->output();
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  uint64_t digest(int i) {
    uint64_t digest = 0;
    OK(tandem_sequence_digest, &digest, side.cache, ids[i]);
    return digest;
  }
  tandem::DeviceError error;
};

// The same steps on the host, which give the expected outputs.
struct HostTwin {
  Side side;
  int64_t ids[2] = {0, 0};

  HostTwin(int64_t prompt, const char* policy) : side(false, policy, 0, kStepLayers) {
    ids[0] = side.sequence;
    OK(tandem_sequence_create, &ids[1], side.cache);
    for (int32_t l = 0; l < kStepLayers; ++l)
      for (int i = 0; i < 2; ++i) {
        const Tensor k({prompt + 30 * i, kKvHeads, kDim}, 100 + l), v({prompt + 30 * i, kKvHeads, kDim}, 200 + l);
        OK(tandem_sequence_append, side.cache, ids[i], l, &k.view, &v.view, nullptr);
      }
  }
  // Runs a step with one token of each sequence and the inputs of Runner::set_inputs(step).
  std::vector<float> run_step(int64_t step, int32_t n_layers = kStepLayers) {
    constexpr int64_t kOneEach[] = {1, 1};
    std::vector<float> all;
    OK(tandem_step_begin, side.session, ids, kOneEach, 2, nullptr);
    for (int32_t l = 0; l < n_layers; ++l) {
      Call call(kTwo, 1000 + 10 * step + l);
      tandem_attend_args args = call.args(side, l);
      args.n_sequences = 2;
      args.sequences = ids;
      args.q_lens = kOneEach;
      OK(tandem_attend, side.session, &args);
      all.insert(all.end(), call.o.values.begin(), call.o.values.end());
    }
    if (n_layers == kStepLayers) OK(tandem_step_end, side.session, nullptr);
    return all;
  }
  void leave_undone(int64_t step, int32_t n_done) {
    run_step(step, n_done);
    tandem_error* error = nullptr;
    assert_int_equal(tandem_step_end(side.session, nullptr, &error), TANDEM_ERROR_INVALID_STATE);
    tandem_error_release(error);
  }
};

}  // namespace tandem_test
