// Exact sums of squares: `storage.exact_sum` of the specification.
//
// Contract: summands are rounded to integers in units of a power of two chosen from the largest one; adding these makes no
// error, so that any order gives the same.
#pragma once

#include <cmath>

#include "reduce.h"
#include "rules.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

struct SumUnit {
    double unit = 1.0, inverse = 1.0;
    int exponent = 0, width = 52;  // all summands are below 2^exponent, and below 2^width units

    SumUnit() = default;
    SumUnit(double peak, int64_t count) {
        std::frexp(peak, &exponent);
        while (((count > 1 ? count - 1 : 0) >> (52 - width)) != 0) --width;
        unit = std::ldexp(1.0, exponent - width);
        inverse = std::ldexp(1.0, width - exponent);
    }

    // A summand below 2^52 units, rounded to a whole number of them.
    double whole(double x) const { return (x * inverse + 0x1p52) - 0x1p52; }
};

// An average of finite numbers is finite; its rounding need not be.
inline float finite(float average) { return average < kLargest ? average : kLargest; }

inline double square(float x) { return (double)x * (double)x; }

// The sum of f(0), f(1) and so on, which are whole numbers: in several chains, for an addition waits for the one before.
template <class F>
inline double sum_of(int64_t n, F&& f) {
    constexpr int kChains = 16;
    double sums[kChains] = {};
    int64_t e = 0;
    for (; e + kChains <= n; e += kChains)
        for (int i = 0; i < kChains; ++i) sums[i] += f(e + i);
    for (; e < n; ++e) sums[0] += f(e);
    for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
    return sums[0];
}

// In units.
inline double sum_of_squares(const float* x, int n, const SumUnit& unit) {
    return sum_of(n, [&](int64_t e) { return unit.whole(square(x[e])); });
}
inline double exact_sum(const float* x, int64_t n, const SumUnit& unit) {
    return sum_of(n, [&](int64_t e) { return unit.whole((double)x[e]); });
}

// Of numbers that are not negative; likewise in several chains.
inline float largest_of(const float* x, int64_t n) {
    constexpr int kChains = 32;
    float largest[kChains] = {};
    int64_t e = 0;
    for (; e + kChains <= n; e += kChains)
        for (int i = 0; i < kChains; ++i) largest[i] = x[e + i] > largest[i] ? x[e + i] : largest[i];
    for (; e < n; ++e) largest[0] = x[e] > largest[0] ? x[e] : largest[0];
    for (int i = 1; i < kChains; ++i) largest[0] = largest[i] > largest[0] ? largest[i] : largest[0];
    return largest[0];
}

// Many at once: 2^52 and a whole number of units is a double whose bits are those of 2^52 plus that number. So the bits are
// added, as integers, and 2^52 comes off in the end, as often as something was added.
inline double sum_of_wholes(uint64_t bits, int64_t count) {
    return (double)(int64_t)(bits - (uint64_t)count * 0x4330000000000000u);
}

constexpr int kSumsTogether = 4;  // rows that are added to the columns at once

// Adds the squares of kRows rows, in units, to the sums of their columns (as bits) and each row's sum to `row_sums`;
// `read(row, e)` is a vector of them.
template <int kRows, class Read>
inline void add_squares(int n, const SumUnit& unit, uint64_t* columns, double* row_sums, Read&& read) {
    const vd inverse = unit.inverse - vd{};
    vw rows[kRows] = {};
    int added = 0;
    for (int e = 0; e < n; e += kLanes, added += kLanes) {
        vw low = load<vw>(columns + e), high = load<vw>(columns + e + kLanes / 2);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const vf x = read(r, e);
            const vd x_low = low_half(x), x_high = high_half(x);
            const vw of_low = (vw)multiply_add(x_low * inverse, x_low, 0x1p52 - vd{});  // the product is exact
            const vw of_high = (vw)multiply_add(x_high * inverse, x_high, 0x1p52 - vd{});
            low += of_low, high += of_high;
            rows[r] += of_low + of_high;
        }
        store(columns + e, low);
        store(columns + e + kLanes / 2, high);
    }
    for (int r = 0; r < kRows; ++r) {
        uint64_t sum = 0;
        for (int i = 0; i < kLanes / 2; ++i) sum += rows[r][i];
        row_sums[r] += sum_of_wholes(sum, added);
    }
}

// The same of bf16 numbers, whose squares are exact in fp32, in half as many vectors: a summand's whole number of units is
// taken apart into an upper part, which is its kUpper highest bits, rounded, and what that leaves or lacks. Both stand in the
// lowest bits of a float to which kShift units of theirs were added; those bits are added, as integers of 32 bits.
class HalvedSquares {
  public:
    static constexpr int kUpper = 22, kShort = 256;  // of as many elements even a row's sum has no more than 31 bits

    explicit HalvedSquares(const SumUnit& unit)
        : lower_bits_(unit.width - kUpper), upper_shift_((float)std::ldexp(kShift, unit.exponent - kUpper)),
          lower_shift_((float)std::ldexp(kShift, unit.exponent - unit.width)) {}

    // Sums of up to 256 parts fit, and no square that counts is too small for a float.
    static bool suits(const SumUnit& unit) {
        const int lower_bits = unit.width - kUpper;
        return lower_bits > 0 && lower_bits <= kUpper && unit.exponent <= 100 && unit.exponent - unit.width >= -100;
    }

    // `read(row, e)` is a vector of row's numbers; `upper` and `lower` are the columns' sums.
    template <int kRows, class Read>
    void add(int n, uint32_t* upper, uint32_t* lower, double* row_sums, Read&& read) const {
        const vf upper_shift = splat(upper_shift_), lower_shift = splat(lower_shift_);
        vu row_upper[kRows] = {}, row_lower[kRows] = {};
        uint32_t added = 0;
        for (int e = 0; e < n; e += kLanes, ++added) {
            vu column_upper = load<vu>(upper + e), column_lower = load<vu>(lower + e);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const vf x = read(r, e), square = x * x, shifted = square + upper_shift;
                const vu above = (vu)bits(shifted), below = (vu)bits((square - (shifted - upper_shift)) + lower_shift);
                column_upper += above, column_lower += below;
                row_upper[r] += above, row_lower[r] += below;
            }
            store(upper + e, column_upper);
            store(lower + e, column_lower);
        }
        const auto above = [&](int r) { return (vi)(row_upper[r] - added * bits(upper_shift_)); };
        const auto below = [&](int r) { return (vi)(row_lower[r] - added * bits(lower_shift_)); };
        if constexpr (kLanes >= kEights)
            if (n <= kShort) {  // sums of all lanes fit, and all rows' are taken at once
                const vi sums = fold_rows(2 * kRows, [&](int k) { return k < kRows ? above(k) : below(k - kRows); },
                                          [](vi a, vi b) { return a + b; });
                for (int r = 0; r < kRows; ++r) row_sums[r] += whole(sums[r], sums[kRows + r]);
                return;
            }
        for (int r = 0; r < kRows; ++r) {
            int64_t sum_above = 0, sum_below = 0;
            for (int i = 0; i < kLanes; ++i) sum_above += above(r)[i], sum_below += below(r)[i];
            row_sums[r] += whole(sum_above, sum_below);
        }
    }

    // What sums of the bits of so many summands come to, in units.
    double sum(uint32_t upper, uint32_t lower, uint32_t count) const {
        return whole((int32_t)(upper - count * bits(upper_shift_)), (int32_t)(lower - count * bits(lower_shift_)));
    }

  private:
    double whole(int64_t above, int64_t below) const { return (double)(above * ((int64_t)1 << lower_bits_) + below); }

    int lower_bits_;
    float upper_shift_, lower_shift_;
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
