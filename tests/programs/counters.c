// No update is lost: threads increment random counters of a far array while pages come and go under them, with atomic
// instructions, with plain stores in their own words, and with 16-byte vector stores.
#include "probe.h"
#include <emmintrin.h>

enum { THREADS = 4, STEPS = 25000 };
static _Atomic uint32_t *atomics;
static uint32_t *plain; // Word i belongs to thread i % THREADS: neighbours on each page belong to different threads.
static size_t count = 64 * MIB / 4;

static void *worker(void *number) {
    size_t me = (size_t)number;
    uint64_t state = mix(me + 1);
    for (size_t i = 0; i < STEPS; i++) {
        state = mix(state + i);
        atomic_fetch_add_explicit(&atomics[state % count], 1, memory_order_relaxed);
        plain[(state >> 20) % (count / THREADS) * THREADS + me]++;
    }
    return NULL;
}

int main(void) {
    atomics = anon(count * 4);
    plain = anon(count * 4);
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++) NEED(pthread_create(&threads[i], NULL, worker, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) NEED(pthread_join(threads[i], NULL) == 0);
    uint64_t atomic_total = 0, plain_total = 0;
    for (size_t i = 0; i < count; i++) { atomic_total += atomics[i]; plain_total += plain[i]; }
    say("atomic: %llu, plain: %llu, of %d", (unsigned long long)atomic_total, (unsigned long long)plain_total, THREADS * STEPS);
    say("plain contents: %016llx", (unsigned long long)sum(plain, count * 4));
    __m128i *vector = (__m128i *)plain;
    for (size_t i = 0; i < count / 4; i += 63) _mm_store_si128(&vector[i], _mm_set1_epi32((int)i));
    for (size_t i = 7; i < count / 4; i += 1021) _mm_stream_si128(&vector[i], _mm_set1_epi32((int)~i));
    _mm_sfence();
    say("after vector stores: %016llx", (unsigned long long)sum(plain, count * 4));
    return 0;
}
