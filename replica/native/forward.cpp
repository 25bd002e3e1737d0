// One step of a Llama-type decoder in one call: embedding, all layers over the paged KV pool, vocabulary rows, tokens.
//
// One parallel region for the whole step, with 6 to 8 barriers a layer, instead of 240 calls of framework operators.
// Plain C interface; the caller owns all memory and keeps it alive.
#include <omp.h>

#include <atomic>
#include <type_traits>

#include "attention.h"
#include "barrier.h"
#include "sampling.h"
#include "slabs.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace shoal {

extern "C" struct ShoalLayer {
    const void *qkv, *o, *gate_up, *down;  // packed panels
    const float *input_norm, *post_norm;
};

extern "C" struct ShoalModel {
    int32_t hidden, num_layers, num_heads, num_kv_heads, head_dim, intermediate, vocab, is_bf16, num_threads, block_size;
    float eps, scale;
    const void *embed, *head;  // rows [vocab, hidden], or null: rows of the head; packed panels
    const float *final_norm, *cos, *sin;  // rotary tables [max_model_len, head_dim / 2]
    const ShoalLayer* layers;
    void* kv;
    int64_t block_stride, head_stride, layer_stride, kv_stride;
};

extern "C" struct ShoalStep {
    int32_t num_tokens, num_seqs, num_samples, num_chosen, logits_stride, defers_choice;
    const int32_t *token_ids, *positions;  // [num_tokens]
    const int64_t* slots;                  // [num_tokens]
    const int32_t *seq_start, *seq_slot;   // [num_seqs + 1], [num_seqs]
    const int32_t* block_tables;           // row of a sequence: block_tables + seq_slot * table_stride
    int64_t table_stride;
    const int32_t* sample_rows;            // [num_samples] token rows whose logits are wanted; the first num_chosen sample
    const float *temperature, *top_p, *min_p;  // [num_chosen]; temperature 0: greedy
    const int32_t* top_k;
    const double* uniform;
    float* logits;                             // [num_samples, logits_stride]
    int32_t* tokens;                           // [num_chosen]
    void* scratch;
};

// Up to this many rows each thread normalises all rows for itself, which saves a barrier.
constexpr int PRIVATE_NORM_ROWS = 8;

static size_t rounded(size_t n) { return (n + 63) / 64 * 64; }

template <typename T> struct Buffers {
    float *residual, *qkv;
    T *normed, *q, *attention, *act, *last;
    size_t bytes = 0;

    Buffers(const ShoalModel& m, int tokens, int samples, char* base) {
        auto take = [&](size_t n) { char* at = base + bytes; bytes += rounded(n); return (void*)at; };
        const size_t q_dim = (size_t)m.num_heads * m.head_dim, qkv_dim = q_dim + 2ul * m.num_kv_heads * m.head_dim;
        residual = (float*)take(4ul * tokens * m.hidden);
        qkv = (float*)take(4ul * tokens * (qkv_dim + PANEL));
        normed = (T*)take(sizeof(T) * (tokens + PRIVATE_NORM_ROWS * (m.num_threads + 1)) * m.hidden);
        q = (T*)take(sizeof(T) * tokens * q_dim);
        attention = (T*)take(sizeof(T) * tokens * q_dim);
        act = (T*)take(sizeof(T) * tokens * m.intermediate);
        last = (T*)take(sizeof(T) * (samples + 1) * m.hidden);
    }
};

template <typename T> static inline void rms_norm(const float* x, const float* weight, float eps, int n, T* out) {
    V sum = V{};
    for (int i = 0; i < n; i += LANES) sum = fma(load(x + i), load(x + i), sum);
    V factor = splat(1.0f / std::sqrt(sum_lanes(sum) / (float)n + eps));
    for (int i = 0; i < n; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
}

template <typename T> static inline void rotate(const float* x, const float* cos, const float* sin, int head_dim, T* out) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += LANES) {
        V a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, fma(a, c, -(b * s)));
        store(out + half + i, fma(b, c, a * s));
    }
}

static inline V silu(V x) { return x / (splat(1.0f) + exp(-x)); }

template <typename T> class Step {
  public:
    Step(const ShoalModel& model, const ShoalStep& step)
        : m(model), s(step), b(model, step.num_tokens, step.num_samples, (char*)step.scratch), tokens(step.num_tokens),
          next_item(new std::atomic<int>[model.num_layers]) {
        attention.kv = {m.block_size, m.head_dim, m.block_stride, m.head_stride, m.layer_stride, m.kv_stride};
        attention.heads = m.num_heads, attention.kv_heads = m.num_kv_heads, attention.scale = m.scale;
        for (int i = 0; i < m.num_layers; i++) next_item[i] = 0;
        list_items();
    }
    ~Step() { delete[] next_item; }

    void run() {
#pragma omp parallel num_threads(m.num_threads)
        {
            thread_local AttentionScratch<T> scratch;
            thread_local Sampler sampler;
            const int t = omp_get_thread_num(), n = omp_get_num_threads();
            embed(t, n);
            barrier.wait(n);
            for (int layer = 0; layer < m.num_layers; layer++) run_layer(layer, t, n, scratch);
            project(t, n);
            if (!s.defers_choice) choose(m, s, t, n, sampler);
        }
    }

    static int share(long n, int t, int of) { return (int)(n * t / of); }

    static void choose(const ShoalModel& m, const ShoalStep& s, int t, int n, Sampler& sampler) {
        for (int r = share(s.num_chosen, t, n); r < share(s.num_chosen, t + 1, n); r++) {
            const float* row = s.logits + (size_t)r * s.logits_stride;
            s.tokens[r] = s.temperature[r] <= 0.0f
                              ? argmax(row, m.vocab)
                              : sampler.sample(row, m.vocab, s.temperature[r], s.top_k[r], s.top_p[r], s.min_p[r], s.uniform[r]);
        }
    }

  private:
    const ShoalModel& m;
    const ShoalStep& s;
    Buffers<T> b;
    const int tokens;
    Attention<T> attention;
    std::vector<AttentionItem> items;
    Barrier barrier;
    std::atomic<int>* next_item;

    // Longest first, so that the last item a thread takes is a short one; shorter ones where a thread got fewer than four.
    void list_items() {
        int queries = TILE_QUERIES;
        while (queries > 8 && (long)tokens * m.num_kv_heads < 4L * m.num_threads * queries) queries /= 2;
        for (int i = 0; i < s.num_seqs; i++) {
            const int start = s.seq_start[i], count = s.seq_start[i + 1] - start;
            const int32_t* table = s.block_tables + (int64_t)s.seq_slot[i] * s.table_stride;
            for (int r = 0; r < count; r += queries)
                for (int head = 0; head < m.num_kv_heads; head++)
                    items.push_back({start + r, std::min(queries, count - r), s.positions[start + r], head, table});
        }
        auto cost = [](const AttentionItem& x) { return (long)(x.first_position + x.num_rows) * (x.num_rows + 2); };
        std::stable_sort(items.begin(), items.end(), [&](auto& x, auto& y) { return cost(x) > cost(y); });
    }

    void embed(int t, int n) {
        for (int r = share(tokens, t, n); r < share(tokens, t + 1, n); r++) {
            float* to = b.residual + (size_t)r * m.hidden;
            if (!m.embed) {
                gather_row((const T*)m.head, s.token_ids[r], m.hidden, to);
                continue;
            }
            const T* from = (const T*)m.embed + (size_t)s.token_ids[r] * m.hidden;
            for (int i = 0; i < m.hidden; i += LANES) store(to + i, load(from + i));
        }
    }

    // The rows, normalised: every thread's own copy when few, a shared one (and a barrier) when many.
    const T* norm(const float* weight, int t, int n) {
        const bool is_private = tokens <= PRIVATE_NORM_ROWS;
        T* out = is_private ? b.normed + (size_t)t * PRIVATE_NORM_ROWS * m.hidden : b.normed;
        const int first = is_private ? 0 : share(tokens, t, n), last = is_private ? tokens : share(tokens, t + 1, n);
        for (int r = first; r < last; r++)
            rms_norm(b.residual + (size_t)r * m.hidden, weight, m.eps, m.hidden, out + (size_t)r * m.hidden);
        if (!is_private) barrier.wait(n);
        return out;
    }

    void run_layer(int index, int t, int n, AttentionScratch<T>& scratch) {
        const ShoalLayer& layer = m.layers[index];
        const int q_dim = m.num_heads * m.head_dim, qkv_dim = q_dim + 2 * m.num_kv_heads * m.head_dim;
        const size_t qkv_stride = (qkv_dim + PANEL - 1) / PANEL * PANEL;
        auto add = [&](int row, int column, V x, V y) {
            float* out = b.residual + (size_t)row * m.hidden + column;
            store(out, load(out) + x), store(out + LANES, load(out + LANES) + y);
        };
        gemm(norm(layer.input_norm, t, n), m.hidden, tokens, m.hidden, (const T*)layer.qkv, qkv_dim, t, n,
             [&](int row, int column, V x, V y) {
                 float* out = b.qkv + row * qkv_stride + column;
                 store(out, x), store(out + LANES, y);
             });
        barrier.wait(n);
        rotate_and_store(index, qkv_stride, t, n);
        barrier.wait(n);
        const T* cache = (const T*)m.kv + (int64_t)index * m.layer_stride;
        const int count = (int)items.size();
        int i = next_item[index].fetch_add(1, std::memory_order_relaxed);
        if (i < count) attention.prefetch(items[i], cache);
        while (i < count) {
            const int next = next_item[index].fetch_add(1, std::memory_order_relaxed);
            attention.run(items[i], next < count ? &items[next] : nullptr, b.q, b.attention, cache, scratch);
            i = next;
        }
        barrier.wait(n);
        gemm(b.attention, q_dim, tokens, q_dim, (const T*)layer.o, m.hidden, t, n, add);
        barrier.wait(n);
        gemm(norm(layer.post_norm, t, n), m.hidden, tokens, m.hidden, (const T*)layer.gate_up, 2 * m.intermediate, t, n,
             [&](int row, int column, V gate, V up) {
                 store(b.act + (size_t)row * m.intermediate + column / 2, silu(gate) * up);
             });
        barrier.wait(n);
        gemm(b.act, m.intermediate, tokens, m.intermediate, (const T*)layer.down, m.hidden, t, n, add);
        barrier.wait(n);
    }

    void rotate_and_store(int layer, size_t qkv_stride, int t, int n) {
        const int D = m.head_dim, per_token = m.num_heads + 2 * m.num_kv_heads, half = D / 2;
        T* cache = (T*)m.kv + (int64_t)layer * m.layer_stride;
        for (int unit = share((long)tokens * per_token, t, n); unit < share((long)tokens * per_token, t + 1, n); unit++) {
            const int r = unit / per_token, h = unit % per_token;
            const float* x = b.qkv + r * qkv_stride + (size_t)h * D;
            const float *cos = m.cos + (size_t)s.positions[r] * half, *sin = m.sin + (size_t)s.positions[r] * half;
            if (h < m.num_heads) {
                rotate(x, cos, sin, D, b.q + ((size_t)r * m.num_heads + h) * D);
                continue;
            }
            const int kv_head = (h - m.num_heads) % m.num_kv_heads;
            T* to = cache + s.slots[r] / m.block_size * m.block_stride + kv_head * m.head_stride + s.slots[r] % m.block_size * D;
            if (h < m.num_heads + m.num_kv_heads) rotate(x, cos, sin, D, to);
            else
                for (int i = 0; i < D; i += LANES) store(to + m.kv_stride + i, load(x + i));
        }
    }

    void project(int t, int n) {
        for (int r = share(s.num_samples, t, n); r < share(s.num_samples, t + 1, n); r++)
            rms_norm(b.residual + (size_t)s.sample_rows[r] * m.hidden, m.final_norm, m.eps, m.hidden, b.last + (size_t)r * m.hidden);
        barrier.wait(n);
        gemm(b.last, m.hidden, s.num_samples, m.hidden, (const T*)m.head, m.vocab, t, n, [&](int row, int column, V x, V y) {
            float* out = s.logits + (size_t)row * s.logits_stride + column;
            store(out, x), store(out + LANES, y);
        });
        barrier.wait(n);
    }
};

}  // namespace shoal

using namespace shoal;

extern "C" {

int32_t shoal_abi() { return 4; }

const char* shoal_isa() {
#if defined(__AVX512BF16__)
    return "avx512-bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "generic";
#endif
}

int64_t shoal_scratch_bytes(const ShoalModel* m, int32_t tokens, int32_t samples) {
    return (int64_t)(m->is_bf16 ? Buffers<bf16>(*m, tokens, samples, nullptr).bytes : Buffers<float>(*m, tokens, samples, nullptr).bytes);
}

void shoal_forward(const ShoalModel* m, const ShoalStep* s) {
    if (m->is_bf16) Step<bf16>(*m, *s).run();
    else Step<float>(*m, *s).run();
}

// The choice alone, from logits that the caller may have changed since shoal_forward deferred it.
void shoal_choose(const ShoalModel* m, const ShoalStep* s) {
#pragma omp parallel num_threads(m->num_threads)
    {
        thread_local Sampler sampler;
        Step<float>::choose(*m, *s, omp_get_thread_num(), omp_get_num_threads(), sampler);
    }
}

void shoal_pack(const uint32_t* rows, int64_t num_rows, int64_t words, uint32_t* panels, int32_t width, int32_t lane) {
    pack_rows(rows, num_rows, words, panels, width, lane);
}

// See slabs.h; indices in units of the strides, which are bytes.
void shoal_copy_slabs(void* to, const int64_t* to_index, int64_t to_stride, const void* from, const int64_t* from_index,
                      int64_t from_stride, int64_t bytes, int64_t count) {
    copy_slabs((char*)to, to_index, to_stride, (const char*)from, from_index, from_stride, bytes, count);
}

// Asks for huge pages over the whole pages of [p, p + bytes): a step walks 269 MB of weights and one KV page a block and head.
void shoal_use_huge_pages(void* p, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t first = ((uintptr_t)p + 4095) & ~(uintptr_t)4095, last = ((uintptr_t)p + (uintptr_t)bytes) & ~(uintptr_t)4095;
    if (last > first) madvise((void*)first, last - first, MADV_HUGEPAGE);
#else
    (void)p, (void)bytes;
#endif
}

int32_t shoal_sample(const float* logits, int32_t n, float temperature, int32_t top_k, float top_p, float min_p, double uniform) {
    Sampler sampler;
    return temperature <= 0 ? argmax(logits, n) : sampler.sample(logits, n, temperature, top_k, top_p, min_p, uniform);
}

}  // extern "C"
