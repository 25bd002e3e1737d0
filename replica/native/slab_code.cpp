// KV slabs in 8 or 4 bits and back: what replica/kv_codec.py says, on many slabs in one call. A slab is
// [heads, parts, tokens, dim], float32 or bfloat16; coded, each head is its scales [1 or 2, parts, groups] and its numbers
// [parts, tokens, dim].
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t MAX_DIM = 1024;

struct Shape { int64_t heads, parts, tokens, dim, group, bits, is_bf16; };

inline float number(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t bits_of(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
// Not finite: 0, so that one bad number spoils no other.
inline float finite(uint32_t bits) { return number((bits & 0x7f800000u) == 0x7f800000u ? 0u : bits); }
inline float read(const uint16_t* p) { return finite((uint32_t)*p << 16); }
inline float read(const uint32_t* p) { return finite(*p); }
inline void write(uint32_t* p, float x) { *p = bits_of(x); }
inline void write(uint16_t* p, float x) {  // to the nearest, ties to even
    uint32_t bits = bits_of(x);
    *p = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
// The nearest whole number of a small one: its last bits when the unit in the last place is 1.
constexpr float MAGIC = 12582912.0f;
inline int32_t nearest(float x) { return (int32_t)(bits_of(x + MAGIC) - 0x4b400000u); }

template <class T> void encode_part(const Shape& s, const T* in, float* scales, float* lows, uint8_t* out) {
    float most[MAX_DIM], least[MAX_DIM], factor[MAX_DIM], low[MAX_DIM];
    for (int64_t d = 0; d < s.dim; ++d) most[d] = least[d] = read(in + d);
    for (int64_t t = 1; t < s.tokens; ++t)
        for (int64_t d = 0; d < s.dim; ++d) {
            float x = read(in + t * s.dim + d);
            most[d] = x > most[d] ? x : most[d];
            least[d] = x < least[d] ? x : least[d];
        }
    for (int64_t g = 0; g < s.dim / s.group; ++g) {
        float high = most[g * s.group], deep = least[g * s.group];
        for (int64_t d = g * s.group; d < (g + 1) * s.group; ++d) {
            high = most[d] > high ? most[d] : high;
            deep = least[d] < deep ? least[d] : deep;
        }
        float scale = s.bits == 8 ? (high > -deep ? high : -deep) / 127.0f : (high - deep) / 15.0f;
        if (s.bits == 8) deep = 0;
        else lows[g] = deep;
        scales[g] = scale;
        for (int64_t d = g * s.group; d < (g + 1) * s.group; ++d) {
            factor[d] = scale > 1e-38f ? 1.0f / scale : 0.0f;
            low[d] = deep;
        }
    }
    for (int64_t t = 0; t < s.tokens; ++t) {
        const T* row = in + t * s.dim;
        if (s.bits == 8) {
            for (int64_t d = 0; d < s.dim; ++d) out[t * s.dim + d] = (uint8_t)(int8_t)nearest(read(row + d) * factor[d]);
        } else {
            uint8_t whole[MAX_DIM];
            for (int64_t d = 0; d < s.dim; ++d) whole[d] = (uint8_t)nearest((read(row + d) - low[d]) * factor[d]);
            for (int64_t d = 0; d < s.dim / 2; ++d) out[t * s.dim / 2 + d] = whole[2 * d] | whole[2 * d + 1] << 4;
        }
    }
}

template <class T> void decode_part(const Shape& s, const float* scales, const float* lows, const uint8_t* in, T* out) {
    float scale[MAX_DIM], low[MAX_DIM];
    for (int64_t d = 0; d < s.dim; ++d) {
        scale[d] = scales[d / s.group];
        low[d] = s.bits == 8 ? 0.0f : lows[d / s.group];
    }
    for (int64_t t = 0; t < s.tokens; ++t) {
        T* row = out + t * s.dim;
        if (s.bits == 8) {
            for (int64_t d = 0; d < s.dim; ++d) write(row + d, (float)(int8_t)in[t * s.dim + d] * scale[d]);
        } else {
            uint8_t whole[MAX_DIM];
            for (int64_t d = 0; d < s.dim / 2; ++d) {
                whole[2 * d] = in[t * s.dim / 2 + d] & 15;
                whole[2 * d + 1] = in[t * s.dim / 2 + d] >> 4;
            }
            for (int64_t d = 0; d < s.dim; ++d) write(row + d, (float)whole[d] * scale[d] + low[d]);
        }
    }
}

template <class T> void code_slab(const Shape& s, bool encodes, T* slab, uint8_t* coded) {
    const int64_t groups = s.dim / s.group, part = s.tokens * s.dim, of_scales = s.parts * groups;
    const int64_t head_scales = of_scales * (s.bits == 8 ? 1 : 2), of_head = head_scales * 4 + s.parts * part * s.bits / 8;
    for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t p = 0; p < s.parts; ++p) {
            uint8_t* head = coded + h * of_head;
            T* here = slab + (h * s.parts + p) * part;
            float scales[MAX_DIM], lows[MAX_DIM];  // slots may begin anywhere
            uint8_t *at = head + p * groups * 4, *at_low = at + of_scales * 4;
            uint8_t* numbers = head + head_scales * 4 + p * part * s.bits / 8;
            if (encodes) {
                encode_part(s, here, scales, lows, numbers);
                std::memcpy(at, scales, groups * 4);
                if (s.bits == 4) std::memcpy(at_low, lows, groups * 4);
            } else {
                std::memcpy(scales, at, groups * 4);
                if (s.bits == 4) std::memcpy(lows, at_low, groups * 4);
                decode_part(s, scales, lows, numbers, here);
            }
        }
}

}  // namespace

// `slabs[i]` and `coded[i]` are addresses; dim is at most 1,024, a multiple of group, which is even.
extern "C" void code_slabs(const Shape* shape, int64_t encodes, int64_t count, const int64_t* slabs, const int64_t* coded) {
    for (int64_t i = 0; i < count; ++i) {
        uint8_t* bytes = reinterpret_cast<uint8_t*>(coded[i]);
        if (shape->is_bf16) code_slab(*shape, encodes, reinterpret_cast<uint16_t*>(slabs[i]), bytes);
        else code_slab(*shape, encodes, reinterpret_cast<uint32_t*>(slabs[i]), bytes);
    }
}
