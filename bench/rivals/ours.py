# SPDX-License-Identifier: MIT
"""Tandem's own lines. decode_call_bench measures whole calls through the C ABI, and the kernel of the window alone."""
import json
import os
import pathlib
import subprocess
import tempfile

from cells import TERMS

CALLS = ("tandem", "tandem-eager")
KERNEL = "tandem-kernel"


def find_bench(build):
    """Returns the bench and the module of a build folder, or None if one is missing."""
    folder = pathlib.Path(build)
    files = [folder / "bench" / "decode_call_bench", folder / "libtandem-cuda.so"]
    return files if all(file.is_file() for file in files) else None


def lines_of(bench, cells, extra):
    """Runs the bench over cells of one group. Yields (cell, the bench's result or a failure).

    A cell at which the bench ends is yielded as a failure, and the bench starts again with the next cell.
    """
    program, module = bench
    least, most = TERMS[cells[0].group]
    # A build folder may have been moved.
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{module.resolve().parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    left = list(cells)
    while left:
        words = ",".join(cell.name for cell in left)
        command = [str(program), str(module), "0", words, "--mib", str(least), "--ms", str(most), *extra]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
            try:
                for text in process.stdout:
                    if text.startswith("{") and text.endswith("}\n"):
                        said, cell = json.loads(text), left.pop(0)
                        if said.get("case") != cell.name:
                            said = {"failure": f"the bench answers for {said.get('case')}"}
                        yield cell, said
            finally:
                process.kill()
                process.wait()
            errors.seek(0)
            said = errors.read().strip().splitlines()
        if left:
            yield left.pop(0), {"failure": said[-1] if said else f"the bench ended with {process.returncode}"}


def results_of(cell, said, contestants):
    """Yields the lines of the results file for one line of the bench."""
    if "failure" in said:
        for contestant in contestants:
            yield contestant, {"failure": said["failure"]}
        return
    for contestant, field in (("tandem", "planned_us"), ("tandem-eager", "eager_us"), (KERNEL, "kernel_us")):
        if contestant not in contestants:
            continue
        if said.get(field) is None:
            yield contestant, {"failure": "no such call: no planned step takes so many queries"}
        elif not said["is_right"]:
            yield contestant, {"failure": f"wrong: error {said.get('error')}"}
        else:
            yield contestant, {"us": said[field], **{name: said[name] for name in ("layers", "error", "card") if name in said}}


def measure(bench, cells, missing):
    """missing(cell, contestant) tells whether to measure this pair. Yields (cell, contestant, line)."""
    for contestants, extra in ((CALLS, []), ((KERNEL,), ["--kernel"])):
        wanted = [cell for cell in cells if any(missing(cell, each) for each in contestants)]
        if not wanted:
            continue
        for cell, said in lines_of(bench, wanted, extra):
            for contestant, line in results_of(cell, said, [each for each in contestants if missing(cell, each)]):
                yield cell, contestant, line
