// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"

static void close_weights(void *weights) { tandem_weights_release(weights); }
*/
import "C"

import (
	"math"
	"sync"
	"unsafe"
)

// WeightsOptions configures offloaded weights. Zero members are defaults.
type WeightsOptions struct {
	ResidentBytes  int64 // device memory for resident blocks, which are spread evenly over the order; 0: no block is resident
	BufferBytes    int64 // device memory for the streamed blocks; 0: the largest sum of two neighbours, plus the largest block
	HostCapBytes   int64 // hard cap; 0: none
	DeviceCapBytes int64
}

// WeightsStats holds sums since the weights were created, and what they hold now.
type WeightsStats struct {
	NBlocks       int64
	NResident     int64 // blocks that are resident on the device
	ResidentBytes int64 // their bytes, as the caller counts them
	HostBytes     int64 // host copies of the other blocks
	PinnedBytes   int64 // the pinned part of HostBytes; the rest crosses the bus more slowly
	DeviceBytes   int64 // device memory of blocks, buffer included
	BufferBytes   int64
	NUses         int64
	NStreamedUses int64 // uses of blocks that cross the bus
	NAhead        int64 // of NStreamedUses, blocks that were under way or there when asked for
	StreamedBytes int64 // bytes sent so far, unneeded transfers included
}

// Weights holds a model's weights when the device has no room for all. They are blocks of bytes, in the order in which a token
// uses them. Some blocks stay on the device. The others cross the bus again and again, while the work before them computes. Any
// goroutine may use it.
type Weights struct {
	handle *handle
}

// NewWeights copies resident blocks to the device and the others to pinned host memory. Then it begins to send the first ones.
// Until it returns, it also holds a C copy of all blocks, because Go may not pass C an array of Go addresses. options = nil:
// defaults. Errors: ErrUnsupported (the engine has no device), ErrInvalidArgument, ErrOutOfMemory, ErrCapacity, ErrDeviceLost.
func NewWeights(engine *Engine, options *WeightsOptions, blocks ...[]byte) (*Weights, error) {
	const function = "tandem_weights_create"
	if err := engine.held().use(function); err != nil {
		return nil, err
	}
	defer engine.handle.done()
	if len(blocks) > math.MaxInt32 {
		return nil, refuse(function, "n_blocks", "= %d is too large", len(blocks))
	}
	a := arena{function: function}
	defer a.free()
	data, nBytes := make([]unsafe.Pointer, len(blocks)+1), make([]int64, len(blocks)+1) // one more, so that &data[0] exists
	for i, block := range blocks {
		data[i], nBytes[i] = a.bytes(block), int64(len(block))
	}
	var raw C.tandem_weights_options
	C.tandem_weights_options_init(&raw)
	if options != nil {
		raw.resident_bytes, raw.buffer_bytes = C.int64_t(options.ResidentBytes), C.int64_t(options.BufferBytes)
		raw.host_cap_bytes, raw.device_cap_bytes = C.int64_t(options.HostCapBytes), C.int64_t(options.DeviceCapBytes)
	}
	var weights *C.tandem_weights
	var rawErr *C.tandem_error
	status := C.tandem_weights_create(&weights, engine.raw(), &data[0], int64s(nBytes), C.int32_t(len(blocks)), &raw, &rawErr)
	if err := failure(status, rawErr); err != nil {
		return nil, err
	}
	release := func(weights unsafe.Pointer) { C.close_weights(weights) }
	return &Weights{newHandle("weights", unsafe.Pointer(weights), release, engine.handle.log)}, nil
}

// Close releases the weights. It waits for the stream work that came before each Done. It returns nil.
func (w *Weights) Close() error {
	w.held().close()
	return nil
}

func (w *Weights) held() *handle {
	if w == nil {
		return held(nil, "weights")
	}
	return held(w.handle, "weights")
}

// call runs a function on the weights, which stay open meanwhile.
func (w *Weights) call(name string, function func(weights *C.tandem_weights, err **C.tandem_error) C.int32_t) error {
	if err := w.held().use(name); err != nil {
		return err
	}
	defer w.handle.done()
	var rawErr *C.tandem_error
	return failure(function((*C.tandem_weights)(w.handle.pointer), &rawErr), rawErr)
}

// Block is a block in use.
type Block struct {
	Data uintptr // device address, 256-byte aligned, for later work on the stream until Done

	weights  *Weights
	blockIdx C.int32_t
	stream   uintptr
	once     sync.Once
}

// Use gives later work on a CUDA stream the block, until Done. stream = 0: the legacy default stream. It does not wait for the
// device. Errors: ErrInvalidArgument, ErrInvalidState (the stream is being captured; blocks in use leave no room for this one),
// ErrDeviceLost.
func (w *Weights) Use(blockIdx int32, stream uintptr) (*Block, error) {
	block := &Block{weights: w, blockIdx: C.int32_t(blockIdx), stream: stream}
	err := w.call("tandem_weights_use", func(weights *C.tandem_weights, err **C.tandem_error) C.int32_t {
		result := C.tandem_go_weights_use(weights, block.blockIdx, C.uintptr_t(stream))
		block.Data, *err = uintptr(result.data), result.error
		return result.status
	})
	if err != nil {
		return nil, err
	}
	return block, nil
}

// Done ends the use; later calls of it do nothing. Only work that is on the stream by now may read the block. After that work,
// its memory may be overwritten.
func (b *Block) Done() (err error) {
	b.once.Do(func() {
		err = b.weights.call("tandem_weights_done", func(weights *C.tandem_weights, err **C.tandem_error) C.int32_t {
			result := C.tandem_go_weights_done(weights, b.blockIdx, C.uintptr_t(b.stream))
			*err = result.error
			return result.status
		})
	})
	return err
}

// Stats returns what the weights hold and what they have done.
func (w *Weights) Stats() (WeightsStats, error) {
	raw := C.tandem_weights_stats{struct_size: C.sizeof_tandem_weights_stats}
	err := w.call("tandem_weights_get_stats", func(weights *C.tandem_weights, err **C.tandem_error) C.int32_t {
		return C.tandem_weights_get_stats(&raw, weights, err)
	})
	return WeightsStats{
		NBlocks:       int64(raw.n_blocks),
		NResident:     int64(raw.n_resident),
		ResidentBytes: int64(raw.resident_bytes),
		HostBytes:     int64(raw.host_bytes),
		PinnedBytes:   int64(raw.pinned_bytes),
		DeviceBytes:   int64(raw.device_bytes),
		BufferBytes:   int64(raw.buffer_bytes),
		NUses:         int64(raw.n_uses),
		NStreamedUses: int64(raw.n_streamed_uses),
		NAhead:        int64(raw.n_ahead),
		StreamedBytes: int64(raw.streamed_bytes),
	}, err
}
