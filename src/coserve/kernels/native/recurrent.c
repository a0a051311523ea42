// Recurrent layers. For one row of each of some sequences, states are read at one place of the store and written at
// another, in one call for all sequences; the gated delta rule also for several rows, and for their gradients. See
// recurrent.py for shapes; the plain twins are in ../recurrent.py.
//
// Each row is computed alone and in one order, wherever a sequence is cut. States of convolutions are numbers, all others
// float32.

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "number.h"
#include "kernels.h"
#include "vector.h"

enum { MOST = 1024 };  // inputs of a state's row, and its outputs; as in recurrent.py
enum { LANES = sizeof(vector) / sizeof(float) };

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

// The factors of a head's state [keys, values] by key, of one logarithm for all keys or of one for each.
INLINE void decays_of(const float *log_decay, i64 decays, float *decay, i64 keys) {
    if (decays == 1) {
        float all = expf(log_decay[0]);
        for (i64 i = 0; i < keys; i++) decay[i] = all;
    } else {
        for (i64 i = 0; i < keys; i++) decay[i] = expf(log_decay[i]);
    }
}

// What a head's state [keys, values] has yet to learn of v for the key, `k` times the decays.
INLINE void missed_of(const float *k, const number *v, const float *from, float *missed, i64 keys, i64 values) {
    memset(missed, 0, sizeof(float) * (size_t)values);
    i64 i = 0;
    for (; i + 4 <= keys; i += 4) {
        const float *s = from + i * values;
#pragma omp simd
        for (i64 j = 0; j < values; j++)
            missed[j] += k[i] * s[j] + k[i + 1] * s[values + j] + k[i + 2] * s[2 * values + j] +
                         k[i + 3] * s[3 * values + j];
    }
    for (; i < keys; i++) {
#pragma omp simd
        for (i64 j = 0; j < values; j++) missed[j] += k[i] * from[i * values + j];
    }
#pragma omp simd
    for (i64 j = 0; j < values; j++) missed[j] = widen(v[j]) - missed[j];
}

// A head's state [keys, values] decays, learns what v is for the key k, and is asked for q. `from` may be `to`. Without
// `is_delta` it learns v whatever it holds for k: Mamba 2.
INLINE void delta_rule(const float *q, const float *k, const number *v, const float *decay, float beta,
                       const float *from, float *to, number *y, i64 keys, i64 values, int is_delta) {
    float learned[MOST], out[MOST], decayed[MOST];
    for (i64 i = 0; i < keys; i++) decayed[i] = decay[i] * k[i];
    if (is_delta)
        missed_of(decayed, v, from, learned, keys, values);
    else
        for (i64 j = 0; j < values; j++) learned[j] = widen(v[j]);
    memset(out, 0, sizeof(float) * (size_t)values);
    i64 i = 0;
#pragma omp simd
    for (i64 j = 0; j < values; j++) learned[j] *= beta;
    for (; i + 2 <= keys; i += 2) {
        const float *s = from + i * values;
        float *t = to + i * values;
#pragma omp simd
        for (i64 j = 0; j < values; j++) {
            float a = decay[i] * s[j] + k[i] * learned[j], b = decay[i + 1] * s[values + j] + k[i + 1] * learned[j];
            t[j] = a;
            t[values + j] = b;
            out[j] += q[i] * a + q[i + 1] * b;
        }
    }
    for (; i < keys; i++) {
#pragma omp simd
        for (i64 j = 0; j < values; j++) {
            float a = decay[i] * from[i * values + j] + k[i] * learned[j];
            to[i * values + j] = a;
            out[j] += q[i] * a;
        }
    }
#pragma omp simd
    for (i64 j = 0; j < values; j++) y[j] = narrow(out[j]);
}

void delta_update(const number *q, const number *k, const number *v, i64 q_stride, i64 k_stride, i64 v_stride,
                  const float *log_decay, const number *beta, i64 beta_stride, float *held, const i64 *before,
                  const i64 *after, number *y, i64 rows, i64 heads, i64 key_heads, i64 keys, i64 values, i64 decays,
                  int is_normed, int threads) {
    i64 size = keys * values, share = heads / key_heads;
#pragma omp parallel for collapse(2) num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++)
        for (i64 h = 0; h < heads; h++) {
            float asked[MOST], key[MOST], decay[MOST];
            decays_of(log_decay + (i * heads + h) * decays, decays, decay, keys);
            widened(q + i * q_stride + h / share * keys, asked, keys, 1.0f / sqrtf((float)keys), is_normed);
            widened(k + i * k_stride + h / share * keys, key, keys, 1.0f, is_normed);
            delta_rule(asked, key, v + i * v_stride + h * values, decay, widen(beta[i * beta_stride + h]), held + (before[i] * heads + h) * size,
                       held + (after[i] * heads + h) * size, y + (i * heads + h) * values, keys, values, 1);
        }
}

// The gated delta rule for `length` rows of each sequence, or without `is_delta` Mamba 2's recurrence, whose state is
// transposed: x is v, B is k, C is q and the time step beta. q is multiplied by `scale`. `kept` gets the state before every
// `every` rows, unless it is null; a null `from` is a state of zeros. A head has `decays` logarithms, 1 or one for each key.
void delta_rows(const number *q, const number *k, const number *v, const float *log_decay, const number *beta,
                const float *from, float *to, number *y, float *kept, i64 every, i64 batch, i64 length, i64 heads,
                i64 key_heads, i64 keys, i64 values, i64 decays, float scale, int is_normed, int is_delta, int threads) {
    i64 size = keys * values, share = heads / key_heads;
#pragma omp parallel for collapse(2) num_threads(threads) if (parallel : threads > 1)
    for (i64 b = 0; b < batch; b++)
        for (i64 h = 0; h < heads; h++) {
            float asked[MOST], key[MOST], decay[MOST], *state = to + (b * heads + h) * size;
            if (from)
                memcpy(state, from + (b * heads + h) * size, sizeof(float) * (size_t)size);
            else
                memset(state, 0, sizeof(float) * (size_t)size);
            for (i64 t = 0; t < length; t++) {
                i64 row = b * length + t, at = (row * key_heads + h / share) * keys;
                if (kept && t % every == 0)
                    memcpy(kept + ((t / every * batch + b) * heads + h) * size, state, sizeof(float) * (size_t)size);
                widened(q + at, asked, keys, scale, is_normed);
                widened(k + at, key, keys, 1.0f, is_normed);
                decays_of(log_decay + (row * heads + h) * decays, decays, decay, keys);
                delta_rule(asked, key, v + (row * heads + h) * values, decay, widen(beta[row * heads + h]), state, state, y + (row * heads + h) * values, keys, values,
                           is_delta);
            }
        }
}

// The gradient for x of `widened`, of that for its result; `to` may be `grad`.
INLINE void widened_back(const number *x, const float *grad, float *to, i64 count, float scale, int is_normed) {
    float square = 0.0f, along = 0.0f;
    if (is_normed) {
#pragma omp simd reduction(+ : square, along)
        for (i64 i = 0; i < count; i++) {
            square += widen(x[i]) * widen(x[i]);
            along += widen(x[i]) * grad[i];
        }
        square += 1e-6f;
        scale /= sqrtf(square);
        along /= square;
    }
#pragma omp simd
    for (i64 i = 0; i < count; i++) to[i] = (grad[i] - (is_normed ? along * widen(x[i]) : 0.0f)) * scale;
}

INLINE vector read(const float *x) {
    vector v;
    memcpy(&v, x, sizeof v);
    return v;
}

// Four rows of a state's gradient `g` [4, values] get what q asked of them; the products of rows with `asked` and
// `learned` are added to dq and dk, and k times the rows to `entered`.
INLINE void back_to_asked(const float *q, const float *k, const float *s, float *g, const float *asked,
                          const float *learned, float *entered, float *dq, float *dk, i64 values) {
    vector of_q[4] = {0}, of_k[4] = {0};
    for (i64 j = 0; j < values; j += LANES) {
        vector a = read(asked + j), l = read(learned + j), e = read(entered + j);
        for (int r = 0; r < 4; r++) {
            vector own = read(g + r * values + j) + q[r] * a;
            memcpy(g + r * values + j, &own, sizeof own);
            of_q[r] += read(s + r * values + j) * a;
            of_k[r] += own * l;
            e += k[r] * own;
        }
        memcpy(entered + j, &e, sizeof e);
    }
    four to_q = totals(of_q), to_k = totals(of_k);
    for (int r = 0; r < 4; r++) dq[r] += to_q[r], dk[r] += to_k[r];
}

// The same rows lose what entered them where they missed it, and decay: the gradient of the state before. `to` gets those
// of the decays' logarithms.
INLINE void back_to_before(const float *k, const float *decay, const float *s, float *g, const float *entered, float *dk,
                           float *to, i64 values, int is_delta) {
    vector of_k[4] = {0}, of_decay[4] = {0};
    for (i64 j = 0; j < values; j += LANES) {
        vector e = read(entered + j);
        for (int r = 0; r < 4; r++) {
            vector own = read(g + r * values + j), state = read(s + r * values + j);
            if (is_delta) {
                own -= k[r] * e;
                of_k[r] += state * e;
            }
            of_decay[r] += state * own;
            own *= decay[r];
            memcpy(g + r * values + j, &own, sizeof own);
        }
    }
    four to_k = totals(of_k), to_decay = totals(of_decay);
    for (int r = 0; r < 4; r++) {
        dk[r] -= decay[r] * to_k[r];
        to[r] = to_decay[r] * decay[r];
    }
}

// A row of a head on its way back: `before` and `after` are the states [keys, values] around it, `learned` is what
// entered the state, `missed` that over beta. grad [keys, values], of the state after the row, becomes that of the state
// before it. dq and dk get the row's share; dv, dg and dbeta are its own. Keys are a multiple of 4, values of `LANES`.
INLINE void delta_rule_back(const float *q, const float *k, const number *dy, const float *decay, float beta,
                            const float *before, const float *after, const float *learned, const float *missed,
                            float *grad, float *dq, float *dk, number *dv, float *dg, float *dbeta, i64 keys,
                            i64 values, i64 decays, int is_delta) {
    float asked[MOST], entered[MOST], of_decay[MOST], of_beta = 0.0f, all = 0.0f;
    memset(entered, 0, sizeof(float) * (size_t)values);
    for (i64 j = 0; j < values; j++) asked[j] = widen(dy[j]);
    for (i64 i = 0; i < keys; i += 4)
        back_to_asked(q + i, k + i, after + i * values, grad + i * values, asked, learned, entered, dq + i, dk + i,
                      values);
#pragma omp simd reduction(+ : of_beta)
    for (i64 j = 0; j < values; j++) {
        of_beta += entered[j] * missed[j];
        entered[j] *= beta;
    }
    for (i64 j = 0; j < values; j++) dv[j] = narrow(entered[j]);
    for (i64 i = 0; i < keys; i += 4)
        back_to_before(k + i, decay + i, before + i * values, grad + i * values, entered, dk + i, of_decay + i, values,
                       is_delta);
    for (i64 i = 0; i < keys; i++) all += of_decay[i];
    if (decays == 1)
        *dg = all;
    else
        memcpy(dg, of_decay, sizeof(float) * (size_t)keys);
    *dbeta = of_beta;
}

// The gradients of `delta_rows` for q, k, v, log_decay, beta and, in place of `grad`, for the state before all rows: of
// those for y, `dy`, and for the state after them, `grad`. dq and dk are zeros [batch, length, key_heads, keys]. States
// between the `kept` ones are computed again, into `room`, of (every + 1) states and 2 * every rows of values a thread.
void delta_rows_back(const number *q, const number *k, const number *v, const float *log_decay, const number *beta,
                     const float *kept, const number *dy, float *grad, float *dq, float *dk, number *dv, float *dg,
                     float *dbeta, float *room, i64 every, i64 batch, i64 length, i64 heads, i64 key_heads, i64 keys,
                     i64 values, i64 decays, float scale, int is_normed, int is_delta, int threads) {
    i64 size = keys * values, share = heads / key_heads, width = every * (size + 2 * values) + size;
#pragma omp parallel for collapse(2) num_threads(threads) if (parallel : threads > 1)
    for (i64 b = 0; b < batch; b++)
        for (i64 g = 0; g < key_heads; g++) {
            float asked[MOST], key[MOST], decay[MOST], decayed[MOST], *states = room + omp_get_thread_num() * width;
            float *missed = states + (every + 1) * size, *learned = missed + every * values;
            for (i64 h = g * share; h < (g + 1) * share; h++)
                for (i64 begin = (length - 1) / every * every; begin >= 0; begin -= every) {
                    i64 count = length - begin < every ? length - begin : every;
                    memcpy(states, kept + ((begin / every * batch + b) * heads + h) * size, sizeof(float) * (size_t)size);
                    for (i64 t = 0; t < count; t++) {
                        i64 row = b * length + begin + t, to = row * heads + h;
                        float own = widen(beta[to]), *s = states + t * size;
                        float *m = missed + t * values, *l = learned + t * values;
                        widened(k + (row * key_heads + g) * keys, key, keys, 1.0f, is_normed);
                        decays_of(log_decay + to * decays, decays, decay, keys);
                        for (i64 i = 0; i < keys; i++) decayed[i] = decay[i] * key[i];
                        if (is_delta)
                            missed_of(decayed, v + to * values, s, m, keys, values);
                        else
                            for (i64 j = 0; j < values; j++) m[j] = widen(v[to * values + j]);
                        for (i64 j = 0; j < values; j++) l[j] = own * m[j];
                        for (i64 i = 0; i < keys; i++) {
#pragma omp simd
                            for (i64 j = 0; j < values; j++)
                                s[size + i * values + j] = decay[i] * s[i * values + j] + key[i] * l[j];
                        }
                    }
                    for (i64 t = count - 1; t >= 0; t--) {
                        i64 row = b * length + begin + t, at = (row * key_heads + g) * keys, to = row * heads + h;
                        const float *s = states + t * size;
                        widened(q + at, asked, keys, scale, is_normed);
                        widened(k + at, key, keys, 1.0f, is_normed);
                        decays_of(log_decay + to * decays, decays, decay, keys);
                        delta_rule_back(asked, key, dy + to * values, decay, widen(beta[to]), s, s + size,
                                        learned + t * values, missed + t * values, grad + (b * heads + h) * size, dq + at,
                                        dk + at, dv + to * values, dg + to * decays, dbeta + to, keys, values, decays,
                                        is_delta);
                    }
                }
            for (i64 t = 0; t < length; t++) {
                i64 at = ((b * length + t) * key_heads + g) * keys;
                widened_back(q + at, dq + at, dq + at, keys, scale, is_normed);
                widened_back(k + at, dk + at, dk + at, keys, 1.0f, is_normed);
            }
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

INLINE float silu_slope(float x) {
    float share = 1.0f / (1.0f + exponential(-x));
    return share * (1.0f + x * (1.0f - share));
}

// The gradients of `rms_norm_gated` for x and the gate, dense [rows, groups, size], of that for its output. The weight is
// frozen.
void rms_norm_gated_back(const number *grad, const number *x, const number *gate, i64 gate_stride, const number *w,
                         number *dx, number *dgate, i64 rows, i64 groups, i64 size, float eps, int is_gated_first,
                         int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *v = malloc(sizeof(float) * (size_t)(2 * size)), *e = v + size;  // what is normed; the gradient of that normed
#pragma omp for collapse(2)
        for (i64 i = 0; i < rows; i++)
            for (i64 g = 0; g < groups; g++) {
                i64 at = (i * groups + g) * size;
                const number *from = x + at, *by = gate + i * gate_stride + g * size, *of = grad + at;
                const number *weight = w + g * size;
                float squares = 0.0f, products = 0.0f;
#pragma omp simd reduction(+ : squares, products)
                for (i64 j = 0; j < size; j++) {
                    float open = silu(widen(by[j]));
                    v[j] = widen(from[j]) * (is_gated_first ? open : 1.0f);
                    e[j] = widen(of[j]) * widen(weight[j]) * (is_gated_first ? 1.0f : open);
                    squares += v[j] * v[j];
                    products += v[j] * e[j];
                }
                float scale = 1.0f / sqrtf(squares / (float)size + eps);
                float owed = products * scale * scale * scale / (float)size;
#pragma omp simd
                for (i64 j = 0; j < size; j++) {
                    float own = e[j] * scale - v[j] * owed, opening = silu_slope(widen(by[j]));
                    float normed = rounded(rounded(v[j] * scale) * widen(weight[j]));
                    dx[at + j] = narrow(is_gated_first ? own * silu(widen(by[j])) : own);
                    dgate[at + j] = narrow((is_gated_first ? own * widen(from[j]) : widen(of[j]) * normed) * opening);
                }
            }
        free(v);
    }
}
