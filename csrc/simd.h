// Vectors of the instruction set this file is compiled for, through the GCC/Clang vector extensions.
//
// Contract:
//   * The only file with intrinsics, and each has a portable twin with the same result to the bit.
//   * Every function is correctly rounded or exact; nothing here depends on the number of lanes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(MASTERLESS_NEON)
#include <arm_neon.h>
#endif

namespace masterless {
inline namespace MASTERLESS_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));
typedef uint8_t vb __attribute__((vector_size(kLanes)));
typedef double vd __attribute__((vector_size(4 * kLanes)));    // half as many
typedef uint64_t vw __attribute__((vector_size(4 * kLanes)));  // likewise

template <class V, class T>
inline V load(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class T>
inline void store(T* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

inline vf splat(float x) { return x - vf{}; }  // x - (+0) is x, also for x = -0
inline vi splat(int32_t x) { return x - vi{}; }
inline vu splat(uint32_t x) { return x - vu{}; }

inline vi bits(vf x) { return (vi)x; }
inline vf from_bits(vi x) { return (vf)x; }
inline uint32_t bits(float x) {
    uint32_t b;
    std::memcpy(&b, &x, sizeof b);
    return b;
}
inline float from_bits(uint32_t b) {
    float x;
    std::memcpy(&x, &b, sizeof x);
    return x;
}

inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }
inline vi to_int(vf x) { return __builtin_convertvector(x, vi); }  // truncates

// Bytes and halves in memory are integers in a vector: `store_bytes` and `load_bytes`, `upper_half` and `load_halves`.
// Half of a vector's floats as doubles: `low_half` and `high_half`.

inline vi lane_numbers() {
    vi v;
    for (int i = 0; i < kLanes; ++i) v[i] = i;
    return v;
}

inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
inline vi select(vi mask, vi yes, vi no) { return mask ? yes : no; }

inline vi min(vi a, vi b) { return a < b ? a : b; }
inline vi max(vi a, vi b) { return a > b ? a : b; }
inline vu min(vu a, vu b) { return a < b ? a : b; }
inline vu max(vu a, vu b) { return a > b ? a : b; }

// Every lane's partner: the one whose number differs in one bit, kDistance. (Clang sees a shuffle in the loop, GCC does not.)
template <int kDistance, class V>
inline V partners(V x) {
#if defined(__clang__)
    V other;
    for (int i = 0; i < kLanes; ++i) other[i] = x[(i ^ kDistance) % kLanes];
    return other;
#else
    return __builtin_shuffle(x, lane_numbers() ^ kDistance);
#endif
}

// The lanes of `a` from lane n on, then the first ones of `b`.
template <class V>
inline V from_lane(V a, V b, int n) {
#if defined(__clang__)
    V together;
    for (int i = 0; i < kLanes; ++i) together[i] = n + i < kLanes ? a[n + i] : b[n + i - kLanes];
    return together;
#else
    return __builtin_shuffle(a, b, lane_numbers() + n);
#endif
}

// Lanes of `a`, but where that bit of their number is set those of `b`.
template <int kDistance, class V>
inline V alternate(V a, V b) {
#if defined(__clang__)
    for (int i = 0; i < kLanes; ++i) a[i] = i & kDistance ? b[i] : a[i];
    return a;
#else
    return (lane_numbers() & kDistance) ? b : a;
#endif
}

// x, in a register from here on: GCC reads what was loaded from memory again wherever it is used, and computes with numbers
// that were spread before it spreads them, in other registers.
template <class V>
inline V held(V x) {
#if defined(__AVX2__)
    __asm__("" : "+v"(x));
#endif
    return x;
}

inline vf magnitude(vf x) { return from_bits(bits(x) & 0x7FFFFFFF); }

// a * b + c, a * b - c and c - a * b, rounded once: `fma`, `fms` and `fnma`. `kHasFma`: they are an instruction.

// A float of this size has no fraction, so adding kShift to a smaller number rounds that to an integer, which then
// stands in the lowest bits. `shifted_floor` is floor(x) + shift for a shift near kShift, `shifted_ceil` likewise.
constexpr float kShift = 0x1.8p23f;
// `lookup(table, index)` is table[index] for indices of up to kTableBits bits; higher bits do not count. A single vector is a
// table, too, of as many numbers as it has.

// The first n of a vector's 64 bytes, zeros behind them; and back.
template <class V>
inline V load_some(const uint8_t* p, int n) {
    static_assert(sizeof(V) == 64, "");
#if defined(__AVX512BW__)
    return (V)_mm512_maskz_loadu_epi8(n < 64 ? (1ull << n) - 1 : ~0ull, p);
#else
    V v{};
    std::memcpy(&v, p, (size_t)n);
    return v;
#endif
}

// The first n of a vector's halves, zeros behind them.
inline vi load_some_halves(const uint16_t* p, int n) {
#if defined(__AVX512BW__)
    return (vi)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)(n < 16 ? (1 << n) - 1 : 0xFFFF), p));
#else
    vi halves{};
    for (int i = 0; i < n; ++i) halves[i] = p[i];
    return halves;
#endif
}

// The first n of a vector's halves; mostly all of them.
inline void store_some_halves(uint16_t* p, vh halves, int n) {
    if (n == kLanes) return store(p, halves);
    std::memcpy(p, &halves, (size_t)n * sizeof(uint16_t));
}

template <class V>
inline void store_some(uint8_t* p, V v, int n) {
    static_assert(sizeof(V) == 64, "");
#if defined(__AVX512BW__)
    _mm512_mask_storeu_epi8(p, n < 64 ? (1ull << n) - 1 : ~0ull, (__m512i)v);
#else
    std::memcpy(p, &v, (size_t)n);
#endif
}

// The first n bytes of a, then those of b, n a multiple of eight; what follows is anything. One store where there is an
// instruction: a load from two of them would wait.
template <class V>
inline void store_side_by_side(uint8_t* p, V a, V b, int n) {
    static_assert(sizeof(V) == 64, "");
#if defined(__AVX512F__)
    const int words = n / 8;
    store(p, (V)_mm512_mask_expand_epi64((__m512i)a, (__mmask8)(((1 << words) - 1) << words), (__m512i)b));
#else
    store(p, a);
    store(p + n, b);
#endif
}

#if defined(__AVX512F__)
// By intrinsics: GCC takes a conversion of what was a float vector apart, element by element.
inline void store_bytes(uint8_t* p, vi x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }
inline vh upper_half(vi x) { return (vh)_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)x, 16)); }
inline vi load_bytes(const uint8_t* p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vi load_halves(const uint16_t* p) { return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
inline vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
inline vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
inline vf sqrt(vf x) { return (vf)_mm512_sqrt_ps((__m512)x); }
inline vf shifted_floor(vf x, vf shift) {
    return (vf)_mm512_add_round_ps((__m512)x, (__m512)shift, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
inline vf shifted_ceil(vf x, vf shift) {
    return (vf)_mm512_add_round_ps((__m512)x, (__m512)shift, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
}
inline vi magnitude(vi x) { return (vi)_mm512_abs_epi32((__m512i)x); }
inline vf larger_magnitude(vf a, vf b) { return (vf)_mm512_range_ps((__m512)a, (__m512)b, 0xB); }
constexpr int kTableBits = 4;
inline vf gather(const float* table, vi index) { return (vf)_mm512_i32gather_ps((__m512i)index, table, 4); }
inline vf lookup(vf table, vi index) { return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)table); }
constexpr bool kHasFma = true;
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vf fms(vf a, vf b, vf c) { return (vf)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c); }
inline vf fnma(vf a, vf b, vf c) { return (vf)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vd fma(vd a, vd b, vd c) { return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
inline vd low_half(vf x) { return (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)); }
inline vd high_half(vf x) { return (vd)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1)); }
inline float horizontal_max(vf x) { return _mm512_reduce_max_ps((__m512)x); }
inline int32_t horizontal_max(vi x) { return _mm512_reduce_max_epi32((__m512i)x); }
inline bool all(vi mask) { return _mm512_movepi32_mask((__m512i)mask) == 0xFFFF; }
#elif defined(__AVX2__)
inline void store_bytes(uint8_t* p, vi x) {
    const __m256i lowest = _mm256_set1_epi32(0x0C080400);  // of each four-byte element, four to a half
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)x, lowest);
    _mm_storel_epi64((__m128i*)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}
inline vh upper_half(vi x) { return __builtin_convertvector((vu)x >> 16, vh); }
inline vi load_bytes(const uint8_t* p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline vi load_halves(const uint16_t* p) { return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vf min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
inline vf max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
inline vf sqrt(vf x) { return (vf)_mm256_sqrt_ps((__m256)x); }
inline vf shifted_floor(vf x, vf shift) { return (vf)_mm256_floor_ps((__m256)x) + shift; }
inline vf shifted_ceil(vf x, vf shift) { return (vf)_mm256_ceil_ps((__m256)x) + shift; }
inline vi magnitude(vi x) { return (vi)_mm256_abs_epi32((__m256i)x); }
inline vf larger_magnitude(vf a, vf b) { return max(magnitude(a), magnitude(b)); }
constexpr int kTableBits = 4;
struct Table {
    vf low, high;  // of indices below eight, and of the others
};
inline vf lookup(vf table, vi index) { return (vf)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index); }
inline vf lookup(const Table& table, vi index) {
    return (vf)_mm256_blendv_ps((__m256)lookup(table.low, index), (__m256)lookup(table.high, index), (__m256)(index << 28));
}
inline vf gather(const float* table, vi index) { return (vf)_mm256_i32gather_ps(table, (__m256i)index, 4); }
constexpr bool kHasFma = true;
inline vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline vf fms(vf a, vf b, vf c) { return (vf)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c); }
inline vf fnma(vf a, vf b, vf c) { return (vf)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline vd fma(vd a, vd b, vd c) { return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
inline vd low_half(vf x) { return (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)); }
inline vd high_half(vf x) { return (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1)); }
inline float horizontal_max(vf x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline int32_t horizontal_max(vi x) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
}
inline bool all(vi mask) { return _mm256_movemask_ps((__m256)mask) == 0xFF; }
#else
inline void store_bytes(uint8_t* p, vi x) { store(p, __builtin_convertvector(x, vb)); }
inline vh upper_half(vi x) { return __builtin_convertvector((vu)x >> 16, vh); }
inline vi load_bytes(const uint8_t* p) { return __builtin_convertvector(load<vb>(p), vi); }
inline vi load_halves(const uint16_t* p) { return __builtin_convertvector(load<vh>(p), vi); }
inline vf min(vf a, vf b) { return a < b ? a : b; }  // on Arm, too: its own minimum takes NaN for the smaller
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vi magnitude(vi x) { return x < 0 ? -x : x; }
inline vf larger_magnitude(vf a, vf b) { return max(magnitude(a), magnitude(b)); }
constexpr int kTableBits = 2;
inline vd low_half(vf x) { return vd{x[0], x[1]}; }
inline vd high_half(vf x) { return vd{x[2], x[3]}; }
inline vf gather(const float* table, vi index) {
    vf v;
    for (int i = 0; i < kLanes; ++i) v[i] = table[index[i]];
    return v;
}
#if defined(MASTERLESS_NEON)
inline vf sqrt(vf x) { return (vf)vsqrtq_f32((float32x4_t)x); }
inline vf shifted_floor(vf x, vf shift) { return (vf)vrndmq_f32((float32x4_t)x) + shift; }
inline vf shifted_ceil(vf x, vf shift) { return (vf)vrndpq_f32((float32x4_t)x) + shift; }
inline vf lookup(vf table, vi index) {  // by bytes: four of each element
    const vu bytes = ((vu)index & 3u) * 0x04040404u + 0x03020100u;
    return (vf)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)bytes);
}
constexpr bool kHasFma = true;
inline vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline vf fms(vf a, vf b, vf c) { return fma(a, b, -c); }
inline vf fnma(vf a, vf b, vf c) { return (vf)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline vd fma(vd a, vd b, vd c) { return (vd)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
inline float horizontal_max(vf x) { return vmaxnmvq_f32((float32x4_t)x); }
inline int32_t horizontal_max(vi x) { return vmaxvq_s32((int32x4_t)x); }
inline bool all(vi mask) { return vminvq_u32((uint32x4_t)mask) == 0xFFFFFFFFu; }
#else
inline vf sqrt(vf x) {
    for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
}
inline vf shifted_floor(vf x, vf shift) {
    for (int i = 0; i < kLanes; ++i) x[i] = __builtin_floorf(x[i]);
    return x + shift;
}
inline vf shifted_ceil(vf x, vf shift) {
    for (int i = 0; i < kLanes; ++i) x[i] = __builtin_ceilf(x[i]);
    return x + shift;
}
inline vf lookup(vf table, vi index) {
    vf v;
    for (int i = 0; i < kLanes; ++i) v[i] = table[index[i] & (kLanes - 1)];
    return v;
}
constexpr bool kHasFma = false;
inline vf fma(vf a, vf b, vf c) {
    for (int i = 0; i < kLanes; ++i) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return a;
}
inline vd fma(vd a, vd, vd) { return a; }  // never called
inline vf fms(vf a, vf b, vf c) { return fma(a, b, -c); }
inline vf fnma(vf a, vf b, vf c) { return fma(-a, b, c); }
template <class V>
inline auto horizontal_max(V x) -> decltype(x[0] + 0) {
    auto m = x[0];
    for (int i = 1; i < kLanes; ++i) m = x[i] > m ? x[i] : m;
    return m;
}
inline bool all(vi mask) {
    int32_t together = -1;
    for (int i = 0; i < kLanes; ++i) together &= mask[i];
    return together == -1;
}
#endif
#endif

// The lowest bytes of the first n elements of a vector.
inline void store_some_bytes(uint8_t* p, vi x, int n) {
    uint8_t bytes[kLanes];
    store_bytes(bytes, x);
    std::memcpy(p, bytes, (size_t)n);
}

#if defined(__AVX512F__) || !defined(__AVX2__)
struct Table {
    vf low;
};
inline vf lookup(const Table& table, vi index) { return lookup(table.low, index); }
#endif

// Sixteen numbers from memory as a table; and four of them, again and again.
inline Table load_table(const float* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return {load<vf>(p), load<vf>(p + kLanes)};
#else
    return {load<vf>(p)};
#endif
}
inline Table repeated_quarter(const float* p) {
#if defined(__AVX512F__)
    return {(vf)_mm512_broadcast_f32x4(_mm_loadu_ps(p))};
#elif defined(__AVX2__)
    const vf again = (vf)_mm256_broadcast_ps((const __m128*)p);
    return {again, again};
#else
    return {load<vf>(p)};
#endif
}

// The first of n halves in four lanes, the next in the next four, and so on; the last, if there are too few.
inline vi spread_quarters(const int16_t* p, int n) {
#if defined(__AVX512F__)
    if (n >= 4) {
        const __m512i wide = _mm512_castsi256_si512(_mm256_cvtepi16_epi32(_mm_loadl_epi64((const __m128i*)p)));
        return (vi)_mm512_permutexvar_epi32((__m512i)(lane_numbers() >> 2), wide);
    }
#elif defined(__AVX2__)
    if (n >= 2) return (vi)_mm256_set_m128i(_mm_set1_epi32(p[1]), _mm_set1_epi32(p[0]));
#endif
    vi x;
    for (int i = 0; i < kLanes; ++i) x[i] = p[i / 4 < n ? i / 4 : n - 1];
    return x;
}

// The same; with `few` the first vector is enough.
inline vf lookup(const Table& table, vi index, bool few) { return few ? lookup(table.low, index) : lookup(table, index); }

// f(0), f(1) and so on, which takes vectors of them; and f of what is in a table.
template <class F>
inline Table table_of(F&& f) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return {f(lane_numbers()), f(lane_numbers() + kLanes)};
#else
    return {f(lane_numbers())};
#endif
}
template <class F>
inline Table mapped(const Table& table, F&& f) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return {f(table.low), f(table.high)};
#else
    return {f(table.low)};
#endif
}

// a * b + c, rounded once or twice: only where that makes no difference.
inline vf multiply_add(vf a, vf b, vf c) { return kHasFma ? fma(a, b, c) : a * b + c; }
inline vd multiply_add(vd a, vd b, vd c) { return kHasFma ? fma(a, b, c) : a * b + c; }

inline vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
    const vi upper = lane_numbers() << 16;  // half i of what is stored is the upper half of element i; one instruction
    return (vf)_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, (__m512i)upper,
                                              _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p)));
#else
    return from_bits(load_halves(p) << 16);
#endif
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
