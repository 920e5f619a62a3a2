// SPDX-License-Identifier: MIT
// Files of head patterns: the result of reading valid files, and the messages for invalid ones. Published files are read if
// TANDEM_TEST_DATA names their folder.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>

#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
constexpr uint32_t kFull = TANDEM_PATTERN_FULL, kAShape = TANDEM_PATTERN_A_SHAPE, kSlash = TANDEM_PATTERN_VERTICAL_SLASH,
                   kBlocks = TANDEM_PATTERN_BLOCK_SPARSE;

std::string write_file(const std::string& text) {
  const std::filesystem::path folder = TANDEM_TEST_FOLDER;
  std::filesystem::create_directories(folder);
  const std::string path = folder / "patterns";
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

struct Heads {
  std::vector<tandem_head_pattern> heads;
  int64_t n_layers = 0;

  const tandem_head_pattern& at(int64_t layer, int64_t head) const {
    return heads[static_cast<size_t>(layer * (std::ssize(heads) / n_layers) + head)];
  }
};

Heads read_path(const std::string& path, const tandem_pattern_file_options* options = nullptr) {
  Heads all;
  int64_t n_heads = -1, n_again = -1;
  OK(tandem_patterns_read, nullptr, 0, &n_heads, &all.n_layers, path.c_str(), options);
  all.heads.assign(static_cast<size_t>(n_heads), TANDEM_HEAD_PATTERN_INIT);
  OK(tandem_patterns_read, all.heads.data(), n_heads, &n_again, &all.n_layers, path.c_str(), options);
  assert_int_equal(n_heads, n_again);
  return all;
}

Heads read_text(const std::string& text, const tandem_pattern_file_options* options = nullptr) {
  return read_path(write_file(text), options);
}

void expect(const tandem_head_pattern& got, uint32_t kinds, const std::vector<int64_t>& sizes) {
  assert_int_equal(got.struct_size, sizeof got);
  assert_int_equal(got.kinds, kinds);
  const int64_t members[] = {got.sink_tokens, got.window_tokens, got.vertical_tokens, got.slash_tokens, got.n_blocks};
  for (size_t i = 0; i < std::size(members); ++i) assert_int_equal(members[i], sizes[i]);
}

void json_is_read(void**) {
  const Heads all = read_text(R"( [
    {"1": ["stream_llm", 4, 1020], "0": ["vertical_and_slash", 30, 800, 0.25], "2": ["block_sparse", 100, 1000, 0.5]},
    {"0": ["full"], "1": [["stream_llm", 0, 1, -3], ["vertical_and_slash", 0, 2147483647]], "2": [["full", 0, 0, 1]]}
  ]
 )");
  assert_int_equal(all.n_layers, 2);
  assert_int_equal(all.heads.size(), 6);
  expect(all.at(0, 0), kSlash, {0, 0, 30, 800, 0});
  expect(all.at(0, 1), kAShape, {4, 1020, 0, 0, 0});
  expect(all.at(0, 2), kBlocks, {0, 0, 0, 0, 100});
  expect(all.at(1, 0), kFull, {0, 0, 0, 0, 0});
  expect(all.at(1, 1), kAShape | kSlash, {0, 1, 0, INT32_MAX, 0});
  expect(all.at(1, 2), kFull, {0, 0, 0, 0, 0});
}

void gates_are_read(void**) {
  // The median of six gates lies between 0.25 and 0.5.
  const std::string text = "0.5\t1e0 -1.5e-05\r\n0.25\t 0.1  0.75\n\n";
  const Heads plain = read_text(text);
  assert_int_equal(plain.n_layers, 2);
  for (int64_t i = 0; i < 6; ++i) {
    const bool is_full = i == 0 || i == 1 || i == 5;
    expect(plain.at(i / 3, i % 3), is_full ? kFull : kAShape, {is_full ? 0 : 128, is_full ? 0 : 256, 0, 0, 0});
  }
  tandem_pattern_file_options options = TANDEM_PATTERN_FILE_OPTIONS_INIT;
  options.group_size = 2;
  options.threshold = 0.75;
  options.sink_tokens = 0;
  options.window_tokens = 64;
  const Heads groups = read_text(text, &options);
  assert_int_equal(groups.heads.size(), 12);
  for (int64_t i = 0; i < 12; ++i) {
    const bool is_full = i / 2 == 1 || i / 2 == 5;
    expect(groups.at(i / 6, i % 6), is_full ? kFull : kAShape, {0, is_full ? 0 : 64, 0, 0, 0});
  }
  expect(read_text("0.5").at(0, 0), kFull, {0, 0, 0, 0, 0});  // the value is its own median
  const Heads marked = read_text("\xEF\xBB\xBF+0.5 -0.5\n");  // a byte order mark
  expect(marked.at(0, 0), kFull, {0, 0, 0, 0, 0});
  expect(marked.at(0, 1), kAShape, {128, 256, 0, 0, 0});
  assert_int_equal(read_text("\xEF\xBB\xBF[{\"0\": [\"full\"]}]").n_layers, 1);
}

struct BadFile {
  const char* text;
  const char* why;  // the whole message after the path
};

void expect_refused(const std::vector<BadFile>& files) {
  Outputs out;
  int n_wrong = 0;
  for (const BadFile& file : files) {
    const std::string path = write_file(file.text), why = "path = " + path + ": " + file.why;
    n_wrong += check_refused({file.text, "tandem_patterns_read", kInvalid, "path", why.c_str(), [&](tandem_error** e) {
                                return tandem_patterns_read(nullptr, 0, out.at<int64_t>(), out.at<int64_t>(8), path.c_str(),
                                                            nullptr, e);
                              }});
  }
  out.expect_untouched();
  assert_int_equal(n_wrong, 0);
}

void bad_json_is_refused(void**) {
  expect_refused({
      {"", "the file is empty"},
      {" \n\t\n", "the file is empty"},
      {"[", "line 1, column 2: this is not JSON"},
      {"[{\"0\": [\"full\"]}]\n x", "line 2, column 2: this is not JSON"},
      {"[{\"0\": [\"full\"]}]\n[]", "line 2, column 1: this is not JSON"},
      {"[{\"0\": [\"stream_llm\", 1, NaN]}]", "line 1, column 26: this is not JSON"},
      {"[{\"0\": [\"stream_llm\", 1, 1e999]}]", "a number is out of the range"},
      {"{}", "{...} is not a list of layers"},
      {"[]", "there are no layers"},
      {"[7]", "layer 0: 7 is not an object of heads"},
      {"[{}]", "layer 0: there are no heads"},
      {"[{\"1\": [\"full\"], \"2\": [\"full\"]}]", "layer 0: head 0 is missing: the layer has 2 members"},
      {"[{\"0\": [\"full\"], \"01\": [\"full\"]}]", "layer 0: head 1 is missing"},
      {"[{\"0\": [\"full\"]}, {\"0\": [\"full\"], \"0\": [\"full\"]}]", "layer 1: \"0\" is there twice"},
      {"{\"0\": [\"full\"], \"0\": [\"full\"]}", "\"0\" is there twice"},
      {"[{\"0\": [\"full\"]}, {\"0\": [\"full\"], \"1\": [\"full\"]}]", "layer 1 has 2 heads, but layer 0 has 1"},
      {"[{\"0\": \"full\"}]", "layer 0: head 0: \"full\" is not a list of a kind and its sizes"},
      {"[{\"0\": []}]", "layer 0: head 0: [...] is not a list"},
      {"[{\"0\": [[]]}]", "layer 0: head 0: [...] is not a list"},
      {"[{\"0\": [[\"full\"], 3]}]", "layer 0: head 0: 3 is not a list"},
      {"[{\"0\": [\"stripes\", 1, 2]}]", "layer 0: head 0: kind \"stripes\" is unknown"},
      {"[{\"0\": [\"full\"], \"1\": [\"\\u00e9\\n0123456789012345678901234567890123456789\"]}]",
       "layer 0: head 1: kind \"\\u00e9\\n0123456789"},
      {"[{\"0\": [\"stream_llm\", 1]}]", "layer 0: head 0: a list of stream_llm has 2 elements, not from 3 to 4"},
      {"[{\"0\": [\"full\", 1, 2, 3, 4]}]", "layer 0: head 0: a list of full has 5 elements, not from 1 to 4"},
      {"[{\"0\": [[\"stream_llm\", 1, 1], [\"stream_llm\", 2, 2]]}]", "layer 0: head 0: stream_llm is there twice"},
  });
}

void bad_sizes_are_refused(void**) {
  expect_refused({
      {"[{\"0\": [\"stream_llm\", -1, 8]}]", "layer 0: head 0: stream_llm: sinks = -1 is not a whole number from 0"},
      {"[{\"0\": [\"stream_llm\", 1, 0]}]", "layer 0: head 0: stream_llm: window = 0 is not a whole number from 1"},
      {"[{\"0\": [\"vertical_and_slash\", 1.5, 0]}]", "layer 0: head 0: vertical_and_slash: vertical = 1.5 is not"},
      {"[{\"0\": [\"vertical_and_slash\", 1, 2147483648]}]",
       "layer 0: head 0: vertical_and_slash: slash = 2147483648 is not a whole number"},
      {"[{\"0\": [\"vertical_and_slash\", 1, 18446744073709551615]}]",
       "layer 0: head 0: vertical_and_slash: slash = 18446744073709551615 is not"},
      {"[{\"0\": [\"vertical_and_slash\", true, 1]}]",
       "layer 0: head 0: vertical_and_slash: vertical = true is not a whole number"},
      {"[{\"0\": [\"block_sparse\", null, 1]}]", "layer 0: head 0: block_sparse: blocks = null is not a whole number"},
      {"[{\"0\": [\"block_sparse\", 1, \"x\"]}]", "layer 0: head 0: block_sparse: \"x\" is not a number"},
      {"[{\"0\": [\"full\", {}]}]", "layer 0: head 0: full: {...} is not a number"},
      {"[{\"0\": [\"stream_llm\", 1, 1, [1]]}]", "layer 0: head 0: stream_llm: [...] is not a number"},
  });
  std::string deep = "[{\"0\": ";  // a recursive parser would overflow the stack
  for (int i = 0; i < 200000; ++i) deep += '[';
  for (int i = 0; i < 200000; ++i) deep += ']';
  expect_refused({{(deep + "}]").c_str(), "layer 0: head 0: [...] is not a list of a kind"}});
  std::string many = "[{}", long_list = "[{\"0\": [[\"full\"]";  // a slow parser would take minutes
  for (int i = 0; i < 1000000; ++i) many += ",{}", long_list += ",[]";
  expect_refused({{(many + "]").c_str(), "a list or an object has more than 4096 members"},
                  {(long_list + "]}]").c_str(), "a list or an object has more than 4096 members"}});
}

void bad_gates_are_refused(void**) {
  expect_refused({
      {"0.1 0.2\n0.3\n", "line 2 has 1 gates, but line 1 has 2"},
      {"0.1\n\n0.3\n", "line 2 has no gates"},
      {"\n0.3\n", "line 1 has no gates"},
      {"0.1 nan\n", "line 1: \"nan\" is not a finite number"},
      {"0.1\n-inf\n", "line 2: \"-inf\" is not a finite number"},
      {"1e999", "line 1: \"1e999\" is out of the range of floating point"},
      {"0.1\n1e-400 0.1", "line 2: \"1e-400\" is out of the range of floating point"},
      {"+ 0.1", "line 1: \"+\" is not a finite number"},
      {"+-0.1", "line 1: \"+-0.1\" is not a finite number"},
      {"0.1,0.2", "line 1: \"0.1,0.2\" is not a finite number"},
      {"0.1\x1b[2J", "line 1: \"0.1\\u001b[2J\" is not a finite number"},
  });
}

void files_that_cannot_be_read(void**) {
  const std::string folder = TANDEM_TEST_FOLDER, pipe = folder + "/pipe";
  std::filesystem::create_directories(folder);
  std::filesystem::remove(pipe);
  assert_int_equal(mkfifo(pipe.c_str(), 0600), 0);
  Outputs out;
  int n_wrong = 0;
  for (const std::string& path : {folder + "/gone", folder, pipe, write_file("0.5") + "/x"}) {
    const auto read = [&](tandem_error** e) {
      return tandem_patterns_read(nullptr, 0, out.at<int64_t>(), out.at<int64_t>(8), path.c_str(), nullptr, e);
    };
    n_wrong += check_refused({"file", "tandem_patterns_read", TANDEM_ERROR_IO, "path", path.c_str(), read});
  }
  tandem_error* error = nullptr;
  tandem_patterns_read(nullptr, 0, out.at<int64_t>(), out.at<int64_t>(8), (folder + "/gone").c_str(), nullptr, &error);
  assert_int_equal(tandem_error_underlying(error), ENOENT);
  tandem_error_release(error);
  out.expect_untouched();
  assert_int_equal(n_wrong, 0);
}

// Arguments of tandem_patterns_read().
struct Arguments {
  tandem_head_pattern* heads;
  int64_t capacity;
  int64_t *n_heads, *n_layers;
  const char* path;
  const tandem_pattern_file_options* options;
};

struct BadArgument {
  const char *field, *value;
  std::function<void(Arguments*)> change;
};

template <typename T>
T* moved(T* pointer) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + 1);
}

void expect_refused(const std::vector<BadArgument>& cases) {
  Outputs out;
  const std::string path = write_file("0.5 0.25");
  std::vector<tandem_head_pattern> heads(2, TANDEM_HEAD_PATTERN_INIT);
  int n_wrong = 0;
  for (const BadArgument& one : cases) {
    Arguments a = {heads.data(), 2, out.at<int64_t>(), out.at<int64_t>(8), path.c_str(), nullptr};
    one.change(&a);
    const auto read = [&](tandem_error** e) {
      return tandem_patterns_read(a.heads, a.capacity, a.n_heads, a.n_layers, a.path, a.options, e);
    };
    n_wrong += check_refused({one.field, "tandem_patterns_read", kInvalid, one.field, one.value, read});
    assert_int_equal(heads[0].kinds, 0);
    heads.assign(2, TANDEM_HEAD_PATTERN_INIT);
  }
  out.expect_untouched();
  assert_int_equal(n_wrong, 0);
}

void bad_pointers_are_refused(void**) {
  expect_refused({
      {"heads", "NULL", [](auto* a) { a->heads = nullptr; }},
      {"heads", "not aligned", [](auto* a) { a->heads = moved(a->heads); }},
      {"heads", "not aligned", [](auto* a) { a->capacity = 0, a->heads = moved(a->heads); }},
      {"heads[0].struct_size", "= 0", [](auto* a) { a->heads[0].struct_size = 0; }},
      {"heads[0].struct_size", "= 0", [](auto* a) { a->capacity = 1, a->heads[0].struct_size = 0; }},
      {"heads[1].struct_size", "= 47", [](auto* a) { a->heads[1].struct_size = 47; }},
      {"capacity", "-1", [](auto* a) { a->capacity = -1; }},
      {"n_heads", "NULL", [](auto* a) { a->n_heads = nullptr; }},
      {"n_heads", "not aligned", [](auto* a) { a->n_heads = moved(a->n_heads); }},
      {"n_layers", "NULL", [](auto* a) { a->n_layers = nullptr; }},
      {"n_layers", "not aligned", [](auto* a) { a->n_layers = moved(a->n_layers); }},
      {"path", "NULL", [](auto* a) { a->path = nullptr; }},
      {"path", "\"\" is empty", [](auto* a) { a->path = ""; }},
  });
}

void bad_options_are_refused(void**) {
  static tandem_pattern_file_options options;
  const auto with = [](std::function<void(tandem_pattern_file_options&)> change) {
    return [change](Arguments* a) {
      options = TANDEM_PATTERN_FILE_OPTIONS_INIT;
      change(options);
      a->options = &options;
    };
  };
  expect_refused({
      {"options", "not aligned", [](auto* a) { a->options = moved(&options); }},
      {"struct_size", "= 39", with([](auto& o) { o.struct_size = 39; })},
      {"reserved", "= 1", with([](auto& o) { o.reserved = 1; })},
      {"group_size", "= -1", with([](auto& o) { o.group_size = -1; })},
      {"group_size", "= 4097 is neither 0, the default, nor from 1 to 4096", with([](auto& o) { o.group_size = 4097; })},
      {"threshold", "= -0.5", with([](auto& o) { o.threshold = -0.5; })},
      {"threshold", "nan", with([](auto& o) { o.threshold = NAN; })},
      {"threshold", "inf", with([](auto& o) { o.threshold = INFINITY; })},
      {"sink_tokens", "= -2", with([](auto& o) { o.sink_tokens = -2; })},
      {"window_tokens", "= -2", with([](auto& o) { o.window_tokens = -2; })},
      {"window_tokens", "= 0 is neither -1, the default, nor from 1 to 2147483647",
       with([](auto& o) { o.window_tokens = 0; })},
      {"window_tokens", "= 2147483648", with([](auto& o) { o.window_tokens = int64_t{1} << 31; })},
  });
}

// Writes nothing if there is not enough room for all patterns. Larger structs of newer callers have their own stride.
void room_and_stride(void**) {
  const std::string path = write_file("0.5 0.25 0.75");
  std::vector<tandem_head_pattern> heads(2, TANDEM_HEAD_PATTERN_INIT);
  int64_t n_heads = 0, n_layers = 0;
  OK(tandem_patterns_read, heads.data(), 2, &n_heads, &n_layers, path.c_str(), nullptr);
  assert_true(n_heads == 3 && n_layers == 1 && heads[0].kinds == 0 && heads[1].kinds == 0);

  struct Newer {
    tandem_head_pattern known;
    int64_t more;
  };
  std::vector<Newer> newer(4, {TANDEM_HEAD_PATTERN_INIT, 0});
  for (Newer& one : newer) one.known.struct_size = sizeof one;
  OK(tandem_patterns_read, &newer[0].known, 4, &n_heads, &n_layers, path.c_str(), nullptr);
  const uint32_t kinds[] = {kFull, kAShape, kFull, 0};
  for (size_t i = 0; i < newer.size(); ++i) {
    assert_int_equal(newer[i].known.kinds, kinds[i]);
    assert_true(newer[i].known.struct_size == sizeof(Newer) && newer[i].more == 0);
  }
}

// ---- published files ----

// Returns whether the file exists. Tests without it skip before anything else, because skip() runs no destructors.
bool has_published(const char* name) {
  const char* folder = std::getenv("TANDEM_TEST_DATA");
  const bool is_there = folder != nullptr && std::ifstream(std::string(folder) + "/head_patterns/" + name).good();
  if (!is_there) print_message("skipped: $TANDEM_TEST_DATA/head_patterns/%s is not there\n", name);
  return is_there;
}

Heads read_published(const std::string& name) {
  return read_path(std::string(std::getenv("TANDEM_TEST_DATA")) + "/head_patterns/" + name);
}

std::vector<int64_t> full_heads(const Heads& all, int64_t layer) {
  std::vector<int64_t> full;
  for (int64_t head = 0; head < 8; ++head)
    if (all.at(layer, head).kinds == kFull) full.push_back(head);
  return full;
}

constexpr const char* kDuoAttention = "duoattention-llama-3-8b-1048k.tsv";
void golden_duoattention(void**) {
  if (!has_published(kDuoAttention)) skip();
  const Heads all = read_published(kDuoAttention);
  assert_true(all.n_layers == 32 && all.heads.size() == 32 * 8);
  assert_true(full_heads(all, 5) == (std::vector<int64_t>{1, 2, 4, 7}));
  assert_int_equal(full_heads(all, 15).size(), 5);
  assert_int_equal(full_heads(all, 25).size(), 5);
}

constexpr const char* kLlama = "minference-llama-3-8b-262k.json";
void golden_minference_llama(void**) {
  if (!has_published(kLlama)) skip();
  const Heads all = read_published(kLlama);
  assert_true(all.n_layers == 32 && all.heads.size() == 32 * 32);
  std::map<std::pair<int64_t, int64_t>, int> counts;
  for (const tandem_head_pattern& head : all.heads) {
    assert_int_equal(head.kinds, kSlash);
    ++counts[{head.vertical_tokens, head.slash_tokens}];
  }
  const std::map<std::pair<int64_t, int64_t>, int> wanted = {
      {{1000, 6096}, 473}, {{30, 800}, 278}, {{100, 800}, 153}, {{3500, 100}, 89}, {{500, 700}, 31}};
  assert_true(counts == wanted);
}

constexpr const char* kPhi = "minference-phi-3-mini-128k.json";
void golden_minference_phi(void**) {
  if (!has_published(kPhi)) skip();
  const Heads all = read_published(kPhi);
  assert_true(all.n_layers == 32 && all.heads.size() == 32 * 32);
  assert_int_equal(std::count_if(all.heads.begin(), all.heads.end(), [](const auto& head) { return head.kinds == kAShape; }),
                   43);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(json_is_read),
      cmocka_unit_test(gates_are_read),
      cmocka_unit_test(bad_json_is_refused),
      cmocka_unit_test(bad_sizes_are_refused),
      cmocka_unit_test(bad_gates_are_refused),
      cmocka_unit_test(files_that_cannot_be_read),
      cmocka_unit_test(bad_pointers_are_refused),
      cmocka_unit_test(bad_options_are_refused),
      cmocka_unit_test(room_and_stride),
      cmocka_unit_test(golden_duoattention),
      cmocka_unit_test(golden_minference_llama),
      cmocka_unit_test(golden_minference_phi),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
