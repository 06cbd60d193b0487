// Block scales: reading, rounding up, the policies of `scaling.py`, and exact division by a stored scale.
//
// Scales are computed for a vector of blocks at a time: one block's would be a long chain of dependent operations.
#pragma once

#include "abi.h"
#include "simd.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr uint32_t kBf16Max = 0x7F7F0000u;  // bits of the largest finite bf16

inline float read_scale(const MlStorage& s, int64_t index) {
    if (s.scale_kind == ML_SCALE_FP32) return ((const float*)s.scale)[index];
    return from_bits((uint32_t)((const uint16_t*)s.scale)[index] << 16);
}

inline void write_scale(const MlStorage& s, int64_t index, float scale) {
    if (s.scale_kind == ML_SCALE_FP32)
        ((float*)s.scale)[index] = scale;
    else
        ((uint16_t*)s.scale)[index] = (uint16_t)(bits(scale) >> 16);
}

// The smallest number of the scale's kind that is not below `scale` and does not overflow.
inline vf round_scale_up(const MlStorage& s, vf scale) {
    const int32_t low = s.scale_kind == ML_SCALE_BF16 ? 0xFFFF : s.scale_kind == ML_SCALE_FP32 ? 0x3FF : 0x7FFFFF;
    return min(from_bits((bits(scale) + low) & ~low), splat(s.scale_limit));
}

inline vf scale_for(const MlStorage& s, vf absmax) {
    const vf scale = absmax / s.max_level;
    return round_scale_up(s, select((absmax > 0.0f) & (scale == 0.0f), splat(from_bits(1u)), scale));
}

// The scale of a weight block under a policy of `scaling.py`.
inline vf next_scale(const MlStorage& s, int32_t policy, vf absmax, vf held) {
    if (policy == ML_FROZEN) return held;
    if (policy == ML_RECOMPUTE) return scale_for(s, absmax);
    const vi overflows = absmax > held * s.overflow_level, wastes = absmax < held * s.waste_level;
    return select(overflows | wastes, round_scale_up(s, absmax * s.fresh_factor), held);
}

inline float next_scale(const MlStorage& s, int32_t policy, float absmax, float held) {
    return next_scale(s, policy, splat(absmax), splat(held))[0];
}

// The largest magnitude of n numbers, which zeros follow up to a whole vector.
inline float absmax(const float* x, int n) {
    vf even{}, odd{};  // two chains, for a maximum waits for the one before
    int e = 0;
    for (; e + kLanes < n; e += 2 * kLanes) {
        even = max(even, magnitude(load<vf>(x + e)));
        odd = max(odd, magnitude(load<vf>(x + e + kLanes)));
    }
    if (e < n) even = max(even, magnitude(load<vf>(x + e)));
    return horizontal_max(max(even, odd));
}

// The same as a block's scale needs it: a negative number counts for more where the levels do not reach as far there.
inline float block_peak(const MlStorage& s, const float* x, int n) {
    if (s.negative_factor == 1.0f) return absmax(x, n);
    vf peak{};
    for (int e = 0; e < n; e += kLanes) {
        const vf number = load<vf>(x + e), size = magnitude(number);
        peak = max(peak, select(number < 0.0f, size * s.negative_factor, size));
    }
    return horizontal_max(peak);
}

// x / scale * 2^shift, correctly rounded, without dividing.
//
// A 16-bit scale has at most 8 significant bits, so a quotient lies either on the midpoint of two floats or at
// least 2^-9 of their distance away from it; one Newton correction with an exact remainder (two fused operations) is
// accurate to 2^-22 of that distance and therefore rounds correctly. It does not suit a scale with more bits, nor one
// whose reciprocal or remainders come near the ends of the exponent range.
struct Divisor {
    vf divisor = splat(1.0f), reciprocal = splat(1.0f);

    Divisor() = default;  // divides by one
    Divisor(float scale, int shift) {
        const float fine = scale / (float)(1 << shift);
        divisor = splat(fine);
        reciprocal = splat(1.0f / fine);
    }

    static bool suits(float scale) {
        const uint32_t b = bits(scale);
        return kHasFma && (b & 0xFFFFu) == 0 && b > (67u << 23) && b < (187u << 23);
    }

    vf operator()(vf x) const {
        if (!kHasFma) return x;  // suits no scale, so it is only ever used to divide by one
        const vf q = x * reciprocal;
        return fma(fma(-q, divisor, x), reciprocal, q);
    }
};

// The same by ordinary division, for any scale (0 counts as 1); stops short of infinity.
inline void divide(const float* x, int n, float scale, int shift, float* out) {
    const vf divisor = splat(scale > 0.0f ? scale : 1.0f), largest = splat(from_bits(0x7F7FFFFFu));
    for (int e = 0; e < n; e += kLanes) {
        const vf t = load<vf>(x + e) / divisor * (float)(1 << shift);
        store(out + e, min(max(t, -largest), largest));
    }
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
