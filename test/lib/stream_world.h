// SPDX-License-Identifier: MIT
// A cache under test and its oracle, side by side. Random calls go to both, and everything observable is compared.
//
// A seed determines a world: one to three small layers, a page size, and two or three sessions with different policies over
// one cache. Each operation first asks the oracle for the expected result, which may be an error. Then the operation runs
// and is compared: outputs within the gate, lengths, rows read back, selections, and digests. Digests must be equal exactly
// when contents are equal.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/open_device.h"
#include "lib/harness.h"
#include "reference/gate.h"
#include "reference/hgca_model.h"

namespace harness {

enum class Policies {
  kExact,
  kDevice,         // as above, with tensors in device memory
  kDeviceStream,   // also route "stream" where all keys are attended, with buffers of a few tokens
  kDeviceRebuild,  // also route "recompute" there; a hidden state holds a token's keys and values side by side
  kDeviceHgca,
  kHgca,
  // Cases that ordinary hgca streams leave out, so that other failures show: trees longer than the window, and partial
  // chunks of a single token.
  kHgcaLongTrees,
  kHgcaShortChunks,
};

// How the tokens of one forward pass are appended.
struct Pass {
  std::vector<int64_t> ids;
  std::vector<int64_t> q_lens;
  bool step = false;          // calls lie between tandem_step_begin and tandem_step_end
  bool append_first = false;  // calls tandem_sequence_append, then attends without k and v
  bool speculative = false;
  bool tree = false;
  bool partial = false;
  int32_t n_layers = -1;  // number of layers before the pass stops; -1: all
};

class StreamWorld {
 public:
  // device: the engine's device, with kDevice.
  StreamWorld(uint64_t seed, tandem_engine* engine, Policies policies, const tandem::test::OpenDevice* device = nullptr);
  void run(int64_t n_operations);  // random operations
  void check_everything();         // compares lengths, rows and digests of every sequence, and selections of every session
  // Attends one sequence with each session on the device. The cache's device memory must then equal the plan. Must be
  // called first.
  void check_plans();

  // Single operations, for tests that choose their own order.
  int64_t create();
  int64_t fork(int64_t id);
  void drop(int64_t id);
  void truncate(int64_t id, int64_t n_tokens);
  void remove(int64_t id, int64_t first, int64_t n_tokens, bool shift);
  void reserve(int64_t id, int64_t n_tokens);
  void append(int64_t id, size_t layer, int64_t n_tokens);
  void forward(size_t session, const Pass& pass);
  void commit(size_t session, int64_t id, const std::vector<int64_t>& kept);
  void check_selection(size_t session, int64_t id, size_t layer);
  void check_sequence(int64_t id);
  // Hash of the bits of all outputs so far. Equal seeds give equal hashes, for any number of threads.
  uint64_t output_hash() const { return output_hash_; }
  const reference::GateShares& shares() const { return shares_; }
  int64_t n_attends() const { return n_attends_; }
  int64_t n_uncertain() const { return n_uncertain_; }

 private:
  struct Entry {
    std::unique_ptr<Session> session;
    tandem_session_options options_of_session = TANDEM_SESSION_OPTIONS_INIT;
    reference::Scope scope;
    bool hgca = false;
    reference::HgcaOptions options;
    std::map<int64_t, reference::HgcaModel> models;                              // of each sequence
    std::map<int64_t, std::vector<std::vector<reference::QueryWeights>>> guess;  // [layer][query], while speculating
  };
  struct Rows {
    Tensor k, v;
    std::vector<double> k_dense, v_dense;
    Tensor x;  // of layers that keep hidden states
  };
  // The keys that a session reports for the next query of one head.
  struct Listed {
    std::vector<int64_t> keys;
    std::vector<float> share;  // elements beyond the keys must stay unwritten
    size_t layer;
    int32_t kv_head, q_head;
    std::string where;
  };
  struct LayerCall {
    Tensor q, o, lse;
    std::vector<float> q_dense;
    Rows rows;
    std::vector<int32_t> parents;
    bool on_device = false;
  };

  // An attend on device tensors. Its outputs are checked later.
  struct DeviceTensor {
    Tensor* tensor;
    void* memory;
  };
  struct PendingCall {
    size_t session, layer;
    Pass pass;
    LayerCall call;
    std::vector<DeviceTensor> tensors;
  };
  bool is_for_device() { return device_ != nullptr && (is_on_device_alone_ || random_.chance(0.8)); }
  bool device_takes(const reference::RefLayer& layer) const;  // false: a session refuses the layer
  tandem_tensor to_device(PendingCall* pending, Tensor* tensor);
  void attend_on_device(size_t session, size_t layer, const Pass& pass, tandem_attend_args args, LayerCall call);
  void finish_pending();

  void random_operation();
  void random_forward();
  void random_speculation();
  void random_change(int64_t id);
  void attend_layer(size_t session, size_t layer, const Pass& pass, const std::vector<int32_t>& parents);
  void grow_model(const Pass& pass, size_t layer, const LayerCall& call);
  void compare(Entry& entry, size_t layer, const Pass& pass, const LayerCall& call);
  // first: the sequence's first row in the call.
  static reference::GateVerdict judge(const reference::Truth& truth, const reference::RefLayer& layer, const LayerCall& call,
                                      int64_t first, bool device_rounds);
  void compare_sequence(Entry& entry, size_t layer, const Pass& pass, const LayerCall& call, size_t i, int64_t first);
  Listed list_selection(size_t session, int64_t id, size_t layer, int32_t kv_head);
  void check_visible(const Entry& entry, int64_t id, const Listed& listed);
  void check_selected(reference::HgcaModel& state, int64_t length, const Listed& listed);
  void check_shares(reference::HgcaModel& state, const Listed& listed, const std::vector<int64_t>& chosen);
  void expect_refusal(size_t session, const Pass& pass);
  Rows draw_rows(size_t layer, int64_t n_tokens);
  void join_rows(size_t layer, int64_t n_tokens, Rows* rows);
  bool keeps_hidden() const { return policies_ == Policies::kDeviceRebuild; }
  reference::HgcaModel& hgca(Entry& entry, int64_t id);
  void check_digest(int64_t id);
  void check_rows(int64_t id, size_t layer);
  int64_t any_id();
  int64_t pick_kept(int64_t id, const std::vector<int32_t>& parents, std::vector<int64_t>* kept);
  bool can_shift() const;
  void note(const std::string& text);
  std::string where() const;  // seed and the most recent operations

  uint64_t seed_;
  Policies policies_;
  reference::Random random_;
  std::vector<reference::RefLayer> layers_;
  int32_t page_tokens_ = 16;
  std::unique_ptr<Cache> cache_;
  std::vector<Entry> sessions_;
  std::map<int64_t, reference::SequenceModel> models_;
  std::map<int64_t, std::vector<int32_t>> parents_;  // of speculating sequences
  std::map<int64_t, size_t> speculator_;             // session that speculates, of each speculating sequence
  std::map<std::string, uint64_t> digests_;
  std::map<uint64_t, std::string> contents_;
  std::vector<std::string> history_;
  reference::GateShares shares_;
  const tandem::test::OpenDevice* device_;
  bool is_on_device_alone_ = false;
  std::deque<PendingCall> pending_;  // elements keep their addresses
  uint64_t output_hash_ = 0;
  int64_t n_attends_ = 0, n_uncertain_ = 0;
};

}  // namespace harness
