// Copies many pieces of device memory in one launch, with one thread block per piece.
//
// A launch costs the host about 10 us. With one launch per tensor, the launches of a state of a thousand
// tensors take longer than the copies.

struct Piece {
    unsigned long long target;
    unsigned long long source;
    unsigned long long length;
};

constexpr unsigned DEPTH = 4;  // independent 16-byte loads that a thread has in flight

extern "C" __global__ void copy_pieces(const Piece* pieces) {
    const Piece piece = pieces[blockIdx.x];
    unsigned char* target = reinterpret_cast<unsigned char*>(piece.target);
    const unsigned char* source = reinterpret_cast<const unsigned char*>(piece.source);
    unsigned long long done = 0;
    if ((piece.target | piece.source) % 16 == 0) {
        const unsigned long long count = piece.length / 16;
        const uint4* from = reinterpret_cast<const uint4*>(source);
        uint4* to = reinterpret_cast<uint4*>(target);
        unsigned long long at = threadIdx.x;
        for (; at + (DEPTH - 1) * blockDim.x < count; at += DEPTH * blockDim.x) {
            uint4 held[DEPTH];
#pragma unroll
            for (unsigned step = 0; step < DEPTH; ++step) held[step] = from[at + step * blockDim.x];
#pragma unroll
            for (unsigned step = 0; step < DEPTH; ++step) to[at + step * blockDim.x] = held[step];
        }
        for (; at < count; at += blockDim.x) to[at] = from[at];
        done = count * 16;
    } else if ((piece.target | piece.source) % 4 == 0) {
        const unsigned long long count = piece.length / 4;
        for (unsigned long long at = threadIdx.x; at < count; at += blockDim.x)
            reinterpret_cast<unsigned*>(target)[at] = reinterpret_cast<const unsigned*>(source)[at];
        done = count * 4;
    }
    for (unsigned long long at = done + threadIdx.x; at < piece.length; at += blockDim.x) target[at] = source[at];
}
