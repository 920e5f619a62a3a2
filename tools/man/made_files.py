# SPDX-License-Identifier: MIT
"""What the scripts share that make files of the programs' help texts: which programs, and writing the files."""
import pathlib
import shutil


def chosen_programs(parser, text, known):
    """The programs of `text`, with commas; ends by the parser's error where one is unknown."""
    programs = [name for name in text.split(",") if name]
    unknown = [name for name in programs if name not in known]
    if unknown:
        parser.error(f"--programs = {unknown[0]} is none of {', '.join(known)}")
    return programs


def write_files(out, folders, files):
    """Writes files under the folder `out`: {path: text, or a pathlib.Path that becomes a link}. Empties `folders` first, so that
    no file stays of a page that is gone."""
    for folder in folders:
        shutil.rmtree(out / folder, ignore_errors=True)
    for path, text in files.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, pathlib.Path):
            (out / path).symlink_to(text)
        else:
            (out / path).write_text(text)
