// SPDX-License-Identifier: MIT

package tandem

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
)

// Compares every call with double precision, or with what the header says about it.
const n = 300

func TestDecodeIsSoftmaxAttention(t *testing.T) {
	w := newWorld(t, n, 1)
	q := numbers(qToken, 3)
	o, lse := decode(t, w.session(t, "all"), w.sequence, q)
	expectedO, expectedLse := reference(q, w.k, w.v)
	closeTo(t, o, expectedO)
	closeTo(t, lse, expectedLse)
}

// q, k and v are interleaved in one buffer, two sequences share a call, and the rows of o have gaps. The gaps stay untouched.
func TestStridedTensorsOfTwoSequences(t *testing.T) {
	w := newWorld(t, n, 1)
	other := must(w.cache.CreateSequence())
	const row, kFirst, vFirst = qToken + 2*kvToken, qToken, qToken + kvToken
	qkv, o := numbers(3*row, 4), make([]float32, 3*row)
	view := func(data []float32, first, nHeads int) Tensor {
		return Float32s(data[first:], 3, nHeads, dim).Strided(row, dim, 1)
	}
	check(t, w.session(t, "all").Attend(&Attend{Sequences: []SequenceID{other, w.sequence}, QLens: []int64{2, 1},
		Q: view(qkv, 0, qHeads), K: view(qkv, kFirst, kvHeads), V: view(qkv, vFirst, kvHeads), O: view(o, 0, qHeads)}))
	token := func(i, first int) []float32 { return qkv[i*row+first:][:kvToken] }
	for i, context := range [][2][]float32{
		{token(0, kFirst), token(0, vFirst)},
		{joined(token(0, kFirst), token(1, kFirst)), joined(token(0, vFirst), token(1, vFirst))},
		{joined(w.k, token(2, kFirst)), joined(w.v, token(2, vFirst))},
	} {
		expected, _ := reference(qkv[i*row:], context[0], context[1])
		closeTo(t, o[i*row:][:qToken], expected)
		equal(t, o[i*row+qToken:][:2*kvToken], make([]float32, 2*kvToken))
	}
	equal(t, []int64{must(w.cache.Length(other, 0)), must(w.cache.Length(w.sequence, 0))}, []int64{2, n + 1})
}

func TestSixteenBitsAndBlocks(t *testing.T) {
	w := newWorld(t, 0, 1)
	q, k, v := numbers(qToken, 5), numbers(8*kvToken, 6), numbers(8*kvToken, 7)
	bits := func(data []float32) (bits []uint16, wide []float32) {
		for _, x := range data {
			b := uint16(math.Float32bits(x) >> 16)
			bits, wide = append(bits, b), append(wide, math.Float32frombits(uint32(b)<<16))
		}
		return bits, wide
	}
	kBits, kWide := bits(k)
	vBits, vWide := bits(v)
	bf16 := func(data []uint16) Tensor { return Uint16s(BF16, data, 8, kvHeads, dim) }
	check(t, w.cache.Append(w.sequence, 0, bf16(kBits), bf16(vBits)))
	o, _ := decode(t, w.session(t, "all"), w.sequence, q)
	expected, _ := reference(q, kWide, vWide)
	closeTo(t, o, expected)

	// Reads K in its own type and as blocks, and appends the blocks to another sequence.
	back := make([]uint16, len(kBits))
	check(t, w.cache.Read(w.sequence, 0, 0, bf16(back), Tensor{}))
	equal(t, back, kBits)
	for _, dtype := range []Dtype{E4M3, Q8_0, Q4_0} {
		bytes, elements := dtype.block()
		if row := int64(dim / elements * bytes); dtype.RowBytes(dim) != row {
			t.Fatalf("%v: a row has %d bytes, the library says %d", dtype, row, dtype.RowBytes(dim))
		}
		blocks := make([]byte, len(k)/elements*bytes)
		for i := range blocks {
			blocks[i] = 0xff
		}
		check(t, w.cache.Read(w.sequence, 0, 0, Bytes(dtype, blocks, 8, kvHeads, dim), Tensor{}))
		other := must(w.cache.CreateSequence())
		check(t, w.cache.Append(other, 0, Bytes(dtype, blocks, 8, kvHeads, dim), bf16(vBits)))
		rounded := unset(len(k))
		check(t, w.cache.Read(other, 0, 0, kv(rounded), Tensor{}))
		most := map[Dtype]float64{E4M3: 0.033, Q8_0: 0.005, Q4_0: 0.13}[dtype]
		for i := range rounded {
			if !(math.Abs(float64(rounded[i]-kWide[i])) <= most) {
				t.Fatalf("%v: %g, given %g", dtype, rounded[i], kWide[i])
			}
		}
	}
}

func TestSequencesForkShrinkAndAreRead(t *testing.T) {
	w := newWorld(t, n, 2)
	fork := must(w.cache.Fork(w.sequence))
	if fork == w.sequence || must(w.cache.Digest(fork)) != must(w.cache.Digest(w.sequence)) {
		t.Fatal("a fork is another sequence of the same content")
	}
	if must(w.cache.Stats()).NPagesShared == 0 {
		t.Fatal("no page is shared")
	}
	check(t, w.cache.Truncate(fork, 100))
	check(t, w.cache.Remove(fork, 10, 20, false))
	if must(w.cache.Digest(fork)) == must(w.cache.Digest(w.sequence)) {
		t.Fatal("the digest is that of the longer sequence")
	}
	equal(t, []int64{must(w.cache.Length(fork, 1)), must(w.cache.Length(w.sequence, 1))}, []int64{80, n})
	k, v := unset(5*kvToken), unset(5*kvToken)
	check(t, w.cache.Read(fork, 1, 8, kv(k), kv(v))) // tokens 8, 9, 30, 31, 32
	equal(t, k, joined(w.k[8*kvToken:10*kvToken], w.k[30*kvToken:33*kvToken]))
	equal(t, v, joined(w.v[8*kvToken:10*kvToken], w.v[30*kvToken:33*kvToken]))
	check(t, w.cache.Reserve(fork, 1000))
	check(t, w.cache.Drop(fork))
	if stats := must(w.cache.Stats()); stats.NSequences != 1 || stats.HostKVBytes == 0 {
		t.Fatalf("%+v", stats)
	}
}

// A step that ends before every layer has its tokens is rolled back. A complete step keeps them.
func TestSteps(t *testing.T) {
	w := newWorld(t, n, 2)
	session, ids, lens := w.session(t, "all"), []SequenceID{w.sequence}, []int64{1}
	q, k, v, o := numbers(qToken, 8), numbers(kvToken, 9), numbers(kvToken, 10), unset(qToken)
	attend := func(layerIdx int32) error {
		return session.Attend(&Attend{LayerIdx: layerIdx, Sequences: ids, QLens: lens, Q: heads(q), K: kv(k), V: kv(v), O: heads(o)})
	}
	lengths := func() []int64 {
		return []int64{must(w.cache.Length(w.sequence, 0)), must(w.cache.Length(w.sequence, 1))}
	}
	step := must(session.Step(ids, lens))
	check(t, attend(0))
	refused(t, step.End(), ErrInvalidState, "q_lens", "layer 1")
	check(t, step.End()) // does nothing: the step has ended
	equal(t, lengths(), []int64{n, n})
	step = must(session.Step(ids, lens))
	check(t, attend(0))
	refused(t, attend(0), ErrInvalidState, "q_lens", "0 left in layer 0")
	check(t, attend(1))
	check(t, step.End())
	equal(t, lengths(), []int64{n + 1, n + 1})
	expected, _ := reference(q, joined(w.k, k), joined(w.v, v))
	closeTo(t, o, expected)
}

func TestSpeculationKeepsAChainOfTheTree(t *testing.T) {
	w := newWorld(t, n, 1)
	session := w.session(t, "all")
	q, k, v, o := numbers(3*qToken, 11), numbers(3*kvToken, 12), numbers(3*kvToken, 13), unset(3*qToken)
	check(t, session.Attend(&Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{3}, Q: heads(q), K: kv(k), V: kv(v),
		O: heads(o), ParentIdx: []int32{-1, -1, 1}})) // token 2 is a child of token 1; token 0 is a sibling of token 1
	expected, _ := reference(q[2*qToken:], joined(w.k, k[kvToken:]), joined(w.v, v[kvToken:]))
	closeTo(t, o[2*qToken:], expected)
	equal(t, []int64{must(w.cache.Length(w.sequence, 0))}, []int64{n})
	refused(t, session.Commit(w.sequence, []int64{0, 2}), ErrInvalidArgument, "kept_idx", "kept_idx[1] = 2 continues token 1")
	check(t, session.Commit(w.sequence, []int64{1, 2}))
	equal(t, []int64{must(w.cache.Length(w.sequence, 0))}, []int64{n + 2})
	again, _ := decode(t, session, w.sequence, q[2*qToken:])
	closeTo(t, again, expected)
}

// attendsNamed checks that each query of each KV head attends exactly its named keys.
func attendsNamed(t *testing.T, w *world, q []float32, selection *Selection, named func(query, kvHead int) []int) {
	t.Helper()
	o, group := unset(len(q)), qToken/kvHeads
	check(t, w.session(t, "all").Attend(&Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{int64(len(q) / qToken)},
		Q: heads(q), O: heads(o), Selection: selection}))
	for i := 0; i < len(q)/qToken; i++ {
		for head := 0; head < kvHeads; head++ {
			var k, v []float32
			for _, key := range named(i, head) {
				k, v = append(k, w.k[key*kvToken:][:kvToken]...), append(v, w.v[key*kvToken:][:kvToken]...)
			}
			expected, _ := reference(q[i*qToken:], k, v)
			closeTo(t, o[i*qToken+head*group:][:group], expected[head*group:][:group])
		}
	}
}

func between(first, end int) (tokens []int) {
	for ; first < end; first++ {
		tokens = append(tokens, first)
	}
	return tokens
}

func TestNamedKeysAreAttendedAlone(t *testing.T) {
	w := newWorld(t, n, 1)
	q := numbers(2*qToken, 18) // of tokens 298 and 299
	idx := []int32{3, 40, 298, 7, 8, -1, 5, 6, 299, 0, -1, -1}
	named := func(i, head int) (keys []int) {
		for _, key := range idx[(i*kvHeads+head)*3:][:3] {
			if key >= 0 {
				keys = append(keys, int(key))
			}
		}
		return keys
	}
	attendsNamed(t, w, q, &Selection{Idx: Int32s(idx, 2, kvHeads, 3)}, named)
	apart := make([]int32, 4*5) // the same rows with gaps between them
	for i := range apart {
		apart[i] = 9999
		if i%5 < 3 {
			apart[i] = idx[i/5*3+i%5]
		}
	}
	attendsNamed(t, w, q, &Selection{Idx: Int32s(apart, 2, kvHeads, 3).Strided(10, 5, 1)}, named)
	// Pages of 32 tokens, the same for all KV heads. A query sees the tokens of the last page up to its own.
	pages := &Selection{Idx: Int32s([]int32{9, 2, 2, 9}, 2, 1, 2), UnitTokens: 32, AnyOrder: true}
	attendsNamed(t, w, q, pages, func(i, _ int) []int { return joined(between(64, 96), between(288, 299+i)) })
	pages.PlusWindow = true
	attendsNamed(t, w, q, pages, func(i, _ int) []int { return joined(between(0, 16), between(64, 96), between(235+i, 299+i)) })
	// The next call of the session has no selection.
	session, o := w.session(t, "all"), unset(qToken)
	args := Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{1}, Q: heads(q[qToken:]), O: heads(o),
		Selection: &Selection{Idx: Int32s([]int32{-1}, 1, 1, 1)}}
	check(t, session.Attend(&args))
	equal(t, o, make([]float32, qToken))
	again, _ := decode(t, session, w.sequence, q[qToken:])
	expected, _ := reference(q[qToken:], w.k, w.v)
	closeTo(t, again, expected)
}

// A partial chunk of an append is not judged. Selections are made only after the last chunk.
func TestPartialAppendsAreJudgedOnce(t *testing.T) {
	w := newWorld(t, 0, 1)
	session := w.session(t, "hgca")
	append200 := func(partial bool) int64 {
		q, k, v, o := numbers(200*qToken, 14), numbers(200*kvToken, 15), numbers(200*kvToken, 16), unset(200*qToken)
		check(t, session.Attend(&Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{200}, Q: heads(q), K: kv(k), V: kv(v),
			O: heads(o), Partial: partial}))
		return must(session.Stats()).NRefreshes
	}
	if first, second := append200(true), append200(false); first != 0 || second == 0 {
		t.Fatalf("%d selections after the first chunk, %d after the last", first, second)
	}
}

// States over two halves merge into the state over both: into other memory, and into the first state.
func TestStatesMerge(t *testing.T) {
	w := newWorld(t, n, 1)
	q, half := numbers(qToken, 14), n/2*kvToken
	state := func(k, v []float32) ([]float32, []float32) {
		sequence := must(w.cache.CreateSequence())
		check(t, w.cache.Append(sequence, 0, kv(k), kv(v)))
		return decode(t, w.session(t, "all"), sequence, q)
	}
	of := func(o, lse []float32) State { return State{heads(o), Float32s(lse, 1, qHeads)} }
	aO, aLse := state(w.k[:half], w.v[:half])
	bO, bLse := state(w.k[half:], w.v[half:])
	o, lse := unset(qToken), unset(qHeads)
	check(t, w.engine.Merge(of(o, lse), of(aO, aLse), of(bO, bLse)))
	expectedO, expectedLse := reference(q, w.k, w.v)
	closeTo(t, o, expectedO)
	closeTo(t, lse, expectedLse)
	check(t, w.engine.Merge(of(aO, aLse), of(aO, aLse), of(bO, bLse)))
	equal(t, joined(aO, aLse), joined(o, lse))
}

func TestPoliciesSelectAndCount(t *testing.T) {
	w := newWorld(t, 0, 1)
	session := w.session(t, "hgca")
	q, k, v, o := numbers(n*qToken, 15), numbers(n*kvToken, 16), numbers(n*kvToken, 17), unset(n*qToken)
	check(t, session.Attend(&Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{n}, Q: heads(q), K: kv(k), V: kv(v),
		O: heads(o)}))
	expected, _ := reference(q[(n-1)*qToken:], k, v)
	closeTo(t, o[(n-1)*qToken:], expected) // an append attends everything
	selected := must(session.Selection(w.sequence, 0, 1))
	found := map[int64]bool{}
	for i, token := range selected {
		found[token] = true
		if i > 0 && selected[i-1] >= token {
			t.Fatalf("%v is not ascending", selected)
		}
	}
	for token := int64(0); token < n; token++ {
		if (token < 16 || token >= n-63) && !found[token] {
			t.Fatalf("%d is in the window or a sink and not selected", token)
		}
	}
	again, maw, err := session.SelectionWithMaw(w.sequence, 0, 1, 3)
	check(t, err)
	equal(t, again, selected)
	total := 0.0
	for _, x := range maw {
		total += float64(x)
	}
	if len(maw) != len(selected) || len(selected) > 80 && math.Abs(total-1) > 1e-4 {
		t.Fatalf("%d shares sum to %g", len(maw), total)
	}
	stats := must(session.Stats())
	if stats.NAttends != 1 || stats.NQueryTokens != n || stats.NRefreshes == 0 || stats.AttendNs == 0 {
		t.Fatalf("%+v", stats)
	}
	check(t, w.engine.Drain(-1))
}

func TestPlansAndCapabilities(t *testing.T) {
	w := newWorld(t, n, 2)
	options := CacheOptions{KType: F32, PageTokens: 16}
	plan, err := w.engine.PlanMemory(w.model, &options, nil, n)
	check(t, err)
	if bytes := must(w.cache.Stats()).HostKVBytes; plan.HostKVBytes != bytes || plan.KVTokenBytes != 2*2*4*kvToken {
		t.Fatalf("%+v, in use are %d", plan, bytes)
	}
	if report := must(plan.Report()); !strings.HasPrefix(report, `{"`) || !strings.HasSuffix(strings.TrimSpace(report), "}") {
		t.Fatal(report)
	}
	options.HostCapBytes = 1 << 20
	plan, err = w.engine.PlanMemory(w.model, &options, nil, 1<<20)
	if !errors.Is(err, ErrCapacity) || plan.HostKVBytes <= 1<<20 {
		t.Fatalf("%v, %+v", err, plan)
	}
	l := layer()
	check(t, w.engine.Supports(&l, &CacheOptions{}, sessionOptions("hgca")))
	l.KHeadDim = 65
	refused(t, w.engine.Supports(&l, nil, nil), ErrUnsupported, "layer.k_head_dim", "65")
	major, minor, _ := Version()
	if report := must(w.engine.Report()); !strings.Contains(report, `"version":"0.2.`) || major != 0 || minor != 2 {
		t.Fatal(report)
	}
	equal(t, PolicyNames(), []string{"all", "streaming", "hgca", "hip", "patterns"})
	available := 0
	for _, name := range CPUISANames() {
		if CPUISAAvailable(name) {
			available++
		}
	}
	if available == 0 || CPUISAAvailable("z80") || CPUISAAvailable("av\x00x2") {
		t.Fatalf("%d of %v", available, CPUISANames())
	}
	for i, name := range []string{"Dtype(0)", "f32", "f16", "bf16", "e4m3", "q8_0", "q4_0", "q4_64", "Dtype(8)"} {
		if dtype := Dtype(i); dtype.String() != name {
			t.Fatalf("%v is not %s", dtype, name)
		}
	}
}

func TestStreamingHeadsSeeSinksAndWindow(t *testing.T) {
	w := newWorld(t, n, 1)
	options := sessionOptions("all")
	options.StreamingHeads = make([]bool, kvHeads)
	options.StreamingHeads[1] = true
	session := must(NewSession(w.cache, options))
	defer session.Close()
	if all := must(session.Selection(w.sequence, 0, 0)); len(all) != n {
		t.Fatalf("%d of %d keys", len(all), n)
	}
	var expected []int64
	for token := int64(0); token < n; token++ {
		if token < 16 || token >= n-63 {
			expected = append(expected, token)
		}
	}
	equal(t, must(session.Selection(w.sequence, 0, 1)), expected)
	streaming := must(session.Selection(w.sequence, 0, 1))
	options.StreamingHeads, options.LayerPolicies = nil, []string{"streaming"}
	byLayer := must(NewSession(w.cache, options))
	defer byLayer.Close()
	equal(t, must(byLayer.Selection(w.sequence, 0, 0)), streaming)
	options.LayerPolicies = []string{"nothing"}
	if _, err := NewSession(w.cache, options); err == nil || !strings.Contains(err.Error(), "layer_policies[0]") {
		t.Fatal(err)
	}
	options.LayerPolicies = nil
	options.StreamingHeads = make([]bool, kvHeads+1)
	if _, err := NewSession(w.cache, options); err == nil || !strings.Contains(err.Error(), "n_streaming_heads") {
		t.Fatal(err)
	}
}

// Flags of members whose default is not 0 and whose 0 has a meaning.
var flagsOfZero = map[string]string{"spin_ns": "NoSpin", "window_tokens": "NoWindow", "sink_tokens": "NoSinks", "beta": "ZeroBeta",
	"halo_tokens": "NoHalo", "stream_fraction": "ZeroStreamFraction", "threshold": "ZeroThreshold"}

// Zero options give the defaults of the library's init functions.
func TestOptionsAreTheLibrarys(t *testing.T) {
	var a arena
	defer a.free()
	var none *EngineOptions
	if raw := (&EngineOptions{}).raw(&a, nil); !reflect.DeepEqual(raw, none.raw(&a, nil)) {
		t.Fatalf("%+v", raw)
	}
	raw := (&SessionOptions{}).raw(&a)
	if raw.window_tokens != -1 || raw.sink_tokens != -1 || raw.beta != -1 || raw.halo_tokens != -1 ||
		raw.stream_fraction != -1 || a.err != nil {
		t.Fatalf("%+v, %v", raw, a.err)
	}
	if raw := (&PatternFileOptions{}).raw(&a); raw.threshold != -1 || raw.sink_tokens != -1 || raw.window_tokens != -1 {
		t.Fatalf("%+v", raw)
	}
	flags := SessionOptions{NoWindow: true, NoSinks: true, ZeroBeta: true, NoHalo: true, ZeroStreamFraction: true}
	zeros := flags.raw(&a)
	if zeros.window_tokens != 0 || zeros.sink_tokens != 0 || zeros.beta != 0 || zeros.halo_tokens != 0 ||
		zeros.stream_fraction != 0 || a.err != nil {
		t.Fatalf("%+v, %v", zeros, a.err)
	}
	engine := EngineOptions{NoSpin: true, NoPinning: true}
	if raw := engine.raw(&a, nil); raw.spin_ns != 0 || raw.pin_threads != 0 || a.err != nil {
		t.Fatalf("%+v, %v", raw, a.err)
	}
}

// Every member of the header's option structs has a Go field.
func TestOptionsAreComplete(t *testing.T) {
	for name, options := range map[string]any{
		"tandem_engine_options": EngineOptions{}, "tandem_layer_options": LayerOptions{}, "tandem_cache_options": CacheOptions{},
		"tandem_session_options": SessionOptions{}, "tandem_memory_plan": MemoryPlan{}, "tandem_cache_stats": CacheStats{},
		"tandem_session_stats": SessionStats{}, "tandem_layer_projection": Projection{}, "tandem_route_plan": RoutePlan{},
		"tandem_weights_options": WeightsOptions{}, "tandem_weights_stats": WeightsStats{}, "tandem_pruning": Pruning{},
		"tandem_pruning_record": PruningRecord{}, "tandem_pruning_stage": PruningStage{}, "tandem_head_pattern": HeadPattern{},
		"tandem_pattern_file_options": PatternFileOptions{},
	} {
		var expected, got []string
		for _, member := range members(abiStruct(name)) {
			switch member.Name {
			case "struct_size", "reserved", "free", "alloc_user", "log_user", "n_streaming_heads", "n_layer_policies",
				"n_decode", "n_append", "n_stages":
			case "pin_threads":
				expected = append(expected, "NoPinning")
			case "device_type": // taken from the projection's tensors
			case "run", "run_user": // Go functions are slow and unsafe on threads of other runtimes
			case "alloc":
				expected = append(expected, "Allocator")
			default:
				expected = append(expected, camel(member.Name))
			}
			if flag, found := flagsOfZero[member.Name]; found && !(flag == "NoWindow" && name != "tandem_session_options") &&
				!strings.HasSuffix(name, "_pattern") {
				expected = append(expected, flag)
			}
		}
		for _, field := range reflect.VisibleFields(reflect.TypeOf(options)) {
			if field.IsExported() {
				got = append(got, field.Name)
			}
		}
		if !reflect.DeepEqual(got, expected) {
			t.Errorf("%s: members %v, the header has %v", name, got, expected)
		}
	}
}

// camel writes n_q_heads as NQHeads.
func camel(name string) string {
	out := ""
	for _, word := range strings.Split(name, "_") {
		switch word {
		case "cpu", "isa", "kv":
			out += strings.ToUpper(word)
		default:
			out += strings.ToUpper(word[:1]) + word[1:]
		}
	}
	return out
}

func abiStruct(name string) reflect.Type {
	for _, abiStruct := range abiStructs {
		if abiStruct.name == name {
			return abiStruct.layout
		}
	}
	panic(name)
}
