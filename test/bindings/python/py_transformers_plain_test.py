# SPDX-License-Identifier: MIT
"""Models called in the usual ways: without a cache, with use_cache=False, compiled."""
import copy
import inspect
import pickle

import pytest
from hf_common import DEVICES, FAMILIES, batch, configuration, needs_cuda, new_cache, run, torch, transformers
from hf_gate import calls_of, models

import tandem
from tandem.transformers import TandemCache


@pytest.fixture(scope="module")
def llama():
    return models("llama", torch.float32, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_a_pass_without_a_cache_makes_one(family, device):
    """The pass returns its cache and the next pass uses it. Both give the logits of passes with a given cache."""
    mine = models(family, torch.float32, device)[0]
    ids, mask = batch(device)
    expected = run(mine, ids, mask, [30, 7], new_cache(-1, device))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        first = mine(ids[:, :30], attention_mask=mask[:, :30], position_ids=positions[:, :30])
        assert isinstance(first.past_key_values, TandemCache) and first.past_key_values.get_seq_length() == 30
        second = mine(ids[:, 30:], attention_mask=mask, position_ids=positions[:, 30:], past_key_values=first.past_key_values)
        other = mine(ids[:, :30], attention_mask=mask[:, :30], position_ids=positions[:, :30])
        inner = mine.base_model(ids[:, :30], attention_mask=mask[:, :30], position_ids=positions[:, :30])
    assert second.past_key_values is first.past_key_values and other.past_key_values is not first.past_key_values
    assert inner.past_key_values.get_seq_length() == 30
    assert torch.equal(torch.cat([first.logits, second.logits], 1), expected) and torch.equal(other.logits, first.logits)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_generate_without_a_cache(llama, options):
    mine, eager, _ = llama
    ids, mask = batch("cpu")
    texts = []
    for model in (mine, eager):
        torch.manual_seed(3)
        texts.append(model.generate(ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, **options))
    assert torch.equal(*texts)


def test_the_cache_that_generate_makes(llama, monkeypatch):
    """generate() returns the cache if the caller asks for it, and closes it otherwise."""
    mine, made = llama[0], []

    class Watched(TandemCache):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr("tandem.transformers._models.TandemCache", Watched)
    ids, mask = batch("cpu")
    result = mine.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True)
    assert made == [result.past_key_values] and made[0].get_seq_length() == ids.shape[1] + 2
    mine.generate(ids, attention_mask=mask, max_new_tokens=3)
    assert len(made) == 2 and made[1].cache is None
    mine.generate(ids, attention_mask=mask, max_new_tokens=3, past_key_values=Watched())
    mine.generate(ids, attention_mask=mask, max_new_tokens=3, use_cache=False)
    mine.generate(ids, attention_mask=mask, generation_config=transformers.GenerationConfig(use_cache=False, max_new_tokens=3))
    assert len(made) == 3


@pytest.mark.parametrize("implementation", ["tandem", "eager"])
def test_an_assistant_of_either_attention(llama, implementation):
    """Neither model is given a cache. Each one that uses Tandem makes its own."""
    mine, eager, _ = llama
    ids, mask = (tensor[:1] for tensor in batch("cpu"))
    torch.manual_seed(1)
    small = transformers.AutoModelForCausalLM.from_config(configuration("llama", num_hidden_layers=1),
                                                          attn_implementation=implementation).eval()
    options = {"attention_mask": mask, "max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    expected = eager.generate(ids, **options)
    for model in (mine, eager) if implementation == "tandem" else (mine,):
        assert torch.equal(model.generate(ids, assistant_model=small, **options), expected)
    assert torch.equal(mine.generate(ids, assistant_model=small, past_key_values=new_cache(8), **options), expected)


@pytest.mark.parametrize("family, dtype", [*((name, torch.float32) for name in [*FAMILIES, "gpt2", "deepseek_v3"]),
                                           ("llama", torch.bfloat16), ("gpt_oss", torch.float16)])
def test_attention_without_the_use_of_a_cache(family, dtype):
    """As close to double precision as with a cache, with padding on either side and without a mask. No cache is returned."""
    mine = models(family, dtype, "cpu")[0]
    factor = 3 if family == "gemma2" else 2

    def check(result):
        assert result.past_key_values is None

    for side, shown in (("left", True), ("right", True), ("left", False)):
        ids, mask = batch("cpu", side=side)
        with torch.no_grad():
            calls = calls_of(lambda ids=ids, mask=mask if shown else None: check(
                mine(ids, attention_mask=mask, use_cache=False)))
        assert len(calls) == mine.config.num_hidden_layers
        for call in calls:
            assert call.error.abs().max() <= factor * call.plain_error.abs().max() + 1e-5


def test_gaps_where_there_is_a_sliding_window():
    mine = models("mistral", torch.float32, "cpu")[0]
    with torch.no_grad(), pytest.raises(tandem.UnsupportedError, match="padding between tokens of a row"):
        mine(torch.arange(3, 8)[None], attention_mask=torch.tensor([[1, 0, 1, 1, 1]]), use_cache=False)


def test_gradients_are_refused_without_a_cache_too(llama):
    with pytest.raises(tandem.UnsupportedError, match="requires_grad"):
        llama[0](torch.arange(3, 8)[None], use_cache=False)


@needs_cuda
def test_without_the_use_of_a_cache_on_a_gpu(llama):
    mine = models("llama", torch.float32, "cuda")[0]
    with torch.no_grad(), pytest.raises(tandem.UnsupportedError, match="use_cache = False on cuda.*leave use_cache=False out"):
        mine(torch.arange(3, 8, device="cuda")[None], use_cache=False)


def test_models_that_change_their_attention_and_copies(llama):
    """The attention may be set later, and set back. Copied and pickled models make their caches too."""
    ids = torch.arange(3, 8)[None]
    model = models("llama", torch.float32, "cpu")[1]
    mine = llama[0]
    with torch.no_grad():
        for kind in ("eager", "tandem", "sdpa", "tandem"):
            model.set_attn_implementation(kind)
            assert isinstance(model(ids).past_key_values, TandemCache) == (kind == "tandem")
        hooks = [len(part._forward_pre_hooks) for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
        assert hooks == [1, 1]
        for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
            assert torch.equal(other(ids).logits, mine(ids).logits) and isinstance(other(ids).past_key_values, TandemCache)


def test_the_cache_may_stand_at_its_place(llama):
    """Arguments of a forward pass may be positional."""
    base = llama[0].base_model
    names = list(inspect.signature(type(base).forward).parameters)[1:]
    at = next(i for i, name in enumerate(names) if name in ("cache", "past_key_values"))
    ids = torch.arange(3, 8)[None]
    with torch.no_grad():
        made = base(ids, *[None] * at).past_key_values
        assert isinstance(made, TandemCache)
        base(ids, *[None] * (at - 1), made)
        assert made.get_seq_length() == 10
        with pytest.raises(tandem.UnsupportedError, match="is a DynamicCache"):
            base(ids, *[None] * (at - 1), transformers.DynamicCache())


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", **options)


@pytest.fixture(scope="module")
def can_compile(llama):
    try:
        with torch.no_grad():
            compiled(llama[1])(torch.arange(3, 8)[None])
    except Exception as error:  # any exception of PyTorch
        pytest.skip(f"PyTorch {torch.__version__} cannot compile a model of Transformers {transformers.__version__}: "
                    f"{str(error).splitlines()[0]}")


def test_a_compiled_model(llama, can_compile):
    """A compiled model gives the same bits, with a cache, without one, and in generate()."""
    mine = llama[0]
    ids, mask = batch("cpu")
    lens = [30] + [1] * 7
    expected = run(mine, ids, mask, lens, new_cache())
    assert torch.equal(run(compiled(mine), ids, mask, lens, new_cache()), expected)
    with torch.no_grad():
        for options in ({}, {"use_cache": False}):
            logits = compiled(mine)(ids, attention_mask=mask, **options).logits
            assert torch.equal(logits, mine(ids, attention_mask=mask, **options).logits)
    options = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6}
    assert torch.equal(compiled(mine).generate(ids, **options), mine.generate(ids, **options))


def test_a_compiled_model_is_not_compiled_for_each_token(llama, can_compile):
    """The length of the cache is not a constant of the graph."""
    n_graphs = []

    def count(graph, _):
        n_graphs.append(len(n_graphs))
        return graph

    torch._dynamo.reset()
    model, past, at = torch.compile(llama[0], backend=count), new_cache(), []
    with torch.no_grad():
        for i in range(8):
            model(torch.tensor([[3 + i]]), past_key_values=past)
            at.append(len(n_graphs))
    assert at[-1] == at[3] and past.get_seq_length() == 8


def test_a_model_compiled_as_one_graph_is_refused_with_the_reason(llama, can_compile):
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:
        pytest.skip(f"PyTorch {torch.__version__} takes no reason")
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match="tandem: .*compile without fullgraph=True"):
        compiled(llama[0], fullgraph=True)(torch.tensor([[3, 4]]), past_key_values=new_cache())
