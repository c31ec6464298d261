// CUDA C++ on a CPU, for tests: the blocks of a grid one after the other, the threads of a block as coroutines that
// give way at every barrier and exchange. It takes the place of ssm_tune/kernels/cuda/intrinsics.cuh.
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(name) unsigned char* name = cpu::dynamic_shared

namespace cpu {
struct Place { int x, y, z; };
struct Barrier { int waiting = 0; long generation = 0; };
struct Thread { ucontext_t context; jmp_buf at; std::vector<char> stack; Place place; bool begun, done; };
static const int THREADS_OF_A_BLOCK = 128, LANES = 32;
static jmp_buf scheduler_at;
static Thread threads[THREADS_OF_A_BLOCK];
static Thread* current;
static Place block, grid;
static Barrier block_barrier, warp_barriers[THREADS_OF_A_BLOCK / LANES];
static float exchanged[THREADS_OF_A_BLOCK][2];
alignas(16) static unsigned char dynamic_shared[1 << 18];

// Contexts are only begun as such: changing them asks the kernel about signals every time.
static void give_way() {
  if (!_setjmp(current->at)) _longjmp(scheduler_at, 1);
}

static void resume(Thread& thread) {
  current = &thread;
  if (_setjmp(scheduler_at)) return;
  if (thread.begun) _longjmp(thread.at, 1);
  thread.begun = true;
  setcontext(&thread.context);
}

static void wait_at(Barrier& barrier, int count) {
  long before = barrier.generation;
  if (++barrier.waiting == count) barrier.waiting = 0, ++barrier.generation;
  while (barrier.generation == before) give_way();
}
static Barrier& of_warp() { return warp_barriers[current->place.x / LANES]; }
static float (*warp_values())[2] { return exchanged + current->place.x / LANES * LANES; }
}  // namespace cpu

#define threadIdx cpu::current->place
#define blockIdx cpu::block
#define gridDim cpu::grid

static void __syncthreads() { cpu::wait_at(cpu::block_barrier, cpu::THREADS_OF_A_BLOCK); }
static void warp_barrier() { cpu::wait_at(cpu::of_warp(), cpu::LANES); }

struct __align__(8) Half4 { unsigned x, y; };
struct __align__(8) Float2 { float v[2]; };
struct __align__(16) Float4 { float v[4]; };

static float exp2_fast(float x) { return exp2f(x); }
static float log2_fast(float x) { return log2f(x); }
static float reciprocal(float x) { return 1.f / x; }
static float choose(float x, float limit, float more, float rest) { return x > limit ? more : rest; }
static unsigned anew(unsigned x) { return x; }
static float from_bits(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static unsigned to_bits(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }

static float exchange(float x, int lanes) {
  int lane = cpu::current->place.x % cpu::LANES;
  cpu::warp_values()[lane][0] = x;
  warp_barrier();
  float other = cpu::warp_values()[lane ^ lanes][0];
  warp_barrier();
  return other;
}

static float half(unsigned bits) { _Float16 x; unsigned short low = bits; memcpy(&x, &low, 2); return x; }
static float lower_half(unsigned pair) { return half(pair & 0xffffu); }
static float upper_half(unsigned pair) { return half(pair >> 16); }
static unsigned half_bits(float x) { _Float16 y = x; unsigned short bits; memcpy(&bits, &y, 2); return bits; }
static unsigned pair_of_halves(float lower, float upper) { return half_bits(lower) | half_bits(upper) << 16; }
static unsigned bfloat_bits(float x) {
  unsigned bits = to_bits(x);
  return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
static unsigned pair_of_bfloats(float lower, float upper) { return bfloat_bits(lower) | bfloat_bits(upper) << 16; }

template <int BYTES>
static void copy_later(void* to, const void* from, bool valid) {
  if ((uintptr_t)to % BYTES || (uintptr_t)from % BYTES) __builtin_trap();  // the GPU would refuse it
  if (valid) memcpy(to, from, BYTES); else memset(to, 0, BYTES);
}
static void wait_for_copies() {}

static void multiply_add(float (&d)[4], const float (&a)[4], float b0, float b1) {
  int lane = cpu::current->place.x % cpu::LANES;
  auto cut = [](float x) { return from_bits(to_bits(x) & 0xffffe000u); };
  static float left[cpu::THREADS_OF_A_BLOCK][4];
  float (*rows)[4] = left + cpu::current->place.x / cpu::LANES * cpu::LANES, (*columns)[2] = cpu::warp_values();
  for (int i = 0; i < 4; ++i) rows[lane][i] = cut(a[i]);
  columns[lane][0] = cut(b0), columns[lane][1] = cut(b1);
  warp_barrier();
  for (int i = 0; i < 4; ++i) {
    int row = lane / 4, column = 2 * (lane % 4) + i % 2, lower = i / 2;
    for (int k = 0; k < 8; ++k) d[i] += rows[row * 4 + k % 4][lower + k / 4 * 2] * columns[column * 4 + k % 4][k / 4];
  }
  warp_barrier();
}

// Runs `kernel` with the arguments at `given` on a grid.
template <typename Arguments>
static void run_grid(void (*kernel)(Arguments), const void* given, int x, int y, int z) {
  using namespace cpu;
  static void (*the_kernel)(Arguments);
  static const Arguments* arguments;
  the_kernel = kernel, arguments = static_cast<const Arguments*>(given);
  void (*start)() = [] {
    the_kernel(*arguments);
    current->done = true;
    for (;;) give_way();
  };
  grid = {x, y, z};
  for (int i = 0; i < x * y * z; ++i) {
    block = {i % x, i / x % y, i / x / y};
    memset(dynamic_shared, 0xff, sizeof dynamic_shared);  // not a number, wherever it is read too early
    for (int t = 0; t < THREADS_OF_A_BLOCK; ++t) {
      Thread& thread = threads[t];
      thread.stack.resize(1 << 16);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data();
      thread.context.uc_stack.ss_size = thread.stack.size();
      thread.context.uc_link = nullptr;
      thread.place = {t, 0, 0}, thread.begun = thread.done = false;
      makecontext(&thread.context, start, 0);
    }
    for (bool busy = true; busy;) {
      busy = false;
      for (Thread& thread : threads) {
        if (thread.done) continue;
        resume(thread);
        busy = true;
      }
    }
  }
}
