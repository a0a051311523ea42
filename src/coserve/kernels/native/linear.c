// Products with weights that oneDNN has packed into panels of 64 outputs, [outputs / 64][inputs / 2][64][2], by
// a processor's products of pairs of bfloat16 numbers (AVX-512 BF16).
//
// A tile is up to 6 rows by 64 outputs: 24 sums, 4 vectors of weights and an input are 29 of 32 registers.
// Inputs are taken in chunks, so that the chunk of a panel (32 KiB) is read from memory once for all tiles, which
// also fetch the next one ahead: 16 rows of 1024x2816 take 0.14 ms on two cores, 0.18 without and with oneDNN.

#include <stdlib.h>

#include "number.h"
#include "kernels.h"

#ifdef COSERVE_PAIRS
#include <immintrin.h>

enum { PANEL = 64, TALL = 6, CHUNK = 128, BLOCK = 96 };  // outputs, rows, pairs of inputs, rows
enum { WIDE = 4, LANES = 32 };  // of weights that are not packed: outputs, inputs in a vector
enum { TILED = 4 };  // rows; fewer take 0.6 to 1.2 of the time by vectors, 8 twice as long and 16 four times (256x704)

int panel_outputs(void) { return has_tiles() ? TILE_PANEL : PANEL; }

static inline __m512bh pair(const number *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}

static inline __attribute__((always_inline)) void tile(const int height, const number *x, i64 stride, const number *w,
                                                       i64 pairs, float *sums, int is_first,
                                                       const number *next, int part, int parts) {
    __m512 s[TALL][4];
#pragma GCC unroll 6
    for (int m = 0; m < height; m++)
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++)
            s[m][n] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + m * PANEL + n * 16);
    for (i64 p = 0; p < pairs; p++) {
        if (next != NULL)
            for (int n = part; n < 4; n += parts)
                _mm_prefetch((const char *)(next + p * 2 * PANEL + n * 32), _MM_HINT_T0);
        __m512bh c[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) c[n] = (__m512bh)_mm512_loadu_si512(w + p * 2 * PANEL + n * 32);
#pragma GCC unroll 6
        for (int m = 0; m < height; m++) {
            __m512bh a = pair(x + m * stride + 2 * p);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) s[m][n] = _mm512_dpbf16_ps(s[m][n], c[n], a);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < height; m++)
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) _mm512_store_ps(sums + m * PANEL + n * 16, s[m][n]);
}

// `next` is the chunk that comes after this one, null if there is none; each of the first tiles fetches a part.
static void tiles(const number *x, i64 stride, i64 rows, const number *w, i64 pairs, float *sums, int is_first,
                  const number *next) {
    i64 groups = (rows + TALL - 1) / TALL;
    int parts = groups < 4 ? (int)groups : 4;
    for (i64 g = 0; g < groups; g++) {
        i64 begin = rows * g / groups, height = rows * (g + 1) / groups - begin;
        const number *from = x + begin * stride;
        const number *ahead = g < parts ? next : NULL;
        float *to = sums + begin * PANEL;
        switch (height) {
        case 1: tile(1, from, stride, w, pairs, to, is_first, ahead, (int)g, parts); break;
        case 2: tile(2, from, stride, w, pairs, to, is_first, ahead, (int)g, parts); break;
        case 3: tile(3, from, stride, w, pairs, to, is_first, ahead, (int)g, parts); break;
        case 4: tile(4, from, stride, w, pairs, to, is_first, ahead, (int)g, parts); break;
        case 5: tile(5, from, stride, w, pairs, to, is_first, ahead, (int)g, parts); break;
        default: tile(6, from, stride, w, pairs, to, is_first, ahead, (int)g, parts); break;
        }
    }
}

// y [rows, outs] = x [rows, ins] times the weight, plus bias [outs] if it is not null.
void linear(const number *x, i64 stride, const number *packed, const number *bias, number *y, i64 rows, i64 ins, i64 outs,
            int threads) {
    if (has_tiles()) {
        linear_by_tiles(x, stride, packed, bias, y, rows, ins, outs, threads);
        return;
    }
    i64 panels = outs / PANEL, pairs = ins / 2, most = rows < BLOCK ? rows : BLOCK;
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        float *sums = aligned_alloc(64, sizeof(float) * (size_t)(most * PANEL));
        for (i64 top = 0; top < rows; top += most) {
            i64 height = rows - top < most ? rows - top : most;
#pragma omp for nowait
            for (i64 panel = 0; panel < panels; panel++) {
                for (i64 p = 0; p < pairs; p += CHUNK) {
                    const number *w = packed + (panel * ins + 2 * p) * PANEL;
                    i64 count = pairs - p < CHUNK ? pairs - p : CHUNK;
                    int is_last = panel == panels - 1 && p + count == pairs;
                    tiles(x + top * stride + 2 * p, stride, height, w, count, sums, p == 0,
                          is_last ? NULL : w + count * 2 * PANEL);
                }
                for (i64 m = 0; m < height; m++) {
                    number *to = y + (top + m) * outs + panel * PANEL;
                    const number *added = bias == NULL ? NULL : bias + panel * PANEL;
                    for (i64 n = 0; n < PANEL; n++)
                        to[n] = narrow(sums[m * PANEL + n] + (added == NULL ? 0.0f : widen(added[n])));
                }
            }
        }
        free(sums);
    }
}
// The sums of the lanes of four vectors.
static inline __m128 across(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                               _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// Up to 6 rows by 4 outputs of a weight [outs, ins]: 24 sums over pairs of inputs, in 16 lanes each. The first of
// a block's tiles fetches the next 4 outputs ahead.
static inline __attribute__((always_inline)) void tall_tile(const int height, const number *x, i64 stride,
                                                            const number *w, const number *bias, number *y, i64 ins,
                                                            i64 outs, const number *next) {
    __m512 s[TALL][WIDE];
#pragma GCC unroll 6
    for (int m = 0; m < height; m++)
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; n++) s[m][n] = _mm512_setzero_ps();
    for (i64 i = 0; i < ins; i += LANES) {
        if (next != NULL)
#pragma GCC unroll 4
            for (int n = 0; n < WIDE; n++) _mm_prefetch((const char *)(next + n * ins + i), _MM_HINT_T0);
        __m512bh c[WIDE];
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; n++) c[n] = (__m512bh)_mm512_loadu_si512(w + n * ins + i);
#pragma GCC unroll 6
        for (int m = 0; m < height; m++) {
            __m512bh a = (__m512bh)_mm512_loadu_si512(x + m * stride + i);
#pragma GCC unroll 4
            for (int n = 0; n < WIDE; n++) s[m][n] = _mm512_dpbf16_ps(s[m][n], c[n], a);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < height; m++) {
        float sums[WIDE];
        _mm_storeu_ps(sums, across(s[m][0], s[m][1], s[m][2], s[m][3]));
        for (int n = 0; n < WIDE; n++)
            y[m * outs + n] = narrow(sums[n] + (bias == NULL ? 0.0f : widen(bias[n])));
    }
}

// As `linear`, with a weight [outs, ins] as models are loaded.
void linear_unpacked(const number *x, i64 stride, const number *weight, const number *bias, number *y, i64 rows, i64 ins,
                     i64 outs, int threads) {
    if (rows >= TILED && outs % TILE_PANEL == 0 && has_tiles()) {
        linear_unpacked_by_tiles(x, stride, weight, bias, y, rows, ins, outs, threads);
        return;
    }
    i64 groups = (rows + TALL - 1) / TALL;
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 n = 0; n < outs; n += WIDE) {
        const number *w = weight + n * ins, *added = bias == NULL ? NULL : bias + n;
        for (i64 g = 0; g < groups; g++) {
            i64 begin = rows * g / groups, height = rows * (g + 1) / groups - begin;
            const number *from = x + begin * stride;
            const number *next = g == 0 && n + WIDE < outs ? w + WIDE * ins : NULL;
            number *to = y + begin * outs + n;
            switch (height) {
            case 1: tall_tile(1, from, stride, w, added, to, ins, outs, next); break;
            case 2: tall_tile(2, from, stride, w, added, to, ins, outs, next); break;
            case 3: tall_tile(3, from, stride, w, added, to, ins, outs, next); break;
            case 4: tall_tile(4, from, stride, w, added, to, ins, outs, next); break;
            case 5: tall_tile(5, from, stride, w, added, to, ins, outs, next); break;
            default: tall_tile(6, from, stride, w, added, to, ins, outs, next); break;
            }
        }
    }
}
#elif defined(COSERVE_FLOAT32) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
// Products with weights [outs, ins] as models are loaded. Three rows by four outputs are twelve sums, which with three
// vectors of inputs and one of weights are the sixteen registers of AVX2.
#include "vector.h"

enum { TALL = 3, WIDE = 4, LANES = sizeof(vector) / sizeof(float) };

int panel_outputs(void) { return WIDE; }

// Up to TALL rows by WIDE outputs.
static inline __attribute__((always_inline)) void tile(const int height, const float *x, i64 stride, const float *w,
                                                       const float *bias, float *y, i64 ins, i64 outs,
                                                       const float *next) {
    vector s[TALL][WIDE];
#pragma GCC unroll 3
    for (int m = 0; m < height; m++)
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; n++) s[m][n] = (vector){0};
    for (i64 i = 0; i < ins; i += LANES) {
        vector a[TALL];
#pragma GCC unroll 3
        for (int m = 0; m < height; m++) memcpy(&a[m], x + m * stride + i, sizeof(vector));
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; n++) {
            vector c;
            if (next != NULL) __builtin_prefetch(next + n * ins + i);
            memcpy(&c, w + n * ins + i, sizeof c);
#pragma GCC unroll 3
            for (int m = 0; m < height; m++) s[m][n] += c * a[m];
        }
    }
    four added = {0};
    if (bias != NULL) memcpy(&added, bias, sizeof added);
#pragma GCC unroll 3
    for (int m = 0; m < height; m++) {
        four sums = totals(s[m]) + added;
        memcpy(y + m * outs, &sums, sizeof sums);
    }
}

// y [rows, outs] = x [rows, ins] times the weight, plus bias [outs] if it is not null. Four outputs' weights stay in the
// first cache for all rows. `ins` is a multiple of 32, `outs` of WIDE.
void linear_unpacked(const float *x, i64 stride, const float *weight, const float *bias, float *y, i64 rows, i64 ins,
                     i64 outs, int threads) {
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 n = 0; n < outs; n += WIDE) {
        const float *w = weight + n * ins, *added = bias == NULL ? NULL : bias + n;
        for (i64 m = 0; m < rows; m += TALL) {
            const float *from = x + m * stride, *next = m == 0 && n + WIDE < outs ? w + WIDE * ins : NULL;
            float *to = y + m * outs + n;
            switch (rows - m) {
            case 1: tile(1, from, stride, w, added, to, ins, outs, next); break;
            case 2: tile(2, from, stride, w, added, to, ins, outs, next); break;
            default: tile(TALL, from, stride, w, added, to, ins, outs, next); break;
            }
        }
    }
}

void linear(const float *x, i64 stride, const float *weight, const float *bias, float *y, i64 rows, i64 ins, i64 outs,
            int threads) {
    linear_unpacked(x, stride, weight, bias, y, rows, ins, outs, threads);
}
#else
int panel_outputs(void) { return 0; }

void linear(const number *x, i64 stride, const number *packed, const number *bias, number *y, i64 rows, i64 ins, i64 outs,
            int threads) {}

void linear_unpacked(const number *x, i64 stride, const number *weight, const number *bias, number *y, i64 rows, i64 ins,
                     i64 outs, int threads) {}
#endif
