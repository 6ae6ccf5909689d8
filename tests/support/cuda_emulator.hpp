// The part of CUDA C that the kernels of tierfs use, for a host compiler.
//
// One fiber runs one CUDA thread; all fibers share one host thread. A fiber runs until it reaches a warp operation or
// a barrier. The scheduler resumes it when every thread that the operation names has arrived. Thread blocks run one
// after another in the order of their numbers.

#pragma once

#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sys/mman.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define CUDA_EMULATOR 1
#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define alignas(bytes) __attribute__((aligned(bytes)))
#define __builtin_assume(condition) ((void)0)
#define __builtin_assume_aligned(pointer, ...) (pointer)

#define CUDA_EMULATOR_VECTORS(type, name, two, four)                                                                  \
    struct name##1 { type x; };                                                                                       \
    struct __align__(two) name##2 { type x, y; };                                                                     \
    struct name##3 { type x, y, z; };                                                                                 \
    struct __align__(four) name##4 { type x, y, z, w; };                                                              \
    static inline name##1 make_##name##1(type x) { return {x}; }                                                      \
    static inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                           \
    static inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

CUDA_EMULATOR_VECTORS(signed char, char, 2, 4)
CUDA_EMULATOR_VECTORS(unsigned char, uchar, 2, 4)
CUDA_EMULATOR_VECTORS(short, short, 4, 8)
CUDA_EMULATOR_VECTORS(unsigned short, ushort, 4, 8)
CUDA_EMULATOR_VECTORS(int, int, 8, 16)
CUDA_EMULATOR_VECTORS(unsigned int, uint, 8, 16)
CUDA_EMULATOR_VECTORS(long long, longlong, 16, 16)
CUDA_EMULATOR_VECTORS(unsigned long long, ulonglong, 16, 16)
CUDA_EMULATOR_VECTORS(float, float, 8, 16)
CUDA_EMULATOR_VECTORS(double, double, 16, 16)

struct dim3 {
    unsigned x, y, z;
};

namespace cuda_emulator {

constexpr unsigned WARP = 32;
constexpr std::size_t STACK_BYTES = 256 << 10;
constexpr std::size_t SHARED_BYTES = 227 << 10;

enum State { READY, YIELDED, AT_WARP, AT_BLOCK, DONE };
enum Operation {
    SYNC, SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, BALLOT, ANY, ALL, MATCH_ANY, MATCH_ALL,
    REDUCE_ADD, REDUCE_AND, REDUCE_OR, REDUCE_XOR, REDUCE_MIN, REDUCE_MAX, REDUCE_MIN_SIGNED, REDUCE_MAX_SIGNED,
    BLOCK_SYNC, BLOCK_OR, BLOCK_AND, BLOCK_COUNT,
};

struct Thread {
    dim3 index;
    unsigned number;
    State state;
    Operation operation;
    unsigned mask;
    unsigned argument;
    unsigned width;
    std::uint64_t value;
    std::uint64_t result;
    bool born;
    void* stack;
    ucontext_t birth;
    jmp_buf context;
};

static std::vector<std::unique_ptr<Thread>> threads;
static Thread* current;
static jmp_buf scheduler;
static dim3 block_index, block_size, grid_size;
static bool failed;
static char failure[512];
static void (*call)(void**);
static void** call_arguments;
static __align__(1024) unsigned char shared_memory[SHARED_BYTES];

static inline void* dynamic_shared() { return shared_memory; }

__attribute__((noinline)) static void pause() {
    if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

// Ends the launch with a message. The stacks of all fibers are abandoned.
[[noreturn]] __attribute__((noinline)) static void fail(const char* what, const char* file = "", unsigned line = 0) {
    char place[256] = "";
    if (line) std::snprintf(place, sizeof place, "%s:%u: ", file, line);
    std::snprintf(failure, sizeof failure, "%s%s (block %u,%u,%u, thread %u,%u,%u)", place, what, block_index.x,
                  block_index.y, block_index.z, current->index.x, current->index.y, current->index.z);
    failed = true;
    _longjmp(scheduler, 1);
}

static void fiber() {
    for (;;) {
        call(call_arguments);
        current->state = DONE;
        pause();
    }
}

__attribute__((noinline)) static void resume(Thread* thread) {
    current = thread;
    if (_setjmp(scheduler) != 0) return;
    if (current->born) _longjmp(current->context, 1);
    current->born = true;
    getcontext(&current->birth);
    current->birth.uc_stack.ss_sp = current->stack;
    current->birth.uc_stack.ss_size = STACK_BYTES;
    current->birth.uc_link = nullptr;
    makecontext(&current->birth, fiber, 0);
    setcontext(&current->birth);
}

// The result of `operation` for `lane`; `taking` are the lanes that take part.
static std::uint64_t warp_result(Thread** lanes, unsigned lane, unsigned taking) {
    const Thread& own = *lanes[lane];
    const unsigned width = own.width ? own.width : WARP, start = lane & ~(width - 1), end = start + width - 1;
    unsigned source = lane;
    switch (own.operation) {
        case SYNC: return 0;
        case SHUFFLE: source = start | (own.argument & (width - 1)); break;
        case SHUFFLE_UP: source = lane < start + own.argument ? lane : lane - own.argument; break;
        case SHUFFLE_DOWN: source = own.argument > end - lane ? lane : lane + own.argument; break;
        case SHUFFLE_XOR: source = (lane ^ own.argument) > end ? lane : lane ^ own.argument; break;
        default: {
            std::uint64_t ballot = 0, same = 0, total = own.value;
            for (unsigned other = 0; other < WARP; ++other) {
                if (!(taking >> other & 1)) continue;
                const std::uint64_t value = lanes[other]->value;
                const auto narrow = static_cast<std::int32_t>(value), held = static_cast<std::int32_t>(total);
                ballot |= std::uint64_t{value != 0} << other;
                same |= std::uint64_t{value == own.value} << other;
                if (other == lane) continue;
                switch (own.operation) {
                    case REDUCE_ADD: total += value; break;
                    case REDUCE_AND: total &= value; break;
                    case REDUCE_OR: total |= value; break;
                    case REDUCE_XOR: total ^= value; break;
                    case REDUCE_MIN: total = value < total ? value : total; break;
                    case REDUCE_MAX: total = value > total ? value : total; break;
                    case REDUCE_MIN_SIGNED: total = narrow < held ? value : total; break;
                    case REDUCE_MAX_SIGNED: total = narrow > held ? value : total; break;
                    default: break;
                }
            }
            switch (own.operation) {
                case BALLOT: return ballot;
                case ANY: return ballot != 0;
                case ALL: return ballot == taking;
                case MATCH_ANY: return same;
                case MATCH_ALL: return same == taking ? taking : 0;
                default: return total;
            }
        }
    }
    // CUDA leaves the value of a lane that takes no part undefined.
    return taking >> source & 1 ? lanes[source]->value : 0xDEADBEEFDEADBEEFull;
}

// Completes the operation that a lane waits at, once every living lane of its mask has arrived.
static void complete_warp(unsigned first, unsigned lane) {
    Thread* lanes[WARP] = {};
    unsigned living = 0;
    for (unsigned other = 0; other < WARP && first + other < threads.size(); ++other) {
        lanes[other] = threads[first + other].get();
        if (lanes[other]->number < block_size.x * block_size.y * block_size.z && lanes[other]->state != DONE)
            living |= 1u << other;
    }
    const unsigned taking = lanes[lane]->mask & living;
    for (unsigned other = 0; other < WARP; ++other)
        if (taking >> other & 1 && (lanes[other]->state != AT_WARP || lanes[other]->mask != lanes[lane]->mask)) return;
    for (unsigned other = 0; other < WARP; ++other) {
        if (!(taking >> other & 1)) continue;
        if (lanes[other]->operation != lanes[lane]->operation)
            return fail("lanes of one warp are at different warp operations");
        lanes[other]->result = warp_result(lanes, other, taking);
    }
    for (unsigned other = 0; other < WARP; ++other)
        if (taking >> other & 1) lanes[other]->state = READY;
}

static std::uint64_t at_warp(Operation operation, unsigned mask, std::uint64_t value, unsigned argument, unsigned width) {
    Thread* own = current;
    if (!(mask >> (own->number % WARP) & 1)) fail("the mask of a warp operation lacks its caller");
    own->operation = operation, own->mask = mask, own->value = value, own->argument = argument, own->width = width;
    own->state = AT_WARP;
    complete_warp(own->number / WARP * WARP, own->number % WARP);
    if (own->state != READY) pause();
    return own->result;
}

static std::uint64_t at_block(Operation operation, std::uint64_t value) {
    current->operation = operation, current->value = value, current->state = AT_BLOCK;
    pause();
    return current->result;
}

static void yield() {
    current->state = YIELDED;
    pause();
}

static void release_block(unsigned count) {
    std::uint64_t nonzero = 0, waiting = 0;
    for (unsigned number = 0; number < count; ++number) {
        if (threads[number]->state != AT_BLOCK) continue;
        current = threads[number].get();
        ++waiting;
        nonzero += current->value != 0;
    }
    for (unsigned number = 0; number < count; ++number) {
        Thread& own = *threads[number];
        if (own.state != AT_BLOCK) continue;
        own.result = own.operation == BLOCK_OR ? nonzero != 0 : own.operation == BLOCK_AND ? nonzero == waiting : nonzero;
        own.state = READY;
    }
}

// Runs one thread block; false where it failed.
static bool run_block(unsigned count, bool reverse) {
    for (unsigned number = 0; number < count; ++number) threads[number]->state = READY;
    const unsigned warps = (count + WARP - 1) / WARP;
    for (;;) {
        bool progress = false;
        unsigned done = 0, at_barrier = 0;
        for (unsigned turn = 0; turn < warps; ++turn) {
            const unsigned first = (reverse ? warps - 1 - turn : turn) * WARP;
            const unsigned lanes = count - first < WARP ? count - first : WARP;
            for (bool moved = true; moved;) {
                moved = false;
                for (unsigned step = 0; step < lanes; ++step) {
                    const unsigned lane = reverse ? lanes - 1 - step : step;
                    Thread* thread = threads[first + lane].get();
                    if (thread->state != READY) continue;
                    resume(thread);
                    if (failed) return false;
                    moved = progress = true;
                    if (thread->state != DONE) continue;
                    // The lanes that wait for this one wait no longer.
                    for (unsigned other = 0; other < lanes; ++other)
                        if (threads[first + other]->state == AT_WARP) complete_warp(first, other);
                }
            }
            for (unsigned lane = 0; lane < lanes; ++lane) {
                Thread& thread = *threads[first + lane];
                done += thread.state == DONE;
                at_barrier += thread.state == AT_BLOCK;
                if (thread.state == YIELDED) thread.state = READY;
            }
        }
        if (done == count) return true;
        if (at_barrier && done + at_barrier == count) {
            release_block(count);
            progress = true;
        }
        if (!progress) {
            std::snprintf(failure, sizeof failure,
                          "deadlock in block %u,%u,%u: %u threads wait at __syncthreads, %u at a warp operation, %u ended",
                          block_index.x, block_index.y, block_index.z, at_barrier, count - at_barrier - done, done);
            return false;
        }
    }
}

static const char* run_grid(const unsigned* dimensions, bool reverse) {
    grid_size = {dimensions[0], dimensions[1], dimensions[2]};
    block_size = {dimensions[3], dimensions[4], dimensions[5]};
    const unsigned count = block_size.x * block_size.y * block_size.z;
    failed = false;
    while (threads.size() < count) {
        auto thread = std::make_unique<Thread>();
        thread->number = static_cast<unsigned>(threads.size());
        thread->born = false;
        thread->stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (thread->stack == MAP_FAILED) return "no memory for the stacks of the threads";
        threads.push_back(std::move(thread));
    }
    for (unsigned number = 0; number < count; ++number)
        threads[number]->index = {number % block_size.x, number / block_size.x % block_size.y,
                                  number / block_size.x / block_size.y};
    bool sound = true;
    for (unsigned z = 0; sound && z < grid_size.z; ++z)
        for (unsigned y = 0; sound && y < grid_size.y; ++y)
            for (unsigned x = 0; sound && x < grid_size.x; ++x) {
                block_index = {x, y, z};
                // A real GPU leaves shared memory undefined.
                std::memset(shared_memory, 0xCD, sizeof shared_memory);
                sound = run_block(count, reverse);
            }
    if (sound) return nullptr;
    for (auto& thread : threads) thread->born = false;
    return failure;
}

template <class Parameter> static std::remove_cv_t<Parameter> unpack(void* argument) {
    std::remove_cv_t<Parameter> value;
    std::memcpy(&value, argument, sizeof value);
    return value;
}

template <auto kernel> struct Kernel;
template <class... Parameters, void (*kernel)(Parameters...)> struct Kernel<kernel> {
    template <std::size_t... index> static void spread(void** arguments, std::index_sequence<index...>) {
        kernel(unpack<Parameters>(arguments[index])...);
    }
    static void invoke(void** arguments) { spread(arguments, std::index_sequence_for<Parameters...>{}); }
    static unsigned describe(unsigned* bytes, unsigned* pointers) {
        const unsigned sizes[] = {sizeof(Parameters)..., 0}, kinds[] = {std::is_pointer_v<Parameters>..., 0};
        for (unsigned index = 0; index < sizeof...(Parameters); ++index) bytes[index] = sizes[index], pointers[index] = kinds[index];
        return sizeof...(Parameters);
    }
    static const char* launch(const unsigned* dimensions, unsigned reverse, void** arguments) {
        call = invoke, call_arguments = arguments;
        return run_grid(dimensions, reverse != 0);
    }
};

template <class Value> static inline std::uint64_t pack(Value value) {
    static_assert(sizeof(Value) <= 8, "a warp exchanges values of at most 8 bytes");
    std::uint64_t packed = 0;
    std::memcpy(&packed, &value, sizeof value);
    return packed;
}
template <class Value> static inline Value narrow(std::uint64_t packed) {
    Value value;
    std::memcpy(&value, &packed, sizeof value);
    return value;
}

}  // namespace cuda_emulator

// The compiler reports through these where a real GPU would trap or do something else than this host.
struct cuda_emulator_place {
    const char* file;
    std::uint32_t line, column;
};
extern "C" void __ubsan_handle_type_mismatch_v1(cuda_emulator_place* place, void*) {
    cuda_emulator::fail("misaligned or null access", place->file, place->line);
}
extern "C" void __ubsan_handle_out_of_bounds(cuda_emulator_place* place, void*) {
    cuda_emulator::fail("index outside its array", place->file, place->line);
}
extern "C" void __ubsan_handle_shift_out_of_bounds(cuda_emulator_place* place, void*, void*) {
    cuda_emulator::fail("shift by the width of the type or more", place->file, place->line);
}

#define threadIdx (::cuda_emulator::current->index)
#define blockIdx (::cuda_emulator::block_index)
#define blockDim (::cuda_emulator::block_size)
#define gridDim (::cuda_emulator::grid_size)
#define warpSize 32

static inline void __syncthreads() { cuda_emulator::at_block(cuda_emulator::BLOCK_SYNC, 0); }
static inline int __syncthreads_or(int value) { return (int)cuda_emulator::at_block(cuda_emulator::BLOCK_OR, (unsigned)value); }
static inline int __syncthreads_and(int value) { return (int)cuda_emulator::at_block(cuda_emulator::BLOCK_AND, (unsigned)value); }
static inline int __syncthreads_count(int value) { return (int)cuda_emulator::at_block(cuda_emulator::BLOCK_COUNT, (unsigned)value); }
static inline void __syncwarp(unsigned mask = ~0u) { cuda_emulator::at_warp(cuda_emulator::SYNC, mask, 0, 0, 0); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __nanosleep(unsigned) { cuda_emulator::yield(); }
static inline void __trap() { cuda_emulator::fail("the kernel called __trap"); }

#define CUDA_EMULATOR_SHUFFLE(name, operation)                                                                        \
    template <class Value> static inline Value name(unsigned mask, Value value, unsigned argument, int width = 32) {  \
        return cuda_emulator::narrow<Value>(cuda_emulator::at_warp(                                                   \
            cuda_emulator::operation, mask, cuda_emulator::pack(value), argument, (unsigned)width));                  \
    }
CUDA_EMULATOR_SHUFFLE(__shfl_sync, SHUFFLE)
CUDA_EMULATOR_SHUFFLE(__shfl_up_sync, SHUFFLE_UP)
CUDA_EMULATOR_SHUFFLE(__shfl_down_sync, SHUFFLE_DOWN)
CUDA_EMULATOR_SHUFFLE(__shfl_xor_sync, SHUFFLE_XOR)

static inline unsigned __ballot_sync(unsigned mask, int value) { return (unsigned)cuda_emulator::at_warp(cuda_emulator::BALLOT, mask, (unsigned)value, 0, 0); }
static inline int __any_sync(unsigned mask, int value) { return (int)cuda_emulator::at_warp(cuda_emulator::ANY, mask, (unsigned)value, 0, 0); }
static inline int __all_sync(unsigned mask, int value) { return (int)cuda_emulator::at_warp(cuda_emulator::ALL, mask, (unsigned)value, 0, 0); }
static inline unsigned __activemask() { return ~0u; }
template <class Value> static inline unsigned __match_any_sync(unsigned mask, Value value) {
    return (unsigned)cuda_emulator::at_warp(cuda_emulator::MATCH_ANY, mask, cuda_emulator::pack(value), 0, 0);
}
template <class Value> static inline unsigned __match_all_sync(unsigned mask, Value value, int* all) {
    const auto same = (unsigned)cuda_emulator::at_warp(cuda_emulator::MATCH_ALL, mask, cuda_emulator::pack(value), 0, 0);
    *all = same != 0;
    return same;
}
#define CUDA_EMULATOR_REDUCE(name, type, operation)                                                                   \
    static inline type name(unsigned mask, type value) {                                                              \
        return (type)cuda_emulator::at_warp(cuda_emulator::operation, mask, (unsigned)value, 0, 0);                   \
    }
CUDA_EMULATOR_REDUCE(__reduce_add_sync, unsigned, REDUCE_ADD)
CUDA_EMULATOR_REDUCE(__reduce_add_sync, int, REDUCE_ADD)
CUDA_EMULATOR_REDUCE(__reduce_min_sync, unsigned, REDUCE_MIN)
CUDA_EMULATOR_REDUCE(__reduce_max_sync, unsigned, REDUCE_MAX)
CUDA_EMULATOR_REDUCE(__reduce_min_sync, int, REDUCE_MIN_SIGNED)
CUDA_EMULATOR_REDUCE(__reduce_max_sync, int, REDUCE_MAX_SIGNED)
CUDA_EMULATOR_REDUCE(__reduce_and_sync, unsigned, REDUCE_AND)
CUDA_EMULATOR_REDUCE(__reduce_or_sync, unsigned, REDUCE_OR)
CUDA_EMULATOR_REDUCE(__reduce_xor_sync, unsigned, REDUCE_XOR)

template <class Value> static inline Value __ldg(const Value* source) { return *source; }
template <class Value> static inline Value __ldcs(const Value* source) { return *source; }
template <class Value> static inline Value __ldca(const Value* source) { return *source; }
template <class Value> static inline Value __ldcg(const Value* source) { return *source; }
template <class Value> static inline Value __ldlu(const Value* source) { return *source; }
template <class Value> static inline Value __ldcv(const Value* source) { return *source; }
template <class Value> static inline void __stcs(Value* target, Value value) { *target = value; }
template <class Value> static inline void __stcg(Value* target, Value value) { *target = value; }
template <class Value> static inline void __stwb(Value* target, Value value) { *target = value; }
template <class Value> static inline void __stwt(Value* target, Value value) { *target = value; }

#define CUDA_EMULATOR_ATOMIC(name, expression)                                                                        \
    template <class Value> static inline Value name(Value* target, std::common_type_t<Value> operand) {               \
        const Value old = *target;                                                                                    \
        *target = (Value)(expression);                                                                                \
        return old;                                                                                                   \
    }
CUDA_EMULATOR_ATOMIC(atomicAdd, old + operand)
CUDA_EMULATOR_ATOMIC(atomicSub, old - operand)
CUDA_EMULATOR_ATOMIC(atomicExch, operand)
CUDA_EMULATOR_ATOMIC(atomicMin, operand < old ? operand : old)
CUDA_EMULATOR_ATOMIC(atomicMax, operand > old ? operand : old)
CUDA_EMULATOR_ATOMIC(atomicAnd, old & operand)
CUDA_EMULATOR_ATOMIC(atomicOr, old | operand)
CUDA_EMULATOR_ATOMIC(atomicXor, old ^ operand)
CUDA_EMULATOR_ATOMIC(atomicInc, old >= operand ? 0 : old + 1)
CUDA_EMULATOR_ATOMIC(atomicDec, old == 0 || old > operand ? operand : old - 1)
template <class Value>
static inline Value atomicCAS(Value* target, std::common_type_t<Value> expected, std::common_type_t<Value> value) {
    const Value old = *target;
    if (old == expected) *target = value;
    return old;
}

static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
static inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
static inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }
static inline int __clzll(long long value) { return value ? __builtin_clzll((unsigned long long)value) : 64; }
static inline int __ffs(int value) { return __builtin_ffs(value); }
static inline int __ffsll(long long value) { return __builtin_ffsll(value); }
static inline unsigned __brev(unsigned value) {
    unsigned result = 0;
    for (int bit = 0; bit < 32; ++bit) result |= (value >> bit & 1) << (31 - bit);
    return result;
}
static inline unsigned long long __brevll(unsigned long long value) { return (unsigned long long)__brev((unsigned)value) << 32 | __brev((unsigned)(value >> 32)); }
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long both = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int index = 0; index < 4; ++index) {
        const unsigned nibble = selector >> 4 * index & 15, byte = (unsigned)(both >> 8 * (nibble & 7)) & 255;
        result |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * index;
    }
    return result;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) { return (unsigned)(((unsigned long long)high << 32 | low) << (shift & 31) >> 32); }
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) { return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31)); }
static inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) { return shift >= 32 ? low : __funnelshift_l(low, high, shift); }
static inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) { return shift >= 32 ? high : __funnelshift_r(low, high, shift); }

#define CUDA_EMULATOR_BYTES(name, expression)                                                                         \
    static inline unsigned name(unsigned left, unsigned right) {                                                      \
        unsigned result = 0;                                                                                          \
        for (int shift = 0; shift < 32; shift += 8) {                                                                 \
            const unsigned a = left >> shift & 255, b = right >> shift & 255;                                         \
            result |= ((unsigned)(expression) & 255) << shift;                                                        \
        }                                                                                                             \
        return result;                                                                                                \
    }
CUDA_EMULATOR_BYTES(__vadd4, a + b)
CUDA_EMULATOR_BYTES(__vsub4, a - b)
CUDA_EMULATOR_BYTES(__vabsdiffu4, a > b ? a - b : b - a)
CUDA_EMULATOR_BYTES(__vmaxu4, a > b ? a : b)
CUDA_EMULATOR_BYTES(__vminu4, a < b ? a : b)
CUDA_EMULATOR_BYTES(__vcmpeq4, a == b ? 255 : 0)
CUDA_EMULATOR_BYTES(__vcmpne4, a != b ? 255 : 0)
CUDA_EMULATOR_BYTES(__vcmpltu4, a < b ? 255 : 0)
CUDA_EMULATOR_BYTES(__vcmpleu4, a <= b ? 255 : 0)
CUDA_EMULATOR_BYTES(__vcmpgtu4, a > b ? 255 : 0)
CUDA_EMULATOR_BYTES(__vcmpgeu4, a >= b ? 255 : 0)
static inline unsigned __dp4a(unsigned left, unsigned right, unsigned sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (left >> shift & 255) * (right >> shift & 255);
    return sum;
}

static inline unsigned __float_as_uint(float value) { return cuda_emulator::narrow<unsigned>(cuda_emulator::pack(value)); }
static inline int __float_as_int(float value) { return cuda_emulator::narrow<int>(cuda_emulator::pack(value)); }
static inline float __uint_as_float(unsigned value) { return cuda_emulator::narrow<float>(cuda_emulator::pack(value)); }
static inline float __int_as_float(int value) { return cuda_emulator::narrow<float>(cuda_emulator::pack(value)); }
static inline long long __double_as_longlong(double value) { return cuda_emulator::narrow<long long>(cuda_emulator::pack(value)); }
static inline double __longlong_as_double(long long value) { return cuda_emulator::narrow<double>(cuda_emulator::pack(value)); }

#define CUDA_EMULATOR_EXTREMES(result, left, right)                                                                   \
    static inline result min(left a, right b) { return (result)a < (result)b ? (result)a : (result)b; }               \
    static inline result max(left a, right b) { return (result)a > (result)b ? (result)a : (result)b; }
CUDA_EMULATOR_EXTREMES(int, int, int)
CUDA_EMULATOR_EXTREMES(unsigned, unsigned, unsigned)
CUDA_EMULATOR_EXTREMES(unsigned, int, unsigned)
CUDA_EMULATOR_EXTREMES(unsigned, unsigned, int)
CUDA_EMULATOR_EXTREMES(long, long, long)
CUDA_EMULATOR_EXTREMES(unsigned long, unsigned long, unsigned long)
CUDA_EMULATOR_EXTREMES(long long, long long, long long)
CUDA_EMULATOR_EXTREMES(unsigned long long, unsigned long long, unsigned long long)
CUDA_EMULATOR_EXTREMES(float, float, float)
CUDA_EMULATOR_EXTREMES(double, double, double)
