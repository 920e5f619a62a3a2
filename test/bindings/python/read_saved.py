# SPDX-License-Identifier: MIT
"""Reads saved sequences as docs/saved-sequences.md defines them, with NumPy and without libtandem.

  python3 read_saved.py FILE      prints the contents

Checksums are checked if the package `xxhash` is installed.
"""
import struct
import sys
from dataclasses import dataclass, field

import numpy as np

try:
    import xxhash
except ImportError:
    xxhash = None

TYPES = {1: "f32", 2: "f16", 3: "bf16", 4: "e4m3", 5: "q8_0", 6: "q4_0", 7: "q4_64"}
KINDS = {1: "k", 2: "k_scales", 3: "v", 4: "v_scales", 5: "hidden", 6: "positions", 7: "statistics", 8: "blob"}
LAYER = ("n_q_heads n_kv_heads k_head_dim v_head_dim v_aliases_k k_type v_type k_rotation x_type hidden_dim rope rope_dims "
         "sm_scale soft_cap sliding_window_tokens sinks rope_inv_freq rope_attn_factor").split()


class Corrupt(Exception):
    pass


@dataclass
class Saved:
    n_tokens: int
    model_id: int
    layers: list
    sections: dict = field(default_factory=dict)  # (kind, layer): payload
    blobs: dict = field(default_factory=dict)
    checked: bool = xxhash is not None

    def positions(self):
        given = self.sections.get(("positions", -1))
        return np.arange(self.n_tokens) if given is None else np.frombuffer(given, "<i4")

    def k(self, layer):
        """Returns f32 [n_tokens, n_kv_heads, k_head_dim], as tandem_sequence_read() does."""
        record = self.layers[layer]
        rows = self._rows(layer, "k", record["k_type"], record["k_head_dim"])
        if record["k_rotation"] == 1:
            rows = rows @ hadamard(record["k_head_dim"])
        return rows.astype(np.float32).transpose(1, 0, 2)

    def v(self, layer):
        record = self.layers[layer]
        if record["v_aliases_k"]:
            return self.k(layer)[:, :, :record["v_head_dim"]]
        return self._rows(layer, "v", record["v_type"], record["v_head_dim"]).astype(np.float32).transpose(1, 0, 2)

    def _rows(self, layer, plane, dtype, dim):
        shape = self.layers[layer]["n_kv_heads"], self.n_tokens, -1
        codes = np.frombuffer(self.sections[plane, layer], np.uint8).reshape(shape)
        if TYPES[dtype] not in ("q8_0", "q4_0"):
            return widened(codes, TYPES[dtype])
        scales = np.frombuffer(self.sections[plane + "_scales", layer], "<f2").reshape(shape).astype(np.float64)
        if TYPES[dtype] == "q8_0":
            numbers = codes.view(np.int8).astype(np.float64)
        else:
            numbers = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1).astype(np.float64) - 8
        return numbers * np.repeat(scales, 32, axis=2)[:, :, :dim]

    def statistics(self, layer):
        """Returns the policy's name, the begin of the window and, under "hgca", averages [n_q_heads, n_tokens] and
        selected tokens."""
        reader = Payload(self.sections["statistics", layer])
        found = {"policy": reader.take(16).rstrip(b"\0").decode(), "window_begin": reader.number()}
        if found["policy"] != "hgca":
            return found
        record = self.layers[layer]
        group = record["n_q_heads"] // record["n_kv_heads"]
        found["sink_tokens"], found["is_unjudged"], found["is_due"], n_queries = (reader.number() for _ in range(4))
        if n_queries:
            found["n_faded"], found["counted_end"] = reader.number(), reader.number()
            reader.take(4 * record["n_q_heads"] * n_queries * (record["k_head_dim"] + 1))
            reader.take(16 * n_queries)
        assert group >= 1
        found["maw"] = np.frombuffer(reader.take(4 * record["n_q_heads"] * self.n_tokens), "<f4").reshape(-1, self.n_tokens)
        found["selected"] = [np.frombuffer(reader.take(4 * reader.number()), "<i4") for _ in range(record["n_kv_heads"])]
        if reader.rest():
            raise Corrupt("bytes behind the statistics")
        return found


class Payload:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        if n < 0 or n > len(self.data) - self.at:
            raise Corrupt("a section ends too early")
        self.at += n
        return self.data[self.at - n:self.at]

    def number(self):
        return struct.unpack("<q", self.take(8))[0]

    def rest(self):
        return self.data[self.at:]


def hadamard(n):
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(n)


def widened(codes, dtype):
    if dtype == "f32":
        return codes.view("<f4").astype(np.float64)
    if dtype == "f16":
        return codes.view("<f2").astype(np.float64)
    if dtype == "bf16":
        return (codes.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    sign, exponent, mantissa = codes >> 7, (codes >> 3 & 15).astype(np.float64), (codes & 7).astype(np.float64)
    numbers = np.where(exponent == 0, mantissa / 8 * 2.0 ** -6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(codes & 127 == 127, np.nan, np.where(sign == 1, -numbers, numbers))


def check(data, checksum, where):
    if xxhash is not None and xxhash.xxh3_64_intdigest(data) != checksum:
        raise Corrupt(f"{where}: its checksum is wrong")


def read(data):
    head = Payload(data)
    magic, version, header_bytes, layer_bytes, n_layers = struct.unpack("<8sIIII", head.take(24))
    n_tokens, n_bytes, model_id, n_sections, flags, reserved = struct.unpack("<qqQIIQ", head.take(40))
    if magic != b"TANDEMSQ" or version != 1 or (header_bytes, layer_bytes) != (64, 128) or reserved:
        raise Corrupt("no saved sequence of version 1")
    if n_bytes != len(data):
        raise Corrupt(f"{len(data)} bytes, the header says {n_bytes}")
    layers = []
    for _ in range(n_layers):
        layers.append(dict(zip(LAYER, struct.unpack("<12i2fqQQd", head.take(88)), strict=True)))
        if any(head.take(40)):
            raise Corrupt("reserved bytes of a layer are not 0")
    covered = data[:head.at]
    check(covered, struct.unpack("<Q", head.take(8))[0], "header")
    saved = Saved(n_tokens, model_id, layers)
    for _ in range(n_sections):
        begin = head.at
        kind, layer, size = struct.unpack("<Iiq", head.take(16))
        payload = head.take(size)
        covered = data[begin:head.at]
        check(covered, struct.unpack("<Q", head.take(8))[0], KINDS[kind])
        if KINDS[kind] == "blob":
            blob = Payload(payload)
            name = blob.take(blob.number()).decode()
            saved.blobs[name] = bytes(blob.rest())
        else:
            saved.sections[KINDS[kind], layer] = payload
    if head.rest() or ((6, -1) in saved.sections) > (flags & 1):
        raise Corrupt("bytes behind the last section")
    return saved


def main():
    with open(sys.argv[1], "rb") as file:
        saved = read(file.read())
    print(f"{saved.n_tokens} tokens, {len(saved.layers)} layers, model {saved.model_id}, "
          f"checksums {'are right' if saved.checked else 'were not looked at: no package xxhash'}")
    for name, blob in saved.blobs.items():
        print(f"blob {name}: {len(blob)} bytes")
    for i, layer in enumerate(saved.layers):
        print(f"layer {i}: {layer['n_kv_heads']} KV heads, k {TYPES[layer['k_type']]} [{layer['k_head_dim']}], "
              f"v {TYPES[layer['v_type']]} [{layer['v_head_dim']}]", *(
                  [saved.statistics(i)["policy"]] if ("statistics", i) in saved.sections else []))


if __name__ == "__main__":
    main()
