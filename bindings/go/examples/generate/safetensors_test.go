// SPDX-License-Identifier: MIT

package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// The reader refuses weight files that a broken download or an attacker left, with a message of one line.

func openHeader(t *testing.T, header string, nDataBytes int) (*weights, error) {
	path := filepath.Join(t.TempDir(), "weights.safetensors")
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	file = append(file, header...)
	file = append(file, make([]byte, nDataBytes)...)
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	return openWeights(path)
}

func expectRefused(t *testing.T, err error, named ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("%q: was accepted", named)
	}
	for _, part := range named {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %.300s", part, err.Error())
		}
	}
	if len(err.Error()) > 800 || strings.Contains(err.Error(), "\n") {
		t.Errorf("%d bytes: %.300s", len(err.Error()), err.Error())
	}
}

func entry(name string, first, end int) string {
	return fmt.Sprintf(`"%s":{"dtype":"F32","shape":[%d],"data_offsets":[%d,%d]}`, name, (end-first)/4, first, end)
}

func header(entries ...string) string { return "{" + strings.Join(entries, ",") + "}" }

func TestTensorsCoverTheDataOnce(t *testing.T) {
	for _, test := range []struct {
		header string
		named  []string
	}{
		{header(entry("a", 0, 32), entry("b", 32, 64), entry("a", 0, 32)), []string{`"a"`, "twice"}},
		{header(entry("a", 0, 64), entry(`\u0061`, 0, 64)), []string{`"a"`, "twice"}},
		{`{"a":{"dtype":"F32","shape":[16],"dtype":"I32","data_offsets":[0,64]}}`, []string{`"dtype"`, "twice"}},
		{header(entry("b", 28, 64), entry("a", 0, 32)), []string{`"b"`, "overlaps", `"a"`}},
		{header(entry("a", 0, 64), entry("b", 0, 64)), []string{`"b"`, "overlaps"}},
		{header(entry("a", 0, 64), entry("b", 16, 32)), []string{`"b"`, "overlaps"}},
		{header(entry("a", 4, 64)), []string{"0 to 4", "no tensor"}},
		{header(entry("a", 0, 16), entry("b", 24, 64)), []string{"16 to 24", "no tensor"}},
		{header(entry("a", 0, 60)), []string{"60 to 64", "no tensor"}},
		{header(entry("a", 0, 72)), []string{`"a"`, "[0 72]", "64 bytes"}},
	} {
		_, err := openHeader(t, test.header, 64)
		expectRefused(t, err, test.named...)
	}
	whole := header(entry("d", 64, 64), entry("a", 0, 0), entry("b", 32, 64), entry("c", 0, 32))
	if _, err := openHeader(t, whole, 64); err != nil {
		t.Fatal(err)
	}
	if _, err := openHeader(t, "{}", 0); err != nil {
		t.Fatal(err)
	}
}

func TestBadEntriesAreRefused(t *testing.T) {
	for _, test := range [][2]string{
		{`"dtype":"F31","shape":[16],"data_offsets":[0,64]`, `"F31"`},
		{`"DTYPE":"F32","shape":[16],"data_offsets":[0,64]`, "no dtype"},
		{`"dtype":"F32","shape":null,"data_offsets":[0,4]`, "no shape"},
		{`"dtype":"F32","shape":[-16],"data_offsets":[0,64]`, "-16"},
		{`"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,64]`, "too large"},
		{`"dtype":"F32","shape":[16]`, "data_offsets"},
		{`"dtype":"F32","shape":[16],"data_offsets":[0,64,64]`, "data_offsets"},
		{`"dtype":"F32","shape":[16],"data_offsets":[64,0]`, "[64 0]"},
		{`"dtype":"F32","shape":[8],"data_offsets":[0,64]`, "32 bytes"},
	} {
		_, err := openHeader(t, `{"w":{`+test[0]+`}}`, 64)
		expectRefused(t, err, `"w"`, test[1])
	}
	for _, text := range []string{"[1]", "hello", `{"w":7}`, strings.Repeat("[", 100000)} {
		_, err := openHeader(t, text, 64)
		expectRefused(t, err, "weights.safetensors")
	}
}

func TestLongTextsAreCut(t *testing.T) {
	for _, text := range []string{strings.Repeat("L", 100000), strings.Repeat("é", 50000)} {
		for header, named := range map[string]string{
			`{"w":{"dtype":"` + text + `","shape":[16],"data_offsets":[0,64]}}`: "unknown",
			`{"` + text + `":7}`:                           "object",
			header(entry(text, 0, 64), entry(text, 0, 64)): "twice",
			header(entry("a", 0, 64), entry(text, 0, 64)):  "overlaps",
		} {
			_, err := openHeader(t, header, 64)
			expectRefused(t, err, named, "…")
		}
	}
}

// Reading a pipe would wait for a writer.
func TestOtherKindsOfFilesAreRefused(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{pipe, t.TempDir(), "/dev/zero"} {
		_, err := openWeights(path)
		expectRefused(t, err, path, "regular")
	}
}
