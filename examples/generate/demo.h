// SPDX-License-Identifier: MIT
// The five things tandem-demo does. Each prints a table on stdout, or JSON, and draws what there is to draw.
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
  int64_t n_depths = 0, n_numbers = 0;  // of --passkey and --numbers
  int64_t text_offset = 200000, n_decode = 0;
  std::vector<double> betas = {0.25, 0.5, 1, 2}, windows = {5, 12.5, 25, 50};  // windows: % of the context
  // --loss: the engine's pair of types alone.
  bool one_pair = false;
  bool json = false;
};

// Several facts in one text, asked one after another, the policies side by side.
Failure run_demo(const DemoOptions& options, Runtime* runtime);
// One pass key in a text, at n_depths places in turn.
Failure run_passkey(const DemoOptions& options, Runtime* runtime);
// n_numbers named numbers in one text.
Failure run_numbers(const DemoOptions& options, Runtime* runtime);
// Bits per byte against bytes read, over betas and windows.
Failure run_curve(const DemoOptions& options, Runtime* runtime);

// Divergence and bits per byte of every storage type, or of one pair, against f16; opens runtimes of its own.
Failure run_loss(const DemoOptions& options);

// `context` bytes and the one after them, from --offset on: what --curve and --loss score.
Failure slice_text(const std::string& file, const std::string& name, const DemoOptions& options, std::string_view* text);

// Shared by them: n_bytes of the text that facts are hidden in, the place of a picture, the end of a report.
Failure load_haystack(const DemoOptions& options, int64_t n_bytes, std::string* text);
Failure picture_path(const DemoOptions& options, const char* name, std::string* path);
// Refuses a place where that picture cannot be written, before hours have gone into it.
Failure check_picture_place(const DemoOptions& options, const char* name);
// Where it is false, stderr says why: stdout may be JSON.
bool draws_pictures(const DemoOptions& options);
void print_contestants(const std::vector<Contestant>& contestants);
std::string contestants_json(const std::vector<Contestant>& contestants);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_DEMO_H_
