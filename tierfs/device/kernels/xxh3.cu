// XXH3-128 (seed 0, default secret) of many blocks. The digests equal those of the xxhash library bit for bit.
//
// Specification: github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm Description".
//
// XXH3 cuts an input of more than 240 bytes into blocks of 1 KiB: 16 stripes of 64 bytes. This file calls
// them rows. Each stripe adds to eight 64-bit accumulators. After each row, a scramble changes every
// accumulator. Additions within a row commute, so the 32 lanes of a warp share them. Only the scrambles are
// serial: a chain of about 40 cycles per row.
//
// Two kernels compute the same digests. xxh3_128_blocks uses one warp per block, for thousands of blocks.
// xxh3_128_blocks_wide uses one thread block per block, for fewer blocks: its warps sum rows, and warp 0 runs
// the chain.
//
// The source includes no header, so that NVRTC compiles it, and no assembler, so that a host compiler
// compiles it too.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

namespace {

constexpr u32 PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
constexpr u64 PRIME64_1 = 0x9E3779B185EBCA87ull, PRIME64_2 = 0xC2B2AE3D27D4EB4Full, PRIME64_3 = 0x165667B19E3779F9ull,
              PRIME64_4 = 0x85EBCA77C2B2AE63ull, PRIME64_5 = 0x27D4EB2F165667C5ull;

constexpr u32 EVERY_LANE = 0xFFFFFFFFu;
constexpr u32 STRIPE_BYTES = 64, ROW_STRIPES = 16, ROW_BYTES = STRIPE_BYTES * ROW_STRIPES;
constexpr u32 SHORT_BYTES_MAX = 240;

// Rows that a warp has in flight. Four rows are 4 KiB per warp and 32 registers per thread. With 31 warps on
// each of the 132 multiprocessors of an H200, 16 MB are in flight. Its memory needs about 4 MB (5 TB/s, 0.8
// us).
constexpr u32 DEPTH = 4;

// Warps of a thread block in the wide kernel.
constexpr u32 WIDE_WARPS = 8;
constexpr u32 WIDE_ROWS = WIDE_WARPS * DEPTH;

// The default secret of XXH3 as little-endian words.
__constant__ const u64 SECRET[24] = {
    0xBE4BA423396CFEB8ull, 0x1CAD21F72C81017Cull, 0xDB979083E96DD4DEull, 0x1F67B3B7A4A44072ull,
    0x78E5C0CC4EE679CBull, 0x2172FFCC7DD05A82ull, 0x8E2443F7744608B8ull, 0x4C263A81E69035E0ull,
    0xCB00C391BB52283Cull, 0xA32E531B8B65D088ull, 0x4EF90DA297486471ull, 0xD8ACDEA946EF1938ull,
    0x3F349CE33F76FAA8ull, 0x1D4F0BC7C7BBDCF9ull, 0x3159B4CD4BE0518Aull, 0x647378D9C97E9FC8ull,
    0xC3EBD33483ACC5EAull, 0xEB6313FAFFA081C5ull, 0x49DAF0B751DD0D17ull, 0x9E68D429265516D3ull,
    0xFCA1477D58BE162Bull, 0xCE31D07AD1B8F88Full, 0x280416958F3ACB45ull, 0x7E404BBBCAFBD7AFull,
};

// Values of the accumulators before the first row.
__constant__ const u64 START[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

struct Pair {
    u64 first, second;
};

__device__ __forceinline__ u64 secret_word(u32 offset) {
    const u32 word = offset / 8, shift = offset % 8 * 8;
    return shift == 0 ? SECRET[word] : SECRET[word] >> shift | SECRET[word + 1] << (64 - shift);
}

__device__ __forceinline__ u64 multiply_32(u64 low, u64 high) { return (u64)(u32)low * (u32)high; }

__device__ __forceinline__ u64 multiply_fold(u64 left, u64 right) { return left * right ^ __umul64hi(left, right); }

__device__ __forceinline__ u64 avalanche(u64 hash) {
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9ull;
    return hash ^ hash >> 32;
}

__device__ __forceinline__ u64 avalanche_64(u64 hash) {
    hash ^= hash >> 33;
    hash *= PRIME64_2;
    hash ^= hash >> 29;
    hash *= PRIME64_3;
    return hash ^ hash >> 32;
}

__device__ __forceinline__ u32 swap_32(u32 value) { return __byte_perm(value, 0, 0x0123); }

__device__ __forceinline__ u64 swap_64(u64 value) { return (u64)swap_32((u32)value) << 32 | swap_32((u32)(value >> 32)); }

// Writes the canonical form: the high word first, each big-endian. `out` is 16-byte aligned.
__device__ __forceinline__ void write_digest(u8* out, u64 low, u64 high) {
    const u64 first = swap_64(high), second = swap_64(low);
    *(uint4*)out = make_uint4((u32)first, (u32)(first >> 32), (u32)second, (u32)(second >> 32));
}

// ---- Inputs of at most 240 bytes, by one thread -------------------------------------------------------------------

__device__ u64 read_bytes(const u8* data, u32 count) {
    u64 value = 0;
    for (u32 index = 0; index < count; ++index) value |= (u64)data[index] << 8 * index;
    return value;
}

__device__ u64 read_64(const u8* data) { return read_bytes(data, 8); }

__device__ u64 mix_16(const u8* data, u32 secret) {
    return multiply_fold(read_64(data) ^ secret_word(secret), read_64(data + 8) ^ secret_word(secret + 8));
}

__device__ void mix_32(Pair& sums, const u8* first, const u8* second, u32 secret) {
    sums.first += mix_16(first, secret);
    sums.first ^= read_64(second) + read_64(second + 8);
    sums.second += mix_16(second, secret + 16);
    sums.second ^= read_64(first) + read_64(first + 8);
}

__device__ __noinline__ void hash_short(const u8* data, u32 length, u8* out) {
    u64 low, high;
    if (length == 0) {
        low = avalanche_64(SECRET[8] ^ SECRET[9]);
        high = avalanche_64(SECRET[10] ^ SECRET[11]);
    } else if (length <= 3) {
        const u32 bytes = (u32)data[0] << 16 | (u32)data[length >> 1] << 24 | data[length - 1] | length << 8;
        const u32 swapped = swap_32(bytes);
        const u32 turned = swapped << 13 | swapped >> 19;
        low = avalanche_64(bytes ^ (u64)((u32)SECRET[0] ^ (u32)(SECRET[0] >> 32)));
        high = avalanche_64(turned ^ (u64)((u32)SECRET[1] ^ (u32)(SECRET[1] >> 32)));
    } else if (length <= 8) {
        const u64 keyed = (read_bytes(data, 4) | read_bytes(data + length - 4, 4) << 32) ^ SECRET[2] ^ SECRET[3];
        const u64 factor = PRIME64_1 + ((u64)length << 2);
        low = keyed * factor;
        high = __umul64hi(keyed, factor) + (low << 1);
        low ^= high >> 3;
        low ^= low >> 35;
        low *= 0x9FB21C651E98DF25ull;
        low ^= low >> 28;
        high = avalanche(high);
    } else if (length <= 16) {
        const u64 tail = read_64(data + length - 8);
        const u64 keyed = read_64(data) ^ tail ^ SECRET[4] ^ SECRET[5], turned = tail ^ SECRET[6] ^ SECRET[7];
        const u64 upper = __umul64hi(keyed, PRIME64_1) + turned + multiply_32(turned, PRIME32_2 - 1);
        const u64 lower = (keyed * PRIME64_1 + ((u64)(length - 1) << 54)) ^ swap_64(upper);
        low = avalanche(lower * PRIME64_2);
        high = avalanche(__umul64hi(lower, PRIME64_2) + upper * PRIME64_2);
    } else {
        Pair sums = {length * PRIME64_1, 0};
        if (length <= 128) {
            for (u32 step = (length - 1) / 32 + 1; step-- > 0;)
                mix_32(sums, data + 16 * step, data + length - 16 * (step + 1), 32 * step);
        } else {
            for (u32 offset = 0; offset < 128; offset += 32) mix_32(sums, data + offset, data + offset + 16, offset);
            sums = {avalanche(sums.first), avalanche(sums.second)};
            for (u32 offset = 128; offset + 32 <= length; offset += 32)
                mix_32(sums, data + offset, data + offset + 16, offset - 128 + 3);
            mix_32(sums, data + length - 16, data + length - 32, 103);
        }
        low = avalanche(sums.first + sums.second);
        high = 0 - avalanche(sums.first * PRIME64_1 + sums.second * PRIME64_4 + length * PRIME64_2);
    }
    write_digest(out, low, high);
}

// ---- Longer inputs, by a warp or more -----------------------------------------------------------------------------

// Reads 16 bytes. If the address is not a multiple of 16, it reads the two or three aligned words that
// contain them. So it reads only words that contain input.
template <bool ALIGNED>
__device__ __forceinline__ Pair read_16(u64 address) {
    if (ALIGNED) {
        const uint4 data = __ldcs((const uint4*)address);
        return {(u64)data.y << 32 | data.x, (u64)data.w << 32 | data.z};
    }
    const u64* words = (const u64*)(address & ~7ull);
    const u32 shift = (u32)address % 8 * 8;
    Pair data = {__ldg(words), __ldg(words + 1)};
    if (shift) {
        const u64 third = __ldg(words + 2);
        data = {data.first >> shift | data.second << (64 - shift), data.second >> shift | third << (64 - shift)};
    }
    return data;
}

// The place of a lane in a row. The lane reads 16 bytes of the stripes lane / 4 and lane / 4 + 8. These add
// to the accumulators 2 * (lane % 4) and 2 * (lane % 4) + 1. After `total`, the lane owns one accumulator, as
// do three others.
struct Place {
    u32 offset, owned;
    Pair upper, lower;
    u64 scrambler;

    __device__ __forceinline__ explicit Place(u32 lane) {
        const u32 word = lane / 4 + lane % 4 * 2;
        offset = lane * 16;
        owned = lane % 4 * 2 + lane / 4 % 2;
        upper = {SECRET[word], SECRET[word + 1]};
        lower = {SECRET[word + 8], SECRET[word + 9]};
        scrambler = SECRET[16 + owned];
    }
};

// Adds 16 bytes to their two accumulators.
__device__ __forceinline__ void add(Pair& sums, const Pair& data, const Pair& key) {
    const u64 first = data.first ^ key.first, second = data.second ^ key.second;
    sums.first += data.second + multiply_32(first, first >> 32);
    sums.second += data.first + multiply_32(second, second >> 32);
}

// Sums the values of the eight lanes that share a pair of accumulators. The first exchange halves the number
// of values: a lane keeps the accumulator that it owns and sends the other one.
__device__ __forceinline__ u64 total(const Pair& sums, u32 lane) {
    const bool odd = lane & 4;
    u64 kept = odd ? sums.second : sums.first;
    kept += __shfl_xor_sync(EVERY_LANE, odd ? sums.first : sums.second, 4);
    kept += __shfl_xor_sync(EVERY_LANE, kept, 8);
    return kept + __shfl_xor_sync(EVERY_LANE, kept, 16);
}

__device__ __forceinline__ u64 scramble(u64 accumulator, u64 key) {
    return (accumulator ^ accumulator >> 47 ^ key) * PRIME32_1;
}

struct Row {
    Pair upper, lower;

    // Reads `row`, or the last row if `row` is behind it. A conditional load would go to other registers, and
    // a move to this row's registers would follow as soon as it arrives. So each load would wait for the
    // previous one.
    template <bool ALIGNED>
    __device__ __forceinline__ void read(u64 address, u32 row, u32 rows, const Place& place) {
        const u64 start = address + (u64)min(row, rows - 1) * ROW_BYTES + place.offset;
        upper = read_16<ALIGNED>(start);
        lower = read_16<ALIGNED>(start + ROW_BYTES / 2);
    }

    __device__ __forceinline__ u64 sum(const Place& place, u32 lane) const {
        Pair sums = {0, 0};
        add(sums, upper, place.upper);
        add(sums, lower, place.lower);
        return total(sums, lane);
    }
};

// Adds the last stripes: up to 15 behind the last whole row, and the stripe at the end of the input, which
// may overlap them. The secret of the last stripe starts at byte 121 (192 - 64 - 7). Then merges the
// accumulators into the digest.
template <bool ALIGNED>
__device__ __forceinline__ void finish(u64 address, u32 length, u64 accumulator, const Place& place, u32 lane, u8* out) {
    const u32 rows = (length - 1) / ROW_BYTES, stripes = (length - 1) % ROW_BYTES / STRIPE_BYTES;
    const u64 start = address + (u64)rows * ROW_BYTES + place.offset;
    Pair sums = {0, 0};
    if (lane / 4 < stripes) add(sums, read_16<ALIGNED>(start), place.upper);
    if (lane / 4 + 8 < stripes) add(sums, read_16<ALIGNED>(start + ROW_BYTES / 2), place.lower);
    if (lane < 4) {
        const Pair key = {secret_word(121 + 16 * lane), secret_word(129 + 16 * lane)};
        // The last stripe may start at any address.
        add(sums, read_16<false>(address + length - STRIPE_BYTES + place.offset), key);
    }
    accumulator += total(sums, lane);

    // For each pair p below 4, lane p has accumulator 2p, and fetches 2p + 1 from lane p + 4.
    const u64 next = __shfl_xor_sync(EVERY_LANE, accumulator, 4);
    const u32 pair = 16 * (lane % 4);
    u64 low = multiply_fold(accumulator ^ secret_word(11 + pair), next ^ secret_word(19 + pair));
    u64 high = multiply_fold(accumulator ^ secret_word(117 + pair), next ^ secret_word(125 + pair));
    for (u32 distance = 1; distance < 4; distance *= 2) {
        low += __shfl_xor_sync(EVERY_LANE, low, distance);
        high += __shfl_xor_sync(EVERY_LANE, high, distance);
    }
    if (lane == 0) write_digest(out, avalanche(low + length * PRIME64_1), avalanche(high + ~(length * PRIME64_2)));
}

template <bool ALIGNED>
__device__ __forceinline__ void hash_long(u64 address, u32 length, u32 lane, u8* out) {
    const Place place(lane);
    const u32 rows = (length - 1) / ROW_BYTES;
    u64 accumulator = START[place.owned];
    Row ring[DEPTH];
    if (rows > 0) {
#pragma unroll
        for (u32 slot = 0; slot < DEPTH; ++slot) ring[slot].template read<ALIGNED>(address, slot, rows, place);
    }
    u32 row = 0;
    for (; row + DEPTH <= rows; row += DEPTH) {
#pragma unroll
        for (u32 slot = 0; slot < DEPTH; ++slot) {
            accumulator = scramble(accumulator + ring[slot].sum(place, lane), place.scrambler);
            ring[slot].template read<ALIGNED>(address, row + slot + DEPTH, rows, place);
        }
    }
#pragma unroll
    for (u32 slot = 0; slot < DEPTH; ++slot)
        if (row + slot < rows) accumulator = scramble(accumulator + ring[slot].sum(place, lane), place.scrambler);
    finish<ALIGNED>(address, length, accumulator, place, lane, out);
}

// Does the same as hash_long with WIDE_WARPS warps. They write the sums of WIDE_ROWS rows to one of two
// buffers. Warp 0 adds and scrambles these while the other warps fill the second buffer.
template <bool ALIGNED>
__device__ __forceinline__ void hash_long_wide(u64 address, u32 length, u32 warp, u32 lane, u64 (*sums)[WIDE_ROWS][8], u8* out) {
    const Place place(lane);
    const u32 rows = (length - 1) / ROW_BYTES;
    u64 accumulator = START[place.owned];
    Row ring[DEPTH];
    if (rows > 0) {
#pragma unroll
        for (u32 slot = 0; slot < DEPTH; ++slot)
            ring[slot].template read<ALIGNED>(address, slot * WIDE_WARPS + warp, rows, place);
    }
    u32 buffer = 0;
    for (u32 base = 0; base < rows; base += WIDE_ROWS, buffer ^= 1) {
#pragma unroll
        for (u32 slot = 0; slot < DEPTH; ++slot) {
            const u32 row = base + slot * WIDE_WARPS + warp;
            // The chain ignores the sums of rows behind the last one.
            const u64 sum = ring[slot].sum(place, lane);
            if (lane < 8) sums[buffer][slot * WIDE_WARPS + warp][place.owned] = sum;
            ring[slot].template read<ALIGNED>(address, row + WIDE_ROWS, rows, place);
        }
        // One barrier per round is enough. A warp writes this buffer again only after the next barrier, and
        // warp 0 reaches that after it has read the buffer.
        __syncthreads();
        if (warp == 0) {
            const u32 count = rows - base < WIDE_ROWS ? rows - base : WIDE_ROWS;
#pragma unroll 8
            for (u32 row = 0; row < count; ++row)
                accumulator = scramble(accumulator + sums[buffer][row][place.owned], place.scrambler);
        }
    }
    if (warp == 0) finish<ALIGNED>(address, length, accumulator, place, lane, out);
}

}  // namespace

// Block i is lengths[i] bytes at the device address addresses[i]. Its digest goes to out + 16 * i. `out` is
// aligned to 16 bytes. Blocks may have any address, and are read faster if they start at a multiple of 16.
// Launch: one warp per block, with any number of whole warps in a thread block.
extern "C" __global__ void __launch_bounds__(128, 8)
xxh3_128_blocks(const u64* __restrict__ addresses, const u32* __restrict__ lengths, u32 count, u8* __restrict__ out) {
    const u32 lane = threadIdx.x % 32;
    const u64 index = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (index >= count) return;
    const u64 address = addresses[index];
    const u32 length = lengths[index];
    if (length <= SHORT_BYTES_MAX) {
        if (lane == 0) hash_short((const u8*)address, length, out + 16 * index);
    } else if (address % 16 == 0) {
        hash_long<true>(address, length, lane, out + 16 * index);
    } else {
        hash_long<false>(address, length, lane, out + 16 * index);
    }
}

// Computes the same digests. Launch: one thread block of 256 threads per block.
extern "C" __global__ void __launch_bounds__(256, 4)
xxh3_128_blocks_wide(const u64* __restrict__ addresses, const u32* __restrict__ lengths, u32 count, u8* __restrict__ out) {
    __shared__ u64 sums[2][WIDE_ROWS][8];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 index = blockIdx.x;
    if (index >= count) return;
    const u64 address = addresses[index];
    const u32 length = lengths[index];
    if (length <= SHORT_BYTES_MAX) {
        if (threadIdx.x == 0) hash_short((const u8*)address, length, out + 16 * index);
    } else if (address % 16 == 0) {
        hash_long_wide<true>(address, length, warp, lane, sums, out + 16 * index);
    } else {
        hash_long_wide<false>(address, length, warp, lane, sums, out + 16 * index);
    }
}
