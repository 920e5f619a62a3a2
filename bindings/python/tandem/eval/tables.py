# SPDX-License-Identifier: MIT
"""``python -m tandem.eval.tables DIR...``: joins the results of several runs in one set of tables, such as processes with a
``--part`` each."""
import json
import pathlib
import sys
from collections.abc import Sequence

from ._pictures import Line
from ._results import FILE
from ._tables import write


def lines_of(folders: Sequence[pathlib.Path]) -> list[Line]:
    """Returns all complete lines, each measurement once."""
    found: dict[str, Line] = {}
    for folder in folders:
        whole = (folder / FILE).read_text()
        for text in whole[:whole.rfind("\n") + 1].splitlines():
            line = json.loads(text)
            found.setdefault(json.dumps(line["what"], sort_keys=True), line)
    return list(found.values())


def main(words: Sequence[str] | None = None) -> int:
    """Prints the tables. Returns the exit code."""
    folders = [pathlib.Path(word) for word in (sys.argv[1:] if words is None else words)]
    missing = [str(folder) for folder in folders if not (folder / FILE).is_file()]
    if missing or not folders:
        print(f"tandem.eval.tables: {', '.join(missing) or 'no folder'}: there is no {FILE}", file=sys.stderr)
        return 2
    print(write(lines_of(folders)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
