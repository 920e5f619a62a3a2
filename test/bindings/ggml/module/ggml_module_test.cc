// SPDX-License-Identifier: MIT
// The nodes that the module takes and those that it leaves to ggml, and when it refuses to be loaded, against a stand-in of
// ggml.
#include <functional>

#include "module_world.h"

namespace {

using namespace ggml_module_test;
using stand_in_ggml::state;

bool takes(const std::function<void(Shape&)>& change_shape, const std::function<void(Node&)>& change_node = {}) {
  Shape shape;
  if (change_shape) change_shape(shape);
  Node made(shape);
  if (change_node) change_node(made);
  return supports(made.node());
}

void takes_types_dims_and_parameters_with_kernels(void**) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
    assert_true(takes([&](Shape& s) { s.k_type = type; }));
    assert_true(takes([&](Shape& s) { s.v_type = type; }));
  }
  assert_false(takes([](Shape& s) { s.k_type = GGML_TYPE_Q5_1; }));
  assert_false(takes([](Shape& s) { s.v_type = GGML_TYPE_Q5_1; }));
  for (const int64_t dim : {64, 128, 256}) assert_true(takes([&](Shape& s) { s.k_dim = s.v_dim = dim; }));
  assert_true(takes([](Shape& s) { s.k_dim = 192, s.v_dim = 128; }));
  assert_false(takes([](Shape& s) { s.k_dim = s.v_dim = 40; }));
  assert_false(takes([](Shape& s) { s.k_dim = 576, s.v_dim = 512; }));
  assert_true(takes([](Shape& s) { s.has_mask = false; }));
  assert_true(takes([](Shape& s) { s.has_sinks = true, s.soft_cap = 30.0f, s.max_bias = 8.0f; }));
  assert_true(takes([](Shape& s) { s.n_streams = s.mask_streams = 3, s.mask_heads = 4; }));
  assert_false(takes([](Shape& s) { s.scale = 0.0f; }));
  assert_false(takes([](Shape& s) { s.scale = NAN; }));
  assert_false(takes([](Shape& s) { s.soft_cap = -1.0f; }));
  assert_false(takes([](Shape& s) { s.max_bias = 8.0f, s.has_mask = false; }));
  assert_false(takes([](Shape& s) { s.mask_heads = 2; }));
}

void leaves_other_layouts_to_ggml(void**) {
  assert_true(takes({}));
  assert_false(takes({}, [](Node& n) { n.k.view.nb[0] = 4; }));   // V or K is transposed
  assert_false(takes({}, [](Node& n) { n.k.view.nb[1] += 1; }));  // half an element
  assert_false(takes({}, [](Node& n) { n.v.view.nb[1] = 0; }));   // one row for all keys
  assert_false(takes({}, [](Node& n) { n.v.view.ne[1] -= 1; }));  // fewer values than keys
  assert_false(takes({}, [](Node& n) { n.v.view.ne[2] = 1; }));   // V has other numbers of heads than K
  assert_false(takes({}, [](Node& n) { n.q.view.ne[2] = 3; }));   // 3 query heads for 2 KV heads
  assert_false(takes({}, [](Node& n) { n.mask->view.ne[0] -= 1; }));
  assert_false(takes({}, [](Node& n) { n.mask->view.ne[1] -= 1; }));
  assert_false(takes({}, [](Node& n) { n.mask->view.type = GGML_TYPE_F32; }));
  // the stride of a dimension of length 1
  assert_true(takes([](Shape& s) { s.n_streams = 1; }, [](Node& n) { n.k.view.nb[3] = 7; }));
}

void takes_views_and_leaves_other_nodes(void**) {
  ggml_tensor node = {};
  for (const ggml_op op : {GGML_OP_NONE, GGML_OP_RESHAPE, GGML_OP_VIEW, GGML_OP_PERMUTE, GGML_OP_TRANSPOSE}) {
    node.op = op;
    assert_true(supports(node));
  }
  node.op = GGML_OP_MUL_MAT;
  assert_false(supports(node));
  assert_true(device()->iface.supports_buft(device(), ggml_backend_cpu_buffer_type()));
  assert_false(device()->iface.supports_buft(device(), nullptr));
}

void leaves_few_keys_to_ggml(void**) {
  assert_false(takes([](Shape& s) { s.n_tokens = 1, s.n_keys = 256; }));
  assert_true(takes([](Shape& s) { s.n_tokens = 1, s.n_keys = 8192; }));
  assert_true(takes([](Shape& s) { s.n_tokens = 64, s.n_keys = 256; }));
}

// The nodes of a new context's first graph stay on the CPU, so that `-fa auto` keeps flash attention.
void leaves_a_contexts_first_graph_to_ggml(void**) {
  ggml_backend_buffer buffer;
  ggml_tensor cache = {};
  cache.buffer = &buffer;
  const auto takes_tokens = [&](int64_t n_tokens, ggml_tensor* of) {
    return takes([&](Shape& s) { s.n_tokens = n_tokens, s.n_keys = 8192; }, [&](Node& n) { n.k.view.view_src = of; });
  };
  assert_true(takes_tokens(1, &cache));  // no context has opened the device
  const Backend context;
  assert_true(takes_tokens(1, nullptr));  // its tensors are no cache, as in a test of one node
  for (int layer = 0; layer < 3; ++layer) assert_false(takes_tokens(1, &cache));
  assert_true(takes_tokens(512, &cache));
  assert_true(takes_tokens(1, &cache));
  const Backend another;
  assert_false(takes_tokens(512, &cache));  // `-fa on`: the first graph is the longest one
  assert_true(takes_tokens(1, &cache));
  assert_true(takes_tokens(512, &cache));
}

void refuses_another_ggml(void**) {
  const std::string version = state().version;
  assert_non_null(ggml_backend_init());
  state().log.clear();
  state().version = "1.2.4";
  assert_null(ggml_backend_init());
  assert_non_null(std::strstr(state().log.c_str(), "was built for ggml 1.2.3, and this is ggml 1.2.4 (commit c0ffee)"));
  state().version = version;
  state().log.clear();
  state().moves_reg = true;
  assert_null(ggml_backend_init());
  assert_non_null(std::strstr(state().log.c_str(), "has that version but other structs"));
  state().moves_reg = false;
  assert_non_null(ggml_backend_init());
}

void describes_itself(void**) {
  ggml_backend_dev_props props = {};
  device()->iface.get_props(device(), &props);
  assert_string_equal(props.name, "TANDEM");
  assert_int_equal(props.type, GGML_BACKEND_DEVICE_TYPE_ACCEL);
  assert_int_equal(device()->reg->api_version, GGML_BACKEND_API_VERSION);
  assert_ptr_equal(device()->iface.get_buffer_type(device()), ggml_backend_cpu_buffer_type());
  assert_null(device()->reg->iface.get_proc_address(device()->reg, "ggml_backend_split_buffer_type"));
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(takes_types_dims_and_parameters_with_kernels),
      cmocka_unit_test(leaves_other_layouts_to_ggml),
      cmocka_unit_test(takes_views_and_leaves_other_nodes),
      cmocka_unit_test(leaves_few_keys_to_ggml),
      cmocka_unit_test(leaves_a_contexts_first_graph_to_ggml),
      cmocka_unit_test(refuses_another_ggml),
      cmocka_unit_test(describes_itself),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
