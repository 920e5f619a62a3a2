// SPDX-License-Identifier: MIT
// Where modules are looked for, the messages about unusable ones, and an engine with a usable one.
#include "lib/machine/device_module.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "device/stand_in.h"
#include "with_cmocka.h"

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Parts = std::vector<std::string>;

constexpr char kVariable[] = "TANDEM_BACKEND_PATH";
constexpr char kFile[] = "libtandem-standin.so";
const fs::path kFolder = TEST_FOLDER, kInstalled = TANDEM_MODULE_FOLDER;

fs::path own_folder() { return fs::read_symlink("/proc/self/exe").parent_path(); }

std::string module_of(const std::string& fault) { return STAND_IN_MODULES "/libtandem-standin" + fault + ".so"; }

// Copies the module into the folder. A copy has counts of its own, and its path tells which copy was used.
fs::path put_module(const fs::path& folder) {
  fs::create_directories(folder);
  fs::remove(folder / kFile);
  fs::copy_file(module_of(""), folder / kFile);
  return folder / kFile;
}

struct Attempt {
  int32_t status = TANDEM_OK;
  tandem_engine* engine = nullptr;
  std::string message, field;
  int64_t underlying = 0;

  Attempt() = default;
  explicit Attempt(const char* path, const char* name = stand_in::kName) {
    tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
    options.n_threads = 1;
    options.matmul_rows = 1;
    options.backend = name;
    options.backend_path = path;
    tandem_error* error = nullptr;
    status = tandem_engine_create(&engine, &options, &error);
    keep(error, tandem_error_message, tandem_error_field, tandem_error_underlying);
    tandem_error_release(error);
  }
  Attempt(const Attempt&) = delete;
  ~Attempt() { tandem_engine_release(engine); }

  template <typename Message, typename Field, typename Underlying>
  void keep(const tandem_error* error, Message message_of, Field field_of, Underlying underlying_of) {
    message = message_of(error);
    field = field_of(error);
    underlying = underlying_of(error);
  }

  // Asserts that the message is one line and has the parts in this order.
  void expect_refused(int32_t wanted, const char* wanted_field, const Parts& parts) const {
    size_t at = 0;
    bool good = status == wanted && field == wanted_field && engine == nullptr && message.find('\n') == std::string::npos;
    for (const std::string& part : parts) {
      const size_t found = good ? message.find(part, at) : std::string::npos;
      good = found != std::string::npos;
      at = found + part.size();
    }
    if (!good) fail_msg("%s, %s: %s", tandem_status_name(status), field.c_str(), message.c_str());
  }

  Json report() const {
    if (status != TANDEM_OK) fail_msg("%s", message.c_str());
    std::string text(1 << 16, '\0');
    assert_int_equal(tandem_engine_report(text.data(), text.size(), nullptr, engine, nullptr), TANDEM_OK);
    const Json json = Json::parse(text.c_str(), nullptr, false);
    if (json.is_discarded()) fail_msg("not JSON: %s", text.c_str());
    return json;
  }

  std::string module_path() const { return report()["backends"][1]["path"]; }
  Parts refused() const { return report()["backends"][1]["refused"]; }
};

const stand_in::Counts& counts_of(const std::string& path) {
  void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (module == nullptr) fail_msg("%s is not loaded", path.c_str());
  return *reinterpret_cast<stand_in::CountsFn>(dlsym(module, stand_in::kCountsSymbol))();
}

// Prepares a test: the variable is unset and no folder has a module.
int set_up(void**) {
  unsetenv(kVariable);
  fs::remove_all(kFolder);
  fs::create_directories(kFolder);
  fs::remove(own_folder() / kFile);
  fs::remove_all(own_folder() / "tandem");
  return chdir("/");
}

int tear_down(void**) {
  fs::remove(own_folder() / kFile);
  fs::remove_all(own_folder() / "tandem");
  return chdir("/");
}

void places_in_their_order(void**) {
  const fs::path places[] = {put_module(kFolder / "first"), put_module(kFolder / "second"), put_module(own_folder()),
                             put_module(own_folder() / "tandem"), put_module(kInstalled)};
  const std::string folders = (kFolder / "first").string() + ":" + (kFolder / "second").string();
  setenv(kVariable, folders.c_str(), 1);
  Parts absent;
  for (const fs::path& place : places) {
    {
      const Attempt attempt(nullptr);
      assert_string_equal(attempt.module_path().c_str(), place.c_str());
      assert_true(attempt.refused() == absent);
      assert_int_equal(counts_of(place).n_opened, 1);
    }
    fs::remove(place);
    absent.push_back(place.string() + ": No such file or directory");
  }
  Attempt(nullptr).expect_refused(TANDEM_ERROR_BACKEND, "backend", absent);
}

void without_the_variable(void**) {
  const std::string beside = (own_folder() / kFile).string(), installed = (kInstalled / kFile).string();
  const std::string first = "no module can be used: " + beside;
  Attempt(nullptr).expect_refused(TANDEM_ERROR_BACKEND, "backend", {first, installed});
  setenv(kVariable, "", 1);
  Attempt(nullptr).expect_refused(TANDEM_ERROR_BACKEND, "backend", {first, installed});
}

void paths_that_the_linker_would_change(void**) {
  const std::string path = put_module(kFolder / "$ORIGIN").string();
  Attempt(path.c_str()).expect_refused(TANDEM_ERROR_BACKEND, "backend_path", {path + ": has a $"});
}

void entries_that_are_not_absolute(void**) {
  put_module(kFolder / "here");
  put_module(kFolder / "here/below");
  assert_int_equal(chdir((kFolder / "here").c_str()), 0);
  setenv(kVariable, "below:.::./below:", 1);
  const Parts wanted = {
      "\"below\" in TANDEM_BACKEND_PATH: not an absolute path", "\".\" in TANDEM_BACKEND_PATH: not an absolute path",
      "\"\" in TANDEM_BACKEND_PATH: not an absolute path", "\"./below\" in TANDEM_BACKEND_PATH: not an absolute path",
      "\"\" in TANDEM_BACKEND_PATH: not an absolute path"};
  Attempt(nullptr).expect_refused(TANDEM_ERROR_BACKEND, "backend", wanted);
  // A usable module is reported together with the unusable ones.
  put_module(kFolder / "there");
  setenv(kVariable, ("below:/no/such/folder:" + (kFolder / "there").string() + ":.").c_str(), 1);
  const Attempt attempt(nullptr);
  assert_string_equal(attempt.module_path().c_str(), (kFolder / "there" / kFile).c_str());
  const Parts refused = {wanted[0], std::string("/no/such/folder/") + kFile + ": No such file or directory"};
  assert_true(attempt.refused() == refused);
}

// Modules are not looked for in the working directory, nor in the folders that the dynamic linker searches by itself.
void working_directory_is_no_place(void**) {
  put_module(kFolder);
  assert_int_equal(chdir(kFolder.c_str()), 0);
  const Attempt attempt(nullptr);
  attempt.expect_refused(TANDEM_ERROR_BACKEND, "backend", {own_folder().string(), kInstalled.string()});
  assert_true(attempt.message.find((kFolder / kFile).string()) == std::string::npos);
  for (const char* path : {kFile, "./libtandem-standin.so", "../device_module_test_files/libtandem-standin.so"})
    Attempt(path).expect_refused(TANDEM_ERROR_INVALID_ARGUMENT, "backend_path", {path, "not an absolute path"});
}

void a_given_path_is_the_only_one(void**) {
  const std::string good = put_module(kFolder / "good").string(), absent = (kFolder / "absent.so").string();
  put_module(kFolder / "other");
  setenv(kVariable, (kFolder / "other").c_str(), 1);
  {
    const Attempt attempt(good.c_str());
    assert_string_equal(attempt.module_path().c_str(), good.c_str());
    assert_true(attempt.refused().empty());
  }
  const Attempt attempt(absent.c_str());
  attempt.expect_refused(TANDEM_ERROR_BACKEND, "backend_path",
                         {"backend = \"standin\"", "backend_path", absent + ": No such file or directory"});
  assert_true(attempt.message.find("other") == std::string::npos);
}

void names(void**) {
  const std::string long_name(33, 'a'), longest(32, 'a');
  for (const char* name :
       {"../standin", "a/b", "..", ".", "Standin", "stand in", "st\xc3\xa4nd", "a.b", "%s", long_name.c_str()})
    Attempt(nullptr, name).expect_refused(TANDEM_ERROR_INVALID_ARGUMENT, "backend", {name, "is not a name"});
  Attempt(nullptr, "").expect_refused(TANDEM_ERROR_INVALID_ARGUMENT, "backend", {"\"\""});
  for (const char* name : {"-", "cuda_12-x", longest.c_str()})
    Attempt(nullptr, name)
        .expect_refused(TANDEM_ERROR_BACKEND, "backend", {std::string("/libtandem-") + name + ".so: No such"});
}

void files_of_other_kinds(void**) {
  const auto refused = [](const fs::path& path, const char* reason) {
    Attempt(path.c_str()).expect_refused(TANDEM_ERROR_BACKEND, "backend_path", {path.string() + ": " + reason});
  };
  refused(kFolder, "not a regular file");
  const fs::path pipe = kFolder / "pipe", text = kFolder / "text", empty = kFolder / "empty";
  assert_int_equal(mkfifo(pipe.c_str(), 0600), 0);
  alarm(60);
  refused(pipe, "not a regular file");
  alarm(0);
  std::ofstream(text) << std::string(5000, 'x');
  refused(text, "invalid ELF header");
  std::ofstream{empty};
  refused(empty, "file too short");
  refused("/dev/zero", "not a regular file");
  refused(text / "module.so", "Not a directory");
}

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A file that an interrupted copy left raises SIGBUS when the dynamic linker touches a missing page.
void truncated_modules(void**) {
  const std::string path = (kFolder / "cut.so").string();
  const uintmax_t whole = fs::file_size(module_of(""));
  std::set<uintmax_t> lengths = {0, 1, 15, 16, 63, 64, 65, 100, 119, 120, 4095, 4097, whole / 2 + 1, whole - 64, whole - 1};
  for (uintmax_t length = 4096; length < whole; length += 4096) lengths.insert(length);
  for (const uintmax_t length : lengths) {
    fs::remove(path);
    fs::copy_file(module_of(""), path);
    fs::resize_file(path, length);
    const std::string reason = length < 64 ? ": file too short: it has " : ": truncated: ";
    Attempt(path.c_str()).expect_refused(TANDEM_ERROR_BACKEND, "backend_path", {path + reason, std::to_string(length)});
  }
}

// A complete module with one field of its ELF header or of its first program header changed.
void modules_with_bad_headers(void**) {
  using Header = ElfW(Ehdr);
  const std::string whole = bytes_of(module_of(""));
  const std::string path = (kFolder / "changed.so").string();
  const auto refused = [&](const char* reason, auto change) {
    std::string bytes = whole;
    Header header;
    std::memcpy(&header, bytes.data(), sizeof header);
    change(header, reinterpret_cast<ElfW(Phdr)*>(bytes.data() + header.e_phoff));
    std::memcpy(bytes.data(), &header, sizeof header);
    fs::remove(path);  // make a new file: the dynamic linker may have loaded the old one
    std::ofstream(path, std::ios::binary) << bytes;
    Attempt(path.c_str()).expect_refused(TANDEM_ERROR_BACKEND, "backend_path", {path + ": " + reason});
  };
  using Segments = ElfW(Phdr)*;
  refused("invalid ELF header: not an ELF file", [](Header& header, Segments) { header.e_ident[EI_MAG3] = 'G'; });
  refused("invalid ELF header: its class is 7, not", [](Header& header, Segments) { header.e_ident[EI_CLASS] = 7; });
  refused("invalid ELF header: its byte order is 7, not", [](Header& header, Segments) { header.e_ident[EI_DATA] = 7; });
  refused("invalid ELF header: its machine is 8, not", [](Header& header, Segments) { header.e_machine = EM_MIPS; });
  refused("invalid ELF header: its type is 2, not 3", [](Header& header, Segments) { header.e_type = ET_EXEC; });
  refused("invalid ELF header: the size of a program header is 8, not",
          [](Header& header, Segments) { header.e_phentsize = 8; });
  refused("object file has no loadable segments", [](Header& header, Segments) { header.e_phnum = 0; });
  refused("truncated: the table of program headers takes", [](Header& header, Segments) { header.e_phoff = ~uint64_t{0}; });
  refused("truncated: the table of section headers takes", [](Header& header, Segments) { header.e_shoff = ~uint64_t{7}; });
  const auto load = [](const Header& header, Segments segments) {
    for (int i = 0; i < header.e_phnum; ++i)
      if (segments[i].p_type == PT_LOAD) return &segments[i];
    return segments;
  };
  refused("truncated: a segment takes",
          [&](Header& header, Segments segments) { load(header, segments)->p_filesz = ~uint64_t{0}; });
  refused("truncated: a segment takes", [&](Header& header, Segments segments) {
    load(header, segments)->p_offset = ~uint64_t{4095};  // offset and size together exceed 64 bits
    load(header, segments)->p_filesz = 8192;
  });
  Attempt(put_module(kFolder / "whole").c_str()).report();
}

void modules_of_no_use(void**) {
  const std::string size = std::to_string(sizeof(tandem::DeviceTable)),
                    less = std::to_string(sizeof(tandem::DeviceTable) - 8), abi = std::to_string(tandem::kDeviceAbi),
                    other = std::to_string(tandem::kDeviceAbi + 1);
  const struct {
    const char* fault;
    std::string reason;
  } kFaults[] = {
      {"_no_entry", "has no tandem_device_module()"},
      {"_no_table", "has no table for ABI " + abi},
      {"_other_abi", "its table is of ABI " + other + ", not " + abi},
      {"_short_table", "its table has " + less + " bytes, not " + size},
      {"_other_name", "its table is of abacus"},
      {"_null_function", "its table has no supports()"},
  };
  for (const auto& fault : kFaults) {
    const std::string path = module_of(fault.fault);
    const Attempt attempt(path.c_str());
    attempt.expect_refused(TANDEM_ERROR_BACKEND, "backend_path", {path + ": " + fault.reason});
    assert_int_equal(counts_of(path).n_opened, 0);
  }
}

// Every function of the table is checked, so each missing one is found.
void tables_with_gaps(void**) {
  using tandem::DeviceTable;
  constexpr size_t kFirst = offsetof(DeviceTable, n_devices), kStep = sizeof(void (*)());
  DeviceTable whole = {};
  whole.abi = tandem::kDeviceAbi;
  whole.struct_size = sizeof whole + 8;  // the table of a later version may be longer
  whole.name = "x";
  std::memset(reinterpret_cast<char*>(&whole) + kFirst, 1, sizeof whole - kFirst);
  assert_string_equal(tandem::table_refusal(&whole, "x").c_str(), "");
  std::set<std::string> reasons;
  for (size_t at = kFirst; at < sizeof whole; at += kStep) {
    DeviceTable table = whole;
    std::memset(reinterpret_cast<char*>(&table) + at, 0, kStep);
    reasons.insert(tandem::table_refusal(&table, "x"));
  }
  assert_int_equal(reasons.size(), (sizeof whole - kFirst) / kStep);
  assert_int_equal(reasons.count(""), 0);
  whole.name = nullptr;
  assert_string_equal(tandem::table_refusal(&whole, "x").c_str(), "its table is of no name");
}

void devices_of_no_use(void**) {
  const struct {
    const char* fault;
    int64_t underlying;
    Parts parts;
  } kFaults[] = {
      {"_no_devices", 0, {"there is no device"}},
      {"_devices_fail", 803, {"devices cannot be listed: the driver is?older than the module"}},
      {"_all_refused", 0, {"device 0 (Stand-in \"0\"): too old by 3 years; device 1 (Stand-in \"1\"): too old by 4 years"}},
      {"_open_fails", 2, {"device 0 (Stand-in \"0\") could not be opened: its memory is taken"}},
  };
  for (const auto& fault : kFaults) {
    const std::string path = module_of(fault.fault);
    const Attempt attempt(path.c_str());
    Parts parts = fault.parts;
    parts.insert(parts.begin(), "backend = \"standin\" from " + path + ": ");
    attempt.expect_refused(TANDEM_ERROR_BACKEND, "backend", parts);
    assert_int_equal(attempt.underlying, fault.underlying);
    assert_int_equal(counts_of(path).n_opened, 0);
    assert_int_equal(counts_of(path).n_closed, 0);
  }
}

void report_names_devices(void**) {
  const std::string path = module_of("");
  Json report = Attempt(path.c_str()).report();
  const auto device = [](int idx, const char* state) {
    return Json{{"backend", "standin"},
                {"device", idx},
                {"name", "Stand-in \"" + std::to_string(idx) + "\""},
                {"memory_bytes", (idx + 1) * (INT64_C(1) << 30)},
                {"n_multiprocessors", 1},
                {"compute_capability", 90 + idx},
                {"state", state}};
  };
  assert_true(report["devices"] == Json::array({device(0, "open"), device(1, "not asked for")}));
  const Json cpu = {{"name", "cpu"}, {"state", "ready"}}, cuda = {{"name", "cuda"}, {"state", "not asked for"}};
  const Json module = {{"name", "standin"}, {"state", "ready"}, {"path", path}, {"refused", Json::array()}};
  assert_true(report["backends"] == Json::array({cpu, module, cuda}));

  report = Attempt(module_of("_first_refused").c_str()).report();
  Json refused = device(0, "refused");
  refused["refusal"] = "too old by 3 years";
  assert_true(report["devices"] == Json::array({refused, device(1, "open")}));

  report = Attempt(nullptr, nullptr).report();
  assert_true(report["devices"] == Json::array());
  assert_true(report["backends"] == Json::array({cpu, cuda}));
}

// A path may have any byte. The report stays JSON and the message stays one line.
void odd_paths(void**) {
  const fs::path folder =
      kFolder / "q\" b\\ n\n t\x01 bad\xff\xc0\xaf\xed\xa0\x80\xf4\x90 good\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80 cut\xe2\x82";
  const std::string path = put_module(folder).string();
  const std::string bad = "\xef\xbf\xbd";
  std::string wanted = (kFolder / "q\" b\\ n\n t\x01 bad").string();
  for (int i = 0; i < 8; ++i) wanted += bad;
  wanted += " good\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80 cut" + bad + bad + "/" + kFile;
  assert_string_equal(Attempt(path.c_str()).module_path().c_str(), wanted.c_str());
  fs::remove(path);
  Attempt(path.c_str()).expect_refused(TANDEM_ERROR_BACKEND, "backend_path", {"n? t? bad", "No such file"});
}

// The device is open as long as any object holds the engine.
void closed_with_the_engine(void**) {
  const std::string path = put_module(kFolder).string();
  tandem_cache* cache = nullptr;
  tandem_model* model = nullptr;
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = layer.n_kv_heads = 1;
  layer.k_head_dim = 64;
  assert_int_equal(tandem_model_create(&model, &layer, 1, nullptr), TANDEM_OK);
  {
    const Attempt one(path.c_str()), two(path.c_str());
    assert_int_equal(counts_of(path).n_opened, 2);
    assert_int_equal(tandem_cache_create(&cache, one.engine, model, nullptr, nullptr), TANDEM_OK);
    assert_int_equal(counts_of(path).n_closed, 0);
  }
  const stand_in::Counts& counts = counts_of(path);
  assert_int_equal(counts.n_closed, 1);
  tandem_cache_release(cache);
  assert_int_equal(counts.n_closed, 2);
  tandem_model_release(model);
}

#ifdef TANDEM_LIBRARY  // a shared library exists
// Opens libtandem from the file, as a program with plugins does, and stores the outcome of making an engine.
void create_in(const char* library, Attempt* attempt) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) fail_msg("%s", dlerror());
  const auto function = [&](auto* like, const char* name) { return reinterpret_cast<decltype(like)>(dlsym(handle, name)); };
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.n_threads = 1;
  options.matmul_rows = 1;
  options.backend = stand_in::kName;
  tandem_engine* engine = nullptr;
  tandem_error* error = nullptr;
  attempt->status = function(tandem_engine_create, "tandem_engine_create")(&engine, &options, &error);
  attempt->keep(error, function(tandem_error_message, "tandem_error_message"),
                function(tandem_error_field, "tandem_error_field"),
                function(tandem_error_underlying, "tandem_error_underlying"));
  function(tandem_error_release, "tandem_error_release")(error);
  function(tandem_engine_release, "tandem_engine_release")(engine);
}

void beside_the_shared_library(void**) {
  const fs::path real = kFolder / "real", link = kFolder / "link";
  const std::string module = put_module(real).string();
  put_module(own_folder());  // the program's folder is another place
  fs::create_directories(link);
  fs::copy_file(TANDEM_LIBRARY, real / "libtandem.so");
  fs::create_symlink(real / "libtandem.so", link / "libtandem.so");
  Attempt attempt;
  create_in((link / "libtandem.so").c_str(), &attempt);
  if (attempt.status != TANDEM_OK) fail_msg("%s", attempt.message.c_str());
  assert_int_equal(counts_of(module).n_opened, 1);
  assert_int_equal(counts_of(module).n_closed, 1);
}

// The place of a library that was opened by a relative path is unknown after a change of directory.
void library_of_a_relative_path(void**) {
  const fs::path folder = kFolder / "relative";
  put_module(folder);
  fs::copy_file(TANDEM_LIBRARY, folder / "libtandem.so");
  assert_int_equal(chdir(folder.c_str()), 0);
  Attempt attempt;
  create_in("./libtandem.so", &attempt);
  attempt.expect_refused(TANDEM_ERROR_BACKEND, "backend",
                         {"beside the library: was opened as ./libtandem.so, which is not an absolute path"});
}
#endif

// Runs a set-user-ID copy of the program and checks that it ignores the variable. Returns false if the copy could not run
// with rights that its caller lacks.
bool setuid_program_ignores_the_variable() {
  const fs::path program = kFolder / "program", out = kFolder / "out", theirs = kFolder / "theirs";
  put_module(theirs);
  fs::copy_file("/proc/self/exe", program);
  assert_int_equal(chown(program.c_str(), 65534, 65534), 0);
  assert_int_equal(chmod(program.c_str(), 04755), 0);
  setenv(kVariable, theirs.c_str(), 1);
  if (std::system(("'" + program.string() + "' try >'" + out.string() + "'").c_str()) != 0) return false;
  std::ifstream file(out);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (text.rfind("euid 65534 ", 0) != 0) return false;
  if (text.find("TANDEM_BACKEND_PATH: ignored in a process that is setuid") == std::string::npos)
    fail_msg("%s", text.c_str());
  return true;
}

// A set-user-ID program does not let its caller choose which file it opens. skip() jumps, so nothing here may have a
// destructor.
void setuid_programs_ignore_the_variable(void**) {
  if (geteuid() != 0 || !setuid_program_ignores_the_variable()) skip();
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) {
    const Attempt attempt(nullptr);
    std::printf("euid %d %s\n", static_cast<int>(geteuid()), attempt.message.c_str());
    return 0;
  }
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const CMUnitTest tests[] = {
      TEST(places_in_their_order),
      TEST(paths_that_the_linker_would_change),
      TEST(without_the_variable),
      TEST(entries_that_are_not_absolute),
      TEST(working_directory_is_no_place),
      TEST(a_given_path_is_the_only_one),
      TEST(names),
      TEST(files_of_other_kinds),
      TEST(truncated_modules),
      TEST(modules_with_bad_headers),
      TEST(modules_of_no_use),
      TEST(tables_with_gaps),
      TEST(devices_of_no_use),
      TEST(report_names_devices),
      TEST(odd_paths),
      TEST(closed_with_the_engine),
#ifdef TANDEM_LIBRARY
      TEST(beside_the_shared_library),
      TEST(library_of_a_relative_path),
#endif
      TEST(setuid_programs_ignore_the_variable),
  };
#undef TEST
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
