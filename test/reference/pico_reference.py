# SPDX-License-Identifier: MIT
"""The model pico (examples/models/pico) in NumPy and double precision, with the attention of the caller's choice.

    model = Pico()
    state = model.state(n_tokens)
    logits = model.forward(prompt, state)                       # dense attention, [n, 256]
    logits = model.forward(prompt[-1:], state, PrunedAttention(decode=record_of_layer))

An attention is a function of (layer_idx, q, k, v, positions): q [n, H, d] of the newest n tokens, k and v [n_tokens, G, d] of all
tokens so far, positions [n] of the queries. It returns o [n, H, d]. q and k are rotated, unless the model was made with
rotate=False.
"""
import json
import pathlib

import numpy as np
from pruning_reference import DEFAULT, Decoder, attend, prune_append

MODEL = pathlib.Path(__file__).resolve().parents[2] / "examples" / "models" / "pico"


def load_safetensors(path):
    """Returns {name: array}, with bf16 as f32. The file has the header's length, the header in JSON, then the rows."""
    data = pathlib.Path(path).read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    types = {"F32": np.float32, "U8": np.uint8, "BF16": np.uint16}
    arrays = {}
    for name, entry in json.loads(data[8:header_end]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[header_end + begin:header_end + end], types[entry["dtype"]])
        if entry["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = array.reshape(entry["shape"])
    return arrays


def dense_attention(layer_idx, q, k, v, positions):
    """Attends every key up to the query's own, in blocks of queries so that the logits fit in memory."""
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    o = np.empty_like(q)
    for first in range(0, len(q), 128):
        rows = slice(first, first + 128)
        n_seen = positions[rows][-1] + 1
        hidden = np.arange(n_seen) > positions[rows, None, None]  # [n_rows, 1, n_seen]
        for g in range(k.shape[1]):
            heads = slice(g * group, (g + 1) * group)
            logits = np.where(hidden, -np.inf, q[rows, heads] @ k[:n_seen, g].T * scale)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            o[rows, heads] = weights @ v[:n_seen, g] / weights.sum(-1, keepdims=True)
    return o


class PrunedAttention:
    """Attention of one sequence with pruned lists. A forward() of one token is a decode call, one of several tokens an
    append.

    append, decode: functions from a layer's index to its Record. None: calls of that kind are dense.
    """

    def __init__(self, append=None, decode=None, shared=False, options=DEFAULT):
        self.append, self.decode, self.shared, self.options = append, decode, shared, options
        self.decoders = {}

    def __call__(self, layer_idx, q, k, v, positions):
        scale = q.shape[2] ** -0.5
        pruning = {"sm_scale": scale, "shared": self.shared, "options": self.options}
        if len(q) == 1 and self.decode:
            if layer_idx not in self.decoders:
                self.decoders[layer_idx] = Decoder(self.decode(layer_idx), **pruning)
            return attend(q, k, v, self.decoders[layer_idx].step(q, k), sm_scale=scale)[0]
        self.decoders.pop(layer_idx, None)
        if len(q) == 1 or not self.append:
            return dense_attention(layer_idx, q, k, v, positions)
        blocks = prune_append(q, k, positions[0], self.append(layer_idx), **pruning)
        return attend(q, k, v, blocks, sm_scale=scale)[0]


class State:
    """Keys and values of all tokens so far."""

    def __init__(self, capacity, n_layers, n_kv_heads, dim):
        self.n_tokens = 0
        self.k, self.v = (np.zeros((n_layers, capacity, n_kv_heads, dim)) for _ in range(2))


class Pico:
    def __init__(self, folder=MODEL, rotate=True):
        self.config = json.loads((pathlib.Path(folder) / "config.json").read_text())
        self.weights = {name.removeprefix("model."): array.astype(np.float64)
                        for name, array in load_safetensors(pathlib.Path(folder) / "model.safetensors").items()}
        self.rotate = rotate
        self.n_layers, self.dim = self.config["num_hidden_layers"], self.config["head_dim"]
        self.n_heads, self.n_kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]

    def state(self, capacity):
        return State(capacity, self.n_layers, self.n_kv_heads, self.dim)

    def rope(self, rows, positions):
        """Applies rotary embedding by halves. rows [..., d], positions that broadcast to [...]."""
        half = self.dim // 2
        angle = np.asarray(positions, np.float64)[..., None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angle), np.sin(angle)
        a, b = rows[..., :half], rows[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, tokens, state, attention=dense_attention):
        """Adds tokens to the state. Returns the logits of the byte after each, [n, vocabulary]."""
        first = state.n_tokens
        positions = first + np.arange(len(tokens))
        state.n_tokens += len(tokens)
        x = self.weights["embed_tokens.weight"][np.asarray(tokens)]
        for layer_idx in range(self.n_layers):
            def product(rows, name, layer_idx=layer_idx):
                return rows @ self.weights[f"layers.{layer_idx}.{name}.weight"].T

            h = self._norm(x, f"layers.{layer_idx}.input_layernorm")
            q, k, v = (product(h, f"self_attn.{name}_proj").reshape(len(tokens), -1, self.dim) for name in "qkv")
            if self.rotate:
                q, k = self.rope(q, positions[:, None]), self.rope(k, positions[:, None])
            state.k[layer_idx, first:state.n_tokens], state.v[layer_idx, first:state.n_tokens] = k, v
            o = attention(layer_idx, q, state.k[layer_idx, :state.n_tokens], state.v[layer_idx, :state.n_tokens], positions)
            x = x + product(o.reshape(len(tokens), -1), "self_attn.o_proj")
            h = self._norm(x, f"layers.{layer_idx}.post_attention_layernorm")
            gate = product(h, "mlp.gate_proj")
            x = x + product(gate / (1 + np.exp(-gate)) * product(h, "mlp.up_proj"), "mlp.down_proj")
        return self._norm(x, "norm") @ self.weights["embed_tokens.weight"].T

    def _norm(self, x, name):
        mean_square = np.mean(x * x, -1, keepdims=True)
        return x / np.sqrt(mean_square + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]
