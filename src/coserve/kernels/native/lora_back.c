// The way back through low-rank bypasses y += scale x A^T B^T in float32, each segment of rows by matrices of its own:
// gradients of A and B, and that for x.
//
// One row or rank is multiplied after the other in one order, so that bits do not depend on the number of threads. Rows of
// other segments are never read.

#include <stdlib.h>

#include "number.h"
#include "kernels.h"

#ifdef COSERVE_FLOAT32
#include "vector.h"

// Numbers of a vector; ranks, and vectors or rows, whose sums are in registers together.
enum { LANES = sizeof(vector) / sizeof(float), RANKS = 4, SIDE = 2 };

INLINE vector loaded(const float *x) {
    vector y;
    memcpy(&y, x, sizeof y);
    return y;
}

INLINE void stored(float *to, vector x) { memcpy(to, &x, sizeof x); }
static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }

// h [rows, rank] of `count` ranks and `rows` rows = scale x A^T.
INLINE void shrink_tile(const int rows, const int count, const float *x, i64 stride, const float *a, i64 width,
                        float scale, float *h, i64 rank) {
    vector s[SIDE][RANKS];
    for (int m = 0; m < SIDE; m++)
        for (int r = 0; r < RANKS; r++) s[m][r] = (vector){0};
    for (i64 i = 0; i < width; i += LANES)
        for (int m = 0; m < rows; m++)
            for (int r = 0; r < count; r++) s[m][r] += loaded(x + m * stride + i) * loaded(a + r * width + i);
    for (int m = 0; m < rows; m++) {
        four sums = totals(s[m]);
        for (int r = 0; r < count; r++) h[m * rank + r] = scale * sums[r];
    }
}

static void shrink(i64 rows, i64 rank, const float *x, i64 stride, const float *a, i64 width, float scale, float *h) {
#pragma omp for
    for (i64 m = 0; m < rows; m += SIDE)
        for (i64 r = 0; r < rank; r += RANKS) {
            const float *from = x + m * stride, *of = a + r * width;
            if (rows - m >= SIDE && rank - r >= RANKS)
                shrink_tile(SIDE, RANKS, from, stride, of, width, scale, h + m * rank + r, rank);
            else
                for (i64 n = m; n < least(rows, m + SIDE); n++)
                    for (i64 q = r; q < least(rank, r + RANKS); q++)
                        shrink_tile(1, 1, x + n * stride, stride, a + q * width, width, scale, h + n * rank + q, rank);
        }
}

// SIDE vectors of to [rank, width] = h^T x, for `count` ranks.
INLINE void outer_tile(const int count, i64 rows, i64 rank, const float *h, const float *x, i64 stride, float *to, i64 width,
                       const int side) {
    vector s[RANKS][SIDE];
    for (int r = 0; r < RANKS; r++)
        for (int n = 0; n < SIDE; n++) s[r][n] = (vector){0};
    for (i64 m = 0; m < rows; m++)
        for (int n = 0; n < side; n++) {
            vector own = loaded(x + m * stride + n * LANES);
            for (int r = 0; r < count; r++) s[r][n] += h[m * rank + r] * own;
        }
    for (int r = 0; r < count; r++)
        for (int n = 0; n < side; n++) stored(to + r * width + n * LANES, s[r][n]);
}

static void outer(i64 rows, i64 rank, const float *h, const float *x, i64 stride, float *to, i64 width) {
#pragma omp for
    for (i64 i = 0; i < width; i += SIDE * LANES)
        for (i64 r = 0; r < rank; r += RANKS)
            if (width - i >= SIDE * LANES && rank - r >= RANKS)
                outer_tile(RANKS, rows, rank, h + r, x + i, stride, to + r * width + i, width, SIDE);
            else
                for (i64 j = i; j < least(width, i + SIDE * LANES); j += LANES)
                    for (i64 q = r; q < least(rank, r + RANKS); q++)
                        outer_tile(1, rows, rank, h + q, x + j, stride, to + q * width + j, width, 1);
}

// One vector of y [rows, width] += h A, for `rows` rows.
INLINE void expand_tile(const int rows, i64 rank, const float *h, const float *a, float *y, i64 width) {
    vector s[RANKS];
    for (int m = 0; m < rows; m++) s[m] = loaded(y + m * width);
    for (i64 r = 0; r < rank; r++) {
        vector own = loaded(a + r * width);
        for (int m = 0; m < rows; m++) s[m] += h[m * rank + r] * own;
    }
    for (int m = 0; m < rows; m++) stored(y + m * width, s[m]);
}

static void expand(i64 rows, i64 rank, const float *h, const float *a, float *y, i64 width) {
#pragma omp for
    for (i64 m = 0; m < rows; m += RANKS)
        for (i64 i = 0; i < width; i += LANES)
            if (rows - m >= RANKS)
                expand_tile(RANKS, rank, h + m * rank, a + i, y + m * width + i, width);
            else
                for (i64 n = m; n < rows; n++) expand_tile(1, rank, h + n * rank, a + i, y + n * width + i, width);
}

// to [ins, outs] of from [outs, ins].
static void turn(const float *from, i64 outs, i64 ins, float *to) {
#pragma omp for
    for (i64 i = 0; i < ins; i++)
        for (i64 o = 0; o < outs; o++) to[i * outs + o] = from[o * ins + i];
}

// x [rows, ins] with a stride, grad [rows, outs] that of y, of_a and of_b as each segment's a and b; of_x [rows, ins], to
// which is added, or null. `ins` and `outs` are multiples of 16.
void lora_back(const float *x, i64 stride, const float *grad, const Segment *segments, i64 count, float *const *of_a,
               float *const *of_b, float *of_x, i64 ins, i64 outs, int threads) {
    i64 most = 0, highest = 0;
    for (i64 s = 0; s < count; s++) {
        i64 numbers = (segments[s].end - segments[s].begin) * segments[s].rank;
        most = numbers > most ? numbers : most;
        highest = segments[s].rank > highest ? segments[s].rank : highest;
    }
    float *h = malloc(sizeof(float) * (size_t)(most + highest * outs + 1)), *turned = h + most;
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    for (i64 s = 0; s < count; s++) {
        Segment own = segments[s];
        i64 rows = own.end - own.begin;
        const float *from = x + own.begin * stride, *of = grad + own.begin * outs;
        turn(own.b, outs, own.rank, turned);
        shrink(rows, own.rank, of, outs, turned, outs, own.scale, h);
        outer(rows, own.rank, h, from, stride, of_a[s], ins);
        if (of_x != NULL) expand(rows, own.rank, h, own.a, of_x + own.begin * ins, ins);
        shrink(rows, own.rank, from, stride, own.a, ins, own.scale, h);
        outer(rows, own.rank, h, of, outs, turned, outs);
        turn(turned, own.rank, outs, of_b[s]);
    }
    free(h);
}
#endif
