/* SPDX-License-Identifier: MIT
 *
 * Sequences to bytes and back: to keep a prompt on disk, or to move it to another process or
 * machine. Part of tandem.h, which says what holds for every function. docs/saved-sequences.md has
 * the format, byte by byte.
 *
 * A saved sequence has the rows of all layers as the cache stores them, bit for bit, positions, and
 * blobs of the caller's. If a session is named, it also has what the session has learned of the
 * sequence: where windows begin, the MAW and selections of "hgca", and the lists of "hip" that are
 * on the host. It has nothing of pages, devices or the content of windows. So a cache with other
 * pages can load it, and an engine with another device or none. The next call fills windows again.
 *
 * With the same options of cache and session, on the same processors, calls on the loaded sequence
 * give the same bits as calls on the saved one. There are two exceptions on a device. "hip" repeats
 * a search that it has made there, as after a fork. Where the library applies RoPE, the CPU has
 * rotated the keys of a window that is filled, which changes last bits. */
#ifndef TANDEM_SAVING_H_
#define TANDEM_SAVING_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Takes all n_bytes bytes and returns 0. Any other number ends the save. */
typedef int32_t (*tandem_write_fn)(const void *data, int64_t n_bytes, void *user);
/* Gives the next bytes, 1 to n_bytes of them, and returns their number. Returns 0 at the end. A
 * negative number ends the load. */
typedef int64_t (*tandem_read_fn)(void *data, int64_t n_bytes, void *user);
/* A blob of the loaded sequence, valid during the call. Any result other than 0 makes the load
 * fail. */
typedef int32_t (*tandem_blob_fn)(const char *name, const void *data, int64_t n_bytes, void *user);

/* Bytes that the caller saves with the sequence: recurrent state, tokens, a sampler's state, ... */
typedef struct tandem_saved_blob {
  uint32_t struct_size;
  int32_t reserved;
  const char *name;     /* 1 to 255 bytes */
  const void *data;
  int64_t n_bytes;
} tandem_saved_blob;
#define TANDEM_SAVED_BLOB_INIT \
  { sizeof(tandem_saved_blob), 0, NULL, NULL, 0 }
TANDEM_API void tandem_saved_blob_init(tandem_saved_blob *blob);

typedef struct tandem_save_options {
  uint32_t struct_size;
  int32_t reserved;
  tandem_session *session;       /* of this cache: what it has learned of the sequence is saved too;
                                  * NULL: only rows */
  uint64_t model_id;             /* the caller's number for the model's weights;
                                  * tandem_sequence_load() compares it */
  const tandem_saved_blob *blobs; /* [n_blobs], each with its own struct_size (all equal) */
  int64_t n_blobs;               /* 65,536 at most; 0 with NULL */
} tandem_save_options;
#define TANDEM_SAVE_OPTIONS_INIT \
  { sizeof(tandem_save_options), 0, NULL, 0, NULL, 0 }
TANDEM_API void tandem_save_options_init(tandem_save_options *options);

typedef struct tandem_load_options {
  uint32_t struct_size;
  int32_t reserved;
  tandem_session *session; /* of this cache: gets what the saved session had learned; NULL: these
                            * bytes are skipped */
  uint64_t model_id;       /* must be the model_id of the save */
  int64_t file_bytes;      /* number of bytes to read, so that a truncated file is refused at once;
                            * -1: not known */
  tandem_blob_fn blob;     /* called for each blob, in order, after everything has been read and
                            * found right; NULL: blobs are skipped */
  void *blob_user;
} tandem_load_options;
#define TANDEM_LOAD_OPTIONS_INIT \
  { sizeof(tandem_load_options), 0, NULL, 0, -1, NULL, NULL }
TANDEM_API void tandem_load_options_init(tandem_load_options *options);

/* Saves a sequence whose layers all have the same length. Calls `write` on the calling thread, in
 * order; options may be NULL. Waits until the sequence's tokens have come from the device. Changes
 * nothing. The cache is locked only at the begin and the end: meanwhile any thread may attend,
 * append to and fork other sequences, in this session too, and `write` may call the library. The
 * sequence is in flight until the save returns (BUSY for all but reads). Takes 256 KiB beside the
 * list of extents. Errors: NOT_FOUND, BUSY, INVALID_STATE (uneven, speculative tokens), IO (`write`
 * returned a number other than 0, which tandem_error_underlying() has), OUT_OF_MEMORY,
 * INVALID_ARGUMENT (session: of another cache; blobs). Bytes that were written before an error are
 * not a saved sequence. */
TANDEM_API int32_t tandem_sequence_save(tandem_cache *cache, int64_t sequence,
                                        tandem_write_fn write, void *write_user,
                                        const tandem_save_options *options, tandem_error **error);

/* Makes a sequence from the bytes of tandem_sequence_save(). Calls `read` on the calling thread,
 * and reads no byte after the sequence's last; options may be NULL. Memory is taken as bytes come.
 * The sequence exists once everything has been read, every checksum is right and `blob` has taken
 * each blob. After any error nothing of it is left in the cache and its sessions. The cache is
 * locked only for moments, and `read` and `blob` may call the library. To sessions other than
 * options->session the tokens look as if tandem_sequence_append() had appended them. Errors: IO
 * (`read` returned a negative number: -tandem_error_underlying()), CORRUPT (the field is the
 * section: "header", "k of layer 3"), UNSUPPORTED (version: a later format), INVALID_ARGUMENT
 * (layers[i].member, n_layers, model_id: of another model, or stored in other types; session: saved
 * without one, or with another policy, other sink_tokens under "hgca" or another pruning.decode
 * under "hip"), CANCELLED (a blob was not taken), CAPACITY, OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_sequence_load(int64_t *sequence, tandem_cache *cache, tandem_read_fn read,
                                        void *read_user, const tandem_load_options *options,
                                        tandem_error **error);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_SAVING_H_ */
