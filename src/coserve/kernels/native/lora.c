// Low-rank bypasses of a step's rows at one module: y += scale f(x A^T + a) B^T + b, each segment of rows by matrices and
// biases of its own, by a processor's products of pairs of bfloat16 numbers (AVX-512 BF16). f is nothing, or a rectifier.
//
// x A^T + a is rounded to bfloat16, as torch's product is; the sum with y is rounded once, and again with b. Rows of
// other segments, and matrices without rows, are never read.

#include <stdlib.h>

#include "number.h"
#include "kernels.h"

#ifdef COSERVE_PAIRS
#include "transpose.h"
#include <immintrin.h>
#include <omp.h>

// Rows and ranks of a tile of x A^T; outputs and rows of a tile of h B^T.
enum { TILE = 4, WIDE = 32, TALL = 8 };

// What lies between the matrices, for one row and rank.
static inline number between(float sum, const Segment *own, i64 rank) {
    if (own->a_bias != NULL) sum += widen(own->a_bias[rank]);
    return narrow(own->rectifies && sum < 0.0f ? 0.0f : sum);
}

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }
static inline i64 even(i64 rank) { return rank + (rank & 1); }

// h [rows, even(rank)] = f(x [rows, ins] A^T + a) for up to TILE rows and ranks, from rank `first`.
static inline __attribute__((always_inline)) void shrink_tile(const int rows, const int ranks, const number *x, i64 stride,
                                                              const Segment *own, i64 first, i64 ins, number *h,
                                                              i64 h_stride) {
    const number *a = own->a + first * ins;
    __m512 s[TILE][TILE];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int n = 0; n < ranks; n++) s[m][n] = _mm512_setzero_ps();
    for (i64 i = 0; i < ins; i += 32) {
        __mmask32 kept = ins - i < 32 ? (1u << (ins - i)) - 1 : ~0u;
        __m512bh w[TILE];
#pragma GCC unroll 4
        for (int n = 0; n < ranks; n++) w[n] = (__m512bh)_mm512_maskz_loadu_epi16(kept, a + n * ins + i);
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            __m512bh v = (__m512bh)_mm512_maskz_loadu_epi16(kept, x + m * stride + i);
#pragma GCC unroll 4
            for (int n = 0; n < ranks; n++) s[m][n] = _mm512_dpbf16_ps(s[m][n], w[n], v);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int n = 0; n < ranks; n++) 
            h[m * h_stride + first + n] = between(_mm512_reduce_add_ps(s[m][n]), own, first + n);
}

static void shrink(i64 rows, i64 ranks, const number *x, i64 stride, const Segment *own, i64 first, i64 ins, number *h,
                   i64 h_stride) {
    if (rows == TILE && ranks == TILE) {
        shrink_tile(TILE, TILE, x, stride, own, first, ins, h, h_stride);
    } else if (ranks == TILE) {
        for (i64 m = 0; m < rows; m++)
            shrink_tile(1, TILE, x + m * stride, stride, own, first, ins, h + m * h_stride, h_stride);
    } else {
        for (i64 m = 0; m < rows; m++)
            for (i64 n = first; n < first + ranks; n++)
                shrink_tile(1, 1, x + m * stride, stride, own, n, ins, h + m * h_stride, h_stride);
    }
}

// Of LANES outputs the next `left` ranks, at most 2 * `pairs`, to `to`, a line of memory for each pair; lines are WIDE
// numbers of 32 bits apart. The second of the last pair of an odd rank is zero.
static inline __attribute__((always_inline)) void turn_tile(const int pairs, const number *b, i64 rank, i64 left,
                                                            int32_t *to) {
    __mmask32 kept = left < 2 * pairs ? (1u << left) - 1 : pairs < LANES ? (1u << 2 * pairs) - 1 : ~0u;
    __m512i x[LANES];
#pragma GCC unroll 16
    for (int o = 0; o < LANES; o++) x[o] = _mm512_maskz_loadu_epi16(kept, b + o * rank);
    transpose(pairs, x);
#pragma GCC unroll 16
    for (int p = 0; p < pairs; p++) _mm512_store_si512(to + p * WIDE, x[p]);
}

// turned [pairs of ranks, WIDE] from b [WIDE, rank]; pairs beyond the rank are zeros.
static void turn(const number *b, i64 rank, int32_t *turned) {
    for (i64 o = 0; o < WIDE; o += LANES)
        for (i64 r = 0; r < rank; r += 2 * LANES) {
            const number *from = b + o * rank + r;
            int32_t *to = turned + r / 2 * WIDE + o;
            i64 left = rank - r;
            if (left <= 8)
                turn_tile(4, from, rank, left, to);
            else if (left <= 16)
                turn_tile(8, from, rank, left, to);
            else
                turn_tile(LANES, from, rank, left, to);
        }
}

static inline __m512bh pair(const number *h) {
    int32_t both;
    memcpy(&both, h, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}

static inline __m512 widened(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// y += scale sums, rounded, and += bias, rounded, for LANES numbers.
static inline void accumulate(__m512 sums, __m512 scale, const number *bias, number *y) {
    __m256i total = (__m256i)_mm512_cvtneps_pbh(
        _mm512_fmadd_ps(scale, sums, widened(_mm256_loadu_si256((const __m256i *)y))));
    if (bias != NULL)
        total = (__m256i)_mm512_cvtneps_pbh(
            _mm512_add_ps(widened(total), widened(_mm256_loadu_si256((const __m256i *)bias))));
    _mm256_storeu_si256((__m256i *)y, total);
}

// y [rows, stride] += scale h B^T at WIDE outputs, for up to TALL rows: a line of y's memory at a time.
static inline __attribute__((always_inline)) void expand_tile(const int rows, const number *h, i64 h_stride,
                                                              const int32_t *turned, i64 rank, __m512 scale,
                                                              const number *bias, number *y, i64 stride) {
    __m512 s[TALL][2];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) s[m][0] = s[m][1] = _mm512_setzero_ps();
    for (i64 p = 0; 2 * p < rank; p++) {
        __m512bh low = (__m512bh)_mm512_load_si512(turned + p * WIDE);
        __m512bh high = (__m512bh)_mm512_load_si512(turned + p * WIDE + LANES);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            __m512bh own = pair(h + m * h_stride + 2 * p);
            s[m][0] = _mm512_dpbf16_ps(s[m][0], low, own);
            s[m][1] = _mm512_dpbf16_ps(s[m][1], high, own);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) {
        accumulate(s[m][0], scale, bias, y + m * stride);
        accumulate(s[m][1], scale, bias == NULL ? NULL : bias + LANES, y + m * stride + LANES);
    }
}

// Fewer than TALL rows are tiles of 4, 2 and 1.
static void expand(i64 rows, const number *h, i64 h_stride, const int32_t *turned, i64 rank, __m512 scale,
                   const number *bias, number *y, i64 stride) {
    if (rows == TALL) {
        expand_tile(TALL, h, h_stride, turned, rank, scale, bias, y, stride);
        return;
    }
    if (rows & 4) expand_tile(4, h, h_stride, turned, rank, scale, bias, y, stride);
    i64 done = rows & 4;
    if (rows & 2) expand_tile(2, h + done * h_stride, h_stride, turned, rank, scale, bias, y + done * stride, stride);
    done += rows & 2;
    if (rows & 1) expand_tile(1, h + done * h_stride, h_stride, turned, rank, scale, bias, y + done * stride, stride);
}

// x [rows, ins] and y [rows, outs] of all rows of the step; `outs` is a multiple of WIDE.
void add_lora(const number *x, i64 stride, const Segment *segments, i64 count, number *y, i64 ins, i64 outs, int threads) {
    i64 size = 0, highest = 0;
    for (i64 s = 0; s < count; s++) {
        size += (segments[s].end - segments[s].begin) * even(segments[s].rank);
        highest = segments[s].rank > highest ? segments[s].rank : highest;
    }
    number *room = calloc((size_t)size, sizeof(number));
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        i64 mine = omp_get_thread_num(), all = omp_get_num_threads(), tile = 0;
        int32_t *turned = aligned_alloc(64, sizeof(int32_t) * (size_t)(WIDE * LANES * ((highest + 31) / 32)));
        number *h = room;
        for (i64 s = 0; s < count; s++) {
            Segment own = segments[s];
            i64 rows = own.end - own.begin, wide = even(own.rank);
            for (i64 m = 0; m < rows; m += TILE)
                for (i64 n = 0; n < own.rank; n += TILE)
                    if (tile++ % all == mine)
                        shrink(least(rows - m, TILE), least(own.rank - n, TILE), x + (own.begin + m) * stride, stride,
                               &own, n, ins, h + m * wide, wide);
            h += rows * wide;
        }
#pragma omp barrier
        i64 first = outs / WIDE * mine / all, last = outs / WIDE * (mine + 1) / all;
        h = room;
        for (i64 s = 0; s < count; s++) {
            Segment own = segments[s];
            i64 rows = own.end - own.begin, wide = even(own.rank);
            if (rows == 0) continue;
            __m512 scale = _mm512_set1_ps(own.scale);
            for (i64 o = first * WIDE; o < last * WIDE; o += WIDE) {
                turn(own.b + o * own.rank, own.rank, turned);
                for (i64 m = 0; m < rows; m += TALL)
                    expand(least(rows - m, TALL), h + m * wide, wide, turned, own.rank, scale,
                           own.b_bias == NULL ? NULL : own.b_bias + o, y + (own.begin + m) * outs + o, outs);
            }
            h += rows * wide;
        }
        free(turned);
    }
    free(room);
}
#elif defined(COSERVE_FLOAT32)
#include "vector.h"

enum { WIDE = 32, LANES = sizeof(vector) / sizeof(float), VECTORS = WIDE / LANES };  // outputs that are added together

static inline vector loaded(const float *x) {
    vector y;
    memcpy(&y, x, sizeof y);
    return y;
}

// h = f(x a + bias) for one row and rank.
static float shrunk(const float *x, const Segment *own, i64 rank, i64 ins) {
    const float *a = own->a + rank * ins;
    vector sums = {0};
    i64 i = 0;
    for (; i + LANES <= ins; i += LANES) sums += loaded(x + i) * loaded(a + i);
    four found = quarter(sums);
    float sum = (found[0] + found[1]) + (found[2] + found[3]);
    for (; i < ins; i++) sum += x[i] * a[i];
    if (own->a_bias != NULL) sum += own->a_bias[rank];
    return own->rectifies && sum < 0.0f ? 0.0f : sum;
}

// y += scale h B^T, and += bias, at WIDE outputs of one row; turned [rank, WIDE].
static void expand(const float *h, const float *turned, i64 rank, float scale, const float *bias, float *y) {
    vector s[VECTORS] = {0};
    for (i64 r = 0; r < rank; r++)
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++) s[n] += h[r] * loaded(turned + r * WIDE + n * LANES);
#pragma GCC unroll 4
    for (int n = 0; n < VECTORS; n++) {
        vector total = loaded(y + n * LANES) + scale * s[n];
        if (bias != NULL) total += loaded(bias + n * LANES);
        memcpy(y + n * LANES, &total, sizeof total);
    }
}

// x [rows, ins] and y [rows, outs] of all rows of the step; `outs` is a multiple of WIDE.
void add_lora(const float *x, i64 stride, const Segment *segments, i64 count, float *y, i64 ins, i64 outs, int threads) {
    i64 size = 0, highest = 0;
    for (i64 s = 0; s < count; s++) {
        size += (segments[s].end - segments[s].begin) * segments[s].rank;
        highest = segments[s].rank > highest ? segments[s].rank : highest;
    }
    float *room = malloc(sizeof(float) * (size_t)(size + 1));
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        float *turned = malloc(sizeof(float) * (size_t)(WIDE * highest + 1)), *h = room;
        for (i64 s = 0; s < count; s++) {
            Segment own = segments[s];
            i64 numbers = (own.end - own.begin) * own.rank;
#pragma omp for nowait
            for (i64 i = 0; i < numbers; i++)
                h[i] = shrunk(x + (own.begin + i / own.rank) * stride, &own, i % own.rank, ins);
            h += numbers;
        }
#pragma omp barrier
#pragma omp for
        for (i64 o = 0; o < outs; o += WIDE) {
            h = room;
            for (i64 s = 0; s < count; s++) {
                Segment own = segments[s];
                if (own.begin < own.end)
                    for (i64 n = 0; n < WIDE; n++)
                        for (i64 r = 0; r < own.rank; r++) turned[r * WIDE + n] = own.b[(o + n) * own.rank + r];
                for (i64 m = own.begin; m < own.end; m++, h += own.rank)
                    expand(h, turned, own.rank, own.scale, own.b_bias == NULL ? NULL : own.b_bias + o, y + m * outs + o);
            }
        }
        free(turned);
    }
    free(room);
}
#else
void add_lora(const number *x, i64 stride, const Segment *segments, i64 count, number *y, i64 ins, i64 outs, int threads) {}
#endif
