#ifndef COSERVE_KERNELS_H
#define COSERVE_KERNELS_H

#include "bfloat16.h"

void rms_norm(const bf16 *x, const bf16 *w, bf16 *y, i64 rows, i64 width, float eps, int centred, int threads);

void rotate(const bf16 *x, i64 row_stride, i64 head_stride, const bf16 *cosine, const bf16 *sine, bf16 *y,
            i64 rows, i64 heads, i64 width, int threads);

void silu_mul(const bf16 *gate, const bf16 *up, bf16 *y, i64 count, int threads);

void write_slots(const bf16 *x, i64 group_stride, i64 row_stride, const i64 *slots, bf16 *pool, i64 places,
                 i64 groups, i64 rows, i64 width, int threads);

void attend_pages(const bf16 *q, i64 row_stride, i64 head_stride, const bf16 *keys, const bf16 *values,
                  i64 slots, const i64 *tables, i64 pages, i64 page_size, const i64 *lengths, i64 window,
                  i64 batch, i64 heads, i64 groups, i64 key_width, i64 value_width, float scale, bf16 *out,
                  int threads);

void linear(const bf16 *x, i64 stride, const bf16 *packed, const bf16 *bias, bf16 *y, i64 rows, i64 ins, i64 outs,
            int threads);

void unpack_columns(const bf16 *packed, bf16 *to, i64 outs, i64 ins, i64 panel, i64 begin, i64 count, int threads);

// Whether the processor has tile registers (AMX) that this process may use.
int has_tiles(void);

// Whether `attend_chunks` computes heads of these widths.
int attends_chunks(i64 key_width, i64 value_width);

// Causal attention of q [batch, heads, rows, key_width], whose rows are the last positions of k [batch, groups, length,
// key_width] and v [batch, groups, length, value_width], each with its three outer strides; out [batch, rows, heads,
// value_width] and, if it is not null, the log-sum-exp of each query's scores, lse [batch, heads, rows]. A query attends
// to `window` keys at most, to all where that is 0.
void attend_chunks(const bf16 *q, const i64 *q_strides, const bf16 *k, const i64 *k_strides, const bf16 *v,
                   const i64 *v_strides, i64 batch, i64 heads, i64 groups, i64 rows, i64 length, i64 key_width,
                   i64 value_width, float scale, i64 window, bf16 *out, float *lse, int threads);

// Whether `attend_chunks_back` computes heads of these widths.
int goes_back_chunks(i64 key_width, i64 value_width);

// The gradients of `attend_chunks` for q, dq [batch, rows, heads, key_width], and for k and v, dense [batch, groups,
// length, width], from that of its output, the output [batch, heads, rows, value_width], each with its three outer
// strides, and the log-sum-exp. Weights are computed again.
void attend_chunks_back(const bf16 *grad, const i64 *grad_strides, const bf16 *q, const i64 *q_strides, const bf16 *k,
                        const i64 *k_strides, const bf16 *v, const i64 *v_strides, const bf16 *out,
                        const i64 *out_strides, const float *lse, i64 batch, i64 heads, i64 groups, i64 rows,
                        i64 length, i64 key_width, i64 value_width, float scale, i64 window, bf16 *dq, bf16 *dk,
                        bf16 *dv, int threads);

enum { TILE_PANEL = 32 };  // outputs of a packed weight that lie together where there are tiles

// As `linear`, with the weight in panels of TILE_PANEL outputs.
void linear_by_tiles(const bf16 *x, i64 stride, const bf16 *packed, const bf16 *bias, bf16 *y, i64 rows, i64 ins,
                     i64 outs, int threads);

void linear_unpacked(const bf16 *x, i64 stride, const bf16 *weight, const bf16 *bias, bf16 *y, i64 rows, i64 ins,
                     i64 outs, int threads);

// As `linear_unpacked`; `outs` is a multiple of TILE_PANEL.
void linear_unpacked_by_tiles(const bf16 *x, i64 stride, const bf16 *weight, const bf16 *bias, bf16 *y, i64 rows,
                              i64 ins, i64 outs, int threads);

// Rows [begin, end) with a low-rank bypass: a [rank, ins], b [outs, rank]; with biases [rank] and [outs] or null. Where
// `rectifies`, negative numbers between the two matrices become zero.
typedef struct {
    const bf16 *a, *b, *a_bias, *b_bias;
    i64 begin, end, rank;
    float scale;
    int rectifies;
} Segment;

// x and y may be the same.
void add_lora(const bf16 *x, i64 stride, const Segment *segments, i64 count, bf16 *y, i64 ins, i64 outs, int threads);

#endif
