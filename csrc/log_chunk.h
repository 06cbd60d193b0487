// What the metadata of logarithmic blocks is made of where a block is a chunk: noted as its numbers pass, and folded for
// several chunks at once.
#pragma once

#include "log_code.h"
#include "reduce.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

// The summary of a block that is one chunk, gathered vector by vector.
class LogChunk {
  public:
    LogChunk() : lowest_(splat(kNone)) {
        for (vu& m : minima_) m = lowest_;
    }

    void add(vi b, int o) {
        top_ = max(top_, b);
        vu& minimum = minima_[o / kLanes % kVectors];
        minimum = min(minimum, (vu)b - 1u);
        lowest_ = min(lowest_, (vu)b);
    }

    // The same where none is zero; `close_positive` comes after the last one.
    void add_positive(vi b, int o) {
        top_ = max(top_, b);
        vu& minimum = minima_[o / kLanes % kVectors];
        minimum = min(minimum, (vu)b);
    }

    void close_positive() {
        for (vu& m : minima_) m -= 1u;
    }

    // Of a block that has only so many lanes: each of theirs in all of its places, which ranks do not show.
    void fold_to(int lanes) {
        if (lanes <= 4) minima_[0] = min(minima_[0], partners<4>(minima_[0]));
        if (lanes <= 2) minima_[0] = min(minima_[0], partners<2>(minima_[0]));
        if (lanes <= 1) minima_[0] = min(minima_[0], partners<1>(minima_[0]));
    }

    vi top() const { return top_; }
    vu lowest() const { return lowest_; }
    vu minima() const { return minima_[0]; }

    LogSummary summary(int rank) const {
        // A number that overflowed was stored as the largest one.
        const int32_t top = horizontal_max(top_), largest = 0x7F7FFFFF;
        return {top < largest ? top : largest, low(rank), all(lowest_ != 0u) ? 0 : -1};
    }

  private:
    int32_t low(int rank) const {
        vu smallest = minima_[0], second = splat(kNone);  // of the lanes that have met
        if (kVectors == 2) second = max(minima_[0], minima_[1]), smallest = min(minima_[0], minima_[1]);
        if (kLanes > kLogLanes) smallest = min(smallest, partners<kLogLanes>(smallest));  // the same lanes
        if (rank == kLogLanes - 1) {
            vu largest = smallest + 1u;
            if (kVectors == 2) largest = max(largest, second + 1u);
            return (int32_t)horizontal_max((vi)largest);
        }
        const bool all_found = all(smallest != kNone) && (kVectors == 1 || all(second != kNone));
        if (rank > 1 || !all_found) {
            uint32_t minima[2 * kLanes];
            std::memcpy(minima, &smallest, sizeof smallest);
            std::memcpy(minima + kLanes, &second, sizeof second);
            return lowest_level(minima, rank);
        }
        meet<4>(smallest, second);
        meet<2>(smallest, second);
        meet<1>(smallest, second);
        return (int32_t)((rank ? second[0] : smallest[0]) + 1u);
    }

    // The two smallest of each lane's and its partner's two smallest.
    template <int kDistance>
    static void meet(vu& smallest, vu& second) {
        if (kDistance >= kLanes) return;  // those met when there were two vectors
        const vu other = partners<kDistance>(smallest), other_second = partners<kDistance>(second);
        second = min(max(smallest, other), min(second, other_second));
        smallest = min(smallest, other);
    }

    static constexpr int kVectors = kLanes < kLogLanes ? kLogLanes / kLanes : 1;

    vi top_{};
    vu lowest_, minima_[kVectors];
};

// Those of up to kRows chunks at once.
struct LogSummaries {
    vi top, low, zeros;

    LogSummaries(const LogChunk* chunks, int count, int rank) {
        static_assert(kEights == kLogLanes, "lanes of a vector are lanes of a block");
        const auto smaller = [](vu a, vu b) __attribute__((always_inline)) { return min(a, b); };
        const auto larger = [](vi a, vi b) __attribute__((always_inline)) { return max(a, b); };
        // A number that overflowed was stored as the largest one.
        const auto tops = [=](int k) __attribute__((always_inline)) { return chunks[k].top(); };
        top = min(fold_rows(count, tops, larger), splat(0x7F7FFFFF));
        const auto lowest = [=](int k) __attribute__((always_inline)) { return chunks[k].lowest(); };
        vu least = lowest(0);
        for (int k = 1; k < count; ++k) least = min(least, lowest(k));
        zeros = all(least != 0u) ? vi{} : (vi)(fold_rows(count, lowest, smaller) == 0u);
        const auto minima = [=](int k) __attribute__((always_inline)) { return chunks[k].minima(); };
        if (rank == 0) {
            low = (vi)(fold_rows(count, minima, smaller) + 1u);
        } else if (rank == kLogLanes - 1) {
            // The smaller of places that are the same lane, the largest of the lanes.
            const auto lanes = [&](int k) __attribute__((always_inline)) {
                return (vi)(eight_of(k, count, minima, smaller) + 1u);
            };
            low = fold_eight(lanes, [&](auto distance, vi a, vi b) __attribute__((always_inline)) {
                return meet<distance()>(a, b, larger);
            });
        } else {
            vu largest = minima(0);
            for (int k = 1; k < count; ++k) largest = max(largest, minima(k));
            if (rank == 1 && all(largest != kNone)) {
                low = (vi)(two_smallest_of_rows(count, minima).second + 1u);
            } else {
                for (int k = 0; k < count; ++k) low[k] = chunks[k].summary(rank).low;
            }
        }
    }
};

// Of chunks that nobody has looked at.
__attribute__((noinline)) inline LogSummaries look_at_chunks(const float* x, int count, int rank) {
    LogChunk chunks[kRows];
    for (int k = 0; k < count; ++k)
        for (int o = 0; o < kChunk; o += kLanes) chunks[k].add(load<vi>(x + k * kChunk + o), o);
    return LogSummaries(chunks, count, rank);
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
