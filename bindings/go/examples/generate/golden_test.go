// SPDX-License-Identifier: MIT

package main

import (
	"path/filepath"
	"testing"

	"tandem"
)

// Compares the example's model with the logits that Hugging Face Transformers computed in f32.
const (
	mostDifference = 2e-3 // from the order of summation
	last           = 32
)

var directory = filepath.Join("..", "..", "..", "..", "examples", "models", "pico")

// golden returns the prompt and the logits [32, 256] of its last 32 bytes.
func golden(t *testing.T) ([]byte, []float32) {
	file, err := openWeights(filepath.Join(directory, "golden.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	prompt, dtype, err := file.find("prompt", 1024)
	if err != nil || dtype != "U8" || len(prompt) != 1024 {
		t.Fatal(err, dtype, len(prompt))
	}
	logits, err := file.readF32("logits_last32", last, 256)
	if err != nil {
		t.Fatal(err)
	}
	return prompt, logits
}

func opened(t *testing.T, policy string) *transformer {
	model, err := open(directory, tandem.SessionOptions{Policy: policy})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { model.session.Close() })
	return model
}

func forward(t *testing.T, model *transformer, tokens []byte) []float32 {
	logits, err := model.forward(tokens)
	if err != nil {
		t.Fatal(err)
	}
	return logits
}

func compare(t *testing.T, logits, golden []float32) {
	if len(logits) != len(golden) {
		t.Fatalf("%d logits, expected %d", len(logits), len(golden))
	}
	most := float32(0)
	for i := range logits {
		difference := logits[i] - golden[i]
		if difference < 0 {
			difference = -difference
		}
		if !(difference <= most) { // true for NaN too
			most = difference
		}
	}
	t.Logf("logits differ by at most %.2e", most)
	if !(most <= mostDifference) {
		t.Fatalf("logits differ by %g", most)
	}
}

func TestPrefillGivesGoldenLogits(t *testing.T) {
	prompt, logits := golden(t)
	model := opened(t, "hgca") // under "hgca" too, an append attends everything
	forward(t, model, prompt[:512])
	compare(t, forward(t, model, prompt[512:])[(512-last)*256:], logits)
}

// Decodes the last 32 bytes one at a time, which uses other kernels.
func TestDecodeGivesGoldenLogits(t *testing.T) {
	prompt, logits := golden(t)
	model := opened(t, "all")
	forward(t, model, prompt[:1024-last])
	var decoded []float32
	for _, token := range prompt[1024-last:] {
		decoded = append(decoded, forward(t, model, []byte{token})...)
	}
	compare(t, decoded, logits)
}
