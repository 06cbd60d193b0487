// Codes of 1 to 8 bits to bytes and back, a chunk of 128 at a time: `packing.py` of the specification.
//
// Contract: a code is cut into planes of 8, 4, 2 and 1 bits, highest bits first; a plane of p bits over n codes is
// h = ceil(n * p / 8) bytes, byte i holding codes i, i + h, i + 2h, ... from its lowest bits up. Unused bits are zero.
// Unpacked codes are one byte each.
#pragma once

#include "random.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

template <int P>
constexpr int plane_bytes(int n) {
    return (n * P + 7) / 8;
}

// So many bytes as words.
typedef uint32_t Words16 __attribute__((vector_size(16)));
typedef uint32_t Words32 __attribute__((vector_size(32)));
typedef uint32_t Words64 __attribute__((vector_size(64)));
template <int kBytes> struct WordsOf;
template <> struct WordsOf<16> { typedef Words16 type; };
template <> struct WordsOf<32> { typedef Words32 type; };
template <> struct WordsOf<64> { typedef Words64 type; };

// The plane of a full chunk, 16 * P bytes, in pieces that are vectors of this instruction set, or all of it. (GCC copies longer
// ones through memory, by halves that are then waited for.) Shifting whole words instead of bytes is fine: what crosses from
// byte to byte is masked away.
template <int P>
struct FullPlane {
    static constexpr int kHeight = 16 * P, kPerByte = 8 / P;
    static constexpr int kPiece = kHeight < 4 * kLanes ? kHeight : 4 * kLanes;
    static constexpr uint32_t kMask = ((1u << P) - 1u) * 0x01010101u;
    typedef typename WordsOf<kPiece>::type Piece;

    template <bool kFirst>
    static void unpack(const uint8_t* data, int low, uint8_t* codes) {
        for (int i = 0; i < kHeight; i += kPiece) {
            const Piece packed = load<Piece>(data + i);
            for (int j = 0; j < kPerByte; ++j) {
                Piece plane = ((packed >> (j * P)) & kMask) << low;
                if (!kFirst) plane |= load<Piece>(codes + j * kHeight + i);
                store(codes + j * kHeight + i, plane);
            }
        }
    }

    static void pack(const uint8_t* codes, int low, uint8_t* data) {
        for (int i = 0; i < kHeight; i += kPiece) {
            Piece packed{};
            for (int j = 0; j < kPerByte; ++j) packed |= ((load<Piece>(codes + j * kHeight + i) >> low) & kMask) << (j * P);
            store(data + i, packed);
        }
    }
};

// A chunk at the end of a row: n < 128 codes, so that a plane of up to four bits has at most 64 bytes. Nothing is read or
// written behind the packed bytes.
template <int P, bool kFirst>
inline void unpack_plane(const uint8_t* data, int n, int low, uint8_t* codes) {
    if (n == kChunk) return FullPlane<P>::template unpack<kFirst>(data, low, codes);
    if (P == 8) return (void)std::memcpy(codes, data, (size_t)n);
    constexpr uint32_t kMask = FullPlane<P>::kMask;
    const int height = plane_bytes<P>(n);
    const Words64 packed = load_some<Words64>(data, height);
    for (int start = 0, shift = 0; start < n; start += height, shift += P) {
        Words64 column = ((packed >> shift) & kMask) << low;
        if (!kFirst) column |= load<Words64>(codes + start);
        store_some(codes + start, column, n - start < height ? n - start : height);
    }
}

template <int P>
inline void pack_plane(const uint8_t* codes, int n, int low, uint8_t* data) {
    if (n == kChunk) return FullPlane<P>::pack(codes, low, data);
    if (P == 8) return (void)std::memcpy(data, codes, (size_t)n);
    constexpr uint32_t kMask = FullPlane<P>::kMask;
    const int height = plane_bytes<P>(n);
    Words64 packed{};
    for (int start = 0, shift = 0; start < n; start += height, shift += P) {
        const Words64 column = load_some<Words64>(codes + start, n - start < height ? n - start : height);
        packed |= ((column >> low) & kMask) << shift;
    }
    store_some(data, packed, height);
}

template <bool kFirst>
inline const uint8_t* unpack_planes_of(int width, const uint8_t* data, int n, int low, uint8_t* codes) {
    switch (width) {
        case 8: unpack_plane<8, kFirst>(data, n, low, codes); return data + plane_bytes<8>(n);
        case 4: unpack_plane<4, kFirst>(data, n, low, codes); return data + plane_bytes<4>(n);
        case 2: unpack_plane<2, kFirst>(data, n, low, codes); return data + plane_bytes<2>(n);
        default: unpack_plane<1, kFirst>(data, n, low, codes); return data + plane_bytes<1>(n);
    }
}

inline uint8_t* pack_plane_of(int width, const uint8_t* codes, int n, int low, uint8_t* data) {
    switch (width) {
        case 8: pack_plane<8>(codes, n, low, data); return data + plane_bytes<8>(n);
        case 4: pack_plane<4>(codes, n, low, data); return data + plane_bytes<4>(n);
        case 2: pack_plane<2>(codes, n, low, data); return data + plane_bytes<2>(n);
        default: pack_plane<1>(codes, n, low, data); return data + plane_bytes<1>(n);
    }
}

// The n codes of one chunk (n < 128 at the end of a row) to one byte each.
inline void unpack_chunk(const uint8_t* data, int n, int bits, uint8_t* codes) {
    bool first = true;
    for (int width = 8, low = bits; width >= 1; width /= 2) {
        if (low < width) continue;
        low -= width;
        data = first ? unpack_planes_of<true>(width, data, n, low, codes)
                     : unpack_planes_of<false>(width, data, n, low, codes);
        first = false;
    }
}

inline void pack_chunk(const uint8_t* codes, int n, int bits, uint8_t* data) {
    for (int width = 8, low = bits; width >= 1; width /= 2) {
        if (low < width) continue;
        low -= width;
        data = pack_plane_of(width, codes, n, low, data);
    }
}

// A run of `n` codes that starts at a chunk. Widths that are one plane need no look at the chunk's width.
template <int P>
inline void unpack_full_chunks(const uint8_t* data, int n, uint8_t* codes) {
    for (int e = 0; e + kChunk <= n; e += kChunk) FullPlane<P>::template unpack<true>(data + e / 8 * P, 0, codes + e);
}

template <int P>
inline void pack_full_chunks(const uint8_t* codes, int n, uint8_t* data) {
    for (int e = 0; e + kChunk <= n; e += kChunk) FullPlane<P>::pack(codes + e, 0, data + e / 8 * P);
}

inline void unpack(const uint8_t* data, int n, int bits, uint8_t* codes) {
    int done = n / kChunk * kChunk;
    switch (bits) {
        case 8: unpack_full_chunks<8>(data, n, codes); break;
        case 4: unpack_full_chunks<4>(data, n, codes); break;
        case 2: unpack_full_chunks<2>(data, n, codes); break;
        default: done = 0;
    }
    for (int e = done; e < n; e += kChunk)
        unpack_chunk(data + e / 8 * bits, n - e < kChunk ? n - e : kChunk, bits, codes + e);
}

inline void pack(const uint8_t* codes, int n, int bits, uint8_t* data) {
    int done = n / kChunk * kChunk;
    switch (bits) {
        case 8: pack_full_chunks<8>(codes, n, data); break;
        case 4: pack_full_chunks<4>(codes, n, data); break;
        case 2: pack_full_chunks<2>(codes, n, data); break;
        default: done = 0;
    }
    for (int e = done; e < n; e += kChunk)
        pack_chunk(codes + e, n - e < kChunk ? n - e : kChunk, bits, data + e / 8 * bits);
}

// Codes of 4 bits with neighbours in one byte, the first in its lower half.
inline void unpack_pairs(const uint8_t* data, int n, uint8_t* codes) {
    for (int i = 0; i < n / 2; ++i) {
        codes[2 * i] = data[i] & 15;
        codes[2 * i + 1] = (uint8_t)(data[i] >> 4);
    }
    if (n % 2) codes[n - 1] = data[n / 2] & 15;
}

inline void pack_pairs(const uint8_t* codes, int n, uint8_t* data) {
    for (int i = 0; i < n / 2; ++i) data[i] = (uint8_t)((codes[2 * i] & 15) | (codes[2 * i + 1] << 4));
    if (n % 2) data[n / 2] = codes[n - 1] & 15;
}

// Bytes that the whole chunks before element `e` (a multiple of a chunk) take.
inline int64_t packed_offset(int64_t e, int bits) { return e / 8 * bits; }

}  // namespace MASTERLESS_ISA
}  // namespace masterless
