// SPDX-License-Identifier: MIT

package main

import (
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"runtime"
	"sync"

	"tandem"
)

// config holds the members of config.json.
type config struct {
	Hidden    int     `json:"hidden_size"`
	NLayers   int     `json:"num_hidden_layers"`
	NQHeads   int     `json:"num_attention_heads"`
	NKVHeads  int     `json:"num_key_value_heads"`
	HeadDim   int     `json:"head_dim"`
	Ffn       int     `json:"intermediate_size"`
	Vocab     int     `json:"vocab_size"`
	RmsEps    float64 `json:"rms_norm_eps"`
	RopeTheta float64 `json:"rope_theta"`
	Tied      bool    `json:"tie_word_embeddings"`
}

// layer holds a layer's weights. Matrices are [n_out, n_in].
type layer struct {
	attentionNorm, qkv, out, ffnNorm, gate, up, down []float32
}

// transformer is a Llama-family model in plain Go, in f32. Its attention, cache and sequence are Tandem's.
type transformer struct {
	config
	embedding, finalNorm []float32
	layers               []layer
	session              *tandem.Session
	sequence             tandem.SequenceID
}

func (c *config) open(directory string) (*weights, error) {
	text, err := readRegular(filepath.Join(directory, "config.json"))
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, c); err != nil {
		return nil, fmt.Errorf("config.json: %w", err)
	}
	if !c.Tied || c.Hidden <= 0 || c.NQHeads <= 0 || c.NKVHeads <= 0 || c.HeadDim <= 0 || c.Vocab <= 0 {
		return nil, fmt.Errorf("config.json: a length is missing, or tie_word_embeddings is not true")
	}
	return openWeights(filepath.Join(directory, "model.safetensors"))
}

// read returns the layer's weights. It sets *err to the first error.
func (c *config) read(w *weights, layerIdx int, err *error) layer {
	one := func(name string, shape ...int) []float32 {
		values, e := w.readF32(fmt.Sprintf("model.layers.%d.%s.weight", layerIdx, name), shape...)
		if *err == nil {
			*err = e
		}
		return values
	}
	q, kv := c.NQHeads*c.HeadDim, c.NKVHeads*c.HeadDim
	qkv := one("self_attn.q_proj", q, c.Hidden)
	qkv = append(qkv, one("self_attn.k_proj", kv, c.Hidden)...)
	qkv = append(qkv, one("self_attn.v_proj", kv, c.Hidden)...)
	return layer{
		attentionNorm: one("input_layernorm", c.Hidden),
		qkv:           qkv,
		out:           one("self_attn.o_proj", c.Hidden, q),
		ffnNorm:       one("post_attention_layernorm", c.Hidden),
		gate:          one("mlp.gate_proj", c.Ffn, c.Hidden),
		up:            one("mlp.up_proj", c.Ffn, c.Hidden),
		down:          one("mlp.down_proj", c.Hidden, c.Ffn),
	}
}

// open loads the model and makes its attention. K and V are kept in f32; the library applies RoPE.
func open(directory string, options tandem.SessionOptions) (*transformer, error) {
	t := &transformer{}
	w, err := t.config.open(directory)
	if err != nil {
		return nil, err
	}
	if t.embedding, err = w.readF32("model.embed_tokens.weight", t.Vocab, t.Hidden); err != nil {
		return nil, err
	}
	if t.finalNorm, err = w.readF32("model.norm.weight", t.Hidden); err != nil {
		return nil, err
	}
	var layers []tandem.LayerOptions
	for i := 0; i < t.NLayers; i++ {
		t.layers = append(t.layers, t.config.read(w, i, &err))
		layers = append(layers, tandem.LayerOptions{NQHeads: int32(t.NQHeads), NKVHeads: int32(t.NKVHeads),
			KHeadDim: int32(t.HeadDim), Rope: tandem.RopeHalves, RopeTheta: t.RopeTheta})
	}
	if err != nil {
		return nil, err
	}
	engine, err := tandem.NewEngine(nil)
	if err != nil {
		return nil, err
	}
	defer engine.Close() // the cache keeps the engine alive
	model, err := tandem.NewModel(layers...)
	if err != nil {
		return nil, err
	}
	defer model.Close()
	cache, err := tandem.NewCache(engine, model, &tandem.CacheOptions{KType: tandem.F32})
	if err != nil {
		return nil, err
	}
	defer cache.Close() // the session keeps the cache alive
	if t.session, err = tandem.NewSession(cache, &options); err != nil {
		return nil, err
	}
	t.sequence, err = cache.CreateSequence()
	return t, err
}

// forward appends tokens in one step and returns the logits [len(tokens), Vocab].
func (t *transformer) forward(tokens []byte) (logits []float32, err error) {
	n, q, kv := len(tokens), t.NQHeads*t.HeadDim, t.NKVHeads*t.HeadDim
	row := q + 2*kv
	x := make([]float32, 0, n*t.Hidden)
	for _, token := range tokens {
		x = append(x, t.embedding[int(token)*t.Hidden:][:t.Hidden]...)
	}
	o, ids, lens := make([]float32, n*q), []tandem.SequenceID{t.sequence}, []int64{int64(n)}
	step, err := t.session.Step(ids, lens)
	if err != nil {
		return nil, err
	}
	defer func() {
		if e := step.End(); err == nil {
			err = e
		}
	}()
	for i := range t.layers {
		l := &t.layers[i]
		qkv := linear(normalized(x, l.attentionNorm, t.RmsEps), l.qkv, t.Hidden)
		view := func(first, nHeads int) tandem.Tensor {
			return tandem.Float32s(qkv[first:], n, nHeads, t.HeadDim).Strided(row, t.HeadDim, 1)
		}
		err := t.session.Attend(&tandem.Attend{LayerIdx: int32(i), Sequences: ids, QLens: lens, Q: view(0, t.NQHeads),
			K: view(q, t.NKVHeads), V: view(q+kv, t.NKVHeads), O: tandem.Float32s(o, n, t.NQHeads, t.HeadDim)})
		if err != nil {
			return nil, err
		}
		add(x, linear(o, l.out, q))
		normed := normalized(x, l.ffnNorm, t.RmsEps)
		gate, up := linear(normed, l.gate, t.Hidden), linear(normed, l.up, t.Hidden)
		for j := range gate {
			gate[j] = gate[j] / (1 + float32(math.Exp(-float64(gate[j])))) * up[j]
		}
		add(x, linear(gate, l.down, t.Ffn))
	}
	return linear(normalized(x, t.finalNorm, t.RmsEps), t.embedding, t.Hidden), nil
}

// normalized returns weight * x / sqrt(mean(x^2) + eps), row by row.
func normalized(x, weight []float32, eps float64) []float32 {
	out := make([]float32, len(x))
	for begin := 0; begin < len(x); begin += len(weight) {
		sum := 0.0
		for _, value := range x[begin:][:len(weight)] {
			sum += float64(value) * float64(value)
		}
		factor := float32(1 / math.Sqrt(sum/float64(len(weight))+eps))
		for i, w := range weight {
			out[begin+i] = w * (x[begin+i] * factor)
		}
	}
	return out
}

func add(x, y []float32) {
	for i := range x {
		x[i] += y[i]
	}
}

// linear returns y = x W^T for x [n_rows, nIn] and W [n_out, nIn]. Goroutines share the columns.
func linear(x, weight []float32, nIn int) []float32 {
	nRows, nOut := len(x)/nIn, len(weight)/nIn
	y := make([]float32, nRows*nOut)
	each := (nOut + runtime.NumCPU() - 1) / runtime.NumCPU()
	var group sync.WaitGroup
	for begin := 0; begin < nOut; begin += each {
		group.Add(1)
		go func(begin, end int) {
			defer group.Done()
			for column := begin; column < end; column++ {
				w, row := weight[column*nIn:][:nIn], 0
				for ; row+4 <= nRows; row += 4 {
					four(y[row*nOut+column:], nOut, x[row*nIn:][:4*nIn], w)
				}
				for ; row < nRows; row++ {
					y[row*nOut+column] = dot(x[row*nIn:][:nIn], w)
				}
			}
		}(begin, min(begin+each, nOut))
	}
	group.Wait()
	return y
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}

// four computes the dot products of four rows with one, so each number of w is read once for four rows.
func four(y []float32, stride int, x, w []float32) {
	n := len(w)
	a, b, c, d := x[:n], x[n:][:n], x[2*n:][:n], x[3*n:][:n]
	var s0, s1, s2, s3 float32
	for i, w := range w {
		s0 += a[i] * w
		s1 += b[i] * w
		s2 += c[i] * w
		s3 += d[i] * w
	}
	y[0], y[stride], y[2*stride], y[3*stride] = s0, s1, s2, s3
}

func dot(a, b []float32) float32 {
	var s0, s1, s2, s3 float32
	b = b[:len(a)]
	i := 0
	for ; i+4 <= len(a); i += 4 {
		s0 += a[i] * b[i]
		s1 += a[i+1] * b[i+1]
		s2 += a[i+2] * b[i+2]
		s3 += a[i+3] * b[i+3]
	}
	for ; i < len(a); i++ {
		s0 += a[i] * b[i]
	}
	return s0 + s1 + s2 + s3
}
