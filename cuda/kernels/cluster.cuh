// SPDX-License-Identifier: MIT
// Clusters of compute capability 9.0: blocks that run at once and read each other's shared memory. In a kernel that was
// launched without clusters, each block is a cluster of its own.
#pragma once

#include <cstdint>

namespace tandem::cuda {

struct Cluster {
  int rank = 0, n_blocks = 1;
};

__device__ inline Cluster this_cluster() {
  Cluster cluster;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(cluster.rank));
  asm("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(cluster.n_blocks));
#endif
  return cluster;
}

// A barrier among all threads of the cluster. Threads that have ended count as arrived. After the wait, every thread can
// read what the others stored to shared memory before they arrived.
__device__ inline void arrive_in_cluster(const Cluster& cluster) {
#if __CUDA_ARCH__ >= 900
  if (cluster.n_blocks > 1) asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster(const Cluster& cluster) {
#if __CUDA_ARCH__ >= 900
  if (cluster.n_blocks > 1) asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// Returns the address of the same place in the shared memory of the cluster's block `rank`.
template <class T>
__device__ inline const T* shared_of_block(const Cluster& cluster, const T* own, int rank) {
  if (cluster.n_blocks == 1) return own;
  uint64_t at = reinterpret_cast<uint64_t>(own);
#if __CUDA_ARCH__ >= 900
  asm("mapa.u64 %0, %1, %2;\n" : "=l"(at) : "l"(at), "r"(rank));
#endif
  return reinterpret_cast<const T*>(at);
}

}  // namespace tandem::cuda
