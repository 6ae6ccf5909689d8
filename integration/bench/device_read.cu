// Reads a region once and does almost nothing else: its time gives a device's read bandwidth.

// XORs `count` times 16 bytes into *out. Launch: any grid; 256 threads a thread block, 16 thread blocks a multiprocessor.
extern "C" __global__ void read_all(const uint4* __restrict__ data, unsigned long long count, unsigned int* out) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long index = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int mixed = 0;
    // Four independent loads are in flight a thread.
    for (; index + 3 * stride < count; index += 4 * stride) {
        const uint4 a = __ldcs(data + index), b = __ldcs(data + index + stride);
        const uint4 c = __ldcs(data + index + 2 * stride), d = __ldcs(data + index + 3 * stride);
        mixed ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; index < count; index += stride) {
        const uint4 a = __ldcs(data + index);
        mixed ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    for (int distance = 16; distance > 0; distance /= 2) mixed ^= __shfl_xor_sync(0xFFFFFFFFu, mixed, distance);
    if (threadIdx.x % 32 == 0) atomicXor(out, mixed);
}
