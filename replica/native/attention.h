// Paged attention for a batch of query rows, decode and prefill chunks alike.
//
// Keys are reduced in pieces of 32 by absolute position (0..31, 32..63, ...), whatever the block size, each piece in one
// fixed order with an online softmax. A row meets exactly the same operations alone, in a chunk or beside other rows.
#pragma once
#include <vector>

#include "gemm.h"

namespace shoal {

constexpr int PIECE = 32;
// Query tokens that share one pass over K and V: at 8,000 keys 32 cost 8 % less than 8; 64 gain nothing more.
constexpr int TILE_QUERIES = 32;

struct KVLayout {
    int32_t block_size, head_dim;
    int64_t block_stride, head_stride, layer_stride, kv_stride;  // in elements; a token's stride is head_dim
};

struct AttentionItem {
    int32_t first_row, num_rows, first_position, kv_head;
    const int32_t* block_table;
};

// 16x16 transpose of 32-bit lanes: out[j][i] = in[i][j].
static inline void transpose16(const U (&in)[16], uint32_t* out, size_t out_stride) {
#if defined(__AVX512F__)
    __m512i t[16], u[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32((__m512i)in[2 * i], (__m512i)in[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)in[2 * i], (__m512i)in[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        u[4 * i + 0] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int j = 0; j < 4; j++) {  // 128-bit lane l of u[4 i + j] holds column 4 l + j of rows 4 i .. 4 i + 3
        __m512i a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88), b = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
        __m512i c = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd), d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
        _mm512_storeu_si512(out + (size_t)(0 + j) * out_stride, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(out + (size_t)(8 + j) * out_stride, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_storeu_si512(out + (size_t)(4 + j) * out_stride, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_storeu_si512(out + (size_t)(12 + j) * out_stride, _mm512_shuffle_i32x4(c, d, 0xdd));
    }
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) out[(size_t)j * out_stride + i] = in[i][j];
#endif
}

// Thread-private working memory; sized for the widest head and group met so far.
template <typename T> struct AttentionScratch {
    std::vector<char> bytes;
    T *keys, *values, *weights, *queries;
    float *scores, *acc, *row_max;
    V* row_sum;

    void reserve(int rows, int head_dim) {
        size_t need = 0;
        auto take = [&](size_t n) { size_t at = need; need += (n + 63) / 64 * 64; return at; };
        size_t k = take(sizeof(T) * PIECE * head_dim), v = take(sizeof(T) * PIECE * head_dim);
        size_t w = take(sizeof(T) * rows * PIECE), q = take(sizeof(T) * rows * head_dim);
        size_t s = take(4ul * rows * PIECE), a = take(4ul * rows * head_dim);
        size_t m = take(4ul * rows), l = take(64ul * rows);
        if (bytes.size() < need + 64) bytes.resize(need + 64);
        char* base = (char*)(((uintptr_t)bytes.data() + 63) & ~(uintptr_t)63);
        keys = (T*)(base + k), values = (T*)(base + v), weights = (T*)(base + w), queries = (T*)(base + q);
        scores = (float*)(base + s), acc = (float*)(base + a), row_max = (float*)(base + m), row_sum = (V*)(base + l);
    }
};

// Where the K rows (V: + kv_stride) of one piece lie; missing keys get nullptr.
template <typename T>
static inline void find_keys(const T** rows, const T* cache, const KVLayout& kv, const int32_t* table, int first, int count) {
    int i = 0;
    while (i < count) {
        int position = first + i, offset = position % kv.block_size;
        const T* row = cache + (int64_t)table[position / kv.block_size] * kv.block_stride + (int64_t)offset * kv.head_dim;
        for (; offset < kv.block_size && i < count; offset++, i++, row += kv.head_dim) rows[i] = row;
    }
    for (; i < PIECE; i++) rows[i] = nullptr;
}

// K of one piece as a panel: columns are the 32 keys, the reduction runs over head_dim.
template <typename T> static inline void pack_keys(T* panel, const T* const* rows, int head_dim) {
    const int words = head_dim * (int)sizeof(T) / 4;  // 32-bit words a key row
    for (int half = 0; half < 2; half++)
        for (int w = 0; w < words; w += 16) {
            U in[16];
            for (int i = 0; i < 16; i++) {
                const T* row = rows[half * 16 + i];
                in[i] = row ? *(const Uu*)((const uint32_t*)row + w) : U{};
            }
            transpose16(in, (uint32_t*)panel + (size_t)w * PIECE + half * 16, PIECE);
        }
}

// V of one piece as head_dim / 32 panels: columns are 32 dims, the reduction runs over the 32 keys.
static inline void pack_values(float* panels, const float* const* rows, int64_t shift, int head_dim) {
    for (int d = 0; d < head_dim; d += PANEL)
        for (int i = 0; i < PIECE; i++) {
            float* out = panels + (size_t)d * PIECE + (size_t)i * PANEL;
            store(out, rows[i] ? load(rows[i] + shift + d) : V{});
            store(out + LANES, rows[i] ? load(rows[i] + shift + d + LANES) : V{});
        }
}
static inline void pack_values(bf16* panels, const bf16* const* rows, int64_t shift, int head_dim) {
    for (int d = 0; d < head_dim; d += LANES)
        for (int i = 0; i < PIECE; i += 2) {
            U even = rows[i] ? widen(rows[i] + shift + d) : U{};
            U odd = rows[i + 1] ? widen(rows[i + 1] + shift + d) : U{};
            size_t at = (size_t)(d / PANEL) * PANEL * PIECE + (size_t)i * PANEL + (size_t)(d % PANEL) * 2;
            *(Uu*)(panels + at) = even | (odd << 16);
        }
}

template <typename T> struct NextPiece { const T* rows[PIECE]; };

template <typename T> struct Attention {
    KVLayout kv;
    int heads, kv_heads;
    float scale;

    // Rows [r0, rows) of the tile against one packed piece starting at key `first`.
    void piece(AttentionScratch<T>& s, int r0, int rows, int group, int first_position, int first, const NextPiece<T>& coming) const {
        const int D = kv.head_dim;
        for (int r = r0; r < rows; r += MAX_ROWS) {
            with_rows(rows - r < MAX_ROWS ? rows - r : MAX_ROWS, [&](auto n) {
                constexpr int R = decltype(n)::value;
                V c[R][2];
                for (int i = 0; i < R; i++) c[i][0] = c[i][1] = V{};
                accumulate<T, R>(c, s.queries + (size_t)r * D, D, s.keys, D);
                for (int i = 0; i < R; i++) {
                    store(s.scores + (size_t)(r + i) * PIECE, c[i][0]);
                    store(s.scores + (size_t)(r + i) * PIECE + LANES, c[i][1]);
                }
            });
        }
        fetch(coming, 3);
        int r = r0;
        for (; r + 4 <= rows; r += 4) soften<4>(s, r, group, first_position + 1 - first);
        for (; r < rows; r++) soften<1>(s, r, group, first_position + 1 - first);
        for (int d = 0; d < D; d += PANEL)
            for (int r = r0; r < rows; r += MAX_ROWS)
                with_rows(rows - r < MAX_ROWS ? rows - r : MAX_ROWS, [&](auto n) {
                    constexpr int R = decltype(n)::value;
                    V c[R][2];
                    for (int i = 0; i < R; i++) {
                        const float* acc = s.acc + (size_t)(r + i) * D + d;
                        c[i][0] = load(acc), c[i][1] = load(acc + LANES);
                    }
                    accumulate<T, R>(c, s.weights + (size_t)r * PIECE, PIECE, s.values + (size_t)d * PIECE, PIECE);
                    for (int i = 0; i < R; i++) {
                        float* acc = s.acc + (size_t)(r + i) * D + d;
                        store(acc, c[i][0]), store(acc + LANES, c[i][1]);
                    }
                });
    }

    // Scores of N rows and one piece to weights; rescales what the rows have gathered so far. Row r sees keys below
    // `seen + r / group`. Several rows at once hide the latency of the chains; each meets the same operations alone.
    template <int N> void soften(AttentionScratch<T>& s, int r, int group, int seen) const {
        const V nothing = splat(-INFINITY);
        V a[N], b[N];
        float top[N];
        bool grew = false;
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            const float* scores = s.scores + (size_t)(r + i) * PIECE;
            a[i] = load(scores) * splat(scale), b[i] = load(scores + LANES) * splat(scale);
            const int valid = seen + (r + i) / group;
            if (valid < PIECE) {
                a[i] = lane_index() < splat((float)valid) ? a[i] : nothing;
                b[i] = lane_index() + splat(16.0f) < splat((float)valid) ? b[i] : nothing;
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            top[i] = max_lanes(max(a[i], b[i]));
            const float old = s.row_max[r + i];
            grew |= top[i] > old;
            top[i] = old > top[i] ? old : top[i];
        }
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) a[i] = exp(a[i] - splat(top[i])), b[i] = exp(b[i] - splat(top[i]));
        if (grew)  // multiplying by e^0 = 1 gives the same bits
            for (int i = 0; i < N; i++) {
                if (top[i] == s.row_max[r + i]) continue;
                V shrink = exp(splat(s.row_max[r + i]) - splat(top[i]));
                s.row_max[r + i] = top[i];
                s.row_sum[r + i] = s.row_sum[r + i] * shrink;
                float* acc = s.acc + (size_t)(r + i) * kv.head_dim;
                for (int d = 0; d < kv.head_dim; d += LANES) store(acc + d, load(acc + d) * shrink);
            }
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            T* weights = s.weights + (size_t)(r + i) * PIECE;
            s.row_sum[r + i] = s.row_sum[r + i] + (a[i] + b[i]);
            store(weights, a[i]), store(weights + LANES, b[i]);
        }
    }

    // The rows of a piece that this thread will meet next; none: rows[0] is nullptr.
    NextPiece<T> locate(const AttentionItem* item, const T* cache, int first) const {
        NextPiece<T> next;
        next.rows[0] = nullptr;
        if (!item) return next;
        const int end = item->first_position + item->num_rows, count = end - first < PIECE ? end - first : PIECE;
        find_keys(next.rows, cache + (int64_t)item->kv_head * kv.head_stride, kv, item->block_table, first, count);
        return next;
    }

    // Starts loading one quarter of a piece: keys or values of 16 tokens. Blocks lie far apart, so the hardware cannot
    // guess the next one. A decode step's attention of 32 sequences with 192 tokens, ms of one core (Zen 4): without 20.6,
    // all lines at once into the first level 22, into the second 13.4, there a quarter at a time between other work 9.0.
    // Inlined by force: GCC 12 takes a function that only prefetches for one without effect, and drops the calls.
    inline __attribute__((always_inline)) void fetch(const NextPiece<T>& next, int quarter) const {
        if (!next.rows[0]) return;
        const int64_t shift = quarter % 2 ? kv.kv_stride : 0;
        const T* const* rows = next.rows + quarter / 2 * 16;
        for (int i = 0; i < 16 && rows[i]; i++)
            for (int d = 0; d < kv.head_dim; d += 64 / (int)sizeof(T)) __builtin_prefetch(rows[i] + shift + d, 0, 2);
    }

    inline __attribute__((always_inline)) void prefetch(const AttentionItem& item, const T* cache) const {
        const NextPiece<T> next = locate(&item, cache, 0);
        for (int quarter = 0; quarter < 4; quarter++) fetch(next, quarter);
    }

    // q, out: [tokens, heads * head_dim]; cache: the pool, already at this layer; next: what this thread does afterwards.
    void run(const AttentionItem& item, const AttentionItem* next, const T* q, T* out, const T* cache, AttentionScratch<T>& s) const {
        const int D = kv.head_dim, group = heads / kv_heads, rows = item.num_rows * group;
        const size_t width = (size_t)heads * D;
        s.reserve(TILE_QUERIES * group, D);
        for (int r = 0; r < rows; r++) {
            const T* from = q + (size_t)(item.first_row + r / group) * width + (size_t)(item.kv_head * group + r % group) * D;
            std::memcpy(s.queries + (size_t)r * D, from, sizeof(T) * D);
            s.row_max[r] = -INFINITY, s.row_sum[r] = V{};
        }
        std::memset(s.acc, 0, 4ul * rows * D);
        const T* head = cache + (int64_t)item.kv_head * kv.head_stride;
        const int end = item.first_position + item.num_rows;  // keys the last row sees
        for (int first = 0; first < end; first += PIECE) {
            const T* key_rows[PIECE];
            find_keys(key_rows, head, kv, item.block_table, first, end - first < PIECE ? end - first : PIECE);
            const bool is_last = first + PIECE >= end;
            const NextPiece<T> coming = locate(is_last ? next : &item, cache, is_last ? 0 : first + PIECE);
            fetch(coming, 0);
            pack_keys(s.keys, key_rows, D);
            fetch(coming, 1);
            pack_values(s.values, key_rows, kv.kv_stride, D);
            fetch(coming, 2);
            int skip = first - item.first_position;  // rows at positions below `first` are done
            piece(s, skip > 0 ? skip * group : 0, rows, group, item.first_position, first, coming);
        }
        for (int r = 0; r < rows; r++) {
            T* to = out + (size_t)(item.first_row + r / group) * width + (size_t)(item.kv_head * group + r % group) * D;
            V inverse = splat(1.0f / sum_lanes(s.row_sum[r]));
            for (int d = 0; d < D; d += LANES) store(to + d, load(s.acc + (size_t)r * D + d) * inverse);
        }
    }
};

}  // namespace shoal
