# SPDX-License-Identifier: MIT
"""Decode steps of a whole model on the CPU, from token to token: PyTorch's attention (sdpa) and Tandem's in turns.

hf_decode_bench.py MODEL [--contexts 256,1024,2048,4096,8000] [--rounds 5] [--tokens 10] [--threads 2]

MODEL is a folder that Transformers can load, with its tokenizer. It runs in f32. The text is that of docs/. For each context
and each way, a line of JSON has the milliseconds a token (median and all rounds) and the largest difference of a logit from
sdpa's. The ways are

    sdpa            DynamicCache, which copies all keys and values of a layer when it appends
    tandem          TandemCache as it is
    tandem-awake    TandemCache whose workers spin during a whole pass, beside PyTorch's threads

A logit that differs by more than 0.01 ends the run: no time is printed without the right answer.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tandem.transformers import TandemCache

MOST_OFF = 0.01
PREFILL = 1024  # tokens of a pass
WAYS = {"sdpa": ("sdpa", DynamicCache), "tandem": ("tandem", TandemCache),
        "tandem-awake": ("tandem", lambda: TandemCache(sleep_between_calls=False))}


def forward(model, past, ids):
    return model(ids[None], past_key_values=past, logits_to_keep=1).logits[0, -1]


def decode(model, past, ids, begin, n_tokens):
    """Appends tokens one by one and rolls them back. Returns the milliseconds a token and the logits of all."""
    logits, start = [], time.perf_counter()
    for i in range(begin, begin + n_tokens):
        logits.append(forward(model, past, ids[i:i + 1]))
    ms = (time.perf_counter() - start) * 1e3 / n_tokens
    past.crop(-n_tokens)
    return ms, torch.stack(logits)


def run(model, ids, contexts, args):
    caches = {}
    for way, (attention, make) in WAYS.items():
        model.set_attn_implementation(attention)
        caches[way] = make()
        for begin in range(0, contexts[0], PREFILL):
            forward(model, caches[way], ids[begin:min(begin + PREFILL, contexts[0])])
    for context in contexts:
        times, off = {way: [] for way in WAYS}, {}
        for past in caches.values():
            past.crop(context - past.get_seq_length())
        for i in range(args.rounds + 1):  # the first round warms up
            expected = None
            for way, (attention, _) in WAYS.items():
                model.set_attn_implementation(attention)
                ms, logits = decode(model, caches[way], ids, context, args.tokens)
                expected = logits if way == "sdpa" else expected
                off[way] = (logits - expected).abs().max().item()
                if not off[way] <= MOST_OFF:
                    sys.exit(f"{way}: a logit differs by {off[way]} from sdpa's at {context} tokens")
                if i > 0:
                    times[way].append(round(ms, 2))
        for way, all_ms in times.items():
            print(json.dumps({"context": context, "way": way, "ms": statistics.median(all_ms), "rounds": all_ms,
                              "most_off": off[way]}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--contexts", default="256,1024,2048,4096,8000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    contexts = sorted((int(context) for context in args.contexts.split(",")), reverse=True)
    docs = pathlib.Path(__file__).resolve().parents[3] / "docs"
    text = "\n".join(page.read_text() for page in sorted(docs.glob("*.md")))
    ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[0]
    if len(ids) < contexts[0] + args.tokens:
        sys.exit(f"docs/ has {len(ids)} tokens, {contexts[0]} + {args.tokens} are asked for")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        run(model, ids, contexts, args)


main()
