// Block scales: reading, rounding up, the policies of `scaling.py`, and exact division by a stored scale.
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
inline float round_scale_up(const MlStorage& s, float scale) {
    if (s.scale_kind != ML_SCALE_FP32) {
        const uint32_t low = s.scale_kind == ML_SCALE_BF16 ? 0xFFFFu : 0x7FFFFFu;
        scale = from_bits((bits(scale) + low) & ~low);
    }
    return scale < s.scale_limit ? scale : s.scale_limit;
}

inline float scale_for(const MlStorage& s, float absmax) { return round_scale_up(s, absmax / s.max_level); }

// The scale of a weight block under the policy "held" (or "recompute").
inline float next_scale(const MlStorage& s, bool recompute, float absmax, float held) {
    if (recompute) return scale_for(s, absmax);
    const bool overflows = absmax > held * s.overflow_level, wastes = absmax < held * s.waste_level;
    return overflows || wastes ? round_scale_up(s, absmax * s.fresh_factor) : held;
}

// The largest magnitude of n numbers, which zeros follow up to a whole vector.
inline float absmax(const float* x, int n) {
    vf m{};
    for (int e = 0; e < n; e += kLanes) m = max(m, magnitude(load<vf>(x + e)));
    return horizontal_max(m);
}

// x / scale * 2^shift for many x, correctly rounded like the division that it replaces.
//
// A 16-bit scale has at most 8 significant bits, so a quotient lies either on the midpoint of two floats or at
// least 2^-9 of their distance away from it; one Newton correction with exact remainder (two fused operations) is
// accurate to 2^-22 of that distance and rounds correctly. A scale with more bits, or one whose reciprocal or
// remainders come near the ends of the exponent range, is divided by in the ordinary way.
class Divisor {
  public:
    Divisor(float scale, int shift) : divisor_(splat(scale > 0.0f ? scale : 1.0f)), power_(splat((float)(1 << shift))) {
#ifdef MASTERLESS_HAS_FMA
        const uint32_t b = bits(divisor_[0]);
        by_reciprocal_ = (b & 0xFFFFu) == 0 && b > (67u << 23) && b < (187u << 23);
        if (by_reciprocal_) {
            fine_ = divisor_ * (1.0f / power_);
            reciprocal_ = splat(1.0f / fine_[0]);
        }
#endif
    }

    bool by_reciprocal() const { return by_reciprocal_; }

    vf by_division(vf x) const { return x / divisor_ * power_; }

    vf by_multiplication(vf x) const {
#ifdef MASTERLESS_HAS_FMA
        const vf q = x * reciprocal_;
        return fma(fma(-q, fine_, x), reciprocal_, q);
#else
        return by_division(x);
#endif
    }

  private:
    vf divisor_, power_, fine_{}, reciprocal_{};
    bool by_reciprocal_ = false;
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
