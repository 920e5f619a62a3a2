#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs a prompt in chunks through a model of Transformers with a TandemCache, and prints seconds by policy, taken in turns.

  prompt_through_transformers.py [--tokens 32768] [--chunk 4096] [--layers 8] [--window 4096] [--rounds 3] [--module FILE]

The model has the shapes of Llama-3-8B (4,096 dims, 32 query heads and 8 KV heads of 128) and random weights in bf16, on a GPU.
Before anything is printed, the hidden states of the last chunk under "hgca" are compared with those under "all", as a prompt
attends every key under both. "first token" is the decode after the prompt, in which "hgca" judges the keys.
"""
import argparse
import statistics
import time

import torch
import transformers

import tandem
from tandem.transformers import TandemCache


def model_of(n_layers):
    config = transformers.LlamaConfig(vocab_size=1024, hidden_size=4096, intermediate_size=14336, num_hidden_layers=n_layers,
                                      num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=1 << 20)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return transformers.LlamaModel._from_config(config, attn_implementation="tandem").eval()


def run(model, engine, policy, args, ids):
    past = TandemCache(args.window, engine=engine, policy=policy)
    times = []
    for first in range(0, args.tokens, args.chunk):
        begin = time.perf_counter()
        with torch.no_grad():
            last = model(ids[:, first:first + args.chunk], past_key_values=past, use_cache=True).last_hidden_state
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    decodes = []
    for _ in range(4):
        begin = time.perf_counter()
        with torch.no_grad():
            model(ids[:, :1], past_key_values=past, use_cache=True)
        torch.cuda.synchronize()
        decodes.append(time.perf_counter() - begin)
    return sum(times), decodes[0], statistics.median(decodes[1:]), last.float()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 32768), ("chunk", 4096), ("layers", 8), ("window", 4096), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--module", default=None, help="path of the CUDA module")
    args = parser.parse_args()
    model = model_of(args.layers)
    engine = tandem.Engine(backend="cuda", **({"backend_path": args.module} if args.module else {}))
    ids = torch.randint(0, 1024, (1, args.tokens), device="cuda")
    figures, outputs = {"all": [], "hgca": []}, {}
    for _ in range(args.rounds + 1):  # the first round warms up
        for policy, rows in figures.items():
            *times, outputs[policy] = run(model, engine, policy, args, ids)
            rows.append(times)
    far = (outputs["hgca"] - outputs["all"]).norm() / outputs["all"].norm()
    assert far < 0.02, f"relative distance of hidden states: {far:.2e}"
    middle = {policy: [statistics.median(column) for column in zip(*rows[1:])] for policy, rows in figures.items()}
    for policy, (prompt, first, later) in middle.items():
        print(f"{policy:5} prompt {prompt:.3f} s, first token {first * 1e3:.1f} ms, later {later * 1e3:.1f} ms")
    print(f"hgca / all: prompt {middle['hgca'][0] / middle['all'][0]:.3f}, with the first token "
          f"{sum(middle['hgca'][:2]) / sum(middle['all'][:2]):.3f}; hidden states differ by {far:.1e}")


if __name__ == "__main__":
    main()
