# SPDX-License-Identifier: MIT
"""results.jsonl: one JSON object a line, written when its measurement is complete.

An object's member "what" holds everything that the figures depend on. --resume skips a measurement whose "what" is in the file.
An incomplete last line, from a run that was killed, is dropped.
"""
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

from .._engine import version

FILE = "results.jsonl"
What = dict[str, Any]


def versions() -> dict[str, str]:
    """Returns the versions of all software that computes."""
    return {"tandem": ".".join(map(str, version())), "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}}


def machine() -> dict[str, Any]:
    """Describes the processor and memory."""
    processor = ""
    try:
        with open("/proc/cpuinfo") as file:
            processor = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        pass
    return {"processor": processor or platform.machine(), "n_cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "system": platform.system(),
            "load": round(os.getloadavg()[0], 2)}


def _key(what: What) -> str:
    return json.dumps(what, sort_keys=True)


class Results:
    """The lines of one folder.

    Parameters
    ----------
    folder : Path
        Created if missing.
    resume : bool
        True: keep existing lines. False: the folder must not hold results.

    Raises
    ------
    FileExistsError
        The folder has results and `resume` is False.
    """

    def __init__(self, folder: pathlib.Path, resume: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self.lines: list[dict[str, Any]] = []
        if self.path.exists():
            if not resume:
                raise FileExistsError(f"{self.path} is there: --resume goes on with it, another --out begins anew")
            self._read()
        self._done = {_key(line["what"]) for line in self.lines}

    def _read(self) -> None:
        whole = self.path.read_bytes()
        complete = whole[:whole.rfind(b"\n") + 1]
        self.lines = [json.loads(line) for line in complete.splitlines()]
        if len(complete) < len(whole):
            os.truncate(self.path, len(complete))

    def has(self, what: What) -> bool:
        """Returns whether this was measured."""
        return _key(what) in self._done

    def add(self, what: What, figures: dict[str, Any]) -> None:
        """Appends a line to the file at once."""
        line = {"what": what, "figures": figures, "versions": versions(), "machine": machine(),
                "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
        self._done.add(_key(what))
