// Causal convolutions of several rows, each channel by itself, and their gradients. See recurrent.py for shapes; the plain
// twin is in ../recurrent.py.
//
// Each row is computed alone and in one order, wherever a sequence is cut.

#include "number.h"
#include "kernels.h"
#include "vector.h"

enum { BLOCK = 256, WIDEST = 8 };  // channels computed together; columns of a weight, as in recurrent.py

// x becomes silu(x).
INLINE void silus(float *x, i64 count) {
    i64 done = 0;
#ifdef COSERVE_VECTORS
    __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    for (; done + WIDTH <= count; done += WIDTH) {
        __m512 v = _mm512_loadu_ps(x + done);
        _mm512_storeu_ps(x + done, _mm512_div_ps(v, _mm512_add_ps(one, exponential16(_mm512_xor_ps(v, sign)))));
    }
#endif
    for (i64 j = done; j < count; j++) x[j] = x[j] / (1.0f + exponential(-x[j]));
}

// grad becomes the gradient for x, of that for silu(x).
INLINE void silus_back(const float *x, float *grad, i64 count) {
    i64 done = 0;
#ifdef COSERVE_VECTORS
    __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    for (; done + WIDTH <= count; done += WIDTH) {
        __m512 v = _mm512_loadu_ps(x + done), g = _mm512_loadu_ps(grad + done);
        __m512 share = _mm512_div_ps(one, _mm512_add_ps(one, exponential16(_mm512_xor_ps(v, sign))));
        __m512 slope = _mm512_fmadd_ps(v, _mm512_sub_ps(one, share), one);
        _mm512_storeu_ps(grad + done, _mm512_mul_ps(_mm512_mul_ps(g, share), slope));
    }
#endif
    for (i64 j = done; j < count; j++) {
        float share = 1.0f / (1.0f + exponential(-x[j]));
        grad[j] = grad[j] * share * (1.0f + x[j] * (1.0f - share));
    }
}

// Sums of some channels at row t of x, of the columns that do not precede the sequence, in this order.
INLINE void sums_at(const number *x, i64 t, i64 stride, const float *w, const number *bias, float *sum, i64 count,
                    i64 width) {
    for (i64 j = 0; j < count; j++) sum[j] = bias ? widen(bias[j]) : 0.0f;
    for (i64 k = t < width - 1 ? width - 1 - t : 0; k < width; k++) {
        const number *from = x + (t - width + 1 + k) * stride;
        const float *column = w + k * BLOCK;
#pragma omp simd
        for (i64 j = 0; j < count; j++) sum[j] += column[j] * widen(from[j]);
    }
}

INLINE void columns_of(const number *w, float *to, i64 count, i64 width) {
    for (i64 j = 0; j < count; j++)
        for (i64 k = 0; k < width; k++) to[k * BLOCK + j] = widen(w[j * width + k]);
}

// x [batch, rows, channels], with strides, w [channels, width], bias [channels] or null; y [batch, rows, channels].
void conv_rows(const number *x, i64 batch_stride, i64 stride, const number *w, const number *bias, number *y, i64 batch,
               i64 rows, i64 channels, i64 width, int with_silu, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads) if (parallel : threads > 1)
    for (i64 b = 0; b < batch; b++)
        for (i64 c = 0; c < channels; c += BLOCK) {
            float columns[WIDEST * BLOCK], sum[BLOCK];
            i64 count = channels - c < BLOCK ? channels - c : BLOCK;
            columns_of(w + c * width, columns, count, width);
            for (i64 t = 0; t < rows; t++) {
                number *to = y + (b * rows + t) * channels + c;
                sums_at(x + b * batch_stride + c, t, stride, columns, bias ? bias + c : NULL, sum, count, width);
                if (with_silu) {
                    for (i64 j = 0; j < count; j++) sum[j] = rounded(sum[j]);
                    silus(sum, count);
                }
                for (i64 j = 0; j < count; j++) to[j] = narrow(sum[j]);
            }
        }
}

// The gradient of `conv_rows` for x, dx [batch, rows, channels], of that for y, grad [batch, rows, channels].
void conv_rows_back(const number *x, i64 batch_stride, i64 stride, const number *w, const number *bias, const number *grad,
                    number *dx, i64 batch, i64 rows, i64 channels, i64 width, int with_silu, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads) if (parallel : threads > 1)
    for (i64 b = 0; b < batch; b++)
        for (i64 c = 0; c < channels; c += BLOCK) {
            float columns[WIDEST * BLOCK], sum[BLOCK], of_sums[WIDEST * BLOCK];  // the latter of the rows t to t + width - 1
            i64 count = channels - c < BLOCK ? channels - c : BLOCK;
            columns_of(w + c * width, columns, count, width);
            for (i64 t = rows - 1; t >= 0; t--) {
                i64 at = (b * rows + t) * channels + c, behind = rows - t < width ? rows - t : width;
                float *own = of_sums + t % width * BLOCK;
                for (i64 j = 0; j < count; j++) own[j] = widen(grad[at + j]);
                if (with_silu) {
                    sums_at(x + b * batch_stride + c, t, stride, columns, bias ? bias + c : NULL, sum, count, width);
                    for (i64 j = 0; j < count; j++) sum[j] = rounded(sum[j]);
                    silus_back(sum, own, count);
                    for (i64 j = 0; j < count; j++) own[j] = rounded(own[j]);
                }
                for (i64 j = 0; j < count; j++) sum[j] = columns[(width - 1) * BLOCK + j] * own[j];
                for (i64 d = 1; d < behind; d++) {
                    const float *later = of_sums + (t + d) % width * BLOCK, *column = columns + (width - 1 - d) * BLOCK;
#pragma omp simd
                    for (i64 j = 0; j < count; j++) sum[j] += column[j] * later[j];
                }
                for (i64 j = 0; j < count; j++) dx[at + j] = narrow(sum[j]);
            }
        }
}
