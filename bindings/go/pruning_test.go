// SPDX-License-Identifier: MIT

package tandem

import (
	"math"
	"testing"
)

// Compares policy "hip" with double precision and with "all", and tests which options are refused.
const (
	nPruned = 3000
	needle  = 1234 // a token outside of sinks and window
)

// pruningRecord attends 16 sinks, a window of 64 tokens, and keepTokens others in chunks of 8.
func pruningRecord(keepTokens int64) PruningRecord {
	return PruningRecord{SinkTokens: 16, WindowTokens: 64,
		Stages: []PruningStage{{Judge: JudgeBounds, ChunkTokens: 8, KeepTokens: keepTokens}}}
}

func records(records ...PruningRecord) []PruningRecord { return records }

func pruningSession(w *world, policy string, pruning *Pruning) (*Session, error) {
	return NewSession(w.cache, &SessionOptions{Policy: policy, Pruning: pruning})
}

// firstHeads returns the first query head of each group.
func firstHeads[T any](all []T) (first []T) {
	for head := 0; head < kvHeads; head++ {
		first = append(first, all[head*qToken/kvHeads:][:dim]...)
	}
	return first
}

// pruned holds the last query, its output, and all keys and values.
type pruned struct{ q, o, k, v []float32 }

// appendAndDecode appends nPruned tokens to a new sequence, then one more. In each group, the key of token `needle` is a
// multiple of the last query's first head.
func appendAndDecode(t *testing.T, w *world, session *Session) pruned {
	t.Helper()
	sequence := must(w.cache.CreateSequence())
	q, k, v := numbers((nPruned+1)*qToken, 3), numbers((nPruned+1)*kvToken, 4), numbers((nPruned+1)*kvToken, 5)
	o := unset(len(q))
	for i, x := range firstHeads(q[nPruned*qToken:]) {
		k[needle*kvToken+i] = 8 * x
	}
	for _, tokens := range [][2]int{{0, nPruned}, {nPruned, nPruned + 1}} {
		first, end := tokens[0], tokens[1]
		check(t, session.Attend(&Attend{Sequences: []SequenceID{sequence}, QLens: []int64{int64(end - first)},
			Q: heads(q[first*qToken : end*qToken]), K: kv(k[first*kvToken : end*kvToken]), V: kv(v[first*kvToken : end*kvToken]),
			O: heads(o[first*qToken : end*qToken])}))
	}
	for i, x := range o {
		if math.IsNaN(float64(x)) {
			t.Fatalf("o[%d] is not written", i)
		}
	}
	return pruned{q[nPruned*qToken:], o[nPruned*qToken:], k, v}
}

func TestSmallRecordsKeepWhatCounts(t *testing.T) {
	w := newWorld(t, 0, 1)
	session := must(pruningSession(w, "hip", &Pruning{Preset: "3k-fast", Decode: records(pruningRecord(64)),
		Append: records(pruningRecord(64))}))
	defer session.Close()
	got := appendAndDecode(t, w, session)
	all, _ := reference(got.q, got.k, got.v)
	closeTo(t, firstHeads(got.o), firstHeads(all))
	difference := 0.0
	for i, x := range got.o {
		difference = math.Max(difference, math.Abs(float64(x)-all[i]))
	}
	if difference < 1e-2 || must(session.Stats()).NRefreshes == 0 {
		t.Fatalf("%g: nothing was pruned", difference)
	}
}

func TestRecordsThatKeepEverythingAttendAsAllDoes(t *testing.T) {
	w := newWorld(t, 0, 1)
	var all []float64
	for _, x := range appendAndDecode(t, w, w.session(t, "all")).o {
		all = append(all, float64(x))
	}
	for _, pruning := range []*Pruning{
		{Decode: records(pruningRecord(4096)), Append: records(pruningRecord(4096))},
		{Preset: "3k", SharedLists: true}, // keeps 4096 tokens in a model's first layers
	} {
		session := must(pruningSession(w, "hip", pruning))
		defer session.Close()
		closeTo(t, appendAndDecode(t, w, session).o, all)
	}
}

func TestRecordsOfLayers(t *testing.T) {
	w := newWorld(t, 0, 3)
	three := records(pruningRecord(64), pruningRecord(128), pruningRecord(256))
	must(pruningSession(w, "hip", &Pruning{Decode: three, Append: three[:1]})).Close()
	must(pruningSession(w, "hip", &Pruning{})).Close()
	must(pruningSession(w, "hip", nil)).Close()
	_, err := pruningSession(w, "hip", &Pruning{Decode: three[:2]})
	refused(t, err, ErrInvalidArgument, "pruning.n_decode", "= 2")
	three[2].Stages = append(three[2].Stages, PruningStage{Judge: JudgeExact, ChunkTokens: 16, KeepTokens: 64})
	_, err = pruningSession(w, "hip", &Pruning{Append: three})
	refused(t, err, ErrInvalidArgument, "pruning.append[2].stages[1].chunk_tokens", "= 16")
}

func TestPruningThatIsRefused(t *testing.T) {
	w := newWorld(t, 0, 1)
	with := func(policy string, pruning Pruning) error {
		_, err := pruningSession(w, policy, &pruning)
		return err
	}
	refused(t, with("hip", Pruning{Preset: "4k"}), ErrNotFound, "pruning.preset", "4k")
	refused(t, with("hip", Pruning{Preset: "3k\x00"}), ErrInvalidArgument, "pruning.preset", "zero byte")
	refused(t, with("all", Pruning{}), ErrInvalidArgument, "pruning", "no layer")
	inAppend := func(member, message string, change func(r *PruningRecord)) {
		t.Helper()
		record := pruningRecord(64)
		change(&record)
		refused(t, with("hip", Pruning{Append: records(record)}), ErrInvalidArgument, "pruning.append[0]."+member, message)
	}
	inAppend("n_stages", "= 0", func(r *PruningRecord) { r.Stages = nil })
	inAppend("window_tokens", "= 15", func(r *PruningRecord) { r.WindowTokens = 15 })
	inAppend("sink_tokens", "= -2", func(r *PruningRecord) { r.SinkTokens = -2 })
	inAppend("sink_tokens", "= 16 with NoSinks", func(r *PruningRecord) { r.NoSinks = true })
	inDecode := func(member, message string, change func(s *PruningStage)) {
		t.Helper()
		record := pruningRecord(64)
		record.Stages = append(record.Stages, record.Stages[0])
		change(&record.Stages[1])
		field := "pruning.decode[0].stages[1]." + member
		refused(t, with("hip", Pruning{Decode: records(record)}), ErrInvalidArgument, field, message)
	}
	inDecode("judge", "= 0", func(s *PruningStage) { s.Judge = 0 })
	inDecode("chunk_tokens", "= 3", func(s *PruningStage) { s.ChunkTokens = 3 })
	inDecode("query_block", "= 3", func(s *PruningStage) { s.QueryBlock = 3 })
	inDecode("keep_tokens", "= 24", func(s *PruningStage) { s.PlusNext, s.KeepTokens = true, 24 })
	inDecode("refresh_interval", "= -1", func(s *PruningStage) { s.RefreshInterval = -1 })
	inDecode("from_tokens", "= -9", func(s *PruningStage) { s.FromTokens = -9 })
	inDecode("to_tokens", "= 9", func(s *PruningStage) { s.FromTokens, s.ToTokens = 9, 9 })
}

// Zero members give the defaults of the library's init functions, except where 0 has a meaning of its own.
func TestPruningsDefaultsAreTheLibrarys(t *testing.T) {
	var a arena
	defer a.free()
	raw := (&Pruning{Append: records(PruningRecord{}, PruningRecord{NoSinks: true})}).raw(&a)
	if raw.preset != nil || raw.shared_lists != 0 || raw.decode != nil || raw.n_decode != 0 || raw.n_append != 2 || a.err != nil {
		t.Fatalf("%+v, %v", *raw, a.err)
	}
	if record := raw.append; record.sink_tokens != -1 || record.window_tokens != -1 || record.stages != nil {
		t.Fatalf("%+v", *record)
	}
	second, _ := pruningRecords(&a, "", records(PruningRecord{NoSinks: true}))
	if second.sink_tokens != 0 || second.window_tokens != -1 {
		t.Fatalf("%+v", *second)
	}
}
