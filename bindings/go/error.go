// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
)

// Code is the reason why a call failed: TANDEM_ERROR_*. It is an error itself, so errors.Is(err, tandem.ErrBusy) works.
type Code int32

// Each code of the C ABI.
const (
	ErrInvalidArgument Code = C.TANDEM_ERROR_INVALID_ARGUMENT // a value is out of range, misaligned, overlapping or inconsistent
	ErrInvalidHandle   Code = C.TANDEM_ERROR_INVALID_HANDLE   // the object is closed
	ErrInvalidState    Code = C.TANDEM_ERROR_INVALID_STATE    // the object cannot do this now
	ErrUnsupported     Code = C.TANDEM_ERROR_UNSUPPORTED      // a valid request that this build or machine does not implement
	ErrOutOfMemory     Code = C.TANDEM_ERROR_OUT_OF_MEMORY    // the system or the allocator refused memory
	ErrCapacity        Code = C.TANDEM_ERROR_CAPACITY         // a cap or a declared maximum would be exceeded
	ErrBusy            Code = C.TANDEM_ERROR_BUSY             // a call, a step or a save has the sequence in flight
	ErrNotFound        Code = C.TANDEM_ERROR_NOT_FOUND        // no such sequence, policy, instruction set or backend
	ErrCancelled       Code = C.TANDEM_ERROR_CANCELLED        // the caller asked to stop
	ErrTimeout         Code = C.TANDEM_ERROR_TIMEOUT          // the given time has passed
	ErrDeviceLost      Code = C.TANDEM_ERROR_DEVICE_LOST      // the device failed for good; tokens not yet on the host are gone
	ErrBackend         Code = C.TANDEM_ERROR_BACKEND          // a requested backend module could not be used
	ErrIO              Code = C.TANDEM_ERROR_IO               // a file operation failed
	ErrCorrupt         Code = C.TANDEM_ERROR_CORRUPT          // a file or a buffer is not what it claims to be
	ErrSystem          Code = C.TANDEM_ERROR_SYSTEM           // the system refused something other than memory
	ErrInternal        Code = C.TANDEM_ERROR_INTERNAL         // a bug in Tandem
)

// Error returns the name of the code: "TANDEM_ERROR_BUSY".
func (c Code) Error() string {
	return C.GoString(C.tandem_status_name(C.int32_t(c)))
}

// Error describes a failed call. Every error of this package is an *Error: errors.As finds it, errors.Is compares its code.
type Error struct {
	Code       Code
	Field      string // the option or argument that was refused; "" if none applies
	Message    string // one line that names function, field and value
	Underlying int64  // errno, CUDA result or other code of the layer below; 0 if none applies
	cause      error  // the context's error, or that of a file operation
}

func (e *Error) Error() string {
	if e.Message == "" {
		return e.Code.Error()
	}
	return e.Message
}

// Unwrap returns the code.
func (e *Error) Unwrap() error { return e.Code }

// Is reports whether target matches the cause: the error of the context that cancelled the call, or of the file operation.
func (e *Error) Is(target error) bool { return e.cause != nil && errors.Is(e.cause, target) }

// refuse returns the error of a check in this package, before the library is called.
func refuse(function, field, format string, values ...any) *Error {
	message := function + ": " + field + " " + fmt.Sprintf(format, values...)
	return &Error{Code: ErrInvalidArgument, Field: field, Message: message}
}

// failure turns a call's status and error object into an error, and releases the object.
func failure(status C.int32_t, raw *C.tandem_error) error {
	if status == C.TANDEM_OK {
		return nil
	}
	err := &Error{
		Code:       Code(status),
		Field:      C.GoString(C.tandem_error_field(raw)),
		Message:    C.GoString(C.tandem_error_message(raw)),
		Underlying: int64(C.tandem_error_underlying(raw)),
	}
	C.tandem_error_release(raw)
	return err
}

// text returns the string that fill writes. It asks for the size first, then for the text.
func text(fill func(buffer *C.char, bytes C.size_t, needed *C.size_t, err **C.tandem_error) C.int32_t) (string, error) {
	var needed C.size_t
	var raw *C.tandem_error
	if err := failure(fill(nil, 0, &needed, &raw), raw); err != nil {
		return "", err
	}
	for {
		buffer := make([]byte, needed)
		raw = nil
		if err := failure(fill(chars(buffer), C.size_t(len(buffer)), &needed, &raw), raw); err != nil {
			return "", err
		}
		if int(needed) <= len(buffer) {
			return string(buffer[:needed-1]), nil
		}
	}
}
