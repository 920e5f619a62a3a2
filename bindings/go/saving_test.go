// SPDX-License-Identifier: MIT

package tandem

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestTextGoesOnFromAFile(t *testing.T) {
	w := newWorld(t, 200, 1)
	session := w.session(t, "hgca")
	step := func(sequence SequenceID, seed uint64) []float32 {
		q, k, v, o := numbers(qToken, seed), numbers(kvToken, seed+1), numbers(kvToken, seed+2), unset(qToken)
		check(t, session.Attend(&Attend{Sequences: []SequenceID{sequence}, QLens: []int64{1},
			Q: heads(q), K: kv(k), V: kv(v), O: heads(o)}))
		return o
	}
	for i := uint64(0); i < 20; i++ {
		step(w.sequence, 100+i)
	}
	folder := t.TempDir()
	path := filepath.Join(folder, "sequence")
	check(t, w.cache.Save(w.sequence, path, &SaveOptions{Session: session, ModelID: 7,
		Blobs: map[string][]byte{"state": []byte("123"), "empty": nil}}))
	if names := must(os.ReadDir(folder)); len(names) != 1 {
		t.Fatal(names)
	}
	blobs := map[string][]byte{}
	loaded := must(w.cache.Load(path, &LoadOptions{Session: session, ModelID: 7, Blobs: blobs}))
	if len(blobs) != 2 || string(blobs["state"]) != "123" || len(blobs["empty"]) != 0 {
		t.Error(blobs)
	}
	if must(w.cache.Digest(loaded)) != must(w.cache.Digest(w.sequence)) {
		t.Error("the digests differ")
	}
	for i := uint64(0); i < 20; i++ {
		equal(t, step(loaded, 200+i), step(w.sequence, 200+i))
	}
	_, err := w.cache.Load(path, nil)
	refused(t, err, ErrInvalidArgument, "model_id", "7 in the file")
	content := must(os.ReadFile(path))
	check(t, os.WriteFile(path, content[:len(content)-1], 0o600))
	_, err = w.cache.Load(path, &LoadOptions{ModelID: 7})
	refused(t, err, ErrCorrupt, "header", "but the file has")
}

func TestReadersAndWriters(t *testing.T) {
	w := newWorld(t, 40, 1)
	var buffer bytes.Buffer
	for i := 0; i < 2; i++ {
		check(t, w.cache.SaveTo(w.sequence, &buffer, nil))
	}
	n := buffer.Len() / 2
	for i := 1; i >= 0; i-- {
		loaded := must(w.cache.LoadFrom(&buffer, nil))
		if buffer.Len() != n*i || must(w.cache.Digest(loaded)) != must(w.cache.Digest(w.sequence)) {
			t.Error(buffer.Len(), n, i)
		}
	}
	_, err := w.cache.LoadFrom(&buffer, nil)
	refused(t, err, ErrCorrupt, "header", "ends at byte 0")
}

type broken struct{ panics bool }

func (b broken) Write([]byte) (int, error) {
	if b.panics {
		panic("of the test")
	}
	return 0, syscall.ENOSPC
}

func (b broken) Read([]byte) (int, error) {
	if b.panics {
		panic("of the test")
	}
	return 0, io.ErrUnexpectedEOF
}

func TestWhatFailsIsSaid(t *testing.T) {
	w := newWorld(t, 40, 1)
	err := w.cache.SaveTo(w.sequence, broken{}, nil)
	refused(t, err, ErrIO, "write", "no space")
	var all *Error
	if !errors.As(err, &all) || all.Underlying != int64(syscall.ENOSPC) || !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
	_, err = w.cache.LoadFrom(broken{}, nil)
	refused(t, err, ErrIO, "read", "unexpected EOF")
	for _, call := range []func(){
		func() { _ = w.cache.SaveTo(w.sequence, broken{true}, nil) },
		func() { _, _ = w.cache.LoadFrom(broken{true}, nil) },
	} {
		if panics, value := recovered(call); !panics || value != "of the test" {
			t.Error(panics, value)
		}
	}
	folder := t.TempDir()
	_, err = w.cache.Load(filepath.Join(folder, "none"), nil)
	refused(t, err, ErrIO, "path", "no such file")
	if !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	refused(t, w.cache.Save(w.sequence, filepath.Join(folder, "none", "s"), nil), ErrIO, "path", "no such file")
	refused(t, w.cache.Save(99, filepath.Join(folder, "s"), nil), ErrNotFound, "sequence", "99")
	options := &SaveOptions{Blobs: map[string][]byte{"a\x00b": nil}}
	refused(t, w.cache.Save(w.sequence, filepath.Join(folder, "s"), options), ErrInvalidArgument, "blobs[0].name", "zero byte")
	closed := must(NewSession(w.cache, nil))
	check(t, closed.Close())
	refused(t, w.cache.SaveTo(w.sequence, io.Discard, &SaveOptions{Session: closed}), ErrInvalidHandle, "session", "closed")
	if names := must(os.ReadDir(folder)); len(names) != 0 {
		t.Error(names)
	}
	if must(w.cache.Stats()).NSequences != 1 {
		t.Error("a sequence is left")
	}
}
