// SPDX-License-Identifier: MIT
// Saved sequences. A loaded sequence equals the saved one, in every type and with any pages. Truncated, changed or forged
// files are refused and leave nothing behind. The caller's functions may fail.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cmath>

#include "pruned_world.h"
#include "saved_world.h"

using namespace tandem_test;

namespace {

// A cache on an engine that all tests share.
struct Store {
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;

  Store(tandem_engine* engine, const std::vector<tandem_layer_options>& layers, const tandem_cache_options& options) {
    OK(tandem_model_create, &model, layers.data(), static_cast<int32_t>(layers.size()));
    OK(tandem_cache_create, &cache, engine, model, &options);
  }
  Store(const Store&) = delete;
  ~Store() {
    tandem_cache_release(cache);
    tandem_model_release(model);
  }
};

tandem_engine* shared_engine() {
  static tandem_engine* const engine = [] {
    const tandem_engine_options options = small_engine_options();
    tandem_engine* made = nullptr;
    OK(tandem_engine_create, &made, &options);
    return made;
  }();
  return engine;
}

tandem_cache_options cache_options(int32_t k_type = 0, int32_t v_type = 0, int32_t page_tokens = 16) {
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.k_type = k_type;
  options.v_type = v_type;
  options.page_tokens = page_tokens;
  return options;
}

void append(tandem_cache* cache, int64_t sequence, int32_t n_layers, int64_t n_tokens, int64_t seed) {
  const Tensor k({n_tokens, kKvHeads, kDim}, seed), v({n_tokens, kKvHeads, kDim}, seed + 1);
  for (int32_t l = 0; l < n_layers; ++l)
    OK(tandem_sequence_append, cache, sequence, l, &k.view, l == 0 ? &v.view : nullptr, nullptr);
}

// Returns a sequence whose pages are not adjacent, because another sequence grew at the same time.
int64_t scattered_sequence(tandem_cache* cache, int32_t n_layers, int64_t n_tokens) {
  int64_t made = 0, beside = 0;
  OK(tandem_sequence_create, &made, cache);
  OK(tandem_sequence_create, &beside, cache);
  for (int64_t t = 0; t < n_tokens; t += 20) {
    append(cache, made, n_layers, std::min<int64_t>(20, n_tokens - t), t);
    append(cache, beside, n_layers, 20, 1000 + t);
  }
  OK(tandem_sequence_drop, cache, beside);
  return made;
}

int64_t held_bytes(tandem_cache* cache) {
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, cache);
  return stats.host_kv_bytes + stats.host_session_bytes + stats.selection_bytes;
}

int64_t used_pages(tandem_cache* cache) {
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, cache);
  return stats.n_pages_used;
}

// Asserts a refusal with one of these statuses, whatever the field, that leaves nothing behind.
void assert_nothing_is_left(tandem_cache* cache, MemoryFile& file, const std::vector<int32_t>& statuses,
                            tandem_session* session = nullptr) {
  const auto before = sequences_of(cache);
  const int64_t bytes = held_bytes(cache), n_pages = used_pages(cache);
  int64_t sequence = -7;
  file.rewind();
  tandem_load_options options = TANDEM_LOAD_OPTIONS_INIT;
  options.session = session;
  tandem_error* error = nullptr;
  const int32_t status = tandem_sequence_load(&sequence, cache, read_from_memory, &file, &options, &error);
  const std::string field = tandem_error_field(error), message = tandem_error_message(error);
  tandem_error_release(error);
  if (std::find(statuses.begin(), statuses.end(), status) == statuses.end() || field.empty())
    fail_msg("%d %s (%s)", status, message.c_str(), field.c_str());
  assert_int_equal(sequence, -7);
  assert_true(sequences_of(cache) == before);
  assert_int_equal(held_bytes(cache), bytes);
  assert_int_equal(used_pages(cache), n_pages);
}

// ---- tests -------------------------------------------------------------------------------------------------------------

void every_type_and_page_length(void**) {
  constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};
  const std::vector<tandem_layer_options> layers(1, plain_layer());
  for (const int32_t k_type : kTypes)
    for (const int32_t v_type : kTypes) {
      const Store from(shared_engine(), layers, cache_options(k_type, v_type)),
          to(shared_engine(), layers, cache_options(k_type, v_type, 64));
      const int64_t sequence = scattered_sequence(from.cache, 1, 137);
      MemoryFile file = save(from.cache, sequence);
      const int64_t loaded = load(to.cache, file);
      assert_true(digest_of(from.cache, sequence) == digest_of(to.cache, loaded));
      assert_true(save(to.cache, loaded) == file);
      append(from.cache, sequence, 1, 30, 5);
      append(to.cache, loaded, 1, 30, 5);
      assert_true(digest_of(from.cache, sequence) == digest_of(to.cache, loaded));
    }
}

void lengths_and_positions(void**) {
  const auto layers = world_layers();
  const Store from(shared_engine(), layers, cache_options()), to(shared_engine(), layers, cache_options(0, 0, 128));
  for (const int64_t n_tokens : {0, 1, 15, 16, 17, 5000}) {
    const int64_t sequence = scattered_sequence(from.cache, kLayers, n_tokens);
    for (const bool has_gap : {false, true}) {
      if (has_gap && n_tokens > 10) OK(tandem_sequence_remove, from.cache, sequence, 3, 5, 0);
      MemoryFile file = save(from.cache, sequence);
      file.most = 1000;
      const int64_t loaded = load(to.cache, file);
      assert_true(digest_of(from.cache, sequence) == digest_of(to.cache, loaded));
      append(from.cache, sequence, kLayers, 3, 77);
      append(to.cache, loaded, kLayers, 3, 77);
      assert_true(digest_of(from.cache, sequence) == digest_of(to.cache, loaded));
    }
  }
}

// Hidden states are saved as rows of a layer.
void hidden_states(void**) {
  constexpr int32_t kHidden = 128;
  std::vector<tandem_layer_options> layers(1, plain_layer());
  const std::vector<uint16_t> weights(static_cast<size_t>(kHidden * kKvHeads * kDim), 0x3c00);
  tandem_layer_projection projection = TANDEM_LAYER_PROJECTION_INIT;
  projection.hidden_dim = kHidden;
  projection.w_type = TANDEM_F16;
  projection.w_k = projection.w_v = weights.data();
  layers[0].projection = &projection;
  tandem_cache_options options = cache_options();
  options.x_type = TANDEM_Q8_0;
  const Store from(shared_engine(), layers, options), to(shared_engine(), layers, options);
  int64_t sequence = 0;
  OK(tandem_sequence_create, &sequence, from.cache);
  const Tensor k({40, kKvHeads, kDim}, 1), v({40, kKvHeads, kDim}, 2), x({40, kHidden}, 3);
  OK(tandem_sequence_append_x, from.cache, sequence, 0, &k.view, &v.view, &x.view, nullptr);
  MemoryFile file = save(from.cache, sequence);
  assert_true(digest_of(from.cache, sequence) == digest_of(to.cache, load(to.cache, file)));
}

int32_t keep_blob(const char* name, const void* data, int64_t n_bytes, void* user) {
  auto& kept = *static_cast<std::vector<std::string>*>(user);
  kept.push_back(std::string(name) + "=" + std::string(static_cast<const char*>(data), static_cast<size_t>(n_bytes)));
  return kept.size() < 3 ? 0 : 1;
}

void blobs_come_back(void**) {
  const World world;
  const std::string large(3 << 20, 'x');
  tandem_saved_blob blobs[2] = {TANDEM_SAVED_BLOB_INIT, TANDEM_SAVED_BLOB_INIT};
  blobs[0].name = "state", blobs[0].data = large.data(), blobs[0].n_bytes = static_cast<int64_t>(large.size());
  blobs[1].name = "empty";
  tandem_save_options options = TANDEM_SAVE_OPTIONS_INIT;
  options.blobs = blobs, options.n_blobs = 2, options.model_id = 42;
  MemoryFile file;
  OK(tandem_sequence_save, world.cache, world.sequence, write_to_memory, &file, &options);
  std::vector<std::string> kept;
  tandem_load_options load_options = TANDEM_LOAD_OPTIONS_INIT;
  load_options.blob = keep_blob, load_options.blob_user = &kept, load_options.model_id = 42;
  int64_t loaded = 0;
  OK(tandem_sequence_load, &loaded, world.cache, read_from_memory, &file, &load_options);
  assert_true(kept == (std::vector<std::string>{"state=" + large, "empty="}));
  // The blob is refused: another model.
  kept.resize(1);
  file.rewind();
  tandem_error* error = nullptr;
  int32_t status = tandem_sequence_load(&loaded, world.cache, read_from_memory, &file, &load_options, &error);
  assert_refused(status, error, TANDEM_ERROR_CANCELLED, "blob", "\"empty\"");
  load_options = TANDEM_LOAD_OPTIONS_INIT;
  file.rewind();
  status = tandem_sequence_load(&loaded, world.cache, read_from_memory, &file, &load_options, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "model_id", "42 in the file, 0 in the options");
}

// Two saves follow each other in one file. Each load reads only its own bytes.
void several_in_a_file(void**) {
  const World world;
  MemoryFile file = save(world.cache, world.sequence);
  const size_t first = file.bytes.size();
  OK(tandem_sequence_save, world.cache, world.other, write_to_memory, &file, nullptr);
  int64_t loaded = 0;
  OK(tandem_sequence_load, &loaded, world.cache, read_from_memory, &file, nullptr);
  assert_int_equal(file.at, first);
  OK(tandem_sequence_load, &loaded, world.cache, read_from_memory, &file, nullptr);
  assert_int_equal(file.at, file.bytes.size());
  assert_true(digest_of(world.cache, loaded) == digest_of(world.cache, world.other));
}

// A layer of one KV head with a few tokens and a session's statistics.
struct Small {
  Store store;
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  MemoryFile file;

  explicit Small(const char* policy = "hgca") : store(shared_engine(), {layer()}, cache_options()) {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.policy = policy;
    options.window_tokens = 8, options.sink_tokens = 1, options.halo_tokens = 0, options.beta = 0.5f;
    const Pruned pruned(2, 6, {stage_of(TANDEM_JUDGE_BOUNDS, 2, 4, 3), stage_of(TANDEM_JUDGE_EXACT, 1, 2, 2)});
    if (options.policy == std::string("hip")) options.pruning = &pruned.pruning;
    OK(tandem_session_create, &session, store.cache, &options);
    OK(tandem_sequence_create, &sequence, store.cache);
    attend(sequence, 12);
    attend(sequence, 1);
    file = save(store.cache, sequence, session);
  }
  Small(const Small&) = delete;
  ~Small() { tandem_session_release(session); }
  static tandem_layer_options layer() {
    tandem_layer_options layer = plain_layer();
    layer.n_q_heads = 2, layer.n_kv_heads = 1;
    return layer;
  }
  void attend(int64_t id, int64_t q_len) const {
    const Tensor q({q_len, 2, kDim}, 1), k({q_len, 1, kDim}, 2), v({q_len, 1, kDim}, 3), o({q_len, 2, kDim});
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1, args.sequences = &id, args.q_lens = &q_len;
    args.q = &q.view, args.k = &k.view, args.v = &v.view, args.o = &o.view;
    OK(tandem_attend, session, &args);
  }
};

void cut_off_at_every_byte(void**) {
  const Small small;
  for (size_t n = 0; n < small.file.bytes.size(); ++n) {
    MemoryFile file = small.file;
    file.bytes.resize(n);
    assert_nothing_is_left(small.store.cache, file, {TANDEM_ERROR_CORRUPT}, n % 2 == 0 ? small.session : nullptr);
  }
}

void every_bit_flipped(void**) {
  const Small small;
  MemoryFile file = small.file;
  for (size_t bit = 0; bit < 8 * file.bytes.size(); ++bit) {
    file.bytes[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
    const bool is_version = bit / 32 == 2;
    assert_nothing_is_left(small.store.cache, file, {is_version ? TANDEM_ERROR_UNSUPPORTED : TANDEM_ERROR_CORRUPT},
                           bit % 2 == 0 ? small.session : nullptr);
    file.bytes[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
  }
  (void)load(small.store.cache, file, small.session);
}

template <typename T>
void put(MemoryFile& file, size_t at, T value) {
  std::memcpy(file.bytes.data() + at, &value, sizeof value);
}
template <typename T>
T get(const MemoryFile& file, size_t at) {
  T value;
  std::memcpy(&value, file.bytes.data() + at, sizeof value);
  return value;
}

// Writes valid checksums, as a forger who knows the format would.
void sign(MemoryFile& file, size_t begin, size_t end) {
  put(file, end, XXH3_64bits(file.bytes.data() + begin, end - begin));
}
constexpr size_t kHead = 64 + 128;  // bytes of a header of one layer, without its checksum

// A header that claims more than the file contains does not make the library allocate memory for it.
void promises_take_no_memory(void**) {
  const Small small;
  const int64_t held = held_bytes(small.store.cache);
  for (const int64_t n_tokens : {int64_t{1} << 20, int64_t{INT32_MAX}, int64_t{1} << 40, int64_t{-1}}) {
    MemoryFile file = small.file;
    put(file, 24, n_tokens);
    put(file, 32, int64_t{1} << 60);
    put(file, kHead + 8 + 8, n_tokens * kDim * 2);  // size of the section of keys
    sign(file, 0, kHead);
    assert_nothing_is_left(small.store.cache, file, {TANDEM_ERROR_CORRUPT});
  }
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, small.store.cache);
  assert_true(stats.host_peak_bytes < held + (8 << 20));
  MemoryFile file = small.file;
  put(file, 48, uint32_t{1} << 31);  // number of sections
  put(file, 32, int64_t{1} << 60);
  sign(file, 0, kHead);
  assert_nothing_is_left(small.store.cache, file, {TANDEM_ERROR_CORRUPT});
}

// Changes every byte of a policy's saved statistics and corrects the checksums. The load must refuse the file, or accept it
// and be able to attend.
void made_up_statistics(void**) {
  for (const char* policy : {"hgca", "hip"}) {
    const Small small(policy);
    size_t begin = kHead + 8;
    while (get<uint32_t>(small.file, begin) != 7) begin += 16 + static_cast<size_t>(get<int64_t>(small.file, begin + 8)) + 8;
    const size_t end = begin + 16 + static_cast<size_t>(get<int64_t>(small.file, begin + 8));
    for (size_t at = begin + 16; at < end; ++at)
      for (const int change : {1, 0x7f, 0x80, 0xff}) {
        MemoryFile file = small.file;
        file.bytes[at] ^= static_cast<unsigned char>(change);
        sign(file, begin, end);
        int64_t loaded = -1;
        tandem_load_options options = TANDEM_LOAD_OPTIONS_INIT;
        options.session = small.session;
        tandem_error* error = nullptr;
        const int32_t status = tandem_sequence_load(&loaded, small.store.cache, read_from_memory, &file, &options, &error);
        tandem_error_release(error);
        assert_true(status == TANDEM_OK || status == TANDEM_ERROR_CORRUPT || status == TANDEM_ERROR_INVALID_ARGUMENT);
        if (status != TANDEM_OK) continue;
        small.attend(loaded, 1);
        small.attend(loaded, 3);
        OK(tandem_sequence_drop, small.store.cache, loaded);
      }
  }
}

void functions_may_fail(void**) {
  World world;
  const MemoryFile whole = save(world.cache, world.sequence, world.session);
  for (int64_t n = 0;; ++n) {
    MemoryFile file;
    file.fails_at = n;
    tandem_save_options options = TANDEM_SAVE_OPTIONS_INIT;
    options.session = world.session;
    tandem_error* error = nullptr;
    const int32_t status = tandem_sequence_save(world.cache, world.sequence, write_to_memory, &file, &options, &error);
    if (status == TANDEM_OK) break;
    assert_int_equal(tandem_error_underlying(error), 28);
    assert_refused(status, error, TANDEM_ERROR_IO, "write", "returned 28");
  }
  for (int64_t n = 0;; ++n) {
    MemoryFile file = whole;
    file.fails_at = n, file.most = 3000;
    int64_t loaded = -1;
    const auto before = sequences_of(world.cache);
    tandem_error* error = nullptr;
    const int32_t status = tandem_sequence_load(&loaded, world.cache, read_from_memory, &file, nullptr, &error);
    if (status == TANDEM_OK) break;
    assert_int_equal(tandem_error_underlying(error), 5);
    assert_refused(status, error, TANDEM_ERROR_IO, "read", "returned -5");
    assert_true(sequences_of(world.cache) == before);
  }
  OK(attend_once, world, world.sequence, 0, 1, 5);
}

// Makes calls on a sequence while it is being saved: some are refused, others work.
int32_t use_while_saving(const void*, int64_t, void* user) {
  const World& world = *static_cast<World*>(user);
  tandem_error* error = nullptr;
  int32_t status = attend_once(world, world.sequence, 0, 1, 5, &error);
  assert_refused(status, error, TANDEM_ERROR_BUSY, "sequences", "is being saved");
  int64_t fork = 0;
  status = tandem_sequence_fork(&fork, world.cache, world.sequence, &error);
  assert_refused(status, error, TANDEM_ERROR_BUSY, "sequence", "is being saved");
  status = tandem_sequence_drop(world.cache, world.sequence, &error);
  assert_refused(status, error, TANDEM_ERROR_BUSY, "sequence", "is being saved");
  (void)digest_of(world.cache, world.sequence);
  for (int32_t l = 0; l < kLayers; ++l) OK(attend_once, world, world.other, l, 3, 9);
  return 0;
}

int64_t use_while_loading(void* data, int64_t n_bytes, void* user) {
  auto& [world, file] = *static_cast<std::pair<World*, MemoryFile*>*>(user);
  for (int32_t l = 0; l < kLayers; ++l) OK(attend_once, *world, world->sequence, l, 1, 9);
  return read_from_memory(data, std::min<int64_t>(n_bytes, 5000), file);
}

void others_go_on(void**) {
  World world;
  tandem_save_options options = TANDEM_SAVE_OPTIONS_INIT;
  options.session = world.session;
  OK(tandem_sequence_save, world.cache, world.sequence, use_while_saving, &world, &options);
  MemoryFile file = save(world.cache, world.sequence, world.session);
  const uint64_t digest = digest_of(world.cache, world.sequence);
  std::pair<World*, MemoryFile*> both(&world, &file);
  tandem_load_options load_options = TANDEM_LOAD_OPTIONS_INIT;
  load_options.session = world.session;
  int64_t loaded = 0;
  OK(tandem_sequence_load, &loaded, world.cache, use_while_loading, &both, &load_options);
  assert_true(digest_of(world.cache, loaded) == digest);
}

void caps_hold(void**) {
  const World world;
  MemoryFile file;
  {
    const Store large(shared_engine(), world_layers(), cache_options());
    file = save(large.cache, scattered_sequence(large.cache, kLayers, 5000));
  }
  tandem_cache_options options = cache_options();
  options.host_cap_bytes = 3 << 20;
  const Store small(shared_engine(), world_layers(), options);
  assert_nothing_is_left(small.cache, file, {TANDEM_ERROR_CAPACITY});
}

struct Difference {
  const char* field;
  std::function<void(tandem_layer_options&)> change;
};

void other_models_are_named(void**) {
  const float sinks[kQHeads] = {1, 2, 3, 4};
  const Store from(shared_engine(), world_layers(), cache_options());
  MemoryFile file = save(from.cache, scattered_sequence(from.cache, kLayers, 20));
  const Difference differences[] = {
      {"layers[1].n_q_heads", [](auto& layer) { layer.n_q_heads = 8; }},
      {"layers[1].n_kv_heads", [](auto& layer) { layer.n_kv_heads = 1; }},
      {"layers[1].k_head_dim", [](auto& layer) { layer.k_head_dim = 128, layer.v_head_dim = 64; }},
      {"layers[1].v_aliases_k", [](auto& layer) { layer.v_aliases_k = 0; }},
      {"layers[1].rope", [](auto& layer) { layer.rope = TANDEM_ROPE_INTERLEAVED; }},
      {"layers[1].rope_dims", [](auto& layer) { layer.rope_dims = 32; }},
      {"layers[1].rope_inv_freq", [](auto& layer) { layer.rope_theta = 5000; }},
      {"layers[1].rope_attn_factor", [](auto& layer) { layer.rope_attn_factor = 2; }},
      {"layers[1].sm_scale", [](auto& layer) { layer.sm_scale = 1; }},
      {"layers[1].soft_cap", [](auto& layer) { layer.soft_cap = 30; }},
      {"layers[1].sliding_window_tokens", [](auto& layer) { layer.sliding_window_tokens = 100; }},
      {"layers[1].sinks", [&](auto& layer) { layer.sinks = sinks; }},
  };
  const auto refuse = [&](const std::vector<tandem_layer_options>& layers, const tandem_cache_options& options,
                          const char* field, const char* text) {
    const Store to(shared_engine(), layers, options);
    file.rewind();
    int64_t loaded = 0;
    tandem_error* error = nullptr;
    const int32_t status = tandem_sequence_load(&loaded, to.cache, read_from_memory, &file, nullptr, &error);
    assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, field, text);
  };
  for (const Difference& difference : differences) {
    auto layers = world_layers();
    difference.change(layers[1]);
    refuse(layers, cache_options(), difference.field, "in the file");
  }
  auto layers = world_layers();
  layers[1].sm_scale = std::nextafter(0.125f, 1.0f);
  refuse(layers, cache_options(), "layers[1].sm_scale", "0.125 in the file, 0.12500001 in the cache");
  refuse(world_layers(), cache_options(TANDEM_Q8_0), "layers[0].k_type", "bf16 in the file, q8_0 in the cache");
  refuse({plain_layer()}, cache_options(), "n_layers", "2 in the file, 1 in the cache");
}

void wrong_arguments(void**) {
  const World world;
  const World elsewhere;
  MemoryFile file = save(world.cache, world.sequence), with_session = save(world.cache, world.sequence, world.session);
  int64_t loaded = 0;
  tandem_load_options options = TANDEM_LOAD_OPTIONS_INIT;
  options.session = world.session;
  tandem_error* error = nullptr;
  int32_t status = tandem_sequence_load(&loaded, world.cache, read_from_memory, &file, &options, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "session", "saved without a session");
  options.session = elsewhere.session;
  status = tandem_sequence_load(&loaded, world.cache, read_from_memory, &file, &options, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "session", "of another cache");
  options = TANDEM_LOAD_OPTIONS_INIT;
  file.rewind();
  options.file_bytes = 5;
  status = tandem_sequence_load(&loaded, world.cache, read_from_memory, &file, &options, &error);
  assert_refused(status, error, TANDEM_ERROR_CORRUPT, "header", "but the file has 5");
  status = tandem_sequence_load(&loaded, world.cache, nullptr, nullptr, nullptr, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "read", "NULL");
  status = tandem_sequence_save(world.cache, world.sequence, nullptr, nullptr, nullptr, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "write", "NULL");
  status = tandem_sequence_save(world.cache, world.dropped, write_to_memory, &file, nullptr, &error);
  assert_refused(status, error, TANDEM_ERROR_NOT_FOUND, "sequence", "not in this cache");
  OK(attend_once, world, world.other, 0, 1, 1);
  status = tandem_sequence_save(world.cache, world.other, write_to_memory, &file, nullptr, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_STATE, "sequence", "is uneven");
  tandem_saved_blob blob = TANDEM_SAVED_BLOB_INIT;
  tandem_save_options saves = TANDEM_SAVE_OPTIONS_INIT;
  saves.blobs = &blob, saves.n_blobs = 1;
  status = tandem_sequence_save(world.cache, world.sequence, write_to_memory, &file, &saves, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "blobs[0].name", "NULL");
  blob.name = "";
  status = tandem_sequence_save(world.cache, world.sequence, write_to_memory, &file, &saves, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "blobs[0].name", "0 bytes");
  blob.name = "x", blob.n_bytes = 1;
  status = tandem_sequence_save(world.cache, world.sequence, write_to_memory, &file, &saves, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "blobs[0].data", "NULL");
  // Sessions with other options.
  for (const auto& [text, change] : std::initializer_list<std::pair<const char*, void (*)(tandem_session_options&)>>{
           {"\"all\"", [](tandem_session_options& of) { of.policy = "all"; }},
           {"sink_tokens", [](tandem_session_options& of) { of.sink_tokens = 8; }}}) {
    tandem_session_options other = world_session_options();
    change(other);
    tandem_session* session = nullptr;
    OK(tandem_session_create, &session, world.cache, &other);
    options = TANDEM_LOAD_OPTIONS_INIT;
    options.session = session;
    with_session.rewind();
    status = tandem_sequence_load(&loaded, world.cache, read_from_memory, &with_session, &options, &error);
    assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "session", text);
    tandem_session_release(session);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(every_type_and_page_length),
      cmocka_unit_test(lengths_and_positions),
      cmocka_unit_test(hidden_states),
      cmocka_unit_test(blobs_come_back),
      cmocka_unit_test(several_in_a_file),
      cmocka_unit_test(cut_off_at_every_byte),
      cmocka_unit_test(every_bit_flipped),
      cmocka_unit_test(promises_take_no_memory),
      cmocka_unit_test(made_up_statistics),
      cmocka_unit_test(functions_may_fail),
      cmocka_unit_test(others_go_on),
      cmocka_unit_test(caps_hold),
      cmocka_unit_test(other_models_are_named),
      cmocka_unit_test(wrong_arguments),
  };
  const int failed = cmocka_run_group_tests(tests, nullptr, nullptr);
  tandem_engine_release(shared_engine());
  return failed;
}
