# SPDX-License-Identifier: MIT
"""A page of the manual before it becomes roff or HTML: sections of blocks, blocks of spans of text."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Span:
    """style: "" plain, "bold", "italic", "code" (bold in roff), or "page": a reference to `text` in `section`."""
    text: str
    style: str = ""
    section: int = 0  # for a reference


@dataclasses.dataclass(frozen=True)
class Paragraph:
    spans: tuple


@dataclasses.dataclass(frozen=True)
class Lines:
    """Lines that are kept as they are. is_synopsis: declarations; else rows of shapes."""
    lines: tuple  # of tuples of spans
    is_synopsis: bool = False


@dataclasses.dataclass(frozen=True)
class Code:
    text: str


@dataclasses.dataclass(frozen=True)
class Bullets:
    items: tuple  # of tuples of blocks


@dataclasses.dataclass(frozen=True)
class Terms:
    """Terms with their texts. is_compact: no empty line between the items."""
    items: tuple  # of (tuple of spans, tuple of blocks)
    is_compact: bool = False


@dataclasses.dataclass(frozen=True)
class Heading:
    text: str  # title of a part of a section


@dataclasses.dataclass
class Section:
    title: str
    blocks: list


@dataclasses.dataclass
class Page:
    name: str
    section: int
    summary: str
    sections: list
    aliases: tuple = ()  # more names of the page: functions and callbacks that it explains

    @property
    def file(self):
        return f"{self.name}.{self.section}"

    def section_of(self, title):
        """Returns the text of a section, for checks; "" if there is none."""
        return "\n".join(text_of(block) for section in self.sections if section.title == title for block in section.blocks)


def plain(spans):
    return "".join(f"{span.text}({span.section})" if span.style == "page" else span.text for span in spans)


def text_of(block):
    """Returns the words of a block."""
    if isinstance(block, Paragraph):
        return plain(block.spans)
    if isinstance(block, Lines):
        return "\n".join(plain(line) for line in block.lines)
    if isinstance(block, (Code, Heading)):
        return block.text
    if isinstance(block, Bullets):
        return "\n".join(text_of(inner) for item in block.items for inner in item)
    return "\n".join(plain(term) + "\n" + "\n".join(text_of(inner) for inner in body) for term, body in block.items)


def references_of(page):
    """Returns the names and sections of the pages that a page refers to."""
    def of_spans(spans):
        return [(span.text, span.section) for span in spans if span.style == "page"]

    def of_block(block):
        if isinstance(block, Paragraph):
            return of_spans(block.spans)
        if isinstance(block, Lines):
            return [found for line in block.lines for found in of_spans(line)]
        if isinstance(block, Bullets):
            return [found for item in block.items for inner in item for found in of_block(inner)]
        if isinstance(block, Terms):
            return [found for term, body in block.items for found in
                    [*of_spans(term), *(one for inner in body for one in of_block(inner))]]
        return []

    return [found for section in page.sections for block in section.blocks for found in of_block(block)]
