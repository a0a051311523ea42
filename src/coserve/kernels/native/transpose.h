#ifndef COSERVE_TRANSPOSE_H
#define COSERVE_TRANSPOSE_H

#if defined(__AVX512F__)
#include <immintrin.h>

enum { LANES = 16 };  // numbers of 32 bits in a vector

// x[p] becomes lane by lane number p of x[lane], for numbers below `pairs`: numbers of 32 bits, as a pair of bfloat16
// ones is.
static inline __attribute__((always_inline)) void transpose(const int pairs, __m512i *x) {
    __m512i t[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // Quarter q of x[4 g + c] is pair 4 q + c of lanes 4 g to 4 g + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i a = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88), b = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88);
        __m512i d = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd), e = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
        x[c] = _mm512_shuffle_i32x4(a, b, 0x88);
        if (pairs > 4) x[4 + c] = _mm512_shuffle_i32x4(d, e, 0x88);
        if (pairs > 8) {
            x[8 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
            x[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);
        }
    }
}
#endif

#endif
