// What the next span will read, asked for a little at a time while this one is computed. Into the second cache: the first
// is full of this span.
//
// Contract: nobody sees it. A core has few requests under way (some two dozen) and waits when it has more, so those of a
// span are spread over as much of its work as they need.
#pragma once

#include "simd.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

struct Upcoming {
    static constexpr int kCacheLine = 64;
    const char* at;
    int bytes;  // to ask for at a time

    // To read: what is only read need not be owned, and what is written is owned soon enough.
    __attribute__((always_inline)) static void ask_for(const char* line) { __builtin_prefetch(line, 0, 2); }

    void ask_for_more() {
        ask_for(at);
        at += bytes;
    }

    // The lines of 2 kLanes numbers from number 2i on, of so many bytes each. Inlined: GCC takes a function that only asks
    // for one without any effect.
    template <int kBytes>
    __attribute__((always_inline)) void ask_for_lines(int i) const {
        for (int line = 0; line < 2 * kLanes * kBytes; line += kCacheLine) ask_for(at + 2 * i * kBytes + line);
    }

    // Half of those of numbers of four bytes each, the first or the second.
    __attribute__((always_inline)) void ask_for_part(int i, int half) const {
        if (4 * kLanes >= kCacheLine || half == 0) ask_for(at + 8 * i + 4 * kLanes * half);
    }

    // All of them; mostly they are a line or less.
    __attribute__((always_inline)) void ask_for_all() {
        ask_for(at);
        if (bytes > kCacheLine)
            for (int line = kCacheLine; line < bytes; line += kCacheLine) ask_for(at + line);
        at += bytes;
    }

    // So many lines, if there is anything to ask for.
    template <int kLines>
    __attribute__((always_inline)) void ask_for_next() {
        if (!at) return;
        for (int line = 0; line < kLines; ++line) ask_for(at + line * kCacheLine);
        at += kLines * kCacheLine;
    }
};

// Of a gradient of four bytes a number beside a weight of as many, the rule asks for the weight, and the encoding of a
// chunk of the moments for the gradient.
constexpr int kLinesWithSecond = 5, kLinesWithFirst = 3;

}  // namespace MASTERLESS_ISA
}  // namespace masterless
