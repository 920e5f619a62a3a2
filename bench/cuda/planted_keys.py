# SPDX-License-Identifier: MIT
"""How many isolated keys policy "hip" finds on a GPU: keys planted among random ones, each needed by one query head.

    PYTHONPATH=bindings/python python3 bench/cuda/planted_keys.py MODULE [--lengths A,B] [--presets A,B] [--trials N]

One layer of 32 query heads and 8 KV heads of 128 dims in bf16. Queries and keys are standard normal. Each trial plants 16 keys,
each for another query head and far from the others and from sinks and window. A planted key is the head's query, scaled so that
its logit is 30. After one decode call, in which every stage runs, the list of the KV head is read. A line of JSON for each
length and preset. Needs PyTorch with CUDA.
"""
import argparse
import json
import random

import tandem
import torch

N_Q_HEADS, N_KV_HEADS, DIM = 32, 8, 128
LOGIT, N_PLANTED, BLOCK = 30.0, 16, 65536
FIRST, MARGIN = 200, 2048  # tokens without planted keys: the longest sinks and window of the presets


def places(length: int, rng: random.Random) -> list[int]:
    apart, found = (1024 if length > 65536 else 256), []
    while len(found) < N_PLANTED:
        place = rng.randrange(FIRST, length - MARGIN)
        if all(abs(place - other) > apart for other in found):
            found.append(place)
    return found


class Trial:
    """A sequence with planted keys, and the query that needs them."""

    def __init__(self, cache: tandem.Cache, length: int, seed: int):
        rng, bits = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
        self.heads = rng.sample(range(N_Q_HEADS), N_PLANTED)
        self.places = places(length, rng)
        self.q = torch.randn((1, N_Q_HEADS, DIM), generator=bits, device="cuda").bfloat16()
        self.sequence = cache.create_sequence()
        for first in range(0, length, BLOCK):
            k = torch.randn((min(BLOCK, length - first), N_KV_HEADS, DIM), generator=bits, device="cuda").bfloat16()
            for place, head in zip(self.places, self.heads):
                if first <= place < first + len(k):
                    q = self.q[0, head].float()
                    k[place - first, self.kv_head(head)] = (q * (LOGIT * DIM**0.5 / q.dot(q))).bfloat16()
            rows = k.cpu()
            self.sequence.append(rows, rows)

    @staticmethod
    def kv_head(head: int) -> int:
        return head // (N_Q_HEADS // N_KV_HEADS)

    def n_found(self, session: tandem.Session) -> tuple[int, int]:
        """Returns how many planted keys are found, and the length of the longest list of a KV head."""
        length = self.sequence.length(0)
        row = torch.zeros((1, N_KV_HEADS, DIM), device="cuda").bfloat16()
        session.attend(self.sequence, self.q, row, row, out=torch.empty_like(self.q))
        lists = [set(session.selection(self.sequence, kv_head_idx=head)[0].tolist()) for head in range(N_KV_HEADS)]
        self.sequence.truncate(length)
        return sum(p in lists[self.kv_head(h)] for p, h in zip(self.places, self.heads)), max(map(len, lists))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("module")
    flags.add_argument("--lengths", default="32768,65536,131072,262144,524288,1048576")
    flags.add_argument("--presets", default="small,3k,3k-flash")
    flags.add_argument("--trials", type=int, default=4)
    given = flags.parse_args()
    engine = tandem.Engine(backend="cuda", backend_path=given.module)
    model = tandem.Model([tandem.Layer(n_q_heads=N_Q_HEADS, n_kv_heads=N_KV_HEADS, k_head_dim=DIM)])
    for length in map(int, given.lengths.split(",")):
        presets = given.presets.split(",")
        found, n_keys = dict.fromkeys(presets, 0), dict.fromkeys(presets, 0)
        for trial in range(given.trials):
            cache = tandem.Cache(engine, model, k_type="bf16", v_type="bf16")
            planted = Trial(cache, length, seed=1000 * trial + length)
            for preset in presets:
                session = tandem.Session(cache, policy="hip", pruning=preset, window_tokens=length + 64, route="host")
                n, listed = planted.n_found(session)
                found[preset] += n
                n_keys[preset] = max(n_keys[preset], listed)
                session.close()
            cache.close()
        for preset in presets:
            print(json.dumps({"preset": preset, "keys": length, "found": found[preset], "of": N_PLANTED * given.trials,
                              "attended": n_keys[preset], "card": torch.cuda.get_device_name()}), flush=True)


main()
