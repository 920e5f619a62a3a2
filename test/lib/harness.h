// SPDX-License-Identifier: MIT
// What the tests of the library share: handles that close themselves, tensors that notice stray reads and writes, and an
// allocator that hands out NaN.
//
// Every byte the allocator gives is 0xFF, which is NaN in f32, f16 and bf16; so is the padding of input tensors. A kernel
// that reads one element it should not, even to multiply it by zero, shows it in the output. Around every block and in
// the padding of output tensors the bytes are compared afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "reference/random.h"
#include "reference/reference_layer.h"
#include "reference/sequence_model.h"
#include "tandem/tandem.h"

namespace harness {

// Stops the test with a text; the first form for any failed expectation.
[[noreturn]] void stop(const std::string& text);
void expect(bool condition, const std::string& text);
// The same, where the text says what was done to whom: it is only made when it is wanted, or most of a test's time would go
// into texts that nobody reads.
#define TANDEM_CHECK(condition, text)      \
  do {                                     \
    if (!(condition)) harness::stop(text); \
  } while (0)
// Wraps one call and expects a status, else stops with the error's message, which it releases:
// TANDEM_EXPECT(context, TANDEM_OK, tandem_sequence_create(&id, cache, &error)).
#define TANDEM_EXPECT(context, wanted, call)                                                    \
  do {                                                                                          \
    tandem_error* error = nullptr;                                                              \
    const int32_t expect_result = (call);                                                       \
    if (expect_result != (wanted)) harness::stop_status(expect_result, wanted, error, context); \
    tandem_error_release(error);                                                                \
  } while (0)
[[noreturn]] void stop_status(int32_t status, int32_t wanted, tandem_error* error, const std::string& context);
// Handles of a stopped test are lost: whoever looks for leaks asks first.
bool any_stopped();

class NanAllocator {
 public:
  static void* allocate(size_t bytes, size_t alignment, void* self);
  static void release(void* data, size_t bytes, void* self);
  ~NanAllocator();
  int64_t n_live();
  int64_t n_allocated() const { return n_allocated_; }
  std::string fault();  // "" while all is well: writes outside a block, wrong sizes, foreign pointers

 private:
  struct Block {
    std::vector<unsigned char> storage;
    size_t offset, bytes, alignment;
  };
  void check(const Block& block);
  std::mutex mutex_;
  std::map<void*, Block> live_;
  int64_t n_allocated_ = 0;
  std::string fault_;
};

struct EngineSetup {
  int32_t n_threads = 2;
  const char* isa = nullptr;
  NanAllocator* allocator = nullptr;
  const char* backend = nullptr;  // with the path of its module
  const char* backend_path = nullptr;
};

// Engine, cache and session stand for their handles in calls of the C ABI.
class Engine {
 public:
  explicit Engine(const EngineSetup& setup);
  ~Engine();
  Engine(const Engine&) = delete;
  operator tandem_engine*() const { return handle_; }  // NOLINT(google-explicit-constructor)

 private:
  tandem_engine* handle_ = nullptr;
};

struct CacheSetup {
  int32_t page_tokens = 0;
  // Hidden states in bf16: a token's keys and values of all heads, side by side, which projections pick.
  bool keeps_hidden = false;
};

// A model and a cache over it; storage types come from the layers.
class Cache {
 public:
  Cache(tandem_engine* engine, const std::vector<reference::RefLayer>& layers, const CacheSetup& setup);
  ~Cache();
  Cache(const Cache&) = delete;
  operator tandem_cache*() const { return cache_; }  // NOLINT(google-explicit-constructor)
  int64_t create_sequence(const std::string& context);
  // Of a session, and of one sequence.
  tandem_memory_plan plan(const tandem_session_options& session, int64_t kv_len) const;

 private:
  struct Picking {  // a projection
    explicit Picking(const reference::RefLayer& layer);
    Picking(const Picking&) = delete;
    std::vector<uint16_t> rows[2];
    tandem_layer_projection options = TANDEM_LAYER_PROJECTION_INIT;
  };
  std::deque<Picking> projections_;
  tandem_engine* engine_;
  std::vector<int32_t> k_types_, v_types_;
  tandem_cache_options options_ = TANDEM_CACHE_OPTIONS_INIT;
  tandem_model* model_ = nullptr;
  tandem_cache* cache_ = nullptr;
};

tandem_layer_options layer_options(const reference::RefLayer& layer);
// MLA's shape; the caller rotates.
void set_latent(reference::RefLayer* layer);

class Session {
 public:
  Session(tandem_cache* cache, const tandem_session_options& options);
  ~Session();
  Session(const Session&) = delete;
  operator tandem_session*() const { return session_; }  // NOLINT(google-explicit-constructor)

 private:
  tandem_session* session_ = nullptr;
};

tandem_session_options scope_options(const reference::Scope& scope);

// How a tensor lies in memory. Elements of padding between rows, and how many elements the first one is off a 64-byte line.
struct Layout {
  int64_t pad_heads = 0;
  int64_t pad_dims = 0;
  int64_t offset = 0;
};
Layout random_layout(reference::Random* random);

// A tensor [n_tokens, n_heads, head_dim], or [n_tokens, n_heads] with head_dim = 0. All bytes start as 0xFF.
class Tensor {
 public:
  Tensor() = default;
  Tensor(Tensor&&) = default;  // moving keeps the buffer and so its alignment; copying would not
  Tensor& operator=(Tensor&&) = default;
  Tensor(int32_t dtype, int64_t n_tokens, int64_t n_heads, int64_t head_dim, const Layout& layout = {});
  tandem_tensor view() const;
  void set(int64_t token, int64_t head, int64_t dim, double x);
  void set_row(int64_t token, int64_t head, const double* x);  // [head_dim]
  double get(int64_t token, int64_t head, int64_t dim) const;
  bool padding_untouched() const;
  bool untouched() const;  // not one byte written since construction
  std::vector<unsigned char> payload() const;
  // All bytes from the 64-byte line on that the first element is offset from.
  unsigned char* first_line() const { return base() - offset_bytes(); }
  int64_t n_bytes() const { return bytes_.data() + bytes_.size() - first_line(); }
  int64_t offset_bytes() const;
  int64_t n_tokens() const { return shape_[0]; }
  int32_t dtype() const { return dtype_; }

 private:
  int64_t element(int64_t token, int64_t head, int64_t dim) const;
  int32_t dtype_ = TANDEM_F32;
  int32_t n_dims_ = 3;
  int64_t shape_[3] = {0, 0, 1};
  int64_t stride_[3] = {1, 1, 1};
  int64_t offset_ = 0;
  std::vector<unsigned char> bytes_;  // exactly up to the last element
  unsigned char* base() const;
};

// Fills a tensor with rounded random numbers and returns what it holds, dense: [n_tokens, n_heads, head_dim].
std::vector<double> fill(Tensor* tensor, int64_t n_heads, int64_t head_dim, double (*draw)(reference::Random*, double),
                         double scale, reference::Random* random);
double draw_normal(reference::Random* random, double scale);
std::vector<float> to_float(const std::vector<double>& from);

// Instruction sets that this processor has, best first.
std::vector<const char*> available_isas();
bool full_run();    // TANDEM_TEST_FULL is set
int full_factor();  // and its value: how many times the full amount; 0: not set
// Sanitizers make everything slower: bulk work is divided by this.
#if defined(__SANITIZE_THREAD__)
inline constexpr int kSlowness = 8;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlowness = 2;
#else
inline constexpr int kSlowness = 1;
#endif
uint64_t seed_override(uint64_t otherwise);  // TANDEM_TEST_SEED

}  // namespace harness
