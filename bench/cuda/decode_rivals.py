#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Decode by PyTorch's attention: microseconds a call of its cuDNN and flash paths, for the lines of decode_bench.

usage: decode_rivals.py [lengths [batches]]     lists with commas

32 query heads and 8 KV heads of 128, bf16, calls of a graph that rotate over many times the cache of the second level. In the
lines "+rows" two copies write the new token's rows of K and V before each call, as a decode step does: for the lines of
decode_call_bench.
"""

import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

CALLS, REPLAYS = 32, 9


def time_of(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    times = []
    for _ in range(REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times[2:])


def main():
    words = lambda i, text: [int(word) for word in (sys.argv[i] if len(sys.argv) > i else text).split(",")]
    for batch in words(2, "1,16"):
        for length in words(1, "4096,16384,65536,131072,262144"):
            n_bytes = batch * length * 8 * 128 * 2 * 2
            if batch * length > 4 << 20:
                continue
            n_layers = min(CALLS, max(2, int(600e6 / n_bytes) + 1))
            layers = [
                [torch.randn(batch, 8, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
                for _ in range(n_layers)
            ]
            q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
            row = torch.randn(batch, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
            cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
            for name, backend, writes in (("cudnn", cudnn, False), ("flash", flash, False), ("cudnn+rows", cudnn, True)):
                def call(i):
                    k, v = layers[i % n_layers]
                    if writes:
                        k[:, :, -1:].copy_(row)
                        v[:, :, -1:].copy_(row)
                    with sdpa_kernel([backend]):
                        return scaled_dot_product_attention(q, k, v, enable_gqa=True)
                try:
                    us = time_of(call)
                    print(f"{name:10} bf16  {length:7} x {batch:2} {us:9.2f} us {n_bytes / us * 1e-3:7.0f} GB/s", flush=True)
                except RuntimeError as error:
                    print(f"{name:10} bf16  {length:7} x {batch:2} {str(error).splitlines()[0][:80]}", flush=True)


if __name__ == "__main__":
    main()
