// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

// PatternKinds is a set of pattern kinds, joined by |.
type PatternKinds uint32

// Each kind of the C ABI.
const (
	PatternFull          PatternKinds = C.TANDEM_PATTERN_FULL           // all tokens
	PatternAShape        PatternKinds = C.TANDEM_PATTERN_A_SHAPE        // first tokens and a window
	PatternVerticalSlash PatternKinds = C.TANDEM_PATTERN_VERTICAL_SLASH // columns and diagonals, chosen by attention weights
	PatternBlockSparse   PatternKinds = C.TANDEM_PATTERN_BLOCK_SPARSE   // blocks of 64 tokens, chosen by mean logits
)

// Token counts of calls with several queries in a sequence.
const (
	PatternBlock int64 = C.TANDEM_PATTERN_BLOCK // queries that share the attended keys of a query head
	PatternChunk int64 = C.TANDEM_PATTERN_CHUNK // queries for which columns and diagonals are chosen together
	PatternUnit  int64 = C.TANDEM_PATTERN_UNIT  // keys that are named together
)

// HeadPattern says which keys the queries of an append attend in one query head. Sizes of kinds that the head does not have are
// 0.
type HeadPattern struct {
	Kinds          PatternKinds // the head attends the keys that any of them names; 0: PatternFull
	SinkTokens     int64        // PatternAShape
	WindowTokens   int64        // PatternAShape, 1 or more
	VerticalTokens int64        // PatternVerticalSlash
	SlashTokens    int64        // PatternVerticalSlash
	NBlocks        int64        // PatternBlockSparse
}

// Patterns says what heads attend under policy "patterns": SessionOptions.Patterns.
type Patterns struct {
	Layers [][]HeadPattern // one pattern for each query head of each layer
	// Keys farther from their query are attended as if at this distance; 0: no limit. The limit needs library RoPE and heads of
	// kind PatternAShape alone.
	MaxDistance int64
}

// PatternFileOptions says how a file of head patterns is read. Zero members are defaults.
type PatternFileOptions struct {
	GroupSize     int64   // query heads of a KV head, for files of gates; 0: 1
	Threshold     float64 // heads with a gate of at least this are PatternFull; 0: the median of the file's gates
	ZeroThreshold bool    // the threshold is 0; Threshold is 0
	SinkTokens    int64   // sinks of the other heads; 0: 128
	NoSinks       bool    // the other heads have no sinks; SinkTokens is 0
	WindowTokens  int64   // window of the other heads; 0: 256
}

func (o *PatternFileOptions) raw(a *arena) C.tandem_pattern_file_options {
	var raw C.tandem_pattern_file_options
	C.tandem_pattern_file_options_init(&raw)
	if o == nil {
		return raw
	}
	raw.group_size = C.int64_t(o.GroupSize)
	given(a, &raw.threshold, o.Threshold, "threshold", o.ZeroThreshold, "ZeroThreshold")
	given(a, &raw.sink_tokens, o.SinkTokens, "sink_tokens", o.NoSinks, "NoSinks")
	if o.WindowTokens != 0 {
		raw.window_tokens = C.int64_t(o.WindowTokens)
	}
	return raw
}

// ReadPatterns reads a file of head patterns: JSON as MInference publishes it, or gates as DuoAttention publishes them. options
// = nil: defaults. Errors: ErrIO (path), ErrInvalidArgument (path: the message names layer and head, or the line; an option).
func ReadPatterns(path string, options *PatternFileOptions) (*Patterns, error) {
	a := arena{function: "tandem_patterns_read"}
	defer a.free()
	raw, name := options.raw(&a), a.text("path", path)
	if a.err != nil {
		return nil, a.err
	}
	var heads []C.tandem_head_pattern
	var nHeads, nLayers C.int64_t
	for read := false; !read || int(nHeads) > len(heads); read = true { // the second round has room for all, unless the file grows
		heads = arrayOf[C.tandem_head_pattern](&a, int(nHeads))
		var first *C.tandem_head_pattern
		for i := range heads {
			first = &heads[0]
			C.tandem_head_pattern_init(&heads[i])
		}
		var err *C.tandem_error
		if err := failure(C.tandem_patterns_read(first, nHeads, &nHeads, &nLayers, name, &raw, &err), err); err != nil {
			return nil, err
		}
	}
	patterns, nOfLayer := &Patterns{Layers: make([][]HeadPattern, nLayers)}, int(nHeads/nLayers)
	for i := range patterns.Layers {
		for j := range heads[i*nOfLayer : (i+1)*nOfLayer] {
			patterns.Layers[i] = append(patterns.Layers[i], headPattern(&heads[i*nOfLayer+j]))
		}
	}
	return patterns, nil
}

func headPattern(raw *C.tandem_head_pattern) HeadPattern {
	return HeadPattern{
		Kinds:          PatternKinds(raw.kinds),
		SinkTokens:     int64(raw.sink_tokens),
		WindowTokens:   int64(raw.window_tokens),
		VerticalTokens: int64(raw.vertical_tokens),
		SlashTokens:    int64(raw.slash_tokens),
		NBlocks:        int64(raw.n_blocks),
	}
}

func (h *HeadPattern) put(raw *C.tandem_head_pattern) {
	C.tandem_head_pattern_init(raw)
	raw.kinds = C.uint32_t(h.Kinds)
	raw.sink_tokens = C.int64_t(h.SinkTokens)
	raw.window_tokens = C.int64_t(h.WindowTokens)
	raw.vertical_tokens = C.int64_t(h.VerticalTokens)
	raw.slash_tokens = C.int64_t(h.SlashTokens)
	raw.n_blocks = C.int64_t(h.NBlocks)
}

// raw copies the patterns to C memory, with everything that they point to.
func (p *Patterns) raw(a *arena) *C.tandem_patterns {
	if p == nil {
		return nil
	}
	raw := &arrayOf[C.tandem_patterns](a, 1)[0]
	C.tandem_patterns_init(raw)
	nHeads := 0
	for _, layer := range p.Layers {
		nHeads += len(layer)
	}
	heads := arrayOf[C.tandem_head_pattern](a, nHeads)
	if nHeads > 0 {
		raw.heads = &heads[0]
	}
	raw.n_heads = C.int64_t(nHeads)
	raw.max_distance = C.int64_t(p.MaxDistance)
	for _, layer := range p.Layers {
		for i := range layer {
			layer[i].put(&heads[i])
		}
		heads = heads[len(layer):]
	}
	return raw
}
