# SPDX-License-Identifier: MIT
"""The shapes that run.py measures, in groups."""
from dataclasses import dataclass

MOST_LAYER_BYTES = 420_000_000  # for a cell of the group mqa


@dataclass(frozen=True)
class Shape:
    """Query heads, KV heads and dims of a layer."""

    heads: int
    kv_heads: int
    dim: int

    def __str__(self):
        return f"{self.heads}/{self.kv_heads}x{self.dim}"


@dataclass(frozen=True)
class Cell:
    """One shape of a call. The new rows of each sequence are the last of its keys.

    before: keys of each sequence before the call
    copies: sequences of each of these lengths
    """

    group: str
    before: tuple
    copies: int
    queries: int
    shape: Shape

    @property
    def name(self):
        """The cell's name in decode_call_bench's syntax."""
        return f"{'+'.join(map(str, self.before))}x{self.copies}x{self.queries}@{self.shape}"

    @property
    def totals(self):
        """Number of keys that the last query of each sequence sees."""
        return [length + self.queries for length in self.before] * self.copies

    @property
    def is_ragged(self):
        return len(self.before) > 1

    @property
    def key_bytes(self):
        return sum(self.totals) * self.shape.kv_heads * self.shape.dim * 4

    @property
    def bytes(self):
        """Bytes that a call must move: keys and values, queries and outputs, all of 16 bits."""
        return self.key_bytes + len(self.totals) * self.queries * self.shape.heads * self.shape.dim * 4

    @property
    def flops(self):
        """Floating-point operations of the unmasked pairs."""
        pairs = sum(self.queries * (total - 0.5 * (self.queries - 1)) for total in self.totals)
        return 4.0 * self.shape.dim * self.shape.heads * pairs


WIDE, ONE, MANY = Shape(32, 8, 128), Shape(8, 1, 256), Shape(16, 16, 64)


def decode():
    for total in (4096, 16384, 65536, 131072, 262144):
        yield Cell("decode", (total - 1,), 1, 1, WIDE)
    yield Cell("decode", (4095,), 16, 1, WIDE)


def append():
    for shape in (WIDE, ONE, MANY):
        for before in (1024, 10_240, 102_400):
            for queries in (2, 4, 8, 16, 17, 32, 64, 128):
                yield Cell("append", (before,), 1, queries, shape)


# KV heads, dims, query heads per KV head.
MQA_SHAPES = ((1, 64, (1, 2, 4, 8, 12, 16, 32, 64, 71)), (1, 80, (4, 8)), (1, 96, (8,)), (1, 112, (8,)),
              (1, 128, (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 71)), (1, 192, (4, 8, 16)),
              (1, 256, (1, 2, 4, 8, 16, 32)), (2, 64, (4, 8)), (2, 128, (1, 2, 3, 4, 8, 16)), (2, 256, (2, 4, 8)),
              (4, 64, (1, 8)), (4, 128, (1, 4, 7, 8)), (8, 64, (1, 4)), (8, 128, (1, 4, 8)), (12, 64, (1,)), (12, 80, (1,)),
              (16, 64, (1,)))
MQA_TOTALS = (1, 17, 128, 1000, 5000, 20_000, 65_536, 200_000)


def mqa():
    for kv_heads, dim, sizes in MQA_SHAPES:
        for size in sizes:
            for total in MQA_TOTALS:
                cell = Cell("mqa", (total - 1,), 1, 1, Shape(size * kv_heads, kv_heads, dim))
                if cell.key_bytes <= MOST_LAYER_BYTES:
                    yield cell


def prefill():
    for dim in (64, 128, 192, 256):
        for before in (0, 65_536, 131_072):
            yield Cell("prefill", (before,), 1, 8192, Shape(32, 8, dim))


def ragged():
    totals = (17, 300, 1000, 4096, 10_000, 40_000, 131_072)
    for shape in (WIDE, ONE, MANY):
        for queries in (1, 16):
            yield Cell("ragged", tuple(total - queries for total in totals), 1, queries, shape)


GROUPS = {make.__name__: make for make in (decode, append, mqa, prefill, ragged)}
# For each group: the least MiB of keys over which calls rotate, and the approximate milliseconds for each contestant.
TERMS = {"decode": (4096, 1000), "append": (2048, 200), "mqa": (128, 150), "prefill": (600, 2000), "ragged": (600, 1000)}
MOST_LAYERS = 64


def n_layers(cell):
    least = TERMS[cell.group][0] << 20
    return min(MOST_LAYERS, max(2, -(-least // cell.key_bytes)))


def cells_of(only):
    return [cell for name in (only or GROUPS) for cell in GROUPS[name]()]
