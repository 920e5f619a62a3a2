# SPDX-License-Identifier: MIT
"""Turns a comment of the header into blocks. The rules follow the layout of the header's comments:

  - an empty line ends a paragraph;
  - "  - text" is a bullet, and lines with a deeper indent continue it;
  - "  term   text" is a term, and lines below the text continue it;
  - a sentence that begins with "name": is a paragraph of its own;
  - lines with several columns, and indented lines of no other kind, are rows: each column is a line.

Words: names of functions and structs are references. Codes of errors, constants and words in backticks are
bold. Names with an underscore are italic.
"""
import re

from document import Bullets, Lines, Paragraph, Span, Terms

BULLET = re.compile(r"( +)- (.*)")
TERM = re.compile(r"( +)([^\s\[](?:[^\[]*?\S)?)  +(\S.*)")
WORD = re.compile(r"`(?P<quoted>[^`]+)`|(?<![\w/.-])(?:struct )?(?P<name>tandem_\w+)(?P<call>\(\))?(?![\w*-]|\.\w)|"
                  r"(?<!\w)(?P<constant>TANDEM_[A-Z0-9_]+\*?)|(?<!\w)(?P<code>_?[A-Z][A-Z_]{1,})(?!\w)|"
                  r"(?<![\w.])(?P<pointer>\*[a-z]\w*)|(?<![\w*.])(?P<member>[a-z]\w*(?:_\w+)+)(?!\w*\()")


class Words:
    """pages: names of functions, structs and callbacks with the page that explains them; own: names that the current page
    explains; codes: of errors, without TANDEM_ERROR_."""

    def __init__(self, pages, codes, own=()):
        self.pages, self.codes, self.own = pages, codes, set(own)

    def about(self, *own):
        return Words(self.pages, self.codes, own)

    def span(self, found):
        if found["quoted"]:
            return Span(found["quoted"], "code")
        if found["name"]:
            page = self.pages.get(found["name"])
            if page is None:
                return Span(found[0], "code")
            if found["name"] in self.own or page in self.own:
                return Span(found["name"] + (found["call"] or ""), "bold")
            return Span(found["name"], "page", 3)
        if found["constant"]:
            return Span(found[0], "bold")
        if found["code"]:
            return Span(found[0], "bold" if found[0].lstrip("_") in self.codes else "")
        return Span(found[0], "italic")

    def spans(self, text):
        made, at = [], 0
        for found in WORD.finditer(text):
            made += [Span(text[at:found.start()]), self.span(found)]
            at = found.end()
        return tuple(span for span in [*made, Span(text[at:])] if span.text)

    def paragraph(self, text):
        return Paragraph(self.spans(text))


def sentence(text):
    """Returns a comment behind a member or a constant as a sentence."""
    begins_with_a_word = re.match(r"[a-z]+(?=[ ,;:]|$)", text)
    return (text[:1].upper() + text[1:] if begins_with_a_word else text) + ("" if text.endswith(".") else ".")


def indent_of(line):
    return len(line) - len(line.lstrip())


class Reader:
    def __init__(self, words):
        self.words = words

    def blocks(self, text):
        """Returns the blocks of a comment."""
        made = []
        for part in re.split(r"\n\s*\n", text.strip("\n")):
            lines = part.splitlines()
            while lines:
                made += self.next_block(lines)
        return join_terms(made)

    def next_block(self, lines):
        """Removes the lines of one block from the front and returns the block."""
        bullet, term = BULLET.match(lines[0]), TERM.match(lines[0])
        if bullet:
            return [Bullets((tuple(self.body(take_item(lines, len(bullet[1]) + 1, bullet[2]))),))]
        if term and not is_row(lines[0]):
            body = self.body(take_item(lines, term.start(3), term[3]))
            return [Terms(((self.words.spans(term[2]), tuple(body)),))]
        if indent_of(lines[0]) > 0:
            rows = []
            while lines and indent_of(lines[0]) > 0:
                rows += cells_of(lines.pop(0))
            return [Lines(tuple(self.words.spans(row) for row in rows))]
        taken = [lines.pop(0)]
        while lines and indent_of(lines[0]) == 0:
            taken.append(lines.pop(0))
        return [self.words.paragraph(part) for part in re.split(r'(?<=\.) (?="[\w+]+": )', " ".join(taken))]

    def body(self, lines):
        """Returns the blocks of a term's text: rows and paragraphs."""
        made, words = [], []
        for line in lines:
            if len(cells_of(line)) > 1 and "[" in line:
                made += [self.words.paragraph(" ".join(words))] if words else []
                rows = tuple(self.words.spans(cell) for cell in cells_of(line))
                made.append(Lines((made.pop().lines if made and isinstance(made[-1], Lines) and not words else ()) + rows))
                words = []
            else:
                words.append(line)
        return made + ([self.words.paragraph(" ".join(words))] if words else [])


def cells_of(line):
    return re.split(r"  +", line.strip())


def is_row(line):
    """True for several columns of which the first has a shape."""
    cells = cells_of(line)
    return len(cells) > 1 and "[" in cells[0]


def take_item(lines, column, first):
    """Removes and returns the lines of an item. first: the text of its first line; column: the least indent of later lines."""
    lines.pop(0)
    taken = [first]
    while lines and indent_of(lines[0]) >= column:
        taken.append(lines.pop(0).strip())
    return taken


def join_terms(blocks):
    """Joins neighbouring lists of one item into one list."""
    made = []
    for block in blocks:
        if made and isinstance(block, (Bullets, Terms)) and isinstance(made[-1], type(block)):
            made[-1] = type(block)(made[-1].items + block.items)
        else:
            made.append(block)
    return made
