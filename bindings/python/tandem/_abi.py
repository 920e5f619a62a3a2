# SPDX-License-Identifier: MIT
# Made by tools/abi/generate.py from include/tandem/; not to be edited.
"""tandem.h of version 0.2 as ctypes sees it: constants, structs, prototypes. Nothing else is known about the library.

test/bindings/python/py_layout_test.py holds it against a C program that prints sizes, offsets and constants; at run time
the library's fingerprint decides.
"""
import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

MAJOR, MINOR = 0, 2
SONAME = f"libtandem.so.{MAJOR}"
FINGERPRINT = 0x7EB4A54E88F462A9  # tandem_abi_fingerprint(MINOR) where pointers have 64 bits

STATUS = {"OK": 0, "INVALID_ARGUMENT": -1, "INVALID_HANDLE": -2, "INVALID_STATE": -3, "UNSUPPORTED": -4, "OUT_OF_MEMORY": -5,
    "CAPACITY": -6, "BUSY": -7, "NOT_FOUND": -8, "CANCELLED": -9, "TIMEOUT": -10, "DEVICE_LOST": -11, "BACKEND": -12,
    "IO": -13, "CORRUPT": -14, "SYSTEM": -15, "INTERNAL": -16}
DTYPES = {"f32": 1, "f16": 2, "bf16": 3, "e4m3": 4, "q8_0": 5, "q4_0": 6, "q4_64": 7}
ROPES = {"caller": 0, "halves": 1, "interleaved": 2}
NORMS = {"none": 0, "rms": 1, "layer": 2}
WEIGHTS = {"in_out": 0, "out_in": 1}
ROTATIONS = {"default": 0, "hadamard": 1, "none": 2}
JUDGES = {"descent": 1, "bounds": 2, "exact": 3}
I32 = 16
DEVICE_HOST = 0
DEVICE_CUDA = 1
LOG_ERROR = 1
LOG_WARNING = 2
LOG_INFO = 3
ATTEND_SPECULATIVE = 1
ATTEND_PARTIAL = 2
TENSORS_CAUSAL = 1
SELECTION_ANY_ORDER = 1
SELECTION_PLUS_WINDOW = 2
PATTERN_BLOCK = 128
PATTERN_CHUNK = 8192
PATTERN_UNIT = 8
PATTERN_FULL = 1
PATTERN_A_SHAPE = 2
PATTERN_VERTICAL_SLASH = 4
PATTERN_BLOCK_SPARSE = 8

LogFunction = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


class TensorStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("dtype", c_int32), ("device_type", c_int32), ("device_index", c_int32),
                ("data", c_void_p), ("n_dims", c_int32), ("reserved", c_int32), ("shape", c_int64 * 4),
                ("stride", c_int64 * 4)]


class EngineOptionsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("n_threads", c_int32), ("cpu_isa", c_char_p), ("backend", c_char_p),
                ("backend_path", c_char_p), ("alloc", c_void_p), ("free", c_void_p), ("alloc_user", c_void_p),
                ("log", LogFunction), ("log_user", c_void_p), ("spin_ns", c_int64), ("pin_threads", c_int32),
                ("matmul_rows", c_int32), ("run", c_void_p), ("run_user", c_void_p)]


class LayerProjectionStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("hidden_dim", c_int32), ("w_type", c_int32), ("w_order", c_int32),
                ("device_type", c_int32), ("norm", c_int32), ("norm_eps", c_float), ("k_rope", c_int32), ("w_k", c_void_p),
                ("w_v", c_void_p), ("b_k", POINTER(c_float)), ("b_v", POINTER(c_float)), ("norm_weight", POINTER(c_float)),
                ("norm_bias", POINTER(c_float))]


class LayerOptionsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("n_q_heads", c_int32), ("n_kv_heads", c_int32), ("k_head_dim", c_int32),
                ("v_head_dim", c_int32), ("v_aliases_k", c_int32), ("sm_scale", c_float), ("soft_cap", c_float),
                ("sliding_window_tokens", c_int64), ("sinks", POINTER(c_float)), ("rope", c_int32), ("rope_dims", c_int32),
                ("rope_theta", c_double), ("rope_position_scale", c_double), ("rope_inv_freq", POINTER(c_float)),
                ("rope_attn_factor", c_double), ("projection", POINTER(LayerProjectionStruct))]


class CacheOptionsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("k_type", c_int32), ("v_type", c_int32), ("page_tokens", c_int32),
                ("host_cap_bytes", c_int64), ("device_cap_bytes", c_int64), ("layer_k_types", POINTER(c_int32)),
                ("layer_v_types", POINTER(c_int32)), ("k_rotation", c_int32), ("x_type", c_int32)]


class PruningStageStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("judge", c_int32), ("query_block", c_int32), ("plus_next", c_int32),
                ("chunk_tokens", c_int64), ("keep_tokens", c_int64), ("refresh_interval", c_int64), ("from_tokens", c_int64),
                ("to_tokens", c_int64)]


class PruningRecordStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("sink_tokens", c_int64), ("window_tokens", c_int64),
                ("stages", POINTER(PruningStageStruct)), ("n_stages", c_int64)]


class PruningStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("shared_lists", c_int32), ("preset", c_char_p),
                ("decode", POINTER(PruningRecordStruct)), ("n_decode", c_int64), ("append", POINTER(PruningRecordStruct)),
                ("n_append", c_int64)]


class HeadPatternStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("kinds", c_uint32), ("sink_tokens", c_int64), ("window_tokens", c_int64),
                ("vertical_tokens", c_int64), ("slash_tokens", c_int64), ("n_blocks", c_int64)]


class PatternsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("heads", POINTER(HeadPatternStruct)),
                ("n_heads", c_int64), ("max_distance", c_int64)]


class SessionOptionsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("sleep_between_calls", c_int32), ("policy", c_char_p),
                ("window_tokens", c_int64), ("sink_tokens", c_int64), ("route", c_char_p), ("append_tokens", c_int64),
                ("layer_policies", POINTER(c_char_p)), ("n_layer_policies", c_int64), ("alpha", c_float), ("beta", c_float),
                ("halo_tokens", c_int64), ("stream_buffer_bytes", c_int64), ("stream_fraction", c_double),
                ("stream_heads", c_int64), ("recompute_share", c_double), ("streaming_heads", POINTER(c_uint8)),
                ("n_streaming_heads", c_int64), ("selection_indices", c_int64), ("pruning", POINTER(PruningStruct)),
                ("patterns", POINTER(PatternsStruct))]


class SelectionStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("unit_tokens", c_int64), ("idx", POINTER(TensorStruct))]


class AttendArgsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("layer_idx", c_int32), ("n_sequences", c_int32),
                ("sequences", c_void_p), ("q_lens", c_void_p), ("q", c_void_p), ("k", c_void_p), ("v", c_void_p),
                ("o", c_void_p), ("lse", c_void_p), ("parent_idx", c_void_p), ("stream", c_void_p), ("cancel", c_void_p),
                ("progress", c_void_p), ("progress_user", c_void_p), ("x", c_void_p), ("selection", c_void_p)]


class AttendTensorsArgsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("n_sequences", c_int32), ("sm_scale", c_float),
                ("soft_cap", c_float), ("reserved", c_int32), ("sliding_window_tokens", c_int64), ("sinks", c_void_p),
                ("alibi_slopes", c_void_p), ("q_lens", c_void_p), ("kv_lens", c_void_p), ("q", c_void_p), ("k", c_void_p),
                ("v", c_void_p), ("mask", c_void_p), ("o", c_void_p), ("lse", c_void_p), ("stream", c_void_p),
                ("cancel", c_void_p), ("progress", c_void_p), ("progress_user", c_void_p)]


class WeightsOptionsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("resident_bytes", c_int64), ("buffer_bytes", c_int64),
                ("host_cap_bytes", c_int64), ("device_cap_bytes", c_int64)]


class WeightsStatsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("n_blocks", c_int64), ("n_resident", c_int64),
                ("resident_bytes", c_int64), ("host_bytes", c_int64), ("pinned_bytes", c_int64), ("device_bytes", c_int64),
                ("buffer_bytes", c_int64), ("n_uses", c_int64), ("n_streamed_uses", c_int64), ("n_ahead", c_int64),
                ("streamed_bytes", c_int64)]


class PatternFileOptionsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("group_size", c_int64), ("threshold", c_double),
                ("sink_tokens", c_int64), ("window_tokens", c_int64)]


class SavedBlobStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("name", c_char_p), ("data", c_void_p),
                ("n_bytes", c_int64)]


class SaveOptionsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("session", c_void_p), ("model_id", c_uint64),
                ("blobs", POINTER(SavedBlobStruct)), ("n_blobs", c_int64)]


class LoadOptionsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("session", c_void_p), ("model_id", c_uint64),
                ("file_bytes", c_int64), ("blob", c_void_p), ("blob_user", c_void_p)]


class MemoryPlanStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("host_kv_bytes", c_int64),
                ("host_session_bytes", c_int64), ("selection_max_bytes", c_int64), ("device_window_bytes", c_int64),
                ("device_work_bytes", c_int64), ("kv_token_bytes", c_int64), ("shared_bytes", c_int64),
                ("device_stream_bytes", c_int64), ("device_weights_bytes", c_int64), ("x_token_bytes", c_int64),
                ("device_window_max_bytes", c_int64), ("judged_kv_bytes", c_int64), ("judged_first_bytes", c_int64),
                ("judged_max_bytes", c_int64)]


class RoutePlanStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("resident_tokens", c_int64), ("host_tokens", c_int64),
                ("stream_tokens", c_int64), ("host_bytes", c_int64), ("stream_bytes", c_int64), ("host_ns", c_int64),
                ("bus_ns", c_int64), ("device_ns", c_int64), ("total_ns", c_int64), ("host_alone_ns", c_int64),
                ("stream_alone_ns", c_int64), ("recompute_tokens", c_int64), ("recompute_bytes", c_int64),
                ("recompute_alone_ns", c_int64)]


class CacheStatsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("n_sequences", c_int64), ("n_pages_used", c_int64),
                ("n_pages_shared", c_int64), ("host_kv_bytes", c_int64), ("host_session_bytes", c_int64),
                ("selection_bytes", c_int64), ("host_peak_bytes", c_int64), ("device_window_bytes", c_int64),
                ("device_work_bytes", c_int64), ("device_peak_bytes", c_int64), ("device_stream_bytes", c_int64),
                ("pinned_bytes", c_int64), ("device_weights_bytes", c_int64)]


class SessionStatsStruct(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_int32), ("n_attends", c_int64), ("n_query_tokens", c_int64),
                ("resident_kv_bytes_read", c_int64), ("host_kv_bytes_read", c_int64), ("dense_kv_bytes", c_int64),
                ("evicted_tokens", c_int64), ("n_refreshes", c_int64), ("selected_keys", c_int64), ("host_keys", c_int64),
                ("attend_ns", c_int64), ("refresh_ns", c_int64), ("refresh_wait_ns", c_int64), ("n_device_attends", c_int64),
                ("n_host_parts", c_int64), ("host_part_ns", c_int64), ("staged_kv_bytes", c_int64),
                ("filled_kv_bytes", c_int64), ("n_stream_parts", c_int64), ("stream_part_ns", c_int64),
                ("streamed_kv_bytes", c_int64), ("n_joint_parts", c_int64), ("host_part_tokens", c_int64),
                ("stream_part_tokens", c_int64), ("n_planned_parts", c_int64), ("predicted_part_ns", c_int64),
                ("planned_part_ns", c_int64), ("streamed_x_bytes", c_int64), ("judged_kv_bytes", c_int64),
                ("pattern_pairs", c_int64), ("pattern_dense_pairs", c_int64)]


# Structs by their C names, in the order of the header.
STRUCTS: dict[str, type[ctypes.Structure]] = {"tandem_tensor": TensorStruct, "tandem_engine_options": EngineOptionsStruct,
    "tandem_layer_options": LayerOptionsStruct, "tandem_cache_options": CacheOptionsStruct,
    "tandem_session_options": SessionOptionsStruct, "tandem_attend_args": AttendArgsStruct,
    "tandem_attend_tensors_args": AttendTensorsArgsStruct, "tandem_layer_projection": LayerProjectionStruct,
    "tandem_weights_options": WeightsOptionsStruct, "tandem_weights_stats": WeightsStatsStruct,
    "tandem_selection": SelectionStruct, "tandem_pruning_stage": PruningStageStruct,
    "tandem_pruning_record": PruningRecordStruct, "tandem_pruning": PruningStruct, "tandem_head_pattern": HeadPatternStruct,
    "tandem_patterns": PatternsStruct, "tandem_pattern_file_options": PatternFileOptionsStruct,
    "tandem_saved_blob": SavedBlobStruct, "tandem_save_options": SaveOptionsStruct, "tandem_load_options": LoadOptionsStruct,
    "tandem_memory_plan": MemoryPlanStruct, "tandem_route_plan": RoutePlanStruct, "tandem_cache_stats": CacheStatsStruct,
    "tandem_session_stats": SessionStatsStruct}

# Every pointer but that to a text is void *: byref(), an address or None. Result first.
_P, _I, _L = c_void_p, c_int32, c_int64
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "tandem_version": (c_uint32,),
    "tandem_abi_fingerprint": (c_uint64, c_uint32),
    "tandem_status_name": (c_char_p, _I),
    "tandem_error_message": (c_char_p, _P),
    "tandem_error_field": (c_char_p, _P),
    "tandem_error_status": (_I, _P),
    "tandem_error_underlying": (_L, _P),
    "tandem_error_release": (None, _P),
    "tandem_dtype_name": (c_char_p, _I),
    "tandem_dtype_row_bytes": (_L, _I, _I),
    "tandem_tensor_init": (_I, _P, _I, _P, _I, _P, _P),
    "tandem_engine_options_init": (None, _P),
    "tandem_engine_create": (_I, _P, _P, _P),
    "tandem_engine_release": (None, _P),
    "tandem_engine_drain": (_I, _P, _L, _P),
    "tandem_engine_report": (_I, _P, c_size_t, _P, _P, _P),
    "tandem_layer_options_init": (None, _P),
    "tandem_model_create": (_I, _P, _P, _I, _P),
    "tandem_model_release": (None, _P),
    "tandem_cache_options_init": (None, _P),
    "tandem_cache_create": (_I, _P, _P, _P, _P, _P),
    "tandem_cache_release": (None, _P),
    "tandem_sequence_create": (_I, _P, _P, _P),
    "tandem_sequence_fork": (_I, _P, _P, _L, _P),
    "tandem_sequence_drop": (_I, _P, _L, _P),
    "tandem_sequence_reserve": (_I, _P, _L, _L, _P),
    "tandem_sequence_truncate": (_I, _P, _L, _L, _P),
    "tandem_sequence_remove": (_I, _P, _L, _L, _L, _I, _P),
    "tandem_sequence_append": (_I, _P, _L, _I, _P, _P, _P, _P),
    "tandem_sequence_read": (_I, _P, _P, _P, _L, _I, _L, _P),
    "tandem_sequence_length": (_I, _P, _P, _L, _I, _P),
    "tandem_sequence_digest": (_I, _P, _P, _L, _P),
    "tandem_session_options_init": (None, _P),
    "tandem_session_create": (_I, _P, _P, _P, _P),
    "tandem_session_release": (None, _P),
    "tandem_attend_args_init": (None, _P),
    "tandem_attend": (_I, _P, _P, _P),
    "tandem_session_commit": (_I, _P, _L, _P, _L, _P),
    "tandem_step_begin": (_I, _P, _P, _P, _I, _P, _P),
    "tandem_step_end": (_I, _P, _P, _P),
    "tandem_attend_tensors_args_init": (None, _P),
    "tandem_attend_tensors": (_I, _P, _P, _P),
    "tandem_merge": (_I, _P, _P, _P, _P, _I, _P, _P, _P),
    "tandem_layer_projection_init": (None, _P),
    "tandem_weights_options_init": (None, _P),
    "tandem_weights_create": (_I, _P, _P, _P, _P, _I, _P, _P),
    "tandem_weights_release": (None, _P),
    "tandem_weights_use": (_I, _P, _P, _I, _P, _P),
    "tandem_weights_done": (_I, _P, _I, _P, _P),
    "tandem_session_use_weights": (_I, _P, _I, _P, _I, _I, _P),
    "tandem_weights_get_stats": (_I, _P, _P, _P),
    "tandem_sequence_append_x": (_I, _P, _L, _I, _P, _P, _P, _P, _P),
    "tandem_sequence_read_x": (_I, _P, _P, _L, _I, _L, _P),
    "tandem_selection_init": (None, _P),
    "tandem_pruning_stage_init": (None, _P),
    "tandem_pruning_record_init": (None, _P),
    "tandem_pruning_init": (None, _P),
    "tandem_head_pattern_init": (None, _P),
    "tandem_patterns_init": (None, _P),
    "tandem_pattern_file_options_init": (None, _P),
    "tandem_patterns_read": (_I, _P, _L, _P, _P, c_char_p, _P, _P),
    "tandem_saved_blob_init": (None, _P),
    "tandem_save_options_init": (None, _P),
    "tandem_load_options_init": (None, _P),
    "tandem_sequence_save": (_I, _P, _L, _P, _P, _P, _P),
    "tandem_sequence_load": (_I, _P, _P, _P, _P, _P, _P),
    "tandem_plan_memory": (_I, _P, _P, _P, _P, _P, _P, _L, _P),
    "tandem_plan_report": (_I, _P, c_size_t, _P, _P, _P),
    "tandem_plan": (_I, _P, _P, _I, _P, _P, _L, _P),
    "tandem_route_report": (_I, _P, c_size_t, _P, _P, _P),
    "tandem_supports": (_I, _P, _P, _P, _P, _P),
    "tandem_policy_name": (c_char_p, _I),
    "tandem_cpu_isa_name": (c_char_p, _I),
    "tandem_cpu_isa_available": (_I, c_char_p),
    "tandem_cache_get_stats": (_I, _P, _P, _P),
    "tandem_cache_sequences": (_I, _P, _L, _P, _P, _P),
    "tandem_cache_trim": (_I, _P, _P, _P),
    "tandem_session_get_stats": (_I, _P, _P, _P),
    "tandem_session_pattern_pairs": (_I, _P, _P, _P, _I, _P),
    "tandem_session_selection": (_I, _P, _P, _L, _P, _P, _L, _I, _I, _I, _P),
}


def declare(library: ctypes.CDLL) -> None:
    """Gives every function of `library` its prototype."""
    for name, (result, *parameters) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
