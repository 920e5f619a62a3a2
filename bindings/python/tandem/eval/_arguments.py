# SPDX-License-Identifier: MIT
"""The command line. Errors in it are reported before a model is loaded."""
import argparse
import pathlib
from collections.abc import Callable, Sequence

from ._retrieval import KINDS, MAX_FACTS, WAYS
from ._settings import DEFAULTS, SettingError, check, parse
from ._start import check_shared

TASKS = ("perplexity", "mass", "retrieval", "speed")


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(word) for word in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths of 2 and more, such as 2048,4096")
    return sorted(set(lengths))


def _names_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = [word.strip() for word in text.split(",")]
        for name in given:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return [name for name in allowed if name in given]
    return names


def _words(text: str) -> list[str]:
    words = text.split(",")
    if not all(word.isalpha() for word in words) or len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different words such as amber,castle")
    return words


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value


def _part(text: str) -> tuple[int, int]:
    """Parses 1/4 to 4/4, as (0, 4) to (3, 4)."""
    part, separator, n_parts = text.partition("/")
    if not (separator and part.isdecimal() and n_parts.isdecimal() and 1 <= int(part) <= int(n_parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 1/4")
    return int(part) - 1, int(n_parts)


def _count(least: int, most: int = 1 << 30) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {least} to {most}")
        return value
    return number


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    flags = argparse.ArgumentParser(prog="python -m tandem.eval", description="Measures what policies, storage types and key "
                                    "rotation of Tandem lose on a causal language model, against dense attention in the same run.",
                                    epilog="Exit codes: 0 done, 1 failed, 2 wrong command line, 130 interrupted.")
    flags.add_argument("model", help="folder or hub name; a folder without tokenizer is a model of bytes")
    flags.add_argument("--gguf-file", metavar="NAME", help="load this GGUF file of it (needs the packages gguf and accelerate)")
    flags.add_argument("--text", type=pathlib.Path, metavar="FILE", help="text to predict and to plant facts in (needed)")
    flags.add_argument("--setting", action="append", metavar="NAME=VALUE,...", help="options of a TandemCache, for example "
                       "policy=hgca,window_tokens=512,k_type=q8_0, and dense_layers=0+1 for layers that attend every key; may be "
                       "repeated; default: " + "; ".join(DEFAULTS))
    flags.add_argument("--contexts", type=_lengths, default=[2048], metavar="N,N,...", help="tokens before decode (2048)")
    flags.add_argument("--steps", type=_count(1), default=128, metavar="N", help="decode steps that are judged (128)")
    flags.add_argument("--tasks", type=_names_of(TASKS), default=list(TASKS), metavar="NAME,...", help="of " + ",".join(TASKS) + " (all)")
    flags.add_argument("--passages", type=_count(1), default=1, metavar="N",
                       help="texts to measure, from places of --text at equal distances, each with facts of its own (1)")
    flags.add_argument("--part", type=_part, default=(0, 1), metavar="I/N",
                       help="of the passages only the I-th and every N-th behind it, for several processes with an --out each (1/1)")
    flags.add_argument("--shared-prefill", action="store_true", help="prefill each text once, densely; settings go on from there with "
                       "the last 128 tokens of it. For settings of one storage")
    flags.add_argument("--dense-by-tandem", action="store_true", help="dense attention is Tandem's policy all, which long contexts take "
                       "less time and memory under than under Transformers' eager")
    flags.add_argument("--device", default="cpu", metavar="NAME", help="of the model, as PyTorch calls it (cpu)")
    flags.add_argument("--samples", type=_count(0), default=8, metavar="N",
                       help="decode steps at which selections and attention weights are looked at (8)")
    flags.add_argument("--find-dense-layers", action="store_true", help="name the layers best left dense (dense_layers=0+1+11 "
                       "in a setting), by the attention weight that each setting leaves out there, and the bytes each costs")
    flags.add_argument("--facts", type=_count(1, MAX_FACTS), default=5, metavar="N",
                       help="depths of pass keys, and named numbers in a text (5)")
    flags.add_argument("--kinds", type=_names_of(KINDS), default=list(KINDS), metavar="NAME,...", help="of facts: " + ",".join(KINDS)
                       + " (all)")
    flags.add_argument("--names", type=_words, default=[], metavar="WORD,...",
                       help="of numbers, such as a model was taught; at least as many as --facts (words of ours)")
    flags.add_argument("--ways", type=_names_of(WAYS), default=list(WAYS[:2]), metavar="NAME,...", help="that questions come: of "
                       + ",".join(WAYS) + " (" + ",".join(WAYS[:2]) + ")")
    flags.add_argument("--after", type=_share, default=0.0, metavar="SHARE",
                       help="facts stand behind this first share of the text, and so nearer than the longest distances (0)")
    flags.add_argument("--until", type=_share, default=1.0, metavar="SHARE",
                       help="facts stand in this first share of the text, to be outside of windows (1)")
    flags.add_argument("--plain", action="store_true", help="chat models too go on with a sentence, without a chat template")
    flags.add_argument("--seed", type=_count(0), default=1, metavar="N", help="of what is planted (1)")
    flags.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tandem-eval"), metavar="DIR",
                       help="folder for results.jsonl, table.md and pictures (tandem-eval)")
    flags.add_argument("--resume", action="store_true", help="go on with the results of --out")
    return flags


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags, with settings checked by the library. Exits with 2 on an error."""
    flags = parser()
    given = flags.parse_args(words)
    settings = []
    for text in given.setting or DEFAULTS:
        try:
            setting = parse(text)
            check(setting)
        except SettingError as error:
            flags.error(f"--setting {text!r}: {error}")
        if setting not in settings:
            settings.append(setting)
    given.setting = settings
    if given.shared_prefill:
        try:
            check_shared(settings)
        except SettingError as error:
            flags.error(str(error))
        if {"mass", "speed"} & set(given.tasks):
            flags.error("--shared-prefill is for the tasks perplexity and retrieval")
    if given.dense_by_tandem and (given.shared_prefill or {"mass", "speed"} & set(given.tasks)):
        flags.error("--dense-by-tandem is for the tasks perplexity and retrieval, without --shared-prefill, whose dense attention is "
                    "Tandem's anyway")
    if given.names and len(given.names) < given.facts:
        flags.error(f"--names: {len(given.names)} words for --facts {given.facts}")
    if given.after >= given.until:
        flags.error(f"--after {given.after:g} is not below --until {given.until:g}")
    if given.find_dense_layers and "mass" not in given.tasks:
        flags.error("--find-dense-layers needs the task mass")
    if given.text is None:
        flags.error("--text is missing: perplexity and retrieval need a text file")
    try:
        given.characters = given.text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        flags.error(f"--text: {error}")
    return given
