# SPDX-License-Identifier: MIT
"""Keys and values read out of a cache, and caches that are closed."""
import gc

import pytest
from hf_common import DEVICES, batch, new_cache, run, torch, transformers
from hf_gate import models

import tandem
from tandem.transformers import TandemCache


@pytest.fixture(scope="module")
def llama():
    return models("llama", torch.float32, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_those_of_other_caches(dtype, device):
    """For every layer and row, wherever the window ends. Padding reads as 0."""
    mine, eager, _ = models("llama", dtype, device)
    past = new_cache(8, device)
    for side in ("left", "right"):
        ids, mask = batch(device, side=side)
        past.reset()
        other = transformers.DynamicCache(config=eager.config)
        for model, cache in ((mine, past), (eager, other)):
            run(model, ids, mask, [20, 16, 1], cache)
        shown = mask[:, None, :, None].cpu().to(dtype)
        near = 1e-4 if dtype == torch.float32 else 0.1  # because of the layers before
        assert len(past.layers) == 4 and len(list(past.layers)) == 4
        for i, layer in enumerate(past.layers):
            for mine_states, states in ((past.keys(i), other.layers[i].keys), (past.values(i), other.layers[i].values),
                                        (layer.keys, other.layers[i].keys), (layer.values, other.layers[i].values)):
                states = states.cpu() * shown
                assert mine_states.shape == states.shape and mine_states.dtype == dtype and mine_states.device.type == "cpu"
                assert (mine_states - states).abs().max() <= (near if i else near / 100) * states.abs().max()
                assert not (mine_states * (1 - shown)).any()
        assert layer.get_seq_length() == 37 and layer.is_initialized and past.get_seq_length() == 37


def test_keys_are_rounded_as_they_are_stored(llama):
    ids, mask = batch("cpu")
    exact = new_cache()
    run(llama[0], ids, mask, [37], exact)
    for k_type, bound in (("bf16", 1 / 256), ("q8_0", 1 / 127), ("e4m3", 1 / 16), ("q4_0", 1 / 5)):
        past = new_cache(storage={"k_type": k_type, "v_type": "f16"})
        run(llama[0], ids, mask, [37], past)
        keys = exact.keys(0)
        assert 0 < (past.keys(0) - keys).abs().max() <= bound * keys.abs().max()


def test_what_is_read_is_a_copy(llama):
    ids, mask = batch("cpu")
    past = new_cache()
    run(llama[0], ids, mask, [36], past)
    digests, kept = [sequence.digest() for sequence in past.sequences], past.keys(1)
    expected = kept.clone()
    kept.zero_()
    assert [sequence.digest() for sequence in past.sequences] == digests and torch.equal(past.keys(1), expected)
    past.crop(-3)
    assert torch.equal(past.keys(1), expected[:, :, :33]) and torch.equal(past.fork().keys(1), past.keys(1))
    past.reorder_cache(torch.tensor([2, 0]))
    assert torch.equal(past.keys(1), expected[[2, 0], :, :33])


def test_layers_that_are_not_there(llama):
    past = new_cache()
    for ask in (lambda: past.keys(0), lambda: past.values(-1)):
        with pytest.raises(tandem.InvalidArgumentError, match="the cache has 0 layers, as no pass has been"):
            ask()
    run(llama[0], *batch("cpu"), [37], past)
    for ask in (lambda: past.keys(4), lambda: past.values(-1), lambda: past.keys("x")):
        with pytest.raises(tandem.InvalidArgumentError, match="layer_idx"):
            ask()
    with pytest.raises(IndexError, match=r"layers\[4\]: the cache has 4 layers"):
        past.layers[4]
    assert torch.equal(past.layers[-1].keys, past.keys(3)) and len(past.layers[1:3]) == 2
    layer = past.layers[0]
    assert not hasattr(layer, "conv_states") and not layer.is_sliding and not layer.is_compileable
    with pytest.raises(AttributeError, match="has no 'dtype': it has keys and values alone"):
        layer.dtype


def test_layers_do_not_keep_a_cache_alive(llama):
    past = new_cache()
    run(llama[0], *batch("cpu"), [37], past)
    layers = past.layers
    assert layers and not past.closed
    gc.disable()
    try:
        del past
        assert len(layers) == 0 and not layers
    finally:
        gc.enable()


USES = {
    "pass": lambda past, model, ids, mask: model(ids, attention_mask=mask, past_key_values=past),
    "generate": lambda past, model, ids, mask: model.generate(ids, attention_mask=mask, past_key_values=past, max_new_tokens=2),
    "length": lambda past, *_: past.get_seq_length(), "mask sizes": lambda past, *_: past.get_mask_sizes(1, 0),
    "sequences": lambda past, *_: past.sequences, "batch_size": lambda past, *_: past.batch_size,
    "is_initialized": lambda past, *_: past.is_initialized, "crop": lambda past, *_: past.crop(0), "reset": lambda past, *_: past.reset(),
    "reorder": lambda past, *_: past.reorder_cache(torch.tensor([0])), "repeat": lambda past, *_: past.batch_repeat_interleave(2),
    "select": lambda past, *_: past.batch_select_indices(torch.tensor([0])), "fork": lambda past, *_: past.fork(),
    "fork with options": lambda past, *_: past.fork(policy="hgca"), "keys": lambda past, *_: past.keys(0),
    "layers": lambda past, *_: past.layers[0], "with": lambda past, *_: past.__enter__(),
    "update": lambda past, *_: past.update(torch.ones(1, 2, 3, 64), torch.ones(1, 2, 3, 64), 0),
}


@pytest.mark.parametrize("n_passes", [0, 1])
def test_closed_caches_raise(llama, n_passes):
    """As with files, nothing starts again silently. Forks close with the cache that they came from, and may be closed at any
    time."""
    ids, mask = batch("cpu")
    past = TandemCache(8)
    for _ in range(n_passes):
        run(llama[0], ids, mask, [37], past)
    forks = [past.fork(), past.fork().fork()] if n_passes else []
    assert not past.closed
    with past:
        pass
    for cache, match in ((past, "has been closed$"), *((fork, "has been closed, with the one that it is a fork of") for fork in forks)):
        assert cache.closed and repr(cache) == "<TandemCache, closed>"
        for name, use in USES.items():
            with torch.no_grad(), pytest.raises(tandem.InvalidHandleError, match=match):
                use(cache, llama[0], ids, mask)
                raise AssertionError(f"{name} does not raise")
    for cache in (past, *forks, past):
        cache.close()


def test_a_fork_that_is_closed_leaves_the_others(llama):
    ids, mask = batch("cpu")
    past = new_cache()
    run(llama[0], ids, mask, [36], past)
    fork, other = past.fork(), past.fork(policy="streaming")
    of_other = other.fork()
    fork.close()
    other.close()
    assert not past.closed and of_other.closed and past.get_seq_length() == 36
    more = torch.full((3, 1), 7)
    with torch.no_grad():
        llama[0](more, attention_mask=mask, past_key_values=past)
    assert past.get_seq_length() == 37
