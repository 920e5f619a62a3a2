#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Prefill by PyTorch's attention (cuDNN, flash) and by flash-attn where it is installed, for the lines of prefill_bench.

usage: prefill_rivals.py [dims [queries [keys]]]     lists with commas

32 query heads and 8 KV heads, bf16, queries that are the last of the keys, causal. FLOPs count pairs that the mask leaves.
"""

import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def time_of(call, n_calls):
    times = []
    for i in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(n_calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / n_calls)
    return statistics.median(times[2:])


def by_torch(backend, q, k, v):
    bias = causal_lower_right(q.shape[2], k.shape[2])
    square = q.shape[2] == k.shape[2]

    def call():
        with sdpa_kernel([backend]):
            if square:
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)

    return call


def by_flash_attn(q, k, v):
    module = __import__("flash_attn_interface") if FLASH == 3 else __import__("flash_attn")
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return lambda: module.flash_attn_func(q, k, v, causal=True)


def find_flash_attn():
    for version, name in ((3, "flash_attn_interface"), (2, "flash_attn")):
        try:
            __import__(name)
            return version
        except ImportError:
            pass
    return 0


FLASH = find_flash_attn()


def main():
    words = lambda i, text: [int(word) for word in (sys.argv[i] if len(sys.argv) > i else text).split(",")]
    for dim in words(1, "128"):
        for q_len in words(2, "8192"):
            for n_keys in words(3, "8192,65536,131072"):
                q = torch.randn(1, 32, q_len, dim, device="cuda", dtype=torch.bfloat16)
                k, v = (torch.randn(1, 8, n_keys, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                flops = q_len * (n_keys - 0.5 * (q_len - 1)) * 32 * 4 * dim
                ways = [
                    ("cudnn", lambda: by_torch(SDPBackend.CUDNN_ATTENTION, q, k, v)),
                    ("flash", lambda: by_torch(SDPBackend.FLASH_ATTENTION, q, k, v)),
                ]
                if FLASH:
                    ways.append((f"fa{FLASH}", lambda: by_flash_attn(q, k, v)))
                for name, make in ways:
                    label = f"{name:6} bf16  {dim:3}  {q_len:6} x {n_keys:7}"
                    try:
                        us = time_of(make(), max(1, min(100, int(2e12 / flops))))
                        print(f"{label} {us:11.1f} us {flops / us * 1e-6:6.1f} TFLOP/s", flush=True)
                    except RuntimeError as error:
                        print(f"{label} {str(error).splitlines()[0][:80]}", flush=True)


if __name__ == "__main__":
    main()
