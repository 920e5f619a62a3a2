# SPDX-License-Identifier: MIT
"""python -m tandem.eval, on a small model of random weights and on pico."""
import io
import json
import math
import xml.etree.ElementTree

import numpy as np
import pytest
from conftest import ROOT, reference
from hf_common import torch, transformers

import tandem
from tandem.eval import _dense_layers, _evaluation, _mass, _retrieval
from tandem.eval.__main__ import main
from tandem.eval._heat_map import HeatMap, Panel
from tandem.eval._language_model import Tokenizer, load
from tandem.eval._progress import Progress
from tandem.eval._scores import Scores
from tandem.eval._settings import SettingError, check, parse
from tandem.eval._trade_off import Point, TradeOff, best_of

PICO = ROOT / "examples/models/pico"
TEXT = "".join(chr(32 + (7 * i * i + i // 3) % 90) for i in range(3000))
CONTEXT, STEPS = 160, 6
HGCA = "policy=hgca,window_tokens=32,sink_tokens=4,halo_tokens=2"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a folder with a model of bytes, and a text file."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
                                      initializer_range=0.15)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "words.txt").write_text(TEXT)
    return folder


def run(model, out, *words, tasks="perplexity,mass"):
    return main([str(model), "--text", str(model / "words.txt"), "--contexts", str(CONTEXT), "--steps", str(STEPS), "--samples", "3",
                 "--tasks", tasks, "--out", str(out), *words])


def lines_of(out, measurement=None):
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return [line for line in lines if measurement in (None, line["what"]["measurement"])]


def figures_of(out, measurement, **options):
    wanted = options or "dense"
    found = [line["figures"] for line in lines_of(out, measurement) if line["what"]["setting"] == wanted]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    assert run(model, out, "--find-dense-layers", "--setting", "policy=all", "--setting", HGCA, "--setting",
               HGCA + ",dense_layers=1", "--setting", HGCA + ",dense_layers=0+1", "--setting", "k_type=q4_0,k_rotation=none", "--setting",
               "k_type=q8_0,k_rotation=none") == 0
    return out


def negative_log_likelihood(model, first, end):
    """Returns the mean over tokens [first, end), by one dense pass and a softmax in double precision."""
    ids = list(TEXT.encode())[:end]
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = network(torch.tensor([ids])).logits[0].numpy().astype(np.float64)
    most = logits.max(1, keepdims=True)
    log_p = logits - most - np.log(np.exp(logits - most).sum(1, keepdims=True))
    return -np.mean([log_p[i - 1, ids[i]] for i in range(first, end)])


@pytest.mark.parametrize("measurement, first, end", [("prefill", 1, CONTEXT + 1), ("decode", CONTEXT + 1, CONTEXT + STEPS + 1)])
def test_perplexity_is_that_of_double_precision(model, measured, measurement, first, end):
    expected = negative_log_likelihood(model, first, end)
    for figures in (figures_of(measured, measurement), figures_of(measured, measurement, policy="all")):
        assert abs(figures["nll"] - expected) < 1e-5
        assert math.isclose(figures["perplexity"], math.exp(expected), rel_tol=1e-5)
        assert math.isclose(figures["bits_per_token"], expected / math.log(2), rel_tol=1e-5)
        assert figures["n_predictions"] == end - first


def test_policy_all_is_dense(measured):
    for measurement in ("prefill", "decode"):
        figures = figures_of(measured, measurement, policy="all")
        assert figures["kl_divergence"] < 1e-6 and figures["top1_agreement"] == 1 and figures["max_logit_difference"] < 1e-3
    assert figures["kv_bytes_read_share"] == 1
    assert np.array(figures["kept_share"]).shape == (2, 2) and np.all(np.array(figures["kept_share"]) == 1)
    assert np.array(figures["mass_left_out"]).shape == (2, 4) and np.all(np.array(figures["mass_left_out"]) == 0)


def test_a_policy_leaves_out_and_types_lose(measured):
    hgca = figures_of(measured, "decode", **{**dict(parse(HGCA).options)})
    assert 0 < hgca["kept_share_mean"] < 1 and 0 < hgca["kv_bytes_read_share"] < 1
    assert 0 < hgca["mass_left_out_mean"] < hgca["mass_left_out_max"] < 1
    assert hgca["kl_divergence"] > 1e-6
    by_type = {bits: figures_of(measured, "prefill", k_type=bits, k_rotation="none", policy="all") for bits in ("q8_0", "q4_0")}
    assert 0 < by_type["q8_0"]["kl_divergence"] < by_type["q4_0"]["kl_divergence"]
    assert by_type["q4_0"]["kv_row_bytes"] == 2 * 2 * 2 * CONTEXT * tandem.dtype_row_bytes("q4_0", 64)


def test_a_dense_layer_leaves_nothing_out(measured):
    options = dict(parse(HGCA).options)
    none, one, both = (figures_of(measured, "decode", **options, **more) for more in (
        {}, {"dense_layers": [1]}, {"dense_layers": [0, 1]}))
    assert np.all(np.array(one["kept_share"])[1] == 1) and np.all(np.array(one["mass_left_out"])[1] == 0)
    # layer 0 selects as before, because no earlier layer has changed
    for name in ("kept_share", "read_share", "mass_left_out"):
        assert one[name][0] == none[name][0]
    assert max(none["mass_left_out"][1]) > 0
    assert none["kv_bytes_read_share"] < one["kv_bytes_read_share"] < both["kv_bytes_read_share"] == 1
    assert both["kl_divergence"] < 1e-6 < one["kl_divergence"]


def test_dense_layers_that_are_found_cost_what_is_said(measured):
    none = figures_of(measured, "decode", **dict(parse(HGCA).options))
    best = _dense_layers.best_dense_layers(none)
    assert sorted(one.layer_idx for one in best) == [0, 1]
    # the sampled steps are the 2nd, 4th and 6th, whose queries see 162, 164 and 166 keys
    n_bytes = (CONTEXT + 4) * 2 * 2 * 64 * 4
    for one in best:
        assert math.isclose(one.mass_left_out, np.mean(none["mass_left_out"][one.layer_idx]), rel_tol=1e-9)
        assert math.isclose(one.read_bytes + one.more_bytes, n_bytes, rel_tol=1e-9)
        assert math.isclose(one.read_bytes, n_bytes * np.mean(none["read_share"][one.layer_idx]), rel_tol=1e-9)
    table = (measured / "table.md").read_text().split("## Layers best left dense: ")
    assert len(table) == 2 and table[1].startswith("hgca w32 halo 2 sink 4, 160 tokens")  # not of settings with dense layers
    rows = [row.split("|")[1].strip() for row in table[1].splitlines() if row.startswith("| ")]
    assert rows[1:] == [str(one.layer_idx) for one in best] and "`dense_layers=0+1`" in table[1]
    more = (figures_of(measured, "decode", **dict(parse(HGCA).options), dense_layers=[1])["kv_bytes_read_share"]
            - none["kv_bytes_read_share"]) * sum(none["dense_bytes"])
    assert math.isclose(next(one.more_bytes for one in best if one.layer_idx == 1), more, rel_tol=0.05)  # 3 of 6 steps


def test_dense_layers_are_ordered_by_mass_for_a_byte():
    figures = {"dense_bytes": [1000.0, 1000.0, 1000.0, 1000.0], "mass_left_out": [[0.3, 0.3], [0.1, 0.3], [0.0, 0.0], [0.2, 0.3]],
               "read_share": [[0.2], [0.8], [0.1], [0.4, 0.6]]}
    best = _dense_layers.best_dense_layers(figures)
    assert [one.layer_idx for one in best] == [1, 3, 0]  # 0.2 for 200 bytes, 0.25 for 500, 0.3 for 800; layer 2 gains nothing
    assert [round(one.more_bytes) for one in best] == [200, 500, 800]


def test_scores_of_known_distributions():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    scores = Scores()
    scores.add(torch.tensor(np.log(np.stack([p, q]))), torch.tensor(np.log(np.stack([q, q]))), torch.tensor([0, 2]))
    figures = scores.figures()
    assert math.isclose(figures["nll"], -(math.log(0.5) + math.log(0.25)) / 2)
    assert math.isclose(figures["kl_divergence"], (q * np.log(q / p)).sum() / 2) and figures["top1_agreement"] == 0.5
    assert math.isclose(figures["max_logit_difference"], math.log(2))


@pytest.mark.parametrize("n_visible", [10, 6], ids=["all", "sliding window"])
def test_mass_left_out_of_a_made_up_case(n_visible):
    random = np.random.default_rng(5)
    weights = np.exp(random.standard_normal((4, n_visible)))
    weights /= weights.sum(1, keepdims=True)
    kept = [np.array([0, 3, 7, 8]), np.array([1, 5])]  # of the 9 keys before the query, which is key 9
    expected = []
    for head in range(4):
        attended = {*kept[head // 2].tolist(), 9}
        expected.append(sum(weights[head, i] for i in range(n_visible) if i + 10 - n_visible not in attended))
    assert np.allclose(_mass.mass_left_out(weights, kept, 9), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("policy", ["all", "streaming", "hgca"])
def test_selection_names_what_the_next_step_attends(world, policy):
    session = tandem.Session(world.cache, policy=policy, window_tokens=40, sink_tokens=4, **(
        {"halo_tokens": 2} if policy == "hgca" else {}))
    q, k, v = world.qkv(320)
    q *= 2
    session.attend(world.sequence, q[:300], k[:300], v[:300])
    for i in range(300, 320):
        visible = [session.selection(world.sequence, kv_head_idx=head)[0] for head in range(2)]
        o = session.attend(world.sequence, q[i:i + 1], k[i:i + 1], v[i:i + 1])
        for head in range(4):
            mask = np.zeros((1, i + 1), bool)
            mask[0, [*visible[head // 2], i]] = True
            assert np.abs(reference(q[i:i + 1], k[:i + 1], v[:i + 1], mask)[0][0, head] - o[0, head]).max() < 1e-5


@pytest.mark.parametrize("text, names", [
    ("polisy=hgca", ["'polisy'"]), ("policy=hcga", ["policy", "hcga"]), ("window_tokens=big", ["window_tokens", "'big'"]),
    ("k_type=q5_0", ["k_type", "q5_0"]), ("k_rotation=fourier", ["k_rotation", "fourier"]), ("policy", ["'policy'", "NAME=VALUE"]),
    ("policy=hgca,dense_layers=0+x", ["dense_layers", "'0+x'"]), ("policy=hgca,dense_layers=-1", ["dense_layers", "'-1'"]),
    ("policy=hgca,dense_layers=3+1+3", ["dense_layers", "layer 3 twice"]), ("dense_layers=1", ["dense_layers", "policy"]),
    ("policy=all,dense_layers=1", ["dense_layers", "policy"]),
    ("beta=-3", ["beta", "-3"]), ("policy=all,policy=hgca", ["policy", "twice"]), ("streaming_heads=1", ["'streaming_heads'"])])
def test_bad_settings_are_refused_before_the_model_is_loaded(tmp_path, capsys, text, names):
    (tmp_path / "words.txt").write_text(TEXT)
    with pytest.raises(SystemExit) as ended:
        main(["no/such/model", "--text", str(tmp_path / "words.txt"), "--out", str(tmp_path / "out"), "--setting", text])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "--setting" in said and "no/such/model" not in said
    assert all(name in said for name in names), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words, names", [
    ([], ["--text"]), (["--text", "gone.txt"], ["--text", "gone.txt"]), (["--contexts", "1,x"], ["--contexts", "1,x"]),
    (["--tasks", "speed", "--find-dense-layers"], ["--find-dense-layers", "mass"]),
    (["--tasks", "speed,sped"], ["--tasks", "'sped'"]), (["--steps", "0"], ["--steps", "'0'"])])
def test_bad_flags_are_refused(tmp_path, capsys, words, names):
    with pytest.raises(SystemExit) as ended:
        main(["no/such/model", "--out", str(tmp_path / "out"), *words])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and all(name in said for name in names)


def test_what_needs_the_model_is_refused_too(model, tmp_path, capsys):
    assert run(model, tmp_path / "a", "--contexts", "2990") == 2
    assert "--text has 3000 tokens" in capsys.readouterr().err
    assert run(model, tmp_path / "e", "--setting", HGCA + ",dense_layers=0+2") == 2
    assert "dense_layers = 2, the model has layers 0 to 1" in capsys.readouterr().err
    assert main(["no/such/model", "--text", str(model / "words.txt"), "--out", str(tmp_path / "b")]) == 2
    assert "no/such/model" in capsys.readouterr().err
    transformers.LlamaConfig(vocab_size=97, num_hidden_layers=1).save_pretrained(tmp_path / "c")
    assert main([str(tmp_path / "c"), "--text", str(model / "words.txt"), "--out", str(tmp_path / "d")]) == 2
    assert "vocab_size = 97" in capsys.readouterr().err


def test_default_settings_are_possible():
    from tandem.eval._settings import DEFAULTS
    for text in DEFAULTS:
        check(parse(text))
    with pytest.raises(SettingError, match="hcga"):
        check(parse("policy=hcga"))


def test_labels():
    assert [parse(text).label for text in ("policy=all", HGCA, "k_type=q8_0,v_type=q4_0,k_rotation=none",
                                           "k_type=q4_0,k_rotation=hadamard", "policy=hgca,beta=0.5,window_tokens=-1",
                                           "policy=hgca,dense_layers=11+0+1,window_tokens=512,k_type=q8_0")] == [
        "all", "hgca w32 halo 2 sink 4", "q8_0/q4_0", "q4_0 hadamard", "hgca w-1 beta 0.5", "hgca w512 dense 0+1+11 q8_0"]


def test_interrupt_and_resume(model, tmp_path, monkeypatch, capsys):
    out, settings = tmp_path / "out", ["--setting", "policy=all", "--setting", HGCA]
    measure, calls = _evaluation.decode_setting, []

    def interrupted(*arguments):
        calls.append(arguments[2].label)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(_evaluation, "decode_setting", interrupted)
    assert run(model, out, *settings, tasks="mass") == 130
    assert "--resume" in capsys.readouterr().err
    before = lines_of(out)
    assert [line["what"]["setting"] for line in before] == ["dense", {"policy": "all"}]
    with open(out / "results.jsonl", "a") as file:
        file.write('{"what": {"measur')  # as a run leaves it that was killed while writing
    assert run(model, out, *settings, tasks="mass") == 2  # refused without --resume
    calls += ["the second call is over"]
    assert run(model, out, *settings, "--resume", tasks="mass") == 0
    assert calls[:2] == ["all", "hgca w32 halo 2 sink 4"] and calls[3:] == ["hgca w32 halo 2 sink 4"]  # "all" is skipped
    after = lines_of(out)
    assert after[:2] == before and len(after) == 3
    assert run(model, out, *settings, "--resume", tasks="mass") == 0
    assert lines_of(out) == after


def test_runs_agree(model, measured, tmp_path):
    assert run(model, tmp_path, "--setting", HGCA) == 0
    options = dict(parse(HGCA).options)
    first, second = (figures_of(out, "decode", **options) for out in (measured, tmp_path))
    assert {**first, "s_per_step": 0} == {**second, "s_per_step": 0}


def test_lines_say_everything(measured):
    for line in lines_of(measured):
        assert {"model", "measurement", "setting", "context", "seed", "text_sha256"} <= line["what"].keys()
        assert {"tandem", "torch", "transformers", "python", "numpy"} <= line["versions"].keys()
        assert line["machine"]["n_cpus"] > 0 and line["time"].endswith("+00:00")


def test_table_and_pictures(measured):
    table = (measured / "table.md").read_text()
    for words in ("Prefill of 160 tokens", "Decode of 6 tokens after 160", "hgca w32 halo 2 sink 4", "bits per byte"):
        assert words in table
    names = sorted(path.name for path in measured.glob("*.svg"))
    assert names == [f"{name}-160-{mode}.svg" for name in ("kept", "mass", "trade-off") for mode in ("dark", "light")]
    for name in names[:4]:
        tree = xml.etree.ElementTree.parse(measured / name)
        cells = [cell for cell in tree.iter("{http://www.w3.org/2000/svg}rect") if len(cell)]
        # Two of the settings leave keys out.
        assert len(cells) == 2 * (2 * 4 if name.startswith("mass") else 2 * 2)
    for name in names[4:]:
        points = [point for point in xml.etree.ElementTree.parse(measured / name).iter("{http://www.w3.org/2000/svg}circle")
                  if len(point)]
        assert [point[0].text.split(":")[0] for point in points] == [
            "hgca w32 halo 2 sink 4", "hgca w32 halo 2 sink 4 dense 1", "hgca w32 halo 2 sink 4 dense 0+1"]


def test_a_line_joins_what_is_not_beaten():
    points = [Point("a", 0.4, 0.02), Point("b", 0.2, 0.08), Point("c", 0.3, 0.09), Point("d", 0.3, 0.04), Point("e", 0.5, 0.03)]
    assert [point.name for point in best_of(points)] == ["b", "d", "a"]
    tree = xml.etree.ElementTree.fromstring(TradeOff("t", {"g": points, "h": [Point("f", 0.2, 0.02)]}).svg("light"))
    lines = [line.get("points").split() for line in tree.iter("{http://www.w3.org/2000/svg}polyline")]
    places = [[tuple(map(float, place.split(","))) for place in line] for line in lines]
    (b, d, a), (f,) = places
    assert f == (b[0], a[1]) and b[0] < d[0] and abs((d[0] - b[0]) - (a[0] - d[0])) <= 0.2  # shares are linear
    assert abs((d[1] - b[1]) - (a[1] - d[1])) <= 0.2 and d[1] > b[1]  # losses that halve decrease by equal steps

def test_colors_follow_values():
    heat_map = HeatMap("t", "r", "c", ["0"], ["0", "1", "2"], [Panel("p", "s", [[0.0, 0.5, None]])], 0.5, (16, 14))
    for mode, ends in (("light", ("#f0f4f8", "#061d47")), ("dark", ("#1a212b", "#e6f3ff"))):
        svg = heat_map.svg(mode)
        for color, value in zip(ends, ("0.0%", "50.0%"), strict=True):
            assert f'fill="{color}"><title>{value}</title>' in svg
        assert svg.count("stroke-dasharray") == 1


def test_two_scales_lead_away_from_a_middle():
    heat_map = HeatMap("t", "r", "c", ["0"], ["0", "1", "2"], [Panel("p", "s", [[0.0, 1.0, 3.0]])], 2.0, (16, 14), 1.0)
    svg = heat_map.svg("light")
    for color, value in (("#061d47", "0.0%"), ("#f0f4f8", "100.0%"), ("#451303", "300.0%")):
        assert f'fill="{color}"><title>{value}</title>' in svg


def test_speed(model, tmp_path):
    assert run(model, tmp_path, "--setting", "policy=all", tasks="speed") == 0
    lines = lines_of(tmp_path)
    assert [line["what"]["setting"] for line in lines] == ["eager", "sdpa", {"policy": "all"}]
    for line in lines:
        figures = line["figures"]
        assert figures["decode_tokens_per_s_slowest"] <= figures["decode_tokens_per_s"] <= figures["decode_tokens_per_s_fastest"]
        assert figures["prefill_tokens_per_s"] > 0 and figures["kv_row_bytes"] == 2 * 2 * 2 * 64 * 4 * (CONTEXT + 32)


@pytest.mark.parametrize("said, right", [("73194.", True), ("It is 73,194!", True), ("731", False), ("12 and 73194", False),
                                         ("none", False)])
def test_answers(said, right):
    assert _retrieval.is_right(said, "73194") == right


def test_haystack_is_as_long_as_wanted_and_has_facts_at_their_depths():
    text, where = ("a line of the text\n" * 400), _retrieval.depths(4)
    haystack = _retrieval.make(Tokenizer(), text, 4000, _retrieval.Planting("named number", where, 1))
    body = bytes(haystack.body).decode()
    longest = max(map(len, haystack.questions))
    assert 4000 - 20 < len(body) + longest + _retrieval.ANSWER_TOKENS <= 4000
    for fact, depth in zip(haystack.facts, where, strict=True):
        assert abs(body.index(fact.sentence) / len(body) - depth) < 0.03
    assert haystack == _retrieval.make(Tokenizer(), text, 4000, _retrieval.Planting("named number", where, 1))
    assert haystack != _retrieval.make(Tokenizer(), text, 4000, _retrieval.Planting("named number", where, 2))
    with pytest.raises(ValueError, match="--text"):
        _retrieval.make(Tokenizer(), text[:200], 4000, _retrieval.Planting("pass key", [0.5], 1))


class Chat:
    """A tokenizer of bytes with a chat template."""

    chat_template = "there is one"

    def __call__(self, text, add_special_tokens):
        return transformers.BatchEncoding({"input_ids": list(text.encode())})

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return f"<user>{messages[0]['content']}</user><assistant>"


def test_chat_models_get_one_message():
    haystack = _retrieval.make(Tokenizer(Chat()), "a line of the text\n" * 40, 600, _retrieval.Planting("named number", [0.25, 0.75], 1))
    assert bytes(haystack.body).startswith(b"<user>a line")
    for fact, question in zip(haystack.facts, haystack.questions, strict=True):
        assert bytes(question).decode() == fact.question + "</user><assistant>" and fact.question.endswith("?")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_on_a_terminal_and_rare_elsewhere():
    for stream, n_said in ((Terminal(), 1), (io.StringIO(), 0)):
        progress = Progress(100, stream)
        progress._said -= 1  # as if it was printed a second ago
        progress.prefill(25)
        said = stream.getvalue()
        assert said.count(" 25%") == n_said and "\n" not in said
        progress._said -= 30
        progress.prefill(25)
        assert " 50%" in stream.getvalue() and "left" in stream.getvalue()


@pytest.mark.skipif(not PICO.is_dir(), reason="examples/models/pico is not there")
def test_pico_finds_facts(tmp_path):
    text = tmp_path / "words.txt"
    text.write_text((ROOT / "examples/data/haystack.txt").read_text()[:4000])
    assert main([str(PICO), "--text", str(text), "--contexts", "700", "--tasks", "retrieval", "--facts", "2", "--out",
                 str(tmp_path), "--setting", "policy=hgca,window_tokens=128", "--setting",
                 "policy=streaming,window_tokens=128"]) == 0
    right = {}
    for line in lines_of(tmp_path, "retrieval"):
        what = line["what"]
        policy = what["setting"] if isinstance(what["setting"], str) else what["setting"]["policy"]
        right.setdefault((policy, what["kind"], what["question"]), []).append(line["figures"]["right"])
    for kind in ("pass key", "named number"):
        assert right["dense", kind, "appended"] == right["hgca", kind, "appended"] == [True, True]
        assert right["streaming", kind, "decoded"] == [False, False]
    assert {path.name for path in tmp_path.glob("*-light.svg")} == {
        f"{kind}-{way}-light.svg" for kind in ("pass-key", "named-number") for way in ("appended", "decoded")}
    assert "2 of 2" in (tmp_path / "table.md").read_text()


def test_bytes_are_tokens(model):
    loaded = load(str(model), None)
    assert loaded.is_of_bytes and loaded.tokenizer.tokens("ä b") == list("ä b".encode())
