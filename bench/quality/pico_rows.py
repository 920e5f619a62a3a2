# SPDX-License-Identifier: MIT
"""Computes queries and keys of the model pico in PyTorch and f32, on any device.

    model = Pico(device)                       # YaRN stretches it to longer texts: Pico(device, yarn=4)
    rows = model.forward(ids)                  # Rows: q [L, n, H, d], k and v [L, n, G, d], logits of the last token
    more = model.forward(question, rows)       # continues after `rows`; returns only the new rows

Positions are the true ones. Attention is dense.
"""
import json
import math
import pathlib
import sys
from dataclasses import dataclass

import torch
from torch.nn import functional

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "models" / "pico"
TRAINED = 16384  # tokens
sys.path.insert(0, str(ROOT / "test" / "reference"))
from pico_reference import load_safetensors  # noqa: E402

_CHUNK = 2048  # queries that attend earlier rows in one computation


@dataclass(frozen=True)
class Rows:
    """The results of a pass.

    Attributes
    ----------
    q, k, v : Tensor
        [n_layers, n, heads, d]; q and k are rotated.
    logits : Tensor
        [n, 256], of the requested tokens.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    logits: torch.Tensor


def yarn_frequencies(dim: int, theta: float, factor: float, trained: int = TRAINED) -> tuple[torch.Tensor, float]:
    """Returns frequencies [dim / 2] and the factor of queries and keys, by YaRN (arXiv 2309.00071) as in Transformers."""
    def place_of(n_turns: float) -> float:
        return dim * math.log(trained / (n_turns * 2 * math.pi)) / (2 * math.log(theta))

    steps = torch.arange(dim // 2, dtype=torch.float64)
    plain = theta ** (-2 * steps / dim)
    if factor == 1:
        return plain, 1.0
    low, high = max(math.floor(place_of(32)), 0), min(math.ceil(place_of(1)), dim - 1)
    stretched = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)  # 1: stretched by the whole factor
    return plain * (1 - stretched) + plain / factor * stretched, 0.1 * math.log(factor) + 1


class Pico:
    """The model.

    Parameters
    ----------
    device : str
    yarn : float
        Factor by which positions are stretched; 1: as trained.
    """

    def __init__(self, device: str = "cpu", yarn: float = 1.0) -> None:
        self.config = json.loads((FOLDER / "config.json").read_text())
        self._weights = {name.removeprefix("model."): torch.tensor(array, device=device)
                         for name, array in load_safetensors(FOLDER / "model.safetensors").items()}
        self.device, self.dim, self.n_layers = device, self.config["head_dim"], self.config["num_hidden_layers"]
        self.n_heads, self.n_kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self._frequencies, self._scale = yarn_frequencies(self.dim, self.config["rope_theta"], yarn)

    def _rotated(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """Rotates rows [n, heads, d] by pairs of halves."""
        angle = (torch.arange(first, first + len(rows), dtype=torch.float64)[:, None] * self._frequencies)[:, None]
        cos, sin = ((turn(angle) * self._scale).float().to(rows.device) for turn in (torch.cos, torch.sin))
        a, b = rows.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self._weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attends all keys with the newest queries. Returns [n, H * d]."""
        group, n_before = self.n_heads // self.n_kv_heads, len(k) - len(q)
        q, k, v = q.transpose(0, 1), *(rows.repeat_interleave(group, 1).transpose(0, 1) for rows in (k, v))
        if n_before == 0:
            o = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            return o.transpose(0, 1).flatten(1)
        parts = []
        for first in range(0, q.shape[1], _CHUNK):
            part = q[:, first:first + _CHUNK]
            places = torch.arange(n_before + first, n_before + first + part.shape[1], device=q.device)
            seen = torch.arange(k.shape[1], device=q.device) <= places[:, None]
            parts.append(functional.scaled_dot_product_attention(part, k, v, attn_mask=seen))
        return torch.cat(parts, 1).transpose(0, 1).flatten(1)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, before: Rows | None = None, n_logits: int = 1) -> Rows:
        """Runs ids [n], which are the first tokens or follow those of `before`."""
        first = 0 if before is None else before.k.shape[1]
        x = self._weights["embed_tokens.weight"][ids.to(self.device)]
        made: list[list[torch.Tensor]] = [[], [], []]
        for layer_idx in range(self.n_layers):
            def product(rows: torch.Tensor, name: str, layer_idx: int = layer_idx) -> torch.Tensor:
                return functional.linear(rows, self._weights[f"layers.{layer_idx}.{name}.weight"])

            h = self._norm(x, f"layers.{layer_idx}.input_layernorm")
            q, k, v = (product(h, f"self_attn.{name}_proj").unflatten(-1, (-1, self.dim)) for name in "qkv")
            q, k = self._rotated(q, first), self._rotated(k, first)
            for rows, new in zip(made, (q, k, v), strict=True):
                rows.append(new)
            if before is not None:
                k, v = torch.cat([before.k[layer_idx], k]), torch.cat([before.v[layer_idx], v])
            x = x + product(self._attend(q, k, v), "self_attn.o_proj")
            h = self._norm(x, f"layers.{layer_idx}.post_attention_layernorm")
            x = x + product(functional.silu(product(h, "mlp.gate_proj")) * product(h, "mlp.up_proj"), "mlp.down_proj")
        logits = functional.linear(self._norm(x[-n_logits:], "norm"), self._weights["embed_tokens.weight"])
        return Rows(*(torch.stack(rows) for rows in made), logits)
