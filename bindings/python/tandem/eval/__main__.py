# SPDX-License-Identifier: MIT
"""``python -m tandem.eval``. The package's docstring describes it."""
import sys
import warnings
from collections.abc import Sequence


def _say(text: str) -> None:
    print(f"tandem.eval: {text}", file=sys.stderr)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code. Wrong flags exit with 2."""
    from ._arguments import parse_arguments

    given = parse_arguments(words)
    try:
        from transformers.utils import logging

        from ._evaluation import Evaluation
        from ._language_model import ModelError, load
    except ImportError as error:
        _say(f"PyTorch and Transformers are needed: pip install 'tandem[transformers]': {error}")
        return 1
    from ._results import Results

    try:
        results = Results(given.out, given.resume)
    except (OSError, ValueError) as error:
        _say(f"--out: {error}")
        return 2
    warnings.filterwarnings("ignore", message=".*past_key_values.*deprecated", category=FutureWarning)  # TandemCache goes there
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = load(given.model, given.gguf_file, given.device)
        evaluation = Evaluation(model, given, results)
    except (ModelError, ValueError) as error:
        _say(str(error))
        return 2
    longest = max(given.contexts) + given.steps
    if 0 < model.n_positions < longest:
        _say(f"the model was made for {model.n_positions} tokens; {longest} are measured")
    return _measure(evaluation, results, given.find_dense_layers)


def _measure(evaluation: "Evaluation", results: "Results", dense_layers: bool) -> int:  # type: ignore[name-defined] # noqa: F821
    from ._dense_layers import write_dense_layers
    from ._pictures import draw
    from ._tables import write

    code = 0
    try:
        evaluation.run()
    except KeyboardInterrupt:
        _say(f"interrupted; {results.path} has what is complete, and --resume goes on")
        code = 130
    folder = results.path.parent
    table = write(results.lines)
    if dense_layers:
        table += "\n" + write_dense_layers(results.lines)
    (folder / "table.md").write_text(table)
    draw(results.lines, folder)
    print(table)
    return code


if __name__ == "__main__":
    sys.exit(main())
