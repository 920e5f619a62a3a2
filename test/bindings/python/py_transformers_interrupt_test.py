# SPDX-License-Identifier: MIT
"""A forward pass that ends with an exception counts no tokens, whichever method is called first afterwards, and wherever it
was raised."""
import copy
import linecache
import os
import sys
import time

import pytest
from hf_common import batch, new_cache, run, torch
from hf_gate import models

import tandem

FIRST, LATER = 0, 20  # columns of the passes before

# Each calls a method of the cache after the broken pass and returns a cache. Its next text must be that of a cache without the
# broken pass.
READERS = {
    "nothing": lambda past, before: past,
    "get_seq_length": lambda past, before: answer(past, past.get_seq_length() == before),
    "of_each_layer": lambda past, before: answer(past, [past.get_seq_length(i) for i in (3, 1, 0, 2)] == [before] * 4),
    "get_mask_sizes": lambda past, before: answer(past, past.get_mask_sizes(5, 0) == (before + 5, 0)),
    "is_initialized": lambda past, before: answer(past, past.is_initialized == (before > 0)),
    "batch_size": lambda past, before: answer(past, past.batch_size == (3 if before else -1)),
    "repr": lambda past, before: answer(past, f" {before} columns" in repr(past)),
    "sequences": lambda past, before: answer(past, len(past.sequences) == (3 if before else 0)),
    "crop": lambda past, before: answer(past, past.crop(0) is None),
    "reorder_cache": lambda past, before: answer(past, past.reorder_cache(torch.tensor([0, 1, 2])) is None),
    "batch_repeat_interleave": lambda past, before: answer(past, past.batch_repeat_interleave(1) is None),
    "batch_select_indices": lambda past, before: answer(past, past.batch_select_indices(torch.arange(3)) is None),
    "fork": lambda past, before: past.fork(),
    "copy": lambda past, before: copy.copy(past),
    "deepcopy": lambda past, before: copy.deepcopy(past),
}


def answer(past, right):
    assert right
    return past


@pytest.fixture(scope="module")
def llama():
    return models("llama", torch.float32, "cpu")[0]


def stopped_in(model, where, error, ids, mask, past):
    """Runs one pass in which a layer raises `error`: before the layer, or between its attention and its MLP."""
    layer, part = where
    module = model.model.layers[layer]
    module = module if part == "before" else module.self_attn.o_proj

    def stop(*_):
        raise error

    hook = module.register_forward_pre_hook(stop)
    try:
        with pytest.raises(type(error)), torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=past)
    finally:
        hook.remove()


def begun(model, before):
    """Returns a cache of `before` columns, and its batch."""
    ids, mask = batch("cpu")
    past = new_cache(8)
    if before:
        run(model, ids[:, :before], mask[:, :before], [before], past)
    return past, ids, mask


def longer(mask, n):
    """Returns the mask with n more columns that are attended."""
    return torch.cat([mask.long(), torch.ones((len(mask), n), dtype=torch.long)], 1)


def text_of(model, ids, mask, past):
    return model.generate(ids, attention_mask=mask, past_key_values=past, max_new_tokens=5, min_new_tokens=5, do_sample=False)


def counts_what_is_stored(past):
    """Returns whether every layer of every row has as many tokens as the cache counts, with no other sequence left."""
    lengths = [[sequence.length(i) for i in range(len(past))] for sequence in past.sequences]
    counted = past._held.lengths
    return lengths == [[n] * len(past) for n in counted]


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), MemoryError()], ids=["hook", "ctrl-c", "memory"])
@pytest.mark.parametrize("before", [FIRST, LATER], ids=["first", "later"])
def test_another_prompt_after_a_broken_pass(llama, before, error):
    """The text equals that of a fresh cache, token for token. Tokens of the broken pass do not count as the prompt's."""
    # after the last attention the pass is complete
    places = [(layer, part) for layer in range(4) for part in ("before", "inside")][:-1]
    _, ids, mask = begun(llama, 0)
    other = torch.cat([ids[:, :before], ids[:, before:].flip(1).roll(1, 0)], 1)
    expected = text_of(llama, other, torch.ones_like(mask), begun(llama, 0)[0])
    for i, where in enumerate(places):
        for name, ask in READERS.items() if i == 3 else list(READERS.items())[i::len(places)]:
            past = new_cache(8)
            if before:
                run(llama, other[:, :before], torch.ones_like(mask)[:, :before], [before], past)
            stopped_in(llama, where, error, ids[:, before:], torch.ones_like(mask), past)
            asked = ask(past, before)
            text = text_of(llama, other, torch.ones_like(mask), asked)
            assert torch.equal(text, expected), f"{name} after a pass that broke off {where[1]} layer {where[0]}"


def test_a_broken_first_pass_leaves_no_rows(llama):
    """The next batch may have another size, and no sequence is left."""
    past, ids, mask = begun(llama, FIRST)
    stopped_in(llama, (2, "before"), RuntimeError("stop"), ids, mask, past)
    run(llama, ids[:2], mask[:2], [37], past)
    assert past.batch_size == 2 and past.cache.stats().n_sequences == 2 and counts_what_is_stored(past)


def test_a_broken_pass_of_a_copy(llama):
    """Copies share a session, which has one step at a time. The original's next pass rolls back the copy's."""
    past, ids, mask = begun(llama, LATER)
    other = copy.deepcopy(past)
    stopped_in(llama, (2, "before"), KeyboardInterrupt(), ids[:, LATER:], mask, other)
    expected = run(llama, ids, mask, [LATER, 17], new_cache(8))[:, LATER:]
    for cache in (past, other):
        with torch.no_grad():
            logits = llama(ids[:, LATER:], attention_mask=mask, past_key_values=cache,
                           position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, LATER:]).logits
        assert torch.equal(logits[mask[:, LATER:].bool()], expected[mask[:, LATER:].bool()])
    stopped_in(llama, (1, "before"), KeyboardInterrupt(), ids[:, :3], longer(mask, 3), other)
    del other, cache  # its step is still open
    with torch.no_grad():
        llama(ids[:, :3], attention_mask=longer(mask, 3), past_key_values=past)
    assert past.get_seq_length() == 40 and counts_what_is_stored(past)
    deadline = time.monotonic() + 30  # a thread drops the other cache's sequences
    while past.cache.stats().n_sequences > 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert past.cache.stats().n_sequences == 3


def test_asking_in_the_middle_of_a_pass(llama):
    """A method that asks for a later layer is harmless. One that asks for an attended layer ends the pass with an error, not
    with another text."""
    past, ids, mask = begun(llama, LATER)
    asked = []
    hook = llama.model.layers[2].register_forward_pre_hook(lambda *_: asked.append(past.get_seq_length(2)))
    with torch.no_grad():
        llama(ids[:, LATER:], attention_mask=mask, past_key_values=past)
    hook.remove()
    assert asked == [20] and past.get_seq_length() == 37
    hook = llama.model.layers[2].register_forward_pre_hook(lambda *_: asked.append(past.get_seq_length(0)))
    with pytest.raises(tandem.InvalidStateError, match="layer 2 is attended, expected was layer 0"), torch.no_grad():
        llama(ids[:, :2], attention_mask=longer(mask, 2), past_key_values=past)
    hook.remove()
    assert past.get_seq_length() == 37 and counts_what_is_stored(past)


PACKAGE = os.path.dirname(tandem.__file__)


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line that the package executes, as a signal's handler would.

    Lines with `with` are skipped: the interpreter reports them again before it leaves the block, where it handles no signal.
    """

    def __init__(self, n):
        self.left, self.where = n, None

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE) or "_handle" in frame.f_code.co_filename:
            return None
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted_at(n, function):
    """Returns where the n-th line is, if the function has so many."""
    at = InterruptAt(n)
    sys.settrace(at)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return at.where


CALLS = {
    "pass": lambda model, past, ids, mask: model(ids[:, LATER:LATER + 1], attention_mask=mask[:, :LATER + 1], past_key_values=past),
    "crop": lambda model, past, ids, mask: past.crop(-7),
    "reorder": lambda model, past, ids, mask: past.reorder_cache(torch.tensor([2, 2, 0])),
    "reset": lambda model, past, ids, mask: past.reset(),
    "copy": lambda model, past, ids, mask: copy.copy(past),
}


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_any_line(llama, name):
    """Whichever line a signal interrupts, the cache is as before or as after the call, and can be used."""
    plain, ids, mask = begun(llama, LATER)
    after = copy.copy(plain)
    with torch.no_grad():
        CALLS[name](llama, after, ids, mask)
        lengths = [plain._held.lengths, after._held.lengths]
        n, where = 0, "the first"
        while where is not None:
            n += 1
            past = copy.copy(plain)
            where = interrupted_at(n, lambda past=past: CALLS[name](llama, past, ids, mask))
            lengths_now = past._held.lengths
            assert lengths_now in lengths, where
            assert counts_what_is_stored(past), where
            if n % 7 == 0 and past.batch_size == 3:
                more, shown = torch.full((3, 1), 7), longer(past._held.mask, 1)
                logits = [llama(more, attention_mask=shown, past_key_values=cache).logits
                          for cache in (past, copy.copy(after if lengths_now == lengths[1] and name != "copy" else plain))]
                assert torch.equal(*logits), where
        assert n > (100 if name == "pass" else 3)
