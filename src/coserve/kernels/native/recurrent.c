// Recurrent layers for one row of each of some sequences: their states are read at one place of the store and written at
// another, in one call for all sequences. See recurrent.py for shapes; the plain twins are in ../recurrent.py.
//
// Each sequence's row is computed alone and in one order. States of convolutions are numbers, all others float32.

#include <math.h>
#include <stdlib.h>

#include "number.h"
#include "kernels.h"
#include "vector.h"

enum { MOST = 1024 };  // inputs of a state's row, and its outputs; as in recurrent.py

static inline float silu(float x) { return x / (1.0f + exponential(-x)); }

// One row: state [channels, width] moves on by a column, x [channels]; y is the sum of the columns times w.
INLINE void convolve(const number *x, const number *w, const number *bias, const number *from, number *to, number *y,
                     i64 channels, i64 width, int with_silu) {
#pragma omp simd
    for (i64 c = 0; c < channels; c++) {
        float sum = bias ? widen(bias[c]) : 0.0f;
        for (i64 k = 1; k < width; k++) {
            number column = from[c * width + k];
            to[c * width + k - 1] = column;
            sum += widen(w[c * width + k - 1]) * widen(column);
        }
        to[c * width + width - 1] = x[c];
        y[c] = narrow(sum + widen(w[c * width + width - 1]) * widen(x[c]));
    }
    if (with_silu) {
#pragma omp simd
        for (i64 c = 0; c < channels; c++) y[c] = narrow(silu(widen(y[c])));
    }
}

void conv_update(const number *x, i64 x_stride, const number *w, const number *bias, number *held, const i64 *before,
                 const i64 *after, number *y, i64 rows, i64 channels, i64 width, int with_silu, int threads) {
    i64 size = channels * width;
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++) {
        const number *from = held + before[i] * size;
        number *to = held + after[i] * size;
        if (width == 4)  // the common one, whose columns a compiler keeps in registers
            convolve(x + i * x_stride, w, bias, from, to, y + i * channels, channels, 4, with_silu);
        else
            convolve(x + i * x_stride, w, bias, from, to, y + i * channels, channels, width, with_silu);
    }
}

// to = x times `scale`, over the root of the sum of its squares where `is_normed`.
INLINE void widened(const number *x, float *to, i64 count, float scale, int is_normed) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (i64 i = 0; i < count; i++) {
        to[i] = widen(x[i]);
        sum += to[i] * to[i];
    }
    if (is_normed) scale /= sqrtf(sum + 1e-6f);
#pragma omp simd
    for (i64 i = 0; i < count; i++) to[i] *= scale;
}

// A head's state [keys, values] decays, learns what v is for the key k, and is asked for q.
INLINE void delta_rule(const float *q, const float *k, const number *v, float decay, float beta, const float *from,
                       float *to, number *y, i64 keys, i64 values) {
    float learned[MOST], out[MOST];
    memset(learned, 0, sizeof(float) * (size_t)values);
    memset(out, 0, sizeof(float) * (size_t)values);
    i64 i = 0;
    for (; i + 4 <= keys; i += 4) {
        const float *s = from + i * values;
#pragma omp simd
        for (i64 j = 0; j < values; j++)
            learned[j] += k[i] * s[j] + k[i + 1] * s[values + j] + k[i + 2] * s[2 * values + j] +
                          k[i + 3] * s[3 * values + j];
    }
    for (; i < keys; i++) {
#pragma omp simd
        for (i64 j = 0; j < values; j++) learned[j] += k[i] * from[i * values + j];
    }
#pragma omp simd
    for (i64 j = 0; j < values; j++) learned[j] = (widen(v[j]) - decay * learned[j]) * beta;
    for (i = 0; i + 2 <= keys; i += 2) {
        const float *s = from + i * values;
        float *t = to + i * values;
#pragma omp simd
        for (i64 j = 0; j < values; j++) {
            float a = decay * s[j] + k[i] * learned[j], b = decay * s[values + j] + k[i + 1] * learned[j];
            t[j] = a;
            t[values + j] = b;
            out[j] += q[i] * a + q[i + 1] * b;
        }
    }
    for (; i < keys; i++) {
#pragma omp simd
        for (i64 j = 0; j < values; j++) {
            float a = decay * from[i * values + j] + k[i] * learned[j];
            to[i * values + j] = a;
            out[j] += q[i] * a;
        }
    }
#pragma omp simd
    for (i64 j = 0; j < values; j++) y[j] = narrow(out[j]);
}

void delta_update(const number *q, const number *k, const number *v, i64 q_stride, i64 k_stride, i64 v_stride,
                  const float *log_decay, const number *beta, i64 beta_stride, float *held, const i64 *before,
                  const i64 *after, number *y, i64 rows, i64 heads, i64 key_heads, i64 keys, i64 values, int is_normed,
                  int threads) {
    i64 size = keys * values, share = heads / key_heads;
#pragma omp parallel for collapse(2) num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++)
        for (i64 h = 0; h < heads; h++) {
            float asked[MOST], key[MOST];
            widened(q + i * q_stride + h / share * keys, asked, keys, 1.0f / sqrtf((float)keys), is_normed);
            widened(k + i * k_stride + h / share * keys, key, keys, 1.0f, is_normed);
            delta_rule(asked, key, v + i * v_stride + h * values, expf(log_decay[i * heads + h]),
                       widen(beta[i * beta_stride + h]), held + (before[i] * heads + h) * size,
                       held + (after[i] * heads + h) * size, y + (i * heads + h) * values, keys, values);
        }
}

// Mamba: a head's state [width, states] decays by exp(dt * a), one for each state or, where `a_state` is 0, one for all.
void selective_update(const number *x, i64 x_stride, const float *dt, const float *a, i64 a_head, i64 a_state,
                      const number *b, i64 b_stride, const number *c, i64 c_stride, const float *d, const number *z,
                      i64 z_stride, float *held, const i64 *before, const i64 *after, number *y, i64 rows, i64 heads,
                      i64 groups, i64 width, i64 states, int threads) {
    i64 size = width * states, share = heads / groups;
#pragma omp parallel for collapse(2) num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++)
        for (i64 h = 0; h < heads; h++) {
            float decay[MOST], in[MOST], asked[MOST], step = dt[i * heads + h];
            const number *b_row = b + i * b_stride + h / share * states, *c_row = c + i * c_stride + h / share * states;
            const float *own = a + h * a_head;
            if (a_state) {
#pragma omp simd
                for (i64 n = 0; n < states; n++) decay[n] = exponential(step * own[n * a_state]);
            } else {
                float all = expf(step * own[0]);
                for (i64 n = 0; n < states; n++) decay[n] = all;
            }
#pragma omp simd
            for (i64 n = 0; n < states; n++) {
                in[n] = step * widen(b_row[n]);
                asked[n] = widen(c_row[n]);
            }
            for (i64 p = 0; p < width; p++) {
                const float *from = held + (before[i] * heads + h) * size + p * states;
                float *to = held + (after[i] * heads + h) * size + p * states;
                float own_x = widen(x[i * x_stride + h * width + p]), sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (i64 n = 0; n < states; n++) {
                    float s = from[n] * decay[n] + in[n] * own_x;
                    to[n] = s;
                    sum += s * asked[n];
                }
                if (d) sum += own_x * d[h];
                if (z) sum *= silu(widen(z[i * z_stride + h * width + p]));
                y[(i * heads + h) * width + p] = narrow(sum);
            }
        }
}

// x [rows, groups, size] over the root mean square of each group, times w [groups, size]; times silu(gate) after that,
// or before all of it.
void rms_norm_gated(const number *x, const number *gate, i64 gate_stride, const number *w, number *y, i64 rows,
                    i64 groups, i64 size, float eps, int is_gated_first, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++)
        for (i64 g = 0; g < groups; g++) {
            const number *from = x + (i * groups + g) * size, *by = gate + i * gate_stride + g * size;
            const number *weight = w + g * size;
            number *to = y + (i * groups + g) * size;
            float sum = 0.0f;
            if (is_gated_first) {
#pragma omp simd reduction(+ : sum)
                for (i64 j = 0; j < size; j++) {
                    float v = widen(from[j]) * silu(widen(by[j]));
                    sum += v * v;
                }
            } else {
#pragma omp simd reduction(+ : sum)
                for (i64 j = 0; j < size; j++) sum += widen(from[j]) * widen(from[j]);
            }
            float scale = 1.0f / sqrtf(sum / (float)size + eps);
            if (is_gated_first) {
#pragma omp simd
                for (i64 j = 0; j < size; j++)
                    to[j] = narrow(rounded(widen(from[j]) * silu(widen(by[j])) * scale) * widen(weight[j]));
            } else {
#pragma omp simd
                for (i64 j = 0; j < size; j++)
                    to[j] = narrow(rounded(rounded(widen(from[j]) * scale) * widen(weight[j])) * silu(widen(by[j])));
            }
        }
}
