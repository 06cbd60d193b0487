// Exact sums of squares: `storage.exact_sum` of the specification.
//
// Contract: summands are rounded to integers in units of a power of two chosen from the largest one; adding these makes no
// error, so that any order gives the same.
#pragma once

#include <cmath>

#include "rules.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

struct SumUnit {
    double unit = 1.0, inverse = 1.0;

    SumUnit() = default;
    SumUnit(double peak, int64_t count) {
        int exponent, count_bits = 0;
        std::frexp(peak, &exponent);
        while (((count > 1 ? count - 1 : 0) >> count_bits) != 0) ++count_bits;
        unit = std::ldexp(1.0, exponent - (52 - count_bits));
        inverse = std::ldexp(1.0, (52 - count_bits) - exponent);
    }

    // A summand below 2^52 units, rounded to a whole number of them.
    double whole(double x) const { return (x * inverse + 0x1p52) - 0x1p52; }
};

// An average of finite numbers is finite; its rounding need not be.
inline float finite(float average) { return average < kLargest ? average : kLargest; }

inline double square(float x) { return (double)x * (double)x; }

inline double sum_of_squares(const float* x, int n, const SumUnit& unit) {
    constexpr int kChains = 8;
    double sums[kChains] = {};
    int e = 0;
    for (; e + kChains <= n; e += kChains)
        for (int i = 0; i < kChains; ++i) sums[i] += unit.whole(square(x[e + i]));
    for (; e < n; ++e) sums[0] += unit.whole(square(x[e]));
    for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
    return sums[0];
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

}  // namespace MASTERLESS_ISA
}  // namespace masterless
