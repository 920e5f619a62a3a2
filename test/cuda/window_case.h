// SPDX-License-Identifier: MIT
// A window of random keys in device memory, and calls over it: what device tests and benches share. The module is opened
// as a file; memory that holds nothing holds NaN.
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
  int32_t v_least = 0, v_most = 0;  // every 32 numbers of a row of V are multiplied by a power of two, in this range
  // Keys' weights are from 1 down to 2^-spread, where q_mean is 1 and q_size little. V is 0 in four of five dims where a key
  // weighs much: in each of these dims until another, far smaller weight.
  double spread = 0.0;
  double mass_epsilon = 0.0;   // of the gate (reference/gate.h); 0: as for any call
  bool hides_old = false;      // keys behind the sliding window are NaN
  bool has_no_page_0 = false;  // what tables call 0 is no memory, as where the window that it was in is gone
  // One number is bad_value of every sequence: of the key so many before the last, in KV head 0; of a query, in the last
  // head.
  int64_t bad_key = -1, bad_query = -1;
  double bad_value = 0.0;
  int32_t n_distinct = 0;  // keys, and queries; the others repeat these. 0: all are
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
  void attend(int32_t layer_idx, void* stream = nullptr);  // the launch alone
  int32_t try_attend(DeviceError* error);
  DeviceAttend& call() { return call_; }
  void attend_parts(int64_t n_parts);   // of the keys, each with the states of those before
  std::vector<uint8_t> output() const;  // o, then lse, as they are
  void clear_output() const;
  reference::GateVerdict check() const;  // against double precision
  // Against the same without the bad number: what sees it is NaN (a logit of -inf may be no key), the rest as it was. "": so
  // it is. o is f32.
  std::string check_bad(const WindowCase& good) const;
  void shorten(int64_t n_keys);     // every sequence, in device memory alone: as between two replays
  void name_others(uint64_t seed);  // other keys, in device memory alone: as between two replays
  // The lists of the call in device memory, and what name_others() would write there.
  const DeviceLists& lists() const { return call_.lists; }
  const NamedKeys& named() const { return *named_; }
  int64_t workspace_bytes() const;
  void use_workspace(void* zeroed);  // of another, and as large
  int64_t kv_bytes() const;          // that an attend reads

 private:
  void make_layer();
  void make_rows();
  void make_pages(reference::Random& random);
  std::vector<double> make_plane(reference::Random& random, const DeviceSequence& sequence, int32_t plane);
  void spread_weights(reference::Random& random, int64_t n_made, int32_t plane, std::vector<double>* made);
  void make_call();
  bool is_attended(size_t sequence, int64_t kv_head, int64_t token) const;
  // head: a query head where each has tiles of its own, else a KV head.
  void see(size_t sequence, int64_t token, int32_t head, std::vector<int64_t>* keys) const;
  bool has_heads() const { return tiles_ != nullptr && options_.tiles.classes_by == kByHead; }
  void upload_lists();
  DeviceTileLists upload_tiles(const std::vector<DeviceSequence>& sequences, std::vector<void*>* owned) const;

  const OpenDevice& device_;
  WindowOptions options_;
  Layer layer_;
  PlaneBytes row_bytes_;
  int64_t n_tokens_ = 0;      // of queries
  std::vector<double> bits_;  // of the keys that were made last: the weight is 2^-bits
  int32_t n_pages_ = 0;
  std::vector<std::vector<double>> k_, v_;  // of each sequence [end - begin, n_kv_heads, dim], as stored
  std::vector<double> q_;                   // [n_tokens, n_q_heads, dim], as rounded
  std::vector<std::byte> pool_;             // a layer
  std::vector<int64_t> tables_;             // bytes from page 0
  int64_t page_bytes_ = 0;
  std::vector<DeviceSequence> descriptors_;
  std::vector<int64_t> from_first_;    // tables_, from the page called 0 on
  std::unique_ptr<NamedKeys> named_;   // null: the call has no lists
  std::unique_ptr<NamedTiles> tiles_;  // null: it has no tiles
  std::vector<void*> owned_;
  int64_t plane_at_[kPlanes] = {};  // in a page
  DevicePages pages_;
  std::vector<DevicePages> layers_;  // pages_, each somewhere else
  DeviceAttend call_;
  bool in_parts_ = false;  // it was last attended so
  int64_t o_bytes_ = 0, lse_bytes_ = 0;
};

}  // namespace tandem::test
