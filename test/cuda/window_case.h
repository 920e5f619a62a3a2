// SPDX-License-Identifier: MIT
// A window of random keys in device memory and calls over it, for device tests and benches. The module is opened as a file.
// Memory that holds nothing is NaN.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/named_keys.h"
#include "device/named_tiles.h"
#include "device/open_device.h"
#include "lib/tables/device.h"
#include "reference/gate.h"
#include "reference/random.h"
#include "reference/reference_layer.h"

namespace tandem::test {

struct WindowSequence {
  int64_t begin, end;
  int32_t q_len;
};

struct WindowOptions {
  reference::RefLayer layer;
  std::vector<WindowSequence> sequences;
  int32_t q_type = TANDEM_BF16, o_type = TANDEM_F32;
  int32_t page_len = 128;
  bool shuffled = true;
  double q_size = 1.0, q_mean = 0.0;  // q's elements: standard deviation and mean
  double v_mean = 0.0;
  int32_t v_least = 0, v_most = 0;  // each 32 numbers of a row of V are multiplied by 2 to a power in this range
  // With q_mean 1 and a small q_size, weights of keys go from 1 down to 2^-spread. V is 0 in four of five dims of heavy
  // keys. Each of the four dims has a bound of its own: V is 0 there in every key with a larger weight.
  double spread = 0.0;
  double mass_epsilon = 0.0;   // of the gate (reference/gate.h); 0: device_mass_epsilon(), as for any call
  bool hides_old = false;      // keys too old for the sliding window are NaN
  bool has_no_page_0 = false;  // page 0 of the tables is not mapped, as when the window that it belonged to is gone
  // One number of every sequence is bad_value: a number of the key `bad_key` tokens before the last one, in KV head 0, or a
  // number of query `bad_query`, in the last head. -1: none.
  int64_t bad_key = -1, bad_query = -1;
  double bad_value = 0.0;
  int32_t n_distinct = 0;  // keys and queries that differ, the others repeat them; 0: all differ
  int32_t n_layers = 1;    // copies of the window, for benches
  ListOptions lists;
  TileOptions tiles;
  uint64_t seed = 1;
};

class WindowCase {
 public:
  WindowCase(const OpenDevice& device, const WindowOptions& options);
  ~WindowCase();
  WindowCase(const WindowCase&) = delete;

  int32_t supports(DeviceError* error) const;
  void attend(int32_t layer_idx, void* stream = nullptr);  // launches the call and checks nothing
  int32_t try_attend(DeviceError* error);
  DeviceAttend& call() { return call_; }
  void attend_parts(int64_t n_parts);  // attends the keys part by part; each part starts from the states of the parts before
  std::vector<uint8_t> output() const;  // the bytes of o, then those of lse
  void clear_output() const;
  reference::GateVerdict check() const;  // compares with double precision
  // Compares with the outputs of the same case without the bad number. Rows that attend the bad number must be NaN, the
  // others as in `good`. A logit of -inf may count as no key. o must be f32. "": no difference.
  std::string check_bad(const WindowCase& good) const;
  void shorten(int64_t n_keys);     // shortens every sequence, in device memory alone, as between two replays
  void name_others(uint64_t seed);  // names other keys, in device memory alone, as between two replays
  // The call's lists in device memory, and the lists that name_others() made last. With by_kernels the test brings them
  // there.
  const DeviceLists& lists() const { return call_.lists; }
  const NamedKeys& named() const { return *named_; }
  int64_t workspace_bytes() const;
  void use_workspace(void* zeroed);  // replaces the work space by another one of the same size
  int64_t kv_bytes() const;          // bytes of K and V that an attend reads

 private:
  void make_layer();
  void make_rows();
  void make_pages(reference::Random& random);
  std::vector<double> make_plane(reference::Random& random, const DeviceSequence& sequence, int32_t plane);
  void spread_weights(reference::Random& random, int64_t n_made, int32_t plane, std::vector<double>* made);
  void make_call();
  bool is_attended(size_t sequence, int64_t kv_head, int64_t token) const;
  // head: a query head if each query head has tiles of its own, else a KV head.
  void see(size_t sequence, int64_t token, int32_t head, std::vector<int64_t>* keys) const;
  bool has_heads() const { return tiles_ != nullptr && options_.tiles.classes_by == kByHead; }
  void upload_lists();
  DeviceTileLists upload_tiles(const std::vector<DeviceSequence>& sequences, std::vector<void*>* owned) const;

  const OpenDevice& device_;
  WindowOptions options_;
  Layer layer_;
  PlaneBytes row_bytes_;
  int64_t n_tokens_ = 0;      // queries of the call
  std::vector<double> bits_;  // for the keys that were made last: a key's weight is 2^-bits
  int32_t n_pages_ = 0;
  std::vector<std::vector<double>> k_, v_;  // for each sequence [end - begin, n_kv_heads, dim], as stored
  std::vector<double> q_;                   // [n_tokens, n_q_heads, dim], as rounded
  std::vector<std::byte> pool_;             // one layer
  std::vector<int64_t> tables_;             // offsets of pages in bytes from page 0
  int64_t page_bytes_ = 0;
  std::vector<DeviceSequence> descriptors_;
  std::vector<int64_t> from_first_;    // tables_, in bytes from the page that tables call 0
  std::unique_ptr<NamedKeys> named_;   // null: the call has no key lists
  std::unique_ptr<NamedTiles> tiles_;  // null: the call has no tiles
  std::vector<void*> owned_;
  int64_t plane_at_[kPlanes] = {};  // offsets in a page
  DevicePages pages_;
  std::vector<DevicePages> layers_;  // copies of pages_ at other addresses
  DeviceAttend call_;
  bool in_parts_ = false;  // the last call was attend_parts()
  int64_t o_bytes_ = 0, lse_bytes_ = 0;
};

}  // namespace tandem::test
