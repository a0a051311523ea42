// Kernels of a CPU in bfloat16, with sums in float32: one pass over memory each.
//
// Each row is computed alone and in one order, so that its bits do not depend on other rows or on the number
// of threads. Strides and lengths are in elements. See ops.py for shapes.

#include <math.h>
#include <stdlib.h>

#include "bfloat16.h"

static inline float rounded(float x) { return widen(narrow(x)); }

// exp(x) within 2 units in the last place; 0 below -87, infinite above 88. Cephes' polynomial.
static inline float exponential(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    bounded = bounded > 88.0f ? 88.0f : bounded;
    float n = nearbyintf(bounded * 1.44269504088896341f);
    float r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    float y = p * power;
    y = x < -87.0f ? 0.0f : y;
    y = x > 88.0f ? INFINITY : y;
    return x != x ? x : y;
}

// y = w * rounded(x / rms(x)), or x / rms(x) * (1 + w) rounded once where `centred`.
void rms_norm(const bf16 *x, const bf16 *w, bf16 *y, i64 rows, i64 width, float eps, int centred, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
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
#pragma omp parallel for num_threads(threads) if (threads > 1)
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
#pragma omp parallel for simd num_threads(threads) if (threads > 1)
    for (i64 i = 0; i < count; i++) {
        float x = widen(gate[i]);
        y[i] = narrow(rounded(x / (1.0f + exponential(-x))) * widen(up[i]));
    }
}

// Softmax in place of scores [blocks * rows, keys], row by row: row i of a block attends to the first
// keys - rows + i + 1; later weights are 0.
void causal_softmax(bf16 *scores, i64 blocks, i64 rows, i64 keys, float scale, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *exact = malloc(sizeof(float) * (size_t)keys);
#pragma omp for
        for (i64 i = 0; i < blocks * rows; i++) {
            bf16 *row = scores + i * keys;
            i64 seen = keys - rows + i % rows + 1;
            float most = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : most)
            for (i64 j = 0; j < seen; j++) {
                exact[j] = widen(row[j]) * scale;
                most = exact[j] > most ? exact[j] : most;
            }
#pragma omp simd reduction(+ : sum)
            for (i64 j = 0; j < seen; j++) {
                exact[j] = exponential(exact[j] - most);
                sum += exact[j];
            }
            float share = 1.0f / sum;
#pragma omp simd
            for (i64 j = 0; j < seen; j++) row[j] = narrow(exact[j] * share);
            memset(row + seen, 0, sizeof(bf16) * (size_t)(keys - seen));
        }
        free(exact);
    }
}

static inline float dot(const float *q, const bf16 *k, i64 width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (i64 j = 0; j < width; j++) sum += q[j] * widen(k[j]);
    return sum;
}

// One query per sequence over its pages. q [batch, heads, key_width] with strides; keys and values
// [groups, slots, width]; tables [batch, pages]; lengths [batch]; out [batch, heads, value_width].
void attend_pages(const bf16 *q, i64 row_stride, i64 head_stride, const bf16 *keys, const bf16 *values,
                  i64 slots, const i64 *tables, i64 pages, i64 page_size, const i64 *lengths, i64 window,
                  i64 batch, i64 heads, i64 groups, i64 key_width, i64 value_width, float scale, bf16 *out,
                  int threads) {
    i64 share = heads / groups, longest = pages * page_size;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *query = malloc(sizeof(float) * (size_t)(share * key_width));
        float *scores = malloc(sizeof(float) * (size_t)(share * longest));
        float *sums = malloc(sizeof(float) * (size_t)(share * value_width));
#pragma omp for collapse(2) schedule(dynamic)
        for (i64 b = 0; b < batch; b++)
            for (i64 g = 0; g < groups; g++) {
                const i64 *table = tables + b * pages;
                const bf16 *k = keys + g * slots * key_width, *v = values + g * slots * value_width;
                i64 end = lengths[b], first = window > 0 && end > window ? end - window : 0;
                for (i64 h = 0; h < share; h++) {
                    const bf16 *from = q + b * row_stride + (g * share + h) * head_stride;
                    for (i64 j = 0; j < key_width; j++) query[h * key_width + j] = widen(from[j]) * scale;
                }
                for (i64 t = first; t < end; t++) {
                    const bf16 *key = k + (table[t / page_size] * page_size + t % page_size) * key_width;
                    for (i64 h = 0; h < share; h++)
                        scores[h * longest + t] = dot(query + h * key_width, key, key_width);
                }
                for (i64 h = 0; h < share; h++) {
                    float *own = scores + h * longest, most = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : most)
                    for (i64 t = first; t < end; t++) most = own[t] > most ? own[t] : most;
#pragma omp simd reduction(+ : sum)
                    for (i64 t = first; t < end; t++) {
                        own[t] = exponential(own[t] - most);
                        sum += own[t];
                    }
                    float each = 1.0f / sum;
                    for (i64 t = first; t < end; t++) own[t] *= each;
                }
                memset(sums, 0, sizeof(float) * (size_t)(share * value_width));
                for (i64 t = first; t < end; t++) {
                    const bf16 *value = v + (table[t / page_size] * page_size + t % page_size) * value_width;
                    for (i64 h = 0; h < share; h++) {
                        float *sum = sums + h * value_width, weight = scores[h * longest + t];
#pragma omp simd
                        for (i64 j = 0; j < value_width; j++) sum[j] += weight * widen(value[j]);
                    }
                }
                bf16 *to = out + (b * heads + g * share) * value_width;
                for (i64 j = 0; j < share * value_width; j++) to[j] = narrow(sums[j]);
            }
        free(query);
        free(scores);
        free(sums);
    }
}
