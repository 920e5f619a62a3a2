# SPDX-License-Identifier: MIT
"""The rivals: attention of PyTorch (cuDNN, flash), and of libraries with the C interface that README.md describes.

Each contestant attends cells over layers of random keys in turn. In "+rows" lines two copies write the new rows of K and V
before each call, as a rival's caller must.
"""
import ctypes
import importlib.util
import math
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from cells import TERMS, n_layers

MOST_ERROR = 5e-3  # relative, of bf16
CALLS, REPLAYS, UNCOUNTED = 32, 9, 2


class Layers:
    """Keys of a cache, with room for the longest in each sequence. The views by token and by head have different keys."""

    def __init__(self, cell):
        self.cell, shape = cell, cell.shape
        batch, longest = len(cell.totals), max(cell.totals)
        sizes = (n_layers(cell), 2, batch * longest * shape.kv_heads * shape.dim)
        self.flat = torch.empty(sizes, device="cuda", dtype=torch.bfloat16)
        for layer in self.flat:
            layer.normal_()
        self.n = sizes[0]
        self.by_token = self.flat.view(self.n, 2, batch, longest, shape.kv_heads, shape.dim)
        self.by_head = self.flat.view(self.n, 2, batch, shape.kv_heads, longest, shape.dim)
        self.q = torch.randn(batch, cell.queries, shape.heads, shape.dim, device="cuda", dtype=torch.bfloat16)
        self.new = torch.randn(batch, cell.queries, shape.kv_heads, shape.dim, device="cuda", dtype=torch.bfloat16)


class Contestant:
    """Base class. Subclasses have a name and these methods.

    see(i): returns K and V of layer i as [batch, tokens, KV heads, dims]
    call(i): attends layer i
    output(): returns the last call's output, [batch, queries, heads, dims]
    """

    is_causal = True
    note = None

    def __init__(self, layers):
        self.layers, self.cell = layers, layers.cell

    def write_rows(self, i):
        """Writes the new rows of layer i in two copies, or two for each sequence if lengths differ."""
        for x in self.see(i):
            if not self.cell.is_ragged:
                x[:, -self.cell.queries:].copy_(self.layers.new)
                continue
            for s, total in enumerate(self.cell.totals):
                x[s, total - self.cell.queries:total].copy_(self.layers.new[s])

    def close(self):
        pass


class Sdpa(Contestant):
    """PyTorch's scaled_dot_product_attention over keys by head. Makes a call for each sequence if lengths differ.

    cuDNN's causal mask works only for squares. Other shapes are attended without a mask, which is slightly more work.
    """

    backend = None

    def __init__(self, layers):
        super().__init__(layers)
        queries, totals = self.cell.queries, self.cell.totals
        self.is_square = queries > 1 and all(total == queries for total in totals)
        self.has_bias = queries > 1 and not self.is_square and self.backend == SDPBackend.FLASH_ATTENTION
        self.is_causal = queries == 1 or self.is_square or self.has_bias
        self.q = layers.q.transpose(1, 2)
        self.biases = [causal_lower_right(queries, total) if self.has_bias else None for total in totals]
        if not self.is_causal:
            self.note = "without a mask"
        if self.cell.is_ragged:
            self.note = ", ".join(filter(None, (self.note, "a call for each sequence")))

    def see(self, i):
        return [x.transpose(1, 2) for x in self.layers.by_head[i]]

    def attend(self, q, k, v, bias):
        if self.is_square:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)

    def call(self, i):
        k, v = self.layers.by_head[i]
        with sdpa_kernel([self.backend]):
            if not self.cell.is_ragged:
                self.o = self.attend(self.q, k, v, self.biases[0])
                return
            self.o = [self.attend(self.q[s:s + 1], k[s:s + 1, :, :total], v[s:s + 1, :, :total], self.biases[s])
                      for s, total in enumerate(self.cell.totals)]

    def output(self):
        return (torch.cat(self.o) if self.cell.is_ragged else self.o).transpose(1, 2)


class Cudnn(Sdpa):
    name, backend = "cudnn", SDPBackend.CUDNN_ATTENTION


class Flash(Sdpa):
    name, backend = "flash", SDPBackend.FLASH_ATTENTION


class ByToken(Contestant):
    """Attends keys by token."""

    def see(self, i):
        return self.layers.by_token[i]

    def output(self):
        return self.o


class Library(ByToken):
    """A shared library with the interface of README.md. prefix: prefix of its function names."""

    library, prefix = None, None

    def __init__(self, layers):
        super().__init__(layers)
        cell, shape = self.cell, self.cell.shape
        self.o = torch.full_like(layers.q, math.nan)
        seen = (layers.q, *layers.by_token[0], self.o)
        strides = (ctypes.c_longlong * 12)(*[stride for x in seen for stride in x.stride()[:3]])
        self.lengths = (ctypes.c_int * len(cell.totals))(*cell.totals)
        sizes = (len(cell.totals), cell.queries, max(cell.totals), shape.heads, shape.kv_heads, shape.dim)
        create = getattr(self.library, f"{self.prefix}_create")
        create.restype = ctypes.c_void_p
        create.argtypes = [ctypes.c_int] * 7 + [ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        self.on_device = torch.tensor(cell.totals, dtype=torch.int32, device="cuda") if cell.is_ragged else None
        self.handle = create(*sizes, 1, 0.0, strides, self.lengths_of(), 0)
        if not self.handle:
            raise RuntimeError(f"{self.prefix}_create() has no kernel for this shape")
        self.run = getattr(self.library, f"{self.prefix}_run")
        self.run.argtypes = [ctypes.c_void_p] * 7

    def lengths_of(self):
        return None if self.on_device is None else self.on_device.data_ptr()

    def call(self, i):
        k, v = self.layers.by_token[i]
        stream = torch.cuda.current_stream().cuda_stream
        code = self.run(self.handle, self.layers.q.data_ptr(), k.data_ptr(), v.data_ptr(), self.o.data_ptr(), None, stream)
        if code != 0:
            raise RuntimeError(f"{self.prefix}_run() returns {code}")

    def close(self):
        destroy = getattr(self.library, f"{self.prefix}_destroy")
        destroy.argtypes, destroy.restype = [ctypes.c_void_p], None
        destroy(self.handle)


class FlashInferLibrary(Library):
    def lengths_of(self):
        return ctypes.addressof(self.lengths)


class FlashInferPackage(ByToken):
    """FlashInfer's paged prefill kernel, planned before, which its decode with tensor cores uses too. Pages of 16 tokens."""

    name, PAGE = "flashinfer", 16

    def __init__(self, layers):
        super().__init__(layers)
        import flashinfer
        cell, shape = self.cell, self.cell.shape
        numbers = {"dtype": torch.int32, "device": "cuda"}
        n_pages = [-(-total // self.PAGE) for total in cell.totals]
        self.ends = [sum(n_pages[:s]) for s in range(len(n_pages) + 1)]
        size = (layers.n, sum(n_pages), 2, self.PAGE, shape.kv_heads, shape.dim)
        self.caches = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        new = [(s, total - cell.queries + i) for s, total in enumerate(cell.totals) for i in range(cell.queries)]
        self.places = (torch.tensor([self.ends[s] + token // self.PAGE for s, token in new], device="cuda"),
                       torch.tensor([token % self.PAGE for s, token in new], device="cuda"))
        self.new = layers.new.flatten(0, 1)
        self.q = layers.q.flatten(0, 1)
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"), "NHD")
        self.wrapper.plan(torch.arange(len(cell.totals) + 1, **numbers) * cell.queries, torch.tensor(self.ends, **numbers),
                          torch.arange(sum(n_pages), **numbers),
                          torch.tensor([(total - 1) % self.PAGE + 1 for total in cell.totals], **numbers),
                          shape.heads, shape.kv_heads, shape.dim, self.PAGE, causal=True, q_data_type=torch.bfloat16)

    def see(self, i):
        """Yields K and V with each sequence's keys padded with zeros to the longest."""
        longest = max(self.cell.totals)
        pad = torch.nn.functional.pad
        for plane in (self.caches[i, :, 0], self.caches[i, :, 1]):
            rows = [plane[begin:end].flatten(0, 1)[:longest] for begin, end in zip(self.ends, self.ends[1:])]
            yield torch.stack([pad(each, (0, 0, 0, 0, 0, longest - len(each))) for each in rows])

    def write_rows(self, i):
        for plane in (0, 1):
            self.caches[i, :, plane].index_put_(self.places, self.new)

    def call(self, i):
        self.o = self.wrapper.run(self.q, self.caches[i])

    def output(self):
        return self.o.view(self.layers.q.shape)


def is_importable(name):
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def contestants_of(fa3, flashinfer):
    """Returns classes by name. fa3, flashinfer: files, or None."""
    found = {"cudnn": Cudnn, "flash": Flash}
    if fa3:
        found["fa3"] = type("Fa3", (Library,), {"name": "fa3", "prefix": "fa3", "library": ctypes.CDLL(fa3)})
    if flashinfer:
        kind = {"name": "flashinfer", "prefix": "flashinfer", "library": ctypes.CDLL(flashinfer)}
        found["flashinfer"] = type("FlashInfer", (FlashInferLibrary,), kind)
    elif is_importable("flashinfer"):
        found["flashinfer"] = FlashInferPackage
    return found


def expected(contestant):
    """Returns some rows of layer 0 in double precision, and their places (sequence, query)."""
    cell, shape = contestant.cell, contestant.cell.shape
    q, (k, v) = contestant.layers.q, contestant.see(0)
    sequences = sorted({0, len(cell.totals) // 2, len(cell.totals) - 1})
    places = [(s, row) for s in sequences for row in sorted({0, cell.queries // 2, cell.queries - 1})]
    wanted = []
    for s, row in places:
        n = cell.totals[s] - (cell.queries - 1 - row if contestant.is_causal else 0)
        heads = q[s, row].double().view(shape.kv_heads, -1, shape.dim)
        out = []
        for h in range(shape.kv_heads):
            weights = torch.softmax(heads[h] @ k[s, :n, h].double().T / math.sqrt(shape.dim), -1)
            out.append(weights @ v[s, :n, h].double())
        wanted.append(torch.cat(out))
    return torch.stack(wanted), places


def error_of(contestant):
    """Returns the largest relative error over rows of all heads: rows that see few keys are far larger than others."""
    wanted, places = expected(contestant)
    contestant.call(0)
    torch.cuda.synchronize()
    output = contestant.output()
    got = torch.stack([output[s, row].double() for s, row in places])
    return float(((got - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)).max())


def event_us(action):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def time_of(call, n, most_ms):
    """Returns microseconds per call, in graphs that rotate over n layers; median of replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        torch.cuda.synchronize()
        once = max(1.0, event_us(lambda: call(1)))
        n_calls = max(1, min(max(CALLS, n), int(1e3 * most_ms / (REPLAYS + UNCOUNTED) / once)))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for i in range(n_calls):
                call(i % n)
        finally:
            graph.capture_end()
        times = [event_us(graph.replay) / n_calls for _ in range(REPLAYS + UNCOUNTED)]
    return statistics.median(times[UNCOUNTED:])


def measure(kind, layers, writes):
    """Returns the file's line for a cell and a contestant. writes: copies write the new rows."""
    contestant = kind(layers)
    try:
        error = error_of(contestant)
        line = {"error": error, "layers": layers.n, **({"note": contestant.note} if contestant.note else {})}
        if not error < MOST_ERROR:
            return {**line, "failure": f"wrong: error {error:.1e}"}

        def call(i):
            if writes:
                contestant.write_rows(i)
            contestant.call(i)
        return {**line, "us": time_of(call, layers.n, TERMS[layers.cell.group][1])}
    finally:
        torch.cuda.synchronize()
        contestant.close()


def try_to_make_layers(cell):
    """Returns the layers, or None if they do not fit in memory; then no contestant is measured."""
    try:
        return Layers(cell)
    except RuntimeError:
        return None


def try_to_measure(kind, layers, writes):
    if layers is None:
        return {"failure": "no memory for the keys"}
    try:
        return measure(kind, layers, writes)
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError) as error:
        return {"failure": (str(error).splitlines() or [type(error).__name__])[0][:120]}


def is_alive():
    """Returns False if a contestant has left the GPU in a state that only a new process can end."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def machine():
    """Measures the card's copy speed in GB/s, reads and writes counted, and its bf16 products in TFLOP/s."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").zero_()
    b = torch.empty_like(a)
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(m)
    copy = statistics.median(event_us(lambda: b.copy_(a)) for _ in range(9))
    product = statistics.median(event_us(lambda: torch.mm(m, m, out=out)) for _ in range(9))
    return {"card": torch.cuda.get_device_name(), "copy_gb_per_s": 2 * (1 << 30) / copy * 1e-3,
            "tflop_per_s": 2 * 8192**3 / product * 1e-6, "torch": torch.__version__}
