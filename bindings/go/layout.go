// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import (
	"reflect"
	"sync"
)

// abiStructs are the public structs in the order in which the library's fingerprint counts them, as cgo read them from the header.
var abiStructs = []struct {
	name   string
	layout reflect.Type
}{
	{"tandem_tensor", reflect.TypeOf(C.tandem_tensor{})},
	{"tandem_engine_options", reflect.TypeOf(C.tandem_engine_options{})},
	{"tandem_layer_projection", reflect.TypeOf(C.tandem_layer_projection{})},
	{"tandem_layer_options", reflect.TypeOf(C.tandem_layer_options{})},
	{"tandem_cache_options", reflect.TypeOf(C.tandem_cache_options{})},
	{"tandem_session_options", reflect.TypeOf(C.tandem_session_options{})},
	{"tandem_attend_args", reflect.TypeOf(C.tandem_attend_args{})},
	{"tandem_attend_tensors_args", reflect.TypeOf(C.tandem_attend_tensors_args{})},
	{"tandem_memory_plan", reflect.TypeOf(C.tandem_memory_plan{})},
	{"tandem_route_plan", reflect.TypeOf(C.tandem_route_plan{})},
	{"tandem_cache_stats", reflect.TypeOf(C.tandem_cache_stats{})},
	{"tandem_session_stats", reflect.TypeOf(C.tandem_session_stats{})},
	{"tandem_weights_options", reflect.TypeOf(C.tandem_weights_options{})},
	{"tandem_weights_stats", reflect.TypeOf(C.tandem_weights_stats{})},
}

// members leaves out the gaps, which cgo names "_".
func members(layout reflect.Type) []reflect.StructField {
	var fields []reflect.StructField
	for i := 0; i < layout.NumField(); i++ {
		if field := layout.Field(i); field.Name != "_" {
			fields = append(fields, field)
		}
	}
	return fields
}

// fingerprint is what tandem_abi_fingerprint() hashes: size and member offsets of every struct, FNV-1a over 4 bytes of each.
func fingerprint() uint64 {
	hash := uint64(0xcbf29ce484222325)
	add := func(number uintptr) {
		for i := 0; i < 4; i++ {
			hash = (hash ^ uint64(number>>(8*i)&0xff)) * 0x100000001b3
		}
	}
	for _, abiStruct := range abiStructs {
		add(abiStruct.layout.Size())
		for _, field := range members(abiStruct.layout) {
			add(field.Offset)
		}
	}
	return hash
}

func libraryFingerprint(minor uint32) uint64 {
	return uint64(C.tandem_abi_fingerprint(C.uint32_t(minor)))
}

var (
	abiOnce sync.Once
	abiErr  error
)

// checkABI refuses a library whose structs are not those of the header that this package was built with.
func checkABI() error {
	abiOnce.Do(func() {
		here, there := fingerprint(), libraryFingerprint(C.TANDEM_VERSION_MINOR)
		if version := uint32(C.tandem_version()); here != there {
			abiErr = refuse("tandem", "tandem_abi_fingerprint",
				"(%d) = %#x, this program was built for %#x: libtandem %d.%d is loaded, or was installed since (go build -a)",
				C.TANDEM_VERSION_MINOR, there, here, version>>16, version>>8&255)
		}
	})
	return abiErr
}
