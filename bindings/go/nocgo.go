// SPDX-License-Identifier: MIT

//go:build !cgo

package tandem

// The other files need cgo and are left out without it. The name stands for a message of the compiler.
var _ = tandem_needs_cgo_so_set_CGO_ENABLED_to_1_and_install_a_C_compiler
