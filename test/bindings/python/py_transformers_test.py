# SPDX-License-Identifier: MIT
"""tandem.transformers: small models of five families give eager attention's logits, with padding, in passes of any length."""
import copy

import pytest
from hf_common import DEVICES, FAMILIES, batch, needs_cuda, new_cache, run, torch, transformers
from hf_gate import assert_within_gate, models

import tandem
from tandem.transformers import TandemCache

LENS = [21, 9] + [1] * 7  # a prompt, a second turn, decode
TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side, options", [("left", {}), ("left", {"route": "host"}), ("none", {})],
                         ids=["left", "host", "none"])
def test_family_matches_eager(family, dtype, device, side, options):
    ids, mask = batch(device, (37, 37, 37) if side == "none" else (37, 20, 29))
    past = new_cache(8, device, **options)
    logits = assert_within_gate(models(family, dtype, device), ids, mask, LENS, past, soft_cap=family == "gemma2")
    assert logits.dtype == dtype
    assert past.get_seq_length() == 37
    lengths = mask.sum(1).tolist()
    assert [[s.length(i) for i in range(4)] for s in past.sequences] == [[length] * 4 for length in lengths]


@pytest.mark.parametrize("device", DEVICES)
def test_right_padding(device):
    ids, mask = batch(device, side="right")
    assert_within_gate(models("llama", torch.float32, device), ids, mask, [37], new_cache(device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_padding_alone_come_later(device):
    ids, mask = batch(device, (37, 5, 29))
    assert_within_gate(models("mistral", torch.float32, device), ids, mask, [20, 10, 7], new_cache(device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2},
                                     {"prompt_lookup_num_tokens": 4}], ids=["greedy", "beams", "return", "lookup"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_generate(family, options, device):
    mine, eager, _ = models(family, torch.float32, device)
    ids, mask = batch(device)
    if "prompt_lookup_num_tokens" in options:  # one row, which repeats itself
        ids, mask = ids[:1, -12:].repeat(1, 3), mask[:1, -12:].repeat(1, 3)
    past = new_cache(8, device)
    texts = [model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, past_key_values=cache,
                            **options)
             # can be cropped, unlike a cache whose config makes it forget
             for model, cache in ((mine, past), (eager, transformers.DynamicCache()))]
    assert torch.equal(*texts)
    assert past.session.stats().evicted_tokens > 0 and type(past.get_seq_length()) is int


@pytest.mark.parametrize("device", DEVICES)
def test_generate_goes_on(device):
    """A second turn with the cache of the first one, of rows with padding."""
    mine, eager, _ = models("mistral", torch.float32, device)
    ids, mask = batch(device)
    texts = []
    for model, past in ((mine, new_cache(8, device)), (eager, transformers.DynamicCache(config=eager.config))):
        first = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, past_key_values=past)
        again = torch.cat([first, ids[:, -6:].flip(0)], 1)
        shown = torch.cat([mask, torch.ones_like(again[:, mask.shape[1]:])], 1)
        texts.append(model.generate(input_ids=again, attention_mask=shown, max_new_tokens=6, min_new_tokens=6,
                                    past_key_values=past))
        assert past.get_seq_length() == again.shape[1] + 5
    assert torch.equal(*texts)


def passed(device="cpu", lens=(37,), **options):
    """Returns a model, a cache after a batch with padding, and the inputs."""
    mine, _, _ = models("llama", torch.float32, device)
    ids, mask = batch(device)
    past = new_cache(device=device, **options)
    return mine, past, ids, mask, run(mine, ids, mask, list(lens), past)


@pytest.mark.parametrize("device", DEVICES)
def test_crop_goes_back(device):
    mine, past, ids, mask, logits = passed(device, lens=(30, 7))
    past.crop(-20)
    assert past.get_seq_length() == 17 and [s.length() for s in past.sequences] == [17, 0, 9]
    with torch.no_grad():
        again = mine(input_ids=ids[:, 17:], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, 17:],
                     past_key_values=past).logits
    torch.testing.assert_close(again[mask[:, 17:].bool()], logits[:, 17:][mask[:, 17:].bool()], rtol=0, atol=2e-4)
    past.crop(30)  # the length to keep
    assert past.get_seq_length() == 30
    with pytest.raises(tandem.InvalidArgumentError, match="tokens_to_remove = -31"):
        past.crop(-31)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_selected_by_forks(device):
    mine, past, ids, mask, _ = passed(device)
    before = [s.digest() for s in past.sequences]
    past.reorder_cache(torch.tensor([2, 2, 0], device=device))
    assert [s.digest() for s in past.sequences] == [before[2], before[2], before[0]]
    assert past.cache.stats().n_sequences == 3
    past.batch_repeat_interleave(2)
    assert [s.digest() for s in past.sequences] == [before[i] for i in (2, 2, 2, 2, 0, 0)]
    past.batch_select_indices(torch.tensor([5, 0], device=device))
    assert [s.digest() for s in past.sequences] == [before[0], before[2]]
    rows, token = torch.tensor([0, 2], device=device), torch.tensor([[5], [6]], device=device)
    with torch.no_grad():
        logits = mine(token, attention_mask=torch.cat([mask[rows], torch.ones_like(token)], 1), past_key_values=past,
                      position_ids=mask[rows].sum(1)[:, None]).logits
    fresh = run(mine, torch.cat([ids[rows], token], 1), torch.cat([mask[rows], torch.ones_like(token)], 1), [37, 1],
                new_cache(device=device))
    torch.testing.assert_close(logits[:, -1], fresh[:, -1], rtol=0, atol=2e-4)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_fork(make):
    mine, past, ids, mask, _ = passed()
    other = make(past)
    more, shown = torch.full((3, 1), 7), torch.cat([mask, torch.ones((3, 1), dtype=torch.long)], 1)
    with torch.no_grad():
        first = mine(more, attention_mask=shown, past_key_values=other).logits
        assert (past.get_seq_length(), other.get_seq_length()) == (37, 38)
        second = mine(more, attention_mask=shown, past_key_values=past).logits
    assert torch.equal(first, second) and other.session is past.session
    other.close()
    assert not past.session.closed
    past.close()
    assert past.session is None and past.closed


_FOUR_KEYS = tandem.PruningRecord([tandem.PruningStage("exact", 1, 4)], 1, 4)  # and four of the window, and a sink


@pytest.mark.parametrize("options", [{"policy": "all", "window": 9}, {"policy": "hip", "pruning": tandem.Pruning(decode=[_FOUR_KEYS])},
                                     {"policy": "hip", "pruning": tandem.Pruning(decode=[_FOUR_KEYS]), "dense_layers": [1]}],
                         ids=["all", "hip", "dense layers"])
def test_a_fork_goes_on_under_another_policy(options):
    """The fork equals a cache that had the policy from the beginning, if the prompt attends every key under both."""
    mine, _, _ = models("llama", torch.float32, "cpu")
    ids, past, own = batch("cpu")[0][:1], new_cache(), TandemCache(**options)
    with torch.no_grad():
        for cache in (past, own):
            mine(ids[:, :30], past_key_values=cache)
        before, other = past.sequences[0].digest(), past.fork(**options)
        for i in range(30, 37):
            ours, theirs = (mine(ids[:, i:i + 1], past_key_values=cache).logits for cache in (other, own))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    for layer_idx in range(4):
        attended = [cache.session.selection(cache.sequences[0], layer_idx=layer_idx)[0] for cache in (other, own)]
        assert attended[0].tolist() == attended[1].tolist()
        assert len(attended[0]) == (9 if options["policy"] == "hip" and layer_idx not in options.get("dense_layers", ()) else 37)
    assert other.session is not past.session and other.cache is past.cache
    assert past.get_seq_length() == 30 and past.sequences[0].digest() == before
    session = other.session
    other.close()
    assert session.closed and not past.session.closed and not past.cache.closed
    with pytest.raises(tandem.InvalidStateError, match="fork: before the first pass"):
        new_cache().fork(policy="all")


def test_reset_begins_anew():
    mine, past, ids, mask, logits = passed()
    past.reset()
    assert past.get_seq_length() == 0 and past.cache.stats().n_sequences == 0
    again = run(mine, ids[:2], mask[:2], [37], past)  # two rows now
    assert torch.equal(again[mask[:2].bool()], logits[:2][mask[:2].bool()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n, options", [(7, {}), (1, {}), (1, {"route": "host"})], ids=["append", "decode", "host"])
def test_a_pass_that_raises_leaves_the_cache_as_it_was(n, options, device):
    mine, past, ids, mask, _ = passed(device, lens=(37 - n,), **options)
    before = [s.digest() for s in past.sequences]
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def more():
        with torch.no_grad():
            return mine(ids[:, 37 - n:], attention_mask=mask, position_ids=positions[:, 37 - n:], past_key_values=past).logits

    def stop(*_):
        raise RuntimeError("stop")

    hook = mine.model.layers[2].register_forward_pre_hook(stop)
    for again in range(2):
        with pytest.raises(RuntimeError, match="stop"):
            more()
        assert [past.get_seq_length(i) for i in (1, 0, 2, 3)] == [37 - n] * 4
        if not again:
            past.crop(0)
            assert [s.digest() for s in past.sequences] == before and past.get_seq_length() == 37 - n
    hook.remove()
    logits = more()  # rolls back the second broken pass
    assert [s.length(3) for s in past.sequences] == [37, 20, 29]
    expected = run(mine, ids, mask, [37 - n, n], new_cache(device=device))[:, 37 - n:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)


@needs_cuda
def test_device_has_the_window_alone():
    """Twice the length takes no more device memory: PyTorch holds no keys, and Tandem holds those of the window."""
    mine = models("llama", torch.bfloat16, "cuda")[0]
    ids = torch.randint(3, 97, (2, 4000), generator=torch.Generator().manual_seed(2)).cuda()
    mask = torch.ones_like(ids)
    mask[1, :100] = 0
    past, kv_bytes = new_cache(256, "cuda", policy="hgca"), []
    held = []
    for at in range(0, 4000, 500):
        with torch.no_grad():
            mine(ids[:, at:at + 500], attention_mask=mask[:, :at + 500], past_key_values=past, logits_to_keep=1)
        torch.cuda.synchronize()
        stats = past.cache.stats()
        held.append(torch.cuda.memory_allocated())
        kv_bytes.append((stats.device_window_bytes, stats.host_kv_bytes))
    assert held[-1] - held[1] <= 1 << 16  # the mask: a byte for each token; keys and values would take 14 million
    (window, host), (first_window, first_host) = kv_bytes[-1], kv_bytes[1]
    assert window == first_window and host > 3 * first_host
    token = 4 * 2 * 2 * 64 * 2  # layers, K and V, KV heads, head_dim, bf16
    assert 2 * 256 * token <= window <= 2 * (256 + 1024) * token  # room for a piece of an append beside it
