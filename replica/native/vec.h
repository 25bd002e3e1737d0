// Sixteen float lanes, and the few operations the kernels need.
//
// Bit-invariance rests on this file: every operation works lane by lane or in one fixed tree, and a multiply-add is
// always fused. With AVX-512 the fused form is written out; elsewhere the compiler contracts a*b+c (-ffp-contract=fast),
// which is unambiguous because each expression holds one product and one sum.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace shoal {

struct bf16 { uint16_t bits; };

constexpr int LANES = 16;
typedef float V __attribute__((vector_size(64)));
typedef float Vu __attribute__((vector_size(64), aligned(4)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint32_t Uu __attribute__((vector_size(64), aligned(4)));
typedef int32_t S __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
typedef uint16_t Hu __attribute__((vector_size(32), aligned(2)));

static inline V splat(float x) { return x - V{}; }
static inline V lane_index() { return V{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

static inline V fma(V a, V b, V c) {
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

static inline V max(V a, V b) { return a > b ? a : b; }

static inline V load(const float* p) { return *(const Vu*)p; }
static inline void store(float* p, V x) { *(Vu*)p = x; }
static inline U widen(const bf16* p) {
#if defined(__AVX512F__)  // GCC 12 splits the generic form in two
    return (U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#else
    return __builtin_convertvector(*(const Hu*)p, U);
#endif
}
static inline V load(const bf16* p) { return (V)(widen(p) << 16); }
static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
// Round to nearest, ties to even. NaN keeps its sign and stays a NaN.
static inline void store(bf16* p, V x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    U u = (U)x;
    U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    U nan = (u >> 16) | 0x40u;
    rounded = (x == x) ? rounded : nan;
    *(Hu*)p = __builtin_convertvector(rounded, H);
#endif
}
static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

// Fixed tree: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
static inline float sum_lanes(V x) {
    float t[LANES];
    store(t, x);
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) t[i] += t[i + n];
    return t[0];
}
static inline float max_lanes(V x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);  // exact, so the order does not matter
#else
    float t[LANES];
    store(t, x);
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
    return t[0];
#endif
}

// e^x for x <= about 88; zero below -87 (also for -inf). Cephes-style range reduction, degree 6, error below 2 ulp.
static inline V exp(V x) {
    V low = splat(-87.0f);
    V clamped = x > low ? x : low;
    V shifted = fma(clamped, splat(1.44269504088896341f), splat(12582912.0f));  // 1.5 * 2^23: rounds to an integer
    V n = shifted - splat(12582912.0f);
    V r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    V p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    V y = fma(p, r * r, r) + splat(1.0f);
    S exponent = (__builtin_convertvector(n, S) + 127) << 23;
    V result = y * (V)exponent;
    return x > low ? result : V{};
}

}  // namespace shoal
