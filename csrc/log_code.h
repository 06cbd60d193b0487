// The logarithmic code of second moments, in integer arithmetic on float bits: `log_code.py` of the specification.
//
// Contract: code k stands for the float with bits top - k * step (but at least 1 if top is not 0); with the zero flag
// the last code is zero itself. `top` is the upper half of the block's maximum, rounded up; `step` counts units of 2^13
// float bits; the lowest level is one of the minima of eight interleaved lanes. All quotients by `step` are exact.
#pragma once

#include <algorithm>

#include "abi.h"
#include "random.h"
#include "scale.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr int kStepUnit = 13;
constexpr int kLogLanes = 8, kLaneLength = 12;
constexpr uint32_t kNone = 0xFFFFFFFFu;  // minima are kept as bits - 1, so that a zero counts as none

// Stochastic rounding, made for what an update uses: a number s steps below the upper neighbour goes down with probability
// s (1 + c - c s), where c, here in sixteenths, is about tanh(ln(ratio)/8).
struct LogCurve {
    int32_t bend = 0;
    float inverse = 0.0f;  // of the step in float bits
};

// Those of a vector of blocks: two divisions for all of them.
struct LogCurves {
    vi bend;
    vf inverse;

    LogCurves() = default;
    explicit LogCurves(vi units) {
        const vf x = to_float(units) * 0x1.62e43p-14f, x2 = x * x;  // ln(2) / 8 over the units of an octave
        bend = to_int(min(x * (x2 + 27.0f) / (x2 * 9.0f + 27.0f), splat(1.0f)) * (float)Ring::kBends + 0.5f);
        inverse = 1.0f / (to_float(units) * (float)(1 << kStepUnit));
    }
};

// How far below its top a number lies, in steps, plus kCodeBase: rounded to an integer by what the ring adds.
inline vi rounded_steps(vi depth, vf inverse, int bend, const ChunkDraw& random, int i) {
    return bits(fma(to_float(depth), inverse, random.base(i, bend)));
}

struct LogBlock {
    int32_t top = 0;   // float bits
    int32_t step = 1;  // units of 2^13 float bits
    bool zero_flag = false;
    LogCurve curve;  // of a block that numbers are rounded in
};

inline LogBlock read_log_block(const MlStorage& s, int64_t index) {
    const uint16_t raw = (uint16_t)s.step[index];
    return {(int32_t)s.top[index] << 16, raw & 0x7FFF, (raw & 0x8000) != 0, {}};
}

inline void write_log_block(const MlStorage& s, int64_t index, const LogBlock& block) {
    s.top[index] = (int16_t)(block.top >> 16);
    s.step[index] = (int16_t)(uint16_t)(block.step | (block.zero_flag ? 0x8000 : 0));
}

// What the metadata of a block is made of.
struct LogSummary {
    int32_t top;    // float bits of its maximum
    int32_t low;    // of its lowest level
    int32_t zeros;  // -1 if there are some
};

// Float bits of the lowest level, from the minima of a block's lanes: of those that hold a positive number the one of the
// given rank out of 0 ... 7. (None + 1 wraps around to zero.)
inline int32_t lowest_level(const uint32_t* minima, int rank) {
    uint32_t smallest = kNone, second = kNone, largest = 0;  // the usual ranks need no sorting
    int found = 0;
    for (int i = 0; i < kLogLanes; ++i) {
        const uint32_t m = minima[i], above = m > smallest ? m : smallest;
        second = above < second ? above : second;
        smallest = m < smallest ? m : smallest;
        largest = m + 1u > largest ? m + 1u : largest;
        found += m != kNone;
    }
    if (rank == kLogLanes - 1) return (int32_t)largest;
    const int index = (found > 1 ? found - 1 : 0) * rank / (kLogLanes - 1);
    if (index <= 1) return (int32_t)((index ? second : smallest) + 1u);
    uint32_t sorted[kLogLanes];
    std::memcpy(sorted, minima, sizeof sorted);
    std::sort(sorted, sorted + kLogLanes);
    return (int32_t)(sorted[index] + 1u);
}

// Of how many lanes the minima count in a block: a power of two, so that each has kLaneLength elements.
inline int log_lanes(int64_t block_length) {
    int lanes = kLogLanes;
    while (lanes > 1 && lanes * kLaneLength > block_length) lanes /= 2;
    return lanes;
}

// Maximum, lane minima and presence of zeros of a block, gathered piece by piece.
class LogStatistics {
  public:
    explicit LogStatistics(int64_t block_length) {
        lanes_ = log_lanes(block_length);
        for (uint32_t& m : minima_) m = kNone;
    }

    // The next n numbers, which zeros follow up to a whole vector. All pieces but the last have a multiple of 16.
    void add(const float* x, int n) {
        vu minima[kVectors], lowest = splat(kNone);
        vi top{};
        for (vu& m : minima) m = splat(kNone);
        for (int e = 0, k = 0; e < n; e += kLanes, k = (k + 1) % kVectors) {
            const vi b = load<vi>(x + e);
            top = max(top, b);
            minima[k] = min(minima[k], (vu)b - 1u);
            lowest = min(lowest, n - e < kLanes ? (vu)select(lane_numbers() < n - e, b, splat(1)) : (vu)b);
        }
        const uint32_t largest = (uint32_t)horizontal_max(top);
        top_ = largest > top_ ? largest : top_;
        has_zero_ |= !all(lowest != 0u);
        uint32_t by_position[kWidth];
        std::memcpy(by_position, minima, sizeof minima);
        for (int i = 0; i < kWidth; ++i) {
            uint32_t& least = minima_[i % lanes_];
            least = by_position[i] < least ? by_position[i] : least;
        }
    }

    LogSummary summary(int rank) const {
        return {(int32_t)top_, lowest_level(minima_, rank), -(int32_t)has_zero_};
    }

  private:
    static constexpr int kWidth = 16, kVectors = kWidth / kLanes;  // a multiple of every number of lanes

    int lanes_;
    uint32_t top_ = 0;
    bool has_zero_ = false;
    uint32_t minima_[kLogLanes];
};

// The metadata of a vector of blocks from the float bits of their maxima and lowest levels; `zeros` is -1 where there are
// some, here and in the result.
struct LogBlocks {
    vi top, step, zeros;
    LogCurves curves;

    LogBlocks() = default;
    LogBlocks(const MlStorage& s, vi largest, vi low, vi has_zeros) {
        top = min((largest + 0xFFFF) & ~0xFFFF, splat((int32_t)kBf16Max));
        zeros = has_zeros & (top > 0);
        const vi range = (max(top - low, vi{}) + ((1 << kStepUnit) - 1)) >> kStepUnit;
        // Rounded up: range has at most 19 bits, so the quotient is right however it is rounded.
        const vi intervals = (1 << s.bits) - 1 + zeros;
        const vi quotient = to_int((to_float(range + intervals - 1) + 0.5f) / to_float(intervals));
        step = min(max(quotient, splat(1)), splat(0x7FFF));
        curves = LogCurves(step);
    }

    LogBlock operator[](int k) const {
        return {top[k], step[k], zeros[k] != 0, {curves.bend[k], curves.inverse[k]}};
    }

    // -1 for a block with neither zeros nor levels where floats end.
    vi are_plain(int bits) const {
        return (zeros == 0) & ((top >> kStepUnit) > (step << bits)) & (top < (int32_t)kBf16Max);
    }

    // Those of the first `count` lanes.
    void write(const MlStorage& s, int64_t index, int count) const {
        store_some_halves((uint16_t*)s.top + index, upper_half(top), count);
        store_some_halves((uint16_t*)s.step + index, upper_half((step << 16) | (zeros & (int32_t)0x80000000)), count);
    }
};

// distance / step, by the reciprocal of the step's units: a = distance / 2^13 has at most 19 bits and (a + 1/2) / units stays
// 2^-20 (relative) away from every integer, which one or two roundings cannot bridge.
inline vi steps_in(vu distance, vf reciprocal) {
    const vf a = to_float((vi)(distance >> kStepUnit));
    return to_int(kHasFma ? fma(a, reciprocal, 0.5f * reciprocal) : (a + 0.5f) * reciprocal);
}

class LogGrid {
  public:
    LogGrid(const LogBlock& block, int bits)
        : top_(splat(block.top)), floor_(splat((int32_t)(block.top > 0))), step_(splat(block.step) << kStepUnit),
          units_(splat((uint32_t)block.step)), reciprocal_(splat(block.curve.inverse) * (float)(1 << kStepUnit)),
          inverse_(splat(block.curve.inverse)), bend_(block.curve.bend), has_zeros_(block.zero_flag || block.top == 0),
          last_((1 << bits) - 1 - block.zero_flag), zero_code_(block.zero_flag ? (1 << bits) - 1 : 0),
          deepest_((int32_t)std::min((int64_t)last_ * block.step << kStepUnit, (int64_t)INT32_MAX)) {}

    template <int kRounding>
    vi encode(vf x, const ChunkDraw& random, int i) const {
        const vi depth = max(top_ - bits(x), vi{});
        vi code;
        if (kRounding == ML_NEAREST) {
            code = steps_in((vu)depth + (units_ << (kStepUnit - 1)));
        } else if (kRounding == ML_STOCHASTIC_LOG) {
            code = steps_in((vu)depth + ((random.dither(i) * units_) >> 3));  // u * step / 2^16
        } else if (kRounding == ML_STOCHASTIC) {
            const vi sum = rounded_steps(min(depth, splat(deepest_)), inverse_, bend_, random, i);
            code = (sum >> kFraction) & ((1 << (23 - kFraction)) - 1);
            // Where levels end at the smallest float, that is one of them.
            if (!all(bits(x) != 1)) code = select(bits(x) == 1, steps_in((vu)depth) + 1, code);
        } else {
            code = steps_in((vu)depth);
            const vf upper = from_bits(max(below_top(code), floor_)), lower = from_bits(max(below_top(code) - step_, floor_));
            code = select(x - lower <= random.threshold(i) * (upper - lower), code + 1, code);
        }
        code = min(code, splat(last_));
        return has_zeros_ ? select(bits(x) > 0, code, splat(zero_code_)) : code;
    }

    vf level(vi code) const {
        const vi b = max(below_top(code), floor_);
        return from_bits(has_zeros_ && zero_code_ ? select(code == zero_code_, vi{}, b) : b);
    }

  private:
    // Modulo 2^32, which is right because the true value is above -2^31.
    vi below_top(vi code) const { return (vi)((vu)top_ - (vu)code * (vu)step_); }

    vi steps_in(vu distance) const { return masterless::steps_in(distance, reciprocal_); }

    vi top_, floor_, step_;
    vu units_;
    vf reciprocal_, inverse_;
    int bend_;
    bool has_zeros_;
    int32_t last_, zero_code_;
    int32_t deepest_;  // of the lowest positive level
};

// Lane k of some blocks that is plain (`LogBlocks::are_plain`), rounded stochastically: nothing but vectors.
class PlainLogGrid {
  public:
    PlainLogGrid(const LogBlocks& blocks, int k, int bits)
        : top_(held(splat(blocks.top[k]))), deepest_(held(splat(blocks.step[k] * ((1 << bits) - 1) << kStepUnit))),
          inverse_(held(splat(blocks.curves.inverse[k]))), bend_(blocks.curves.bend[k]) {}

    // The code stands above kFraction bits, alone in its byte.
    vi encode(vf x, const ChunkDraw& random, int i) const {
        return rounded_steps(min(top_ - bits(x), deepest_), inverse_, bend_, random, i);
    }

  private:
    vi top_, deepest_;
    vf inverse_;
    int bend_;
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
