// What the rule will read, asked for a little at a time: gradients, and weights that lie in place, some way ahead of where it
// is, so that they come just in time; of codes, which are few, those of the next span.
//
// Contract: nobody sees it. A core has few requests under way: one that has more waits, or forgets them. So they are spread
// over as much of the work as they need.
#pragma once

#include "simd.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

struct Upcoming {
    static constexpr int kCacheLine = 64;
    static constexpr int kAhead = 4096;  // bytes, of what is read at every step of the rule
    const char* at;
    int bytes;  // to ask for at a time

    // To read: what is only read need not be owned, and what is written is owned soon enough. Into the first cache, or the second.
    __attribute__((always_inline)) static void ask_for(const char* line) { __builtin_prefetch(line, 0, 3); }
    __attribute__((always_inline)) static void ask_for_later(const char* line) { __builtin_prefetch(line, 0, 2); }

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
        ask_for_later(at);
        if (bytes > kCacheLine)
            for (int line = kCacheLine; line < bytes; line += kCacheLine) ask_for_later(at + line);
        at += bytes;
    }
};

// What the next span has of a gradient and a weight of four bytes a number, from where the rule's own requests of this one
// end: the encoding of the moments asks for a part of it, for memory would have nothing to do meanwhile.
struct NextSpan {
    static constexpr int kLines = 2;  // of each, with every chunk of a moment
    const char *gradient = nullptr, *weight = nullptr;  // null: there is nothing to ask for

    __attribute__((always_inline)) void ask_for_more() {
        if (!gradient) return;
        for (int line = 0; line < kLines; ++line) {
            Upcoming::ask_for_later(gradient + line * Upcoming::kCacheLine);
            Upcoming::ask_for_later(weight + line * Upcoming::kCacheLine);
        }
        pass(1);
    }

    void pass(int chunks) { gradient += chunks * kLines * Upcoming::kCacheLine, weight += chunks * kLines * Upcoming::kCacheLine; }
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
