# SPDX-License-Identifier: MIT
"""Compares pico in NumPy with the logits that Transformers computed, also with pruned attention."""
import numpy as np
import pytest
from pico_reference import MODEL, Pico, PrunedAttention, dense_attention, load_safetensors
from pruning_records import Record, Stage, preset

N_DECODED = 32
pytestmark = pytest.mark.skipif(not (MODEL / "model.safetensors").is_file(), reason="the model is not there")


def everything(layer_idx):
    """Returns stages of every judge that keep all candidates. All keys except 16 sinks and a window of 64 are candidates."""
    return Record(16, 64, (Stage("descent", 64, 16, 1024, 16), Stage("bounds", 64, 8, 1024, 8), Stage("exact", 64, 8, 1024, 4)))


@pytest.fixture(scope="module")
def golden():
    return load_safetensors(MODEL / "golden.safetensors")


@pytest.fixture(scope="module")
def model():
    return Pico()


@pytest.fixture(scope="module")
def state(model):
    return model.state(1024)


@pytest.fixture(scope="module")
def dense_logits(model, golden, state):
    return model.forward(golden["prompt"], state)[-N_DECODED:]


@pytest.fixture
def decoded(model, golden, dense_logits, state):
    """Returns the logits of the last tokens, decoded one by one after a dense prompt."""
    def decode(record_of_layer):
        attention = PrunedAttention(decode=record_of_layer)
        state.n_tokens = 1024 - N_DECODED
        return np.concatenate([model.forward([token], state, attention) for token in golden["prompt"][-N_DECODED:]])

    return decode


def test_dense_logits_are_the_golden_ones(dense_logits, golden):
    np.testing.assert_allclose(dense_logits, golden["logits_last32"], rtol=0, atol=1e-3)


def test_lists_that_keep_everything_change_nothing(decoded, dense_logits):
    np.testing.assert_allclose(decoded(everything), dense_logits, rtol=0, atol=1e-9)


def test_appends_that_keep_everything_change_nothing(model, golden):
    prompt = golden["prompt"][:300]
    dense, pruned = (model.forward(prompt, model.state(300), attention) for attention in
                     (PrunedAttention(), PrunedAttention(append=everything)))
    np.testing.assert_allclose(pruned, dense, rtol=0, atol=1e-9)


def records(keep_tokens):
    """Returns one stage of bounds for all layers."""
    return lambda layer_idx: Record(16, 64, (Stage("bounds", 64, 8, keep_tokens),))


def test_lists_carry_what_the_window_lacks(decoded, dense_logits):
    """Keeping a quarter of the keys is closer to dense attention than keeping sinks, window and one chunk."""
    quarter, nearly_none = (np.abs(decoded(records(keep)) - dense_logits).mean() for keep in (176, 8))
    assert 0 < quarter < nearly_none / 2


def test_unrotated_rows_are_handed_over(model, golden):
    unrotated = Pico(rotate=False)

    def rotates(layer_idx, q, k, v, positions):
        return dense_attention(layer_idx, unrotated.rope(q, positions[:, None]), unrotated.rope(k, np.arange(len(k))[:, None]), v,
                               positions)

    prompt = golden["prompt"][:100]
    expected = model.forward(prompt, unrotated.state(100))
    np.testing.assert_allclose(unrotated.forward(prompt, unrotated.state(100), rotates), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["small", "3k", "5k"])
def test_presets_prune_nothing_of_a_short_prompt(decoded, dense_logits, name):
    logits = decoded(lambda layer_idx: preset(name, layer_idx, "decode"))
    np.testing.assert_allclose(logits, dense_logits, rtol=0, atol=1e-9)
