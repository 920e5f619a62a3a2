// SPDX-License-Identifier: MIT

package tandem

/* Tests hidden states, offloaded weights and errors of devices. $TANDEM_TEST_MODULE is the path of a device module.
 * libtandem-standin.so of the library's tests lives in host memory. With libtandem-cuda.so, checks that need the stand-in are
 * left out. Without the variable all these tests are left out. */

import (
	"bytes"
	"errors"
	"math"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"tandem/internal/cside"
)

const hiddenDim = 64

type module struct {
	*cside.Module
	path string
}

func openModule(t *testing.T) *module {
	path := os.Getenv("TANDEM_TEST_MODULE")
	if path == "" {
		t.Skip("TANDEM_TEST_MODULE is not set")
	}
	m := cside.OpenModule(path)
	if m == nil {
		t.Fatal(path + " cannot be opened")
	}
	t.Cleanup(m.Reset)
	return &module{m, path}
}

func (m *module) engine(t *testing.T) *Engine {
	options := engineOptions()
	options.Backend, options.BackendPath = m.Backend(), m.path
	engine := must(NewEngine(options))
	t.Cleanup(func() { engine.Close() })
	return engine
}

// shortNumbers returns numbers that bf16 represents exactly.
func shortNumbers(n int, seed uint64) []float32 {
	values := numbers(n, seed)
	for i := range values {
		values[i] = math.Float32frombits(math.Float32bits(values[i]) & 0xffff0000)
	}
	return values
}

func bf16(values []float32) []uint16 {
	bits := make([]uint16, len(values))
	for i, x := range values {
		bits[i] = uint16(math.Float32bits(x) >> 16)
	}
	return bits
}

func bf16Bytes(values []float32) []byte {
	var all []byte
	for _, bits := range bf16(values) {
		all = append(all, byte(bits), byte(bits>>8))
	}
	return all
}

// projected is a layer whose keys and values are made of hidden states by wK and wV [kvToken, hiddenDim].
type projected struct {
	wK, wV, bK []float32
	inBlocks   bool // wK and wV are blocks of Weights, not in the projection
}

func newProjected() *projected {
	p := &projected{wK: shortNumbers(kvToken*hiddenDim, 71), wV: shortNumbers(kvToken*hiddenDim, 72), bK: numbers(kvToken, 73)}
	for i := range p.wK {
		p.wK[i], p.wV[i] = p.wK[i]/2, p.wV[i]/2
	}
	return p
}

func (p *projected) layer() LayerOptions {
	l := layer()
	l.Projection = &Projection{HiddenDim: hiddenDim, WOrder: WeightsOutIn, BK: p.bK,
		WK: Uint16s(BF16, bf16(p.wK), kvToken, hiddenDim), WV: Uint16s(BF16, bf16(p.wV), kvToken, hiddenDim)}
	if p.inBlocks {
		l.Projection.WK, l.Projection.WV, l.Projection.WType = Tensor{}, Tensor{}, BF16
	}
	return l
}

// of computes keys and values from hidden states.
func (p *projected) of(x []float32) (k, v []float32) {
	for token := 0; token < len(x)/hiddenDim; token++ {
		for j := 0; j < kvToken; j++ {
			key, value := float64(p.bK[j]), 0.0
			for i, state := range x[token*hiddenDim : (token+1)*hiddenDim] {
				key += float64(state) * float64(p.wK[j*hiddenDim+i])
				value += float64(state) * float64(p.wV[j*hiddenDim+i])
			}
			k, v = append(k, float32(key)), append(v, float32(value))
		}
	}
	return k, v
}

func (p *projected) cache(t *testing.T, engine *Engine) *Cache {
	cache := must(NewCache(engine, must(NewModel(p.layer())), &CacheOptions{KType: F32, XType: BF16}))
	t.Cleanup(func() { cache.Close() })
	return cache
}

func hidden(x []float32) Tensor { return Float32s(x, len(x)/hiddenDim, hiddenDim) }

// Appends and attends tokens with their hidden states, and reads the hidden states back.
func TestHiddenStatesStayWithTheirTokens(t *testing.T) {
	p := newProjected()
	cache := p.cache(t, must(NewEngine(engineOptions())))
	sequence, session := must(cache.CreateSequence()), must(NewSession(cache, nil))
	x := shortNumbers(11*hiddenDim, 4)
	k, v := p.of(x)
	const firstX, firstKV = 10 * hiddenDim, 10 * kvToken
	check(t, cache.AppendX(sequence, 0, kv(k[:firstKV]), kv(v[:firstKV]), hidden(x[:firstX])))
	q, o := numbers(qToken, 3), unset(qToken)
	args := Attend{Sequences: []SequenceID{sequence}, QLens: []int64{1}, Q: heads(q), K: kv(k[firstKV:]), V: kv(v[firstKV:]), O: heads(o)}
	refused(t, session.Attend(&args), ErrInvalidArgument, "x", "x = NULL")
	args.X = hidden(x[firstX:])
	check(t, session.Attend(&args))
	expected, _ := reference(q, k, v)
	closeTo(t, o, expected)
	back := unset(len(x))
	check(t, cache.ReadX(sequence, 0, 0, hidden(back)))
	equal(t, back, x)
	if err := cache.ReadX(sequence, 0, 1, hidden(back)); !errors.Is(err, ErrInvalidArgument) {
		t.Fatal(err)
	}
	refused(t, cache.AppendX(sequence, 0, kv(k), kv(v), Tensor{}), ErrInvalidArgument, "x", "x = NULL")
	refused(t, cache.Append(sequence, 0, kv(k), kv(v)), ErrInvalidArgument, "x", "x = NULL")
	refused(t, cache.AppendX(sequence, 0, kv(k), kv(v), Float32s(x, 99, hiddenDim)), ErrInvalidArgument, "x", "x: tensor: data has")
	equal(t, []int64{must(cache.Length(sequence, 0))}, []int64{11})
}

func TestProjectionsThatAreRefused(t *testing.T) {
	model := func(change func(*Projection, *LayerOptions)) error {
		l := newProjected().layer()
		change(l.Projection, &l)
		_, err := NewModel(l)
		return err
	}
	floats := func(n int) []float32 { return make([]float32, n) }
	check(t, model(func(*Projection, *LayerOptions) {}))
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.HiddenDim = 72 }), ErrInvalidArgument, "projection.w_k", "[128 64]")
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.WOrder = WeightsInOut }), ErrInvalidArgument, "projection.w_k", "[64 128]")
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.WV = Uint16s(F16, make([]uint16, 8192), 128, 64) }), ErrInvalidArgument,
		"projection.w_v", "type")
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.WK = Uint16s(BF16, nil, 128, 64) }), ErrInvalidArgument, "projection.w_k",
		"has 0 elements")
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.WV = Tensor{} }), ErrInvalidArgument, "layers[0].projection.w_v", "NULL")
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.WK = Tensor{} }), ErrInvalidArgument, "layers[0].projection.w_k", "NULL")
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.WK, p.WV = Tensor{}, Tensor{} }), ErrInvalidArgument,
		"layers[0].projection.w_type", "0 is not an element type")
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.WType = F16 }), ErrInvalidArgument, "projection.w_type", "= f16, but")
	check(t, model(func(p *Projection, _ *LayerOptions) { p.WType = BF16 }))
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.BV = floats(3) }), ErrInvalidArgument, "projection.b_v", "= 128")
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.NormWeight = floats(63) }), ErrInvalidArgument, "projection.norm_weight", "= 64")
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.NormEps = nan }), ErrInvalidArgument, "layers[0].projection.norm_eps", "nan")
	refused(t, model(func(p *Projection, _ *LayerOptions) { p.Norm, p.NormBias = NormRms, floats(64) }), ErrInvalidArgument,
		"layers[0].projection.norm_bias", "TANDEM_NORM_LAYER")
	refused(t, model(func(p *Projection, l *LayerOptions) { p.KRope, l.Rope = RopeHalves, RopeHalves }), ErrInvalidArgument,
		"layers[0].projection.k_rope", "the library rotates")
	refused(t, model(func(p *Projection, _ *LayerOptions) {
		p.WK, p.WV = Float32s(floats(8192), 128, 64), Float32s(floats(8192), 128, 64)
	}), ErrUnsupported, "layers[0].projection.w_type", "f32")
	_, err := NewCache(must(NewEngine(engineOptions())), must(NewModel(layer())), &CacheOptions{XType: BF16})
	refused(t, err, ErrInvalidArgument, "x_type", "no layer has a projection")
}

func toBytes(values []float32) []byte {
	var all []byte
	for _, x := range values {
		bits := math.Float32bits(x)
		all = append(all, byte(bits), byte(bits>>8), byte(bits>>16), byte(bits>>24))
	}
	return all
}

// onDevice returns device addresses of these contents, which are resident blocks.
func onDevice(t *testing.T, engine *Engine, contents ...[]float32) []uintptr {
	var blocks [][]byte
	for _, values := range contents {
		blocks = append(blocks, toBytes(values))
	}
	weights := must(NewWeights(engine, &WeightsOptions{ResidentBytes: 1 << 30}, blocks...))
	t.Cleanup(func() { weights.Close() })
	equal(t, []int64{must(weights.Stats()).NResident}, []int64{int64(len(contents))})
	var addresses []uintptr
	for i := range contents {
		addresses = append(addresses, must(weights.Use(int32(i), 0)).Data)
	}
	return addresses
}

// fromDevice reads n values. It waits, for at most 20 s, until none of them is NaN.
func (m *module) fromDevice(from uintptr, n int) []float32 {
	raw, values := make([]byte, 4*n), make([]float32, n)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		m.Read(raw, from)
		whole := true
		for i := range values {
			values[i] = math.Float32frombits(uint32(raw[4*i]) | uint32(raw[4*i+1])<<8 | uint32(raw[4*i+2])<<16 | uint32(raw[4*i+3])<<24)
			whole = whole && values[i] == values[i]
		}
		if whole || time.Now().After(end) {
			return values
		}
	}
}

// rebuilt is a sequence whose keys outside the window are made of hidden states. The store has NaN in their place.
type rebuilt struct {
	cache    *Cache
	session  *Session
	sequence SequenceID
	at       []uintptr // addresses of q, k, v and x of the last token, and of o
	expected []float64 // o
}

func rebuildOptions() *SessionOptions {
	return &SessionOptions{WindowTokens: 64, Route: "recompute"}
}

func newRebuilt(t *testing.T, engine *Engine, p *projected) *rebuilt {
	r := &rebuilt{cache: p.cache(t, engine)}
	r.sequence = must(r.cache.CreateSequence())
	const n, window = 301, 64
	x := shortNumbers(n*hiddenDim, 4)
	k, v := p.of(x)
	const lastX, lastKV = (n - 1) * hiddenDim, (n - 1) * kvToken
	storedK, storedV := joined(k[:lastKV]), joined(v[:lastKV])
	for i := 0; i < (n-1-window-8)*kvToken; i++ {
		storedK[i], storedV[i] = nan, nan
	}
	check(t, r.cache.AppendX(r.sequence, 0, kv(storedK), kv(storedV), hidden(x[:lastX])))
	r.session = must(NewSession(r.cache, rebuildOptions()))
	t.Cleanup(func() { r.session.Close() })
	q := numbers(qToken, 3)
	r.at = onDevice(t, engine, q, k[lastKV:], v[lastKV:], x[lastX:], unset(qToken))
	r.expected, _ = reference(q, k, v)
	return r
}

func (r *rebuilt) attend() error {
	return r.session.Attend(&Attend{Sequences: []SequenceID{r.sequence}, QLens: []int64{1},
		Q: OnDevice(F32, 0, r.at[0], 1, qHeads, dim), K: OnDevice(F32, 0, r.at[1], 1, kvHeads, dim),
		V: OnDevice(F32, 0, r.at[2], 1, kvHeads, dim), X: OnDevice(F32, 0, r.at[3], 1, hiddenDim),
		O: OnDevice(F32, 0, r.at[4], 1, qHeads, dim)})
}

func (r *rebuilt) check(t *testing.T, m *module) {
	for i, o := range m.fromDevice(r.at[4], qToken) {
		if !(math.Abs(float64(o)-r.expected[i]) < 1e-4) {
			t.Fatalf("%d: %g, expected %g", i, o, r.expected[i])
		}
	}
	if stats := must(r.session.Stats()); stats.StreamedXBytes == 0 || stats.NHostParts != 0 {
		t.Fatalf("%+v", stats)
	}
}

// The indices of a selection may be in device memory, as a model's indexer leaves them.
func TestKeysAreNamedInDeviceMemory(t *testing.T) {
	m := openModule(t)
	w := newWorldOn(t, m.engine(t), n, 1)
	q, idx := numbers(qToken, 18), []int32{3, 40, 298, 7, 8, -1} // three for each of two KV heads
	bits := make([]float32, len(idx))
	for i, key := range idx {
		bits[i] = math.Float32frombits(uint32(key))
	}
	at := onDevice(t, w.engine, q, bits, unset(qToken))
	session := must(NewSession(w.cache, &SessionOptions{WindowTokens: 64}))
	defer session.Close()
	check(t, session.Attend(&Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{1}, Q: OnDevice(F32, 0, at[0], 1, qHeads, dim),
		O: OnDevice(F32, 0, at[2], 1, qHeads, dim), Selection: &Selection{Idx: OnDevice(I32, 0, at[1], 1, kvHeads, 3)}}))
	o, group := m.fromDevice(at[2], qToken), qToken/kvHeads
	for head := 0; head < kvHeads; head++ {
		var k, v []float32
		for _, key := range idx[head*3:][:3] {
			if key >= 0 {
				k, v = append(k, w.k[key*kvToken:][:kvToken]...), append(v, w.v[key*kvToken:][:kvToken]...)
			}
		}
		expected, _ := reference(q, k, v)
		closeTo(t, o[head*group:][:group], expected[head*group:][:group])
	}
}

func TestKeysAreMadeOfHiddenStates(t *testing.T) {
	m := openModule(t)
	r := newRebuilt(t, m.engine(t), newProjected())
	check(t, r.attend())
	r.check(t, m)
	share := rebuildOptions()
	share.RecomputeShare = 2
	_, err := NewSession(r.cache, share)
	refused(t, err, ErrInvalidArgument, "recompute_share", "at most 1")
	_, err = NewSession(newWorldOn(t, m.engine(t), 1, 1).cache, rebuildOptions())
	refused(t, err, ErrUnsupported, "route", "has no projection")
}

// Makes keys with matrices that cross the bus themselves. The session keeps the closed weights alive.
func TestKeysAreMadeByOffloadedWeights(t *testing.T) {
	m, p := openModule(t), newProjected()
	engine := m.engine(t)
	blocks := [][]byte{bf16Bytes(p.wK), bf16Bytes(p.wV), make([]byte, 1000)}
	weights := must(NewWeights(engine, nil, blocks...))
	p.inBlocks = true
	r := newRebuilt(t, engine, p)
	refused(t, r.attend(), ErrInvalidState, "layer_idx", "layer_idx = 0: its projection has no w_k and w_v")
	told := func(layerIdx, wK, wV int32) error { return r.session.UseWeights(layerIdx, weights, wK, wV) }
	refused(t, told(1, 0, 1), ErrInvalidArgument, "layer_idx", "layer_idx = 1")
	refused(t, told(0, 3, 1), ErrInvalidArgument, "w_k_block", "w_k_block = 3 is not in [0, 2]")
	refused(t, told(0, 0, 2), ErrInvalidArgument, "w_v_block", "w_v_block = 2 has 1000 bytes")
	check(t, told(0, 0, 1))
	others := must(NewWeights(m.engine(t), nil, blocks...))
	defer others.Close()
	refused(t, r.session.UseWeights(0, others, 0, 1), ErrInvalidArgument, "weights", "another engine")
	owns := must(NewSession(newProjected().cache(t, engine), rebuildOptions()))
	defer owns.Close()
	refused(t, owns.UseWeights(0, weights, 0, 1), ErrUnsupported, "layer_idx", "layer_idx = 0")
	check(t, weights.Close())
	refused(t, told(0, 0, 1), ErrInvalidHandle, "weights", "is closed")
	check(t, r.attend())
	r.check(t, m)
	check(t, owns.Close())
	refused(t, owns.UseWeights(0, others, 0, 1), ErrInvalidHandle, "session", "is closed")
}

// With route "stream", the planner sends all keys outside the window over the bus.
func TestPlansOfCalls(t *testing.T) {
	m := openModule(t)
	w := newWorldOn(t, m.engine(t), 300, 1)
	session := must(NewSession(w.cache, &SessionOptions{WindowTokens: 64, Route: "stream"}))
	defer session.Close()
	plan := must(session.Plan(0, []int64{100_000}, []int64{1}))
	if plan.StreamTokens <= 0 || plan.HostTokens != 0 || plan.ResidentTokens+plan.StreamTokens != 100_000 {
		t.Fatalf("%+v", plan)
	}
	if report := must(plan.Report()); !strings.Contains(report, `"stream_tokens"`) {
		t.Fatal(report)
	}
	_, err := session.Plan(0, []int64{10, 10}, []int64{1})
	refused(t, err, ErrInvalidArgument, "q_lens", "has 1 values for 2")
	_, err = session.Plan(0, []int64{10}, []int64{11})
	refused(t, err, ErrInvalidArgument, "q_lens[0]", "11")
	_, err = newWorld(t, 1, 1).session(t, "all").Plan(0, []int64{10}, nil)
	refused(t, err, ErrUnsupported, "session", "device")
}

// Two goroutines, one after the other, read resident and streamed blocks round after round, on a slow device.
func TestBlocksAreWhatWasGiven(t *testing.T) {
	m := openModule(t)
	var blocks [][]byte
	for i := 0; i < 7; i++ {
		block := make([]byte, 3000+100*i)
		for j := range block {
			block[j] = byte(j ^ i)
		}
		blocks = append(blocks, block)
	}
	engine := m.engine(t)
	weights := must(NewWeights(engine, &WeightsOptions{ResidentBytes: 8000}, blocks...))
	engine.Close() // the weights keep the engine alive
	m.SetDelay(50_000)
	round := func(first int) {
		got := make([]byte, 4000)
		for i := first; i < first+20; i++ {
			expected, block := blocks[i%7], must(weights.Use(int32(i%7), 0))
			if block.Data%256 != 0 {
				t.Errorf("%#x", block.Data)
			}
			for end := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Microsecond) {
				m.Read(got[:len(expected)], block.Data)
				if bytes.Equal(got[:len(expected)], expected) {
					break
				}
				if time.Now().After(end) {
					t.Errorf("block %d", i%7)
					break
				}
			}
			if err := block.Done(); err != nil {
				t.Error(err)
			}
		}
	}
	round(0)
	var group sync.WaitGroup
	group.Add(1)
	go func() {
		defer group.Done()
		round(3)
	}()
	group.Wait()
	stats := must(weights.Stats())
	if stats.NBlocks != 7 || stats.NUses != 40 || stats.NResident < 1 || stats.NResident > 6 || stats.ResidentBytes > 8000 ||
		stats.NStreamedUses == 0 || stats.StreamedBytes == 0 {
		t.Fatalf("%+v", stats)
	}
	block := must(weights.Use(0, 0))
	check(t, weights.Close())
	refused(t, block.Done(), ErrInvalidHandle, "weights", "is closed")
	check(t, block.Done())
}

func TestWeightsThatAreRefused(t *testing.T) {
	one := make([]byte, 1000)
	_, err := NewWeights(must(NewEngine(engineOptions())), nil, one)
	refused(t, err, ErrUnsupported, "engine", "has no device")
	engine := openModule(t).engine(t)
	made := func(options WeightsOptions, blocks ...[]byte) error {
		_, err := NewWeights(engine, &options, blocks...)
		return err
	}
	refused(t, made(WeightsOptions{}), ErrInvalidArgument, "n_blocks", "0")
	refused(t, made(WeightsOptions{}, one, nil), ErrInvalidArgument, "n_bytes[1]", "0")
	refused(t, made(WeightsOptions{BufferBytes: -1}, one), ErrInvalidArgument, "buffer_bytes", "-1")
	refused(t, made(WeightsOptions{DeviceCapBytes: 9}, one), ErrCapacity, "device_cap_bytes", "9")
	weights := must(NewWeights(engine, &WeightsOptions{BufferBytes: 2048}, one, one, one))
	defer weights.Close()
	_, err = weights.Use(3, 0)
	refused(t, err, ErrInvalidArgument, "block_idx", "3")
	first, second := must(weights.Use(0, 0)), must(weights.Use(1, 0))
	_, err = weights.Use(2, 0)
	refused(t, err, ErrInvalidState, "block_idx", "in use (0, 1)")
	check(t, first.Done())
	check(t, must(weights.Use(2, 0)).Done())
	check(t, second.Done())
}

// Errors of the device reach the caller, and the next call succeeds. Some of these codes come from no other call.
func TestWhatADeviceAnswers(t *testing.T) {
	m := openModule(t)
	if m.Backend() != "standin" {
		t.Skip("takes the stand-in")
	}
	engine := m.engine(t)
	for _, code := range []Code{ErrIO, ErrCorrupt, ErrSystem, ErrInternal, ErrOutOfMemory} {
		m.FailCreateEvent(int32(code))
		_, err := NewWeights(engine, nil, make([]byte, 1000))
		var e *Error
		if !errors.Is(err, code) || !errors.As(err, &e) || e.Underlying != 999 || e.Message == "" {
			t.Fatalf("%v is not %v", err, code)
		}
		must(NewWeights(engine, nil, make([]byte, 1000))).Close()
	}
	weights := must(NewWeights(engine, nil, make([]byte, 1000)))
	defer weights.Close()
	m.LoseDevice()
	if _, err := weights.Use(0, 0); !errors.Is(err, ErrDeviceLost) {
		t.Fatal(err)
	}
}
