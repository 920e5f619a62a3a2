# SPDX-License-Identifier: MIT
"""Checks that the staged selectors of selectors_of_keys.py choose what the library and its reference choose, on pico's keys.

    python3 bench/quality/recall_check.py --text FILE [--device cuda] [--n-tokens 16384] [--reference]

For some layers and queries the library gets the same keys (f32, on the CPU), attends the query under policy "hip" and reports
the attended keys. Lists may differ in chunks with nearly equal scores, by at most one key in a hundred. --reference also
compares with test/reference/pruning_reference.py, which takes longer. Exit code 1: they differ by more.
"""
import argparse
import pathlib
import sys

import numpy as np
import torch
from pico_rows import Pico
from pruning_records import PRESETS, Record, Stage
from pruning_reference import Decoder
from selectors_of_keys import SINKS, Question, Staged

RECORDS = {
    "small": PRESETS["small"](3, "decode"), "3k": PRESETS["3k"](3, "decode"), "5k": PRESETS["5k"](3, "decode"),
    "bounds 8": Record(SINKS, 1024, (Stage("bounds", 64, 8, 1472),)),
    "bounds 64, 16, exact 8": Record(SINKS, 1024, (Stage("bounds", 64, 64, 4096), Stage("bounds", 64, 16, 2048),
                                                   Stage("exact", 64, 8, 512, plus_next=True))),
    "descent 64, 16, 4": Record(SINKS, 1024, (Stage("descent", 64, 64, 8192), Stage("descent", 64, 16, 4096), Stage("descent", 64, 4, 2048)))}


def attended(record: Record, chosen: torch.Tensor, n_keys: int) -> np.ndarray:
    """Returns the tokens that a query attends: sinks, window, and the chosen candidates of a mask."""
    listed = torch.nonzero(chosen).flatten().cpu().numpy() + SINKS
    return np.unique(np.concatenate([np.arange(record.sink_tokens), listed, np.arange(n_keys - record.window_tokens, n_keys)]))


def of_library(record: Record, question: Question, shared: bool) -> list[np.ndarray]:
    """Returns the tokens that the library attends, for each KV head."""
    import tandem

    stages = [tandem.PruningStage(one.judge, one.chunk_tokens, one.keep_tokens, one.refresh_interval, one.query_block, one.plus_next,
                                  one.from_tokens, one.to_tokens) for one in record.stages]
    own = tandem.PruningRecord(stages, record.sink_tokens, record.window_tokens)
    n_heads, (n_keys, n_kv_heads, d) = len(question.q), question.k.shape
    layer = tandem.Layer(n_q_heads=n_heads, n_kv_heads=n_kv_heads, k_head_dim=d)
    k = question.k.cpu().contiguous().numpy()
    with tandem.Engine() as engine, tandem.Cache(engine, tandem.Model([layer]), k_type="f32") as cache:
        with tandem.Session(cache, policy="hip", pruning=tandem.Pruning(decode=[own], append=[own], shared_lists=shared)) as session:
            sequence = cache.create_sequence()
            sequence.append(k[:-1], k[:-1])
            session.attend(sequence, question.q.cpu().numpy()[None], k[-1:], k[-1:])
            return [np.asarray(session.selection(sequence, kv_head_idx=head)[0]) for head in range(n_kv_heads)]


def of_reference(record: Record, question: Question, shared: bool) -> list[np.ndarray]:
    """Returns the tokens that the reference attends, for each KV head."""
    decoder = Decoder(record, sm_scale=question.scale, shared=shared)
    block = decoder.step(question.q.double().cpu().numpy(), question.k.double().cpu().numpy())
    return [block.attended(0, head) for head in range(question.k.shape[1])]


def differing(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the keys in one of the two lists only, as a share of the keys in either."""
    return len(np.setxor1d(ours, theirs)) / len(np.union1d(ours, theirs))


def main() -> int:
    """Runs the checks and returns the exit code."""
    flags = argparse.ArgumentParser(description="Selectors beside the library.")
    flags.add_argument("--text", type=pathlib.Path, required=True)
    flags.add_argument("--device", default="cpu")
    flags.add_argument("--n-tokens", type=int, default=16384)
    flags.add_argument("--queries", type=int, default=4)
    flags.add_argument("--reference", action="store_true")
    given = flags.parse_args()
    ids = torch.tensor(list(given.text.read_bytes()[:given.n_tokens]))
    rows, worst = Pico(given.device).forward(ids), 0.0
    ways = [of_library, of_reference] if given.reference else [of_library]
    for name, record in RECORDS.items():
        for lists in ("kv head", "shared"):
            shares = []
            for i in range(given.queries):
                n_keys, layer_idx = given.n_tokens - 7 * i, i % 6
                question = Question(rows.q[layer_idx, n_keys - 1], rows.k[layer_idx, :n_keys])
                choice = Staged(record, lists)(question)
                for way in ways:
                    theirs = way(record, question, lists == "shared")
                    shares += [differing(attended(record, choice.chosen[head * question.group], n_keys), theirs[head])
                               for head in range(len(theirs))]
            worst = max(worst, *shares)
            print(f"{name}, lists by {lists}: {len(shares)} lists, {sum(share == 0 for share in shares)} equal, "
                  f"most that differs {max(shares):.2%}", flush=True)
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main())
