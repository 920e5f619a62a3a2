# SPDX-License-Identifier: MIT
"""python -m tandem.patterns search: its masks against the reference, its budget, a head whose pattern is known, and its file."""
import json
import random
import sys

import numpy as np
import pytest
from conftest import ROOT
from hf_common import needs_cuda, torch, transformers

from tandem import HeadPattern, InvalidArgumentError, Patterns, UnsupportedError
from tandem.eval import _settings
from tandem.eval import __main__ as evaluation
from tandem.patterns import __main__ as search
from tandem.patterns import _choice, _report, _rules
from tandem.patterns._candidates import Candidate, grid
from tandem.patterns._prompts import Call, Prompt
from tandem.patterns._recall import LayerRecall, Recall
from tandem.transformers import TandemCache

sys.path.insert(0, str(ROOT / "test" / "reference"))
patterns_reference = pytest.importorskip("patterns_reference")

DIM, SCALE = 64, 0.125
CANDIDATES = [Candidate(), Candidate((20, 150)), Candidate((4, 700)), Candidate(vertical_slash=(30, 100)), Candidate(vertical_slash=(0, 0)),
              Candidate(vertical_slash=(3, 900)), Candidate(block_sparse=5), Candidate(block_sparse=0), Candidate((9, 40), (10, 64), 2)]
FULL, A, V, B = (grid().index(one) for one in (Candidate(), Candidate((16, 128)), Candidate(vertical_slash=(16, 64)),
                                               Candidate(block_sparse=8)))
TEXT = "".join(chr(32 + (7 * i * i + i // 3) % 90) for i in range(3000))
# [layers][heads] of the small model below: one KV head with A-shapes alone, and one with every kind.
SMALL = [[["stream_llm", 8, 64], ["stream_llm", 8, 32], ["full"], ["vertical_and_slash", 16, 64]],
         [["block_sparse", 2, 0], ["full"], [["stream_llm", 8, 32], ["block_sparse", 1, 0]], ["stream_llm", 8, 64]]]


@pytest.mark.parametrize("n_tokens, n_queries, candidates", [(700, 700, CANDIDATES), (903, 301, CANDIDATES), (1400, 130, CANDIDATES),
                                                            (8500, 8450, CANDIDATES[3:4])], ids=str)
def test_masks_and_pairs_are_those_of_the_reference(n_tokens, n_queries, candidates):
    chance = np.random.default_rng(n_tokens)
    q, k = 2 * chance.standard_normal((n_queries, DIM)), chance.standard_normal((n_tokens, DIM))
    expected = [patterns_reference.masks(q, k, patterns_reference.Pattern(one.a_shape, one.vertical_slash, one.block_sparse), SCALE)
                for one in candidates]
    sizes, means, p0 = _rules.Sizes(candidates), _rules.KeyMeans(torch.tensor(k).float()), n_tokens - n_queries
    q, k, blocks, n_tied = torch.tensor(q).float(), torch.tensor(k).float(), iter(zip(*expected, strict=True)), 0
    for first in range(0, n_queries, _rules.CHUNK):
        end = min(first + _rules.CHUNK, n_queries)
        chunk = _rules.ChunkRanks(q[first:end], k, p0 + first, SCALE)
        for begin in range(first, end, _rules.BLOCK):
            keys = _rules.keys_of_block(sizes, q[begin:min(begin + _rules.BLOCK, end)], p0 + begin, chunk, means)
            for (at, sure, maybe), mask, pairs in zip(next(blocks), keys.tokens().numpy(), keys.pairs(), strict=True):
                assert at == begin
                n_tied += int((sure != maybe).any())
                if (sure == maybe).all():
                    np.testing.assert_array_equal(mask, sure[:keys.end])
                assert pairs == mask.cumsum()[keys.begin:].sum()
    assert next(blocks, None) is None and n_tied <= n_queries // 128


def of_known_heads(n=3072):
    """Returns two heads. In one, every query attends the same 14 tokens, far from each other. In the other, tokens are
    attended by their position before the query."""
    chance = np.random.default_rng(5)
    k = 0.05 * chance.standard_normal((2, n, DIM))
    q = 0.05 * chance.standard_normal((2, n, DIM))
    k[0, 100 + 193 * np.arange(14), 0] = 9
    q[0, :, 0] = 9
    angles = np.arange(n)[:, None] / 40.0 ** (np.arange(DIM // 2) / (DIM // 2 - 1))[None]
    q[1] = k[1] = 2 * np.concatenate([np.cos(angles), np.sin(angles)], 1)
    recall = Recall(grid(), 4)
    recall.begin(Prompt([], [Call(0, n)]))
    recall.add(0, torch.tensor(q).float(), torch.tensor(k).float(), SCALE)
    return recall.layers[0]


def test_heads_get_what_they_attend_by():
    layer = of_known_heads()
    lost = _choice.losses(layer)
    assert lost[:, FULL].abs().max() < 1e-3
    assert lost[0, V] < 0.05 and lost[0, A] > 0.5 and lost[1, A] < 0.1
    chosen = _choice.choose(layer.pairs, lost, layer.dense_pairs * 2 // 3)
    assert grid()[chosen[0]].vertical_slash is not None
    assert sum(int(layer.pairs[head, i]) for head, i in enumerate(chosen)) <= layer.dense_pairs * 2 // 3


def test_the_worst_query_of_a_question_counts():
    """Under the cheap candidate the head loses all attention of one question, and none of the text's."""
    layer = LayerRecall(1, torch.tensor([[10, 4]]), 10, [torch.zeros(1, 8, 2)], [torch.zeros(1, 5, 2)])
    layer.questions[0][0, 3, 1] = 1
    assert _choice.losses(layer, 2.0).tolist() == [[0, 2]]
    assert _choice.losses(layer, 0.0).tolist() == [[0, 0]]


def test_the_choice_keeps_the_budget_and_is_nearly_the_best():
    chance = random.Random(3)
    pairs = torch.tensor([[100, *(chance.randrange(10, 90) for _ in range(5))] for _ in range(4)])
    loss = torch.tensor([[0.0, *(chance.random() for _ in range(5))] for _ in range(4)])
    for budget in range(4 * 90, 401, 10):
        chosen = _choice.choose(pairs, loss, budget)
        assert sum(int(pairs[head, i]) for head, i in enumerate(chosen)) <= budget
    assert _choice.choose(pairs, loss, 400) == [0, 0, 0, 0]
    with pytest.raises(_choice.BudgetError, match="budget = 20 pairs"):
        _choice.choose(pairs, loss, 20)
    # No other choice within 200 pairs loses less by more than one step of one head.
    best = min(sum(float(loss[head, i // 6 ** head % 6]) for head in range(4)) for i in range(6 ** 4)
               if sum(int(pairs[head, i // 6 ** head % 6]) for head in range(4)) <= 200)
    assert sum(float(loss[head, i]) for head, i in enumerate(_choice.choose(pairs, loss, 200))) <= best + 0.7


def test_decode_attends_all_keys_with_the_file():
    heads = [Candidate((16, 128)), Candidate((16, 256)), Candidate((16, 128)), Candidate()]
    kept = _report.decoding_all_keys(heads, 2)
    assert kept == [Candidate((16, 128), block_sparse=0), *heads[1:]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a folder with a model of bytes, and a text file."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, initializer_range=0.15)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "words.txt").write_text(TEXT)
    (folder / "small.json").write_text(json.dumps([{str(i): head for i, head in enumerate(layer)} for layer in SMALL]))
    return folder


def run(model, out, *words):
    return search.main(["search", str(model), "--text", str(model / "words.txt"), "--contexts", "1500", "--passages", "1", "--samples", "2",
                        "--out", str(out), *words])


def test_a_search_writes_a_file_that_the_library_reads(model, tmp_path, capsys):
    assert run(model, tmp_path / "a.json", "--budget", "0.6") == 0
    table = capsys.readouterr().out
    share = float(table.split("Pairs attended: ")[1].split("%")[0])
    assert 30 < share <= 60
    read = Patterns.read(tmp_path / "a.json")
    assert [len(layer) for layer in read.layers] == [4, 4]
    _settings.check(_settings.parse(f"patterns={tmp_path / 'a.json'}"))
    assert run(model, tmp_path / "b.json", "--budget", "0.6") == 0
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_what_is_wrong_is_said(model, tmp_path, capsys):
    assert run(model, tmp_path / "a.json", "--budget", "0.01") == 1
    assert "--budget 0.01" in capsys.readouterr().err
    assert run(model, tmp_path / "a.json", "--contexts", "9000") == 2
    assert "--text has 3000 tokens" in capsys.readouterr().err
    for words, said in ((["--budget", "2"], "'2'"), (["--text", "gone.txt"], "gone.txt"), (["--worst-weight", "-1"], "'-1'")):
        with pytest.raises(SystemExit) as ended:
            run(model, tmp_path / "a.json", *words)
        assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "a.json").exists()


def prompted(model, ids, past, size=None):
    """Returns the logits of a prompt, in calls of `size` tokens, and of three steps after it."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="tandem")
    with torch.inference_mode():
        whole = ids.shape[1] - 3
        chunks = [ids[:, i:min(i + (size or whole), whole)] for i in range(0, whole, size or whole)]
        return torch.cat([network(one, past_key_values=past).logits[0] for one in [*chunks, *ids[:, whole:].split(1, 1)]])


def test_patterns_of_a_cache_are_enough(model):
    ids = torch.tensor([list(TEXT.encode())[:700]])
    file = model / "small.json"
    with (TandemCache() as dense, TandemCache(patterns=str(file)) as named,
          TandemCache(policy="patterns", patterns=Patterns.read(file)) as given):
        exact, by_file, by_value = (prompted(model, ids, past) for past in (dense, named, given))
        stats = named.session.stats()
    assert torch.equal(by_file, by_value)
    assert 0 < stats.pattern_pairs < stats.pattern_dense_pairs == 8 * 697 * 698 // 2
    torch.testing.assert_close(by_file[:64], exact[:64], rtol=1e-3, atol=1e-3)  # no pattern leaves out a key of the first block
    assert (by_file - exact).abs().max() > 1e-3


def test_a_prompt_that_comes_in_chunks(model):
    """Each chunk is a call, and its blocks begin at its first query. With A-shapes and multiples of 128 that changes
    nothing."""
    ids, shape = torch.tensor([list(TEXT.encode())[:700]]), Patterns([[HeadPattern("a_shape", 8, 64)] * 4] * 2)
    with TandemCache(patterns=shape) as whole, TandemCache(patterns=shape) as chunked:
        torch.testing.assert_close(prompted(model, ids, chunked, 256), prompted(model, ids, whole), rtol=1e-4, atol=1e-4)
        assert chunked.session.stats().pattern_pairs == whole.session.stats().pattern_pairs
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="tandem")
    with TandemCache(patterns=str(model / "small.json")) as past:
        said = network.generate(ids, past_key_values=past, max_new_tokens=4, do_sample=False, prefill_chunk_size=200)
        assert said.shape[1] == 704 and past.get_seq_length() == 703


def test_wrong_patterns_of_a_cache(model):
    ids = torch.tensor([list(TEXT.encode())[:40]])
    with TandemCache(patterns=Patterns([Patterns.read(model / "small.json").layers[0]])) as past:
        with pytest.raises(InvalidArgumentError, match="patterns.n_heads = 4, the model has 8"):
            prompted(model, ids, past)
    with TandemCache(policy="all", patterns=str(model / "small.json")) as past:
        with pytest.raises(InvalidArgumentError, match="no layer has a policy that follows them"):
            prompted(model, ids, past)


@needs_cuda
def test_a_gpu_refuses_patterns(model):
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="tandem").to("cuda")
    ids = torch.tensor([list(TEXT.encode())[:300]], device="cuda")
    with TandemCache(patterns=str(model / "small.json")) as past, torch.inference_mode():
        with pytest.raises(UnsupportedError, match="device_type"):
            network(ids, past_key_values=past)


def test_an_evaluation_prefills_by_the_patterns_of_a_setting(model, tmp_path, capsys):
    setting, out = f"patterns={model / 'small.json'}", tmp_path / "out"
    words = [str(model), "--text", str(model / "words.txt"), "--contexts", "600", "--steps", "3", "--samples", "0", "--facts", "1",
             "--out", str(out), "--dense-by-tandem", "--tasks", "perplexity,retrieval", "--kinds", "pass key"]
    assert evaluation.main([*words, "--setting", setting, "--setting", "policy=all"]) == 0
    assert "pairs of the prompt" in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    found = {line["what"]["setting"] if line["what"]["setting"] == "dense" else line["what"]["setting"]["policy"]: line["figures"]
             for line in lines if line["what"]["measurement"] == "decode"}
    assert found["all"]["kl_divergence"] == 0 and found["patterns"]["kl_divergence"] > 0
    assert 0 < found["patterns"]["pattern_pairs_share"] < 1 and "pattern_pairs_share" not in found["all"]
    asked = [line["figures"] for line in lines if line["what"]["measurement"] == "retrieval" and "pattern_pairs" in line["figures"]]
    assert len(asked) == 2  # a question in one call, and token by token
    (tmp_path / "one.json").write_text('[{"0": ["full"]}]')
    assert evaluation.main([*words, "--resume", "--setting", f"patterns={tmp_path / 'one.json'}"]) == 2
    assert "has 1 layers of 1 heads, the model has 2 of 4" in capsys.readouterr().err
    for more, said in (["--shared-prefill"], "would be prefilled densely"), (["--setting", "patterns=gone.json"], "path = gone.json"):
        with pytest.raises(SystemExit):
            evaluation.main([*words[:-5], *words[-4:], "--setting", setting, *more])
        assert said in capsys.readouterr().err
