// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import "unsafe"

// Values of projections.
const (
	NormNone     int32 = C.TANDEM_NORM_NONE
	NormRms      int32 = C.TANDEM_NORM_RMS       // x / sqrt(mean(x^2) + eps) * weight
	NormLayer    int32 = C.TANDEM_NORM_LAYER     // (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
	WeightsInOut int32 = C.TANDEM_WEIGHTS_IN_OUT // [hidden_dim, n_kv_heads * head_dim]
	WeightsOutIn int32 = C.TANDEM_WEIGHTS_OUT_IN // [n_kv_heads * head_dim, hidden_dim], as checkpoints have them
)

// Projection says how keys and values of a layer come from the hidden states x of its tokens, for the route "recompute": k =
// rotate(norm(x) WK + BK), v = norm(x) WV + BV. It must match the caller's model. Slices are copied when the model is made.
// Matrices in device memory must stay unchanged while the model, or a cache or session of it, lives.
type Projection struct {
	HiddenDim  int32     // length of x; a multiple of 8 up to 65,536
	WType      Dtype     // F16 or BF16 if WK and WV are none; else 0, or their type
	WOrder     int32     // WeightsInOut, ...
	Norm       int32     // NormNone, ...
	NormEps    float32   // 0: 1e-5
	KRope      int32     // how the caller rotates keys, by the layer's RopeDims, RopeTheta, ...; RopeCaller: not at all
	WK         Tensor    // F16 or BF16, contiguous, two dimensions in WOrder; WK and WV none: Session.UseWeights gives them
	WV         Tensor    // the same; same type and same memory as WK
	BK         []float32 // [n_kv_heads * k_head_dim] or nil
	BV         []float32 // [n_kv_heads * v_head_dim] or nil
	NormWeight []float32 // [HiddenDim]; nil: ones
	NormBias   []float32 // [HiddenDim] or nil; with NormLayer only
}

// given returns the first matrix that is given, or nil if both are blocks of Weights.
func (p *Projection) given() *Tensor {
	for _, w := range []*Tensor{&p.WK, &p.WV} {
		if w.description.n_dims != 0 {
			return w
		}
	}
	return nil
}

// wType returns the element type of both matrices.
func (p *Projection) wType(a *arena) C.int32_t {
	given := p.given()
	if given == nil {
		return C.int32_t(p.WType)
	}
	if dtype := Dtype(given.description.dtype); p.WType != 0 && p.WType != dtype {
		a.refuse("projection.w_type", "= %v, but the matrices are of %v", p.WType, dtype)
	}
	return given.description.dtype
}

// matrix checks w, whose output dimension is `columns`, and returns its address.
func (p *Projection) matrix(a *arena, name string, w *Tensor, columns int64) unsafe.Pointer {
	if w.err != nil {
		a.refuse(name, "is refused: %v", w.err)
		return nil
	}
	d := &w.description
	if d.n_dims == 0 {
		return nil // the library refuses this if the other matrix is given
	}
	shape := [2]int64{int64(p.HiddenDim), columns}
	if p.WOrder == WeightsOutIn {
		shape = [2]int64{columns, int64(p.HiddenDim)}
	}
	if d.n_dims != 2 || int64(d.shape[0]) != shape[0] || int64(d.shape[1]) != shape[1] || d.stride[0] != d.shape[1] || d.stride[1] != 1 {
		a.refuse(name, "has shape %v and strides %v, must be contiguous and %v", w.Shape(), w.Strides(), shape)
		return nil
	}
	if like := &p.given().description; d.dtype != like.dtype || d.device_type != like.device_type {
		a.refuse(name, "is not of the type, or not in the memory, of projection.w_k")
		return nil
	}
	copied := a.tensor(w)
	return a.address(copied.address)
}

// raw copies the projection to C memory, with everything that it points to.
func (p *Projection) raw(a *arena, layer *LayerOptions) *C.tandem_layer_projection {
	if p == nil {
		return nil
	}
	raw := (*C.tandem_layer_projection)(a.bytes(make([]byte, C.sizeof_tandem_layer_projection)))
	C.tandem_layer_projection_init(raw)
	vHeadDim := layer.VHeadDim
	if vHeadDim == 0 {
		vHeadDim = layer.KHeadDim
	}
	nK, nV := int64(layer.NKVHeads)*int64(layer.KHeadDim), int64(layer.NKVHeads)*int64(vHeadDim)
	raw.hidden_dim = C.int32_t(p.HiddenDim)
	raw.w_type = p.wType(a)
	raw.w_order = C.int32_t(p.WOrder)
	if given := p.given(); given != nil {
		raw.device_type = given.description.device_type
	}
	raw.norm = C.int32_t(p.Norm)
	raw.norm_eps = C.float(p.NormEps)
	raw.k_rope = C.int32_t(p.KRope)
	raw.w_k = p.matrix(a, "projection.w_k", &p.WK, nK)
	raw.w_v = p.matrix(a, "projection.w_v", &p.WV, nV)
	raw.b_k = (*C.float)(array(a, "projection.b_k", p.BK, int(nK), "n_kv_heads * k_head_dim"))
	raw.b_v = (*C.float)(array(a, "projection.b_v", p.BV, int(nV), "n_kv_heads * v_head_dim"))
	raw.norm_weight = (*C.float)(array(a, "projection.norm_weight", p.NormWeight, int(p.HiddenDim), "hidden_dim"))
	raw.norm_bias = (*C.float)(array(a, "projection.norm_bias", p.NormBias, int(p.HiddenDim), "hidden_dim"))
	return raw
}
