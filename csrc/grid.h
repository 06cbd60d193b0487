// Grids of levels: how a number in units of its scale becomes a code. One class a family of formats.
//
// Contract, for each grid:
//   * `encode<kStochastic>(t, threshold, code)` returns the level (in units of the scale) that t is rounded to, and its
//     code. Nearest: ties go to the even code. Stochastic: to the upper neighbour where (t - lower) exceeds
//     threshold * (upper - lower), the threshold in units of kThresholdUnit. The code stands in the lowest 16 bits;
//     those above may be anything.
//   * t lies between the outermost levels.
//   * `level(code)` is the way back.
//   * t of the linear grid comes multiplied by 2^hidden, so that its levels are integers.
#pragma once

#include "abi.h"
#include "random.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

// Integers. The difference of t and the integer below it decides, as it is rounded; where levels stay below 2^7 (kNarrow)
// rounding t - threshold, a multiple of 2^-17, and going up from there to an integer comes to the same: the difference is
// exact, but for t between -1/2 and 0, and there both are rounded in the same place, just above -1.
template <bool kNarrow>
class LinearGrid {
  public:
    explicit LinearGrid(const MlStorage& s) : shift_(splat(kShift + (float)s.zero_code)), zero_code_(s.zero_code) {}

    static bool suits(const MlStorage& s) { return !kNarrow || s.limit < 128.0f; }

    template <bool kStochastic>
    vf encode(vf t, vf threshold, vi& code) const {
        const vf shifted = !kStochastic ? t + shift_  // zero codes are even, as kShift is
                           : kNarrow    ? shifted_ceil(multiply_add(threshold, splat(-kThresholdUnit), t), shift_)
                                        : shifted_floor(t, shift_);
        const vf index = shifted - shift_;
        code = bits(shifted);
        if (!kStochastic || kNarrow) return index;
        const vi up = t - index > threshold * kThresholdUnit;
        code = select(up, code + 1, code);
        return select(up, index + 1.0f, index);
    }

    vf level(vi code) const { return to_float(code - zero_code_); }

  private:
    vf shift_;
    int32_t zero_code_;
};

// Sign, E exponent bits, M mantissa bits, subnormals: code = the magnitude's rank, plus the sign bit above it.
//
// Within a binade (the subnormals share the lowest one) levels are a gap apart, so a number in units of that gap is rounded
// to an integer, as on a narrow linear grid.
template <int E, int M, bool kSigned>
class MinifloatGrid {
  public:
    explicit MinifloatGrid(const MlStorage&) {}

    template <bool kStochastic>
    vf encode(vf t, vf threshold, vi& code) const {
        const vi exponent = max(bits(t) & 0x7F800000, splat(kLowestExponent << 23));
        const vf gap = from_bits(exponent - (M << 23)), per_gap = from_bits((vi)(((254u + M) << 23) - (vu)exponent));
        const vf in_gaps = t * per_gap, shift = splat(kShift);
        const vf shifted = kStochastic ? shifted_ceil(multiply_add(threshold, splat(-kThresholdUnit), in_gaps), shift)
                                       : in_gaps + shift;
        const vi gaps = bits(shifted) - bits(shift), first_code = (exponent >> (23 - M)) - (kLowestExponent << M);
        code = first_code + select(gaps < 0, -gaps, gaps);
        const vf level = (shifted - shift) * gap;
        if (!kSigned) return level;
        code |= gaps & (1 << (E + M));  // set in small negative numbers, and not in zero
        return from_bits(bits(level) | (bits(t) & (int32_t)0x80000000));
    }

    vf level(vi code) const {
        const vi rank = code & ((1 << (E + M)) - 1);
        const vf normal = from_bits((rank << (23 - M)) + ((kLowestExponent - 1) << 23));
        const vf a = select(rank < (1 << M), to_float(rank) * kSmallest, normal);
        return kSigned ? from_bits(bits(a) | ((code >> (E + M)) << 31)) : a;
    }

  private:
    static constexpr int kBias = (1 << (E - 1)) - 1;
    static constexpr int kLowestExponent = 127 + 1 - kBias;  // of the smallest normal number, biased as in fp32
    static constexpr float kSmallest = 1.0f / (float)(1 << (kBias + M - 1));  // subnormal
};

// Any rising table of at most 256 levels.
class TableGrid {
  public:
    explicit TableGrid(const MlStorage& s)
        : levels_(s.levels), level_of_code_(s.level_of_code), code_of_level_(s.code_of_level), count_(s.level_count) {
        while (first_stride_ * 2 < count_) first_stride_ *= 2;
    }

    template <bool kStochastic>
    vf encode(vf t, vf threshold, vi& code) const {
        vi index{};  // the last level that is not above t, by bisection; `levels` is padded with infinities
        for (int stride = first_stride_; stride >= 1; stride /= 2) {
            const vi candidate = index + stride;
            index = select(t >= gather(levels_, candidate), candidate, index);
        }
        index = min(index, splat(count_ - 2));
        const vf lower = gather(levels_, index), upper = gather(levels_, index + 1);
        vi up;
        if (kStochastic) {
            up = t - lower > threshold * kThresholdUnit * (upper - lower);
        } else {
            const vf middle = (lower + upper) * 0.5f;
            up = (t > middle) | ((t == middle) & ((lookup(index + 1) & 1) == 0));
        }
        code = lookup(index - up);
        return select(up, upper, lower);
    }

    vf level(vi code) const { return gather(level_of_code_, code); }

  private:
    vi lookup(vi index) const {
        vi code;
        for (int i = 0; i < kLanes; ++i) code[i] = code_of_level_[index[i]];
        return code;
    }

    const float* levels_;
    const float* level_of_code_;
    const uint8_t* code_of_level_;
    int32_t count_;
    int first_stride_ = 1;
};

// Calls `f` with the grid of a scaled format.
template <class F>
inline void with_grid(const MlStorage& s, F&& f) {
    if (s.kind == ML_LINEAR) return LinearGrid<true>::suits(s) ? f(LinearGrid<true>(s)) : f(LinearGrid<false>(s));
    if (s.kind == ML_TABLE) return f(TableGrid(s));
    switch (s.exponent_bits * 100 + s.mantissa_bits * 10 + s.is_signed) {
        case 431: return f(MinifloatGrid<4, 3, true>(s));
        case 430: return f(MinifloatGrid<4, 3, false>(s));
        case 521: return f(MinifloatGrid<5, 2, true>(s));
        case 211: return f(MinifloatGrid<2, 1, true>(s));
        case 220: return f(MinifloatGrid<2, 2, false>(s));
        default: return f(TableGrid(s));  // a minifloat without a class of its own
    }
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
