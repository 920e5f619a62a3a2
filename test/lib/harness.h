// SPDX-License-Identifier: MIT
// Shared by the tests of the library: handles that close themselves, tensors that detect stray reads and writes, and an
// allocator that returns NaN.
//
// Every byte of an allocation is 0xFF, which is NaN in f32, f16 and bf16. The padding of input tensors has the same bytes.
// A kernel that reads one wrong element, even to multiply it by zero, shows NaN in the output. The bytes around every block
// and in the padding of output tensors are compared afterwards.
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

// stop() ends the test with a text. expect() does so if its condition is false.
[[noreturn]] void stop(const std::string& text);
void expect(bool condition, const std::string& text);
// Like expect(), for texts that describe the case. The text is only built on failure, because building it would take most
// of a test's time.
#define TANDEM_CHECK(condition, text)      \
  do {                                     \
    if (!(condition)) harness::stop(text); \
  } while (0)
// Makes one call and expects a status. Otherwise stops with the error's message and releases the error. Example:
// TANDEM_EXPECT(context, TANDEM_OK, tandem_sequence_create(&id, cache, &error)).
#define TANDEM_EXPECT(context, wanted, call)                                                    \
  do {                                                                                          \
    tandem_error* error = nullptr;                                                              \
    const int32_t expect_result = (call);                                                       \
    if (expect_result != (wanted)) harness::stop_status(expect_result, wanted, error, context); \
    tandem_error_release(error);                                                                \
  } while (0)
[[noreturn]] void stop_status(int32_t status, int32_t wanted, tandem_error* error, const std::string& context);
// Returns whether a test was stopped. A stopped test leaks its handles, so leak checks ask first.
bool any_stopped();

class NanAllocator {
 public:
  static void* allocate(size_t bytes, size_t alignment, void* self);
  static void release(void* data, size_t bytes, void* self);
  ~NanAllocator();
  int64_t n_live();
  int64_t n_allocated() const { return n_allocated_; }
  std::string fault();  // "" if all is well; else writes outside a block, wrong sizes or foreign pointers

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
  const char* backend = nullptr;  // requires backend_path, the path of its module
  const char* backend_path = nullptr;
};

// Engine, Cache and Session convert to their handles in calls of the C ABI.
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
  // The cache keeps hidden states in bf16: a token's keys and values of all heads, side by side. Projections pick them out.
  bool keeps_hidden = false;
};

// A model and a cache of it. The layers give the storage types.
class Cache {
 public:
  Cache(tandem_engine* engine, const std::vector<reference::RefLayer>& layers, const CacheSetup& setup);
  ~Cache();
  Cache(const Cache&) = delete;
  operator tandem_cache*() const { return cache_; }  // NOLINT(google-explicit-constructor)
  int64_t create_sequence(const std::string& context);
  // Returns the memory plan for the session with one sequence of kv_len tokens.
  tandem_memory_plan plan(const tandem_session_options& session, int64_t kv_len) const;

 private:
  struct Picking {  // a projection that picks K and V out of the hidden state
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
// Sets the shape of MLA. The caller rotates.
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

// Memory layout of a tensor: elements of padding between rows, and elements between a 64-byte line and the first element.
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
  bool untouched() const;  // true if no byte has been written since construction
  std::vector<unsigned char> payload() const;
  // Start of the 64-byte line from which the first element is offset.
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
  std::vector<unsigned char> bytes_;  // ends with the last element
  unsigned char* base() const;
};

// Fills a tensor with rounded random numbers and returns its dense content: [n_tokens, n_heads, head_dim].
std::vector<double> fill(Tensor* tensor, int64_t n_heads, int64_t head_dim, double (*draw)(reference::Random*, double),
                         double scale, reference::Random* random);
double draw_normal(reference::Random* random, double scale);
std::vector<float> to_float(const std::vector<double>& from);

// Returns the instruction sets of this processor, best first.
std::vector<const char*> available_isas();
bool full_run();    // TANDEM_TEST_FULL is set
int full_factor();  // value of TANDEM_TEST_FULL, a multiple of the full amount; 0: not set
// Factor by which sanitizers slow down a test. Tests divide bulk work by it.
#if defined(__SANITIZE_THREAD__)
inline constexpr int kSlowness = 8;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlowness = 2;
#else
inline constexpr int kSlowness = 1;
#endif
uint64_t seed_override(uint64_t otherwise);  // TANDEM_TEST_SEED if set

}  // namespace harness
