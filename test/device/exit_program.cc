// SPDX-License-Identifier: MIT
// exit_program HOW DELAY_NS N_CALLS [MODULE]: a program that ends while its device still has work to do. The device is the
// stand-in, which ends with the program, or that of the CUDA module. The program releases what HOW says and returns from
// main() at once. It is killed if it hangs.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "device/step_runner.h"

// Objects that are not released here are lost on purpose.
extern "C" int __lsan_is_turned_off();
extern "C" int __lsan_is_turned_off() { return 1; }

using namespace tandem_test;

namespace {

std::unique_ptr<Side> of_static_destructors;  // destroyed after the functions that main() registers with exit()

std::string module_path = STAND_IN_MODULES "/libtandem-standin.so";
bool is_cuda = false;

tandem_engine* open_engine(const tandem_engine_options& given) {
  tandem_engine_options options = given;
  options.backend_path = module_path.c_str();
  if (is_cuda) options.backend = "cuda";
  tandem_engine* engine = nullptr;
  OK(tandem_engine_create, &engine, &options);
  return engine;
}

void* create_stream() {
  tandem::DeviceError error;
  void* stream = nullptr;
  device->must(device->table->create_stream(device->self, &stream, &error), error);
  return stream;
}

// Gives the stream so much work that later operations wait about `ns`. A GPU copies about two bytes a nanosecond within its
// memory.
void keep_busy(void* stream, int64_t ns) {
  constexpr int64_t kBytes = int64_t{1} << 29;
  if (!is_cuda) return controls.set_delay(ns);
  if (ns == 0) return;
  tandem::DeviceError error;
  auto* const memory = static_cast<std::byte*>(device->allocate(2 * kBytes));
  for (int64_t left = 2 * ns; left > 0; left -= kBytes)
    device->must(device->table->copy(device->self, memory, memory + kBytes, std::min(left, kBytes), stream, &error), error);
}

// One call in each layer, on the device. Their memory is never released, because only the library's behaviour is tested.
struct Calls {
  Call first, second;

  Calls(int64_t n_tokens, int64_t seed) : first(n_tokens, seed), second(n_tokens, seed + 10) {
    first.to_device();
    second.to_device();
  }
  void attend(const Side& side, void* stream, int32_t n_layers = 2) {
    tandem_test::attend(side, first, 0, stream);
    if (n_layers > 1) tandem_test::attend(side, second, 1, stream);
  }
  void begin_step(const Side& side, void* stream, int32_t n_layers) {
    const int64_t q_len = 1;
    OK(tandem_step_begin, side.session, &side.sequence, &q_len, 1, stream);
    attend(side, stream, n_layers);
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const std::string how = argv[1];
  is_cuda = argc > 4;
  if (is_cuda) module_path = argv[4];
  if (is_cuda && how == "lost") return 2;  // a GPU cannot be lost on request
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  alarm(60);
  device = std::make_unique<tandem::test::OpenDevice>(module_path.c_str());
  if (!is_cuda) controls.end_with_process();
  make_engine = open_engine;
  auto side = std::make_unique<Side>(true, how == "hgca" ? "hgca" : "all", 0, 2);
  void* const stream = create_stream();
  auto &prompt = *new Calls(kPrompt, 1), &one = *new Calls(1, 50);
  prompt.attend(*side, stream);
  one.attend(*side, stream);
  one.begin_step(*side, stream, 2);
  OK(tandem_step_end, side->session, stream);
  OK(tandem_engine_drain, side->engine, -1);  // now all memory exists that the later calls need
  keep_busy(stream, std::atoll(argv[2]));
  for (int64_t i = 0; i < std::atoll(argv[3]); ++i) one.attend(*side, stream);
  if (how == "open" || how == "closed") one.begin_step(*side, stream, 1);  // a layer is missing
  if (how == "closed") OK(tandem_step_end, side->session, stream);
  if (how == "lost") controls.lose_device();
  (void)device.release();  // the program's own device
  if (how == "session")
    tandem_session_release(side.release()->session);
  else if (how == "nothing" || how == "open")
    (void)side.release();
  else if (how == "static")
    of_static_destructors = std::move(side);
  return 0;  // otherwise everything is released
}
