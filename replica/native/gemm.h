// Matrix products over weights packed in panels of 32 columns.
//
// Packed form of a weight W[N, K] (N padded to a multiple of 32 with zeros):
//   bf16:  [N / 32][K / 2][32][2]     pairs of k side by side, as the dot-product instruction wants them
//   float: [N / 32][K][32]
// One output element is one accumulator that meets k = 0, 1, 2, ... in order, whatever the number of rows in the call:
// that is the whole reason a row's result cannot depend on its batch.
#pragma once
#include "vec.h"

namespace shoal {

constexpr int PANEL = 32;
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;  // 24 accumulators of 32 registers
#else
constexpr int MAX_ROWS = 3;
#endif

template <typename T> struct Pack;

template <> struct Pack<float> {
    static constexpr int STEP = 1;
    typedef V Column;
    static inline Column column(const float* p) { return load(p); }
    static inline float row(const float* p) { return *p; }
    static inline V mul(V c, float a, Column b) { return fma(splat(a), b, c); }
};

template <> struct Pack<bf16> {
    static constexpr int STEP = 2;
#if defined(__AVX512BF16__)
    typedef __m512bh Column;
    static inline Column column(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static inline __m512bh row(const bf16* p) {
        int32_t pair;
        std::memcpy(&pair, p, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static inline V mul(V c, __m512bh a, Column b) { return (V)_mm512_dpbf16_ps((__m512)c, a, b); }
#else
    struct Column { V even, odd; };
    struct Row { float even, odd; };
    static inline Column column(const bf16* p) {
        U u = *(const Uu*)p;
        return {(V)(u << 16), (V)(u & 0xffff0000u)};
    }
    static inline Row row(const bf16* p) { return {to_float(p[0]), to_float(p[1])}; }
    static inline V mul(V c, Row a, Column b) { return fma(splat(a.odd), b.odd, fma(splat(a.even), b.even, c)); }
#endif
};

// c[R][2] += a[R][k] * panel[k][32]. `k` in elements, a multiple of Pack<T>::STEP.
template <typename T, int R>
static inline __attribute__((always_inline)) void accumulate(V (&c)[R][2], const T* a, size_t lda, const T* panel, int k) {
    constexpr int STEP = Pack<T>::STEP;
    for (int i = 0; i < k; i += STEP) {
        const T* b = panel + (size_t)i * PANEL;
        // 4 KiB ahead, into the second level: at few rows the weights stream from memory. All products of a step, ms of
        // one core with 1, 8, 32 rows (Zen 4): 10.7, 12.4, 40.6; into the first level 11.8, 14.3, 43.7
        __builtin_prefetch((const char*)b + 4096, 0, 2);
        __builtin_prefetch((const char*)b + 4096 + 64, 0, 2);
        auto b0 = Pack<T>::column(b);
        auto b1 = Pack<T>::column(b + LANES * STEP);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            auto x = Pack<T>::row(a + r * lda + i);
            c[r][0] = Pack<T>::mul(c[r][0], x, b0);
            c[r][1] = Pack<T>::mul(c[r][1], x, b1);
        }
    }
}

template <typename T, int R, typename Epilogue>
static inline void tile(const T* a, size_t lda, const T* panel, int k, int row, int column, const Epilogue& epilogue) {
    V c[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) c[r][0] = c[r][1] = V{};
    accumulate<T, R>(c, a + (size_t)row * lda, lda, panel, k);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) epilogue(row + r, column, c[r][0], c[r][1]);
}

// Calls f with an integral constant equal to n, 1 <= n <= MAX_ROWS.
template <int N = MAX_ROWS, typename F> static inline void with_rows(int n, const F& f) {
    if constexpr (N == 1) {
        f(std::integral_constant<int, 1>{});
    } else {
        if (n == N) f(std::integral_constant<int, N>{});
        else with_rows<N - 1>(n, f);
    }
}

// This thread's share of out[m, n] = a[m, k] * W^T, handed to `epilogue(row, column, V, V)` 32 columns at a time.
// The (panel, row tile) pairs are cut into equal runs, so 15 panels on 2 threads do not cost 8.
template <typename T, typename Epilogue>
static void gemm(const T* a, size_t lda, int m, int k, const T* packed, int n, int thread, int threads, const Epilogue& epilogue) {
    if (m == 0) return;
    const int panels = (n + PANEL - 1) / PANEL;
    const int tiles = (m + MAX_ROWS - 1) / MAX_ROWS;
    const int rows_per_tile = (m + tiles - 1) / tiles;
    const long units = (long)panels * tiles;
    long unit = units * thread / threads, end = units * (thread + 1) / threads;
    for (; unit < end; unit++) {
        int p = (int)(unit / tiles), row = (int)(unit % tiles) * rows_per_tile;
        int rows = m - row < rows_per_tile ? m - row : rows_per_tile;
        if (rows <= 0) continue;
        const T* panel = packed + (size_t)p * PANEL * k;
        with_rows(rows, [&](auto r) { tile<T, decltype(r)::value>(a, lda, panel, k, row, p * PANEL, epilogue); });
    }
}

// Rows [num_rows, words] of 4 bytes a word into lanes [lane, lane + width) of panels, `width` rows to a panel. Sixteen words
// of each row in turn: one cache line read, and 16 lines written that stay in the first level.
static inline void pack_rows(const uint32_t* rows, int64_t num_rows, int64_t words, uint32_t* panels, int width, int lane) {
    constexpr int64_t BLOCK = 16;
    for (int64_t first = 0; first < num_rows; first += width) {
        uint32_t* panel = panels + first / width * words * PANEL + lane;
        const int64_t count = num_rows - first < width ? num_rows - first : width;
        for (int64_t block = 0; block < words; block += BLOCK) {
            const int64_t end = words - block < BLOCK ? words : block + BLOCK;
            for (int64_t r = 0; r < count; r++)
                for (int64_t k = block; k < end; k++) panel[k * PANEL + r] = rows[(first + r) * words + k];
        }
    }
}

// Row `row` of a packed W[N, k] in float32: 4 bytes of every 128.
template <typename T> static inline void gather_row(const T* packed, int row, int k, float* out) {
    constexpr int STEP = Pack<T>::STEP;
    const T* from = packed + (size_t)(row / PANEL) * PANEL * k + (size_t)(row % PANEL) * STEP;
    for (int i = 0; i < k; i += STEP)
        for (int j = 0; j < STEP; j++) out[i + j] = widen(from[(size_t)i * PANEL + j]);
}

}  // namespace shoal
