// Kernels of a CPU in bfloat16, with sums in float32: one pass over memory each.
//
// Each row is computed alone and in one order, so that its bits do not depend on other rows or on the number
// of threads. Strides and lengths are in elements. See ops.py for shapes.

#include <math.h>
#include <stdlib.h>

#include "bfloat16.h"
#include "exponential.h"

// y = w * rounded(x / rms(x)), or x / rms(x) * (1 + w) rounded once where `centred`.
void rms_norm(const bf16 *x, const bf16 *w, bf16 *y, i64 rows, i64 width, float eps, int centred, int threads) {
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++) {
        const bf16 *from = x + i * width;
        bf16 *to = y + i * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (i64 j = 0; j < width; j++) sum += widen(from[j]) * widen(from[j]);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        if (centred) {
#pragma omp simd
            for (i64 j = 0; j < width; j++) to[j] = narrow(widen(from[j]) * scale * (1.0f + widen(w[j])));
        } else {
#pragma omp simd
            for (i64 j = 0; j < width; j++) to[j] = narrow(rounded(widen(from[j]) * scale) * widen(w[j]));
        }
    }
}

// Rotary embedding of rows of heads [rows, heads, width], with strides; cos and sin [rows, width]. Rounded as
// x * cos + rotate_half(x) * sin is, operation by operation.
void rotate(const bf16 *x, i64 row_stride, i64 head_stride, const bf16 *cosine, const bf16 *sine, bf16 *y,
            i64 rows, i64 heads, i64 width, int threads) {
    i64 half = width / 2;
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++) {
        const bf16 *c = cosine + i * width, *s = sine + i * width;
        for (i64 h = 0; h < heads; h++) {
            const bf16 *from = x + i * row_stride + h * head_stride;
            bf16 *to = y + (i * heads + h) * width;
#pragma omp simd
            for (i64 j = 0; j < half; j++) {
                float a = widen(from[j]), b = widen(from[half + j]);
                to[j] = narrow(rounded(a * widen(c[j])) + rounded(-b * widen(s[j])));
                to[half + j] = narrow(rounded(b * widen(c[half + j])) + rounded(a * widen(s[half + j])));
            }
        }
    }
}

// y = rounded(silu(gate)) * up.
void silu_mul(const bf16 *gate, const bf16 *up, bf16 *y, i64 count, int threads) {
#pragma omp parallel for simd num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < count; i++) {
        float x = widen(gate[i]);
        y[i] = narrow(rounded(x / (1.0f + exponential(-x))) * widen(up[i]));
    }
}

// Writes x [groups, rows, width], with strides, into slots [rows] of pool [groups, places, width].
void write_slots(const bf16 *x, i64 group_stride, i64 row_stride, const i64 *slots, bf16 *pool, i64 places,
                 i64 groups, i64 rows, i64 width, int threads) {
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++)
        for (i64 g = 0; g < groups; g++)
            memcpy(pool + (g * places + slots[i]) * width, x + g * group_stride + i * row_stride,
                   sizeof(bf16) * (size_t)width);
}

// Sixteen numbers; the compiler makes of them what the processor has.
typedef float vector __attribute__((vector_size(64)));
typedef uint32_t bits16 __attribute__((vector_size(64)));
typedef bf16 bf16x16 __attribute__((vector_size(32)));

static inline vector widen16(const bf16 *x) {
    bf16x16 narrow16;
    memcpy(&narrow16, x, sizeof narrow16);
    return (vector)(__builtin_convertvector(narrow16, bits16) << 16);
}

static inline float total(vector x) {
    typedef float half __attribute__((vector_size(32)));
    typedef float quarter __attribute__((vector_size(16)));
    half h = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    quarter q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

static inline float dot(const float *q, const bf16 *k, i64 width) {
    if (width % 16 == 0) {
        vector sum = {0};
        for (i64 j = 0; j < width; j += 16) {
            vector x;
            memcpy(&x, q + j, sizeof x);
            sum += x * widen16(k + j);
        }
        return total(sum);
    }
    float sum = 0.0f;
    for (i64 j = 0; j < width; j++) sum += q[j] * widen(k[j]);
    return sum;
}

// Pages of one sequence and group: `k` and `v` are the group's slots.
typedef struct {
    const bf16 *k, *v;
    const i64 *table;
    i64 page_size, first, end;
} Pages;

// The same row in the sequence's next page, or in this one where there is none: to be fetched ahead. Pages in
// random order take 1.1 ms for 16 sequences of 280 tokens, 16 heads of 64 on 8 groups, one core; 2.0 without.
static inline i64 ahead(const Pages *pages, i64 page) {
    i64 last = (pages->end - 1) / pages->page_size, next = page < last ? page + 1 : page;
    return (pages->table[next] - page) * pages->page_size;
}

// scores[first ... end] of a query in float32.
static inline __attribute__((always_inline)) void score(const Pages *pages, const float *q, i64 width,
                                                        float *scores) {
    for (i64 t = pages->first; t < pages->end;) {
        i64 page = t / pages->page_size, stop = (page + 1) * pages->page_size;
        const bf16 *keys = pages->k + (pages->table[page] - page) * pages->page_size * width;
        const bf16 *next = pages->k + ahead(pages, page) * width;
        for (stop = stop < pages->end ? stop : pages->end; t < stop; t++) {
            for (i64 j = 0; j < width; j += 32) __builtin_prefetch(next + t * width + j);
            scores[t] = dot(q, keys + t * width, width);
        }
    }
}

// The sum of values times weights[first ... end], 64 numbers of each value at a time.
static inline void weigh(const Pages *pages, const float *weights, i64 width, bf16 *out) {
    i64 j = 0;
    for (; j + 64 <= width; j += 64) {
        vector a = {0}, b = {0}, c = {0}, d = {0};
        for (i64 t = pages->first; t < pages->end;) {
            i64 page = t / pages->page_size, stop = (page + 1) * pages->page_size;
            const bf16 *values = pages->v + (pages->table[page] - page) * pages->page_size * width + j;
            const bf16 *next = pages->v + ahead(pages, page) * width + j;
            for (stop = stop < pages->end ? stop : pages->end; t < stop; t++) {
                __builtin_prefetch(next + t * width);
                __builtin_prefetch(next + t * width + 32);
                const bf16 *value = values + t * width;
                a += weights[t] * widen16(value);
                b += weights[t] * widen16(value + 16);
                c += weights[t] * widen16(value + 32);
                d += weights[t] * widen16(value + 48);
            }
        }
        for (int n = 0; n < 16; n++) {
            out[j + n] = narrow(a[n]);
            out[j + 16 + n] = narrow(b[n]);
            out[j + 32 + n] = narrow(c[n]);
            out[j + 48 + n] = narrow(d[n]);
        }
    }
    for (; j < width; j++) {
        float sum = 0.0f;
        for (i64 t = pages->first; t < pages->end; t++) {
            i64 slot = pages->table[t / pages->page_size] * pages->page_size + t % pages->page_size;
            sum += weights[t] * widen(pages->v[slot * width + j]);
        }
        out[j] = narrow(sum);
    }
}

// exp(x - largest) / sum, in place.
static inline void softmax(float *x, i64 count) {
    float most = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : most)
    for (i64 t = 0; t < count; t++) most = x[t] > most ? x[t] : most;
#pragma omp simd reduction(+ : sum)
    for (i64 t = 0; t < count; t++) {
        x[t] = exponential(x[t] - most);
        sum += x[t];
    }
    float share = 1.0f / sum;
    for (i64 t = 0; t < count; t++) x[t] *= share;
}

// One query per sequence over its pages. q [batch, heads, key_width] with strides; keys and values
// [groups, slots, width]; tables [batch, pages]; lengths [batch]; out [batch, heads, value_width].
void attend_pages(const bf16 *q, i64 row_stride, i64 head_stride, const bf16 *keys, const bf16 *values,
                  i64 slots, const i64 *tables, i64 pages, i64 page_size, const i64 *lengths, i64 window,
                  i64 batch, i64 heads, i64 groups, i64 key_width, i64 value_width, float scale, bf16 *out,
                  int threads) {
    i64 share = heads / groups;
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        float *query = malloc(sizeof(float) * (size_t)key_width);
        float *scores = malloc(sizeof(float) * (size_t)(pages * page_size));
#pragma omp for collapse(2) schedule(dynamic)
        for (i64 b = 0; b < batch; b++)
            for (i64 g = 0; g < groups; g++) {
                i64 end = lengths[b], first = window > 0 && end > window ? end - window : 0;
                Pages own = {keys + g * slots * key_width, values + g * slots * value_width, tables + b * pages,
                             page_size, first, end};
                for (i64 h = g * share; h < (g + 1) * share; h++) {
                    const bf16 *from = q + b * row_stride + h * head_stride;
                    for (i64 j = 0; j < key_width; j++) query[j] = widen(from[j]) * scale;
                    if (key_width == 64)  // as a constant it is unrolled
                        score(&own, query, 64, scores);
                    else if (key_width == 128)
                        score(&own, query, 128, scores);
                    else
                        score(&own, query, key_width, scores);
                    softmax(scores + first, end - first);
                    weigh(&own, scores, value_width, out + (b * heads + h) * value_width);
                }
            }
        free(query);
        free(scores);
    }
}
