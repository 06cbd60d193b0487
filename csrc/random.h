// Random bits as a pure function of a counter: `rounding.dither` of the specification.
//
// Contract: SplitMix64 of a purpose's key and a chunk's number is the chunk's word. Each sixteen elements read a ring, a
// permutation of the numbers below 1024, from a place of their own: ten bits of the word, six bits further for each next
// sixteen. That makes the upper ten of an element's 16 bits; the lower six are the word's uppermost. No state, so threads,
// shards and order do not show; and nothing to mix or to keep: what rounding adds is loaded as it is added.
#pragma once

#include "simd.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr int kChunk = 128;  // elements packed together, and numbered together by the random bits
constexpr int kRing = 1024, kReadTogether = 16;
static_assert(kReadTogether % kLanes == 0, "a vector is read in one piece");

// SplitMix64 of key and chunk number.
inline uint64_t chunk_word(uint64_t key, uint64_t chunk) {
    uint64_t z = key + (chunk + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// A number rounded to an integer stands above these bits of a float, which hold its fraction: a sum in the binade of
// 2^(23 - kFraction). Codes have up to eight bits.
constexpr int kFraction = 15;
constexpr float kCodeBase = (float)(1 << (23 - kFraction));

// What is made of the ring's numbers r, in its order, and again from the start where the last sixteen reach over.
struct Ring {
    static constexpr int kLength = kRing + kReadTogether;
    static constexpr int kBends = 16;
    alignas(64) int32_t part[kLength];    // r / 1024 of a gap, in the bits of a fraction
    alignas(64) float fraction[kLength];  // the same as a number
    // kCodeBase and w = (r + 1/2) / 1024, of which nearly w (1 - w) is added, in sixteenths: a curve (`log_code.h`).
    alignas(64) float base[kBends + 1][kLength];

    constexpr Ring() : part(), fraction(), base() {
        for (int i = 0; i < kLength; ++i) {
            const uint32_t x = (uint32_t)i, r = x * (985u + x * 368u) % kRing;
            part[i] = (int32_t)r << (kFraction - 10);
            fraction[i] = (float)r * 0x1p-10f;
            for (int k = 0; k <= kBends; ++k)
                base[k][i] = (kCodeBase + ((float)r + 0.5f) * 0x1p-10f) +
                             (float)k / kBends * ((float)(r * (1023u - r)) * 0x1p-20f);
        }
    }
};
inline constexpr Ring kRingOf;

// The random numbers of one stored tensor in one chunk, from some element of it on; of a tensor that is rounded to nearest
// there are none.
class ChunkDraw {
  public:
    ChunkDraw() = default;
    ChunkDraw(uint64_t word, int from) : word_(word), from_(from) {}

    vi part(int i) const { return load<vi>(kRingOf.part + place(i)); }
    vf base(int i, int bend) const { return load<vf>(kRingOf.base[bend] + place(i)); }

    // The lower bits, which all elements share.
    int below_ring() const { return (int)(word_ >> 58); }

    // What a fraction is compared with, (u + 1/2) / 2^16: exact.
    vf threshold(int i) const {
        return load<vf>(kRingOf.fraction + place(i)) + splat(((float)below_ring() + 0.5f) * 0x1p-16f);
    }

    // u itself.
    vu dither(int i) const { return (vu)((part(i) << (16 - kFraction)) | below_ring()); }

  private:
    int place(int i) const {
        const int e = from_ + i;
        return (int)((word_ >> (6 * (e / kReadTogether))) % kRing) + e % kReadTogether;
    }

    uint64_t word_ = 0;
    int from_ = 0;
};

// The random numbers of one stored tensor in a span: the words of its chunks. They are made ahead, for each takes a while.
struct Draw {
    uint64_t* words = nullptr;  // none: it is rounded to nearest

    explicit operator bool() const { return words != nullptr; }

    // For chunks from number `first` on of the parameter.
    void prepare(uint64_t key, uint64_t first, int chunks) const {
        for (int k = 0; words && k < chunks; ++k) words[k] = chunk_word(key, first + (uint64_t)k);
    }

    // Of the span's chunk k, from its element `from` on.
    ChunkDraw at(int k, int from = 0) const { return {words[k], from}; }
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
