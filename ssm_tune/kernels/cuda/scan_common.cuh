// What both directions of Mamba-1's selective scan have in common.
//
// Layout. A block has four warps and works on 32 channels of one row, from its first token to its last. A warp has
// eight channels and four lanes for each: lane 8 q + c holds the states q S ... q S + S - 1 of channel c in registers
// (S = STATES / 4). All lanes of a warp are at the same token, so that a document's start is a branch for all.
//
// Tokens come in tiles of 16: each of the 128 threads copies four channels of one token of every input to shared
// memory while the tile before is computed, does the arithmetic that is the same for all states (softplus, gates) on
// them once, and leaves float32 for all. B and C are read by all channels.
//
// Given by the compiler's options, beside those of tokens.cuh: STATES (4, 8, 16, 32), HAS_Z, SOFTPLUS.

constexpr int WARPS = 4, THREADS = 128, CHANNELS = 32, TILE = 16, CHUNK = 96;
constexpr int S = STATES / 4;
constexpr int BC = 2 * STATES;                 // B and C of a token, side by side
constexpr int BC_VECTORS = TILE * BC / 4;      // fours of them in a tile
constexpr int BC_TURNS = (BC_VECTORS + THREADS - 1) / THREADS;
constexpr int BLOCKS = STATES <= 16 ? 4 : 2;   // wanted on a multiprocessor

// Where a block's part of each of N tensors begins, by fours of its channels or of the states; in shared memory, since
// registers for it are not free and working it out again for every tile takes longer.
template <int N>
struct Begins {
  unsigned char* of[N][8];

  // By a block's threads; for all after a barrier.
  __device__ __forceinline__ void find(const Tokens* tensors, int B, int row, int channel, int thread) {
    if (thread >= 8 * N) return;
    const int which = thread / 8, place = thread % 8 * 4 + (which == B || which == B + 1 ? 0 : channel);
    const Tokens& tensor = tensors[which];
    of[which][thread % 8] = tensor.data + (row * tensor.row + place * (int)sizeof(Element));
  }

  __device__ __forceinline__ Vector* at(unsigned which, int token_bytes, int token, unsigned four) const {
    return reinterpret_cast<Vector*>(of[which][four] + (long long)token * token_bytes);
  }
};

// A step before softplus that is none after it.
__device__ __forceinline__ Vector no_step() {
  const float lowest = ELEMENT == 1 ? -65504.f : -3.3e38f;
  const float steps[4] = {lowest, lowest, lowest, lowest};
  return pack(steps);
}

// S numbers of a lane, as wide as they can be read.
struct __align__(S >= 4 ? 16 : 4 * S) States {
  float v[S];
};

__device__ __forceinline__ States no_states() {
  States states;
#pragma unroll
  for (int j = 0; j < S; ++j) states.v[j] = 0.f;
  return states;
}

// log(1 + e^x), and its slope. The series keeps small steps exact, where 1 + e^x rounds.
__device__ __forceinline__ float softplus(float x, float* slope = nullptr) {
  const float e = exp2_fast(x * LOG2_E), above = 1.f + e;
  const float series = e * (1.f - e * (0.5f - e * (0.33333333f - e * 0.25f)));
  const float y = choose(e, 0.03125f, log2_fast(above) * LN_2, series);
  if (slope) *slope = choose(x, 20.f, 1.f, e * reciprocal(above));
  return choose(x, 20.f, x, y);
}

// The step of the recurrence, and its slope.
__device__ __forceinline__ float step_size(float dt, float* slope = nullptr) {
#if SOFTPLUS
  return softplus(dt, slope);
#else
  if (slope) *slope = 1.f;
  return dt;
#endif
}

// Which tokens of a tile are a document's first, and which are padding or beyond the row: a bit each.
struct Marks {
  unsigned starts, padding;
};

// Copies those of the tile that begins with token `first`, every thread for itself: 32 bits a tile, starts below padding.
__device__ __forceinline__ void copy_marks(unsigned* to, const unsigned* marks, int row, unsigned first,
                                           unsigned length) {
  if (marks) copy_later<4>(to, marks + ((long long)row * ((length + TILE - 1) / TILE) + first / TILE), true);
}

__device__ __forceinline__ Marks marks_until(unsigned read, int first, int end) {
  Marks marks = {read & 0xffffu, read >> 16};
  if (end - first < TILE) marks.padding |= 0xffffu << (end - first) & 0xffffu;
  return marks;
}

// Where a thread's part of B and C, tensors number `which` and the next, of a tile begins.
struct BCPart {
  const Vector* from[BC_TURNS];

  template <int N>
  __device__ __forceinline__ BCPart(const Begins<N>& begins, unsigned which, int B_token, int C_token, int first,
                                    unsigned thread) {
#pragma unroll
    for (int turn = 0; turn < BC_TURNS; ++turn) {
      const unsigned i = thread + turn * THREADS, part = i % (2 * S);
      const int token = first + (int)(i / (2 * S));
      from[turn] = begins.at(which + part / S, part < S ? B_token : C_token, token, part % S);
    }
  }

  // Copies it; C only if `both`.
  __device__ __forceinline__ void copy(Vector* to, int first, int length, bool both, unsigned thread) const {
#pragma unroll
    for (int turn = 0; turn < BC_TURNS; ++turn) {
      const unsigned i = thread + turn * THREADS, part = i % (2 * S);
      if (BC_VECTORS % THREADS && i >= BC_VECTORS) break;
      copy_later<BYTES>(to + i, from[turn], first + (int)(i / (2 * S)) < length && (both || part < S));
    }
  }
};

// What `copy_BC` copied for this thread, as float32 for all; zero for padding.
__device__ __forceinline__ void widen_BC(float* to, const Vector* from, unsigned padding, unsigned thread) {
#pragma unroll
  for (int turn = 0; turn < BC_TURNS; ++turn) {
    const unsigned i = thread + turn * THREADS;
    if (BC_VECTORS % THREADS && i >= BC_VECTORS) break;
    Float4 wide;
    unpack(from[i], wide.v);
    if (padding >> i / (2 * S) & 1u) wide = Float4{{0.f, 0.f, 0.f, 0.f}};
    reinterpret_cast<Float4*>(to)[i] = wide;
  }
}

__device__ __forceinline__ Float4 read_vector(const float* vector, int channel, bool here) {
  return vector && here ? *reinterpret_cast<const Float4*>(vector + channel) : Float4{{0.f, 0.f, 0.f, 0.f}};
}
