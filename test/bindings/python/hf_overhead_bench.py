# SPDX-License-Identifier: MIT
"""The extra cost of a layer's attention through the hook of Transformers, compared with Session.attend: one query over 512
keys.

hf_overhead_bench.py [ROUNDS CALLS]; host tensors, one thread. A pass has 32 layers, so the work done once a pass counts as
in a model. The results of both ways must agree before a time is printed. Times are the best of ROUNDS means.
"""
import sys
import time
import types

import numpy as np
import torch

import tandem
from tandem.transformers import TandemCache, tandem_attention

HEADS, KV_HEADS, DIM, KEYS, LAYERS = 8, 2, 64, 512, 32
CONFIG = types.SimpleNamespace(num_hidden_layers=LAYERS)
MODULES = [types.SimpleNamespace(layer_idx=i, config=CONFIG, is_causal=True) for i in range(LAYERS)]


def states(n_tokens, heads, seed):
    return torch.randn((1, heads, n_tokens, DIM), generator=torch.Generator().manual_seed(seed))


def forward(past, q, k, v, mask):
    outputs = []
    for i, module in enumerate(MODULES):
        # New tensors, as every layer of a model makes them.
        keys, values = past.update(k.view(k.shape), v.view(v.shape), i)
        outputs.append(tandem_attention(module, q, keys, values, mask)[0])
    return outputs


def best_of(rounds, calls, run):
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(calls):
            run()
        times.append((time.perf_counter_ns() - start) / calls / LAYERS / 1e3)
    return min(times)


def main():
    rounds, calls = (int(number) for number in sys.argv[1:3] or (20, 8))
    torch.set_num_threads(1)
    prompt = [states(KEYS, heads, seed) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    token = [states(1, heads, seed + 10) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    q, k, v = (states[0].transpose(0, 1).contiguous().numpy() for states in token)
    out = np.empty_like(q)
    with torch.no_grad(), tandem.Engine(n_threads=1) as engine:
        past = TandemCache(engine=engine)
        forward(past, *prompt, None)
        other = past.fork()
        session, sequence = past.session, other.sequences[0]

        def direct():
            with session.step(sequence, 1):
                for i in range(LAYERS):
                    session.attend(sequence, q, k, v, layer_idx=i, out=out)

        hooked = forward(past, *token, None)
        direct()
        assert all(np.array_equal(o[0].numpy(), out) for o in hooked)
        there = best_of(rounds, calls, direct)
        for name, mask in (("no mask", lambda n: None), ("a mask of padding", lambda n: torch.ones((1, n), dtype=torch.bool))):
            here = best_of(rounds, calls, lambda mask=mask: forward(past, *token, mask(past.get_seq_length() + 1)))
            print(f"{name:18} hook {here:6.2f} us, Session.attend {there:6.2f} us, more {here - there:6.2f} us a layer")


main()
