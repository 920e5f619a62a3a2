# SPDX-License-Identifier: MIT
"""``python -m tandem.patterns``. The package's docstring describes it."""
import sys
import warnings
from collections.abc import Sequence


def _say(text: str) -> None:
    print(f"tandem.patterns: {text}", file=sys.stderr)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code. Wrong flags exit with 2."""
    try:
        from transformers.utils import logging

        from ..eval._language_model import ModelError, load
        from ._arguments import parse_arguments
        from ._choice import BudgetError
        from ._prompts import Wanted, prompts
        from ._report import file_text, table
        from ._search import Budget, assign, measure
    except ImportError as error:
        _say(f"PyTorch and Transformers are needed: pip install 'tandem[transformers]': {error}")
        return 1
    given = parse_arguments(words)
    warnings.filterwarnings("ignore", message=".*past_key_values.*deprecated", category=FutureWarning)  # tandem.eval's passes have it
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = load(given.model, given.gguf_file, given.device)
        wanted = Wanted(given.contexts, given.passages, not given.no_facts, given.seed)
        recall = measure(model, prompts(model.tokenizer, given.characters, wanted), given.samples, _say)
        found = assign(model, recall, Budget(given.budget, given.worst_weight))
    except BudgetError as error:
        _say(f"--budget {given.budget:g}: {error}")
        return 1
    except (ModelError, ValueError) as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say("interrupted; nothing is written")
        return 130
    try:
        given.out.write_text(file_text(found))
    except OSError as error:
        _say(f"--out: {error}")
        return 1
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
