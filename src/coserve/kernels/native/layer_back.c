// A decoder layer's way back in float32 in three calls, before, between and after attention and its way back, which are the
// caller's. What no gradient needs is not computed: keys and values, which the caller has, and the layer's output.

#include "layer.h"

#ifdef COSERVE_FLOAT32
#include <stdlib.h>

#include "vector.h"

// Of a tile: rows, vectors of inputs, outputs.
enum { LANES = sizeof(vector) / sizeof(float), TALL = 4, WIDE = 16 / LANES, DEEP = 128 };

// Where the gradients of a linear's segments go.
typedef struct {
    float *const *of_a, *const *of_b;
} Gradients;

typedef struct {
    Gradients query, key, value, out, gate, up, down;
} LayerGradients;

typedef struct {
    i64 rows, grain;
    int threads;
} Step;

static int threads_for(const Step *step, i64 numbers) { return numbers >= step->grain ? step->threads : 1; }
static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }

INLINE vector loaded(const float *x) {
    vector y;
    memcpy(&y, x, sizeof y);
    return y;
}

// WIDE vectors of y for `tall` rows (+)= grad times outputs [0, deep) of a weight [outs, ins].
INLINE void back_tile(const int tall, const float *grad, i64 outs, const float *w, i64 ins, i64 deep,
                      int is_first, float *y) {
    vector s[TALL][WIDE];
    for (int m = 0; m < tall; m++)
        for (int n = 0; n < WIDE; n++) s[m][n] = is_first ? (vector){0} : loaded(y + m * ins + n * LANES);
    for (i64 o = 0; o < deep; o++) {
        vector c[WIDE];
        for (int n = 0; n < WIDE; n++) c[n] = loaded(w + o * ins + n * LANES);
        for (int m = 0; m < tall; m++)
            for (int n = 0; n < WIDE; n++) s[m][n] += grad[m * outs + o] * c[n];
    }
    for (int m = 0; m < tall; m++)
        for (int n = 0; n < WIDE; n++) memcpy(y + m * ins + n * LANES, &s[m][n], sizeof(vector));
}

// y [rows, ins] = grad [rows, outs] times the weight [outs, ins], whose inputs are a multiple of 16.
static void times(const float *grad, const float *weight, i64 outs, i64 ins, float *y, int adds, const Step *step) {
    i64 rows = step->rows;
#pragma omp parallel for num_threads(step->threads) if (parallel : step->threads > 1)
    for (i64 i = 0; i < ins; i += WIDE * LANES)
        for (i64 o = 0; o < outs; o += DEEP)
            for (i64 m = 0; m < rows; m += TALL) {
                const float *from = grad + m * outs + o, *w = weight + o * ins + i;
                float *to = y + m * ins + i;
                i64 deep = least(DEEP, outs - o);
                int is_first = o == 0 && !adds;
                if (rows - m >= TALL)
                    back_tile(TALL, from, outs, w, ins, deep, is_first, to);
                else
                    for (i64 n = 0; n < rows - m; n++)
                        back_tile(1, from + n * outs, outs, w, ins, deep, is_first, to + n * ins);
            }
}

// y = the linear's output of x [rows, ins].
static void forward(const Linear *of, const Bypass *added, const float *x, i64 ins, float *y, const Step *step) {
    linear(x, ins, of->packed, of->bias, y, step->rows, ins, of->outputs, step->threads);
    if (added->count > 0) add_lora(x, ins, added->segments, added->count, y, ins, of->outputs, step->threads);
}

// The gradient for x [rows, ins], or with `adds` more of it, from that of the output; null where it is not needed.
static void back(const Linear *of, const Bypass *added, const Gradients *to, const float *x, const float *grad, i64 ins,
                 float *of_x, int adds, const Step *step) {
    if (of_x != NULL) times(grad, of->packed, of->outputs, ins, of_x, adds, step);
    if (added->count > 0)
        lora_back(x, ins, grad, added->segments, added->count, to->of_a, to->of_b, of_x, ins, of->outputs, step->threads);
}

static void norm(const float *x, const Norm *of, float *y, const Step *step, i64 hidden) {
    rms_norm(x, of->weight, y, step->rows, hidden, of->eps, of->is_centred, threads_for(step, step->rows * hidden));
}

static void norm_back(const float *grad, const float *x, const Norm *of, float *of_x, const Step *step, i64 hidden) {
    rms_norm_back(grad, x, of->weight, of_x, step->rows, hidden, of->eps, of->is_centred,
                  threads_for(step, step->rows * hidden));
}

// y += x.
static void add(const float *x, float *y, i64 count) {
#pragma omp simd
    for (i64 i = 0; i < count; i++) y[i] += x[i];
}

// The queries of x [rows, hidden] with the rotary embedding: q [rows, heads, width].
void layer_queries(const Layer *layer, const Bypasses *added, const float *x, const float *cosine, const float *sine, float *q,
                   i64 rows, i64 grain, int threads) {
    Step step = {rows, grain, threads};
    i64 hidden = layer->hidden, of_q = layer->query.outputs, width = layer->attention.width;
    float *normed = malloc(sizeof(float) * (size_t)(rows * (hidden + of_q)));
    float *plain = normed + rows * hidden;
    norm(x, &layer->first, normed, &step, hidden);
    forward(&layer->query, &added->query, normed, hidden, plain, &step);
    rotate(plain, of_q, width, cosine, sine, q, rows, layer->attention.heads, width, threads_for(&step, rows * of_q));
    free(normed);
}

// From x and what attention gave, `attended` [rows, heads * width], and the gradient of the layer's output: the gradients
// of `attended`, and of x by the way beside attention; and those of bypasses after it.
void layer_back_after(const Layer *layer, const Bypasses *added, const float *x, const float *attended, const float *grad,
                      const LayerGradients *found, float *of_attended, float *of_x, i64 rows, i64 grain, int threads) {
    Step step = {rows, grain, threads};
    i64 hidden = layer->hidden, inner = layer->gate.outputs, of_q = layer->query.outputs;
    float *middle = malloc(sizeof(float) * (size_t)(rows * (3 * hidden + 5 * inner)));
    float *normed = middle + rows * hidden, *of_normed = normed + rows * hidden, *gate = of_normed + rows * hidden;
    float *up = gate + rows * inner, *product = up + rows * inner, *of_product = product + rows * inner;
    float *of_gate = of_product + rows * inner, *of_up = product;
    forward(&layer->out, &added->out, attended, of_q, middle, &step);
    add(x, middle, rows * hidden);
    norm(middle, &layer->second, normed, &step, hidden);
    forward(&layer->gate, &added->gate, normed, hidden, gate, &step);
    forward(&layer->up, &added->up, normed, hidden, up, &step);
    silu_mul(gate, up, product, rows * inner, threads_for(&step, rows * inner));

    back(&layer->down, &added->down, &found->down, product, grad, inner, of_product, 0, &step);
    silu_mul_back(of_product, gate, up, of_gate, of_up, rows * inner, threads_for(&step, rows * inner));
    back(&layer->gate, &added->gate, &found->gate, normed, of_gate, hidden, of_normed, 0, &step);
    back(&layer->up, &added->up, &found->up, normed, of_up, hidden, of_normed, 1, &step);
    norm_back(of_normed, middle, &layer->second, of_x, &step, hidden);
    add(grad, of_x, rows * hidden);
    back(&layer->out, &added->out, &found->out, attended, of_x, of_q, of_attended, 0, &step);
    free(middle);
}

// From x and the gradients of queries and keys [rows, heads, width] with strides, and of values [rows, groups * width]:
// those of the bypasses before attention, and added to `of_x` that for x, where it is not null.
void layer_back_before(const Layer *layer, const Bypasses *added, const float *x, const float *of_q, i64 q_row, i64 q_head,
                       const float *of_k, i64 k_row, i64 k_head, const float *of_v, const float *cosine, const float *sine,
                       const LayerGradients *found, float *of_x, i64 rows, i64 grain, int threads) {
    Step step = {rows, grain, threads};
    const Attention *shape = &layer->attention;
    i64 hidden = layer->hidden, q_width = layer->query.outputs, k_width = layer->key.outputs, width = shape->width;
    float *normed = malloc(sizeof(float) * (size_t)(rows * (3 * hidden + q_width + k_width)));
    float *sum = normed + rows * hidden, *of_normed = sum + rows * hidden, *q = of_normed + rows * hidden;
    float *k = q + rows * q_width, *to = of_x == NULL ? NULL : of_normed;
    norm(x, &layer->first, normed, &step, hidden);
    rotate_back(of_q, q_row, q_head, cosine, sine, q, rows, shape->heads, width, threads_for(&step, rows * q_width));
    rotate_back(of_k, k_row, k_head, cosine, sine, k, rows, shape->groups, width, threads_for(&step, rows * k_width));
    back(&layer->query, &added->query, &found->query, normed, q, hidden, to, 0, &step);
    back(&layer->key, &added->key, &found->key, normed, k, hidden, to, 1, &step);
    back(&layer->value, &added->value, &found->value, normed, of_v, hidden, to, 1, &step);
    if (of_x != NULL) {
        norm_back(of_normed, x, &layer->first, sum, &step, hidden);
        add(sum, of_x, rows * hidden);
    }
    free(normed);
}
#endif
