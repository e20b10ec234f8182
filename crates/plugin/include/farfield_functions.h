/* Functions for memory servers of Farfield, in C or whatever can make a shared library.
 *
 *   cc -shared -fPIC -O2 -I include my_functions.c -o libmy_functions.so
 *   farfield serve --functions ./libmy_functions.so
 *
 * A library exports farfield_functions(), which describes its functions. A memory server calls them for its clients, with the bytes
 * of a region. Arguments and answers are encoded with postcard (https://postcard.jamesmunns.com): integers are varints, structs are
 * their fields one after the other.
 *
 * The tables are those of the module `abi` of the crate farfield-plugin. Everything that a table points to lives as long as the call
 * to which it is passed. A function may be called by several threads at a time, each with tables of its own.
 */
#ifndef FARFIELD_FUNCTIONS_H
#define FARFIELD_FUNCTIONS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FF_ABI_VERSION 1u

/* Codes of errors; docs/design/wire.md has all of them. */
#define FF_OK 0u
#define FF_OUT_OF_RANGE 2u /* detail: the offset */
#define FF_POOL_FULL 3u
#define FF_TIMED_OUT 4u
#define FF_CORRUPT 5u /* detail: the page */
#define FF_TOO_MUCH 7u /* detail: the number of bytes */
#define FF_ARGUMENT 9u /* the argument cannot be read */
#define FF_INTERNAL 10u
#define FF_OVERRUN 13u /* detail: the number of steps */

/* Bytes that belong to the caller. */
typedef struct {
    const uint8_t *data;
    size_t len;
} ff_byte_slice;

/* Result of an access or a call. */
typedef struct {
    uint32_t code; /* FF_OK, or the code of an error */
    uint32_t reserved; /* 0 */
    uint64_t detail;
} ff_status;

typedef ff_status ff_work(void *work_context);

/* The bytes of a region. Each function takes the context as its first argument. The server checks ranges. An access that fails once
 * its calls have spent their budgets fails from then on. */
typedef struct {
    const void *context;
    uint64_t region_bytes;
    /* Copies `len` bytes at `offset` after comparing their pages with the checksums. */
    ff_status (*read)(const void *context, uint64_t offset, uint8_t *into, size_t len);
    /* Copies one value of `each` bytes (1, 2, 4 or 8) per offset, none beyond the end of its page. Compares no checksum. */
    ff_status (*load)(const void *context, const uint64_t *offsets, size_t count, size_t each, uint8_t *into);
    /* Reads the checksums that `count` pages should have, from the one at `offset` on. */
    ff_status (*sums)(const void *context, uint64_t offset, uint64_t *into, size_t count);
    /* Sets *matches to 1 if the pages match these checksums, which they should have had and still should have; to 0 otherwise. */
    ff_status (*matches)(const void *context, uint64_t offset, const uint64_t *sums, size_t count, uint32_t *matches);
    /* Stores `len` bytes at `offset`. */
    ff_status (*write)(const void *context, uint64_t offset, const uint8_t *bytes, size_t len);
    /* Calls `work` while no function changes bytes of the region. It reads and writes as usual, and does not wait. */
    ff_status (*alone)(const void *context, ff_work *work, void *work_context);
    /* Returns the nanoseconds of a clock that all users of the region share. */
    uint64_t (*clock)(const void *context);
    /* Hints: no access will come for a while; each call that can go on has had a turn; these ranges will be read soon. */
    void (*rest)(const void *context);
    void (*turn)(const void *context);
    void (*announce)(const void *context, const uint64_t *offsets, const size_t *lens, size_t count);
} ff_memory_table;

/* A call. */
typedef struct {
    ff_byte_slice argument;
    uint64_t steps_max; /* one for each access, and one for each whole 4 KiB of it */
    uint64_t time_left_ns; /* UINT64_MAX without a deadline */
} ff_call_table;

/* Receiver of results: `answer` counts if the status is FF_OK, has at most 64 KiB, and is copied. */
typedef struct {
    void *context;
    void (*ended)(void *context, size_t index, ff_status status, ff_byte_slice answer, uint64_t steps);
} ff_result_table;

/* Runs `count` calls and passes one result for each of them to the receiver, in any order, before it returns. */
typedef void ff_run(const ff_memory_table *memory, const ff_call_table *calls, size_t count, const ff_result_table *results);

/* A function of a library: its name (1 to 64 bytes, not beginning with "ff."), its version, its code. */
typedef struct {
    ff_byte_slice name;
    uint32_t version;
    uint32_t reserved; /* 0 */
    ff_run *run;
} ff_function_entry;

/* What a library has. */
typedef struct {
    uint32_t abi_version; /* FF_ABI_VERSION */
    uint32_t reserved; /* 0 */
    const ff_function_entry *functions;
    size_t count;
} ff_function_table;

/* The symbol that a library exports. */
const ff_function_table *farfield_functions(void);

#ifdef __cplusplus
}
#endif

#endif
