// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// Judge is the way in which a stage scores a chunk.
type Judge int32

// Each judge of the C ABI.
const (
	JudgeDescent Judge = C.TANDEM_JUDGE_DESCENT // the logit of one key, found by halving the chunk: may miss a strong one
	JudgeBounds  Judge = C.TANDEM_JUDGE_BOUNDS  // an upper bound of the chunk's logits; 4 * KHeadDim bytes per chunk and KV head
	JudgeExact   Judge = C.TANDEM_JUDGE_EXACT   // the largest logit in the chunk; reads all its keys
)

// PruningStage scores chunks of tokens and keeps the best. Judge, ChunkTokens and KeepTokens must be given. Other zero members
// are defaults.
type PruningStage struct {
	Judge           Judge // JudgeBounds, ...
	QueryBlock      int32 // queries of an append that share a list: a power of two up to 64, at most that of the stage before; 0: 64
	PlusNext        bool  // last stage only: half of KeepTokens is kept by score, and with each such chunk the next one
	ChunkTokens     int64 // a power of two up to 256, at most that of the stage before
	KeepTokens      int64 // a multiple of ChunkTokens; with PlusNext of 2 * ChunkTokens
	RefreshInterval int64 // tokens between two runs in decode calls; 0: 1, in every call
	FromTokens      int64 // the stage applies to queries that see at least this many tokens,
	ToTokens        int64 // and fewer than these; 0: no limit
}

// PruningRecord says which keys a layer's queries attend: sinks, window, and the chunks that the last stage has kept. Stages
// must be given. Other zero members are defaults.
type PruningRecord struct {
	SinkTokens   int64          // first tokens, always attended: a multiple of the largest ChunkTokens; 0: 64
	NoSinks      bool           // no first tokens; SinkTokens is 0
	WindowTokens int64          // newest tokens: at least 2 * ChunkTokens + RefreshInterval - 1, largest of each; 0: 1024
	Stages       []PruningStage // 1 to 8 stages, in order
}

// Pruning configures policy "hip": SessionOptions.Pruning. Zero members are defaults.
type Pruning struct {
	// True: all KV heads share one list. False: each has its own.
	SharedLists bool

	// Where Decode or Append is nil, the records of this preset: "" or "small", or the paper's "3k", "3k-fast", "3k-flash",
	// "5k", "3k-5k", "16k-shallow".
	Preset string

	// Records of calls with one query in a sequence, and of speculative tokens: one for all layers or one per layer. nil: the
	// preset's.
	Decode []PruningRecord

	// The same for calls with several queries in a sequence.
	Append []PruningRecord
}

func (s *PruningStage) put(raw *C.tandem_pruning_stage) {
	C.tandem_pruning_stage_init(raw)
	raw.judge = C.int32_t(s.Judge)
	raw.query_block = C.int32_t(s.QueryBlock)
	raw.plus_next = flag(s.PlusNext)
	raw.chunk_tokens = C.int64_t(s.ChunkTokens)
	raw.keep_tokens = C.int64_t(s.KeepTokens)
	raw.refresh_interval = C.int64_t(s.RefreshInterval)
	raw.from_tokens = C.int64_t(s.FromTokens)
	raw.to_tokens = C.int64_t(s.ToTokens)
}

// put fills *raw. Stages go to C memory. name is the option's, such as "pruning.decode[0]".
func (r *PruningRecord) put(a *arena, name string, raw *C.tandem_pruning_record) {
	C.tandem_pruning_record_init(raw)
	given(a, &raw.sink_tokens, r.SinkTokens, name+".sink_tokens", r.NoSinks, "NoSinks")
	if r.WindowTokens != 0 {
		raw.window_tokens = C.int64_t(r.WindowTokens)
	}
	stages := arrayOf[C.tandem_pruning_stage](a, len(r.Stages))
	for i := range stages {
		r.Stages[i].put(&stages[i])
	}
	if len(stages) > 0 {
		raw.stages = &stages[0]
	}
	raw.n_stages = C.int64_t(len(stages))
}

// arrayOf returns zeroed C memory for n structs.
func arrayOf[T any](a *arena, n int) []T {
	var one T
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*T)(a.bytes(make([]byte, n*int(unsafe.Sizeof(one))))), n)
}

// pruningRecords copies records to C memory. No records become NULL.
func pruningRecords(a *arena, field string, records []PruningRecord) (*C.tandem_pruning_record, C.int64_t) {
	raw := arrayOf[C.tandem_pruning_record](a, len(records))
	for i := range raw {
		records[i].put(a, fmt.Sprintf("%s[%d]", field, i), &raw[i])
	}
	if len(raw) == 0 {
		return nil, 0
	}
	return &raw[0], C.int64_t(len(raw))
}

// raw copies the options to C memory, with everything that they point to.
func (p *Pruning) raw(a *arena) *C.tandem_pruning {
	if p == nil {
		return nil
	}
	raw := &arrayOf[C.tandem_pruning](a, 1)[0]
	C.tandem_pruning_init(raw)
	raw.shared_lists = flag(p.SharedLists)
	raw.preset = a.text("pruning.preset", p.Preset)
	raw.decode, raw.n_decode = pruningRecords(a, "pruning.decode", p.Decode)
	raw.append, raw.n_append = pruningRecords(a, "pruning.append", p.Append)
	return raw
}
