# SPDX-License-Identifier: MIT
"""The gate of the tests of tandem.transformers: plain attention in f32 passes it, and slightly broken attention
fails."""
import hf_gate
import pytest
from hf_common import FAMILIES, batch, new_cache, torch
from hf_gate import assert_within_gate, attend_and_note, attention_of, models

LENS = [21, 9] + [1] * 7
LAST = len(LENS) * 4 - 1  # the call of the last layer in the last pass


def attend_by(monkeypatch, change):
    """Replaces attention by the plain one over inputs changed by `change(call number, visible, options)`."""
    calls, registered = [], hf_gate._registered

    def attend(*arguments, **others):
        call = attend_and_note(calls, registered, *arguments, **others)
        visible, options = call.visible.expand(len(call.output), -1, -1).clone(), dict(call.options)
        rows = change(len(calls) - 1, visible, options)
        made = attention_of(*call.inputs, ~visible[:, None], **options) * call.seen
        return made if rows is None else made[rows], None

    monkeypatch.setattr(hf_gate, "_registered", attend)


def gate(family, padded, **options):
    ids, mask = batch("cpu", (37, 20, 29) if padded else (37, 37, 37))
    assert_within_gate(options.get("three") or models(family, torch.float32, "cpu"), ids, mask, LENS, new_cache(8),
                       soft_cap=family == "gemma2")


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_attention_passes(monkeypatch, family):
    attend_by(monkeypatch, lambda *_: None)
    gate(family, True)


def wrong_scale(_, visible, options):
    options["scaling"] *= 1 + 1e-4


def next_key_is_seen(i, visible, _):
    if i == 0:
        visible[0, 5, 6] = True


def dropped_key(i, visible, _):
    if i == LAST:
        visible[2, 0, 30] = False


def window_is_longer(i, visible, _):
    if i % 4 == 0:  # the key before the oldest one that a row sees
        oldest = visible[0, -1].int().argmax()
        visible[0, -1, max(oldest - 1, 0)] = True


def padding_is_seen(i, visible, _):
    if i == LAST:
        visible[1, 0, 16] = True


def sinks_are_forgotten(_, visible, options):
    options["s_aux"] = None


def soft_cap_is_another(_, visible, options):
    options["softcap"] *= 1 + 1e-3


def rows_are_exchanged(i, visible, _):
    return [0, 2, 1] if i == LAST else None


@pytest.mark.parametrize("family, padded, change", [
    ("llama", False, wrong_scale), ("llama", False, next_key_is_seen), ("mistral", False, dropped_key),
    ("mistral", False, window_is_longer), ("qwen2", True, padding_is_seen), ("gpt_oss", True, sinks_are_forgotten),
    ("gemma2", True, soft_cap_is_another), ("gemma2", False, rows_are_exchanged)])
def test_broken_attention_fails(monkeypatch, family, padded, change):
    attend_by(monkeypatch, change)
    with pytest.raises(AssertionError, match="attention of layer"):
        gate(family, padded)


def test_what_is_broken_around_attention_fails():
    three = models("llama", torch.float32, "cpu")
    with torch.no_grad():
        three[0].model.layers[1].self_attn.k_proj.weight[3] *= 1.001
    with pytest.raises(AssertionError, match="logits"):
        gate("llama", True, three=three)
