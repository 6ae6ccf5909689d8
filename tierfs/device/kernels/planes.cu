// Byte planes of blocks: the transforms that the codecs PLANE and DPLANE apply before zstd, and their inverses.
//
// FORMAT.md, "Codecs". This file does only the transform: the host makes modes, frames and tails. Plane 0 has
// the most significant byte of every element, and the planes lie one after the other without gaps.
// tierfs/device/planes.py launches both kernels.
//
// Launch: grid (blocks * parts), CUDA block (256). CUDA block g does part g mod `parts` of block floor(g /
// parts). The parts of a block take its units in turn. There is no shared memory, barrier or shuffle. Each
// byte of a block and of its base is read once, and each byte of the result is written once.
//
// Four elements make a quad: `W` words of elements, and one word of each of their `W` planes. A thread
// transposes quads in registers, four words at a time. A unit is `K` adjacent quads. The lanes of a warp take
// adjacent units, so every access of a warp covers whole lines, both for elements and for planes.
//
// Addresses may have any alignment. If a unit is not aligned for vectors, the kernel reads the aligned words
// around it and shifts them. Such a word contains at least one byte of the unit. So it may reach 3 bytes
// beyond the block, but never into another page, and the bytes there do not influence the result. Elements
// outside of all units take the general path, byte by byte.
//
// NVRTC compiles this file, so it includes no header. tests/support/cuda_emulator.py compiles it for the CPU.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// One row of the table, as planes.py packs it. `base` is 0 for PLANE. `order` is
// tierfs.codec.planes.planes.PlaneOrder.
struct Row {
    u64 raw;
    u64 base;
    u64 planes;
    u32 length;  // of the block with its tail, in bytes
    u8 width;    // 1, 2, 4 or 8
    u8 order;
    u8 zeros[2];
};

// The change of an element before it is split into planes.
constexpr int COPY = 0;              // nothing
constexpr int SIGN_LAST = 1;         // the upper 16 bits: exponent, then sign, then the bits behind the exponent
constexpr int DIFFERENCE = 2;        // zigzag(element - base)
constexpr int DIFFERENCE_UPPER = 3;  // element - base, of which the upper 16 bits are zigzagged alone

// tierfs.codec.planes.planes.PlaneOrder
constexpr int ORDER_SIGN_LAST = 1;
constexpr int ORDER_ZIGZAG = 2;

// Words of a block that a thread has in flight, and as many of its base. 64 bytes of each hide the latency at
// 256 threads.
constexpr int WORDS_IN_FLIGHT = 16;
// Elements that a thread has in flight on the general path.
constexpr int ELEMENTS_IN_FLIGHT = 4;

// Quads per unit: 16 bytes of elements, or 32 bytes if elements have 8 bytes.
template <int W>
struct Unit {
    static constexpr int QUADS = W >= 4 ? 1 : 4 / W;
    static constexpr int WORDS = W * QUADS;
    static constexpr int ELEMENTS = 4 * QUADS;
    static constexpr int BYTES = 4 * WORDS;
    static constexpr int IN_FLIGHT = WORDS_IN_FLIGHT / WORDS;
};

// A word has 4, 2 or 1 elements, or half an element. Masks of a word: the highest bit of each element, the
// lowest bit of each element, and all bits of the lowest element.
template <int W>
struct Field {
    static constexpr u32 HIGHEST = W == 1 ? 0x80808080u : W == 2 ? 0x80008000u : 0x80000000u;
    static constexpr u32 LOWEST = W == 1 ? 0x01010101u : W == 2 ? 0x00010001u : 0x00000001u;
    static constexpr u32 FULL = W == 1 ? 0xFFu : W == 2 ? 0xFFFFu : 0xFFFFFFFFu;
    static constexpr int TOP = W == 1 ? 7 : W == 2 ? 15 : 31;
};

// The smallest number of words that has whole elements.
template <int W>
constexpr int GROUP = W == 8 ? 2 : 1;

// Subtracts or adds each field, with the highest bits handled apart, so that no carry goes from one field to
// the next.
template <int W>
__device__ __forceinline__ u32 subtract_fields(u32 a, u32 b) {
    constexpr u32 H = Field<W>::HIGHEST;
    return W >= 4 ? a - b : ((a | H) - (b & ~H)) ^ ((a ^ ~b) & H);
}

template <int W>
__device__ __forceinline__ u32 add_fields(u32 a, u32 b) {
    constexpr u32 H = Field<W>::HIGHEST;
    return W >= 4 ? a + b : ((a & ~H) + (b & ~H)) ^ ((a ^ b) & H);
}

template <int W>
__device__ __forceinline__ u32 zigzag_fields(u32 x) {
    const u32 signs = (x >> Field<W>::TOP) & Field<W>::LOWEST;
    return ((x & ~Field<W>::HIGHEST) << 1) ^ (signs * Field<W>::FULL);
}

template <int W>
__device__ __forceinline__ u32 unzigzag_fields(u32 x) {
    return ((x >> 1) & ~Field<W>::HIGHEST) ^ ((x & Field<W>::LOWEST) * Field<W>::FULL);
}

// Moves the sign behind the exponent, in the upper 16 bits of a word, or with `W` = 2 in both halves.
template <int W>
__device__ __forceinline__ u32 sign_last(u32 x) {
    return W == 2 ? ((x & 0x7F807F80u) << 1) | (x & 0x007F007Fu) | ((x >> 8) & 0x00800080u)
                  : ((x & 0x7F800000u) << 1) | (x & 0x007FFFFFu) | ((x >> 8) & 0x00800000u);
}

template <int W>
__device__ __forceinline__ u32 sign_first(u32 x) {
    return W == 2 ? ((x >> 1) & 0x7F807F80u) | (x & 0x007F007Fu) | ((x & 0x00800080u) << 8)
                  : ((x >> 1) & 0x7F800000u) | (x & 0x007FFFFFu) | ((x & 0x00800000u) << 8);
}

__device__ __forceinline__ u32 zigzag_upper(u32 x) {
    return (((x << 1) & 0xFFFE0000u) ^ ((x >> 31) * 0xFFFF0000u)) | (x & 0xFFFFu);
}

__device__ __forceinline__ u32 unzigzag_upper(u32 x) {
    return (((x >> 1) & 0x7FFF0000u) ^ (((x >> 16) & 1u) * 0xFFFF0000u)) | (x & 0xFFFFu);
}

__device__ __forceinline__ u64 long_of(const u32* x) { return static_cast<u64>(x[1]) << 32 | x[0]; }

__device__ __forceinline__ void put_long(u32* x, u64 value) {
    x[0] = static_cast<u32>(value);
    x[1] = static_cast<u32>(value >> 32);
}

// Changes the elements in a group of words to the form that goes into the planes. Elements of 8 bytes have
// their upper half in the second word.
template <int W, int T>
__device__ __forceinline__ void change(u32* x, const u32* base) {
    u32* const upper = x + GROUP<W> - 1;
    if constexpr (T == SIGN_LAST) {
        *upper = sign_last<W>(*upper);
    } else if constexpr (T != COPY) {
        if constexpr (W == 8) {
            u64 difference = long_of(x) - long_of(base);
            if constexpr (T == DIFFERENCE) {
                difference = (difference << 1) ^ (0 - (difference >> 63));
            }
            put_long(x, difference);
        } else {
            *x = subtract_fields<W>(*x, *base);
            if constexpr (T == DIFFERENCE) {
                *x = zigzag_fields<W>(*x);
            }
        }
        if constexpr (T == DIFFERENCE_UPPER) {
            *upper = zigzag_upper(*upper);
        }
    }
}

// The inverse of `change`.
template <int W, int T>
__device__ __forceinline__ void restore(u32* x, const u32* base) {
    u32* const upper = x + GROUP<W> - 1;
    if constexpr (T == SIGN_LAST) {
        *upper = sign_first<W>(*upper);
    } else if constexpr (T != COPY) {
        if constexpr (T == DIFFERENCE_UPPER) {
            *upper = unzigzag_upper(*upper);
        }
        if constexpr (W == 8) {
            u64 difference = long_of(x);
            if constexpr (T == DIFFERENCE) {
                difference = (difference >> 1) ^ (0 - (difference & 1));
            }
            put_long(x, difference + long_of(base));
        } else {
            if constexpr (T == DIFFERENCE) {
                *x = unzigzag_fields<W>(*x);
            }
            *x = add_fields<W>(*x, *base);
        }
    }
}

// Transposes 4 x 4 bytes: byte j of word i becomes byte i of word j.
__device__ __forceinline__ void transpose(u32& a, u32& b, u32& c, u32& d) {
    const u32 ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    const u32 cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab_low, cd_low, 0x5410);
    b = __byte_perm(ab_low, cd_low, 0x7632);
    c = __byte_perm(ab_high, cd_high, 0x5410);
    d = __byte_perm(ab_high, cd_high, 0x7632);
}

// Splits the words of a quad into one word of each plane. These go to every `K`-th word of `planes`.
template <int W, int K>
__device__ __forceinline__ void split_quad(const u32* x, u32* planes) {
    if constexpr (W == 1) {
        planes[0] = x[0];
    } else if constexpr (W == 2) {
        planes[0] = __byte_perm(x[0], x[1], 0x7531);
        planes[K] = __byte_perm(x[0], x[1], 0x6420);
    } else {
        // With elements of 8 bytes, every second word is an upper half.
#pragma unroll
        for (int half = 0; half < GROUP<W>; half++) {
            constexpr int STEP = GROUP<W>;
            const u32* const from = x + STEP - 1 - half;
            u32* const to = planes + 4 * K * half;
            u32 a = from[0], b = from[STEP], c = from[2 * STEP], d = from[3 * STEP];
            transpose(a, b, c, d);
            to[0] = d;
            to[K] = c;
            to[2 * K] = b;
            to[3 * K] = a;
        }
    }
}

// The inverse of `split_quad`.
template <int W, int K>
__device__ __forceinline__ void join_quad(const u32* planes, u32* x) {
    if constexpr (W == 1) {
        x[0] = planes[0];
    } else if constexpr (W == 2) {
        x[0] = __byte_perm(planes[K], planes[0], 0x5140);
        x[1] = __byte_perm(planes[K], planes[0], 0x7362);
    } else {
#pragma unroll
        for (int half = 0; half < GROUP<W>; half++) {
            constexpr int STEP = GROUP<W>;
            const u32* const from = planes + 4 * K * half;
            u32* const to = x + STEP - 1 - half;
            u32 d = from[0], c = from[K], b = from[2 * K], a = from[3 * K];
            transpose(a, b, c, d);
            to[0] = a;
            to[STEP] = b;
            to[2 * STEP] = c;
            to[3 * STEP] = d;
        }
    }
}

// The size in bytes of the largest vector that divides `N` words.
template <int N>
constexpr u32 VECTOR = N % 4 == 0 ? 16 : N % 2 == 0 ? 8 : 4;

// Whether all addresses that were combined into `bits` by OR are multiples of the vector of `N` words.
template <int N>
__device__ __forceinline__ bool is_aligned(u64 bits) {
    return bits % VECTOR<N> == 0;
}

__device__ __forceinline__ u64 bits_of(const void* at) { return reinterpret_cast<u64>(at); }

// Loads `N` words from an address. With ALIGNED, the address is aligned for vectors, and vectors are used.
template <int N, bool ALIGNED>
__device__ __forceinline__ void load(const u8* at, u32* words) {
    if constexpr (!ALIGNED) {
        const u32 offset = static_cast<u32>(bits_of(at) & 3);
        const u32 selector = 0x3210 + 0x1111 * offset;
        const u32* const around = reinterpret_cast<const u32*>(at - offset);
        u32 low = around[0];
#pragma unroll
        for (int i = 0; i < N; i++) {
            // Without a shift, the word behind the last one may be unreadable, so it is not read.
            const u32 high = i + 1 < N || offset ? around[i + 1] : 0;
            words[i] = __byte_perm(low, high, selector);
            low = high;
        }
    } else if constexpr (VECTOR<N> == 16) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const uint4 vector = reinterpret_cast<const uint4*>(at)[i];
            words[4 * i] = vector.x;
            words[4 * i + 1] = vector.y;
            words[4 * i + 2] = vector.z;
            words[4 * i + 3] = vector.w;
        }
    } else if constexpr (VECTOR<N> == 8) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const uint2 vector = reinterpret_cast<const uint2*>(at)[i];
            words[2 * i] = vector.x;
            words[2 * i + 1] = vector.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            words[i] = reinterpret_cast<const u32*>(at)[i];
        }
    }
}

// Stores `N` words to an address that is aligned for their vectors.
template <int N>
__device__ __forceinline__ void store(u8* at, const u32* words) {
    if constexpr (VECTOR<N> == 16) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            uint4 vector;
            vector.x = words[4 * i];
            vector.y = words[4 * i + 1];
            vector.z = words[4 * i + 2];
            vector.w = words[4 * i + 3];
            reinterpret_cast<uint4*>(at)[i] = vector;
        }
    } else if constexpr (VECTOR<N> == 8) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            uint2 vector;
            vector.x = words[2 * i];
            vector.y = words[2 * i + 1];
            reinterpret_cast<uint2*>(at)[i] = vector;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            reinterpret_cast<u32*>(at)[i] = words[i];
        }
    }
}

// A block, its base and its planes, of `count` elements each. The base is read only for differences.
struct Block {
    u8* raw;
    const u8* base;
    u8* planes;
    u32 count;
    u32 thread;   // number of this thread among those that work on this block
    u32 threads;  // number of threads that work on this block
};

// Splits `units` units, starting with the first element. The planes are aligned for the vectors of a unit.
template <int W, int T, bool ALIGNED>
__device__ void split_units(const Block& block, u32 units) {
    constexpr int N = Unit<W>::WORDS, K = Unit<W>::QUADS, U = Unit<W>::IN_FLIGHT;
    const u32 stride = block.threads;
    for (u32 first = block.thread; first < units; first += U * stride) {
        u32 words[U][N], bases[U][N];
#pragma unroll
        for (int u = 0; u < U; u++) {
            const u32 unit = first + u * stride;
            if (unit < units) {
                load<N, ALIGNED>(block.raw + unit * Unit<W>::BYTES, words[u]);
                if constexpr (T >= DIFFERENCE) {
                    load<N, ALIGNED>(block.base + unit * Unit<W>::BYTES, bases[u]);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            const u32 unit = first + u * stride;
            if (unit < units) {
                u32 planes[N];
#pragma unroll
                for (int i = 0; i < N; i += GROUP<W>) {
                    change<W, T>(words[u] + i, bases[u] + i);
                }
#pragma unroll
                for (int quad = 0; quad < K; quad++) {
                    split_quad<W, K>(words[u] + quad * W, planes + quad);
                }
#pragma unroll
                for (int plane = 0; plane < W; plane++) {
                    store<K>(block.planes + plane * block.count + unit * Unit<W>::ELEMENTS, planes + plane * K);
                }
            }
        }
    }
}

// Joins `units` units, starting with element `head`. The elements there are aligned for vectors.
template <int W, int T, bool ALIGNED>
__device__ void join_units(const Block& block, u32 head, u32 units) {
    constexpr int N = Unit<W>::WORDS, K = Unit<W>::QUADS, U = Unit<W>::IN_FLIGHT;
    const u32 stride = block.threads;
    for (u32 first = block.thread; first < units; first += U * stride) {
        u32 planes[U][N], bases[U][N];
#pragma unroll
        for (int u = 0; u < U; u++) {
            const u32 unit = first + u * stride;
            if (unit < units) {
                const u32 element = head + unit * Unit<W>::ELEMENTS;
#pragma unroll
                for (int plane = 0; plane < W; plane++) {
                    load<K, ALIGNED>(block.planes + plane * block.count + element, planes[u] + plane * K);
                }
                if constexpr (T >= DIFFERENCE) {
                    load<N, ALIGNED>(block.base + element * W, bases[u]);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            const u32 unit = first + u * stride;
            if (unit < units) {
                u32 words[N];
#pragma unroll
                for (int quad = 0; quad < K; quad++) {
                    join_quad<W, K>(planes[u] + quad, words + quad * W);
                }
#pragma unroll
                for (int i = 0; i < N; i += GROUP<W>) {
                    restore<W, T>(words + i, bases[u] + i);
                }
                store<N>(block.raw + head * W + unit * Unit<W>::BYTES, words);
            }
        }
    }
}

// Returns byte `byte` of an element, counted from the least significant one.
template <int W>
__device__ __forceinline__ u32 byte_of(const u32* group, int byte) {
    return (group[byte / 4] >> 8 * (byte % 4)) & 0xFF;
}

template <int W>
__device__ __forceinline__ void load_element(const u8* at, u32* group) {
#pragma unroll
    for (int byte = 0; byte < W; byte++) {
        group[byte / 4] |= static_cast<u32>(at[byte]) << 8 * (byte % 4);
    }
}

template <int W, int T, bool IS_SPLIT>
__device__ __forceinline__ void convert(u32* group, const u32* base) {
    if constexpr (IS_SPLIT) {
        change<W, T>(group, base);
    } else {
        restore<W, T>(group, base);
    }
}

// Calls `change` or `restore` with a transform that is chosen at run time. If it were a template parameter,
// the general path would take long to compile.
template <int W, bool IS_SPLIT>
__device__ __forceinline__ void convert_as(int transform, u32* group, const u32* base) {
    if (W > 1 && transform == SIGN_LAST) {
        convert<W, SIGN_LAST, IS_SPLIT>(group, base);
    } else if (W > 2 && transform == DIFFERENCE_UPPER) {
        convert<W, DIFFERENCE_UPPER, IS_SPLIT>(group, base);
    } else if (transform != COPY) {
        convert<W, DIFFERENCE, IS_SPLIT>(group, base);
    }
}

// The elements from `begin` up to and without `end`, which are in units.
struct Range {
    u32 begin;
    u32 end;
};

// Splits or joins the elements outside of a range, one at a time, for any alignment.
template <int W, bool IS_SPLIT>
__device__ __forceinline__ void take_elements(const Block& block, Range done, int transform) {
    constexpr int U = ELEMENTS_IN_FLIGHT;
    const u32 stride = block.threads, left = done.begin + block.count - done.end;
    for (u32 first = block.thread; first < left; first += U * stride) {
        u32 groups[U][GROUP<W>] = {}, bases[U][GROUP<W>] = {};
#pragma unroll
        for (int u = 0; u < U; u++) {
            const u32 index = first + u * stride;
            const u32 element = index < done.begin ? index : index - done.begin + done.end;
            if (index < left) {
                if constexpr (IS_SPLIT) {
                    load_element<W>(block.raw + element * W, groups[u]);
                } else {
#pragma unroll
                    for (int byte = 0; byte < W; byte++) {
                        const u32 value = block.planes[(W - 1 - byte) * block.count + element];
                        groups[u][byte / 4] |= value << 8 * (byte % 4);
                    }
                }
                if (transform >= DIFFERENCE) {
                    load_element<W>(block.base + element * W, bases[u]);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            const u32 index = first + u * stride;
            const u32 element = index < done.begin ? index : index - done.begin + done.end;
            if (index < left) {
                convert_as<W, IS_SPLIT>(transform, groups[u], bases[u]);
#pragma unroll
                for (int byte = 0; byte < W; byte++) {
                    const u8 value = static_cast<u8>(byte_of<W>(groups[u], byte));
                    if constexpr (IS_SPLIT) {
                        block.planes[(W - 1 - byte) * block.count + element] = value;
                    } else {
                        block.raw[element * W + byte] = value;
                    }
                }
            }
        }
    }
}

// Returns bits that show the alignment of an element's address in all planes.
template <int W>
__device__ __forceinline__ u64 plane_bits(const Block& block, u32 element) {
    // Plane p begins p * count bytes behind the first. If the first address and `count` are multiples of a
    // power of two, so are all addresses.
    return (bits_of(block.planes) + element) | (W > 1 ? block.count : 0);
}

template <int W, int T>
__device__ Range split_block(const Block& block) {
    constexpr int N = Unit<W>::WORDS;
    const bool has_units = is_aligned<Unit<W>::QUADS>(plane_bits<W>(block, 0));
    const u32 units = has_units ? block.count / Unit<W>::ELEMENTS : 0;
    const u64 bits = bits_of(block.raw) | (T >= DIFFERENCE ? bits_of(block.base) : 0);
    if (is_aligned<N>(bits)) {
        split_units<W, T, true>(block, units);
    } else {
        split_units<W, T, false>(block, units);
    }
    return {0, units * Unit<W>::ELEMENTS};
}

template <int W, int T>
__device__ Range join_block(const Block& block) {
    constexpr int N = Unit<W>::WORDS, K = Unit<W>::QUADS;
    // Bytes before the first address that is aligned for vectors. If elements straddle such addresses, there
    // are no units.
    const u32 before = static_cast<u32>((0 - bits_of(block.raw)) & (VECTOR<N> - 1));
    const u32 head = before / W;
    const bool has_units = before % W == 0 && head < block.count;
    const u32 units = has_units ? (block.count - head) / Unit<W>::ELEMENTS : 0;
    const u64 base_bits = T >= DIFFERENCE ? bits_of(block.base) + head * W : 0;
    if (is_aligned<K>(plane_bits<W>(block, head)) && is_aligned<N>(base_bits)) {
        join_units<W, T, true>(block, head, units);
    } else {
        join_units<W, T, false>(block, head, units);
    }
    return {units ? head : 0, units ? head + units * Unit<W>::ELEMENTS : 0};
}

template <int W, int T, bool IS_SPLIT>
__device__ __forceinline__ Range take_block(const Block& block) {
    if constexpr (IS_SPLIT) {
        return split_block<W, T>(block);
    } else {
        return join_block<W, T>(block);
    }
}

// An element of 2 bytes has only the upper 16 bits, so DIFFERENCE_UPPER equals DIFFERENCE. An element of 1
// byte has none.
template <int W, bool IS_SPLIT>
__device__ __forceinline__ void take_row(const Row& row, u32 part, u32 parts) {
    const Block block = {
        reinterpret_cast<u8*>(row.raw),
        reinterpret_cast<const u8*>(row.base),
        reinterpret_cast<u8*>(row.planes),
        row.length / W,
        part * blockDim.x + threadIdx.x,
        parts * blockDim.x,
    };
    Range done;
    int transform;
    if (row.base == 0 && W > 1 && row.order == ORDER_SIGN_LAST) {
        transform = SIGN_LAST;
        done = take_block<W, W == 1 ? COPY : SIGN_LAST, IS_SPLIT>(block);
    } else if (row.base == 0) {
        transform = COPY;
        done = take_block<W, COPY, IS_SPLIT>(block);
    } else if (W > 2 && row.order == ORDER_ZIGZAG) {
        transform = DIFFERENCE_UPPER;
        done = take_block<W, W <= 2 ? DIFFERENCE : DIFFERENCE_UPPER, IS_SPLIT>(block);
    } else {
        transform = DIFFERENCE;
        done = take_block<W, DIFFERENCE, IS_SPLIT>(block);
    }
    take_elements<W, IS_SPLIT>(block, done, transform);
}

template <bool IS_SPLIT>
__device__ __forceinline__ void take_rows(const Row* rows, u32 parts) {
    const Row row = rows[blockIdx.x / parts];
    const u32 part = blockIdx.x % parts;
    switch (row.width) {
        case 1:
            take_row<1, IS_SPLIT>(row, part, parts);
            break;
        case 2:
            take_row<2, IS_SPLIT>(row, part, parts);
            break;
        case 4:
            take_row<4, IS_SPLIT>(row, part, parts);
            break;
        default:
            take_row<8, IS_SPLIT>(row, part, parts);
            break;
    }
}

extern "C" __global__ void __launch_bounds__(256) split_planes(const Row* rows, u32 parts) {
    take_rows<true>(rows, parts);
}

extern "C" __global__ void __launch_bounds__(256) join_planes(const Row* rows, u32 parts) {
    take_rows<false>(rows, parts);
}
