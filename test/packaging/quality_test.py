#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The selectors of bench/quality on small random keys. Selectors with stages choose the same keys as
pruning_reference.py, and a list has as many keys as its name says. A run over a short text writes lines, resumes from
them and makes tables.

quality_test.py SOURCE_DIR; exits 77 (skipped) if PyTorch or NumPy is missing.
"""
import pathlib
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

SOURCE = pathlib.Path(sys.argv[1])
sys.path[:0] = [str(SOURCE / "bench/quality"), str(SOURCE / "test/reference")]
from pruning_records import Record, Stage  # noqa: E402
from pruning_reference import Decoder  # noqa: E402
from selectors_of_keys import SINKS, WINDOW, Halving, Pages, Question, Scan, Staged  # noqa: E402

N_KEYS, N_HEADS, N_KV_HEADS, DIM = 2500, 6, 2, 64
STAGES = {"bounds": (Stage("bounds", 64, 8, 256),), "exact": (Stage("exact", 64, 4, 128),), "descent": (Stage("descent", 64, 16, 256),),
          "three": (Stage("bounds", 64, 64, 768, 16), Stage("bounds", 64, 16, 384, 8), Stage("exact", 64, 8, 128, 4, plus_next=True))}


def question(seed):
    chance = torch.Generator().manual_seed(seed)
    return Question(torch.randn(N_HEADS, DIM, generator=chance), torch.randn(N_KEYS, N_KV_HEADS, DIM, generator=chance))


def check_stages():
    for name, stages in STAGES.items():
        for lists in ("kv head", "shared"):
            record, asked = Record(SINKS, WINDOW, stages), question(len(name))
            record.check()
            chosen = Staged(record, lists)(asked).chosen
            theirs = Decoder(record, sm_scale=asked.scale, shared=lists == "shared").step(asked.q.double().numpy(), asked.k.double().numpy())
            for head in range(N_KV_HEADS):
                listed = torch.nonzero(chosen[head * asked.group]).flatten().numpy() + SINKS
                ours = np.unique(np.concatenate([np.arange(SINKS), listed, np.arange(asked.end, N_KEYS)]))
                assert np.array_equal(ours, theirs.attended(0, head)), (name, lists, head)


def check_others():
    asked = question(1)
    for selector in (Scan(256), Scan(256, 2), Pages(8, 256), Halving(256)):
        choice = selector(asked)
        assert choice.chosen.shape == (N_HEADS, asked.end - SINKS) and 0 < choice.rows <= asked.end
        assert all(200 < int(row.sum()) <= 256 for row in choice.chosen), selector
    weights = asked.logits()[:, SINKS:asked.end]
    best = Scan(256, pooling="sum")(asked).chosen
    assert all(weights[head][best[head]].mean() > weights[head].mean() + 0.3 for head in range(N_HEADS))


def check_run():
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "results.jsonl"
        words = [sys.executable, str(SOURCE / "bench/quality/recall.py"), "--text", str(SOURCE / "examples/data/haystack.txt"), "--out", str(out),
                 "--lengths", "2048", "--facts", "1", "--queries", "1", "--needles", "2"]
        said = [subprocess.run(words, check=True, capture_output=True, text=True).stdout for _ in range(2)]
        lines = out.read_text().splitlines()
        assert len(lines) == len(set(lines)) and "facts of 2048" in said[0] and "facts of" not in said[1]
        assert "| preset small |" in said[1] and "2 of 2" in said[1]


check_stages()
check_others()
check_run()
