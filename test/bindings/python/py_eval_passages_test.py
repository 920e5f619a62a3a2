# SPDX-License-Identifier: MIT
"""python -m tandem.eval over several passages: from one prefill, in parts, and its questions."""
import json
import random

import pytest
from conftest import ROOT
from hf_common import torch
from py_eval_test import lines_of, main, model, run  # noqa: F401  (model is a fixture)

from tandem.eval import _pruning_text, _retrieval, tables
from tandem.eval._language_model import Tokenizer, load
from tandem.eval._progress import Progress
from tandem.eval._settings import SettingError, parse
from tandem.eval._start import OwnPrefill, SharedPrefill, check_shared

ALL = "policy=hip,pruning=dense+64/128/exact:8:4096:1"  # keeps every key
HGCA = "policy=hgca,window_tokens=32,sink_tokens=4,halo_tokens=2"


def test_pruning_is_as_the_programs_take_it():
    pruning = _pruning_text.pruning_of("dense+64/512/bounds:64:8192:16/exact:8:1472:4+next")
    record, = pruning.decode
    assert (record.sink_tokens, record.window_tokens) == (64, 512)
    assert [(one.judge, one.chunk_tokens, one.keep_tokens, one.refresh_interval, one.plus_next) for one in record.stages] == [
        ("bounds", 64, 8192, 16, False), ("exact", 8, 1472, 4, True)]
    assert pruning.append[0].stages[0].keep_tokens > 1 << 20
    own = _pruning_text.pruning_of("64/512/bounds:8:1472:4")
    assert own.append == own.decode
    assert _pruning_text.pruning_of("3k").preset == "3k" and _pruning_text.pruning_of("dense+3k").append
    for text, name in (("64/512", "64/512"), ("64/x/bounds:8:8:1", "'x'"), ("64/512/bound:8:8:1", "'bound'"), ("64/512/bounds:8:8", "INTERVAL")):
        with pytest.raises(SettingError, match=name):
            parse(f"policy=hip,pruning={text}")


def test_one_prefill_gives_what_own_prefills_give(model):
    loaded = load(str(model), None)
    ids = torch.tensor(list((model / "words.txt").read_bytes()[:400]))
    shared = SharedPrefill(loaded, ids, Progress(1))
    for text in ("policy=all", ALL, "policy=streaming,window_tokens=48,sink_tokens=4"):
        found = []
        for start in (OwnPrefill(loaded, ids, Progress(1)), shared):
            past = start.cache(parse(text))
            assert past.get_seq_length() == len(ids)
            found.append(torch.stack([loaded.step(ids[i:i + 1], past) for i in range(5)]))
            past.close()
        assert torch.allclose(*found, atol=1e-4), text
    shared.close()


def test_settings_of_another_storage_have_no_common_prefill(model, tmp_path, capsys):
    check_shared([parse("policy=hgca")])
    with pytest.raises(SystemExit):
        run(model, tmp_path, "--shared-prefill", "--setting", "k_type=q8_0", tasks="perplexity")
    assert "q8_0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(model, tmp_path, "--shared-prefill", "--setting", "policy=hgca", tasks="mass")


def test_parts_are_the_whole(model, tmp_path, capsys):
    words = ["--setting", HGCA, "--passages", "3", "--shared-prefill", "--samples", "0"]
    assert run(model, tmp_path / "whole", *words, tasks="perplexity") == 0
    for part in ("1/2", "2/2"):
        assert run(model, tmp_path / part[0], *words, "--part", part, tasks="perplexity") == 0
    capsys.readouterr()
    whole, parts = (sorted((json.dumps(line["what"], sort_keys=True), line["figures"]["nll"]) for out in outs for line in lines_of(out))
                    for outs in ([tmp_path / "whole"], [tmp_path / "1", tmp_path / "2"]))
    assert whole == parts and len(whole) == 6 and len({what for what, _ in whole}) == 6
    assert tables.main([str(tmp_path / "1"), str(tmp_path / "2")]) == 0
    said = capsys.readouterr().out
    assert "means of 3 passages" in said
    bits = [line["figures"]["bits_per_token"] for line in lines_of(tmp_path / "whole") if line["what"]["setting"] == "dense"]
    assert f"| dense | {sum(bits) / 3:.4f} |" in said
    assert tables.main([str(tmp_path / "none")]) == 2


def test_passages_are_other_texts(model, tmp_path):
    assert run(model, tmp_path, "--setting", "policy=all", "--passages", "2", "--samples", "0", tasks="perplexity") == 0
    likely = {line["what"]["passage"]: line["figures"]["nll"] for line in lines_of(tmp_path, "decode") if line["what"]["setting"] == "dense"}
    assert likely.keys() == {0, 1} and likely[0] != likely[1]


def test_depths_move_from_passage_to_passage():
    found = [depth for passage in range(4) for depth in _retrieval.depths(1, (passage + 0.5) / 4, 0.8)]
    assert found == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert _retrieval.depths(2, until=0.8) == pytest.approx([0.2, 0.6])
    assert _retrieval.depths(2, until=0.8, after=0.4) == pytest.approx([0.5, 0.7])


def test_forty_facts_have_forty_names():
    haystack = _retrieval.make(Tokenizer(), "a line of the text\n" * 800, 12000, _retrieval.Planting("named number", _retrieval.depths(40), 1))
    assert len({fact.question for fact in haystack.facts}) == 40 == len({fact.sentence for fact in haystack.facts})


def test_numbers_have_the_names_that_are_given(capsys, tmp_path):
    planting = _retrieval.Planting("named number", _retrieval.depths(2), 1, ["river", "tower"])
    haystack = _retrieval.make(Tokenizer(), "a line of the text\n" * 100, 1500, planting)
    assert {fact.question for fact in haystack.facts} == {f"\nWhat is the number of {name}? It is " for name in ("river", "tower")}
    for words in (["--names", "river", "--facts", "2"], ["--names", "river,river"], ["--names", "a river"], ["--after", "0.5", "--until", "0.5"],
                  ["--after", "1.5"]):
        with pytest.raises(SystemExit, match="2"):
            main(["model", "--text", __file__, *words, "--out", str(tmp_path)])
        assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize("said, ends", [("731", False), ("73194.", True), ("It is 73,194", False), ("73,194 x", True), ("", False)])
def test_an_answer_ends_behind_its_number(said, ends):
    assert _retrieval._ends(said) == ends


class Parrot:
    """A model that answers 12345 to any text and notes its inputs."""

    def __init__(self):
        self.tokenizer, self.came = Tokenizer(), []

    def step(self, token, past):
        self.came.append(bytes(token.tolist()).decode())
        said = "".join(self.came)
        answer = "12345." if said.endswith(" ") else "12345."[len(said) - len(said.rstrip("12345.")):] or "."
        return torch.nn.functional.one_hot(torch.tensor(ord(answer[0])), 256).float()


def test_questions_in_a_row_follow_each_other_in_one_cache():
    haystack = _retrieval.make(Tokenizer(), "a line of the text\n" * 100, 1500, _retrieval.Planting("named number", _retrieval.depths(3), 1))
    parrot = Parrot()
    found = list(_retrieval.measure_retrieval(parrot, haystack, {}, ["in a row"], Progress(1)))
    order = [haystack.facts[[fact.depth for fact in haystack.facts].index(one["depth"])] for one in found]
    assert "".join(parrot.came) == "".join(fact.question + "12345." for fact in order)
    assert {len(one) for one in parrot.came} == {1}
    assert order == random.Random(len(haystack.body)).sample(haystack.facts, 3)
    parrot.came.clear()
    list(_retrieval.measure_retrieval(parrot, haystack, {}, ["appended"], Progress(1)))
    assert parrot.came[0] == haystack.facts[0].question
    parrot.came.clear()
    list(_retrieval.measure_retrieval(parrot, haystack, {}, ["appended in a row"], Progress(1)))
    assert [one for one in parrot.came if len(one) > 1] == [fact.question for fact in order]
    assert "".join(parrot.came) == "".join(fact.question + "12345." for fact in order)
    assert _retrieval.dense_ways(["appended", "decoded", "in a row", "appended in a row"]) == ["appended", "in a row"]
    assert _retrieval.dense_ways(["appended in a row"]) == ["appended in a row"]


def test_pico_finds_numbers_in_a_row(tmp_path):
    text = tmp_path / "words.txt"
    text.write_text((ROOT / "examples/data/haystack.txt").read_text()[:6000])
    assert main([str(ROOT / "examples/models/pico"), "--text", str(text), "--contexts", "1200", "--tasks", "retrieval", "--facts", "3",
                 "--kinds", "named number", "--names", "river,tower,amber", "--ways", "decoded,in a row,appended in a row",
                 "--after", "0.1", "--until", "0.6", "--shared-prefill", "--out", str(tmp_path),
                 "--setting", "policy=hip,pruning=dense+64/128/bounds:8:256:1", "--setting", "policy=streaming,window_tokens=128"]) == 0
    right = {}
    for line in lines_of(tmp_path):
        setting = line["what"]["setting"]
        right.setdefault((setting if isinstance(setting, str) else setting["policy"], line["what"]["question"]), []).append(
            line["figures"]["right"])
    assert right["dense", "decoded"] == right["hip", "decoded"] == right["hip", "in a row"] == right["hip", "appended in a row"] == [True] * 3
    assert not any(right["streaming", "decoded"] + right["streaming", "in a row"])
    table = (tmp_path / "table.md").read_text()
    assert "3 named numbers, 1,200 tokens, questions in a row" in table and "questions appended in a row" in table
