// Kernels of training on a CPU, with sums in float32: one pass over memory each.
//
// Each row is computed alone and in one order, so that its bits do not depend on other rows or on the number
// of threads. Strides and lengths are in elements. See gradients.py for shapes.

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "number.h"
#include "vector.h"

// Softmax in place of scores [blocks * rows, keys], row by row, and its log-sum-exp: row i of a block attends
// to the first keys - rows + i + 1; later weights are 0.
void softmax_keeping(number *scores, float *lse, i64 blocks, i64 rows, i64 keys, float scale, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *exact = malloc(sizeof(float) * (size_t)keys);
#pragma omp for
        for (i64 i = 0; i < blocks * rows; i++) {
            number *row = scores + i * keys;
            i64 seen = keys - rows + i % rows + 1;
            float most = -INFINITY;
#pragma omp simd reduction(max : most)
            for (i64 j = 0; j < seen; j++) {
                exact[j] = widen(row[j]) * scale;
                most = exact[j] > most ? exact[j] : most;
            }
            float sum = exponentials(exact, seen, most);
            float share = 1.0f / sum;
#pragma omp simd
            for (i64 j = 0; j < seen; j++) row[j] = narrow(exact[j] * share);
            memset(row + seen, 0, sizeof(number) * (size_t)(keys - seen));
            lse[i] = most + logf(sum);
        }
        free(exact);
    }
}

// The way back through `softmax_keeping`: scores become weights, and the weights' gradients those of the
// products that the scores were made of, both in place.
void softmax_back(number *scores, number *gradients, const float *lse, i64 blocks, i64 rows, i64 keys, float scale,
                  int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *exact = malloc(sizeof(float) * (size_t)keys);
#pragma omp for
        for (i64 i = 0; i < blocks * rows; i++) {
            number *row = scores + i * keys, *of = gradients + i * keys;
            i64 seen = keys - rows + i % rows + 1;
            float owed = 0.0f;
#pragma omp simd
            for (i64 j = 0; j < seen; j++) exact[j] = widen(row[j]) * scale;
            exponentials(exact, seen, lse[i]);
#pragma omp simd reduction(+ : owed)
            for (i64 j = 0; j < seen; j++) {
                row[j] = narrow(exact[j]);
                owed += exact[j] * widen(of[j]);
            }
#pragma omp simd
            for (i64 j = 0; j < seen; j++) of[j] = narrow((widen(of[j]) - owed) * exact[j] * scale);
            memset(row + seen, 0, sizeof(number) * (size_t)(keys - seen));
            memset(of + seen, 0, sizeof(number) * (size_t)(keys - seen));
        }
        free(exact);
    }
}

// The gradient of `rms_norm` for x, from that of its output. The weight is frozen.
void rms_norm_back(const number *grad, const number *x, const number *w, number *dx, i64 rows, i64 width, float eps,
                   int centred, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *exact = malloc(sizeof(float) * (size_t)width);
#pragma omp for
        for (i64 i = 0; i < rows; i++) {
            const number *g = grad + i * width, *from = x + i * width;
            number *to = dx + i * width;
            float squares = 0.0f, products = 0.0f;
            if (centred) {
#pragma omp simd
                for (i64 j = 0; j < width; j++) exact[j] = widen(g[j]) * (1.0f + widen(w[j]));
            } else {
#pragma omp simd
                for (i64 j = 0; j < width; j++) exact[j] = rounded(widen(g[j]) * widen(w[j]));
            }
#pragma omp simd reduction(+ : squares, products)
            for (i64 j = 0; j < width; j++) {
                squares += widen(from[j]) * widen(from[j]);
                products += exact[j] * widen(from[j]);
            }
            float scale = 1.0f / sqrtf(squares / (float)width + eps);
            float owed = products * scale * scale * scale / (float)width;
#pragma omp simd
            for (i64 j = 0; j < width; j++) to[j] = narrow(exact[j] * scale - widen(from[j]) * owed);
        }
        free(exact);
    }
}

// The gradients of `silu_mul` for gate and up, rounded as torch's own, operation by operation.
void silu_mul_back(const number *grad, const number *gate, const number *up, number *dgate, number *dup, i64 count,
                   int threads) {
    i64 vectors = 0, width = 1;
#ifdef COSERVE_VECTORS
    vectors = count / WIDTH, width = WIDTH;
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < vectors; i++) {
        i64 at = i * WIDTH;
        __m512 g = widen16(grad + at), x = widen16(gate + at), one = _mm512_set1_ps(1.0f);
        __m512 e = exponential16(_mm512_xor_ps(x, _mm512_set1_ps(-0.0f)));
        __m512 share = _mm512_div_ps(one, _mm512_add_ps(one, e));
        __m512 inner = rounded16(_mm512_mul_ps(g, widen16(up + at)));
        narrow16(_mm512_mul_ps(g, rounded16(_mm512_mul_ps(x, share))), dup + at);
        __m512 slope = _mm512_fmadd_ps(x, _mm512_sub_ps(one, share), one);
        narrow16(_mm512_mul_ps(_mm512_mul_ps(inner, share), slope), dgate + at);
    }
#endif
#pragma omp parallel for simd num_threads(threads) if (parallel : threads > 1 && vectors == 0)
    for (i64 i = vectors * width; i < count; i++) {
        float g = widen(grad[i]), x = widen(gate[i]);
        float share = 1.0f / (1.0f + exponential(-x));
        float inner = rounded(g * widen(up[i]));
        dup[i] = narrow(g * rounded(x * share));
        dgate[i] = narrow(inner * share * (1.0f + x * (1.0f - share)));
    }
}

// The gradient of `rotate` for x, from that of its output [rows, heads, width] with strides; dx is dense.
void rotate_back(const number *grad, i64 row_stride, i64 head_stride, const number *cosine, const number *sine,
                 number *dx, i64 rows, i64 heads, i64 width, int threads) {
    i64 half = width / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 i = 0; i < rows; i++) {
        const number *c = cosine + i * width, *s = sine + i * width;
        for (i64 h = 0; h < heads; h++) {
            const number *from = grad + i * row_stride + h * head_stride;
            number *to = dx + (i * heads + h) * width;
#pragma omp simd
            for (i64 j = 0; j < half; j++) {
                float a = widen(from[j]), b = widen(from[half + j]);
                to[j] = narrow(rounded(a * widen(c[j])) + rounded(b * widen(s[half + j])));
                to[half + j] = narrow(rounded(b * widen(c[half + j])) - rounded(a * widen(s[j])));
            }
        }
    }
}

// The loss of each row of logits [rows, vocabulary], and `weight` times its gradient.
void cross_entropy(const number *logits, const i64 *labels, float *losses, number *gradient, i64 rows, i64 vocabulary,
                   float weight, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *exact = malloc(sizeof(float) * (size_t)vocabulary);
#pragma omp for
        for (i64 i = 0; i < rows; i++) {
            const number *row = logits + i * vocabulary;
            number *to = gradient + i * vocabulary;
            float most = -INFINITY;
#pragma omp simd reduction(max : most)
            for (i64 j = 0; j < vocabulary; j++) {
                exact[j] = widen(row[j]);
                most = exact[j] > most ? exact[j] : most;
            }
            float sum = exponentials(exact, vocabulary, most);
            losses[i] = logf(sum) + most - widen(row[labels[i]]);
            float share = weight / sum;
#pragma omp simd
            for (i64 j = 0; j < vocabulary; j++) to[j] = narrow(exact[j] * share);
            to[labels[i]] = narrow(exact[labels[i]] * share - weight);
        }
        free(exact);
    }
}
