/* SPDX-License-Identifier: MIT
 *
 * The public structs as a C99 compiler lays them out: their fingerprint is the library's, and macro and function of each
 * set of defaults agree.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "tandem/tandem.h"

#include <cmocka.h>

static uint64_t hash;

static void add(size_t number) {
  int i;
  for (i = 0; i < 4; ++i) {
    hash ^= (number >> (8 * i)) & 0xff;
    hash *= UINT64_C(0x100000001b3);
  }
}

#define SIZE(type) add(sizeof(type))
#define AT(type, member) add(offsetof(type, member))

static void add_engine_options(void) {
  SIZE(tandem_engine_options);
  AT(tandem_engine_options, struct_size);
  AT(tandem_engine_options, n_threads);
  AT(tandem_engine_options, cpu_isa);
  AT(tandem_engine_options, backend);
  AT(tandem_engine_options, backend_path);
  AT(tandem_engine_options, alloc);
  AT(tandem_engine_options, free);
  AT(tandem_engine_options, alloc_user);
  AT(tandem_engine_options, log);
  AT(tandem_engine_options, log_user);
  AT(tandem_engine_options, spin_ns);
  AT(tandem_engine_options, pin_threads);
  AT(tandem_engine_options, matmul_rows);
  AT(tandem_engine_options, run);
  AT(tandem_engine_options, run_user);
}

static void add_layer_options(void) {
  SIZE(tandem_layer_projection);
  AT(tandem_layer_projection, struct_size);
  AT(tandem_layer_projection, hidden_dim);
  AT(tandem_layer_projection, w_type);
  AT(tandem_layer_projection, w_order);
  AT(tandem_layer_projection, device_type);
  AT(tandem_layer_projection, norm);
  AT(tandem_layer_projection, norm_eps);
  AT(tandem_layer_projection, k_rope);
  AT(tandem_layer_projection, w_k);
  AT(tandem_layer_projection, w_v);
  AT(tandem_layer_projection, b_k);
  AT(tandem_layer_projection, b_v);
  AT(tandem_layer_projection, norm_weight);
  AT(tandem_layer_projection, norm_bias);

  SIZE(tandem_layer_options);
  AT(tandem_layer_options, struct_size);
  AT(tandem_layer_options, n_q_heads);
  AT(tandem_layer_options, n_kv_heads);
  AT(tandem_layer_options, k_head_dim);
  AT(tandem_layer_options, v_head_dim);
  AT(tandem_layer_options, v_aliases_k);
  AT(tandem_layer_options, sm_scale);
  AT(tandem_layer_options, soft_cap);
  AT(tandem_layer_options, sliding_window_tokens);
  AT(tandem_layer_options, sinks);
  AT(tandem_layer_options, rope);
  AT(tandem_layer_options, rope_dims);
  AT(tandem_layer_options, rope_theta);
  AT(tandem_layer_options, rope_position_scale);
  AT(tandem_layer_options, rope_inv_freq);
  AT(tandem_layer_options, rope_attn_factor);
  AT(tandem_layer_options, projection);

  SIZE(tandem_cache_options);
  AT(tandem_cache_options, struct_size);
  AT(tandem_cache_options, k_type);
  AT(tandem_cache_options, v_type);
  AT(tandem_cache_options, page_tokens);
  AT(tandem_cache_options, host_cap_bytes);
  AT(tandem_cache_options, device_cap_bytes);
  AT(tandem_cache_options, layer_k_types);
  AT(tandem_cache_options, layer_v_types);
  AT(tandem_cache_options, k_rotation);
  AT(tandem_cache_options, x_type);
}

static void add_session_options(void) {
  SIZE(tandem_session_options);
  AT(tandem_session_options, struct_size);
  AT(tandem_session_options, sleep_between_calls);
  AT(tandem_session_options, policy);
  AT(tandem_session_options, window_tokens);
  AT(tandem_session_options, sink_tokens);
  AT(tandem_session_options, alpha);
  AT(tandem_session_options, beta);
  AT(tandem_session_options, halo_tokens);
  AT(tandem_session_options, route);
  AT(tandem_session_options, stream_buffer_bytes);
  AT(tandem_session_options, stream_fraction);
  AT(tandem_session_options, append_tokens);
  AT(tandem_session_options, stream_heads);
  AT(tandem_session_options, recompute_share);
  AT(tandem_session_options, streaming_heads);
  AT(tandem_session_options, n_streaming_heads);
}

static void add_attend_args(void) {
  SIZE(tandem_attend_args);
  AT(tandem_attend_args, struct_size);
  AT(tandem_attend_args, flags);
  AT(tandem_attend_args, layer_idx);
  AT(tandem_attend_args, n_sequences);
  AT(tandem_attend_args, sequences);
  AT(tandem_attend_args, q_lens);
  AT(tandem_attend_args, q);
  AT(tandem_attend_args, k);
  AT(tandem_attend_args, v);
  AT(tandem_attend_args, o);
  AT(tandem_attend_args, lse);
  AT(tandem_attend_args, parent_idx);
  AT(tandem_attend_args, stream);
  AT(tandem_attend_args, cancel);
  AT(tandem_attend_args, progress);
  AT(tandem_attend_args, progress_user);
  AT(tandem_attend_args, x);
}

static void add_attend_tensors_args(void) {
  SIZE(tandem_attend_tensors_args);
  AT(tandem_attend_tensors_args, struct_size);
  AT(tandem_attend_tensors_args, flags);
  AT(tandem_attend_tensors_args, n_sequences);
  AT(tandem_attend_tensors_args, sm_scale);
  AT(tandem_attend_tensors_args, soft_cap);
  AT(tandem_attend_tensors_args, reserved);
  AT(tandem_attend_tensors_args, sliding_window_tokens);
  AT(tandem_attend_tensors_args, sinks);
  AT(tandem_attend_tensors_args, alibi_slopes);
  AT(tandem_attend_tensors_args, q_lens);
  AT(tandem_attend_tensors_args, kv_lens);
  AT(tandem_attend_tensors_args, q);
  AT(tandem_attend_tensors_args, k);
  AT(tandem_attend_tensors_args, v);
  AT(tandem_attend_tensors_args, mask);
  AT(tandem_attend_tensors_args, o);
  AT(tandem_attend_tensors_args, lse);
  AT(tandem_attend_tensors_args, stream);
  AT(tandem_attend_tensors_args, cancel);
  AT(tandem_attend_tensors_args, progress);
  AT(tandem_attend_tensors_args, progress_user);
}

static void add_memory_plan(void) {
  SIZE(tandem_memory_plan);
  AT(tandem_memory_plan, struct_size);
  AT(tandem_memory_plan, reserved);
  AT(tandem_memory_plan, host_kv_bytes);
  AT(tandem_memory_plan, host_session_bytes);
  AT(tandem_memory_plan, selection_max_bytes);
  AT(tandem_memory_plan, device_window_bytes);
  AT(tandem_memory_plan, device_work_bytes);
  AT(tandem_memory_plan, kv_token_bytes);
  AT(tandem_memory_plan, shared_bytes);
  AT(tandem_memory_plan, device_stream_bytes);
  AT(tandem_memory_plan, device_weights_bytes);
  AT(tandem_memory_plan, x_token_bytes);
}

static void add_plans_and_stats(void) {
  SIZE(tandem_route_plan);
  AT(tandem_route_plan, struct_size);
  AT(tandem_route_plan, reserved);
  AT(tandem_route_plan, resident_tokens);
  AT(tandem_route_plan, host_tokens);
  AT(tandem_route_plan, stream_tokens);
  AT(tandem_route_plan, host_bytes);
  AT(tandem_route_plan, stream_bytes);
  AT(tandem_route_plan, host_ns);
  AT(tandem_route_plan, bus_ns);
  AT(tandem_route_plan, device_ns);
  AT(tandem_route_plan, total_ns);
  AT(tandem_route_plan, host_alone_ns);
  AT(tandem_route_plan, stream_alone_ns);
  AT(tandem_route_plan, recompute_tokens);
  AT(tandem_route_plan, recompute_bytes);
  AT(tandem_route_plan, recompute_alone_ns);

  SIZE(tandem_cache_stats);
  AT(tandem_cache_stats, struct_size);
  AT(tandem_cache_stats, reserved);
  AT(tandem_cache_stats, n_sequences);
  AT(tandem_cache_stats, n_pages_used);
  AT(tandem_cache_stats, n_pages_shared);
  AT(tandem_cache_stats, host_kv_bytes);
  AT(tandem_cache_stats, host_session_bytes);
  AT(tandem_cache_stats, selection_bytes);
  AT(tandem_cache_stats, host_peak_bytes);
  AT(tandem_cache_stats, device_window_bytes);
  AT(tandem_cache_stats, device_work_bytes);
  AT(tandem_cache_stats, device_peak_bytes);
  AT(tandem_cache_stats, device_stream_bytes);
  AT(tandem_cache_stats, pinned_bytes);
  AT(tandem_cache_stats, device_weights_bytes);
}

static void add_session_stats(void) {
  SIZE(tandem_session_stats);
  AT(tandem_session_stats, struct_size);
  AT(tandem_session_stats, reserved);
  AT(tandem_session_stats, n_attends);
  AT(tandem_session_stats, n_query_tokens);
  AT(tandem_session_stats, resident_kv_bytes_read);
  AT(tandem_session_stats, host_kv_bytes_read);
  AT(tandem_session_stats, dense_kv_bytes);
  AT(tandem_session_stats, evicted_tokens);
  AT(tandem_session_stats, n_refreshes);
  AT(tandem_session_stats, selected_keys);
  AT(tandem_session_stats, host_keys);
  AT(tandem_session_stats, attend_ns);
  AT(tandem_session_stats, refresh_ns);
  AT(tandem_session_stats, refresh_wait_ns);
  AT(tandem_session_stats, n_device_attends);
  AT(tandem_session_stats, n_host_parts);
  AT(tandem_session_stats, host_part_ns);
  AT(tandem_session_stats, staged_kv_bytes);
  AT(tandem_session_stats, filled_kv_bytes);
  AT(tandem_session_stats, n_stream_parts);
  AT(tandem_session_stats, stream_part_ns);
  AT(tandem_session_stats, streamed_kv_bytes);
  AT(tandem_session_stats, n_joint_parts);
  AT(tandem_session_stats, host_part_tokens);
  AT(tandem_session_stats, stream_part_tokens);
  AT(tandem_session_stats, n_planned_parts);
  AT(tandem_session_stats, predicted_part_ns);
  AT(tandem_session_stats, planned_part_ns);
  AT(tandem_session_stats, streamed_x_bytes);
}

static void add_weights(void) {
  SIZE(tandem_weights_options);
  AT(tandem_weights_options, struct_size);
  AT(tandem_weights_options, reserved);
  AT(tandem_weights_options, resident_bytes);
  AT(tandem_weights_options, buffer_bytes);
  AT(tandem_weights_options, host_cap_bytes);
  AT(tandem_weights_options, device_cap_bytes);

  SIZE(tandem_weights_stats);
  AT(tandem_weights_stats, struct_size);
  AT(tandem_weights_stats, reserved);
  AT(tandem_weights_stats, n_blocks);
  AT(tandem_weights_stats, n_resident);
  AT(tandem_weights_stats, resident_bytes);
  AT(tandem_weights_stats, host_bytes);
  AT(tandem_weights_stats, pinned_bytes);
  AT(tandem_weights_stats, device_bytes);
  AT(tandem_weights_stats, buffer_bytes);
  AT(tandem_weights_stats, n_uses);
  AT(tandem_weights_stats, n_streamed_uses);
  AT(tandem_weights_stats, n_ahead);
  AT(tandem_weights_stats, streamed_bytes);
}

static void test_fingerprint(void** state) {
  (void)state;
  hash = UINT64_C(0xcbf29ce484222325);
  SIZE(tandem_tensor);
  AT(tandem_tensor, struct_size);
  AT(tandem_tensor, dtype);
  AT(tandem_tensor, device_type);
  AT(tandem_tensor, device_index);
  AT(tandem_tensor, data);
  AT(tandem_tensor, n_dims);
  AT(tandem_tensor, reserved);
  AT(tandem_tensor, shape);
  AT(tandem_tensor, stride);
  add_engine_options();
  add_layer_options();
  add_session_options();
  add_attend_args();
  add_attend_tensors_args();
  add_memory_plan();
  add_plans_and_stats();
  add_session_stats();
  add_weights();
  assert_true(tandem_abi_fingerprint(2) == hash);
  assert_true(tandem_abi_fingerprint(0) == 0);
  assert_true(tandem_abi_fingerprint(1) == 0);
  assert_true(tandem_abi_fingerprint(3) == 0);
  assert_true(tandem_abi_fingerprint(UINT32_MAX) == 0);
  /* From the release of minor version 2 on these numbers never change again. */
  if (sizeof(void*) == 8) assert_true(hash == UINT64_C(0x6593b69a52bf6bdd));
}

static void test_sizes(void** state) {
  (void)state;
  if (sizeof(void*) != 8) skip();
  assert_int_equal(sizeof(tandem_tensor), 96);
  assert_int_equal(sizeof(tandem_engine_options), 104);
  assert_int_equal(sizeof(tandem_layer_projection), 80);
  assert_int_equal(sizeof(tandem_layer_options), 96);
  assert_int_equal(sizeof(tandem_cache_options), 56);
  assert_int_equal(sizeof(tandem_session_options), 112);
  assert_int_equal(sizeof(tandem_attend_args), 120);
  assert_int_equal(sizeof(tandem_attend_tensors_args), 144);
  assert_int_equal(sizeof(tandem_memory_plan), 88);
  assert_int_equal(sizeof(tandem_route_plan), 120);
  assert_int_equal(sizeof(tandem_cache_stats), 112);
  assert_int_equal(sizeof(tandem_session_stats), 224);
  assert_int_equal(sizeof(tandem_weights_options), 40);
  assert_int_equal(sizeof(tandem_weights_stats), 96);
}

/* No struct has padding, so whole structs can be compared. */
#define SAME_DEFAULTS(type, INIT, init)                                  \
  do {                                                                   \
    type from_macro = INIT;                                              \
    type from_function;                                                  \
    memset(&from_function, 0xa5, sizeof from_function);                  \
    init(&from_function);                                                \
    assert_memory_equal(&from_macro, &from_function, sizeof from_macro); \
    assert_int_equal(from_macro.struct_size, sizeof from_macro);         \
    init(NULL);                                                          \
  } while (0)

static void test_defaults(void** state) {
  (void)state;
  SAME_DEFAULTS(tandem_engine_options, TANDEM_ENGINE_OPTIONS_INIT, tandem_engine_options_init);
  SAME_DEFAULTS(tandem_layer_projection, TANDEM_LAYER_PROJECTION_INIT, tandem_layer_projection_init);
  SAME_DEFAULTS(tandem_layer_options, TANDEM_LAYER_OPTIONS_INIT, tandem_layer_options_init);
  SAME_DEFAULTS(tandem_cache_options, TANDEM_CACHE_OPTIONS_INIT, tandem_cache_options_init);
  SAME_DEFAULTS(tandem_session_options, TANDEM_SESSION_OPTIONS_INIT, tandem_session_options_init);
  SAME_DEFAULTS(tandem_attend_args, TANDEM_ATTEND_ARGS_INIT, tandem_attend_args_init);
  SAME_DEFAULTS(tandem_attend_tensors_args, TANDEM_ATTEND_TENSORS_ARGS_INIT, tandem_attend_tensors_args_init);
  SAME_DEFAULTS(tandem_weights_options, TANDEM_WEIGHTS_OPTIONS_INIT, tandem_weights_options_init);
}

static void test_defaults_mean_what_the_header_says(void** state) {
  tandem_engine_options engine = TANDEM_ENGINE_OPTIONS_INIT;
  tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;
  (void)state;
  assert_int_equal(engine.spin_ns, -1);
  assert_int_equal(engine.pin_threads, -1);
  assert_int_equal(engine.matmul_rows, 0);
  assert_int_equal(session.window_tokens, -1);
  assert_int_equal(session.sink_tokens, -1);
  assert_true(session.alpha == 0.0f);
  assert_true(session.beta == -1.0f);
  assert_int_equal(session.halo_tokens, -1);
  assert_null(session.route);
  assert_int_equal(session.stream_buffer_bytes, 0);
  assert_true(session.stream_fraction == -1.0);
  assert_int_equal(session.append_tokens, 0);
  assert_int_equal(session.stream_heads, 0);
}

static void test_names(void** state) {
  int32_t status;
  int32_t n_isas = 0;
  (void)state;
  assert_int_equal(tandem_version(), TANDEM_VERSION_MAJOR << 16 | TANDEM_VERSION_MINOR << 8 | TANDEM_VERSION_PATCH);
  assert_string_equal(tandem_status_name(TANDEM_OK), "TANDEM_OK");
  assert_string_equal(tandem_status_name(TANDEM_ERROR_BUSY), "TANDEM_ERROR_BUSY");
  assert_string_equal(tandem_status_name(TANDEM_ERROR_INTERNAL), "TANDEM_ERROR_INTERNAL");
  assert_string_equal(tandem_status_name(1), "unknown status");
  assert_string_equal(tandem_status_name(-17), "unknown status");
  for (status = -16; status < 0; ++status) assert_int_equal(strncmp(tandem_status_name(status), "TANDEM_ERROR_", 13), 0);

  assert_string_equal(tandem_policy_name(0), "all");
  assert_string_equal(tandem_policy_name(1), "streaming");
  assert_string_equal(tandem_policy_name(2), "hgca");
  assert_null(tandem_policy_name(3));
  assert_null(tandem_policy_name(-1));
  assert_null(tandem_policy_name(INT32_MAX));
  assert_null(tandem_cpu_isa_name(-1));
  assert_null(tandem_cpu_isa_name(INT32_MAX));
  while (tandem_cpu_isa_name(n_isas) != NULL) ++n_isas;
  assert_true(n_isas > 0);
  assert_int_equal(tandem_cpu_isa_available(NULL), 0);
  assert_int_equal(tandem_cpu_isa_available(""), 0);
  assert_int_equal(tandem_cpu_isa_available("no such thing"), 0);
}

static void test_error_of_null(void** state) {
  (void)state;
  assert_string_equal(tandem_error_message(NULL), "");
  assert_string_equal(tandem_error_field(NULL), "");
  assert_int_equal(tandem_error_status(NULL), TANDEM_OK);
  assert_int_equal(tandem_error_underlying(NULL), 0);
  tandem_error_release(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_fingerprint), cmocka_unit_test(test_sizes),
      cmocka_unit_test(test_defaults),    cmocka_unit_test(test_defaults_mean_what_the_header_says),
      cmocka_unit_test(test_names),       cmocka_unit_test(test_error_of_null),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
