// SPDX-License-Identifier: MIT
// Captured graphs of calls, the time of a replay, and lists of words, for tests and benches that have a CUDA runtime of
// their own.
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

// A captured graph of the work that `enqueue` enqueues on a stream.
class Graph {
 public:
  template <class Enqueue>
  explicit Graph(Enqueue enqueue) {
    cudaGraph_t graph;
    must(cudaStreamCreate(&stream_));
    must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    enqueue(stream_);
    must(cudaStreamEndCapture(stream_, &graph));
    must(cudaGraphInstantiate(&replay_, graph, 0));
    must(cudaGraphDestroy(graph));
  }
  ~Graph() {
    must(cudaGraphExecDestroy(replay_));
    must(cudaStreamDestroy(stream_));
  }
  Graph(const Graph&) = delete;

  void replay() const {
    must(cudaGraphLaunch(replay_, stream_));
    must(cudaStreamSynchronize(stream_));
  }

  // Returns the median time of a replay in microseconds.
  double time() const {
    constexpr int kReplays = 9, kUncounted = 2;
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin));
    must(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < kReplays + kUncounted; ++i) {
      must(cudaEventRecord(begin, stream_));
      must(cudaGraphLaunch(replay_, stream_));
      must(cudaEventRecord(end, stream_));
      must(cudaStreamSynchronize(stream_));
      float ms = 0;
      must(cudaEventElapsedTime(&ms, begin, end));
      if (i >= kUncounted) times.push_back(ms * 1e3f);
    }
    must(cudaEventDestroy(begin));
    must(cudaEventDestroy(end));
    std::sort(times.begin(), times.end());
    return static_cast<double>(times[times.size() / 2]);
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t replay_;
};

template <class Enqueue>
double time_of(Enqueue enqueue) {
  return Graph(enqueue).time();
}

inline std::vector<std::string> words_of(const char* list) {
  std::vector<std::string> words;
  std::stringstream stream(list);
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  return words;
}

}  // namespace tandem::test
