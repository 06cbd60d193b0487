// Block scales: reading, rounding up, the policies of `scaling.py`, and numbers in units of a stored scale.
//
// Scales are computed for a vector of blocks at a time: one block's would be a long chain of dependent operations.
#pragma once

#include "abi.h"
#include "simd.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr uint32_t kBf16Max = 0x7F7F0000u;  // bits of the largest finite bf16

constexpr uint32_t kSmallestE8m0 = 0x400000u;  // bits of 2^-127
constexpr float kE4m3Largest = 448.0f, kE4m3Normal = 0x1p-6f, kE4m3Step = 0x1p-9f;
constexpr uint32_t kE4m3Shift = (127 - 7) << 3;  // between the upper bits of a float and those of an E4M3 number

// What the scales of a row are in units of.
inline float scale_unit(const MlStorage& s, int64_t row) { return s.tensor_scale ? s.tensor_scale[row] : 1.0f; }

inline float read_scale(const MlStorage& s, int64_t row, int64_t index) {
    if (s.scale_kind == ML_SCALE_FP32) return ((const float*)s.scale)[index];
    if (s.scale_kind < ML_SCALE_E8M0) return from_bits((uint32_t)((const uint16_t*)s.scale)[index] << 16);
    const uint32_t code = ((const uint8_t*)s.scale)[index];
    if (s.scale_kind == ML_SCALE_E8M0) return from_bits(code ? code << 23 : kSmallestE8m0);
    return (code < 8 ? (float)code * kE4m3Step : from_bits((code + kE4m3Shift) << 20)) * scale_unit(s, row);
}

// As many as `count`, one a lane.
inline vf read_scales(const MlStorage& s, int64_t row, int64_t index, int count) {
    if (s.scale_kind != ML_SCALE_FP32 && s.scale_kind < ML_SCALE_E8M0)
        return from_bits(load_some_halves((const uint16_t*)s.scale + index, count) << 16);
    vf scales{};
    for (int k = 0; k < count; ++k) scales[k] = read_scale(s, row, index + k);
    return scales;
}

inline void write_scale(const MlStorage& s, int64_t row, int64_t index, float scale) {
    if (s.scale_kind == ML_SCALE_FP32) {
        ((float*)s.scale)[index] = scale;
    } else if (s.scale_kind < ML_SCALE_E8M0) {
        ((uint16_t*)s.scale)[index] = (uint16_t)(bits(scale) >> 16);
    } else if (s.scale_kind == ML_SCALE_E8M0) {
        ((uint8_t*)s.scale)[index] = (uint8_t)(bits(scale) >> 23);
    } else {
        const float q = scale / scale_unit(s, row);
        ((uint8_t*)s.scale)[index] = (uint8_t)(q < kE4m3Normal ? (uint32_t)(q / kE4m3Step) : (bits(q) >> 20) - kE4m3Shift);
    }
}

// As many as `count`, one a lane.
inline void write_scales(const MlStorage& s, int64_t row, int64_t index, vf scales, int count) {
    if (s.scale_kind != ML_SCALE_FP32 && s.scale_kind < ML_SCALE_E8M0)
        return store_some_halves((uint16_t*)s.scale + index, upper_half(bits(scales)), count);
    for (int k = 0; k < count; ++k) write_scale(s, row, index + k, scales[k]);
}

inline vf round_e4m3_up(vf scale, float unit) {
    const vf q = select(scale > 0.0f, max(scale / unit, splat(kE4m3Step)), vf{});
    const vf normal = from_bits((bits(q) + 0xFFFFF) & ~0xFFFFF);
    const vf small = (splat(kShift) - shifted_floor(q / -kE4m3Step, splat(kShift))) * kE4m3Step;
    return min(select(q < kE4m3Normal, small, normal), splat(kE4m3Largest)) * unit;
}

// The smallest number of the scale's kind (in the row's unit) that is not below `scale` and does not overflow.
inline vf round_scale_up(const MlStorage& s, vf scale, float unit) {
    if (s.scale_kind == ML_SCALE_E4M3) return round_e4m3_up(scale, unit);
    const int32_t low = s.scale_kind == ML_SCALE_BF16 ? 0xFFFF : s.scale_kind == ML_SCALE_FP32 ? 0x3FF : 0x7FFFFF;
    vi rounded = (bits(scale) + low) & ~low;
    if (s.scale_kind == ML_SCALE_E8M0)
        rounded = select(bits(scale) <= (int32_t)kSmallestE8m0, splat((int32_t)kSmallestE8m0), rounded);
    return min(from_bits(rounded), splat(s.scale_limit));
}

inline vf scale_for(const MlStorage& s, vf absmax, float unit) {
    const vf scale = absmax / s.max_level;
    return round_scale_up(s, select((absmax > 0.0f) & (scale == 0.0f), splat(from_bits(1u)), scale), unit);
}

// The scale of a weight block under a policy of `scaling.py`.
inline vf next_scale(const MlStorage& s, int32_t policy, vf absmax, vf held, float unit) {
    if (policy == ML_FROZEN) return held;
    if (policy == ML_RECOMPUTE) return scale_for(s, absmax, unit);
    const vi overflows = absmax > held * s.overflow_level, wastes = absmax < held * s.waste_level;
    return select(overflows | wastes, round_scale_up(s, absmax * s.fresh_factor, unit), held);
}

inline float next_scale(const MlStorage& s, int32_t policy, float absmax, float held, float unit) {
    return next_scale(s, policy, splat(absmax), splat(held), unit)[0];
}

// The largest magnitude of n numbers, which zeros follow up to a whole vector.
inline float absmax(const float* x, int n) {
    vf even{}, odd{};  // two chains, for a maximum waits for the one before
    int e = 0;
    for (; e + kLanes < n; e += 2 * kLanes) {
        even = larger_magnitude(even, load<vf>(x + e));
        odd = larger_magnitude(odd, load<vf>(x + e + kLanes));
    }
    if (e < n) even = larger_magnitude(even, load<vf>(x + e));
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

// Numbers are put in units of a scale, the finest of them, as (x * power) * inverse. The power is one, but for scales whose
// reciprocals might not be normal numbers; a scale of zero counts as one.
struct Units {
    static constexpr float kFarthest = 0x1p100f;
    float power = 1.0f, inverse;

    Units(float scale, int hidden) {
        if (!(scale > 0.0f)) scale = 1.0f;
        if (!are_plain(scale)) power = scale > 1.0f ? 1.0f / kFarthest : kFarthest;
        inverse = 1.0f / (scale * power * (1.0f / (float)(1 << hidden)));
    }

    static bool are_plain(float scale) { return scale >= 1.0f / kFarthest && scale <= kFarthest; }
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
