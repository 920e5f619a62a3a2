# SPDX-License-Identifier: MIT
"""A real model in NumPy on the binding: prefill and decode of pico give the logits of Hugging Face Transformers."""
import json

import numpy as np
import pytest
from conftest import ROOT

import tandem

PICO = ROOT / "examples/models/pico"
MOST = 2e-3  # of logits: sums are in another order
pytestmark = pytest.mark.skipif(not PICO.is_dir(), reason="examples/models/pico is not there")


def safetensors(path):
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(raw, {"F32": "<f4", "U8": "u1", "I64": "<i8", "I32": "<i4"}[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return tensors


class Pico:
    def __init__(self, rope, **session):
        self.config = config = json.loads((PICO / "config.json").read_text())
        self.weights = safetensors(PICO / "model.safetensors")
        self.n_layers, self.dim = config["num_hidden_layers"], config["head_dim"]
        self.rope = rope
        layer = tandem.Layer(n_q_heads=config["num_attention_heads"], n_kv_heads=config["num_key_value_heads"],
                             k_head_dim=self.dim, rope=rope, rope_theta=config["rope_theta"])
        self.cache = tandem.Cache(tandem.Engine(n_threads=2), tandem.Model([layer] * self.n_layers), k_type="f32")
        self.session = tandem.Session(self.cache, **session)
        self.sequence = self.cache.create_sequence()

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def rotate(self, x, first):
        if self.rope != "caller":
            return x
        half = self.dim // 2
        angles = np.outer(np.arange(first, first + len(x)), self.config["rope_theta"] ** (-np.arange(half) / half))
        cos, sin = (np.float32(f(angles))[:, None] for f in (np.cos, np.sin))
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, tokens):
        """Returns the logits [len(tokens), 256]."""
        first, n = self.sequence.length(), len(tokens)
        x = self.weights["model.embed_tokens.weight"][tokens]
        with self.session.step(self.sequence, n):
            for i in range(self.n_layers):
                weight = lambda name: self.weights[f"model.layers.{i}.{name}.weight"].T
                h = self.norm(x, f"model.layers.{i}.input_layernorm.weight")
                q, k, v = ((h @ weight(f"self_attn.{name}_proj")).reshape(n, -1, self.dim) for name in "qkv")
                o = self.session.attend(self.sequence, self.rotate(q, first), self.rotate(k, first), v, layer_idx=i)
                x = x + o.reshape(n, -1) @ weight("self_attn.o_proj")
                h = self.norm(x, f"model.layers.{i}.post_attention_layernorm.weight")
                gate = h @ weight("mlp.gate_proj")
                x = x + gate / (1 + np.exp(-gate)) * (h @ weight("mlp.up_proj")) @ weight("mlp.down_proj")
        return self.norm(x, "model.norm.weight") @ self.weights["model.embed_tokens.weight"].T


@pytest.mark.parametrize("rope, session", [("caller", {}), ("halves", {}), ("halves", {"policy": "hgca", "window_tokens": 4096})])
def test_golden_logits(rope, session):
    golden = safetensors(PICO / "golden.safetensors")
    prompt, logits = golden["prompt"].astype(np.int64), golden["logits_last32"]
    assert prompt.shape == (1024,) and logits.shape == (32, 256)
    model = Pico(rope, **session)
    prefilled = model.forward(prompt[:1008])[-16:]
    decoded = [model.forward(prompt[at:at + 1]) for at in range(1008, 1024)]
    assert np.abs(np.concatenate([prefilled, *decoded]) - logits).max() <= MOST
    assert [model.sequence.length(i) for i in range(model.n_layers)] == [1024] * model.n_layers
