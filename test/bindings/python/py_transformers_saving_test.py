# SPDX-License-Identifier: MIT
"""A TandemCache in a file: a loaded cache continues a text as the saved one does."""
import pytest
from hf_common import DEVICES, batch, new_cache, torch
from hf_gate import models

import tandem
from tandem.transformers import TandemCache


def passes(model, past, ids, mask, n_before):
    """Returns the logits of a pass for each of the last columns."""
    with torch.no_grad():
        return [model(ids[:, :i + 1][:, -1:], attention_mask=mask[:, :i + 1], past_key_values=past).logits
                for i in range(n_before, ids.shape[1])]


def longer(device, n_columns):
    """Returns columns of two rows, the second with padding first."""
    torch.manual_seed(5)
    ids, mask = torch.randint(3, 97, (2, n_columns), device=device), torch.ones((2, n_columns), dtype=torch.long, device=device)
    mask[1, :13] = 0
    return ids, mask


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"policy": "hgca", "dense_layers": [0]}, {"policy": "hip", "window": -1}],
                         ids=["all", "hgca", "hip"])
def test_text_goes_on(tmp_path, options, device):
    model, _, _ = models("llama", torch.float32, device)
    ids, mask = longer(device, 90)
    options = {"window": 32, **options}
    past = TandemCache(**options)
    with torch.no_grad():
        model(ids[:, :60], attention_mask=mask[:, :60], past_key_values=past)
    passes(model, past, ids[:, :70], mask, 60)
    path = tmp_path / "cache"
    past.save(path, model_id=3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]
    loaded = TandemCache.load(path, model, model_id=3, **options)
    assert loaded.get_seq_length() == 70 and [one.length() for one in loaded.sequences] == [70, 57]
    assert [one.digest() for one in loaded.sequences] == [one.digest() for one in past.sequences]
    for mine, theirs in zip(passes(model, loaded, ids, mask, 70), passes(model, past, ids, mask, 70), strict=True):
        assert torch.equal(mine, theirs)
    rows = TandemCache.load(path, model, model_id=3, window=5, learned=False)
    assert rows.session.stats().selected_keys == 0 and rows.get_seq_length() == 70
    rows.close()
    loaded.crop(-20)
    assert loaded.get_seq_length() == 70
    loaded.close()
    past.close()


def test_a_reset_cache(tmp_path):
    model, _, _ = models("llama", torch.float32, "cpu")
    past = new_cache(8, "cpu")
    ids, mask = batch("cpu")
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=past)
        past.reset()
        past.save(tmp_path / "cache")
        loaded = TandemCache.load(tmp_path / "cache", model, window=8)
        assert loaded.get_seq_length() == 0 and not loaded.is_initialized
        a, b = (model(ids, attention_mask=mask, past_key_values=one).logits for one in (past, loaded))
    assert torch.equal(a, b)


def test_what_is_wrong_is_said(tmp_path):
    model, _, _ = models("llama", torch.float32, "cpu")
    other, _, _ = models("gemma2", torch.float32, "cpu")
    path, ids_and_mask = tmp_path / "cache", longer("cpu", 40)
    past = TandemCache(window=16, policy="hgca")
    with pytest.raises(tandem.InvalidStateError, match="nothing to save"):
        past.save(path)
    with torch.no_grad():
        model(ids_and_mask[0], attention_mask=ids_and_mask[1], past_key_values=past)
    past.save(path)
    n_sequences = past.cache.stats().n_sequences
    with pytest.raises(tandem.InvalidArgumentError, match='policy "all", the session that was saved "hgca"'):
        TandemCache.load(path, model)
    with pytest.raises(tandem.InvalidArgumentError, match="model_id"):
        TandemCache.load(path, model, policy="hgca", model_id=1)
    with pytest.raises(tandem.InvalidArgumentError, match="k_type is f32 in the file, q8_0"):
        TandemCache.load(path, model, policy="hgca", storage={"k_type": "q8_0"})
    loaded = TandemCache.load(path, other, policy="hgca")  # the first pass gives the geometry
    with pytest.raises(tandem.InvalidArgumentError, match="layers"), torch.no_grad():
        more = torch.cat([ids_and_mask[0], ids_and_mask[0][:, :1]], 1), torch.nn.functional.pad(ids_and_mask[1], (0, 1), value=1)
        other(more[0][:, -1:], attention_mask=more[1], past_key_values=loaded)
    whole = path.read_bytes()
    for n in (0, 12, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(tandem.CorruptError):
            TandemCache.load(path, model, policy="hgca")
    for place in (3, 20, len(whole) // 2):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1:])
        with pytest.raises(tandem.CorruptError):
            TandemCache.load(path, model, policy="hgca")
    path.write_bytes(whole + b"x")
    with pytest.raises(tandem.CorruptError, match="more bytes follow"):
        TandemCache.load(path, model, policy="hgca")
    assert past.cache.stats().n_sequences == n_sequences
