// What each of a few vectors comes to: folded to one number each, all of them at once.
//
// Contract: vectors of eight lanes or more; up to kRows vectors, as many as each has lanes, and lane k of the result is
// vector k's. What other lanes hold does not matter.
#pragma once

#include <type_traits>

#include "simd.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr int kRows = kLanes < 8 ? 8 : kLanes;
constexpr int kEights = 8;

// One vector of two: lanes that are kDistance apart meet, those of `a` in one of them and those of `b` in the other.
template <int kDistance, class V, class Op>
__attribute__((always_inline)) inline V meet(V a, V b, Op&& op) {
    return op(alternate<kDistance>(a, b), partners<kDistance>(alternate<kDistance>(b, a)));
}

// Vector k of at most `count`; of vectors that are longer than eight lanes that and vector k + 8, each folded to eight.
template <class Row, class Op>
__attribute__((always_inline)) inline auto eight_of(int k, int count, Row&& row, Op&& op) {
    const auto at = [&](int i) __attribute__((always_inline)) { return row(i < count ? i : count - 1); };
    if constexpr (kLanes > kEights)
        return meet<kEights>(at(k), at(k + kEights), op);
    else
        return at(k);
}

// `combine(distance, a, b)` of eight vectors, of four, of two.
template <class At, class Combine>
__attribute__((always_inline)) inline auto fold_eight(At&& at, Combine&& combine) {
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    const auto a = combine(two, combine(one, at(0), at(1)), combine(one, at(2), at(3)));
    const auto b = combine(two, combine(one, at(4), at(5)), combine(one, at(6), at(7)));
    return combine(std::integral_constant<int, 4>{}, a, b);
}

// `row(k)` is vector k, `op` takes two vectors, in any order.
template <class Row, class Op>
__attribute__((always_inline)) inline auto fold_rows(int count, Row&& row, Op&& op) {
    const auto at = [&](int k) __attribute__((always_inline)) { return eight_of(k, count, row, op); };
    return fold_eight(at, [&](auto distance, auto a, auto b) __attribute__((always_inline)) {
        return meet<distance()>(a, b, op);
    });
}

// The smallest numbers of every vector, and the second smallest.
struct TwoSmallest {
    vu first, second;
};

template <int kDistance>
__attribute__((always_inline)) inline TwoSmallest meet(const TwoSmallest& a, const TwoSmallest& b) {
    const vu x = alternate<kDistance>(a.first, b.first), y = partners<kDistance>(alternate<kDistance>(b.first, a.first));
    const vu x2 = alternate<kDistance>(a.second, b.second);
    const vu y2 = partners<kDistance>(alternate<kDistance>(b.second, a.second));
    return {min(x, y), min(max(x, y), min(x2, y2))};
}

// Of the eight lanes of every vector, where those of longer vectors that are eight apart count as one: the smaller.
template <class Row>
__attribute__((always_inline)) inline TwoSmallest two_smallest_of_rows(int count, Row&& row) {
    const auto smaller = [](vu a, vu b) __attribute__((always_inline)) { return min(a, b); };
    const auto at = [&](int k) __attribute__((always_inline)) {
        return TwoSmallest{eight_of(k, count, row, smaller), splat(0xFFFFFFFFu)};
    };
    return fold_eight(at, [](auto distance, const TwoSmallest& a, const TwoSmallest& b) __attribute__((always_inline)) {
        return meet<distance()>(a, b);
    });
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
