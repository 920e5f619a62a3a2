/* SPDX-License-Identifier: MIT
 *
 * The layout of the public structs in C99: their fingerprint equals the library's, and the macro and the function of each
 * set of defaults agree.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "lib/base/abi_layout.h"
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

/* The sizes and offsets of lib/base/abi_layout.h were computed from the header's text, for pointers of 64 bits. */
#define STRUCT(type, bytes) add_checked(#type, "", sizeof(type), bytes);
#define MEMBER(type, member, offset) add_checked(#type, #member, offsetof(type, member), offset);

static void add_checked(const char* type, const char* member, size_t here, size_t written) {
  add(here);
  if (sizeof(void*) == 8 && here != written)
    fail_msg("%s %s: %lu, lib/base/abi_layout.h has %lu", type, member, (unsigned long)here, (unsigned long)written);
}

static void test_fingerprint(void** state) {
  (void)state;
  hash = UINT64_C(0xcbf29ce484222325);
  TANDEM_ABI_LAYOUT(STRUCT, MEMBER)
  assert_true(tandem_abi_fingerprint(2) == hash);
  assert_true(tandem_abi_fingerprint(0) == 0);
  assert_true(tandem_abi_fingerprint(1) == 0);
  assert_true(tandem_abi_fingerprint(3) == 0);
  assert_true(tandem_abi_fingerprint(UINT32_MAX) == 0);
  if (sizeof(void*) == 8) assert_true(hash == TANDEM_ABI_FINGERPRINT);
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
  SAME_DEFAULTS(tandem_selection, TANDEM_SELECTION_INIT, tandem_selection_init);
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
  assert_string_equal(tandem_policy_name(3), "hip");
  assert_string_equal(tandem_policy_name(4), "patterns");
  assert_null(tandem_policy_name(5));
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
      cmocka_unit_test(test_fingerprint),
      cmocka_unit_test(test_defaults),
      cmocka_unit_test(test_defaults_mean_what_the_header_says),
      cmocka_unit_test(test_names),
      cmocka_unit_test(test_error_of_null),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
