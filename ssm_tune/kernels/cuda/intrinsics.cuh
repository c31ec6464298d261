// What the scan takes from the machine by name. Nothing is included: NVRTC needs no headers for any of it.

struct __align__(8) Half4 { unsigned x, y; };  // four numbers of 16 bits
struct __align__(8) Float2 { float v[2]; };
struct __align__(16) Float4 { float v[4]; };

__device__ __forceinline__ float exp2_fast(float x) {  // within 2 units in the last place
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// `more` if x > limit, else `rest`; both are computed, without a branch.
__device__ __forceinline__ float choose(float x, float limit, float more, float rest) {
  float y;
  asm("{.reg .pred p; setp.gt.f32 p, %1, %2; selp.f32 %0, %3, %4, p;}" : "=f"(y) : "f"(x), "f"(limit), "f"(more), "f"(rest));
  return y;
}

// x, in a way that hides from the compiler that it is x: what follows from it is worked out anew, not kept in registers.
__device__ __forceinline__ unsigned anew(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ float from_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned to_bits(float x) { return __float_as_uint(x); }

__device__ __forceinline__ float exchange(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }

__device__ __forceinline__ void warp_barrier() { __syncwarp(); }

// The lower and the upper of two numbers in 32 bits, and back.
__device__ __forceinline__ float lower_half(unsigned pair) {
  float y;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(pair));
  return y;
}

__device__ __forceinline__ float upper_half(unsigned pair) {
  float y;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(pair));
  return y;
}

__device__ __forceinline__ unsigned pair_of_halves(float lower, float upper) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
  return pair;
}

__device__ __forceinline__ unsigned pair_of_bfloats(float lower, float upper) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
  return pair;
}

// Copies BYTES (4, 8 or 16) from global to shared memory without waiting; zeros where it is not `valid`.
template <int BYTES>
__device__ __forceinline__ void copy_later(void* to, const void* from, bool valid) {
  unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  int count = valid ? BYTES : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(place), "l"(from), "n"(BYTES), "r"(count)
               : "memory");
}

// Waits for the copies that this thread has begun.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// d (16 x 8) += a (16 x 8) b (8 x 8) of a warp, numbers cut to TF32. Lane 4 g + t has of a: (g, t), (g + 8, t),
// (g, t + 4), (g + 8, t + 4); of b: (t, g), (t + 4, g); of d: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
__device__ __forceinline__ void multiply_add(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(to_bits(a[0])), "r"(to_bits(a[1])), "r"(to_bits(a[2])), "r"(to_bits(a[3])), "r"(to_bits(b0)),
        "r"(to_bits(b1)));
}

#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
