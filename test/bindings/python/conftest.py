# SPDX-License-Identifier: MIT
"""Shared by the tests of the Python binding: a small world, and attention in double precision."""
import os
import pathlib
import subprocess

import numpy as np
import pytest

import tandem

ROOT = pathlib.Path(__file__).resolve().parents[3]
Q_HEADS, KV_HEADS, DIM = 4, 2, 64


def include_folder():
    """Returns the folder of the headers: as the environment says, in the checkout, or beside the installed library."""
    if given := os.environ.get("TANDEM_INCLUDE_DIR"):
        return pathlib.Path(given)
    if (ROOT / "include").is_dir():
        return ROOT / "include"
    asked = subprocess.run([os.environ.get("PKG_CONFIG", "pkg-config"), "--variable=includedir", "tandem"], capture_output=True,
                           text=True, check=True)
    return pathlib.Path(asked.stdout.strip().replace("\\ ", " "))


class World:
    """One engine and a model of `n_layers` equal layers. Caches keep f32, so references need no rounding."""

    def __init__(self, n_layers=1, **cache_options):
        self.engine = tandem.Engine(n_threads=2)
        self.layer = tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM)
        self.model = tandem.Model([self.layer] * n_layers)
        self.cache = tandem.Cache(self.engine, self.model, **{"k_type": "f32", **cache_options})
        self.session = tandem.Session(self.cache)
        self.sequence = self.cache.create_sequence()
        self.random = np.random.default_rng(7)

    def qkv(self, n_tokens, dtype=np.float32):
        return [self.random.standard_normal((n_tokens, heads, DIM)).astype(dtype) for heads in (Q_HEADS, KV_HEADS, KV_HEADS)]


@pytest.fixture
def world():
    return World()


def reference(q, k, v, visible=None):
    """Attention, causal at the end of k or by visible [n_queries, n_keys]. Returns o and lse in float64."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    group = q.shape[1] // k.shape[1]
    if visible is None:
        n = k.shape[0] - q.shape[0]
        visible = np.arange(k.shape[0])[None] <= np.arange(q.shape[0])[:, None] + n
    o, lse = np.empty((*q.shape[:2], v.shape[2])), np.empty(q.shape[:2])
    for head in range(q.shape[1]):
        logits = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2])
        logits = np.where(visible, logits, -np.inf)
        most = logits.max(1, keepdims=True)
        weights = np.exp(logits - most)
        total = weights.sum(1, keepdims=True)
        o[:, head], lse[:, head] = weights / total @ v[:, head // group], (most + np.log(total))[:, 0]
    return o, lse
