/* The memory loops compiled for each ISA, and the choice between them at run time. */
#ifndef LIGHTNING_CXL_MEMBENCH_ISA_H
#define LIGHTNING_CXL_MEMBENCH_ISA_H

#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#define MEM_LINE 64 /* bytes of a cache line */

/* positions in _cpu.supported_isas(); NEON is the baseline */
enum mem_isa { MEM_BASELINE, MEM_AVX2, MEM_AVX512 };
enum mem_access { MEM_READ, MEM_UPDATE, MEM_WRITE, MEM_WRITE_PAST };

/* The piece of one stream that one call sweeps. */
struct mem_part {
    char *address;
    int64_t bytes;
    enum mem_access access;
};

/* Up to 8 bytes as a word, the first byte lowest. */
static inline __attribute__((always_inline)) uint64_t mem_load(const char *p, const int64_t n)
{
    uint64_t word = 0;
    if (n >= 8)
        memcpy(&word, p, 8);
    else
        for (int64_t i = 0; i < n; i++)
            word |= (uint64_t)(unsigned char)p[i] << (8 * i);
    return word;
}

static inline __attribute__((always_inline)) void mem_store(char *p, const int64_t n, const uint64_t word)
{
    if (n >= 8)
        memcpy(p, &word, 8);
    else
        for (int64_t i = 0; i < n; i++)
            p[i] = (char)(word >> (8 * i));
}

/* Where block `block` of 2 ** log2_blocks starts in `bytes` bytes: whole cache lines, the last block ends with all. */
static inline __attribute__((always_inline)) int64_t mem_cut(
    const int64_t bytes, const int64_t block, const int log2_blocks)
{
    return block >> log2_blocks ? bytes : (bytes * block >> log2_blocks) & -(int64_t)MEM_LINE;
}

#define MEM_NAME(name) name##_baseline
#define MEM_TARGET
#define MEM_VECTOR 16
#ifdef __x86_64__
#define MEM_PAST(p, x) _mm_stream_si128((__m128i *)(p), (__m128i)(x))
#else
#define MEM_PAST(p, x) (*(mem_aligned_baseline *)(p) = (x)) /* GCC has no such store for other CPUs */
#endif
#include "membench_body.h"
#undef MEM_NAME
#undef MEM_TARGET
#undef MEM_VECTOR
#undef MEM_PAST

#ifdef __x86_64__
#define MEM_NAME(name) name##_avx2
#define MEM_TARGET __attribute__((target("avx2")))
#define MEM_VECTOR 32
#define MEM_PAST(p, x) _mm256_stream_si256((__m256i *)(p), (__m256i)(x))
#include "membench_body.h"
#undef MEM_NAME
#undef MEM_TARGET
#undef MEM_VECTOR
#undef MEM_PAST

#define MEM_NAME(name) name##_avx512
#define MEM_TARGET __attribute__((target("avx2,avx512f")))
#define MEM_VECTOR 64
#define MEM_PAST(p, x) _mm512_stream_si512((__m512i *)(p), (__m512i)(x))
#include "membench_body.h"
#undef MEM_NAME
#undef MEM_TARGET
#undef MEM_VECTOR
#undef MEM_PAST
#endif

/* The caller has checked that the CPU has `isa`. */
static uint64_t mem_sweep(
    const enum mem_isa isa, const struct mem_part *parts, const int num_parts, const int log2_blocks,
    const uint64_t pattern)
{
    switch (isa) {
#ifdef __x86_64__
    case MEM_AVX512: return mem_sweep_avx512(parts, num_parts, log2_blocks, pattern);
    case MEM_AVX2: return mem_sweep_avx2(parts, num_parts, log2_blocks, pattern);
#endif
    default: break;
    }
    return mem_sweep_baseline(parts, num_parts, log2_blocks, pattern);
}

static inline void mem_found(uint64_t *all, const uint64_t found) { __atomic_fetch_or(all, found, __ATOMIC_RELAXED); }

/* Stores past the caches become visible to other threads in any order unless fenced. */
#ifdef __x86_64__
static inline void mem_fence(void) { _mm_sfence(); }
#else
static inline void mem_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif

#endif
