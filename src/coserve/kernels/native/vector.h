#ifndef COSERVE_VECTOR_H
#define COSERVE_VECTOR_H

#include "number.h"
#include "exponential.h"

#define INLINE static inline __attribute__((always_inline))

// As many numbers as a register of AVX2 or AVX-512 has.
#ifdef __AVX512F__
typedef float vector __attribute__((vector_size(64)));
#else
typedef float vector __attribute__((vector_size(32)));
#endif
typedef float four __attribute__((vector_size(16)));

INLINE four quarter(vector x) {
#ifdef __AVX512F__
    typedef float half __attribute__((vector_size(32)));
    half h = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    vector h = x;
#endif
    return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
}

// The sums of four vectors' numbers.
INLINE four totals(const vector *x) {
    four a = quarter(x[0]), b = quarter(x[1]), c = quarter(x[2]), d = quarter(x[3]);
    four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// The scalar functions of the same names, for 16 numbers at once and to the same bits. Compilers find these in the
// scalar ones too, with a mask for each condition: of 2048x2816 numbers silu took 3.4 ms so, on two threads.
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define COSERVE_VECTORS
#include <immintrin.h>

enum { WIDTH = 16 };  // numbers of a vector

#ifdef COSERVE_FLOAT32
static inline __m512 widen16(const number *x) { return _mm512_loadu_ps(x); }
static inline __m512 rounded16(__m512 x) { return x; }
static inline void narrow16(__m512 x, number *to) { _mm512_storeu_ps(to, x); }
#else
static inline __m512 widen16(const number *x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}

// As 32 bits, of which the lower ones are zeros.
static inline __m512 rounded16(__m512 x) {
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    bits = _mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000));
    __mmask16 none = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, none, _mm512_set1_epi32(0x7fc00000)));
}

static inline void narrow16(__m512 x, number *to) {
    __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(rounded16(x)), 16);
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(bits));
}
#endif

static inline __m512 exponential16(__m512 x) {
    __m512 low = _mm512_set1_ps(-87.0f), high = _mm512_set1_ps(88.0f);
    __m512 bounded = _mm512_min_ps(_mm512_max_ps(x, low), high);  // of NaN the second, which the end replaces
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504088896341f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), bounded);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
    __m512i power = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    __m512 y = _mm512_mul_ps(p, _mm512_castsi512_ps(power));
    y = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), y);
    y = _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, high, _CMP_GT_OQ), _mm512_set1_ps(INFINITY));
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}
#endif

// x becomes exp(x - most); returns the sum.
static inline float exponentials(float *x, i64 count, float most) {
    float sum = 0.0f;
    i64 i = 0;
#ifdef COSERVE_VECTORS
    __m512 sums = _mm512_setzero_ps();
    for (; i + WIDTH <= count; i += WIDTH) {
        __m512 y = exponential16(_mm512_sub_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(most)));
        _mm512_storeu_ps(x + i, y);
        sums = _mm512_add_ps(sums, y);
    }
    sum = _mm512_reduce_add_ps(sums);
#endif
    enum { BLOCK = 64 };  // numbers added up apart: of thousands in float32 a single sum loses four more bits
    while (i < count) {
        i64 stop = i + BLOCK < count ? i + BLOCK : count;
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (i64 j = i; j < stop; j++) part += x[j] = exponential(x[j] - most);
        sum += part;
        i = stop;
    }
    return sum;
}

#endif
