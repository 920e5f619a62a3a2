# SPDX-License-Identifier: MIT
"""table.md: the results as tables, with means over the passages of each setting."""
import math
from collections.abc import Callable, Iterable
from typing import Any

from ._pictures import Line, label

Column = tuple[str, Callable[[dict[str, Any]], str]]


def _number(name: str, form: str, factor: float = 1.0) -> Callable[[dict[str, Any]], str]:
    return lambda figures: format(figures[name] * factor, form) if name in figures else ""


def _small(name: str) -> Callable[[dict[str, Any]], str]:
    def shown(figures: dict[str, Any]) -> str:
        value = figures[name]
        if value == 0:
            return "0"
        return "< 1e-6" if value < 1e-6 else f"{value:.2g}" if value < 0.01 else f"{value:.3f}"
    return shown


def _judged(figures: dict[str, Any]) -> str:
    return f"{figures['kv_bytes_judged_share']:.1%}" if figures.get("kv_bytes_judged_share") else ""


def _decode_columns(of_bytes: bool) -> list[Column]:
    quality = ("bits per byte", _number("bits_per_token", ".4f")) if of_bytes else ("perplexity", _number("perplexity", ".3f"))
    return [quality, ("beside dense", _number("beside_dense", "+.2%")), ("KL divergence, nats", _small("kl_divergence")), ("same top token", _number("top1_agreement", ".1%")),
            ("most a logit differs", _small("max_logit_difference"))]


_KEPT: list[Column] = [("pairs of the prompt", _number("pattern_pairs_share", ".1%")), ("KV bytes read", _number("kv_bytes_read_share", ".1%")), ("judged", _judged), ("keys kept outside the window",
                       _number("kept_share_mean", ".1%")), ("mass left out, mean", _number("mass_left_out_mean", ".2%")),
                       ("most, of a head", _number("mass_left_out_max", ".1%"))]
_MEMORY: list[Column] = [("K and V, MB", _number("kv_row_bytes", ".1f", 1e-6)), ("held, MB", _number("kv_held_bytes", ".1f", 1e-6))]
_SPEED: list[Column] = [("prefill, tokens/s", _number("prefill_tokens_per_s", ".0f")),
                        ("decode, tokens/s", _number("decode_tokens_per_s", ".1f")),
                        ("slowest and fastest round", lambda figures: "{:.1f} to {:.1f}".format(
                            figures["decode_tokens_per_s_slowest"], figures["decode_tokens_per_s_fastest"]))]


def _table(title: str, lines: list[Line], columns: list[Column]) -> list[str]:
    rows = [[label(line), *(show(line["figures"]) for _, show in columns)] for line in lines]
    used = [i for i in range(len(columns) + 1) if any(row[i] for row in rows)]
    heads = ["setting", *(name for name, _ in columns)]
    return [f"## {title}", "", "| " + " | ".join(heads[i] for i in used) + " |", "|" + "---|" * len(used),
            *("| " + " | ".join(row[i] for i in used) + " |" for row in rows), ""]


def _mean(lines: list[Line]) -> dict[str, Any]:
    """Returns means of a setting's figures over passages of equal length. The perplexity is that of all tokens."""
    every = [line["figures"] for line in lines]
    mean = {name: sum(one[name] for one in every) / len(every) for name, value in every[0].items()
            if isinstance(value, (int, float)) and all(name in one for one in every)}
    return {**mean, "perplexity": math.exp(mean["nll"])} if "nll" in mean else mean


def over_passages(lines: list[Line]) -> list[Line]:
    """Returns a line for each setting. `beside_dense` compares its perplexity, or bits per byte, with dense attention's on the
    same passages."""
    found = []
    for name in dict.fromkeys(map(label, lines)):
        mine = [line for line in lines if label(line) == name]
        passages = {line["what"].get("passage", 0) for line in mine}
        dense = [line for line in lines if line["what"]["setting"] == "dense" and line["what"].get("passage", 0) in passages]
        figures = _mean(mine)
        if name != "dense" and len(dense) == len(mine) and "perplexity" in figures:
            unit = "bits_per_token" if mine[0]["what"]["of_bytes"] else "perplexity"
            figures["beside_dense"] = figures[unit] / _mean(dense)[unit] - 1
        found.append({**mine[0], "figures": figures})
    return found


def _retrieval(lines: list[Line]) -> list[str]:
    def column(line: Line) -> tuple[str, int, int, str]:
        what = line["what"]
        return what["kind"], what["n_facts"], what["context"], what["question"]

    columns = sorted({column(line) for line in lines})
    heads = " | ".join(f"{kind if n_facts == 1 else f'{n_facts} {kind}s'}, {n:,} tokens, question{'s' * way.endswith('in a row')} {way}"
                       for kind, n_facts, n, way in columns)
    shares = {name: [line["figures"]["pattern_pairs_share"] for line in lines if label(line) == name
                     and "pattern_pairs_share" in line["figures"]] for name in dict.fromkeys(map(label, lines))}
    has_shares = any(shares.values())
    out = ["## Retrieval: facts found", "", f"| setting | {'pairs of prompts | ' if has_shares else ''}{heads} |",
           "|" + "---|" * (len(columns) + 1 + has_shares)]
    for name in dict.fromkeys(label(line) for line in lines):
        cells = [f"{sum(shares[name]) / len(shares[name]):.1%}" if shares[name] else ""] if has_shares else []
        for wanted in columns:
            right = [line["figures"]["right"] for line in lines if label(line) == name and column(line) == wanted]
            cells.append(f"{sum(right)} of {len(right)}" if right else "")
        out.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*out, ""]


def _dense_is(line: Line) -> str:
    return ("Tandem's policy \"all\" behind the same prefill" if line["what"].get("shared_prefill") else
            "Tandem's policy \"all\"" if line["what"].get("dense_by_tandem") else "Transformers' \"eager\" in f32")


def write(lines: Iterable[Line]) -> str:
    """Returns all tables, one for each measurement and context."""
    lines = list(lines)
    if not lines:
        return "Nothing was measured.\n"
    first = lines[0]
    out = [f"# {first['what']['model']}", "", f"{first['machine']['processor']}, {first['machine']['n_cpus']} CPUs; "
           + ", ".join(f"{name} {number}" for name, number in first["versions"].items())
           + f". Dense attention is {_dense_is(first)}; the divergence is KL(dense || setting).", ""]
    shown = {"prefill": ("Prefill of {context:,} tokens", [*_decode_columns(first["what"]["of_bytes"]), *_MEMORY]),
             "decode": ("Decode of {steps} tokens after {context:,}", [*_decode_columns(first["what"]["of_bytes"]), *_KEPT]),
             "speed": ("Speed behind {context:,} tokens", [*_SPEED, *_MEMORY])}
    for measurement, (title, columns) in shown.items():
        mine = [line for line in lines if line["what"]["measurement"] == measurement]
        for context, steps in sorted({(line["what"]["context"], line["what"].get("steps", 0)) for line in mine}):
            rows = [line for line in mine if (line["what"]["context"], line["what"].get("steps", 0)) == (context, steps)]
            n_passages = len({line["what"].get("passage", 0) for line in rows})
            many = f", means of {n_passages} passages" if n_passages > 1 else ""
            out += _table(title.format(context=context, steps=steps) + many, over_passages(rows), columns)
    retrieval = [line for line in lines if line["what"]["measurement"] == "retrieval"]
    return "\n".join([*out, *(_retrieval(retrieval) if retrieval else [])])
