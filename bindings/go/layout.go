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

// members returns the fields of a struct without padding, which cgo names "_".
func members(layout reflect.Type) []reflect.StructField {
	var fields []reflect.StructField
	for i := 0; i < layout.NumField(); i++ {
		if field := layout.Field(i); field.Name != "_" {
			fields = append(fields, field)
		}
	}
	return fields
}

// fingerprint computes what tandem_abi_fingerprint() returns: FNV-1a over the size and member offsets of every struct, 4 bytes
// of each number.
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

// checkABI refuses a library whose structs differ from those of the header that this package was built with.
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
