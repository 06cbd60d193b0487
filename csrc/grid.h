// Grids of levels: how a number in units of its scale becomes a code. One class a family of formats.
//
// Contract, for each grid:
//   * `encode<kStochastic, kFits>(x, inverse, random, i, code)` returns the level (in units of the scale) that
//     t = x * inverse is rounded to, and its code. Nearest: ties go to the even code. Stochastic: with the random numbers from element i of a chunk on, to
//     the upper neighbour where (t - lower) exceeds threshold * (upper - lower). What lies beyond the outermost levels
//     becomes one of those; with kFits nothing does.
//   * The code stands from bit `code_at<kStochastic>()` on, alone in its byte; what is above and below may be anything.
//   * `level(code)` is the way back.
//   * t of the linear grid comes multiplied by 2^hidden, so that its levels are integers.
#pragma once

#include "abi.h"
#include "random.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

// Integers below 2^(22 - kBelow). Stochastic: t, which is not rounded by itself, goes into the binade where kBelow bits are
// left for its fraction, to which random ones are added; what they carry over is the rounding, and the code stands above them.
// A level's own t, whose error is below 2^-23 of it, has no fraction there.
template <int kBelow>
class LinearGrid {
  public:
    explicit LinearGrid(const MlStorage& s)
        : shift_(splat(kShift + (float)s.zero_code)), base_(splat((float)(1 << (23 - kBelow)) + (float)s.zero_code)),
          low_(base_ - (s.is_signed ? s.limit : 0.0f)), high_(base_ + s.limit),
          low_shifted_(shift_ - (s.is_signed ? s.limit : 0.0f)), high_shifted_(shift_ + s.limit),
          zero_code_(s.zero_code) {}

    static bool suits(const MlStorage& s) { return s.limit < (float)(1 << (22 - kBelow)); }

    template <bool kStochastic>
    static constexpr int code_at() { return kStochastic ? kBelow : 0; }

    // What is added to t before the random bits of the ring.
    vf base(const ChunkDraw& random) const { return base_ + splat(kBelowRing.part[random.below_ring()]); }

    // What lies beyond is found in the sums' bits, which have the order of the numbers: cheaper than among floats.
    template <bool kStochastic, bool kFits>
    vf encode(vf x, vf inverse, const ChunkDraw& random, int i, vi& code) const {
        if (!kStochastic) {
            code = bits(fma(x, inverse, shift_));  // zero codes are even, as kShift is
            if (!kFits) code = min(max(code, bits(low_shifted_)), bits(high_shifted_));
            return from_bits(code) - shift_;
        }
        code = bits(fma(x, inverse, base(random))) + (random.part(i) >> (kFraction - kBelow));
        if (!kFits) code = min(max(code, bits(low_)), bits(high_));
        return from_bits(code & ~((1 << kBelow) - 1)) - base_;
    }

    vf level(vi code) const { return to_float(code - zero_code_); }

  private:
    // The six bits below the ring's, as far as a fraction has them.
    struct BelowRing {
        float part[64];
        constexpr BelowRing() : part() {
            for (int j = 0; j < 64; ++j) part[j] = (float)(j >> (16 - kBelow)) / (float)(1 << kBelow);
        }
    };
    static constexpr BelowRing kBelowRing{};

    vf shift_, base_;
    vf low_, high_, low_shifted_, high_shifted_;  // outermost levels among the sums
    int32_t zero_code_;
};

using NarrowGrid = LinearGrid<kFraction>;

// Sign, E exponent bits, M mantissa bits, subnormals: code = the magnitude's rank, plus the sign bit above it.
//
// Within a binade (the subnormals share the lowest one) levels are a gap apart, so a number in units of that gap is rounded
// to an integer, as on a narrow linear grid.
template <int E, int M, bool kSigned>
class MinifloatGrid {
  public:
    explicit MinifloatGrid(const MlStorage& s) : limit_(splat(s.limit)) {}

    template <bool>
    static constexpr int code_at() { return 0; }

    template <bool kStochastic, bool kFits>
    vf encode(vf x, vf inverse, const ChunkDraw& random, int i, vi& code) const {
        vf t = x * inverse;
        if (!kFits) t = min(max(t, kSigned ? -limit_ : vf{}), limit_);
        const vi exponent = max(bits(t) & 0x7F800000, splat(kLowestExponent << 23));
        const vf gap = from_bits(exponent - (M << 23)), per_gap = from_bits((vi)(((254u + M) << 23) - (vu)exponent));
        const vf in_gaps = t * per_gap, shift = splat(kShift);
        const vf shifted = kStochastic ? shifted_ceil(in_gaps - random.threshold(i), shift) : in_gaps + shift;
        const vi gaps = bits(shifted) - bits(shift), first_code = (exponent >> (23 - M)) - (kLowestExponent << M);
        code = first_code + magnitude(gaps);
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

    vf limit_;
};

// Any rising table of at most 256 levels.
class TableGrid {
  public:
    explicit TableGrid(const MlStorage& s)
        : levels_(s.levels), level_of_code_(s.level_of_code), code_of_level_(s.code_of_level), count_(s.level_count),
          low_(splat(s.is_signed ? -s.limit : 0.0f)), high_(splat(s.limit)) {
        while (first_stride_ * 2 < count_) first_stride_ *= 2;
    }

    template <bool>
    static constexpr int code_at() { return 0; }

    template <bool kStochastic, bool kFits>
    vf encode(vf x, vf inverse, const ChunkDraw& random, int i, vi& code) const {
        vf t = x * inverse;
        if (!kFits) t = min(max(t, low_), high_);
        vi index{};  // the last level that is not above t, by bisection; `levels` is padded with infinities
        for (int stride = first_stride_; stride >= 1; stride /= 2) {
            const vi candidate = index + stride;
            index = select(t >= gather(levels_, candidate), candidate, index);
        }
        index = min(index, splat(count_ - 2));
        const vf lower = gather(levels_, index), upper = gather(levels_, index + 1);
        vi up;
        if (kStochastic) {
            up = t - lower > random.threshold(i) * (upper - lower);
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
    vf low_, high_;
};

// Calls `f` with the grid of a scaled format.
template <class F>
inline void with_grid(const MlStorage& s, F&& f) {
    if (s.kind == ML_LINEAR) return NarrowGrid::suits(s) ? f(NarrowGrid(s)) : f(LinearGrid<13>(s));
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
