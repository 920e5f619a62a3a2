// SPDX-License-Identifier: MIT
// malloc() and mmap() fail the N-th time, once or from then on, for many N during the life of a small engine. This includes
// requests of hwloc, oneDNN, libgomp and libstdc++. Each N has its own process, forked before there is an engine. After
// tandem_engine_create() no process may end and no answer may differ. Inside it, only hwloc, oneDNN and libgomp may end the
// process.
//
// TANDEM_TEST_PLACES: number of places that request memory to try, evenly spread; all if unset. Their number depends on the
// machine, because hwloc requests memory for each object that it finds. TANDEM_TEST_LISTS_DEATHS: prints each death.
#include <dlfcn.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <map>
#include <set>

#include "api_world.h"
#include "failing_memory.h"

using namespace tandem_test;

namespace {

constexpr int64_t kPrompt = 256;
constexpr int kHeads = 16, kDecodes = 2;
constexpr int kMostDeadlyOnce = 90, kMostDeadlyForEver = 200;  // of all places; docs/memory-failures.md
constexpr int64_t kAnswers = (kPrompt + kDecodes) * kHeads * kDim;

// Report of a child to its parent.
struct Report {
  failing_memory::Plan plan;
  const char* call = "";  // current call
  int64_t n_engine = 0;   // requests made by tandem_engine_create()
  int n_failed_calls = 0;
  char fault[256] = "";  // the error that the child found
  void* death[failing_memory::kMostFrames] = {};
  int n_death = 0;
  float answers[kAnswers] = {};
};

Report* report = nullptr;       // shared with the children
std::vector<float> q, k, v;     // of the prompt and the decoded tokens
bool lists = false;             // the child records the places of its requests
bool may_stay_refused = false;  // a call that fails twice ends the child normally
std::vector<float> want;        // answers without failures

[[noreturn]] void give_up(const char* call, const char* message) {
  std::snprintf(report->fault, sizeof report->fault, "%s: %s", call, message);
  _exit(1);
}

// Makes one call with failures armed. If it fails, calls it again with memory available.
template <typename Body>
void step(const char* name, const Body& body) {
  tandem_error* error = nullptr;
  report->call = name;
  report->plan.armed = true;
  int32_t status = body(&error);
  report->plan.armed = false;
  if (report->plan.n_refused > 0) report->plan.fails_at = 0;  // the failure has happened
  if (status != TANDEM_OK) {
    ++report->n_failed_calls;
    const bool typed = (status == TANDEM_ERROR_OUT_OF_MEMORY || status == TANDEM_ERROR_SYSTEM) &&
                       tandem_error_status(error) == status && tandem_error_message(error)[0] != '\0';
    if (!typed) give_up(name, tandem_error_message(error));
    tandem_error_release(error);
    error = nullptr;
    status = body(&error);
  }
  if (status != TANDEM_OK && may_stay_refused) _exit(0);
  if (status != TANDEM_OK) give_up(name, tandem_error_message(error));
}

tandem_tensor rows(float* data, int64_t first, int64_t n, int64_t n_heads) {
  tandem_tensor t = {};
  t.struct_size = sizeof t;
  t.dtype = TANDEM_F32;
  t.data = data + first * n_heads * kDim;
  t.n_dims = 3;
  t.shape[0] = n, t.shape[1] = n_heads, t.shape[2] = kDim;
  t.stride[0] = n_heads * kDim, t.stride[1] = kDim, t.stride[2] = 1;
  return t;
}

void live() {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.n_threads = 2;
  tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
  cache_options.k_type = cache_options.v_type = TANDEM_F32;
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = kHeads;
  layer.n_kv_heads = 1;
  layer.k_head_dim = kDim;
  step("tandem_engine_create", [&](auto e) { return tandem_engine_create(&engine, &options, e); });
  report->n_engine = report->plan.n_requests;
  step("tandem_model_create", [&](auto e) { return tandem_model_create(&model, &layer, 1, e); });
  step("tandem_cache_create", [&](auto e) { return tandem_cache_create(&cache, engine, model, &cache_options, e); });
  step("tandem_session_create", [&](auto e) { return tandem_session_create(&session, cache, nullptr, e); });
  step("tandem_sequence_create", [&](auto e) { return tandem_sequence_create(&sequence, cache, e); });
  int64_t first = 0;
  for (int i = 0; i <= kDecodes; ++i) {
    const int64_t n = i == 0 ? kPrompt : 1;
    const tandem_tensor tensors[] = {rows(q.data(), first, n, kHeads), rows(k.data(), first, n, 1),
                                     rows(v.data(), first, n, 1), rows(report->answers, first, n, kHeads)};
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &n;
    args.q = &tensors[0];
    args.k = &tensors[1];
    args.v = &tensors[2];
    args.o = &tensors[3];
    step(i == 0 ? "tandem_attend of a prompt" : "tandem_attend of a token",
         [&](auto e) { return tandem_attend(session, &args, e); });
    first += n;
  }
  const auto release = [](const char* name, const auto& body) { step(name, [&](auto) { return body(), TANDEM_OK; }); };
  release("tandem_session_release", [&] { tandem_session_release(session); });
  release("tandem_cache_release", [&] { tandem_cache_release(cache); });
  release("tandem_model_release", [&] { tandem_model_release(model); });
  release("tandem_engine_release", [&] { tandem_engine_release(engine); });
  report->call = "";
}

void note_death(int signal) {
  failing_memory::in_backtrace = true;
  report->n_death = backtrace(report->death, failing_memory::kMostFrames);
  ::signal(signal, SIG_DFL);
  raise(signal);
}

void note_exit() {
  if (*report->call != '\0') {
    failing_memory::in_backtrace = true;
    report->n_death = backtrace(report->death, failing_memory::kMostFrames);
  }
}

template <typename Body>
int status_of_child(const Body& body) {
  new (report) Report;
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  return status;
}

int status_with_failure(int64_t n, bool for_ever) {
  return status_of_child([&] {
    for (const int s : {SIGSEGV, SIGABRT, SIGBUS, SIGILL, SIGFPE}) signal(s, note_death);
    atexit(note_exit);
    if (freopen("/dev/null", "w", stderr) == nullptr) _exit(3);
    alarm(20);
    report->plan.fails_at = n;
    report->plan.for_ever = for_ever;
    report->plan.lists = lists;
    failing_memory::plan = &report->plan;
    live();
    for (int64_t i = 0; i < kAnswers && !want.empty(); ++i)
      if (!(std::fabs(report->answers[i] - want[static_cast<size_t>(i)]) < 1e-4f)) give_up("answers", "differ");
  });
}

std::string name_of(void* address) {
  Dl_info info = {};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "?";
  const char* slash = std::strrchr(info.dli_fname, '/');
  char text[160];
  std::snprintf(text, sizeof text, "%s!%s+0x%zx", slash == nullptr ? info.dli_fname : slash + 1,
                info.dli_sname != nullptr ? info.dli_sname : "",
                static_cast<size_t>(static_cast<char*>(address) -
                                    static_cast<char*>(info.dli_sname != nullptr ? info.dli_saddr : info.dli_fbase)));
  return text;
}

std::string trace(void* const* frames, int n) {
  std::string text;
  for (int i = 0; i < n; ++i) text += "      " + name_of(frames[i]) + "\n";
  return text;
}

// oneDNN 3 remembers that its first mapping of memory for machine code failed. The process can then create no engine, and
// each attempt says so.
bool is_kept_by_onednn() { return std::strstr(report->fault, "oneDNN had no memory for a matrix product") != nullptr; }

bool lists_deaths() { return std::getenv("TANDEM_TEST_LISTS_DEATHS") != nullptr; }

// Returns the child's violation, "" if there is none.
std::string fault_of(int status) {
  if (status == 0) return "";
  char head[400];
  std::snprintf(head, sizeof head, "%s: %s %d %s\n", report->call, WIFSIGNALED(status) ? "signal" : "exit",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), report->fault);
  return head + ("    refused here\n" + trace(report->plan.frames, report->plan.n_frames)) + "    ended here\n" +
         trace(report->death, report->n_death);
}

// Returns the library that requested the memory: the first one on the call stack above malloc() that is not the C or C++
// runtime.
std::string asking_library() {
  for (int i = 1; i < report->plan.n_frames; ++i) {
    const std::string name = name_of(report->plan.frames[i]), library = name.substr(0, name.find('!'));
    if (library.rfind("libc.so", 0) != 0 && library.rfind("libstdc++", 0) != 0 && library.rfind("api_library", 0) != 0)
      return library;
  }
  return "?";
}

// Returns the first request of every place, where a place is a distinct call stack.
std::vector<int64_t> first_requests(int64_t n_requests) {
  std::vector<int64_t> first;
  std::set<uint64_t> seen;
  for (int64_t n = 1; n <= n_requests; ++n)
    if (seen.insert(report->plan.places[n - 1]).second) first.push_back(n);
  return first;
}

// Returns the number of places to try.
size_t places_to_try(size_t n_places) {
  const char* const text = std::getenv("TANDEM_TEST_PLACES");
  return text == nullptr ? n_places : std::min<size_t>(n_places, std::max(1, std::atoi(text)));
}

void run_all(bool for_ever) {
  lists = true;
  assert_int_equal(status_with_failure(0, false), 0);
  lists = false;
  want.assign(report->answers, report->answers + kAnswers);
  const int64_t n_requests = report->plan.n_requests, n_engine = report->n_engine;
  assert_in_range(n_requests, 100, failing_memory::kMostRequests);
  const std::vector<int64_t> places = first_requests(n_requests);
  const size_t n_tried = places_to_try(places.size());
  int n_late = 0, n_refused = 0, n_deadly = 0;
  std::map<std::string, int> deadly;
  for (size_t t = 0; t < n_tried; ++t) {
    const int64_t request = places[t * places.size() / n_tried];
    const std::string fault = fault_of(status_with_failure(request, for_ever));
    n_refused += report->n_failed_calls > 0;
    if (fault.empty()) continue;
    ++n_deadly;
    ++deadly[is_kept_by_onednn() ? "libdnnl.so: refused for ever" : asking_library()];
    const bool is_late = request > n_engine || (*report->fault != '\0' && !is_kept_by_onednn());
    n_late += is_late;
    if (is_late || lists_deaths()) print_error("request %lld, %s", static_cast<long long>(request), fault.c_str());
  }
  print_message(
      "%s: %zu of %zu places tried (%lld requests, %lld in tandem_engine_create()): %d refused a call, %d ended the "
      "process\n",
      for_ever ? "from then on" : "once", n_tried, places.size(), static_cast<long long>(n_requests),
      static_cast<long long>(n_engine), n_refused, n_deadly);
  bool is_known = true;
  for (const auto& [library, n] : deadly) {
    print_message("    %d in %s\n", n, library.c_str());
    is_known = is_known && (library.rfind("libhwloc.", 0) == 0 || library.rfind("libdnnl.", 0) == 0 ||
                            library.rfind("libgomp.", 0) == 0);
  }
  assert_true(n_refused > 10);
  assert_true(is_known);
  assert_int_equal(n_late, 0);
  if (n_tried == places.size()) assert_true(n_deadly <= (for_ever ? kMostDeadlyForEver : kMostDeadlyOnce));
}

int64_t address_space() {
  int64_t n_pages = 0;
  std::FILE* statm = std::fopen("/proc/self/statm", "r");
  if (statm == nullptr || std::fscanf(statm, "%ld", &n_pages) != 1) return 0;
  std::fclose(statm);
  return n_pages * sysconf(_SC_PAGESIZE);
}

// Lowers the memory limit from more than an engine and its first products need down to nothing.
void test_limits(void**) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  skip();  // sanitizers map memory of their own
#endif
  int n_refused = 0, n_done = 0;
  for (int64_t bytes = 256 << 20; bytes >= 0; bytes -= bytes > (32 << 20) ? 16 << 20 : 1 << 19) {
    const int status = status_of_child([&] {
      for (const int s : {SIGSEGV, SIGABRT, SIGBUS, SIGILL, SIGFPE}) signal(s, note_death);
      alarm(60);
      const auto limit = static_cast<rlim_t>(address_space() + bytes);
      const rlimit limits{limit, limit};
      if (setrlimit(RLIMIT_AS, &limits) != 0) give_up("setrlimit", "failed");
      may_stay_refused = true;
      live();
    });
    const std::string fault = fault_of(status);
    if (!fault.empty()) fail_msg("%lld bytes: %s", static_cast<long long>(bytes), fault.c_str());
    n_refused += report->n_failed_calls > 0;
    n_done += report->n_failed_calls == 0;
  }
  print_message("%d limits refused a call, under %d everything was done\n", n_refused, n_done);
  assert_true(n_refused > 0 && n_done > 0);
}

void test_once(void**) { run_all(false); }
void test_for_ever(void**) { run_all(true); }

int set_up(void**) {
  void* frames[4];
  backtrace(frames, 4);  // loads the libraries that backtrace() needs
  report = static_cast<Report*>(mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  for (int64_t i = 0; i < (kPrompt + kDecodes) * kHeads * kDim; ++i) q.push_back(noise(i, 1));
  for (int64_t i = 0; i < (kPrompt + kDecodes) * kDim; ++i) k.push_back(noise(i, 2)), v.push_back(noise(i, 3));
  return report == MAP_FAILED;
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(test_once), cmocka_unit_test(test_for_ever), cmocka_unit_test(test_limits)};
  return cmocka_run_group_tests(tests, set_up, nullptr);
}
