// Copies of KV slabs between a pool and an arena, past the caches: nobody reads them soon where they were written, and
// a plain store would first read the line that it overwrites (a third of all traffic).
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

void copy(char* to, const char* from, int64_t n) {
  int64_t i = 0;
#if defined(__x86_64__)
  const int64_t head = -reinterpret_cast<uintptr_t>(to) & 63;  // streams go to whole lines
  if (head < n) std::memcpy(to, from, i = head);
  for (; i + 256 <= n; i += 256) {
    for (int j = 0; j < 256; j += 64) _mm_prefetch(from + i + j + 1024, _MM_HINT_NTA);
    for (int j = 0; j < 256; j += 64) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + j), _mm512_loadu_si512(from + i + j));
#else
      for (int k = 0; k < 64; k += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + j + k),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + j + k)));
#endif
    }
  }
#endif
  std::memcpy(to + i, from + i, n - i);
}

}  // namespace

extern "C" void copy_slabs(int64_t count, const int64_t* to, const int64_t* from, int64_t num_bytes) {
  for (int64_t i = 0; i < count; ++i)
    copy(reinterpret_cast<char*>(to[i]), reinterpret_cast<const char*>(from[i]), num_bytes);
#if defined(__x86_64__)
  _mm_sfence();  // others see the bytes before they hear of them
#endif
}
