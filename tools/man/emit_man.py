# SPDX-License-Identifier: MIT
"""Writes a page in the macros of man(7)."""
import re
import textwrap

from document import Bullets, Code, Heading, Lines, Paragraph, Terms
from rules import sentences_of

WIDTH = 78  # of source lines
FONTS = {"bold": "B", "italic": "I", "code": "B", "page": "B"}
SPECIAL = {"\\": "\\e", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}


def escape(text, is_literal=False):
    """Escapes text. is_literal: a reader may copy it. Its hyphens become minus signs, as in libtandem-cuda.so and --kv-len."""
    text = re.sub(r"[\\'`^~]", lambda found: SPECIAL[found[0]], text)
    text = re.sub(r"\S*(?:\w[./_]\w|--\w)\S*", lambda found: found[0].replace("-", "\\-"), text)
    text = re.sub(r"(?<!\\)-" if is_literal else r"(?<![A-Za-z\\])-|(?<!\\)-(?![A-Za-z0-9])", r"\\-", text)
    return re.sub(r"[^\x00-\x7f]", lambda found: f"\\[u{ord(found[0]):04X}]", text)


def guarded(line):
    """Returns the line so that roff never takes it for a request."""
    return "\\&" + line if line.startswith((".", "'")) else line


def inline(spans):
    made = ""
    for span in spans:
        text = escape(span.text, span.style in ("code", "bold", "page"))
        made += f"\\f{FONTS[span.style]}{text}\\fP" if span.style else text
        made += f"({span.section})" if span.style == "page" else ""
    return made


def filled(text):
    """Splits running text into lines: each sentence begins a new one."""
    lines = []
    for sentence in sentences_of(text):
        lines += textwrap.wrap(sentence, WIDTH, break_long_words=False, break_on_hyphens=False)
    return [guarded(line) for line in lines]


def literal(lines):
    return [guarded(line) if line else "\\&" for line in lines]


class Writer:
    def __init__(self):
        self.lines = []

    def add(self, *lines):
        self.lines += lines

    def block(self, block, is_first):
        """Writes a block. is_first: directly below a heading, where no paragraph may begin."""
        if isinstance(block, Paragraph):
            self.add(*([] if is_first else [".PP"]), *filled(inline(block.spans)))
        elif isinstance(block, Lines) and block.is_synopsis:
            self.add(*([] if is_first else [".PP"]), ".nf", *literal([inline(line) for line in block.lines]), ".fi")
        elif isinstance(block, (Lines, Code)):
            self.add(*([] if is_first else [".PP"]), ".in +4n", ".nf", *self.kept(block), ".fi", ".in")
        elif isinstance(block, Bullets):
            for item in block.items:
                self.item(".IP \\(bu 2", [], item)
        elif isinstance(block, Terms):
            for i, (term, body) in enumerate(block.items):
                self.add(*([".PD 0"] if block.is_compact and i == 1 else []))
                if body:
                    self.item(".TP", [guarded(inline(term))], body)
                else:
                    self.add(*([] if is_first and i == 0 else [".PP"]), *filled(inline(term)))
            self.add(*([".PD"] if block.is_compact and len(block.items) > 1 else []))
        elif isinstance(block, Heading):
            self.add(f".SS {escape(block.text)}")

    @staticmethod
    def kept(block):
        if isinstance(block, Code):
            return literal([escape(line, True) for line in block.text.splitlines()])
        return literal([inline(line) for line in block.lines])

    def item(self, macro, term, body):
        """Writes an item of a list. Blocks after its first paragraph get the same indent."""
        self.add(macro, *term)
        for i, block in enumerate(body):
            if isinstance(block, Paragraph):
                self.add(*([".IP"] if i and isinstance(body[i - 1], Paragraph) else []), *filled(inline(block.spans)))
            elif isinstance(block, (Lines, Code)):
                self.add(".nf", *self.kept(block), ".fi")
            else:
                self.add(".RS")
                self.block(block, False)
                self.add(".RE")


def page(page, version, date):
    """Returns the text of a page."""
    writer = Writer()
    names = ", ".join(escape(name, True) for name in (page.name, *page.aliases))
    writer.add('.\\" SPDX-License-Identifier: MIT. Made by tools/man/make.py.',
               f'.TH {escape(page.name.upper(), True)} {page.section} {date} "tandem {version}" "Tandem manual"',
               ".nh", ".ad l", ".SH NAME", *filled(names + " \\- " + escape(page.summary)))
    for section in page.sections:
        writer.add(f".SH {escape(section.title)}" if " " not in section.title else f'.SH "{escape(section.title)}"')
        is_first = True
        for block in section.blocks:
            writer.block(block, is_first)
            is_first = isinstance(block, Heading)
    return "\n".join(writer.lines) + "\n"
