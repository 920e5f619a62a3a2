// SPDX-License-Identifier: MIT
// Attends of a world on device tensors. All calls of a pass are in flight before the test looks at the first output.
#include "device/layer_of.h"
#include "lib/stream_world.h"

namespace harness {

bool StreamWorld::device_takes(const reference::RefLayer& layer) const {
  const tandem::RopeTable table;  // any table works
  tandem::Layer asked = tandem::test::layer_of(layer);
  if (layer.rope != TANDEM_ROPE_CALLER) asked.rope = &table;
  tandem::DeviceError error;
  return device_->table->supports(device_->self, &asked, 1, &error) == TANDEM_OK;
}

// Copies a tensor to the device, padding included.
tandem_tensor StreamWorld::to_device(PendingCall* pending, Tensor* tensor) {
  void* memory = device_->allocate(tensor->n_bytes());
  device_->upload(memory, tensor->first_line(), tensor->n_bytes());
  pending->tensors.push_back({tensor, memory});
  tandem_tensor view = tensor->view();
  view.device_type = TANDEM_DEVICE_CUDA;
  view.data = static_cast<unsigned char*>(memory) + tensor->offset_bytes();
  return view;
}

void StreamWorld::attend_on_device(size_t session, size_t layer, const Pass& pass, tandem_attend_args args, LayerCall call) {
  pending_.push_back({session, layer, pass, std::move(call), {}});
  PendingCall& pending = pending_.back();
  pending.call.on_device = true;
  const tandem_tensor q = to_device(&pending, &pending.call.q), o = to_device(&pending, &pending.call.o),
                      lse = to_device(&pending, &pending.call.lse);
  tandem_tensor k = {}, v = {}, x = {};
  args.q = &q;
  args.o = &o;
  args.lse = &lse;
  if (args.k != nullptr) k = to_device(&pending, &pending.call.rows.k), args.k = &k;
  if (args.v != nullptr) v = to_device(&pending, &pending.call.rows.v), args.v = &v;
  if (args.x != nullptr) x = to_device(&pending, &pending.call.rows.x), args.x = &x;
  TANDEM_EXPECT(where(), TANDEM_OK, tandem_attend(*sessions_[session].session, &args, &error));
  ++n_attends_;
  if (!pass.append_first) grow_model(pass, layer, pending.call);
}

void StreamWorld::check_plans() {
  tandem_memory_plan all = TANDEM_MEMORY_PLAN_INIT;
  for (size_t s = 0; s < sessions_.size(); ++s) {
    tandem_session_options options = sessions_[s].options_of_session;
    if (options.append_tokens == 0) options.append_tokens = random_.pick({1, 1, 7, 40});
    const int64_t id = create(), before = random_.integer(0, 400), n = options.append_tokens;
    for (size_t l = 0; before > 0 && l < layers_.size(); ++l) append(id, l, before);
    Pass pass;
    pass.ids = {id};
    pass.q_lens = {n};
    is_on_device_alone_ = true;
    forward(s, pass);
    is_on_device_alone_ = false;
    const tandem_memory_plan plan = cache_->plan(options, before + n);
    all.device_window_bytes += plan.device_window_bytes;
    all.device_work_bytes += plan.device_work_bytes;
    all.device_stream_bytes += plan.device_stream_bytes;
    tandem_cache_stats held = TANDEM_CACHE_STATS_INIT;
    TANDEM_EXPECT(where(), TANDEM_OK, tandem_cache_get_stats(&held, *cache_, &error));
    TANDEM_CHECK(held.device_window_bytes == all.device_window_bytes, where() + "windows are not as planned");
    TANDEM_CHECK(held.device_work_bytes == all.device_work_bytes, where() + "work space is not as planned");
    TANDEM_CHECK(held.device_stream_bytes == all.device_stream_bytes, where() + "buffers are not as planned");
  }
}

void StreamWorld::finish_pending() {
  if (pending_.empty()) return;
  device_->wait();
  for (PendingCall& pending : pending_) {
    for (const DeviceTensor& one : pending.tensors) {
      const bool is_output = one.tensor == &pending.call.o || one.tensor == &pending.call.lse;
      if (is_output) device_->download(one.tensor->first_line(), one.memory, one.tensor->n_bytes());
    }
    compare(sessions_[pending.session], pending.layer, pending.pass, pending.call);
    for (const DeviceTensor& one : pending.tensors) device_->release(one.memory);
  }
  pending_.clear();
}

}  // namespace harness
