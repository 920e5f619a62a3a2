# SPDX-License-Identifier: MIT
"""Writes a page, and the index of all pages, as HTML with one stylesheet and no script."""
import html
import re

from document import Bullets, Code, Heading, Lines, Paragraph, Terms

TAGS = {"bold": "b", "italic": "i", "code": "code"}
COMPACT = '<dl class="compact">'
SECTIONS = {1: "Programs", 3: "Functions and structs", 7: "Overviews"}
STYLE = """:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 1.5rem auto 4rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 1rem 0; }
h2 { font-size: 1rem; letter-spacing: .04em; margin: 1.8rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p, dl, ul, pre { margin: .5rem 0; }
dt { margin-top: .6rem; }
dd { margin: 0 0 0 2rem; }
dl.compact dt { margin-top: .2rem; }
pre { overflow-x: auto; padding: .6rem .8rem; background: color-mix(in srgb, currentColor 7%, transparent); }
pre, code, dt { font-family: ui-monospace, monospace; font-size: .9em; }
pre b, dt b { font-weight: 600; }
nav { font-size: .9rem; }
"""


def name_of(page):
    return page.file + ".html"


def anchor_of(title):
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


class Writer:
    """files: of the existing pages, by (name, section)."""

    def __init__(self, files):
        self.files = files

    def spans(self, spans):
        made = ""
        for span in spans:
            text = html.escape(span.text, quote=False)
            if span.style == "page":
                file = self.files.get((span.text, span.section))
                label = f"{text}({span.section})"
                made += f'<a href="{file}">{label}</a>' if file else label
            else:
                made += f"<{TAGS[span.style]}>{text}</{TAGS[span.style]}>" if span.style else text
        return made

    def block(self, block):
        if isinstance(block, Paragraph):
            return f"<p>{self.spans(block.spans)}</p>"
        if isinstance(block, Lines):
            return "<pre>" + "\n".join(self.spans(line) for line in block.lines) + "</pre>"
        if isinstance(block, Code):
            return f"<pre>{html.escape(block.text, quote=False)}</pre>"
        if isinstance(block, Heading):
            return f'<h3 id="{anchor_of(block.text)}">{html.escape(block.text)}</h3>'
        if isinstance(block, Bullets):
            return "<ul>\n" + "\n".join(f"<li>{self.blocks(item)}</li>" for item in block.items) + "\n</ul>"
        assert isinstance(block, Terms)
        items = "\n".join(f"<dt>{self.spans(term)}</dt>\n<dd>{self.blocks(body)}</dd>" for term, body in block.items)
        return f"{COMPACT if block.is_compact else '<dl>'}\n{items}\n</dl>"

    def blocks(self, blocks):
        return "\n".join(self.block(block) for block in blocks)


def document(title, body):
    return ("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
            f"<title>{html.escape(title)}</title>\n<link rel=\"stylesheet\" href=\"style.css\">\n</head>\n<body>\n{body}\n"
            "</body>\n</html>\n")


def page(page, version, files):
    writer = Writer(files)
    names = ", ".join(html.escape(name) for name in (page.name, *page.aliases))
    parts = [f'<nav><a href="index.html">tandem {version}</a></nav>', f"<h1>{page.name}({page.section})</h1>",
             f"<p>{names}: {html.escape(page.summary, quote=False)}</p>"]
    for section in page.sections:
        parts += [f'<h2 id="{anchor_of(section.title)}">{html.escape(section.title)}</h2>', writer.blocks(section.blocks)]
    return document(f"{page.name}({page.section})", "\n".join(parts))


def index(pages, version):
    """Returns the index: the pages by section (overviews, programs, functions and structs)."""
    parts = [f"<h1>tandem {version}: manual</h1>"]
    for section in (7, 1, 3):
        rows = [f'<dt><a href="{name_of(page)}">{", ".join((page.name, *page.aliases))}</a></dt>\n'
                f"<dd>{html.escape(page.summary, quote=False)}</dd>" for page in sorted(pages, key=lambda page: page.name)
                if page.section == section]
        if rows:
            parts += [f"<h2>{SECTIONS[section]}</h2>", COMPACT, *rows, "</dl>"]
    return document(f"tandem {version}: manual", "\n".join(parts))
