// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// SaveOptions says what is saved beside the rows of a sequence. Zero members: nothing.
type SaveOptions struct {
	Session *Session          // a session of the cache; what it has learned of the sequence is saved too
	ModelID uint64            // a number for the model's weights; Load compares it
	Blobs   map[string][]byte // more bytes, by name
}

// LoadOptions says what is taken from a saved sequence beside its rows. Zero members: nothing.
type LoadOptions struct {
	Session *Session          // a session of the cache that gets what the saved session had learned; nil: that is skipped
	ModelID uint64            // the number that was saved
	Blobs   map[string][]byte // receives the blobs; nil: they are skipped
}

// file is a reader or writer that the library calls, and how that failed.
type file struct {
	writer io.Writer
	reader io.Reader
	blobs  map[string][]byte
	err    error
	outcome
}

var (
	files  table[*file]
	nParts atomic.Int64 // number of temporary files so far, for their names
)

// run runs a callback of the caller for the library. It returns false if the callback failed.
func (f *file) run(body func() error) bool {
	f.outcome = apart(func() { f.err = body() })
	return f.err == nil && !f.panics && !f.exits
}

// failed returns the error of a call that used the file. The callback's own error comes first.
func (f *file) failed(function, field string, err error) error {
	f.goOn()
	if err == nil || f.err == nil {
		return err
	}
	return ioError(function, field, f.err)
}

// ioError wraps the error of a file operation. errors.Is also finds the cause, as fs.ErrNotExist.
func ioError(function, field string, cause error) error {
	err := &Error{Code: ErrIO, Field: field, Message: function + ": " + field + ": " + cause.Error(), cause: cause}
	var number syscall.Errno
	if errors.As(cause, &number) {
		err.Underlying = int64(number)
	}
	return err
}

//export tandemGoWrite
func tandemGoWrite(data unsafe.Pointer, bytes C.int64_t, number C.uintptr_t) C.int32_t {
	f, found := files.find(uintptr(number))
	if !found || !f.run(func() error {
		n, err := f.writer.Write(unsafe.Slice((*byte)(data), int(bytes)))
		if err == nil && n != int(bytes) {
			err = io.ErrShortWrite
		}
		return err
	}) {
		return 1
	}
	return 0
}

//export tandemGoRead
func tandemGoRead(data unsafe.Pointer, bytes C.int64_t, number C.uintptr_t) (n C.int64_t) {
	f, found := files.find(uintptr(number))
	if !found || !f.run(func() error {
		got, err := io.ReadAtLeast(f.reader, unsafe.Slice((*byte)(data), int(bytes)), 1)
		n = C.int64_t(got)
		if err == io.EOF {
			return nil
		}
		return err
	}) {
		return -1
	}
	return n
}

//export tandemGoBlob
func tandemGoBlob(name *C.char, data unsafe.Pointer, bytes C.int64_t, number C.uintptr_t) C.int32_t {
	f, found := files.find(uintptr(number))
	if !found {
		return 1
	}
	blob := make([]byte, int(bytes))
	if bytes > 0 {
		copy(blob, unsafe.Slice((*byte)(data), int(bytes)))
	}
	f.blobs[C.GoString(name)] = blob
	return 0
}

// sessionOf keeps the session open until the returned function is called.
func sessionOf(session *Session, function string) (*C.tandem_session, func(), error) {
	if session == nil {
		return nil, func() {}, nil
	}
	if err := session.held().use(function); err != nil {
		return nil, nil, err
	}
	return (*C.tandem_session)(session.handle.pointer), session.handle.done, nil
}

// rawBlobs copies blobs to an array in C memory, sorted by name.
func rawBlobs(a *arena, blobs map[string][]byte) *C.tandem_saved_blob {
	if len(blobs) == 0 {
		return nil
	}
	names := make([]string, 0, len(blobs))
	for name := range blobs {
		names = append(names, name)
	}
	sort.Strings(names)
	block := C.calloc(C.size_t(len(names)), C.sizeof_tandem_saved_blob)
	a.blocks = append(a.blocks, block)
	for i, name := range names {
		raw := &unsafe.Slice((*C.tandem_saved_blob)(block), len(names))[i]
		C.tandem_saved_blob_init(raw)
		raw.name = a.text(fmt.Sprintf("blobs[%d].name", i), name)
		raw.data = a.bytes(blobs[name])
		raw.n_bytes = C.int64_t(len(blobs[name]))
	}
	return (*C.tandem_saved_blob)(block)
}

// Save writes a sequence to a file. All its layers must have the same length. Save first writes a temporary file (.part) beside
// the path, flushes it to disk and then renames it. So the path holds the old file, or none, until the new one is complete. If
// the process is killed, the .part file stays. Other sequences can be used meanwhile. options = nil: the rows alone. Errors:
// ErrIO (errors.Is also finds the system's error), ErrBusy, ErrInvalidState.
func (c *Cache) Save(sequence SequenceID, path string, options *SaveOptions) error {
	const function = "tandem_sequence_save"
	name := fmt.Sprintf("%s.%d.%d.part", path, os.Getpid(), nParts.Add(1))
	part, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return ioError(function, "path", err)
	}
	defer os.Remove(part.Name()) // fails after the rename, as it should
	defer part.Close()
	if err := c.SaveTo(sequence, part, options); err != nil {
		return err
	}
	if err := putInPlace(part, path); err != nil {
		return ioError(function, "path", err)
	}
	return nil
}

func putInPlace(part *os.File, path string) error {
	if err := part.Sync(); err != nil {
		return err
	}
	if err := os.Rename(part.Name(), path); err != nil {
		return err
	}
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer folder.Close()
	return folder.Sync()
}

// SaveTo writes a sequence as Save does. After an error, the bytes written are no valid saved sequence.
func (c *Cache) SaveTo(sequence SequenceID, writer io.Writer, options *SaveOptions) error {
	const function = "tandem_sequence_save"
	if options == nil {
		options = &SaveOptions{}
	}
	session, done, err := sessionOf(options.Session, function)
	if err != nil {
		return err
	}
	defer done()
	a := arena{function: function}
	defer a.free()
	var raw C.tandem_save_options
	C.tandem_save_options_init(&raw)
	raw.session, raw.model_id = session, C.uint64_t(options.ModelID)
	raw.blobs, raw.n_blobs = rawBlobs(&a, options.Blobs), C.int64_t(len(options.Blobs))
	if a.err != nil {
		return a.err
	}
	f := &file{writer: writer}
	number := files.add(f)
	defer files.remove(number)
	err = c.call(function, func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_go_save(cache, C.int64_t(sequence), C.uintptr_t(number), &raw, err)
	})
	return f.failed(function, "write", err)
}

// Load makes a sequence of a file that Save has written. On an error, the cache is unchanged. options = nil: the rows alone.
// Errors: ErrIO, ErrCorrupt (cut off, changed, or no saved sequence), ErrInvalidArgument (another model, other storage types,
// or a session with another policy; Field names the member), ErrUnsupported (a later format), ErrCapacity, ErrOutOfMemory.
func (c *Cache) Load(path string, options *LoadOptions) (SequenceID, error) {
	const function = "tandem_sequence_load"
	from, err := os.Open(path)
	if err != nil {
		return 0, ioError(function, "path", err)
	}
	defer from.Close()
	info, err := from.Stat()
	if err != nil {
		return 0, ioError(function, "path", err)
	}
	return c.load(from, info.Size(), options)
}

// LoadFrom makes a sequence as Load does. It reads no byte behind the sequence.
func (c *Cache) LoadFrom(reader io.Reader, options *LoadOptions) (SequenceID, error) {
	return c.load(reader, -1, options)
}

func (c *Cache) load(reader io.Reader, fileBytes int64, options *LoadOptions) (SequenceID, error) {
	const function = "tandem_sequence_load"
	if options == nil {
		options = &LoadOptions{}
	}
	session, done, err := sessionOf(options.Session, function)
	if err != nil {
		return 0, err
	}
	defer done()
	var raw C.tandem_load_options
	C.tandem_load_options_init(&raw)
	raw.session, raw.model_id, raw.file_bytes = session, C.uint64_t(options.ModelID), C.int64_t(fileBytes)
	f := &file{reader: reader, blobs: map[string][]byte{}}
	number := files.add(f)
	defer files.remove(number)
	var takesBlobs C.int32_t
	if options.Blobs != nil {
		takesBlobs = 1
	}
	var id C.int64_t
	err = c.call(function, func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_go_load(&id, cache, C.uintptr_t(number), &raw, takesBlobs, err)
	})
	if err := f.failed(function, "read", err); err != nil {
		return 0, err
	}
	for name, blob := range f.blobs {
		options.Blobs[name] = blob
	}
	return SequenceID(id), nil
}
