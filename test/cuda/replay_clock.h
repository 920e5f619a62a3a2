// SPDX-License-Identifier: MIT
// Time on the device, and lists of words, for benches.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace tandem::test {

inline void must(cudaError_t result) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(result));
  std::exit(1);
}

inline constexpr int kReplays = 9;

// Median time of a replay of what `enqueue` enqueues, in microseconds.
template <class Enqueue>
double time_of(Enqueue enqueue) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cudaEvent_t begin, end;
  must(cudaStreamCreate(&stream));
  must(cudaEventCreate(&begin));
  must(cudaEventCreate(&end));
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue(stream);
  must(cudaStreamEndCapture(stream, &graph));
  must(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<float> times;
  for (int i = 0; i < kReplays + 2; ++i) {
    must(cudaEventRecord(begin, stream));
    must(cudaGraphLaunch(replay, stream));
    must(cudaEventRecord(end, stream));
    must(cudaStreamSynchronize(stream));
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms * 1e3f);
  }
  std::sort(times.begin(), times.end());
  must(cudaGraphExecDestroy(replay));
  must(cudaGraphDestroy(graph));
  must(cudaStreamDestroy(stream));
  return static_cast<double>(times[times.size() / 2]);
}

inline std::vector<std::string> words_of(const char* list) {
  std::vector<std::string> words;
  std::stringstream stream(list);
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  return words;
}

}  // namespace tandem::test
