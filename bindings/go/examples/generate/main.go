// SPDX-License-Identifier: MIT

// Continues a text with pico, a byte-level model: generate MODEL_DIRECTORY PROMPT [N] [POLICY].
package main

import (
	"fmt"
	"os"
	"strconv"

	"tandem"
)

func mostLikely(logits []float32) byte {
	best := 0
	for i, logit := range logits {
		if logit > logits[best] {
			best = i
		}
	}
	return byte(best)
}

func generate(directory, prompt string, nPredict int, policy string) error {
	model, err := open(directory, tandem.SessionOptions{Policy: policy})
	if err != nil {
		return err
	}
	defer model.session.Close()
	tokens := []byte(prompt)
	os.Stdout.Write(tokens)
	for i := 0; i < nPredict; i++ {
		logits, err := model.forward(tokens)
		if err != nil {
			return err
		}
		tokens = []byte{mostLikely(logits[len(logits)-model.Vocab:])}
		os.Stdout.Write(tokens)
	}
	fmt.Println()
	return nil
}

func main() {
	arguments, nPredict, err := os.Args[1:], 64, error(nil)
	if len(arguments) < 2 || arguments[1] == "" {
		fmt.Fprintln(os.Stderr, "usage: generate MODEL_DIRECTORY PROMPT [N] [POLICY]")
		os.Exit(2)
	}
	if len(arguments) > 2 {
		nPredict, err = strconv.Atoi(arguments[2])
	}
	policy := "all"
	if len(arguments) > 3 {
		policy = arguments[3]
	}
	if err == nil {
		err = generate(arguments[0], arguments[1], nPredict, policy)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
