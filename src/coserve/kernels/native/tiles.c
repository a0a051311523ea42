// Products with weights that oneDNN has packed into panels of 32 outputs, [outputs / 32][inputs / 2][32][2], as it does
// for processors with tile registers (AMX).
//
// Of the eight registers four hold sums of up to 32 rows by 32 outputs, two inputs and two weights, so a panel is read
// from memory once and the sums stay in registers over all inputs. Weights that are not packed, [outputs, inputs], are
// the first factor and inputs the second, of which pairs are turned for that: the sums are those of y^T.

#include <stdlib.h>

#include "number.h"
#include "kernels.h"
#include "tiles.h"
#include "transpose.h"

#ifdef COSERVE_TILES
#include <sys/syscall.h>
#include <unistd.h>

enum { AHEAD = 256, CACHED = 1 << 20 };  // inputs; bytes
enum { BLOCK = 2 * TALL, WEIGHT_BYTES = TILE_PANEL * 4, SUM_BYTES = TILE_PANEL * 4 };
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };  // of Linux's arch_prctl

// The shapes of the registers, as the processor reads them.
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Shapes;

int has_tiles(void) {
    static int found = -1;
    if (found < 0) found = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return found;
}

void configure_tiles(i64 height) {
    Shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64;
    uint8_t first = (uint8_t)(height < TALL ? height : TALL), second = (uint8_t)(height - first);
    uint8_t rows[8] = {first, first, second, second, first, second, TALL, TALL};
    for (int i = 0; i < 8; i++) shapes.rows[i] = rows[i] ? rows[i] : 1;
    __asm__ volatile("" : : "m"(shapes));  // GCC takes the next instruction to read 8 bytes of them
    _tile_loadconfig(&shapes);
}

// Fetches the weights that come AHEAD inputs later, of the next panel too, into the second cache: 32 rows of 1024x2816
// take 0.65 ms on one thread without and 0.57 with. Up to 16 rows are no faster with it.
static inline void fetch(const bf16 *w) {
    for (int i = 0; i < DEEP; i++) _mm_prefetch((const char *)(w + AHEAD * TILE_PANEL + i * TILE_PANEL), _MM_HINT_T1);
}

// Blocks of rows that pass all panels before the next ones do, so that they stay in the second cache: 2,048 rows of
// 1024x2816 take 10.5 ms all at once and 5.9 so.
static i64 blocks_at_once(i64 ins) {
    i64 found = CACHED / (BLOCK * ins * (i64)sizeof(bf16));
    return found > 1 ? found : 1;
}

// sums [height, TILE_PANEL] of a block's rows with a panel.
static void multiply(const bf16 *x, i64 stride, i64 height, const bf16 *w, i64 ins, float *sums) {
    i64 bytes = stride * (i64)sizeof(bf16);
    const bf16 *below = x + TALL * stride;
    _tile_zero(0);
    _tile_zero(1);
    if (height <= TALL) {
        for (i64 i = 0; i < ins; i += DEEP) {
            _tile_loadd(6, w + i * TILE_PANEL, WEIGHT_BYTES);
            _tile_loadd(7, w + i * TILE_PANEL + TILE_PANEL, WEIGHT_BYTES);
            _tile_loadd(4, x + i, bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        _tile_zero(2);
        _tile_zero(3);
        for (i64 i = 0; i < ins; i += DEEP) {
            fetch(w + i * TILE_PANEL);
            _tile_loadd(6, w + i * TILE_PANEL, WEIGHT_BYTES);
            _tile_loadd(7, w + i * TILE_PANEL + TILE_PANEL, WEIGHT_BYTES);
            _tile_loadd(4, x + i, bytes);
            _tile_loadd(5, below + i, bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums + TALL * TILE_PANEL, SUM_BYTES);
        _tile_stored(3, sums + TALL * TILE_PANEL + TILE_PANEL / 2, SUM_BYTES);
    }
    _tile_stored(0, sums, SUM_BYTES);
    _tile_stored(1, sums + TILE_PANEL / 2, SUM_BYTES);
}

void linear_by_tiles(const bf16 *x, i64 stride, const bf16 *packed, const bf16 *bias, bf16 *y, i64 rows, i64 ins,
                     i64 outs, int threads) {
    i64 panels = outs / TILE_PANEL, blocks = (rows + BLOCK - 1) / BLOCK, most = blocks_at_once(ins);
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        float sums[BLOCK * TILE_PANEL] __attribute__((aligned(64)));
        i64 configured = 0;
        for (i64 top = 0; top < blocks; top += most)
#pragma omp for nowait
            for (i64 panel = 0; panel < panels; panel++) {
                const bf16 *added = bias == NULL ? NULL : bias + panel * TILE_PANEL;
                for (i64 block = top; block < blocks && block < top + most; block++) {
                    i64 begin = rows * block / blocks, height = rows * (block + 1) / blocks - begin;
                    if (height != configured) configure_tiles(configured = height);
                    multiply(x + begin * stride, stride, height, packed + panel * ins * TILE_PANEL, ins, sums);
                    for (i64 m = 0; m < height; m++) {
                        bf16 *to = y + (begin + m) * outs + panel * TILE_PANEL;
                        for (i64 n = 0; n < TILE_PANEL; n++)
                            to[n] = narrow(sums[m * TILE_PANEL + n] + (added == NULL ? 0.0f : widen(added[n])));
                    }
                }
            }
        if (configured) _tile_release();
    }
}

// Pairs of inputs [ins / 2][TALL] of up to TALL rows; those of further rows are zeros.
static void turn_rows(const bf16 *x, i64 stride, i64 rows, i64 ins, int32_t *to) {
    for (i64 i = 0; i < ins; i += DEEP) {
        __m512i pairs[TALL];
#pragma GCC unroll 16
        for (int m = 0; m < TALL; m++)
            pairs[m] = m < rows ? _mm512_loadu_si512(x + m * stride + i) : _mm512_setzero_si512();
        transpose(TALL, pairs);
#pragma GCC unroll 16
        for (int p = 0; p < TALL; p++) _mm512_store_si512(to + (i / 2 + p) * TALL, pairs[p]);
    }
}

// sums [2 halves of TILE_PANEL outputs][2 blocks][TALL outputs][TALL rows] of turned rows with outputs of a weight; of
// the first block alone where it is the last.
static void multiply_unpacked(const bf16 *w, i64 ins, const int32_t *turned, int is_last, float *sums) {
    i64 bytes = ins * (i64)sizeof(bf16);
    const bf16 *low = w + TALL * ins;
    const int32_t *below = turned + ins / 2 * TALL;
    _tile_zero(0);
    _tile_zero(2);
    if (is_last) {
        for (i64 i = 0; i < ins; i += DEEP) {
            _tile_loadd(6, turned + i / 2 * TALL, SUM_BYTES / 2);
            _tile_loadd(4, w + i, bytes);
            _tile_loadd(5, low + i, bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
        }
    } else {
        _tile_zero(1);
        _tile_zero(3);
        for (i64 i = 0; i < ins; i += DEEP) {
            _tile_loadd(6, turned + i / 2 * TALL, SUM_BYTES / 2);
            _tile_loadd(7, below + i / 2 * TALL, SUM_BYTES / 2);
            _tile_loadd(4, w + i, bytes);
            _tile_loadd(5, low + i, bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(1, sums + TALL * TALL, SUM_BYTES / 2);
        _tile_stored(3, sums + 3 * TALL * TALL, SUM_BYTES / 2);
    }
    _tile_stored(0, sums, SUM_BYTES / 2);
    _tile_stored(2, sums + 2 * TALL * TALL, SUM_BYTES / 2);
}

// y [rows, TALL of outs] from sums [TALL outputs][TALL rows], rounded, plus bias [TALL] if it is not null.
static void write_turned(const float *sums, const bf16 *bias, bf16 *y, i64 rows, i64 outs) {
    __m512i each[TALL];
#pragma GCC unroll 16
    for (int n = 0; n < TALL; n++) each[n] = _mm512_load_si512(sums + n * TALL);
    transpose(TALL, each);
    __m512i bits = bias == NULL ? _mm512_setzero_si512()
                                : _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)bias)), 16);
#pragma GCC unroll 16
    for (int m = 0; m < TALL; m++)
        if (m < rows) {
            __m512 total = _mm512_add_ps(_mm512_castsi512_ps(each[m]), _mm512_castsi512_ps(bits));
            _mm256_storeu_si256((__m256i *)(y + m * outs), (__m256i)_mm512_cvtneps_pbh(total));
        }
}

void linear_unpacked_by_tiles(const bf16 *x, i64 stride, const bf16 *weight, const bf16 *bias, bf16 *y, i64 rows,
                              i64 ins, i64 outs, int threads) {
    i64 blocks = (rows + TALL - 1) / TALL, size = ins / 2 * TALL;  // numbers of a turned block
    i64 most = 2 * blocks_at_once(ins);
    int32_t *turned = aligned_alloc(64, sizeof(int32_t) * (size_t)(blocks * size));
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        float sums[4 * TALL * TALL] __attribute__((aligned(64)));
#pragma omp for
        for (i64 block = 0; block < blocks; block++) {
            i64 begin = block * TALL, left = rows - begin;
            turn_rows(x + begin * stride, stride, left < TALL ? left : TALL, ins, turned + block * size);
        }
        configure_tiles(BLOCK);
        for (i64 top = 0; top < blocks; top += most)
#pragma omp for nowait
            for (i64 out = 0; out < outs; out += TILE_PANEL)
                for (i64 block = top; block < blocks && block < top + most; block += 2) {
                    multiply_unpacked(weight + out * ins, ins, turned + block * size, block + 1 == blocks, sums);
                    for (i64 i = 0; i < 4; i++) {
                        i64 begin = (block + i % 2) * TALL, left = rows - begin, from = out + i / 2 * TALL;
                        if (left > 0)
                            write_turned(sums + i * TALL * TALL, bias == NULL ? NULL : bias + from,
                                         y + begin * outs + from, left < TALL ? left : TALL, outs);
                    }
                }
        _tile_release();
    }
    free(turned);
}
#else
int has_tiles(void) { return 0; }

void linear_by_tiles(const bf16 *x, i64 stride, const bf16 *packed, const bf16 *bias, bf16 *y, i64 rows, i64 ins,
                     i64 outs, int threads) {}

void linear_unpacked_by_tiles(const bf16 *x, i64 stride, const bf16 *weight, const bf16 *bias, bf16 *y, i64 rows,
                              i64 ins, i64 outs, int threads) {}
#endif
