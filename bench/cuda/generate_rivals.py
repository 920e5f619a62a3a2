#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Decode steps of Llama-3-8B's shapes in PyTorch, for the lines of tandem-generate --device cuda --shapes llama-3-8b.

usage: generate_rivals.py [contexts [steps]]     contexts with commas

Random bf16 weights, keys and values, all on the device. A step goes from token to token: replay a graph, read the next token.
  transformers   LlamaForCausalLM with a static cache, which it attends under a mask
  sdpa-flash, sdpa-cudnn   the same layers in plain PyTorch, with attention over exactly the existing keys
"""

import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, DIM, FFN, VOCAB, THETA, EPS = 32, 4096, 32, 8, 128, 14336, 128256, 500000.0, 1e-5
ROOM = 64


def measure(name, context, steps, step):
    """step() maps the token in `token` to the next one and returns (token, logits), tensors that keep their addresses."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        token, logits = step()
    times = []
    for _ in range(steps + 3):
        begin = time.perf_counter()
        graph.replay()
        token.item()
        times.append((time.perf_counter() - begin) * 1e3)
    if not torch.isfinite(logits).all():
        raise RuntimeError("logits are not finite")
    mean = statistics.mean(times[3:])
    print(
        f"{name:12} {context:7} tokens  {statistics.median(times[3:]):8.3f} ms per step  {1e3 / mean:7.1f} tokens/s  "
        f"{torch.cuda.max_memory_allocated() * 1e-9:5.1f} GB",
        flush=True,
    )


class Transformers:
    def __init__(self):
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config = LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=Q_HEADS,
            num_key_value_heads=KV_HEADS, head_dim=DIM, vocab_size=VOCAB, rms_norm_eps=EPS, tie_word_embeddings=False,
            max_position_embeddings=1 << 20, rope_parameters={"rope_type": "default", "rope_theta": THETA},
        )
        self.config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config)
        self.model = model.to(torch.bfloat16).to_empty(device="cuda").eval()
        self.model.model.rotary_emb = LlamaRotaryEmbedding(self.config).to("cuda")
        for name, weight in self.model.named_parameters():
            weight.data.fill_(1) if "norm" in name else weight.data.normal_(0, 0.02)

    def run(self, context, steps):
        from transformers import StaticCache

        cache = StaticCache(config=self.config, max_cache_len=context + ROOM)
        cache.early_initialization(1, KV_HEADS, DIM, torch.bfloat16, torch.device("cuda"))
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(context)
        places = torch.arange(context + ROOM, device="cuda")
        token = torch.ones(1, 1, dtype=torch.long, device="cuda")

        def step():
            position = cache.layers[0].cumulative_length.reshape(1, 1)
            mask = (places <= position).reshape(1, 1, 1, -1)
            out = self.model(
                input_ids=token, attention_mask=mask, position_ids=position.clone(), past_key_values=cache, use_cache=True
            )
            token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
            return token, out.logits

        measure("transformers", context, min(steps, ROOM - 8), step)


class Plain:
    def __init__(self):
        random = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
        kv, q = KV_HEADS * DIM, Q_HEADS * DIM
        self.layers = [
            (random(q + 2 * kv, HIDDEN), random(HIDDEN, q), random(2 * FFN, HIDDEN), random(HIDDEN, FFN)) for _ in range(LAYERS)
        ]
        self.embedding, self.head = random(VOCAB, HIDDEN), random(VOCAB, HIDDEN)
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")

    def run(self, context, steps):
        kv_of = lambda: torch.empty(1, KV_HEADS, context + 1, DIM, dtype=torch.bfloat16, device="cuda").normal_()
        caches = [(kv_of(), kv_of()) for _ in range(LAYERS)]
        angle = context * THETA ** (-torch.arange(0, DIM, 2, device="cuda", dtype=torch.float32) / DIM)
        cos, sin = angle.cos().repeat(2).bfloat16(), angle.sin().repeat(2).bfloat16()
        rotate = lambda x: x * cos + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin
        token = torch.ones(1, dtype=torch.long, device="cuda")

        def step():
            x = self.embedding[token]
            for (qkv, out, gate_up, down), (keys, values) in zip(self.layers, caches):
                rows = linear(rms_norm(x, (HIDDEN,), self.norm, EPS), qkv).view(1, -1, 1, DIM)
                q, k = rotate(rows[:, :Q_HEADS]), rotate(rows[:, Q_HEADS : Q_HEADS + KV_HEADS])
                keys[:, :, context:] = k
                values[:, :, context:] = rows[:, Q_HEADS + KV_HEADS :]
                o = scaled_dot_product_attention(q, keys, values, enable_gqa=True)
                x = x + linear(o.reshape(1, -1), out)
                gate, up = linear(rms_norm(x, (HIDDEN,), self.norm, EPS), gate_up).chunk(2, -1)
                x = x + linear(silu(gate) * up, down)
            logits = linear(rms_norm(x, (HIDDEN,), self.norm, EPS), self.head)
            token.copy_(logits.argmax(-1))
            return token, logits

        for name, backend in (("sdpa-flash", SDPBackend.FLASH_ATTENTION), ("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel([backend]):
                measure(name, context, steps, step)


def main():
    contexts = [int(word) for word in (sys.argv[1] if len(sys.argv) > 1 else "4096,32768").split(",")]
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    for rival in (Plain, Transformers):
        model = rival()
        for context in contexts:
            torch.cuda.reset_peak_memory_stats()
            try:
                model.run(context, steps)
            except (RuntimeError, TypeError, ValueError) as error:
                print(f"{rival.__name__} {context}: {str(error).splitlines()[0][:160]}", flush=True)
            torch.cuda.empty_cache()
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
