// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"

static void close_cache(void *cache) { tandem_cache_release(cache); }
*/
import "C"

import "unsafe"

// SequenceID names a sequence in its cache. A cache never uses an id twice.
type SequenceID int64

// Cache holds the keys and values of many sequences, in pages with reference counts. Calls that name a sequence return
// ErrNotFound if it is unknown or dropped, and ErrBusy while a session has it in flight.
type Cache struct {
	handle *handle
}

// NewCache makes an empty cache. The cache takes memory as sequences grow. options = nil: defaults. Errors: ErrUnsupported
// (storage type, rotation), ErrCapacity, ErrOutOfMemory, ErrInvalidArgument.
func NewCache(engine *Engine, model *Model, options *CacheOptions) (*Cache, error) {
	const function = "tandem_cache_create"
	if err := engine.held().use(function); err != nil {
		return nil, err
	}
	defer engine.handle.done()
	if err := model.held().use(function); err != nil {
		return nil, err
	}
	defer model.handle.done()
	a := arena{function: function}
	defer a.free()
	raw := options.raw(&a, model.nLayers)
	if a.err != nil {
		return nil, a.err
	}
	var cache *C.tandem_cache
	var rawErr *C.tandem_error
	status := C.tandem_cache_create(&cache, engine.raw(), model.raw(), raw, &rawErr)
	if err := failure(status, rawErr); err != nil {
		return nil, err
	}
	release := func(cache unsafe.Pointer) { C.close_cache(cache) }
	return &Cache{newHandle("cache", unsafe.Pointer(cache), release, engine.handle.log)}, nil
}

// Close releases the cache; sessions keep it alive. It returns nil.
func (c *Cache) Close() error {
	c.held().close()
	return nil
}

func (c *Cache) held() *handle {
	if c == nil {
		return held(nil, "cache")
	}
	return held(c.handle, "cache")
}

// call runs a function on the cache, which stays open meanwhile.
func (c *Cache) call(name string, function func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t) error {
	if err := c.held().use(name); err != nil {
		return err
	}
	defer c.handle.done()
	var rawErr *C.tandem_error
	return failure(function((*C.tandem_cache)(c.handle.pointer), &rawErr), rawErr)
}

// CreateSequence makes a new, empty sequence.
func (c *Cache) CreateSequence() (SequenceID, error) {
	var id C.int64_t
	err := c.call("tandem_sequence_create", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_sequence_create(&id, cache, err)
	})
	return SequenceID(id), err
}

// Fork makes a sequence with the same tokens. Both sequences share pages; a page is copied when one of them writes. Errors:
// ErrInvalidState (layers of different lengths), ErrCapacity, ErrOutOfMemory.
func (c *Cache) Fork(sequence SequenceID) (SequenceID, error) {
	var id C.int64_t
	err := c.call("tandem_sequence_fork", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_sequence_fork(&id, cache, C.int64_t(sequence), err)
	})
	return SequenceID(id), err
}

// Sequences returns the ids of the cache's sequences, oldest first.
func (c *Cache) Sequences() ([]SequenceID, error) {
	var ids []C.int64_t
	for {
		var n C.int64_t
		err := c.call("tandem_cache_sequences", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
			var first *C.int64_t
			if len(ids) > 0 {
				first = &ids[0]
			}
			return C.tandem_cache_sequences(first, C.int64_t(len(ids)), &n, cache, err)
		})
		if err != nil {
			return nil, err
		}
		if int(n) <= len(ids) {
			made := make([]SequenceID, n)
			for i := range made {
				made[i] = SequenceID(ids[i])
			}
			return made, nil
		}
		ids = make([]C.int64_t, n)
	}
}

// Trim frees host-store memory that dropped and truncated sequences have left. It returns the number of bytes.
func (c *Cache) Trim() (int64, error) {
	var bytes C.int64_t
	err := c.call("tandem_cache_trim", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_cache_trim(&bytes, cache, err)
	})
	return int64(bytes), err
}

// Drop removes the sequence. Pages that no other sequence holds serve other sequences; Trim frees their memory.
func (c *Cache) Drop(sequence SequenceID) error {
	return c.call("tandem_sequence_drop", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_sequence_drop(cache, C.int64_t(sequence), err)
	})
}

// Reserve takes pages, and every session's state, for nTokens more tokens in every layer. Errors: ErrCapacity, ErrOutOfMemory.
func (c *Cache) Reserve(sequence SequenceID, nTokens int64) error {
	return c.call("tandem_sequence_reserve", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_sequence_reserve(cache, C.int64_t(sequence), C.int64_t(nTokens), err)
	})
}

// Truncate keeps the first nTokens tokens of every layer and drops speculative tokens.
func (c *Cache) Truncate(sequence SequenceID, nTokens int64) error {
	return c.call("tandem_sequence_truncate", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_sequence_truncate(cache, C.int64_t(sequence), C.int64_t(nTokens), err)
	})
}

// Remove takes tokens first to first + nTokens - 1 out. With shiftPositions, the positions of later tokens move down by
// nTokens. Errors: ErrUnsupported (a shift of keys that the caller has rotated).
func (c *Cache) Remove(sequence SequenceID, first, nTokens int64, shiftPositions bool) error {
	var shift C.int32_t
	if shiftPositions {
		shift = 1
	}
	return c.call("tandem_sequence_remove", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_sequence_remove(cache, C.int64_t(sequence), C.int64_t(first), C.int64_t(nTokens), shift, err)
	})
}

// Append appends k [n_tokens, n_kv_heads, k_head_dim] and v [n_tokens, n_kv_heads, v_head_dim] to one layer without attending.
// v is Tensor{} where V aliases K. Errors: ErrCapacity, ErrOutOfMemory.
func (c *Cache) Append(sequence SequenceID, layerIdx int32, k, v Tensor) error {
	const function = "tandem_sequence_append"
	if err := firstErr(function, []string{"k", "v"}, &k, &v); err != nil {
		return err
	}
	return c.call(function, func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		description := [2]C.tandem_go_tensor{k.description, v.description}
		result := C.tandem_go_append(cache, C.int64_t(sequence), C.int32_t(layerIdx), &description[0], k.at(), v.at(), 0)
		*err = result.error
		return result.status
	})
}

// AppendX does the same for a layer that keeps hidden states. x is [n_tokens, hidden_dim] of F32, F16 or BF16. Errors:
// ErrInvalidArgument (the layer keeps no hidden states).
func (c *Cache) AppendX(sequence SequenceID, layerIdx int32, k, v, x Tensor) error {
	const function = "tandem_sequence_append_x"
	if err := firstErr(function, []string{"k", "v", "x"}, &k, &v, &x); err != nil {
		return err
	}
	return c.call(function, func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		description := [3]C.tandem_go_tensor{k.description, v.description, x.description}
		result := C.tandem_go_append_x(cache, C.int64_t(sequence), C.int32_t(layerIdx), &description[0], k.at(), v.at(), x.at())
		*err = result.error
		return result.status
	})
}

// ReadX reads back the hidden states of one layer, from token first on, as many tokens as x has room for. Errors:
// ErrInvalidArgument (the layer keeps no hidden states).
func (c *Cache) ReadX(sequence SequenceID, layerIdx int32, first int64, x Tensor) error {
	const function = "tandem_sequence_read_x"
	if err := firstErr(function, []string{"x"}, &x); err != nil {
		return err
	}
	return c.call(function, func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		result := C.tandem_go_read_x(cache, C.int64_t(sequence), C.int32_t(layerIdx), C.int64_t(first), &x.description, x.at())
		*err = result.error
		return result.status
	})
}

// Read reads back K and V of one layer, from token first on, as many tokens as k and v have room for. Either may be Tensor{}.
func (c *Cache) Read(sequence SequenceID, layerIdx int32, first int64, k, v Tensor) error {
	const function = "tandem_sequence_read"
	if err := firstErr(function, []string{"k", "v"}, &k, &v); err != nil {
		return err
	}
	return c.call(function, func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		description := [2]C.tandem_go_tensor{k.description, v.description}
		result := C.tandem_go_read(cache, C.int64_t(sequence), C.int32_t(layerIdx), C.int64_t(first), &description[0], k.at(), v.at())
		*err = result.error
		return result.status
	})
}

// Length returns the number of committed tokens of one layer.
func (c *Cache) Length(sequence SequenceID, layerIdx int32) (int64, error) {
	var nTokens C.int64_t
	err := c.call("tandem_sequence_length", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_sequence_length(&nTokens, cache, C.int64_t(sequence), C.int32_t(layerIdx), err)
	})
	return int64(nTokens), err
}

// Digest returns a hash of the lengths, positions and stored bytes of every layer.
func (c *Cache) Digest(sequence SequenceID) (uint64, error) {
	var digest C.uint64_t
	err := c.call("tandem_sequence_digest", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_sequence_digest(&digest, cache, C.int64_t(sequence), err)
	})
	return uint64(digest), err
}

// Stats returns what the cache holds.
func (c *Cache) Stats() (CacheStats, error) {
	raw := C.tandem_cache_stats{struct_size: C.sizeof_tandem_cache_stats}
	err := c.call("tandem_cache_get_stats", func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_cache_get_stats(&raw, cache, err)
	})
	return CacheStats{
		NSequences:         int64(raw.n_sequences),
		NPagesUsed:         int64(raw.n_pages_used),
		NPagesShared:       int64(raw.n_pages_shared),
		HostKVBytes:        int64(raw.host_kv_bytes),
		HostSessionBytes:   int64(raw.host_session_bytes),
		SelectionBytes:     int64(raw.selection_bytes),
		HostPeakBytes:      int64(raw.host_peak_bytes),
		DeviceWindowBytes:  int64(raw.device_window_bytes),
		DeviceWorkBytes:    int64(raw.device_work_bytes),
		DevicePeakBytes:    int64(raw.device_peak_bytes),
		DeviceStreamBytes:  int64(raw.device_stream_bytes),
		PinnedBytes:        int64(raw.pinned_bytes),
		DeviceWeightsBytes: int64(raw.device_weights_bytes),
	}, err
}
