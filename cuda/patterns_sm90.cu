// SPDX-License-Identifier: MIT
// Probe kernels of head patterns for compute capability 9.0.
#include "cuda/kernels/wide_probes.cuh"

namespace tandem::cuda {

extern const WideProbeKernels kWideProbes[];
const WideProbeKernels kWideProbes[] = {
    {2, wide_probe_kernel<2, true>, wide_probe_kernel<2, false>},
    {4, wide_probe_kernel<4, true>, wide_probe_kernel<4, false>},
    {},
};

}  // namespace tandem::cuda
