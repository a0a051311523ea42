// Mamba 1's recurrence for several rows of each sequence, and its gradients: each channel has a few states, each of which
// decays by itself. See recurrent.py for shapes; the plain twin is in ../recurrent.py.
//
// Each row is computed alone and in one order, wherever a sequence is cut.

#include <string.h>

#include "number.h"
#include "kernels.h"
#include "vector.h"
#include "exponential.h"

enum { BLOCK = 16, MOST_STATES = 256 };  // channels whose states stay in the first cache; states of a channel

INLINE void widen_row(const number *x, float *to, i64 count) {
#pragma omp simd
    for (i64 n = 0; n < count; n++) to[n] = widen(x[n]);
}

// A channel's states [states] decay by exp(step * a) each, which `decay` gets, and `entering` times `in` is added.
INLINE void step_states(const float *from, float *to, float *decay, const float *a, const float *in, float step,
                        float entering, i64 states) {
#pragma omp simd
    for (i64 n = 0; n < states; n++) {
        decay[n] = exponential(step * a[n]);
        to[n] = from[n] * decay[n] + entering * in[n];
    }
}

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }

// x and dt [batch, length, channels], a [channels, states], b and c [batch, length, states]; states `from`, or null for
// zeros, and `to` [batch, channels, states]. `kept` gets those before every `every` rows, unless it is null.
void scan_rows(const number *x, const float *dt, const float *a, const number *b, const number *c, const float *from,
               float *to, number *y, float *kept, i64 every, i64 batch, i64 length, i64 channels, i64 states,
               int threads) {
    i64 blocks = (channels + BLOCK - 1) / BLOCK;
#pragma omp parallel for collapse(2) num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < batch; i++)
        for (i64 block = 0; block < blocks; block++) {
            i64 first = block * BLOCK, count = least(BLOCK, channels - first), size = count * states;
            float in[MOST_STATES], asked[MOST_STATES], decay[MOST_STATES];
            float *state = to + (i * channels + first) * states;
            if (from)
                memcpy(state, from + (i * channels + first) * states, sizeof(float) * (size_t)size);
            else
                memset(state, 0, sizeof(float) * (size_t)size);
            for (i64 t = 0; t < length; t++) {
                i64 row = i * length + t, at = row * channels + first;
                if (kept && t % every == 0)
                    memcpy(kept + ((t / every * batch + i) * channels + first) * states, state,
                           sizeof(float) * (size_t)size);
                widen_row(b + row * states, in, states);
                widen_row(c + row * states, asked, states);
                for (i64 j = 0; j < count; j++) {
                    float step = dt[at + j], *s = state + j * states, sum = 0.0f;
                    step_states(s, s, decay, a + (first + j) * states, in, step, step * widen(x[at + j]), states);
#pragma omp simd reduction(+ : sum)
                    for (i64 n = 0; n < states; n++) sum += s[n] * asked[n];
                    y[at + j] = narrow(sum);
                }
            }
        }
}

// The gradients of `scan_rows` for x, dt, b, c and, in place of `grad`, for the states before all rows: of those for y,
// `dy`, and for the states after them, `grad`. Each of `parts` threads has some channels, and adds to db and dc [parts,
// batch, length, states] of its own, which are zeros. States between the `kept` ones and decays are computed again, into
// `room`, of (2 * every + 1) * BLOCK * states a part.
void scan_rows_back(const number *x, const float *dt, const float *a, const number *b, const number *c,
                    const float *kept, const number *dy, float *grad, number *dx, float *ddt, float *db, float *dc,
                    float *room, i64 every, i64 batch, i64 length, i64 channels, i64 states, int parts) {
    i64 blocks = (channels + BLOCK - 1) / BLOCK, size = BLOCK * states;
#pragma omp parallel for num_threads(parts) if (parallel : parts > 1)
    for (i64 part = 0; part < parts; part++) {
        float in[MOST_STATES], asked[MOST_STATES];
        float *held = room + part * (2 * every + 1) * size, *decays = held + (every + 1) * size;
        for (i64 i = 0; i < batch; i++)
            for (i64 block = part * blocks / parts; block < (part + 1) * blocks / parts; block++) {
                i64 first = block * BLOCK, count = least(BLOCK, channels - first);
                float *g = grad + (i * channels + first) * states;
                for (i64 begin = (length - 1) / every * every; begin >= 0; begin -= every) {
                    i64 rows = least(every, length - begin);
                    memcpy(held, kept + ((begin / every * batch + i) * channels + first) * states,
                           sizeof(float) * (size_t)(count * states));
                    for (i64 t = 0; t < rows; t++) {
                        i64 row = i * length + begin + t, at = row * channels + first;
                        widen_row(b + row * states, in, states);
                        for (i64 j = 0; j < count; j++) {
                            float step = dt[at + j], *s = held + t * size + j * states;
                            step_states(s, s + size, decays + t * size + j * states, a + (first + j) * states, in, step,
                                        step * widen(x[at + j]), states);
                        }
                    }
                    for (i64 t = rows - 1; t >= 0; t--) {
                        i64 row = i * length + begin + t, at = row * channels + first;
                        float *of_b = db + ((part * batch + i) * length + begin + t) * states;
                        float *of_c = dc + ((part * batch + i) * length + begin + t) * states;
                        widen_row(b + row * states, in, states);
                        widen_row(c + row * states, asked, states);
                        for (i64 j = 0; j < count; j++) {
                            const float *before = held + t * size + j * states, *after = before + size;
                            const float *decay = decays + t * size + j * states, *own_a = a + (first + j) * states;
                            float own_dy = widen(dy[at + j]), own_x = widen(x[at + j]), step = dt[at + j];
                            float entering = step * own_x, of_in = 0.0f, of_step = 0.0f, *own_g = g + j * states;
#pragma omp simd reduction(+ : of_in, of_step)
                            for (i64 n = 0; n < states; n++) {
                                float own = own_g[n] + own_dy * asked[n];
                                of_c[n] += own_dy * after[n];
                                of_b[n] += own * entering;
                                of_in += own * in[n];
                                own *= decay[n];
                                of_step += own * before[n] * own_a[n];
                                own_g[n] = own;
                            }
                            dx[at + j] = narrow(step * of_in);
                            ddt[at + j] = of_step + own_x * of_in;
                        }
                    }
                }
            }
    }
}
