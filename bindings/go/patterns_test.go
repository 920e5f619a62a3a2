// SPDX-License-Identifier: MIT

package tandem

import (
	"math"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"unsafe"
)

// Tests reading files of head patterns, the patterns that the library gets, and refusals.

var full = HeadPattern{Kinds: PatternFull}

// patternFile writes text to a file that exists until the test ends.
func patternFile(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "patterns")
	check(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestPatternsAreRead(t *testing.T) {
	path := patternFile(t, `[{"0": ["full"], "1": ["stream_llm", 4, 1020, 0.5]}, {"0": ["vertical_and_slash", 30, 800],
		"1": [["stream_llm", 0, 1], ["block_sparse", 7, 0]]}]`)
	expected := [][]HeadPattern{
		{full, {Kinds: PatternAShape, SinkTokens: 4, WindowTokens: 1020}},
		{{Kinds: PatternVerticalSlash, VerticalTokens: 30, SlashTokens: 800},
			{Kinds: PatternAShape | PatternBlockSparse, WindowTokens: 1, NBlocks: 7}},
	}
	if got := must(ReadPatterns(path, nil)).Layers; !reflect.DeepEqual(got, expected) {
		t.Fatalf("%+v", got)
	}
}

func TestGatesAreRead(t *testing.T) {
	path, rest := patternFile(t, "0.5\t0.25\n0.1\t0.75\n"), HeadPattern{Kinds: PatternAShape, SinkTokens: 128, WindowTokens: 256}
	if got := must(ReadPatterns(path, nil)).Layers; !reflect.DeepEqual(got, [][]HeadPattern{{full, rest}, {rest, full}}) {
		t.Fatalf("%+v", got)
	}
	options := PatternFileOptions{GroupSize: 2, Threshold: 0.25, NoSinks: true, WindowTokens: 64}
	rest.SinkTokens, rest.WindowTokens = 0, 64
	expected := [][]HeadPattern{{full, full, full, full}, {rest, rest, full, full}}
	if got := must(ReadPatterns(path, &options)).Layers; !reflect.DeepEqual(got, expected) {
		t.Fatalf("%+v", got)
	}
}

func TestWrongPatternFilesAreRefused(t *testing.T) {
	read := func(path string, change func(*PatternFileOptions)) error {
		options := PatternFileOptions{}
		change(&options)
		_, err := ReadPatterns(path, &options)
		return err
	}
	as := func(*PatternFileOptions) {}
	gates := patternFile(t, "0.5 0.25")
	refused(t, read(patternFile(t, `[{"0": ["stripes"]}]`), as), ErrInvalidArgument, "path", `layer 0: head 0: kind "stripes" is unknown`)
	refused(t, read(patternFile(t, "1 2\n3"), as), ErrInvalidArgument, "path", "line 2 has 1 gates")
	refused(t, read(gates+"x", as), ErrIO, "path", gates+"x")
	refused(t, read("a\x00b", as), ErrInvalidArgument, "path", "zero byte")
	refused(t, read("", as), ErrInvalidArgument, "path", "NULL")
	refused(t, read(gates, func(o *PatternFileOptions) { o.GroupSize = -1 }), ErrInvalidArgument, "group_size", "= -1")
	refused(t, read(gates, func(o *PatternFileOptions) { o.Threshold = math.NaN() }), ErrInvalidArgument, "threshold", "nan")
	refused(t, read(gates, func(o *PatternFileOptions) { o.WindowTokens = -2 }), ErrInvalidArgument, "window_tokens", "= -2")
	refused(t, read(gates, func(o *PatternFileOptions) { o.ZeroThreshold, o.Threshold = true, 0.5 }), ErrInvalidArgument, "threshold",
		"= 0.5 with ZeroThreshold")
}

func TestTheLibraryGetsEveryHead(t *testing.T) {
	var a arena
	defer a.free()
	last := HeadPattern{PatternAShape | PatternVerticalSlash, 1, 2, 3, 4, 5}
	raw := (&Patterns{Layers: [][]HeadPattern{{full, {}}, {last}}, MaxDistance: 5}).raw(&a)
	if raw.n_heads != 3 || raw.max_distance != 5 || raw.reserved != 0 || a.err != nil {
		t.Fatalf("%+v, %v", *raw, a.err)
	}
	heads := unsafe.Slice(raw.heads, 3)
	for i, expected := range []HeadPattern{full, {}, last} {
		if got := headPattern(&heads[i]); got != expected || uintptr(heads[i].struct_size) != unsafe.Sizeof(heads[i]) {
			t.Fatalf("%d: %+v", i, got)
		}
	}
	if none := (&Patterns{}).raw(&a); none.heads != nil || none.n_heads != 0 {
		t.Fatalf("%+v", *none)
	}
	var nothing *Patterns
	if nothing.raw(&a) != nil {
		t.Fatal("nil is not NULL")
	}
}
