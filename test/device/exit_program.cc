// SPDX-License-Identifier: MIT
// exit_program HOW DELAY_NS N_CALLS: a program that ends while the stand-in, which ends with it, has yet to do what it was
// asked for. It returns from main() at once, with what HOW says released, and is killed where it hangs.
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "device/step_runner.h"

// What is not released here is lost on purpose.
extern "C" int __lsan_is_turned_off();
extern "C" int __lsan_is_turned_off() { return 1; }

using namespace tandem_test;

namespace {

std::unique_ptr<Side> of_static_destructors;  // run after what is registered with exit() from main() on

// One call in each layer, on the device. Their memory is never given back: only what the library does is asked about.
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
  if (argc != 4) return 2;
  const std::string how = argv[1];
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  alarm(60);
  device = std::make_unique<tandem::test::OpenDevice>(STAND_IN_MODULES "/libtandem-standin.so");
  controls.end_with_process();
  auto side = std::make_unique<Side>(true, how == "hgca" ? "hgca" : "all", 0, 2);
  void* const stream = controls.create_stream();
  auto &prompt = *new Calls(kPrompt, 1), &one = *new Calls(1, 50);
  prompt.attend(*side, stream);
  one.attend(*side, stream);
  one.begin_step(*side, stream, 2);
  OK(tandem_step_end, side->session, stream);
  OK(tandem_engine_drain, side->engine, -1);  // there is everything now that what follows will need
  controls.set_delay(std::atoll(argv[2]));
  for (int64_t i = 0; i < std::atoll(argv[3]); ++i) one.attend(*side, stream);
  if (how == "open" || how == "closed") one.begin_step(*side, stream, 1);  // a layer is missing
  if (how == "closed") OK(tandem_step_end, side->session, stream);
  if (how == "lost") controls.lose_device();
  (void)device.release();  // of the program's own
  if (how == "session")
    tandem_session_release(side.release()->session);
  else if (how == "nothing" || how == "open")
    (void)side.release();
  else if (how == "static")
    of_static_destructors = std::move(side);
  return 0;  // else everything is released
}
