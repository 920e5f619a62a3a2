# SPDX-License-Identifier: MIT
"""Policy "hip" against the reference of test/reference: the same lists, and attention over them in double precision."""
import sys

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, ROOT
from py_hidden_test import OnDevice, controls, device_engine  # noqa: F401

import tandem
from tandem import Pruning, PruningRecord, PruningStage

sys.path.insert(0, str(ROOT / "test" / "reference"))
pruning_reference = pytest.importorskip("pruning_reference")
from pruning_records import Record, Stage  # noqa: E402

SCALE = 1 / np.sqrt(DIM)
GROUP = Q_HEADS // KV_HEADS
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
TIE = 1e-4  # scores that differ by less may be in either order


def three_stages(judges, intervals=(1, 1, 1), plus_next=False):
    sizes, keeps, blocks = (32, 16, 8), (512, 256, 128), (64, 32, 32)
    return Record(64, 256, tuple(Stage(judge, block, size, keep, interval, plus_next and i == 2) for i, (
        judge, block, size, keep, interval) in enumerate(zip(judges, blocks, sizes, keeps, intervals, strict=True))))


RECORDS = {
    "bounds of 8": Record(64, 128, (Stage("bounds", 64, 8, 128, 4),)),
    "exact 1": Record(16, 64, (Stage("exact", 16, 1, 64, 3),)),
    "descent": three_stages(("descent",) * 3, (16, 8, 4)),
    "bounds, bounds, exact": three_stages(("bounds", "bounds", "exact"), (16, 8, 4), plus_next=True),
    "exact in the middle": three_stages(("descent", "exact", "bounds"), (3, 2, 1)),
    "by length": Record(64, 256, (Stage("bounds", 64, 32, 512, 8, from_tokens=1500), Stage("exact", 64, 8, 128, 4, from_tokens=1500),
                                  Stage("bounds", 64, 8, 256, 4, to_tokens=1200))),
}


def given(record):
    """Returns a record of the reference in the library's form."""
    return PruningRecord([PruningStage(stage.judge, stage.chunk_tokens, stage.keep_tokens, stage.refresh_interval, stage.query_block,
                                       stage.plus_next, stage.from_tokens, stage.to_tokens) for stage in record.stages],
                         record.sink_tokens, record.window_tokens)


class Beside:
    """A sequence of the library and one of the reference."""

    def __init__(self, record, shared=False, seed=1, spread=1.0, **cache_options):
        self.engine = tandem.Engine(n_threads=2)
        model = tandem.Model([tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM)])
        self.cache = tandem.Cache(self.engine, model, **{"k_type": "f32", **cache_options})
        self.session = tandem.Session(self.cache, policy="hip", pruning=Pruning(decode=[given(record)], append=[given(record)],
                                                                                  shared_lists=shared))
        self.sequence = self.cache.create_sequence()
        self.record, self.shared, self.spread = record, shared, spread
        self.random = np.random.default_rng(seed)
        self.k = self.v = np.zeros((0, KV_HEADS, DIM), np.float32)
        self.decoder = pruning_reference.Decoder(record, sm_scale=SCALE, shared=shared)
        self.n_compared = self.n_tied = 0

    def rows(self, n):
        q, k, v = (self.random.standard_normal((n, heads, DIM)).astype(np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        return q * self.spread, k, v

    def append(self, n, **options):
        q, k, v = self.rows(n)
        o = self.session.attend(self.sequence, q, k, v, **options)
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])
        p0 = len(self.k) - n
        if options.get("speculative"):
            blocks = [self.decoder.step(q, self.k, commit=False)]
        elif n == 1:
            blocks = [self.decoder.step(q[0], self.k)]
        else:
            blocks = pruning_reference.prune_append(q, self.k, p0, self.record, sm_scale=SCALE, shared=self.shared)
            self.decoder.reset()
        self.compare(blocks, q, np.asarray(o), p0)
        return blocks

    def is_tied(self, block, kv_head):
        place = 0 if self.shared else kv_head
        for stage in block.stages:
            if stage.gap(place) < TIE:
                return True
            doubts = stage.doubts[place] if stage.doubts else None
            if doubts is not None and np.min(doubts) < TIE:
                return True
        return False

    def compare(self, blocks, q, o, p0):
        for block in blocks:
            for head in range(Q_HEADS):
                if self.is_tied(block, head // GROUP):
                    self.n_tied += 1
                    continue
                self.n_compared += 1
                for query in range(block.n_queries):
                    row, tokens = block.p0 + query - p0, block.attended(query, head // GROUP)
                    logits = self.k[tokens, head // GROUP].astype(np.float64) @ q[row, head].astype(np.float64) * SCALE
                    weights = np.exp(logits - logits.max())
                    want = weights @ self.v[tokens, head // GROUP] / weights.sum()
                    np.testing.assert_allclose(o[row, head], want, **CLOSE, err_msg=f"query of token {block.p0 + query}, head {head}")

    def kept(self, kv_head):
        return self.session.selection(self.sequence, kv_head_idx=kv_head)[0]

    def cut(self, n):
        self.k, self.v = self.k[:n], self.v[:n]
        self.decoder.reset()


@pytest.mark.parametrize("shared", [False, True], ids=["by KV head", "shared"])
@pytest.mark.parametrize("name", RECORDS)
def test_answers_are_those_over_the_lists_of_the_reference(name, shared):
    beside = Beside(RECORDS[name], shared)
    beside.append(1000)
    for _ in range(20):
        beside.append(1)
    beside.append(70)
    beside.append(150)
    for _ in range(300 if name == "by length" else 10):
        beside.append(1)
    assert beside.n_compared > 4 * beside.n_tied


@pytest.mark.parametrize("name", RECORDS)
def test_the_last_list_is_told(name):
    beside = Beside(RECORDS[name])
    beside.append(900)
    for n in (1, 1, 40, 1):
        block = beside.append(n)[-1]
        for kv_head in range(KV_HEADS):
            if not beside.is_tied(block, kv_head):
                np.testing.assert_array_equal(beside.kept(kv_head), np.unique(np.concatenate(
                    [block.attended(query, kv_head) for query in range(block.n_queries)])))


def test_truncated_and_removed_tokens_are_forgotten():
    beside = Beside(RECORDS["bounds, bounds, exact"])
    beside.append(1200)
    beside.append(1)
    beside.sequence.truncate(1003)
    beside.cut(1003)
    beside.append(1)
    beside.append(300)
    beside.append(1)
    beside.sequence.remove(500, 37)
    beside.k, beside.v = (np.concatenate([rows[:500], rows[537:]]) for rows in (beside.k, beside.v))
    beside.decoder.reset()
    for _ in range(20):
        beside.append(1)


def test_a_fork_goes_on_with_the_lists():
    beside = Beside(RECORDS["bounds, bounds, exact"])
    beside.append(1200)
    beside.append(1)
    twin = Beside.__new__(Beside)
    twin.__dict__.update(beside.__dict__)
    twin.sequence, twin.decoder, twin.random = beside.sequence.fork(), beside.decoder.fork(), np.random.default_rng(9)
    for _ in range(20):
        beside.append(1)
        twin.append(1)


def test_guesses_leave_no_trace():
    beside = Beside(RECORDS["bounds, bounds, exact"])
    beside.append(1200)
    for n_kept in (0, 2, 5, 1):
        beside.append(1)
        length = len(beside.k)
        beside.append(5, speculative=True)
        beside.session.commit(beside.sequence, list(range(n_kept)))
        beside.k, beside.v = beside.k[:length + n_kept], beside.v[:length + n_kept]


@pytest.mark.parametrize("options", [{"k_type": "bf16"}, {"k_type": "q8_0"}, {"page_tokens": 16}], ids=["bf16", "q8_0", "short pages"])
def test_keys_are_judged_as_they_are_stored(options):
    """The reference gets the rows that the store gives back."""
    beside = Beside(RECORDS["bounds, bounds, exact"], **options)
    append = beside.append

    def append_stored(n):
        before = len(beside.k)
        q, k, v = beside.rows(n)
        o = beside.session.attend(beside.sequence, q, k, v)
        stored = beside.sequence.read(before, n)
        beside.k, beside.v = (np.concatenate([old, new]) for old, new in zip((beside.k, beside.v), stored, strict=True))
        blocks = ([beside.decoder.step(q[0], beside.k)] if n == 1 else
                  pruning_reference.prune_append(q, beside.k, before, beside.record, sm_scale=SCALE))
        if n > 1:
            beside.decoder.reset()
        beside.compare(blocks, q, np.asarray(o), before)

    del append
    append_stored(1000)
    for _ in range(10):
        append_stored(1)


@pytest.mark.parametrize("query_block", [1, 8, 64])
def test_stages_begin_and_end_within_an_append(query_block):
    """The first query of each block decides which stages exist. Bounds are made up to that query."""
    beside = Beside(Record(16, 24, (Stage("bounds", query_block, 8, 64, to_tokens=2048),)))
    beside.append(2028)
    beside.append(90)
    beside.append(1)


def test_a_guess_of_several_blocks_does_not_see_what_was_truncated():
    answers = []
    for appends_before in (False, True):
        beside = Beside(Record(16, 24, (Stage("bounds", 8, 8, 64),)))
        beside.append(300)
        random = np.random.default_rng(5)
        if appends_before:
            beside.append(200)
            beside.sequence.truncate(300)
        q, k, v = (random.standard_normal((40, heads, DIM)).astype(np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        answers.append(np.asarray(beside.session.attend(beside.sequence, q, k, v, speculative=True)))
    np.testing.assert_array_equal(*answers)


def test_a_list_of_one_query_head_is_the_same_shared_or_not():
    engine, answers = tandem.Engine(n_threads=2), []
    model = tandem.Model([tandem.Layer(n_q_heads=1, n_kv_heads=1, k_head_dim=DIM)])
    record = PruningRecord([PruningStage("exact", 8, 64)], 16, 64)
    q, k, v = np.random.default_rng(3).standard_normal((3, 500, 1, DIM)).astype(np.float32)
    for shared in (False, True):
        cache = tandem.Cache(engine, model, k_type="f32")
        session = tandem.Session(cache, policy="hip", pruning=Pruning(decode=[record], append=[record], shared_lists=shared))
        answers.append(np.asarray(session.attend(cache.create_sequence(), 3 * q, k, v)))
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize("pruning, field", [
    (Pruning(shared_lists=2), "pruning.shared_lists"),
    (Pruning(decode=[PruningRecord([PruningStage("exact", 8, 64, plus_next="no")])]), "pruning.decode[0].stages[0].plus_next"),
    (Pruning(decode=[PruningRecord([PruningStage("exact", 8, 64, query_block=2**40)])]), "pruning.decode[0].stages[0].query_block"),
])
def test_flags_and_numbers_are_refused_by_their_field(world, pruning, field):
    with pytest.raises(tandem.InvalidArgumentError) as told:
        tandem.Session(world.cache, policy="hip", pruning=pruning)
    assert told.value.field == field


def test_a_planted_key_is_found():
    """One key that its query points to, among keys with low scores. Bounds and exact stages find it, wherever it lies."""
    beside = Beside(RECORDS["bounds, bounds, exact"])
    q, k, v = beside.rows(2000)
    for place in (64, 511, 1000, 1733):
        beside = Beside(RECORDS["bounds, bounds, exact"], seed=place)
        planted = k.copy()
        planted[place] = 3 * q[-1, ::GROUP]
        beside.session.attend(beside.sequence, q[:1999], planted[:1999], v[:1999])
        o = beside.session.attend(beside.sequence, q[1999:], planted[1999:], v[1999:])
        np.testing.assert_allclose(o[0, ::GROUP], v[place], atol=1e-3)


@pytest.mark.parametrize("make, error, field", [
    (lambda: "4k", tandem.NotFoundError, "pruning.preset"),
    (lambda: Pruning(preset="3k", decode=[]), tandem.InvalidArgumentError, "pruning.n_decode"),
    (lambda: Pruning(decode=[PruningRecord([])]), tandem.InvalidArgumentError, "pruning.decode[0].n_stages"),
    (lambda: Pruning(append=[PruningRecord([PruningStage("exact", 8, 64)], 63)]), tandem.InvalidArgumentError,
     "pruning.append[0].sink_tokens"),
    (lambda: Pruning(append=[PruningRecord([PruningStage("exact", 8, 64)], 64, 15)]), tandem.InvalidArgumentError,
     "pruning.append[0].window_tokens"),
    (lambda: Pruning(decode=[PruningRecord([PruningStage("exact", 12, 64)])]), tandem.InvalidArgumentError,
     "pruning.decode[0].stages[0].chunk_tokens"),
    (lambda: Pruning(decode=[PruningRecord([PruningStage("exact", 8, 60)])]), tandem.InvalidArgumentError,
     "pruning.decode[0].stages[0].keep_tokens"),
    (lambda: Pruning(decode=[PruningRecord([PruningStage("bounds", 8, 64), PruningStage("exact", 16, 64)])]),
     tandem.InvalidArgumentError, "pruning.decode[0].stages[1].chunk_tokens"),
    (lambda: Pruning(decode=[PruningRecord([PruningStage("bounds", 8, 64, plus_next=True), PruningStage("exact", 8, 64)])]),
     tandem.InvalidArgumentError, "pruning.decode[0].stages[0].plus_next"),
    (lambda: Pruning(decode=[PruningRecord([PruningStage("all", 8, 64)])]), tandem.InvalidArgumentError,
     "pruning.decode[0].stages[0].judge"),
    (lambda: 3, tandem.InvalidArgumentError, "pruning"),
])
def test_wrong_prunings_are_refused_by_their_field(world, make, error, field):
    with pytest.raises(error) as told:
        tandem.Session(world.cache, policy="hip", pruning=make())
    assert told.value.field == field


def test_pruning_needs_a_policy_that_prunes(world):
    with pytest.raises(tandem.InvalidArgumentError) as told:
        tandem.Session(world.cache, pruning="3k")
    assert told.value.field == "pruning"


def test_trees_are_refused(world):
    session = tandem.Session(world.cache, policy="hip")
    q, k, v = world.qkv(3)
    with pytest.raises(tandem.UnsupportedError) as told:
        session.attend(world.sequence, q, k, v, speculative=True, parent_idx=[-1, 0, 0])
    assert told.value.field == "parent_idx"
    assert world.sequence.length() == 0 if callable(world.sequence.length) else len(world.sequence) == 0


def test_device_tensors_are_pruned_as_the_hosts(controls):  # noqa: F811
    """Answers, kept keys and counts are the host's. The window has room for all keys, and a longer sequence is refused."""
    record = given(RECORDS["bounds of 8"])
    options = {"policy": "hip", "pruning": Pruning(decode=[record], append=[record]), "window_tokens": 512}
    sessions, sequences, engine = [], [], device_engine()
    for each in (engine, tandem.Engine(n_threads=2)):
        model = tandem.Model([tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM)])
        cache = tandem.Cache(each, model, k_type="f32")
        sessions.append(tandem.Session(cache, **options))
        sequences.append(cache.create_sequence())
    random, memory = np.random.default_rng(3), []
    for n in [400, *[1] * 10]:
        q, k, v = (random.standard_normal((n, heads, DIM)).astype(np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        memory.append(OnDevice(engine, q, k, v, np.full_like(q, np.nan)))
        sessions[0].attend(sequences[0], *memory[-1].arrays[:3], out=memory[-1].arrays[3])
        wanted = sessions[1].attend(sequences[1], q, k, v)
        np.testing.assert_allclose(memory[-1].arrays[3].read(), wanted, rtol=1e-4, atol=1e-4)
        for head in range(KV_HEADS if n == 1 else 0):
            kept = [session.selection(sequence, kv_head_idx=head)[0] for session, sequence in zip(sessions, sequences, strict=True)]
            np.testing.assert_array_equal(*kept)
            assert len(kept[0]) < 410
    stats = [session.stats() for session in sessions]
    assert stats[0].n_refreshes == stats[1].n_refreshes > 0 and stats[0].selected_keys == stats[1].selected_keys > 0
    assert stats[0].judged_kv_bytes == stats[1].judged_kv_bytes > 0  # one stage leaves nothing out
    with pytest.raises(tandem.CapacityError) as told:
        more = OnDevice(engine, *(np.zeros((103, heads, DIM), np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS)))
        sessions[0].attend(sequences[0], *more.arrays[:3], out=more.arrays[3])
    assert told.value.field == "window_tokens"
