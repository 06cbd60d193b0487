// What each of a few vectors comes to: folded to one number each, all of them at once.
//
// Contract: vectors of eight lanes or more; up to kRows vectors, and lane k of the result is vector k's. What other lanes
// hold does not matter.
#pragma once

#include "simd.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr int kRows = 8;

// One vector of two: lanes that are kDistance apart meet, those of `a` in one of them and those of `b` in the other.
template <int kDistance, class V, class Op>
inline V meet(V a, V b, Op&& op) {
    return op(alternate<kDistance>(a, b), partners<kDistance>(alternate<kDistance>(b, a)));
}

// `row(k)` is vector k, `op` takes two vectors, in any order.
template <class Row, class Op>
inline auto fold_rows(int count, Row&& row, Op&& op) {
    const auto at = [&](int k) { return row(k < count ? k : count - 1); };
    const auto a = meet<2>(meet<1>(at(0), at(1), op), meet<1>(at(2), at(3), op), op);
    const auto b = meet<2>(meet<1>(at(4), at(5), op), meet<1>(at(6), at(7), op), op);
    const auto all = meet<4>(a, b, op);
    return kLanes > kRows ? op(all, partners<kRows>(all)) : all;
}

// The smallest numbers of every vector, and the second smallest.
struct TwoSmallest {
    vu first, second;
};

template <int kDistance>
inline TwoSmallest meet(const TwoSmallest& a, const TwoSmallest& b) {
    const vu x = alternate<kDistance>(a.first, b.first), y = partners<kDistance>(alternate<kDistance>(b.first, a.first));
    const vu x2 = alternate<kDistance>(a.second, b.second);
    const vu y2 = partners<kDistance>(alternate<kDistance>(b.second, a.second));
    return {min(x, y), min(max(x, y), min(x2, y2))};
}

// Of the first kRows lanes of every vector.
template <class Row>
inline TwoSmallest two_smallest_of_rows(int count, Row&& row) {
    const auto at = [&](int k) { return TwoSmallest{row(k < count ? k : count - 1), splat(0xFFFFFFFFu)}; };
    const TwoSmallest a = meet<2>(meet<1>(at(0), at(1)), meet<1>(at(2), at(3)));
    const TwoSmallest b = meet<2>(meet<1>(at(4), at(5)), meet<1>(at(6), at(7)));
    return meet<4>(a, b);
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
