// SPDX-License-Identifier: MIT
// The five modes of tandem-demo. Each prints a table or JSON on stdout, and may draw a picture.
#ifndef EXAMPLES_GENERATE_DEMO_H_
#define EXAMPLES_GENERATE_DEMO_H_

#include <string>
#include <string_view>
#include <vector>

#include "retrieval.h"
#include "runtime.h"

namespace generate {

struct DemoOptions {
  EngineOptions engine;
  PolicyOptions policy;
  std::string policies = "all,hgca";
  std::string text_file, curve_file, loss_file, picture_directory;
  int64_t context = 0, seed = 1;
  int64_t n_depths = 0, n_numbers = 0;  // numbers of --passkey and --numbers
  int64_t text_offset = 200000, n_decode = 0;
  std::vector<double> betas = {0.25, 0.5, 1, 2}, windows = {5, 12.5, 25, 50};  // windows: % of the context
  // --loss: test only the engine's pair of types.
  bool one_pair = false;
  bool json = false;
};

// Hides several facts in one text, asks for them one after another, and compares the policies.
Failure run_demo(const DemoOptions& options, Runtime* runtime);
// Hides one pass key in a text, at n_depths places in turn.
Failure run_passkey(const DemoOptions& options, Runtime* runtime);
// Hides n_numbers named numbers in one text.
Failure run_numbers(const DemoOptions& options, Runtime* runtime);
// Compares bits per byte with bytes read, over betas and windows.
Failure run_curve(const DemoOptions& options, Runtime* runtime);

// Measures divergence and bits per byte of every storage type, or of one pair, against f16. Opens its own runtimes.
Failure run_loss(const DemoOptions& options);

// Returns the part of a file that --curve and --loss score: `context` bytes from --offset on, and one more.
Failure slice_text(const std::string& file, const std::string& name, const DemoOptions& options, std::string_view* text);

// Shared by the modes: n_bytes of text to hide facts in, the path of a picture, the end of a report.
Failure load_haystack(const DemoOptions& options, int64_t n_bytes, std::string* text);
Failure picture_path(const DemoOptions& options, const char* name, std::string* path);
// Refuses a place where the picture cannot be written, before hours of work.
Failure check_picture_place(const DemoOptions& options, const char* name);
// Returns whether pictures are drawn. If not, says why on stderr, as stdout may be JSON.
bool draws_pictures(const DemoOptions& options);
void print_contestants(const std::vector<Contestant>& contestants);
std::string contestants_json(const std::vector<Contestant>& contestants);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_DEMO_H_
