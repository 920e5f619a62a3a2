# SPDX-License-Identifier: MIT
"""How much attention belongs to keys that a selector misses, and how many rows it reads: the library's, the paper's and others.

    python3 bench/quality/recall.py --text FILE --out results.jsonl [--device cuda] [--lengths 16384,65536]

The model pico reads a text with planted facts. Beyond 16,384 tokens YaRN stretches its positions. Queries come from the end of
the text ("text"), and from the digits of answers to questions about the facts ("facts"). For each query head the 2,048 keys
between sinks and window with the most attention count. `lost` is the attention on those that the selector misses, as a share of
all attention. `recall` is the attention on those that it finds, as a share of the attention on all of these 2,048. Each
selector keeps 2,048 keys, a preset as many as its last stage.

Then single keys are planted among random ones, with neighbours that score low. The bench counts how many each selector finds.

Each line of the results is written when it is complete. A run that was stopped continues with the missing lines. A table in
Markdown is printed at the end. Needs only PyTorch.
"""
import argparse
import json
import pathlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from pico_rows import TRAINED, Pico, Rows
from pruning_records import PRESETS, Record, Stage
from selectors_of_keys import (SINKS, WINDOW, Choice, Halving, Pages, Question, Representatives, Scan, Selector, Staged,
                               representatives)

KEPT = 2048
RETRIEVING = ((4, 1), (4, 2))  # layer and query head of pico
NAMES = ("amber", "castle", "dolphin", "ember", "falcon", "garden", "harbor", "island", "jasmine", "kettle", "lantern", "marble",
         "needle", "orchid", "pepper", "river")
Case = tuple[int, Question]  # layer, question


def _record(sinks: int, window: int, *stages: tuple[Any, ...]) -> Record:
    return Record(sinks, window, tuple(Stage(judge, 64, *rest) for judge, *rest in stages))


def _preset(name: str) -> Callable[[int], Selector]:
    return lambda layer_idx: Staged(PRESETS[name](layer_idx, "decode"))


def _fixed(selector: Selector) -> Callable[[int], Selector]:
    return lambda layer_idx: selector


def selectors() -> dict[str, Callable[[int], Selector]]:
    """Returns functions from a layer index to a selector, by name."""
    bounds = [("bounds", 64, 16 * 1024), ("bounds", 16, 4 * 1024)]
    paper = _record(256, WINDOW, ("descent", 256, 32 * 1024), ("descent", 32, 8 * 1024), ("descent", 8, KEPT))
    fine = _record(SINKS, WINDOW, ("descent", 64, 16 * 1024), ("descent", 16, 4 * 1024), ("descent", 4, KEPT))
    small = PRESETS["small"](0, "decode")
    raw = replace(small, stages=tuple(replace(stage, refresh_interval=1) for stage in small.stages))
    found: dict[str, Selector] = {
        "all keys, sum of weights (oracle)": Scan(KEPT, pooling="sum"),
        "all keys, largest logit, normalised": Scan(KEPT),
        "all keys, largest logit, raw": Scan(KEPT, pooling="raw"),
        "small, raw": Staged(raw, pooling="raw"),
        "bounds 8": Staged(_record(SINKS, WINDOW, ("bounds", 8, KEPT))),
        "bounds 16": Staged(_record(SINKS, WINDOW, ("bounds", 16, KEPT))),
        "bounds 8, exact 1": Staged(_record(SINKS, WINDOW, ("bounds", 8, 2 * KEPT), ("exact", 1, KEPT))),
        "bounds 64, 16, exact 8": Staged(_record(SINKS, WINDOW, *bounds, ("exact", 8, KEPT))),
        "bounds 64, 16, exact 1": Staged(_record(SINKS, WINDOW, *bounds, ("exact", 1, KEPT))),
        "bounds 64, 16, exact 1, raw": Staged(_record(SINKS, WINDOW, *bounds, ("exact", 1, KEPT)), pooling="raw"),
        "bounds 64, 16, exact 8, next": Staged(_record(SINKS, WINDOW, *bounds, ("exact", 8, KEPT, 4, True))),
        "bounds 32, 16, exact 8, next, 2,560": Staged(_record(SINKS, WINDOW, ("bounds", 32, 16 * 1024), ("bounds", 16, 6 * 1024),
                                                              ("exact", 8, 2560, 4, True))),
        "descent 256, 32, 8": Staged(paper),
        "descent 256, 32, 8, shared list": Staged(paper, lists="shared"),
        "descent 256, 32, 8, a list for each query head": Staged(paper, lists="head"),
        "descent 256, 32, 8, middle and running maximum": Staged(paper, "kv head", "middle", "running_max"),
        "descent 64, 16, 4": Staged(fine),
        "HiP's heuristic, blocks of 8": Halving(KEPT),
        "InfLLM, 4 of 128": Representatives(128, 4, KEPT),
        "InfLLM, 4 of 128, best": Representatives(128, 4, KEPT, "max"),
        "InfLLM, 4 of 32": Representatives(32, 4, KEPT),
        "InfLLM, 4 of 32, best": Representatives(32, 4, KEPT, "max"),
        "means of 8": Pages(8, KEPT), "means of 4": Pages(4, KEPT),
        "means and half the radius, 8": Pages(8, KEPT, 0.5),
        "1-bit keys": Scan(KEPT, 1), "2-bit keys": Scan(KEPT, 2), "4-bit keys": Scan(KEPT, 4)}
    return {"preset small": _preset("small"), "preset 3k": _preset("3k"), **{name: _fixed(one) for name, one in found.items()}}


# --- Texts and their queries ---


def planted(text: str, n_tokens: int, seed: int) -> tuple[str, list[tuple[str, str]]]:
    """Returns a text of n_tokens bytes with facts at line ends, and questions with answers."""
    chance = random.Random(seed)
    facts = [(name, str(chance.randrange(10000, 100000))) for name in NAMES]
    sentences = [f"\nThe number of {name} is {value}.\n" for name, value in facts]
    plain = text.encode()[:n_tokens - sum(map(len, sentences))].decode("utf-8", "ignore")
    pieces, taken = [], 0
    for i, sentence in enumerate(sentences):
        # The last fact is as far from the window as the first is from the start, and outside the window.
        wanted = int((len(plain) - WINDOW) * (2 * i + 1) / (2 * len(facts)))
        place = max(plain.rfind("\n", taken, wanted + 1), taken)
        pieces += [plain[taken:place], sentence]
        taken = place
    chance.shuffle(facts)
    return "".join([*pieces, plain[taken:]]), [(f"\nWhat is the number of {name}? It is ", value) for name, value in facts]


def _ids(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()))


class Cases:
    """Queries of one text length: from the model's pass over the text, and from a pass over each question behind it."""

    def __init__(self, text: str, n_tokens: int, device: str, seed: int) -> None:
        self._pico = Pico(device, max(n_tokens / TRAINED, 1.0))
        body, self._questions = planted(text, n_tokens - 64, seed)
        self._body = self._pico.forward(_ids(body))
        self.representatives = [{(block, 4): representatives(q, k, block, 4) for block in (128, 32)}
                                for q, k in zip(self._body.q, self._body.k, strict=True)]
        self.n_right = self.n_digits = 0

    def text(self, n_queries: int) -> Iterator[Case]:
        """Yields queries at equal distances among the last 2,048 of the text."""
        n = self._body.k.shape[1]
        for i in range(n_queries):
            place = n - 1 - i * 2048 // n_queries
            for layer_idx in range(self._pico.n_layers):
                yield layer_idx, Question(self._body.q[layer_idx, place], self._body.k[layer_idx, :place + 1],
                                          self.representatives[layer_idx])

    def facts(self, n_facts: int) -> Iterator[Case]:
        """Yields queries that predict a digit of an answer."""
        for question, answer in self._questions[:n_facts]:
            tail = self._pico.forward(_ids(question + answer), self._body, len(answer) + 1)
            self.n_right += int((tail.logits[:-1].argmax(1).cpu() == _ids(answer)).sum())
            self.n_digits += len(answer)
            yield from self._digits(tail, len(question), len(answer))

    def _digits(self, tail: Rows, n_question: int, n_answer: int) -> Iterator[Case]:
        for layer_idx in range(self._pico.n_layers):
            k = torch.cat([self._body.k[layer_idx], tail.k[layer_idx]])
            n = self._body.k.shape[1]
            for place in range(n_question - 1, n_question - 1 + n_answer):
                yield layer_idx, Question(tail.q[layer_idx, place], k[:n + place + 1], self.representatives[layer_idx])


# --- Figures ---


class Sums:
    """Sums the attention on the true best keys, and on those of them that were found, by layer and query head."""

    def __init__(self) -> None:
        self.n, self.best, self.found, self.rows = 0, torch.zeros(0, 0), torch.zeros(0, 0), 0.0

    def add(self, layer_idx: int, best: torch.Tensor, found: torch.Tensor, rows: float, n_layers: int) -> None:
        """Adds a query's sums. best, found: [H]."""
        if not self.n:
            self.best, self.found = (torch.zeros(n_layers, len(best), dtype=torch.float64) for _ in range(2))
        self.best[layer_idx] += best
        self.found[layer_idx] += found
        self.rows, self.n = self.rows + rows, self.n + 1

    def figures(self, d: int) -> dict[str, Any]:
        """Returns means. A row is d numbers in bf16, counted for each KV head and query."""
        n_layers, n_heads = self.best.shape
        lost, n_queries = (self.best - self.found) * n_layers / self.n, self.n // n_layers
        worst = int(lost.argmax())
        return {"n_queries": n_queries, "rows": self.rows / self.n, "bytes": self.rows / self.n * 2 * d,
                "recall": float((self.found / self.best).mean()), "lost_mean": float(lost.mean()),
                "lost_retrieving": [float(lost[layer, head]) for layer, head in RETRIEVING], "lost_worst": float(lost.max()),
                "worst_head": [worst // n_heads, worst % n_heads], "lost": lost.numpy().round(5).tolist(),
                "lost_loud": [float(lost[4, head]) for head in range(3)]}


def true_best(question: Question) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each candidate's attention, 0 if not among the best 2,048 of its query head, [H, E - S]; and its sum [H]."""
    weights = question.logits().double().softmax(1)[:, SINKS:question.end]
    best = weights.topk(min(KEPT, weights.shape[1]), dim=1)
    kept = torch.zeros_like(weights).scatter_(1, best.indices, best.values)
    return kept, kept.sum(1)


@torch.inference_mode()
def measure(cases: Iterator[Case], wanted: dict[str, Callable[[int], Selector]], n_layers: int, d: int) -> dict[str, Any]:
    """Returns figures by selector."""
    sums = {name: Sums() for name in wanted}
    for layer_idx, question in cases:
        kept, best = true_best(question)
        for name, selector in wanted.items():
            choice: Choice = selector(layer_idx)(question)
            found = (kept * choice.chosen).sum(1)
            sums[name].add(layer_idx, best.cpu(), found.cpu(), choice.rows, n_layers)
    return {name: one.figures(d) for name, one in sums.items()}


# --- Single keys planted in random ones ---


def needles(n_keys: int, n_trials: int, device: str, seed: int = 1) -> Iterator[tuple[int, Question]]:
    """Yields the place of a key that takes most of a query head's attention, with 32 low-scoring neighbours, and a question."""
    chance = torch.Generator(device).manual_seed(seed)
    for trial in range(n_trials):
        k = torch.randn(n_keys, 2, 64, generator=chance, device=device)
        q = torch.randn(6, 64, generator=chance, device=device)
        place = SINKS + 16 + int(torch.randint(n_keys - WINDOW - SINKS - 32, (), generator=chance, device=device))
        head = trial % 6
        direction = q[head] / q[head].norm()
        around = k[place - 16:place + 17, head // 3]
        around -= (around @ direction)[:, None] * direction + direction  # logits of about -1
        logit = torch.logsumexp(k[:, head // 3] @ q[head] / 8, 0) + 1.5
        k[place, head // 3] += (8 * logit / q[head].norm() - k[place, head // 3] @ direction) * direction
        yield place, Question(q, k)


@torch.inference_mode()
def found_needles(n_keys: int, n_trials: int, wanted: dict[str, Callable[[int], Selector]], device: str) -> dict[str, Any]:
    """Counts the planted keys that each selector finds."""
    found = {name: [0, 0.0] for name in wanted}
    for trial, (place, question) in enumerate(needles(n_keys, n_trials, device)):
        for name, selector in wanted.items():
            choice = selector(3)(question)
            found[name][0] += int(choice.chosen[trial % 6, place - SINKS])
            found[name][1] += choice.rows / n_trials
    return {name: {"found": n, "n": n_trials, "rows": rows} for name, (n, rows) in found.items()}


# --- The run ---


class Lines:
    """The file of results."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        whole = path.read_text() if path.exists() else ""
        complete = whole[:whole.rfind("\n") + 1]
        if complete != whole:
            path.write_text(complete)
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in complete.splitlines()]

    def has(self, what: dict[str, Any]) -> bool:
        """Returns whether `what` is measured already."""
        return any(line["what"] == what for line in self.lines)

    def add(self, what: dict[str, Any], figures: dict[str, Any]) -> None:
        """Writes a line immediately."""
        self.lines.append({"what": what, "figures": figures})
        with open(self.path, "a") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _recall_table(lines: list[dict[str, Any]], n_tokens: int) -> list[str]:
    def of(kind: str) -> dict[str, dict[str, Any]]:
        return {line["what"]["selector"]: line["figures"] for line in lines if line["what"]["kind"] == kind}

    text, facts = of("text"), of("facts")
    out = [f"## {n_tokens:,} tokens", "", "| selector | rows | KB read | recall, text | facts | lost, 4.1 | 4.2 | lost most, facts | text |",
           "|---|---|---|---|---|---|---|---|---|"]
    for name, of_facts in facts.items():
        of_text = text.get(name)
        most = [f"{_percent(one['lost_worst'])} ({one['worst_head'][0]}.{one['worst_head'][1]})" if one else ""
                for one in (of_facts, of_text)]
        out.append(f"| {name} | {of_facts['rows']:.0f} | {of_facts['bytes'] / 1024:.0f} | {_percent(of_text['recall']) if of_text else ''} | "
                   f"{_percent(of_facts['recall'])} | {' | '.join(map(_percent, of_facts['lost_retrieving']))} | {most[0]} | {most[1]} |")
    return [*out, ""]


def table(lines: list[dict[str, Any]]) -> str:
    """Returns all results in Markdown."""
    out = []
    recalls = [line for line in lines if line["what"]["kind"] in ("text", "facts")]
    for n_tokens in sorted({line["what"]["n_tokens"] for line in recalls}):
        out += _recall_table([line for line in recalls if line["what"]["n_tokens"] == n_tokens], n_tokens)
    planted_keys = [line for line in lines if line["what"]["kind"] == "single keys"]
    lengths = sorted({line["what"]["n_tokens"] for line in planted_keys})
    if planted_keys:
        out += ["## Single keys found", "", "| selector | " + " | ".join(f"{n:,} keys" for n in lengths) + " |", "|" + "---|" * (len(lengths) + 1)]
    for name in dict.fromkeys(line["what"]["selector"] for line in planted_keys):
        cells = {line["what"]["n_tokens"]: f"{line['figures']['found']} of {line['figures']['n']}, {line['figures']['rows']:.0f} rows"
                 for line in planted_keys if line["what"]["selector"] == name}
        out.append(f"| {name} | " + " | ".join(cells.get(n, "") for n in lengths) + " |")
    return "\n".join(out)


def run(given: argparse.Namespace) -> None:
    """Measures the missing results."""
    lines, text = Lines(given.out), given.text.read_text(encoding="utf-8")[given.offset:]
    for n_tokens in given.lengths:
        cases: Cases | None = None
        for kind, n_queries in (("facts", given.facts), ("text", given.queries)):
            common = {"kind": kind, "n_tokens": n_tokens, "n": n_queries, "offset": given.offset, "seed": given.seed}
            wanted = {name: one for name, one in selectors().items() if not lines.has({**common, "selector": name})}
            if not wanted:
                continue
            started = time.monotonic()
            cases = cases or Cases(text, n_tokens, given.device, given.seed)
            found = measure(cases.facts(n_queries) if kind == "facts" else cases.text(n_queries), wanted, 6, 64)
            for name, figures in found.items():
                digits = {"digits_right": cases.n_right, "digits": cases.n_digits} if kind == "facts" else {}
                lines.add({**common, "selector": name}, {**figures, **digits})
            print(f"{kind} of {n_tokens}: {time.monotonic() - started:.1f} s", flush=True)
    for n_keys in given.lengths:
        common = {"kind": "single keys", "n_tokens": n_keys, "n": given.needles}
        wanted = {name: one for name, one in selectors().items()
                  if not name.startswith("InfLLM") and not lines.has({**common, "selector": name})}
        for name, figures in found_needles(n_keys, given.needles, wanted, given.device).items() if wanted else ():
            lines.add({**common, "selector": name}, figures)
    print(table(lines.lines))


def main() -> None:
    """Runs the command line."""
    flags = argparse.ArgumentParser(description="Attention on keys that selectors miss.")
    flags.add_argument("--text", type=pathlib.Path, required=True)
    flags.add_argument("--out", type=pathlib.Path, required=True)
    flags.add_argument("--device", default="cpu")
    flags.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=[16384, 65536])
    flags.add_argument("--facts", type=int, default=16, help="questions, of five digits each")
    flags.add_argument("--queries", type=int, default=64, help="of the text")
    flags.add_argument("--needles", type=int, default=100, help="single keys planted")
    flags.add_argument("--offset", type=int, default=0, help="of the text, in characters")
    flags.add_argument("--seed", type=int, default=1)
    run(flags.parse_args())


if __name__ == "__main__":
    main()
