// SPDX-License-Identifier: MIT
// Steps on a stream and captured graphs whose keys the caller names, compared with the same calls on host tensors; wrong
// indices; refusals. selection_step_test [MODULE]: on the stand-in, or on the GPU of the CUDA module.
#include "device/selection_twins.h"

using namespace tandem_test;

namespace {

void* make_stream() {
  void* stream = nullptr;
  tandem::DeviceError error;
  device->must(device->table->create_stream(device->self, &stream, &error), error);
  return stream;
}

// Attends a layer of an open step, on the step's stream.
void attend_in_step(const Twins& twins, const NamedCall& call, int32_t layer, void* stream, int32_t n_sequences = 2) {
  tandem_attend_args args = call.args(layer, twins.on_device.ids);
  args.stream = stream;
  args.n_sequences = n_sequences;
  OK(tandem_attend, twins.on_device.session, &args);
}

// The tensors of a layer's call in a step, for the host and for the device. A graph reads the device's tensors at the
// addresses of the step before.
struct StepCalls {
  std::unique_ptr<NamedCall> here, there;

  void draw(Twins* twins, int32_t layer, int64_t seed, bool names, bool is_replayed) {
    constexpr std::array<int64_t, 2> kOneEach = {1, 1};
    here = std::make_unique<NamedCall>(kOneEach, seed);
    auto next = std::make_unique<NamedCall>(kOneEach, seed);
    if (names) here->view_idx(twins->setup, twins->draw(layer, kOneEach));
    if (names) next->view_idx(twins->setup, here->idx);
    if (!is_replayed) {
      next->to_device(true);
      there = std::move(next);
      return;
    }
    const std::array<std::pair<const Tensor*, const Tensor*>, 3> tensors = {
        {{&next->q, &there->q}, {&next->k, &there->k}, {&next->v, &there->v}}};
    for (const auto& [from, to] : tensors)
      device->upload(to->view.data, from->values.data(), static_cast<int64_t>(from->values.size() * sizeof(float)));
    device->upload(there->idx_view.data, next->idx.data(), static_cast<int64_t>(next->idx.size() * sizeof(int32_t)));
  }
};

// Some of the layers name keys. On the stand-in a graph is replayed, with new indices each time.
void attend_steps(const Setup& setup, int64_t seed) {
  Twins twins(setup, static_cast<uint64_t>(seed));
  twins.attend_all({60, 150}, seed, true);
  void* stream = make_stream();
  const std::array<int64_t, 2> one = {1, 1};
  const bool captures = cuda_module == nullptr;
  void* graph = nullptr;
  StepCalls calls[kNamedLayers];
  const std::array<int64_t, 2> bytes_before = {twins.bytes_read(twins.on_device), twins.bytes_read(twins.on_host)};
  for (int64_t i = 0; i < 12; ++i) {
    for (int32_t l = 0; l < kNamedLayers; ++l)
      calls[l].draw(&twins, l, seed += 10, l == 0 || i % 3 != 0 || captures, graph != nullptr);
    OK(tandem_step_begin, twins.on_device.session, twins.on_device.ids.data(), one.data(), 2, stream);
    if (graph == nullptr) {
      if (captures) assert_true(controls.begin_capture(stream));
      for (int32_t l = 0; l < kNamedLayers; ++l) attend_in_step(twins, *calls[l].there, l, stream);
      if (captures) graph = controls.end_capture(stream);
    }
    if (captures) assert_true(controls.launch(graph, stream));
    OK(tandem_step_end, twins.on_device.session, stream);
    wait_for(stream);
    for (int32_t l = 0; l < kNamedLayers; ++l) {
      const tandem_attend_args args = calls[l].here->args(l, twins.on_host.ids);
      OK(tandem_attend, twins.on_host.session, &args);
      calls[l].there->read_back();
      assert_same(calls[l].there->o.values, calls[l].here->o.values, "o of a step", seed);
      assert_same(calls[l].there->lse.values, calls[l].here->lse.values, "lse of a step", seed);
    }
  }
  for (int32_t l = 0; l < kNamedLayers; ++l) twins.assert_listed_alike(l, seed, bytes_before, false);
  if (graph != nullptr) controls.free_graph(graph);
  device->table->destroy_stream(device->self, stream);
}

void attends_in_planned_steps(void**) {
  int64_t seed = 1;
  for (Setup setup : setups()) {
    if (setup.any_order || setup.n_idx == 0) continue;
    setup.host_idx = false;
    setup.in_steps = setup.n_idx;
    attend_steps(setup, seed += 1000);
  }
}

// A step of one sequence after calls of two, in layers of one KV head and of two. Lists lie where they have room.
void steps_may_have_fewer_sequences(void**) {
  Setup setup;
  setup.first_heads = 1;
  setup.in_steps = setup.n_idx;
  Twins twins(setup);
  twins.attend_all({150, 120}, 50, false);
  twins.attend(0, {1, 1}, 70, true);
  twins.attend(1, {1, 1}, 80, false);
  void* stream = make_stream();
  const int64_t one = 1;
  for (int64_t i = 0; i < 3; ++i) {
    OK(tandem_step_begin, twins.on_device.session, twins.on_device.ids.data(), &one, 1, stream);
    for (int32_t l = 0; l < kNamedLayers; ++l) {
      NamedCall there({1, 0}, 100 + 10 * i + l, setup.n_heads(l)), here({1, 0}, 100 + 10 * i + l, setup.n_heads(l));
      here.view_idx(setup, twins.draw(l, {1, 0}));
      there.view_idx(setup, here.idx);
      there.to_device(true);
      attend_in_step(twins, there, l, stream, 1);
      tandem_attend_args host_args = here.args(l, twins.on_host.ids);
      host_args.n_sequences = 1;
      OK(tandem_attend, twins.on_host.session, &host_args);
      wait_for(stream);
      there.read_back();
      assert_same(there.o.values, here.o.values, "o of a step", i);
    }
    OK(tandem_step_end, twins.on_device.session, stream);
    wait_for(stream);
  }
  device->table->destroy_stream(device->self, stream);
}

// Queries that name no units attend sinks and window alone.
void steps_may_name_no_units(void**) {
  Setup setup;
  setup.n_idx = 0;
  setup.plus_window = true;
  for (const int64_t in_steps : {2, 0}) {
    setup.in_steps = in_steps;
    Twins twins(setup);
    twins.attend_all({150, 120}, 50, false);
    void* stream = make_stream();
    const std::array<int64_t, 2> one = {1, 1};
    OK(tandem_step_begin, twins.on_device.session, twins.on_device.ids.data(), one.data(), 2, stream);
    for (int32_t l = 0; l < kNamedLayers; ++l) {
      NamedCall there(one, 100 + l), here(one, 100 + l);
      if (in_steps > 0) there.view_idx(setup, {});
      if (in_steps > 0) here.view_idx(setup, {});
      there.to_device(true);
      if (in_steps == 0) {
        NamedCall refused(one, 100 + l);
        refused.view_idx(setup, {});
        refused.to_device(true);
        tandem_attend_args with_none = refused.args(l, twins.on_device.ids);
        with_none.stream = stream;
        tandem_error* error = nullptr;
        const int32_t got = tandem_attend(twins.on_device.session, &with_none, &error);
        assert_refused(got, error, TANDEM_ERROR_CAPACITY, "selection.idx.shape[2]", "has room for 0");
      }
      attend_in_step(twins, there, l, stream);
      wait_for(stream);
      there.read_back();
      const tandem_attend_args host_args = here.args(l, twins.on_host.ids);
      OK(tandem_attend, twins.on_host.session, &host_args);
      assert_same(there.o.values, here.o.values, "o of a step", l);
    }
    OK(tandem_step_end, twins.on_device.session, stream);
    wait_for(stream);
    device->table->destroy_stream(device->self, stream);
  }
}

// The next step does not begin and reports the index. The one after it begins.
void steps_tell_of_wrong_indices(void**) {
  Setup setup;
  setup.in_steps = setup.n_idx;
  Twins twins(setup);
  twins.attend_all({150, 120}, 50, false);
  void* stream = make_stream();
  const std::array<int64_t, 2> one = {1, 1};
  const auto begin = [&](tandem_error** error) {
    return tandem_step_begin(twins.on_device.session, twins.on_device.ids.data(), one.data(), 2, stream, error);
  };
  tandem_error* error = nullptr;
  assert_int_equal(begin(&error), TANDEM_OK);
  for (int32_t l = 0; l < kNamedLayers; ++l) {
    NamedCall call(one, 70 + l);
    std::vector<int32_t> idx = twins.draw(l, one);
    if (l == 1) idx[static_cast<size_t>(3 * setup.n_idx)] = 1000;  // the second sequence, head 1
    call.view_idx(setup, idx);
    call.to_device(true);
    attend_in_step(twins, call, l, stream);
    wait_for(stream);
  }
  OK(tandem_step_end, twins.on_device.session, stream);
  wait_for(stream);
  const int32_t got = begin(&error);
  assert_refused(got, error, kInvalid, "selection.idx", "layer 1: selection.idx[1, 1, 0] = 1000");
  error = nullptr;
  assert_int_equal(begin(&error), TANDEM_OK);
  OK(tandem_step_end, twins.on_device.session, stream);  // no row of it arrived, so it is rolled back
  device->table->destroy_stream(device->self, stream);
}

void refuses_in_planned_steps(void**) {
  Twins twins({TANDEM_F32, 64, 0, 1, 3, false, false, false, false, 0, TANDEM_ROPE_CALLER, false, 2});
  twins.attend_all({100, 100}, 50, true);
  void* stream = make_stream();
  const std::array<int64_t, 2> one = {1, 1};
  OK(tandem_step_begin, twins.on_device.session, twins.on_device.ids.data(), one.data(), 2, stream);
  const auto refuse = [&](int32_t status, const char* field, const char* text, auto change) {
    NamedCall call(one, 70);
    Setup setup = twins.setup;
    setup.n_idx = 2;
    bool idx_on_device = true;
    change(&setup, &idx_on_device);
    call.view_idx(setup, std::vector<int32_t>(static_cast<size_t>(2 * kHeads * setup.n_idx), -1));
    call.to_device(idx_on_device);
    tandem_attend_args args = call.args(0, twins.on_device.ids);
    args.stream = stream;
    tandem_error* error = nullptr;
    const int32_t got = tandem_attend(twins.on_device.session, &args, &error);
    assert_refused(got, error, status, field, text);
  };
  refuse(TANDEM_ERROR_CAPACITY, "selection.idx.shape[2]", "= 3", [](Setup* setup, bool*) { setup->n_idx = 3; });
  refuse(kUnsupported, "selection.flags", "ANY_ORDER", [](Setup* setup, bool*) { setup->any_order = true; });
  refuse(kUnsupported, "selection.idx.device_type", "host memory", [](Setup*, bool* on_device) { *on_device = false; });
  for (int32_t l = 0; l < kNamedLayers; ++l) {
    NamedCall call(one, 80 + l);
    call.to_device(false);
    attend_in_step(twins, call, l, stream);
    wait_for(stream);
  }
  OK(tandem_step_end, twins.on_device.session, stream);
  wait_for(stream);
  device->table->destroy_stream(device->self, stream);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) cuda_module = argv[1];
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(attends_in_planned_steps, forget),
      cmocka_unit_test_teardown(steps_may_have_fewer_sequences, forget),
      cmocka_unit_test_teardown(steps_may_name_no_units, forget),
      cmocka_unit_test_teardown(steps_tell_of_wrong_indices, forget),
      cmocka_unit_test_teardown(refuses_in_planned_steps, forget),
  };
  return cmocka_run_group_tests(tests, open_device, close_stand_in);
}
