# SPDX-License-Identifier: MIT
"""The command line of a search. Errors in it are reported before a model is loaded."""
import argparse
import pathlib
from collections.abc import Sequence

from ..eval._arguments import _count, _lengths
from ._choice import WORST_WEIGHT


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0, to 1")
    return value


def _weight(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1e6")
    return value


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    flags = argparse.ArgumentParser(prog="python -m tandem.patterns", description="Head patterns of a model, for the policy \"patterns\".",
                                    epilog="Exit codes: 0 done, 1 failed, 2 wrong command line, 130 interrupted.")
    commands = flags.add_subparsers(dest="command", required=True, metavar="search")
    search = commands.add_parser("search", help="find a pattern for each head of a model", description="Runs a causal language model "
                                 "densely on prompts, measures what each pattern would cost and lose in each head, and writes a file "
                                 "of head patterns within a budget of pairs.")
    search.add_argument("model", help="folder or hub name; a folder without tokenizer is a model of bytes")
    search.add_argument("--gguf-file", metavar="NAME", help="load this GGUF file of it (needs the packages gguf and accelerate)")
    search.add_argument("--text", type=pathlib.Path, required=True, metavar="FILE", help="text to take passages of (needed)")
    search.add_argument("--contexts", type=_lengths, default=[8192], metavar="N,N,...", help="tokens of a prompt (8192)")
    search.add_argument("--budget", type=_share, default=0.33, metavar="SHARE",
                        help="pairs of a query and a key, of dense attention's, over all prompts (0.33)")
    search.add_argument("--passages", type=_count(1), default=2, metavar="N", help="passages of the text for each context (2)")
    search.add_argument("--no-facts", action="store_true", help="without prompts with planted facts and questions for them, one for each "
                        "passage")
    search.add_argument("--worst-weight", type=_weight, default=WORST_WEIGHT, metavar="W", help="weight of what the worst query of a "
                        f"question loses, beside the mean of text ({WORST_WEIGHT:g})")
    search.add_argument("--samples", type=_count(1), default=12, metavar="N", help="blocks of 128 queries of a prompt that are judged (12)")
    search.add_argument("--device", default="cpu", metavar="NAME", help="of the model, as PyTorch calls it (cpu)")
    search.add_argument("--seed", type=_count(0), default=1, metavar="N", help="of what is planted (1)")
    search.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE.json", help="file of head patterns to write (needed)")
    return flags


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags. Exits with 2 on an error."""
    flags = parser()
    given = flags.parse_args(words)
    try:
        given.characters = given.text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        flags.error(f"--text: {error}")
    if not given.out.parent.is_dir():
        flags.error(f"--out: folder {str(given.out.parent)!r} is not there")
    return given
