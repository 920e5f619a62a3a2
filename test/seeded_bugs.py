#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Shows that the tests can fail: seeds one bug at a time into a copy of the tree and expects a test to catch it.

usage: test/seeded_bugs.py [--check] [--build DIR] [--jobs N] [NAME...]

The copy and its build live in DIR (default build/seeded). Each bug is one textual replacement; it counts as caught when
the program named beside it fails, all having passed before. Not part of ctest, as it builds the library once per bug;
--check is: whether each text still stands once in its file.
"""
import argparse
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# name, file, text, replacement, program, cmocka filter
BUGS = [
    ("products that forget the keys before", "cpu/kernels/product_tile_inl.h", "part.accumulate = p.accumulate || l > 0;",
     "part.accumulate = p.accumulate;", "product_test", "test_products"),
    ("signals during f32 products", "cpu/matmul_block.cc",
     "const SignalsHeld held(by_onednn(k_bf16_) || by_onednn(v_bf16_));", "const SignalsHeld held(false);", "api_signal_test",
     "handlers_run_on_stacks"),
    ("a step that wakes workers which may sleep", "lib/attend/steps.cc", "if (open.is_planned || core_.keeps_awake) cpu.table->wake",
     "cpu.table->wake", "step_wake_test", "sleep_between_calls_wakes_nobody"),
    ("lse in base 2", "cpu/kernels/merge_inl.h", "job.lse_out[r] = sum == 0.0f ? -HUGE_VALF : m + logf(sum)",
     "job.lse_out[r] = sum == 0.0f ? -HUGE_VALF : m + log2f(sum)",
     "merge_test", "test_partitions"),
    ("no guard for empty states", "cpu/kernels/merge_inl.h",
     "    const float lse = job.lse[i][r];\n    if (lse == -HUGE_VALF) continue;", "    const float lse = job.lse[i][r];",
     "merge_test", "test_partitions"),
    ("lse near zero is empty", "cpu/kernels/merge_inl.h",
     "    const float lse = job.lse[i][r];\n    if (lse == -HUGE_VALF) continue;",
     "    const float lse = job.lse[i][r];\n    if (fabsf(lse) < 1e-6f) continue;",
     "known_defects_test", "test_lse_near_zero_is_not_empty"),
    ("exp with a worse polynomial", "cpu/kernels/simd_math_inl.h", "4.166655463e-2f", "4.2e-2f",
     "known_defects_test", "test_exp_accuracy"),
    ("causal mask one too far", "lib/attend/call_keys.cc",
     "scratch.begin.push_back(std::min(begin, tree ? of.first_query : token));\n    scratch.end.push_back(token + 1);",
     "scratch.begin.push_back(std::min(begin, tree ? of.first_query : token));\n    scratch.end.push_back(token + 2);", "known_defects_test", "test_causal_mask_is_aligned_to_the_end"),
    ("sliding window off by one", "lib/store/sequence_table.cc", "const int64_t least = position - distance + 1;",
     "const int64_t least = position - distance;", "gate_test", "test_sliding_window"),
    ("streaming window off by one", "lib/attend/call_keys.cc", "newest + 1 - options.window_len;",
     "newest - options.window_len;", "gate_test", "test_streaming_scope"),
    ("32-bit token stride", "lib/base/tensor_view.h", "data + token * token_stride",
     "data + static_cast<int32_t>(token * token_stride)", "known_defects_test", "test_offsets_beyond_32_bits"),
    ("stale page after a fork", "lib/store/cache.cc", "    if (!store_.shared(page)) continue;", "    if (true) continue;",
     "stream_test", "test_exact_streams"),
    ("removal one row short", "lib/store/cache.cc", "for (int64_t t = first + n_tokens; t < length; ++t) move_row(*this",
     "for (int64_t t = first + n_tokens; t + 1 < length; ++t) move_row(*this", "stream_test", "test_exact_streams"),
    ("a broken step keeps its tokens", "lib/attend/steps.cc", "    cache.truncate_locked(sequence",
     "    if (false) cache.truncate_locked(sequence", "stream_test", "test_exact_streams"),
    ("kept tokens are not moved", "lib/attend/speculation.cc", "if (kept_idx[i] != i)\n        move_row(cache",
     "if (false)\n        move_row(cache", "stream_test", "test_exact_streams"),
    ("angles of a stretch repeat", "cpu/kernels/rotate_inl.h", "first + n_ahead * row_size",
     "first + (n_ahead & 63) * row_size", "kernel_test", "rotated_keys"),
    ("q is not rotated anew behind a stretch", "cpu/kernels/rotate_inl.h", "      rotator.stretch_end = stretch_end;",
     "      rotator.stretch_end = n;", "kernel_test", "rotated_keys"),
    ("keys behind the base are rotated ahead", "cpu/kernels/rotate_inl.h", "position < 0 && i < 2 * n", "false && i < 2 * n",
     "kernel_test", "rotated_keys"),
    ("positions have three digits", "cpu/kernels/rotate_inl.h", "digit < RopeTable::kDigits", "digit < 3", "kernel_test",
     "rotated_keys"),
    ("keys are rotated, queries are not", "lib/attend/host_lane.cc",
     "if (layer.k_rotation == TANDEM_ROTATION_HADAMARD) hadamard_rotate", "if (false) hadamard_rotate",
     "api_rotation_test", "attends_the_stored_keys"),
    ("4-bit keys are not rotated by default", "lib/store/cache_options.cc", "return layer.k_type == TANDEM_Q4_0 && can_rotate", "return false && can_rotate",
     "api_rotation_test", "keys_of_4_bits_are_rotated_by_default"),
    ("hidden states beside rotated keys", "lib/store/cache_options.cc", "can_rotate && !keeps_hidden", "can_rotate", "api_rotation_test",
     "the_default_rotates_nothing_that_cannot_be"),
    ("a window meets queries that are not rotated", "lib/attend/device_launch.cc", "if (!rotates_queries(layer)) return append.q;",
     "if (layer.rope == nullptr) return append.q;", "rotated_keys_test", "calls_agree_with_the_host"),
    ("rotated queries count as bf16", "lib/call/host_part.cc", " && layer.k_rotation == TANDEM_ROTATION_NONE", "",
     "api_rotation_test", "attends_the_stored_keys"),
    ("rotated keys are not rotated back", "lib/tensors/convert.cc",
     "from.codes, from.scales, values, n);\n  if (rotated)", "from.codes, from.scales, values, n);\n  if (false)",
     "api_rotation_test", "rows_come_back"),
    ("maw decays once too little", "lib/select/hgca_judge.cc", "static_cast<double>(queries.n + queries.n_skipped)",
     "static_cast<double>(queries.n + queries.n_skipped - 1)", "stream_test", "test_hgca_streams"),
    ("selection misses the last kept key", "lib/select/hgca.cc", "  *input.halo_left = halo_left;",
     "  *input.halo_left = halo_left;\n  if (n_kept > 3) --n_kept;", "stream_test", "test_hgca_streams"),
    ("extents ahead are left to the token that begins them", "lib/store/cache.cc", "page + std::max<int64_t>(1, extent_pages / 4)",
     "page + 0 * extent_pages", "store_population_test", "*extents_ahead_are_populated_and_no_more"),
    ("pages are all on node 0", "lib/store/page_store.cc", "part.bytes, part.node);", "part.bytes, 0);", "page_store_test", ""),
    ("jobs go to the next head's node", "lib/call/host_part.cc", "job.node = node_of_head(kv_head,",
     "job.node = node_of_head((kv_head + 1) % layer.n_kv_heads,", "placement_test", ""),
    ("copied keys are not placed", "lib/select/hgca_judge.cc", "  place_copies(block, state, kv_head);\n", "", "placement_test", ""),
    ("the caller is where the first seat is", "cpu/pool.cc", "? node_of_caller() : kAllNodes", "? workers_[0].seat.node : kAllNodes",
     "pool_nodes_test", ""),
    ("relative folders are searched", "lib/machine/device_module.cc", "if (folder[0] != '/')", "if (folder.empty())",
     "device_module_test", "entries_that_are_not_absolute"),
    ("an engine leaves its device open", "lib/machine/device_owner.cc", "if (device_.table != nullptr && !process_ends()) device_",
     "if (false) device_", "device_new_test", "test_nothing_stays_behind"),
    ("threads go on while the process ends", "lib/base/process_end.cc", "while (n_at_work.load() > n_of_this_thread",
     "while (false", "exit_test", "with_everything_released"),
    # of the matrix unit: where the processor has none, these are not caught
    ("planes are left out", "cpu/matrix_block.cc", "i + j < kMaxPlanes; ++j)", "i + j < kMaxPlanes - 1; ++j)",
     "matmul_test", "test_types_and_dims"),
    ("sums are not rescaled", "cpu/kernels/amx_block_inl.h", "_mm512_mul_ps(_mm512_load_ps(t.o + 16 * d), factor)",
     "_mm512_load_ps(t.o + 16 * d)", "matmul_test", "test_types_and_dims"),
    ("hidden keys weigh", "cpu/kernels/amx_block_inl.h", "if (kMasked) p[i] = ", "if (false) p[i] = ",
     "matmul_test", "test_masks"),
    ("the last keys of a tile are left out", "cpu/matrix_block.cc", "product.n_steps = (end - begin) / kStep;",
     "product.n_steps = (end - begin) / kStep - (end - begin > kStep);", "matmul_test", "test_rows_and_keys"),
    ("pieces of keys that are runs begin one early", "cpu/attend_plan.cc", "at.run_idx += n_keys;", "at.run_idx += n_keys - 1;",
     "backend_test", "plans_tile"),
    ("values of keys that are runs are their keys", "cpu/kernels/key_block_inl.h", "static_cast<Row>(run->v)",
     "static_cast<Row>(run->k)", "kernel_test", "random_cases_fast"),
    ("a step ends on any stream", "lib/attend/steps.cc", "stream != begun_on)", "stream != begun_on && false)",
     "device_step_test", "refuses_what_was_not_planned"),
    ("a rollback that leaves a layer longer", "lib/store/cache.cc", "  own = std::min(own, length);",
     "  if (layer_idx == 0) own = std::min(own, length);", "device_recovery_test", "lengths_are_those_that_remain"),
    ("what is lost counts", "lib/device/hand_over.cc", "answered.store(kLostTickets + task.ticket", "answered.store(INT64_MAX",
     "hand_over_new_test", "lost_calls_do_not_count"),
    ("q4_64 without its minimum", "cpu/kernels/stored_inl.h", "minimum = hn::Set(d, scales[1]);",
     "minimum = hn::Zero(d);", "state_test", "q4_64_stays_within_its_bound"),
    ("weights cross at once", "lib/weights/weights.cc", "others_left == 0 ? 1.0", "true ? 1.0", "column_order_test", "weights_take_turns"),
    ("weights do not wait for the piece before them", "lib/weights/weights.cc",
     "if (!call_device(device_, &DeviceTable::wait_event, event, stream_).ok()) return;", "if (event == nullptr) return;", "column_order_test", "weights_wait_for_pieces"),
    ("what weights take of the bus is learned", "lib/attend/split.cc", "!chunk.device().device().bus->has_weights() &&",
     "true &&", "column_order_test", "weights_leave_plans_as_they_are"),
    ("hidden states are overwritten as they are read", "lib/routes/recompute.cc", "  rebuild.read = buffers_->x().done_event();\n", "",
     "recompute_route_test", "rebuilds_what_is_outside"),
    ("pages are rebuilt while they are attended", "lib/routes/recompute.cc", "  rebuild.writable = buffers_->pages_freed();\n", "",
     "recompute_route_test", "rebuilds_what_is_outside"),
    ("scales of hidden states among their codes", "lib/tensors/convert.cc", "Byte* const scales = row + row_bytes(dtype, n);",
     "Byte* const scales = row + row_bytes(dtype, std::min(n, kMaxRow));", "api_hidden_test", "stay_what_their_type_makes_them"),
    ("what comes behind the bus is not learned", "lib/rates/profile.cc", "  correct_end(&known.end_ns, end_ns);\n}", "}",
     "profile_test", "making_keys_is_learned"),
    ("pages of a piece in the order of calls", "lib/routes/recompute.cc", "  order_pages(call, &pieces);\n", "",
     "recompute_route_test", "sequences_share_copies"),
    ("pages begin anywhere", "lib/store/page_store.cc", "      page -= page % per_extent() % together;\n", "",
     "page_store_test", "*pages_taken_together_lie_together"),
    ("descriptors of pieces do not come", "lib/attend/descriptors.cc", "chunk.session.key_routes[r]->describe(",
     "0 * chunk.session.key_routes[r]->describe(", "stream_route_test",
     "keeps_descriptors_until_they_are_read"),
    ("a CPU that was slow is never tried again", "lib/rates/profile.cc", "  ++known.n_idle;\n", "", "profile_test",
     "what_was_slow_is_tried_again"),
    ("a ticket's rows are copies of the first of them", "lib/call/ticket_rows.cc", "call.first_row + t - call.first_query});",
     "call.first_row});", "long_append_test", "chunks_of_all_lengths"),
    ("streaming heads see a key more", "lib/attend/call_keys.cc", "push_back(std::max<int64_t>(0, token + 1 -",
     "push_back(std::max<int64_t>(0, token -", "streaming_heads_test", "attends_on_the_host"),
    ("streaming heads have the others' first keys", "lib/attend/descriptors.cc",
     "      to->begin = static_cast<int32_t>(of.streaming_heads.keys.newest_begin);\n", "", "streaming_heads_test",
     "attends_on_a_device"),
    ("a named unit has one token more", "lib/call/named_keys.h", "end = begin + (int64_t{1} << named.unit_shift);",
     "end = begin + (int64_t{1} << named.unit_shift) + 1;", "gate_test", "test_named_keys"),
    ("a pad is index 0", "lib/call/named_keys.h", "  for (const int32_t unit : row) {\n    if (unit < 0) break;",
     "  for (const int32_t given : row) {\n    const int32_t unit = std::max(given, 0);", "gate_test", "test_named_keys"),
    ("named keys of the KV head before", "lib/call/named_jobs.cc", "names.row(of.query, of.kv_head)",
     "names.row(of.query, std::max(of.kv_head - 1, 0))", "gate_test", "test_named_keys"),
    ("named keys are those of the call's first queries", "lib/call/named_jobs.cc", "{*facts_.named, call.first_row, 1, nullptr",
     "{*facts_.named, 0, 1, nullptr", "gate_test", "test_named_keys"),
    ("siblings are attended where they are named", "lib/call/named_keys.h", "      if (seen.is_ancestor(token)) put(token, token + 1);",
     "      put(token, token + 1);", "gate_test", "test_named_keys"),
    ("the CPU attends named keys of the window as well", "lib/call/named_jobs.cc", "  if (facts_.on_device && n_resident > 0) {",
     "  if (false) {", "device_selection_test", "answers_are_those_of_host_tensors"),
    ("indices of an earlier ticket", "lib/call/named_jobs.cc",
     "  brought_.idx = reinterpret_cast<const int32_t*>(slot.data + slot.exchange.idx_at);",
     "  static std::vector<int32_t> first(1 << 20, -1);\n"
     "  const auto* own = reinterpret_cast<const int32_t*>(slot.data + slot.exchange.idx_at);\n"
     "  if (first[0] == -1) std::copy_n(own, header.idx_heads * header.n_idx, first.begin());\n"
     "  brought_.idx = first.data();",
     "selection_step_test", "attends_in_planned_steps"),
    ("queries of an append name what its first one names", "lib/attend/descriptors.cc",
     "      query->first_row += static_cast<int32_t>(t);\n", "", "device_selection_test", "answers_are_those_of_host_tensors"),
    ("a wrong index is not told", "lib/attend/device_lane.cc",
     "TANDEM_TRY(session.hand_over().take_bad_index());", "(void)session.hand_over().take_bad_index();",
     "device_selection_test", "wrong_indices_are_told_later"),
    ("a stale list in a replay", "lib/attend/step_plan.cc",
     "  const int64_t n_lists = describe_lists(call, lists, core_.device->held().step_sequences);\n",
     "  static std::vector<DeviceKeys> of_first_step(4096);\n"
     "  if (core_.step.n_planned == 0) describe_lists(call, of_first_step.data() + 64 * l, 0);\n"
     "  const int64_t n_lists = layout.held.step_sequences * layout.held.step_lists;\n"
     "  std::copy_n(of_first_step.data() + 64 * l, n_lists, lists);\n",
     "streaming_heads_test", "attends_in_planned_steps"),
    ("a window that lacks rows follows one that has them", "lib/attend/step_plan.cc",
     " || !window.are_alike(l, first)", " || window.n_pages() == 0", "step_plan_test", "a_window_that_lacks_rows_is_filled"),
    ("calls of a step in those of the next", "lib/attend/step_plan.cc",
     "(core_.step.n_planned + 1) % n_steps * first_.size() + layer_idx", "layer_idx", "step_plan_test",
     "steps_in_flight_keep_their_calls"),
    ("a key list of the head before", "lib/call/key_route.cc", "    part.lists.keys += first_head;\n", "", "streaming_heads_test",
     "attends_long_appends"),
    ("tiles of a piece without its last unit", "lib/call/key_tiles.cc",
     "end_unit_ = end > begin ? (end + unit - 1) / unit : first_unit_;", "end_unit_ = std::max(end / unit, first_unit_);",
     "key_tiles_test", "tiles_are_those_of_every_token"),
    ("tiles with the classes of the list before", "lib/call/key_tiles.cc",
     "      std::fill_n(classes + unit * kWords, kWords, 0);\n", "", "key_tiles_test", "tiles_are_those_of_every_token"),
    ("a tile of every class", "test/device/stand_in_attend.cc", "    if ((tile.classes >> own % 32 & 1) == 0) continue;\n", "",
     "stand_in_test", "attends"),
    ("a streaming head without its window", "lib/attend/descriptors.cc",
     "      to->sliding_window = static_cast<int32_t>(chunk.session.options.window_len);\n", "", "streaming_heads_test",
     "attends_on_a_device"),
    ("keys of streaming heads cross the bus", "lib/attend/split.cc", "const std::span<const HeadRun> heads = chunk.facts.outside_runs.get();",
     "static const HeadRuns all = HeadRuns::retrieval(nullptr, chunk.layer());\n  const std::span<const HeadRun> heads = all.get();", "streaming_heads_test",
     "streams_retrieval_heads_alone"),
    ("lse of a long append's last queries stay by token", "lib/select/hgca_observe.cc",
     "    if (call.only_counts) sort_lse(layer_, &call, &seen.scratch->lse);\n", "", "hgca_append_test", "selects_as_on_the_host"),
    ("a layer has the next one's policy", "lib/attend/session_core.cc", "const Policy& policy = made->policies[l];",
     "const Policy& policy = made->policies[(l + 1) % layers.size()];", "layer_policies_test",
     "attends_as_each_on_the_host"),
    ("a size in two places", "lib/attend/device_lane.cc",
     "return device.hold(reserve_call(call.session.terms(), shape, call.taken), call.args.stream); };",
     "Reservation needs = reserve_call(call.session.terms(), shape, call.taken);\n    needs.workspace_bytes += 256;\n"
     "    return device.hold(needs, call.args.stream); };", "memory_plan_test", "holds_what_is_planned"),
    ("candidates end a token early", "lib/select/hip_search.cc", "return p0 + 1 - record.window_len + overlap;",
     "return p0 - record.window_len + overlap;", "api_pruning_rules_test", "looks_up_to_the_window"),
    ("candidates of decode calls end where the window begins", "lib/select/hip_search.cc",
     "if (overlaps && stage.is_there(p0 + 1)) overlap", "if (overlaps && false) overlap", "api_pruning_rules_test", "forgets_no_key"),
    ("no chunk is kept with the one before it", "lib/select/keep_best.cc",
     "if (of.plus_next && chunk + 1 < of.chunks_end) ", "if (false && chunk + 1 < of.chunks_end) ", "api_pruning_rules_test",
     "plus_next_takes_the_chunk_behind"),
    ("of equal scores one too few", "lib/select/keep_best.cc", "n_equal-- <= 0", "n_equal-- <= 1", "api_pruning_rules_test",
     "keeps_the_best_and_the_lower"),
    ("a stage is due a token late", "lib/select/hip_search.cc", "ran_at >= call.record->stages[places[i]].interval",
     "ran_at > call.record->stages[places[i]].interval", "api_pruning_rules_test", "runs_when_it_is_due"),
    ("a descent with the first head's queries", "lib/select/hip_search.cc", "q + (t * group + g) * dim", "q + t * group * dim",
     "api_pruning_test", "judges_keys_as_attention_sees_them"),
    ("a list is made of the first KV head's queries", "lib/select/hip_search.cc", "(kv_head * call_->q_len + block.query)",
     "(0 * kv_head + block.query)", "api_pruning_test", "judges_keys_as_attention_sees_them"),
    ("an exact stage weighs without the window", "lib/select/hip_search.cc", "  count(newest, p0 + 1);\n", "",
     "api_pruning_test", "judges_keys_as_attention_sees_them"),
    ("pieces of an exact stage shift their rows alone", "lib/select/hip_search.cc",
     "2 * r, head.n, 2 * n_rows}", "2 * r, 1, 2 * n_rows}", "api_pruning_test", "judges_in_pieces"),
    ("a descent goes to the lower logit", "lib/select/hip_search.cc", "scratch.of_high[i] > scratch.of_low[i]",
     "scratch.of_high[i] < scratch.of_low[i]", "api_pruning_reads_test", "descends_along_its_paths"),
    ("a descent in one page goes to the lower logit", "cpu/kernels/chunks_inl.h",
     "is_first || s.logits[j] > paths.of_low[i + j];", "is_first || s.logits[j] < paths.of_low[i + j];", "api_pruning_reads_test",
     "descends_along_its_paths"),
    ("lists of tokens that were truncated", "lib/select/hip.cc",
     "of.cut(n_tokens);\n  cached_.are_valid = false;", "of.cut(n_tokens);", "api_pruning_life_test",
     "forgets_lists_with_their_tokens"),
    ("bounds of keys that have moved", "lib/select/hip.cc", "of.cut(first);", "of.cut(first + (1 << 20));",
     "api_pruning_life_test", "follows_removals"),
    ("a smaller block begins its own window", "lib/select/hip_search.cc", "query + t / outer * outer;",
     "query + t;", "api_pruning_rules_test", "windows_begin_with_the_largest_block"),
    ("queries that append nothing end the lists", "lib/select/hip.cc", "  } else if (appends_) {\n", "  } else {\n",
     "api_pruning_life_test", "keeps_lists_when_nothing_comes"),
    ("a window of a head pattern begins a token late", "lib/patterns/a_shape.cc", "block.begin + 1 - pattern_.window_len",
     "block.begin + 2 - pattern_.window_len", "api_head_patterns_test", "types_attend_the_same_keys"),
    ("keys that are far have their true distance", "lib/attend/call_keys.cc", "if (most == 0 || sequence.position",
     "if (true || sequence.position", "api_max_distance_test", "answers_are_those_of_the_distances"),
    ("capped keys are rotated", "lib/call/named_jobs.cc", "  unrotated_.rope = nullptr;\n", "", "api_max_distance_test",
     "answers_are_those_of_the_distances"),
    ("one attention factor for capped keys", "lib/attend/host_lane.cc", "angles[i] *= layer.rope->attn_factor;",
     "angles[i] *= 1.0f;", "api_max_distance_test", "answers_are_those_of_the_distances"),
    ("queries see capped keys twice", "lib/call/named_jobs.cc", "    job->visibility.begin = call.capped.end + job->query;", "    ",
     "api_max_distance_test", "answers_are_those_of_the_distances"),
    ("the work of a call leaves jobs of capped keys out", "lib/call/named_jobs.cc",
     "(has_capped_job(call, t, std::min(of_block, call.q_len - t)) ? 2 : 1)", "1", "api_max_distance_test",
     "stopped_calls_leave_nothing"),
    ("all launches have the first head's lists", "lib/attend/pattern_call.cc", "int64_t{g} * window.sequences.n_sequences",
     "int64_t{0} * window.sequences.n_sequences", "device_patterns_test", "calls_answer_as_on_the_host"),
    ("the device lists the first head's keys for all", "lib/attend/pattern_call.cc", "made.first_head = g;", "made.first_head = 0;",
     "device_patterns_test", "calls_answer_as_on_the_host"),
    ("all sequences have the first one's lists", "lib/attend/pattern_call.cc", "if (t == 0) sequences[i].first_list",
     "if (t == 0 && i == 0) sequences[i].first_list", "device_patterns_test", "sequences_of_any_order"),
    ("queries that wait to be counted are not saved", "lib/select/hgca_save.cc",
     "  TANDEM_TRY(held.visit(visitor, layer, hgca.n_counted(), length));\n", "", "api_saving_resume_test", "goes_on_as_before"),
    ("lists are not saved", "lib/select/hip.cc", "TANDEM_TRY(visitor.flag(&cached_.are_valid, \"are_valid\"));",
     "cached_.are_valid = false;", "api_saving_resume_test", "goes_on_as_before"),
    ("averages that a device has are not saved", "lib/attend/saved_sequence.cc", "      states->fetch_maw(*found);\n", "",
     "device_saving_test", "goes_on_with_a_device_and_without"),
    ("a section with a wrong checksum is taken", "lib/store/saved_stream.cc", "return found == expected ?", "return found == expected || true ?",
     "api_saving_test", "every_bit_flipped"),
    ("a load that fails keeps its pages", "lib/store/cache.cc", "  for (const int32_t page : sequence->pages) store_.release(page);\n  if (host_tier_",
     "  for (const int32_t page : sequence->pages) (void)page;\n  if (host_tier_", "api_saving_test", "cut_off_at_every_byte"),
    ("selected tokens stay among a longer window's", "lib/attend/saved_statistics.cc", "  state.selection->cut(sequence, length, latest);\n",
     "", "api_saving_resume_test", "windows_may_differ"),
    ("pages of memory that was given back are taken", "lib/store/page_store.cc", "set_extent(i, 1);", "set_extent(i, 0);",
     "api_trim_test", "memory_that_sequences_have_left_is_given_back"),
    ("memory that was given back stays pinned", "lib/store/page_store.cc", "pins_->forget(i * n_pieces + piece);", "(void)piece;",
     "store_pins_test", "trimmed_memory_is_unpinned"),
    ("the window and the CPU attend a decode query's keys twice", "lib/attend/pattern_call.cc",
     "list.begin = static_cast<int32_t>(std::max(keys.begin, resident_begin));", "list.begin = static_cast<int32_t>(keys.begin);",
     "offloaded_patterns_test", "calls_answer_as_on_the_host"),
    ("the CPU attends all keys for heads with a window", "lib/call/host_part.cc", "if (is_narrow) find_narrow",
     "if (is_narrow) narrow_tokens_ = host_tokens_;\n    if (false) find_narrow", "offloaded_patterns_test",
     "calls_answer_as_on_the_host"),
    ("the first page of a ring counts as whole", "lib/attend/whole_layer.cc", "const TokenRange pages{up_to_page(valid.begin),",
     "const TokenRange pages{valid.begin / kPage * kPage,", "offloaded_patterns_test", "calls_answer_as_on_the_host"),
    ("a window's first page lacks rows of heads that did not attend them", "lib/attend/whole_layer.cc",
     "of.window_begin / kPage * kPage", "of.window_begin", "offloaded_patterns_test", "truncations_look_back_over_the_window"),
    ("single queries of a partial append bring no keys", "lib/routes/prefill_size.cc",
     "if (sequence.q_len == 1 && !shape.is_partial) continue;", "if (sequence.q_len == 1) continue;", "offloaded_patterns_test",
     "partial_batches_answer_as_on_the_host"),
    ("a layer's keys stay in the buffer for the next call", "lib/attend/whole_layer.cc", "  if (!is_last) return {};\n  pages_ = nullptr;",
     "  if (!is_last) return {};", "offloaded_patterns_test", "batches_answer_as_on_the_host"),
    ("chunks of a prompt under patterns are about as long as each other", "lib/routes/prefill_size.cc",
     "has_full_chunks = policy.follows_patterns;", "has_full_chunks = false;", "device_patterns_test",
     "long_appends_answer_as_on_the_host"),
    ("bounds rounded inward", "lib/select/chunk_bounds.cc", "(bits & 0xffffu) != 0 && x < 0.0f", "(bits & 0xffffu) != 0 && x > 0.0f",
     "api_pruning_rules_test", "bounds_are_rounded_outward"),
    ("the smallest for the largest", "lib/select/chunk_bounds.cc",
     "to[d] = bf16_at_most(least[d]);\n        to[dim + d] = bf16_at_least(most[d]);",
     "to[d] = bf16_at_least(most[d]);\n        to[dim + d] = bf16_at_most(least[d]);", "api_pruning_rules_test",
     "keeps_the_best_and_the_lower"),
    ("bounds of a call that has failed", "lib/select/chunk_bounds.cc", "  n_filled_ = n;\n", "  n_filled_ = n_chunks_ = n;\n",
     "api_pruning_cancel_test", "forgets_bounds_of_what_was_stopped"),
    ("a window too short for the longest interval", "lib/policy/pruning.cc", "const int64_t least = 2 * largest + longest - 1;",
     "const int64_t least = 2 * largest;", "api_pruning_rules_test", "refuses_wrong_records"),
    ("all layers have the last one's record", "lib/policy/pruning.cc", "if (n != 1 && l != i) continue;", "if (n == 0) continue;",
     "api_pruning_rules_test", "each_layer_has_its_records"),
    ("appends have the record of decode calls", "lib/policy/pruning.cc", "\"append\", of, &PruningOfLayer::append,",
     "\"append\", of, &PruningOfLayer::decode,", "api_pruning_rules_test", "each_layer_has_its_records"),
]


def run(command, **more):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **more)


def copy_tree(tree):
    files = run(["git", "-C", str(ROOT), "ls-files", "-z"]).stdout.split("\0")
    for name in filter(None, files):
        source, target = ROOT / name, tree / name
        if not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.write_bytes(source.read_bytes())


def build(directory, programs, jobs):
    return run(["cmake", "--build", str(directory), "-j", str(jobs), "--target", *programs])


def passes(directory, program, test):
    environment = dict(os.environ, TANDEM_TEST_FILTER=test)
    ended = run([str(directory / "test" / program)], env=environment, timeout=600)
    if " 0 test(s) run" in ended.stdout:
        sys.exit(f"{program} has no test {test}")
    return ended.returncode == 0


def check_texts(bugs):
    """Ends the program where a bug could not be seeded, or in more than one place."""
    wrong = 0
    for name, file, text, *_ in bugs:
        count = (ROOT / file).read_text().count(text)
        if count != 1:
            print(f"{name}: its text stands {count} times in {file}")
            wrong += 1
    if wrong:
        sys.exit(1)


def check_clean(bugs, directory, jobs):
    """Ends the program where the tree does not build, or a test fails, without any bug."""
    built = build(directory, sorted({bug[4] for bug in bugs}), jobs)
    if built.returncode != 0:
        sys.exit("the tree does not build:\n" + built.stdout[-2000:])
    for program, test in sorted({bug[4:6] for bug in bugs}):
        if not passes(directory, program, test):
            sys.exit(f"{program} {test} fails without any bug")


def try_bug(bug, tree, directory, jobs):
    """What became of one bug: 'caught', or what went wrong. The file that it was in is built again with the next one."""
    _, name, text, replacement, program, test = bug
    file = tree / name
    original = file.read_text()
    file.write_text(original.replace(text, replacement))
    try:
        built = build(directory, [program], jobs)
        if built.returncode != 0:
            return "does not build with the bug:\n" + built.stdout[-2000:]
        return "NOT CAUGHT" if passes(directory, program, test) else "caught"
    except subprocess.TimeoutExpired:
        return "does not end"
    finally:
        file.write_text(original)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "seeded")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {bug[0] for bug in BUGS}
    if unknown:
        parser.error("no such bug: " + ", ".join(sorted(unknown)))
    bugs = [bug for bug in BUGS if not arguments.names or bug[0] in arguments.names]
    check_texts(bugs)
    if arguments.check:
        return
    tree, directory = arguments.build / "tree", arguments.build / "out"
    copy_tree(tree)
    options = ["-DTANDEM_BUILD_TOOLS=OFF", "-DTANDEM_BUILD_EXAMPLES=OFF", "-DTANDEM_WERROR=OFF",
               "-DTANDEM_CUDA=OFF"]
    if platform.machine() == "x86_64":
        options.append("-DTANDEM_ISAS=amx;avx2")  # a bug in the kernels is in all of them
    configured = run(["cmake", "-S", str(tree), "-B", str(directory), *options])
    if configured.returncode != 0:
        sys.exit(configured.stdout[-3000:])
    check_clean(bugs, directory, arguments.jobs)
    missed = 0
    for bug in bugs:
        outcome = try_bug(bug, tree, directory, arguments.jobs)
        missed += outcome != "caught"
        print(f"{bug[0]:40} {bug[4]} {bug[5]}: {outcome}", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
