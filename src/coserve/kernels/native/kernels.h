#ifndef COSERVE_KERNELS_H
#define COSERVE_KERNELS_H

#include "number.h"

void rms_norm(const number *x, const number *w, number *y, i64 rows, i64 width, float eps, int centred, int threads);

void rotate(const number *x, i64 row_stride, i64 head_stride, const number *cosine, const number *sine, number *y,
            i64 rows, i64 heads, i64 width, int threads);

void silu_mul(const number *gate, const number *up, number *y, i64 count, int threads);

void write_slots(const number *x, i64 group_stride, i64 row_stride, const i64 *slots, number *pool, i64 places,
                 i64 groups, i64 rows, i64 width, int threads);

void attend_pages(const number *q, i64 row_stride, i64 head_stride, const number *keys, const number *values,
                  i64 slots, const i64 *tables, i64 pages, i64 page_size, const i64 *lengths, i64 window,
                  i64 batch, i64 heads, i64 groups, i64 key_width, i64 value_width, float scale, number *out,
                  int threads);

void linear(const number *x, i64 stride, const number *packed, const number *bias, number *y, i64 rows, i64 ins, i64 outs,
            int threads);

void unpack_columns(const number *packed, number *to, i64 outs, i64 ins, i64 panel, i64 begin, i64 count, int threads);

// Whether the processor has tile registers (AMX) that this process may use.
int has_tiles(void);

// Whether `attend_chunks` computes heads of these widths.
int attends_chunks(i64 key_width, i64 value_width);

// Causal attention of q [batch, heads, rows, key_width], whose rows are the last positions of k [batch, groups, length,
// key_width] and v [batch, groups, length, value_width], each with its three outer strides; out [batch, rows, heads,
// value_width] and, if it is not null, the log-sum-exp of each query's scores, lse [batch, heads, rows]. A query attends
// to `window` keys at most, to all where that is 0.
void attend_chunks(const number *q, const i64 *q_strides, const number *k, const i64 *k_strides, const number *v,
                   const i64 *v_strides, i64 batch, i64 heads, i64 groups, i64 rows, i64 length, i64 key_width,
                   i64 value_width, float scale, i64 window, number *out, float *lse, int threads);

// Whether `attend_chunks_back` computes heads of these widths.
int goes_back_chunks(i64 key_width, i64 value_width);

// The gradients of `attend_chunks` for q, dq [batch, rows, heads, key_width], and for k and v, dense [batch, groups,
// length, width], from that of its output, the output [batch, heads, rows, value_width], each with its three outer
// strides, and the log-sum-exp. Weights are computed again.
void attend_chunks_back(const number *grad, const i64 *grad_strides, const number *q, const i64 *q_strides, const number *k,
                        const i64 *k_strides, const number *v, const i64 *v_strides, const number *out,
                        const i64 *out_strides, const float *lse, i64 batch, i64 heads, i64 groups, i64 rows,
                        i64 length, i64 key_width, i64 value_width, float scale, i64 window, number *dq, number *dk,
                        number *dv, int threads);

enum { TILE_PANEL = 32 };  // outputs of a packed weight that lie together where there are tiles

// As `linear`, with the weight in panels of TILE_PANEL outputs.
void linear_by_tiles(const number *x, i64 stride, const number *packed, const number *bias, number *y, i64 rows, i64 ins,
                     i64 outs, int threads);

void linear_unpacked(const number *x, i64 stride, const number *weight, const number *bias, number *y, i64 rows, i64 ins,
                     i64 outs, int threads);

// As `linear_unpacked`; `outs` is a multiple of TILE_PANEL.
void linear_unpacked_by_tiles(const number *x, i64 stride, const number *weight, const number *bias, number *y, i64 rows,
                              i64 ins, i64 outs, int threads);

// Rows [begin, end) with a low-rank bypass: a [rank, ins], b [outs, rank]; with biases [rank] and [outs] or null. Where
// `rectifies`, negative numbers between the two matrices become zero.
typedef struct {
    const number *a, *b, *a_bias, *b_bias;
    i64 begin, end, rank;
    float scale;
    int rectifies;
} Segment;

// x and y may be the same.
void add_lora(const number *x, i64 stride, const Segment *segments, i64 count, number *y, i64 ins, i64 outs, int threads);

// See lora_back.c; in float32 alone.
void lora_back(const number *x, i64 stride, const number *grad, const Segment *segments, i64 count, number *const *of_a,
               number *const *of_b, number *of_x, i64 ins, i64 outs, int threads);

void rms_norm_back(const number *grad, const number *x, const number *w, number *dx, i64 rows, i64 width, float eps,
                   int centred, int threads);

void silu_mul_back(const number *grad, const number *gate, const number *up, number *dgate, number *dup, i64 count,
                   int threads);

void rotate_back(const number *grad, i64 row_stride, i64 head_stride, const number *cosine, const number *sine, number *dx,
                 i64 rows, i64 heads, i64 width, int threads);

#endif
