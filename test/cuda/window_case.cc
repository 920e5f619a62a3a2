// SPDX-License-Identifier: MIT
#include "window_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "device/layer_of.h"
#include "lib/model/dtype.h"
#include "reference/attention_reference.h"
#include "reference/random.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace tandem::test {

namespace {

constexpr int64_t kBadDim = 5;
constexpr double kLn2 = 0.69314718055994530942;

}  // namespace

// ---- case --------------------------------------------------------------------------------------------------------------

WindowCase::WindowCase(const OpenDevice& device, const WindowOptions& options) : device_(device), options_(options) {
  make_layer();
  make_rows();
  make_call();
}

WindowCase::~WindowCase() {
  for (void* data : owned_) device_.table->release(device_.self, data);
}

void WindowCase::make_layer() {
  layer_ = layer_of(options_.layer);
  row_bytes_ = plane_bytes(layer_);
}

// Makes each sequence's page table, which is used as a ring. It is one page longer than its keys need.
void WindowCase::make_pages(reference::Random& random) {
  for (const WindowSequence& sequence : options_.sequences) {
    const int64_t first_page = sequence.begin / options_.page_len;
    const auto table_len = static_cast<int32_t>((sequence.end + options_.page_len - 1) / options_.page_len - first_page + 1);
    descriptors_.push_back({sequence.begin, sequence.end, sequence.q_len, static_cast<int32_t>(n_tokens_),
                            static_cast<int32_t>(tables_.size()), table_len});
    n_tokens_ += sequence.q_len;
    for (int32_t i = 0; i < table_len; ++i) tables_.push_back(n_pages_++);
  }
  if (options_.shuffled)
    for (size_t i = tables_.size(); i > 1; --i)
      std::swap(tables_[i - 1], tables_[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
  pages_.page_len = options_.page_len;
  for (int32_t p = 0; p < kPlanes; ++p) {
    plane_at_[p] = page_bytes_;
    pages_.head_stride[p] = row_bytes_.of[p] * options_.page_len;
    page_bytes_ += pages_.head_stride[p] * layer_.n_kv_heads;
  }
  for (int64_t& page : tables_) page *= page_bytes_;
  pool_.assign(static_cast<size_t>(page_bytes_ * n_pages_), std::byte{0xff});
  // Page 0 of the tables is the first sequence's first page, as in a session. Other pages lie before it.
  const int64_t called_0 = options_.has_no_page_0 ? -(INT64_C(1) << 40) : tables_[0];
  for (const int64_t page : tables_) from_first_.push_back(page - called_0);
  if (options_.tiles.n_heads > 0) {
    int32_t max_q_len = 0;
    for (const WindowSequence& sequence : options_.sequences) max_q_len = std::max(max_q_len, sequence.q_len);
    reference::Random of_tiles(options_.seed + 2000);
    tiles_ = std::make_unique<NamedTiles>(options_.tiles, layer_.group_size, max_q_len, descriptors_, of_tiles);
  }
  if (options_.lists.n_heads > 0) {
    reference::Random of_lists(options_.seed + 1000);  // a generator of its own, so keys and queries are those without lists
    named_ = std::make_unique<NamedKeys>(options_.lists, descriptors_, from_first_, options_.page_len, of_lists);
  }
}

// Rows of K are constants, with a little noise, that give the logits -bits ln 2. V is 0 where bits are below a bound, which
// each five dims have in turn.
void WindowCase::spread_weights(reference::Random& random, int64_t n_made, int32_t plane, std::vector<double>* made) {
  const int64_t n_heads = layer_.n_kv_heads, dim = static_cast<int64_t>(made->size()) / (n_made * n_heads);
  if (plane == kPlaneK) {
    bits_.resize(static_cast<size_t>(n_made));
    for (double& bits : bits_) bits = options_.spread * random.uniform();
  }
  const double logit = kLn2 / (static_cast<double>(layer_.sm_scale) * static_cast<double>(dim));
  for (size_t i = 0; i < made->size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const double bits = bits_[static_cast<size_t>(at / (n_heads * dim))];
    double& x = (*made)[i];
    if (plane == kPlaneK)
      x = 0.05 * x - bits * logit;
    else if (bits < options_.spread * static_cast<double>(at % dim % 5) * 0.24)
      x = 0.0;
  }
}

// Makes, rounds and stores K or V (plane) of a sequence where its table says. Returns the numbers as they read back.
std::vector<double> WindowCase::make_plane(reference::Random& random, const DeviceSequence& sequence, int32_t plane) {
  const bool is_k = plane == kPlaneK;
  const int32_t type = is_k ? layer_.k_type : layer_.v_type;
  const int64_t n_heads = layer_.n_kv_heads, dim = is_k ? layer_.k_head_dim : layer_.v_head_dim;
  const int64_t n_keys = sequence.end - sequence.begin;
  const int64_t n_made = options_.n_distinct > 0 ? std::min<int64_t>(options_.n_distinct, n_keys) : n_keys;
  std::vector<double> made(static_cast<size_t>(n_made * n_heads * dim));
  std::vector<std::byte> rows[2];
  for (int32_t p = 0; p < 2; ++p) rows[p].resize(static_cast<size_t>(n_made * n_heads * row_bytes_.of[plane + p]));
  for (double& x : made) x = (is_k ? 0.0 : options_.v_mean) + random.normal();
  double factor = 1.0;
  for (size_t i = 0; !is_k && options_.v_least < options_.v_most && i < made.size(); ++i) {
    if (static_cast<int64_t>(i) % dim % 32 == 0)
      factor = std::ldexp(1.0, static_cast<int>(random.integer(options_.v_least, options_.v_most)));
    made[i] *= factor;
  }
  if (options_.spread > 0.0) spread_weights(random, n_made, plane, &made);
  if (is_k && options_.bad_key >= 0 && options_.bad_key < n_made)
    made[static_cast<size_t>((n_made - 1 - options_.bad_key) * n_heads * dim + kBadDim)] = options_.bad_value;
  for (int64_t row = 0; row < n_made * n_heads; ++row) {
    std::byte* code = rows[0].data() + row * row_bytes_.of[plane];
    std::byte* scale = rows[1].data() + row * row_bytes_.of[plane + 1];
    reference::store_row(type, made.data() + row * dim, dim, code, scale);
    reference::load_row(type, code, scale, dim, made.data() + row * dim);
  }
  for (int64_t i = 0; i < n_keys; ++i) {
    const int64_t token = sequence.begin + i, slot = token % options_.page_len;
    if (options_.hides_old && token < sequence.end - sequence.q_len + 1 - layer_.sliding_window) continue;
    const int64_t page_idx = token / options_.page_len % sequence.table_len;
    const int64_t page = tables_[static_cast<size_t>(sequence.table_begin + page_idx)];
    for (int64_t h = 0; h < n_heads; ++h)
      for (int32_t p = 0; p < 2; ++p) {
        const int64_t bytes = row_bytes_.of[plane + p];
        if (bytes == 0) continue;
        const auto nth = static_cast<size_t>(&sequence - descriptors_.data());
        if (named_ != nullptr && options_.lists.hides_others && !is_attended(nth, h, token)) continue;
        if (tiles_ != nullptr && options_.tiles.hides_others && !tiles_->has_any(nth, h, token)) continue;
        std::byte* to = pool_.data() + page + plane_at_[plane + p] + h * pages_.head_stride[plane + p];
        std::memcpy(to + slot * bytes, rows[p].data() + (i % n_made * n_heads + h) * bytes, static_cast<size_t>(bytes));
      }
  }
  return made;
}

void WindowCase::make_rows() {
  reference::Random random(options_.seed);
  make_pages(random);
  for (const DeviceSequence& sequence : descriptors_) {
    k_.push_back(make_plane(random, sequence, kPlaneK));
    v_.push_back(make_plane(random, sequence, kPlaneV));
  }
  q_.resize(static_cast<size_t>(n_tokens_ * layer_.n_q_heads * layer_.k_head_dim));
  const auto n_made = static_cast<size_t>(options_.n_distinct) * static_cast<size_t>(layer_.n_q_heads * layer_.k_head_dim);
  for (size_t i = 0; i < q_.size(); ++i) {
    q_[i] = options_.q_mean + options_.q_size * random.normal();
    reference::round_row(options_.q_type, &q_[i], 1);
    if (i + 1 != n_made) continue;
    while (++i < q_.size()) q_[i] = q_[i - n_made];
  }
  if (options_.bad_query < 0) return;
  for (const DeviceSequence& sequence : descriptors_)
    if (options_.bad_query < sequence.q_len) {
      const int64_t row = (sequence.first_row + options_.bad_query + 1) * layer_.n_q_heads - 1;
      q_[static_cast<size_t>(row * layer_.k_head_dim + kBadDim)] = options_.bad_value;
    }
}

void WindowCase::make_call() {
  const auto own = [&](const void* from, int64_t bytes) {
    owned_.push_back(device_.allocate(bytes));
    if (from != nullptr) device_.upload(owned_.back(), from, bytes);
    return owned_.back();
  };
  const int64_t called_0 = tables_[0] - from_first_[0];
  layers_.assign(static_cast<size_t>(options_.n_layers), pages_);
  for (DevicePages& layer : layers_) {
    auto* base = static_cast<std::byte*>(own(pool_.data(), static_cast<int64_t>(pool_.size())));
    for (int32_t p = 0; p < kPlanes; ++p) layer.planes[p] = base + called_0 + plane_at_[p];
  }
  std::vector<std::byte> q(q_.size() * static_cast<size_t>(reference::element_bytes(options_.q_type)));
  for (size_t i = 0; i < q_.size(); ++i)
    reference::store_row(options_.q_type, &q_[i], 1,
                         q.data() + i * static_cast<size_t>(reference::element_bytes(options_.q_type)), nullptr);
  call_.layer = &layer_;
  call_.sequences.sequences = static_cast<const DeviceSequence*>(
      own(descriptors_.data(), static_cast<int64_t>(descriptors_.size() * sizeof(DeviceSequence))));
  call_.sequences.page_tables =
      static_cast<const int64_t*>(own(from_first_.data(), static_cast<int64_t>(from_first_.size() * sizeof(int64_t))));
  call_.sequences.n_sequences = static_cast<int32_t>(descriptors_.size());
  for (const DeviceSequence& sequence : descriptors_) {
    call_.sequences.max_q_len = std::max(call_.sequences.max_q_len, sequence.q_len);
    call_.sequences.max_keys = std::max(call_.sequences.max_keys, sequence.end - sequence.begin);
  }
  call_.q = {own(q.data(), static_cast<int64_t>(q.size())), options_.q_type, 0,
             int64_t{layer_.n_q_heads} * layer_.k_head_dim, layer_.k_head_dim};
  o_bytes_ = n_tokens_ * layer_.n_q_heads * layer_.v_head_dim * reference::element_bytes(options_.o_type);
  lse_bytes_ = n_tokens_ * layer_.n_q_heads * 4;
  call_.o = {own(nullptr, o_bytes_), options_.o_type, 0, int64_t{layer_.n_q_heads} * layer_.v_head_dim, layer_.v_head_dim};
  call_.lse = static_cast<float*>(own(nullptr, lse_bytes_));
  call_.lse_token_stride = layer_.n_q_heads;
  call_.lse_head_stride = 1;
  if (layer_.sinks != nullptr) call_.sinks = static_cast<const float*>(own(layer_.sinks, layer_.n_q_heads * 4));
  if (named_ != nullptr) {
    DeviceLists& lists = call_.lists;
    lists.keys =
        static_cast<const DeviceKeys*>(own(nullptr, static_cast<int64_t>(named_->keys().size() * sizeof(DeviceKeys))));
    lists.granules = static_cast<const KeyGranule*>(
        own(nullptr, NamedKeys::most_granules(options_.lists, descriptors_) * static_cast<int64_t>(sizeof(KeyGranule))));
    lists.n_heads = lists.per_sequence = options_.lists.n_heads;
    lists.has_granules = options_.lists.share > 0.0 ? 1 : 0;
    lists.are_written_by_kernels = options_.lists.by_kernels ? 1 : 0;
    upload_lists();
  }
  if (tiles_ != nullptr) call_.tiles = upload_tiles(descriptors_, &owned_);
  const int64_t workspace = device_.table->workspace_bytes(device_.self, &call_);
  call_.workspace = own(std::vector<std::byte>(static_cast<size_t>(workspace)).data(), workspace);
}

void WindowCase::upload_lists() {
  const auto upload = [&](const auto* to, const auto& from) {
    if (!from.empty())
      device_.upload(const_cast<std::remove_const_t<std::remove_pointer_t<decltype(to)>>*>(to), from.data(),
                     static_cast<int64_t>(from.size() * sizeof from[0]));
  };
  upload(call_.lists.keys, named_->keys());
  upload(call_.lists.granules, named_->granules());
}

DeviceTileLists WindowCase::upload_tiles(const std::vector<DeviceSequence>& sequences, std::vector<void*>* owned) const {
  const NamedTiles::Made made = tiles_->make(sequences, from_first_, options_.page_len);
  DeviceTileLists tiles = made.described;
  const auto upload = [&](const auto& from) {
    const auto bytes = static_cast<int64_t>((from.size() + 1) * sizeof from[0]);
    owned->push_back(device_.allocate(bytes));
    if (!from.empty()) device_.upload(owned->back(), from.data(), bytes - static_cast<int64_t>(sizeof from[0]));
    return owned->back();
  };
  tiles.lists = static_cast<const DeviceTiles*>(upload(made.lists));
  tiles.keys = static_cast<const KeyTile*>(upload(made.keys));
  return tiles;
}

void WindowCase::name_others(uint64_t seed) {
  reference::Random random(seed);
  named_ = std::make_unique<NamedKeys>(options_.lists, descriptors_, from_first_, options_.page_len, random);
  if (!options_.lists.by_kernels) upload_lists();
}

int32_t WindowCase::supports(DeviceError* error) const {
  return device_.table->supports(device_.self, &layer_, call_.sequences.max_q_len, error);
}

void WindowCase::attend(int32_t layer_idx, void* stream) {
  DeviceError error;
  call_.pages = layers_[static_cast<size_t>(layer_idx)];
  in_parts_ = false;
  device_.must(device_.table->attend(device_.self, &call_, stream, &error), error);
}

int32_t WindowCase::try_attend(DeviceError* error) {
  call_.pages = layers_[0];
  return device_.table->attend(device_.self, &call_, nullptr, error);
}

// The states before the first part are empty, and their o is NaN, because no kernel may use it. All parts use the same
// states.
void WindowCase::attend_parts(int64_t n_parts) {
  const int64_t n_rows = n_tokens_ * layer_.n_q_heads, dim = layer_.v_head_dim;
  const std::vector<float> o(static_cast<size_t>(n_rows * dim), NAN), lse(static_cast<size_t>(n_rows), -INFINITY);
  const auto bytes = static_cast<int64_t>(descriptors_.size() * sizeof(DeviceSequence));
  void *states = device_.allocate(n_rows * dim * 4), *of_states = device_.allocate(n_rows * 4),
       *described = device_.allocate(bytes);
  device_.upload(states, o.data(), n_rows * dim * 4);
  device_.upload(of_states, lse.data(), n_rows * 4);
  DeviceAttend part = call_;
  part.pages = layers_[0];
  part.sequences.sequences = static_cast<const DeviceSequence*>(described);
  part.before_o = static_cast<const float*>(states);
  part.before_lse = static_cast<const float*>(of_states);
  for (int64_t i = 0; i < n_parts; ++i) {
    std::vector<DeviceSequence> sequences = descriptors_;
    for (DeviceSequence& sequence : sequences) {
      const int64_t begin = sequence.begin, end = sequence.end, n = end - begin;
      sequence.begin = begin + n * i / n_parts;
      sequence.end = begin + n * (i + 1) / n_parts;
      sequence.n_after += end - sequence.end;
    }
    device_.upload(described, sequences.data(), bytes);
    std::vector<void*> owned;
    if (tiles_ != nullptr) part.tiles = upload_tiles(sequences, &owned);
    const bool is_last = i == n_parts - 1;
    part.o = is_last ? call_.o : DeviceRows{states, TANDEM_F32, 0, int64_t{layer_.n_q_heads} * dim, dim};
    part.lse = is_last ? call_.lse : static_cast<float*>(of_states);
    part.sinks = is_last ? call_.sinks : nullptr;
    DeviceError error;
    device_.must(device_.table->attend(device_.self, &part, nullptr, &error), error);
    device_.wait();
    for (void* data : owned) device_.table->release(device_.self, data);
  }
  in_parts_ = true;
  for (void* data : {states, of_states, described}) device_.table->release(device_.self, data);
}

std::vector<uint8_t> WindowCase::output() const {
  std::vector<uint8_t> bytes(static_cast<size_t>(o_bytes_ + lse_bytes_));
  device_.download(bytes.data(), call_.o.data, o_bytes_);
  device_.download(bytes.data() + o_bytes_, call_.lse, lse_bytes_);
  return bytes;
}

void WindowCase::clear_output() const {
  DeviceError error;
  device_.must(device_.table->fill(device_.self, call_.o.data, 0xff, o_bytes_, nullptr, &error), error);
  device_.must(device_.table->fill(device_.self, call_.lse, 0xff, lse_bytes_, nullptr, &error), error);
}

void WindowCase::shorten(int64_t n_keys) {
  for (DeviceSequence& sequence : descriptors_)
    sequence.end = std::max({sequence.begin, int64_t{sequence.q_len}, sequence.end - n_keys});
  device_.upload(const_cast<DeviceSequence*>(call_.sequences.sequences), descriptors_.data(),
                 static_cast<int64_t>(descriptors_.size() * sizeof(DeviceSequence)));
}

std::string WindowCase::check_bad(const WindowCase& good) const {
  const std::vector<uint8_t> bytes = output(), wanted_bytes = good.output();
  const auto *o = reinterpret_cast<const float*>(bytes.data()),
             *wanted = reinterpret_cast<const float*>(wanted_bytes.data());
  const int64_t n_heads = layer_.n_q_heads, v_dim = layer_.v_head_dim, lse_at = n_tokens_ * n_heads * v_dim;
  for (size_t s = 0; s < descriptors_.size(); ++s) {
    const DeviceSequence& sequence = descriptors_[s];
    const int64_t bad_key = sequence.end - 1 - options_.bad_key;
    const bool has_key = options_.bad_key >= 0 && bad_key >= sequence.begin;
    for (int64_t i = 0; i < sequence.q_len * n_heads; ++i) {
      const int64_t token = i / n_heads, head = i % n_heads, row = sequence.first_row * n_heads + i;
      bool is_bad = token == options_.bad_query && head == n_heads - 1;
      if (has_key && head < layer_.group_size && sequence.end - sequence.q_len + token >= bad_key) {
        const double k =
            k_[s][static_cast<size_t>((bad_key - sequence.begin) * layer_.n_kv_heads * layer_.k_head_dim + kBadDim)];
        if (k * q_[static_cast<size_t>(row * layer_.k_head_dim + kBadDim)] == -INFINITY) continue;
        is_bad = true;
      }
      const auto where = [&](const char* what) {
        return "sequence " + std::to_string(s) + ", query " + std::to_string(token) + ", head " + std::to_string(head) +
               what;
      };
      for (int64_t d = 0; d < v_dim; ++d) {
        const float x = o[row * v_dim + d];
        if (is_bad && !std::isnan(x)) return where(" sees what is bad, and o is no NaN");
        if (!is_bad && !(std::abs(x - wanted[row * v_dim + d]) < 0.01f))
          return where(" does not see what is bad, and differs");
      }
      if (is_bad == std::isfinite(o[lse_at + row])) return where(is_bad ? ": lse is finite" : ": lse is not finite");
    }
  }
  return "";
}

int64_t WindowCase::workspace_bytes() const { return device_.table->workspace_bytes(device_.self, &call_); }

void WindowCase::use_workspace(void* zeroed) { call_.workspace = zeroed; }

int64_t WindowCase::kv_bytes() const {
  int64_t n = 0;
  for (size_t s = 0; s < descriptors_.size(); ++s)
    n += named_ != nullptr ? named_->n_keys(s) * layer_.n_kv_heads / options_.lists.n_heads
                           : (descriptors_[s].end - descriptors_[s].begin) * layer_.n_kv_heads;
  return n * row_bytes_.total();
}

// True if some query of the sequence attends the token.
bool WindowCase::is_attended(size_t sequence, int64_t kv_head, int64_t token) const {
  const DeviceSequence& of = descriptors_[sequence];
  const int64_t window = named_->sliding_window(kv_head, static_cast<int32_t>(layer_.sliding_window));
  return named_->has(sequence, kv_head, token) && (window == 0 || token >= of.end - of.q_len + 1 - window);
}

// Lists the keys of a query, counted from its sequence's begin.
void WindowCase::see(size_t sequence, int64_t token, int32_t head, std::vector<int64_t>* keys) const {
  const int32_t per_kv = has_heads() ? layer_.group_size : 1, kv_head = head / per_kv;
  const DeviceSequence& of = descriptors_[sequence];
  const int64_t end = of.end - of.q_len + token + 1;
  const auto of_layer = static_cast<int32_t>(layer_.sliding_window);
  const int64_t window = named_ != nullptr ? named_->sliding_window(kv_head, of_layer) : of_layer;
  for (int64_t t = std::max(of.begin, window > 0 ? end - window : 0); t < end; ++t)
    if ((named_ == nullptr || named_->has(sequence, kv_head, t)) &&
        (tiles_ == nullptr || tiles_->has(sequence, kv_head, token, head % per_kv, t)))
      keys->push_back(t - of.begin);
}

reference::GateVerdict WindowCase::check() const {
  // Prefill kernels add to states, however few the queries are.
  const int64_t most_q_len = in_parts_ || tiles_ != nullptr ? INT32_MAX : call_.sequences.max_q_len;
  const bool rounds_p = reference::device_rounds_p(options_.layer, options_.q_type, most_q_len);
  const std::vector<uint8_t> bytes = output();
  const auto* lse = reinterpret_cast<const float*>(bytes.data() + o_bytes_);
  reference::GateVerdict all;
  reference::RefLayer layer = options_.layer;
  if (has_heads()) layer.n_kv_heads = layer.n_q_heads;
  for (size_t s = 0; s < descriptors_.size() && all.pass; ++s) {
    const DeviceSequence& sequence = descriptors_[s];
    const int64_t n_keys = sequence.end - sequence.begin,
                  n_made = static_cast<int64_t>(k_[s].size()) / layer_.n_kv_heads / std::max(1, layer_.k_head_dim);
    const auto widen = [&](const std::vector<double>& made, int64_t dim) {
      std::vector<float> rows;
      for (int64_t i = 0; i < n_keys; ++i) {
        const auto from = made.begin() + i % n_made * layer_.n_kv_heads * dim;
        rows.insert(rows.end(), from, from + layer_.n_kv_heads * dim);
      }
      return has_heads() ? repeat_heads(rows, layer_.group_size, dim) : rows;
    };
    const std::vector<float> k = widen(k_[s], layer_.k_head_dim), v = widen(v_[s], layer_.v_head_dim);
    const int64_t q_row = int64_t{layer_.n_q_heads} * layer_.k_head_dim;
    const std::vector<float> q(q_.begin() + sequence.first_row * q_row,
                               q_.begin() + (sequence.first_row + sequence.q_len) * q_row);
    std::vector<int64_t> positions(static_cast<size_t>(std::max<int64_t>(n_keys, 1)));
    std::iota(positions.begin(), positions.end(), sequence.begin);
    reference::Queries queries;
    queries.n_tokens = sequence.q_len;
    queries.q = q.data();
    std::vector<int64_t> q_positions(static_cast<size_t>(sequence.q_len));
    std::iota(q_positions.begin(), q_positions.end(), sequence.end - sequence.q_len);
    queries.positions = q_positions.data();
    queries.naive_rounds_p = rounds_p;
    queries.naive_rows = 64 + 200'000'000 / ((n_keys + 1) * (layer_.k_head_dim + layer_.v_head_dim));
    if (named_ != nullptr || tiles_ != nullptr) queries.naive_rows *= 8;  // many queries see few keys, or none
    queries.visible = [&](int64_t token, int32_t kv_head, std::vector<int64_t>* keys) { see(s, token, kv_head, keys); };
    const reference::LayerRows rows{&layer, n_keys, k.data(), v.data(), positions.data()};
    const reference::Truth truth = reference::attend_reference(rows, queries);
    reference::GateCall call;
    call.truth = &truth;
    call.layer = &options_.layer;
    call.o_type = options_.o_type;
    call.mass_epsilon =
        options_.mass_epsilon > 0.0 ? options_.mass_epsilon : reference::device_mass_epsilon(options_.layer, rounds_p);
    call.o = [&](int64_t token, int32_t head, int32_t dim) {
      const int64_t at = ((sequence.first_row + token) * layer_.n_q_heads + head) * layer_.v_head_dim + dim;
      return reference::load_element(options_.o_type, bytes.data() + at * reference::element_bytes(options_.o_type), nullptr,
                                     0);
    };
    call.lse = [&](int64_t token, int32_t head) {
      return static_cast<double>(lse[(sequence.first_row + token) * layer_.n_q_heads + head]);
    };
    const reference::GateVerdict verdict = reference::check_gate(call);
    all.shares.include(verdict.shares);
    if (!verdict.pass) all.pass = false, all.message = "sequence " + std::to_string(s) + ": " + verdict.message;
  }
  return all;
}

}  // namespace tandem::test
