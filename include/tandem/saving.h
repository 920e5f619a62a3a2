/* SPDX-License-Identifier: MIT
 *
 * Sequences to bytes and back: to keep a prompt on disk, or to move it to another process or
 * machine. Part of tandem.h, which says what holds for every function. docs/saved-sequences.md has
 * the format, byte by byte.
 *
 * Saved are the rows of all layers as the cache stores them, bit for bit, positions, blobs of the
 * caller's and, where a session is named, what it has learned of the sequence: where windows begin,
 * the MAW and selections of "hgca", the lists of "hip" that are on the host. Nothing is saved of
 * pages, of devices or of what windows hold: a cache with other pages and an engine with another
 * device, or none, can load the bytes. Windows are filled again by the next call. With the same
 * options of cache and session, on the same processors, calls on the loaded sequence give the bits
 * that they would have given on the one that was saved. Two things differ on a device: what "hip"
 * has searched there is searched again, as after a fork, and a window that is filled has keys that
 * the CPU has rotated, where the library applies RoPE, which moves last bits. */
#ifndef TANDEM_SAVING_H_
#define TANDEM_SAVING_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Takes n_bytes bytes, all of them, and returns 0; or another number, which ends the save. */
typedef int32_t (*tandem_write_fn)(const void *data, int64_t n_bytes, void *user);
/* Gives the next bytes, from 1 to n_bytes, and returns how many; 0 at the end; or a negative
 * number, which ends the load. */
typedef int64_t (*tandem_read_fn)(void *data, int64_t n_bytes, void *user);
/* A blob of what is loaded, valid during the call. Not 0: the load fails. */
typedef int32_t (*tandem_blob_fn)(const char *name, const void *data, int64_t n_bytes, void *user);

/* Bytes of the caller's that go with the sequence, as recurrent state, tokens or sampler's state.
 */
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
                                  * NULL: rows alone */
  uint64_t model_id;             /* the caller's number for the model's weights, which
                                  * tandem_sequence_load() compares */
  const tandem_saved_blob *blobs; /* [n_blobs], each with its own struct_size (all equal) */
  int64_t n_blobs;               /* 65,536 at most; 0 with NULL */
} tandem_save_options;
#define TANDEM_SAVE_OPTIONS_INIT \
  { sizeof(tandem_save_options), 0, NULL, 0, NULL, 0 }
TANDEM_API void tandem_save_options_init(tandem_save_options *options);

typedef struct tandem_load_options {
  uint32_t struct_size;
  int32_t reserved;
  tandem_session *session; /* of this cache: gets what the session that was saved had learned;
                            * NULL: that is read over */
  uint64_t model_id;       /* has to be that of the save */
  int64_t file_bytes;      /* how many bytes there are, so that a file that was cut off is refused
                            * at once; -1: not known */
  tandem_blob_fn blob;     /* called for each blob in its order, when everything has been read and
                            * found right; NULL: blobs are read over */
  void *blob_user;
} tandem_load_options;
#define TANDEM_LOAD_OPTIONS_INIT \
  { sizeof(tandem_load_options), 0, NULL, 0, -1, NULL, NULL }
TANDEM_API void tandem_load_options_init(tandem_load_options *options);

/* Writes a sequence, all layers of which have the same length, by calls of `write` on the calling
 * thread, in order; options may be NULL. Waits until the sequence's tokens have come from the
 * device, then changes nothing. The cache is locked at the begin and the end alone: any thread may
 * attend, append to and fork other sequences meanwhile, in this session too, and `write` may call
 * the library. The sequence is in flight until the save returns (BUSY for all but reads). Takes 256
 * KiB beside the list of extents. Errors: NOT_FOUND, BUSY, INVALID_STATE (uneven, speculative
 * tokens), IO (`write` returned another number than 0, which tandem_error_underlying() has),
 * OUT_OF_MEMORY, INVALID_ARGUMENT (session: of another cache; blobs). What was written before an
 * error is no saved sequence. */
TANDEM_API int32_t tandem_sequence_save(tandem_cache *cache, int64_t sequence,
                                        tandem_write_fn write, void *write_user,
                                        const tandem_save_options *options, tandem_error **error);

/* Makes a sequence of what tandem_sequence_save() has written, by calls of `read` on the calling
 * thread, and reads no byte behind it; options may be NULL. Memory is taken as bytes come. The
 * sequence is there when everything has been read, every checksum is right and each blob was taken;
 * on any error nothing of it is left in the cache and its sessions. The cache is locked for
 * moments, and `read` and `blob` may call the library. In other sessions than options->session it
 * is as if the tokens had come by tandem_sequence_append(). Errors: IO (`read` returned a negative
 * number: -tandem_error_underlying()), CORRUPT (the field is the section: "header", "k of layer
 * 3"), UNSUPPORTED (version: a later format), INVALID_ARGUMENT (layers[i].member, n_layers,
 * model_id: of another model, or stored in other types; session: saved without one, or with another
 * policy, other sink_tokens under "hgca" or another pruning.decode under "hip"), CANCELLED (a blob
 * was not taken), CAPACITY, OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_sequence_load(int64_t *sequence, tandem_cache *cache, tandem_read_fn read,
                                        void *read_user, const tandem_load_options *options,
                                        tandem_error **error);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_SAVING_H_ */
