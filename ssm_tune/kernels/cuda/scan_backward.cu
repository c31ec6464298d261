// The gradients of the scan, chunk by chunk from the last, from the state before each that the forward pass kept.
//
// A chunk is done twice. Forward, to have the state before each segment of 8 tokens in shared memory; then segment by
// segment from the last: forward once more, states and decays of all 8 tokens in registers, and back. With dh the
// gradient by h_t, and dy that by the output before the gate:
//     dh += dy C;  dC = dy h_t;  dB = dt x dh;  dx = dt (B dh) + D dy;  u = exp(dt A) dh;  g = u h_{t-1};
//     dA += dt g;  ddt = x (B dh) + A g;  dh = u.
// dB and dC are summed over the eight channels of a warp by the tensor cores, over warps in shared memory, and over
// blocks by the caller. Sums over states go through shuffles, for four tokens at once; sums over tokens stay with a
// thread. Whoever asks for it gets the output again, for which all is there.

struct BackwardArguments {
  Tokens x, dt, z, B, C, dy, dx, ddt, dz, y;  // in this order; y.data may be null
  const float *A, *D, *bias;   // D and bias may be null
  const unsigned* marks;       // may be null
  const float *kept, *dlast;   // dlast, the gradient by the state after the row, may be null
  float* dBC;                  // (blocks, rows, length, BC)
  float *dA, *dfirst;          // (rows, dim, STATES)
  float *dD, *dbias;           // (rows, dim); may be null
  int length, dim;
};

constexpr int SEGMENT = 8, SEGMENTS = CHUNK / SEGMENT, GROUP = 4;  // tokens of a segment, whose sums go out by groups
constexpr int LINE = BC > 32 ? BC : 32;                            // numbers of a token and warp

// What a token of a channel needs beside B and C.
struct __align__(16) Step {
  float dt, dtx, dy, unused;
};

struct Shared {
  States before[SEGMENTS - 1][THREADS];  // the state before each segment but the first; each thread's own
  // The steps of eight channels; when a warp is through with a token, its sums over them: dB and dC.
  alignas(16) float lines[TILE][WARPS][LINE];
  alignas(16) float sums[3][TILE][CHANNELS];  // over states: B dh, A g, C h
  alignas(16) float wide[TILE * BC];
  Float4 steps[THREADS], slopes[THREADS], dD[THREADS], dbias[THREADS];  // each thread's own
  alignas(16) float D[CHANNELS], bias[CHANNELS];
  Vector raw[2][4][THREADS];
  Vector raw_BC[BC_VECTORS];
  Begins<10> begins;
  float* dBC;  // the block's part
  unsigned marks[2];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the caller reserves another amount of shared memory");

// A channel's place in its warp's lines and, by the token, in `sums`: so that threads that write or read together meet
// different banks.
__device__ __forceinline__ unsigned place_in_line(unsigned channel, unsigned warp) { return (channel % 8 ^ warp) * 4; }
__device__ __forceinline__ unsigned place_in_sums(unsigned channel, unsigned token) { return channel ^ token % 4 * 8; }
__device__ __forceinline__ unsigned turn_in_line(unsigned token) { return token % 2 * 8; }  // of its sums

// A thread as one of 128 that prepare numbers: a token of the tile, and four channels of it. These and the next are
// worked out anew at every use, since there are no registers to keep them in.
struct Preparing {
  unsigned thread, token, four, place;

  __device__ __forceinline__ Preparing(unsigned given) : thread(anew(given)) {
    token = thread / 8, four = thread % 8, place = four * 4;
  }
};

// A thread as one of four lanes that share a channel.
struct Lane {
  unsigned thread, index, warp, q, column;

  __device__ __forceinline__ explicit Lane(unsigned given) : thread(anew(given)) {
    index = thread % 32, warp = thread / 32, q = index / 8, column = warp * 8 + index % 8;
  }
  // Its states in a tensor of (rows, dim, STATES).
  __device__ __forceinline__ long long states(int row, int dim, int first_channel) const {
    return ((long long)row * dim + first_channel + column) * STATES + q * S;
  }
};

// Where it reads and writes of a tile, its first token's: bytes of the shared memory.
struct Places {
  unsigned before;        // the state before the second segment of a chunk
  unsigned step, wide, sums;
  unsigned channel_sums;  // of the even tokens, or of the odd ones

  __device__ __forceinline__ Places(const Lane& lane) {
    const unsigned odd = lane.index / 4 % 2, m = lane.index % 4;
    const unsigned number = S < 4 ? m * STATES : m / 2 * STATES + m % 2 * 2;
    before = anew(lane.thread * (unsigned)sizeof(States));
    step = anew(4 * (lane.warp * LINE + place_in_line(lane.column, lane.warp)));
    wide = anew(4 * lane.q * S);
    sums = anew(4 * (lane.q * CHANNELS + place_in_sums(lane.column, lane.q)));
    channel_sums = anew(4 * (odd * WARPS * LINE + lane.warp * LINE + ((number + lane.q * S) ^ turn_in_line(odd))));
  }
};

template <typename Type>
__device__ __forceinline__ Type* bytes_on(Type* begin, unsigned bytes) {
  return reinterpret_cast<Type*>(reinterpret_cast<unsigned char*>(begin) + bytes);
}

// total += a b of a warp. In float32 what TF32 cuts off counts as well.
__device__ __forceinline__ void accumulate(float (&total)[4], const float (&a)[4], float b0, float b1) {
#if ELEMENT == 2
  float coarse[4], rest[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) coarse[i] = from_bits(to_bits(a[i]) & 0xffffe000u), rest[i] = a[i] - coarse[i];
  const float coarse0 = from_bits(to_bits(b0) & 0xffffe000u), coarse1 = from_bits(to_bits(b1) & 0xffffe000u);
  multiply_add(total, rest, coarse0, coarse1);
  multiply_add(total, coarse, b0 - coarse0, b1 - coarse1);
  multiply_add(total, coarse, coarse0, coarse1);
#else
  multiply_add(total, a, b0, b1);
#endif
}

// Sums over the eight channels of a warp, for one token: dt x times gradients, dy times states.
//
// The left factor is what each lane has: four lanes that differ in their two lowest bits, four channels, are summed. The
// right factor has each channel's number in the column of its half of the channels (a lane has of it that of its own
// channel, or zero), so that of each row, of one half of the channels as well, half the columns count. What is left is
// to add the two halves. Columns: dB, then dC. Numbers of other documents are never summed together: a zero times one
// that is infinite or none would spoil the sum.
struct ChannelSums {
  static constexpr int PARTS = S >= 4 ? S / 4 : 1;
  float total[PARTS][4];

  __device__ __forceinline__ void take(const States& gradient, const States& h, float dtx, float dy, unsigned q) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[part][i] = 0.f;
      if constexpr (S >= 4) {
        const float* g = gradient.v + 4 * part;
        const float* s = h.v + 4 * part;
        const float left[4] = {g[0], g[1], g[2], g[3]}, right[4] = {s[0], s[1], s[2], s[3]};
        accumulate(total[part], left, q == 0 ? dtx : 0.f, q == 1 ? dtx : 0.f);
        accumulate(total[part], right, q == 2 ? dy : 0.f, q == 3 ? dy : 0.f);
      } else {
        const float both[4] = {gradient.v[0], S == 2 ? gradient.v[S - 1] : 0.f, h.v[0], S == 2 ? h.v[S - 1] : 0.f};
        accumulate(total[part], both, q == 0 ? dtx : 0.f, q == 1 ? dy : 0.f);
      }
    }
  }
};

// The sums of an even token and of the next one: each lane has two numbers of one of them.
struct PairSums {
  Float2 sums[ChannelSums::PARTS];

  __device__ __forceinline__ void take(const ChannelSums& even, const ChannelSums& odd, unsigned lane) {
    const bool upper = lane & 4;  // has of the odd one
#pragma unroll
    for (int part = 0; part < ChannelSums::PARTS; ++part) {
      const float *e = even.total[part], *o = odd.total[part];
      sums[part].v[0] = (upper ? o[1] : e[0]) + exchange(upper ? e[1] : o[0], 4);
      sums[part].v[1] = S == 1 ? 0.f : (upper ? o[3] : e[2]) + exchange(upper ? e[3] : o[2], 4);
    }
  }

  // To the place of the token.
  __device__ __forceinline__ void put(float* to, unsigned lane) const {
    if (S < 4 && lane % 4 >= 2) return;
#pragma unroll
    for (int part = 0; part < ChannelSums::PARTS; ++part) {
      if (S == 1) {
        to[0] = sums[part].v[0];
      } else {
        *reinterpret_cast<Float2*>(to + 4 * part) = sums[part];
      }
    }
  }
};

// Sums over the four lanes of a channel: lane q gets that of token q.
__device__ __forceinline__ float sum_states(const float (&v)[GROUP], unsigned q) {
  const bool upper = q & 2, odd = q & 1;
  const float first = (upper ? v[2] : v[0]) + exchange(upper ? v[0] : v[2], 16);
  const float second = (upper ? v[3] : v[1]) + exchange(upper ? v[1] : v[3], 16);
  return (odd ? second : first) + exchange(odd ? first : second, 8);
}

// A segment, from its token `first` of the tile; `slot`: of the state before it.
template <bool STARTS>
__device__ __forceinline__ void back_segment(States& dh, States& dA, const States& A, Shared& shared, const Lane& lane,
                                             const Places& places, int slot, int first, unsigned starts) {
  States decay[SEGMENT], h[SEGMENT];
  const States* before = bytes_on(&shared.before[slot][0], places.before);
  const float* steps = bytes_on(&shared.lines[first][0][0], places.step);
  const float* wide = bytes_on(shared.wide + first * BC, places.wide);
  {
    States state = *before;
#pragma unroll
    for (int i = 0; i < SEGMENT; ++i) {
      const Float2 step = *reinterpret_cast<const Float2*>(steps + i * WARPS * LINE);
      const States B = *reinterpret_cast<const States*>(wide + i * BC);
      if (STARTS && (starts >> i & 1u)) state = no_states();
#pragma unroll
      for (int j = 0; j < S; ++j) {
        decay[i].v[j] = exp2_fast(step.v[0] * A.v[j]);
        state.v[j] = decay[i].v[j] * state.v[j] + step.v[1] * B.v[j];
      }
      h[i] = state;
    }
  }
#pragma unroll
  for (int group = SEGMENT - GROUP; group >= 0; group -= GROUP) {
    ChannelSums sums[2];
    PairSums pairs[GROUP / 2];
    float Bdh[GROUP], Ag[GROUP], Ch[GROUP];
#pragma unroll
    for (int k = GROUP - 1; k >= 0; --k) {
      const int i = group + k;
      const Step step = *reinterpret_cast<const Step*>(steps + i * WARPS * LINE);
      const States B = *reinterpret_cast<const States*>(wide + i * BC);
      const States C = *reinterpret_cast<const States*>(wide + i * BC + STATES);
      const bool start = STARTS && (starts >> i & 1u);
      const States previous = start ? no_states() : i ? h[i ? i - 1 : 0] : *before;
      States gradient;
      Bdh[k] = Ag[k] = Ch[k] = 0.f;
#pragma unroll
      for (int j = 0; j < S; ++j) {
        gradient.v[j] = step.dy * C.v[j] + dh.v[j];
        Bdh[k] += B.v[j] * gradient.v[j];
        Ch[k] += C.v[j] * h[i].v[j];
        dh.v[j] = decay[i].v[j] * gradient.v[j];
        const float g = dh.v[j] * previous.v[j];
        Ag[k] += A.v[j] * g;
        dA.v[j] += step.dt * g;
      }
      if (start) dh = no_states();
      sums[k % 2].take(gradient, h[i], step.dtx, step.dy, lane.q);
      if (k % 2 == 0) pairs[k / 2].take(sums[0], sums[1], lane.index);
    }
    // All lanes have read their steps.
    float* to = bytes_on(&shared.sums[0][first + group][0], places.sums);
    to[0] = sum_states(Bdh, lane.q), to[TILE * CHANNELS] = sum_states(Ag, lane.q);
    to[2 * TILE * CHANNELS] = sum_states(Ch, lane.q);
    warp_barrier();
#pragma unroll
    for (int k = 0; k < GROUP; k += 2) {
      pairs[k / 2].put(bytes_on(&shared.lines[first + group + k][0][0], places.channel_sums), lane.index);
    }
  }
}

// A segment forward.
template <bool STARTS>
__device__ __forceinline__ void forth_segment(States& h, const States& A, Shared& shared, const Places& places,
                                              int first, unsigned starts) {
  const float* steps = bytes_on(&shared.lines[first][0][0], places.step);
  const float* wide = bytes_on(shared.wide + first * BC, places.wide);
#pragma unroll
  for (int i = 0; i < SEGMENT; ++i) {
    const Float2 step = *reinterpret_cast<const Float2*>(steps + i * WARPS * LINE);
    const States B = *reinterpret_cast<const States*>(wide + i * BC);
    if (STARTS && (starts >> i & 1u)) h = no_states();
#pragma unroll
    for (int j = 0; j < S; ++j) h.v[j] = exp2_fast(step.v[0] * A.v[j]) * h.v[j] + step.v[1] * B.v[j];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) scan_backward(const BackwardArguments given) {
  DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);

  const unsigned thread = threadIdx.x;
  const int row = blockIdx.y, length = given.length, first_channel = blockIdx.x * CHANNELS;
  const int chunks = (length + CHUNK - 1) / CHUNK;
  const Begins<10>& begins = shared.begins;

  States A = no_states(), dA = no_states(), dh = no_states();
  {
    const Lane lane(thread);
    if (first_channel + (int)lane.column < given.dim) {
      A = *reinterpret_cast<const States*>(given.A + lane.states(0, given.dim, first_channel));
      if (given.dlast) dh = *reinterpret_cast<const States*>(given.dlast + lane.states(row, given.dim, first_channel));
    }
  }
#pragma unroll
  for (int j = 0; j < S; ++j) A.v[j] *= LOG2_E;
  shared.dD[thread] = shared.dbias[thread] = Float4{{0.f, 0.f, 0.f, 0.f}};
  if (thread < CHANNELS) {
    const bool there = first_channel + (int)thread < given.dim;
    shared.D[thread] = given.D && there ? given.D[first_channel + thread] : 0.f;
    shared.bias[thread] = given.bias && there ? given.bias[first_channel + thread] : 0.f;
  }
  if (thread < 2) shared.marks[thread] = 0u;
  shared.begins.find(&given.x, 3, row, first_channel, thread);
  if (thread == 0) shared.dBC = given.dBC + ((long long)blockIdx.x * gridDim.y + row) * length * BC;
  __syncthreads();

  int slot = 1;  // of `raw`, that was filled last
  // The state before a chunk, of a lane's channel and states; zero beyond the channels.
  auto kept_before = [&](int chunk, const Lane& lane) {
    return given.kept + lane.states(row * chunks + chunk, given.dim, first_channel);
  };
  // Copies a tile; `back`: with what only the way back needs, and before a chunk's first tile with the state before it.
  auto prefetch = [&](int tile, bool back, bool begins_chunk) {
    const Preparing my(thread);
    slot ^= 1;
    Vector(&raw)[4][THREADS] = shared.raw[slot];
    const int token = tile + (int)my.token;
    const bool valid = token < length && first_channel + (int)my.place < given.dim;
    const Vector *x = begins.at(0, given.x.token, token, my.four), *dt = begins.at(1, given.dt.token, token, my.four);
    const Vector *dy = begins.at(5, given.dy.token, token, my.four), *z = begins.at(2, given.z.token, token, my.four);
    const BCPart BC_part(begins, 3, given.B.token, given.C.token, tile, my.thread);
    copy_later<BYTES>(&raw[0][my.thread], x, valid);
    copy_later<BYTES>(&raw[1][my.thread], dt, valid);
    if (back) copy_later<BYTES>(&raw[2][my.thread], dy, valid);
    if (HAS_Z && back) copy_later<BYTES>(&raw[3][my.thread], z, valid);
    BC_part.copy(shared.raw_BC, tile, length, back, my.thread);
    copy_marks(&shared.marks[slot], given.marks, row, tile, length);
    if (back && begins_chunk) {  // in the place of the last segment's, which is done or is not
      const Lane lane(thread);
      const bool active = first_channel + (int)lane.column < given.dim;
      const float* kept = kept_before(tile / CHUNK, lane);
#pragma unroll
      for (int j = 0; j < S; j += 4) {
        copy_later<(S > 4 ? 16 : 4 * S)>(&shared.before[SEGMENTS - 2][lane.thread].v[j], kept + j, active);
      }
    }
  };
  // From what was copied to float32 for all: dt, dt x, B, C and, if `back`, dy.
  auto prepare = [&](const Marks& marks, bool back) {
    const Preparing my(thread);
    Vector(&raw)[4][THREADS] = shared.raw[slot];
    const bool padding = marks.padding >> my.token & 1u;
    if (padding) {
      raw[0][my.thread] = raw[2][my.thread] = raw[3][my.thread] = nothing(), raw[1][my.thread] = no_step();
    }
    float x[4], dt[4], dy[4] = {0.f, 0.f, 0.f, 0.f};
    Float4 steps, slopes;
    unpack(raw[0][my.thread], x), unpack(raw[1][my.thread], dt);
    const Float4 bias = *reinterpret_cast<const Float4*>(shared.bias + my.place);
    if (back) {
      unpack(raw[2][my.thread], dy);
      if (HAS_Z) {
        float z[4];
        unpack(raw[3][my.thread], z);
#pragma unroll
        for (int i = 0; i < 4; ++i) dy[i] *= z[i] * sigmoid(z[i]);
      }
    }
    float* line = shared.lines[my.token][my.four / 2];
    const unsigned at = place_in_line(my.place, my.four / 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      steps.v[i] = step_size(dt[i] + bias.v[i], &slopes.v[i]);
      if (!SOFTPLUS && padding) steps.v[i] = slopes.v[i] = 0.f;
      const float input = steps.v[i] * x[i];
      if (back) {
        *reinterpret_cast<Step*>(line + (at ^ 4u * i)) = Step{steps.v[i], input, dy[i], 0.f};
      } else {
        *reinterpret_cast<Float2*>(line + (at ^ 4u * i)) = Float2{{steps.v[i], input}};
      }
    }
    if (back) shared.steps[my.thread] = steps, shared.slopes[my.thread] = slopes;
    widen_BC(shared.wide, shared.raw_BC, marks.padding, my.thread);
  };
  // From the sums over states to the gradients by four channels of a token, and its output.
  auto finish = [&](int old, int tile) {
    const Preparing my(thread);
    const Vector(&raw)[4][THREADS] = shared.raw[old];
    float* sums = &shared.sums[0][my.token][place_in_sums(my.place, my.token)];
    if (marks_until(shared.marks[old], tile, length).padding >> my.token & 1u) {
      for (int i = 0; i < 3; ++i) *reinterpret_cast<Float4*>(sums + i * TILE * CHANNELS) = Float4{{0.f, 0.f, 0.f, 0.f}};
    }
    const Float4 Bdh = *reinterpret_cast<const Float4*>(sums);
    const Float4 Ag = *reinterpret_cast<const Float4*>(sums + TILE * CHANNELS);
    const Float4 Ch = *reinterpret_cast<const Float4*>(sums + 2 * TILE * CHANNELS);
    const Float4 D = *reinterpret_cast<const Float4*>(shared.D + my.place);
    const Float4 steps = shared.steps[my.thread], slopes = shared.slopes[my.thread];
    Float4 dD = shared.dD[my.thread], dbias = shared.dbias[my.thread];
    float x[4], z[4], dy[4], dx[4], ddt[4], dz[4], y[4];
    unpack(raw[0][my.thread], x), unpack(raw[2][my.thread], dy), unpack(raw[3][my.thread], z);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[i] = Ch.v[i] + D.v[i] * x[i];
      if (HAS_Z) {
        const float open = sigmoid(z[i]), gate = z[i] * open;
        dz[i] = dy[i] * y[i] * (open + gate * (1.f - open));
        y[i] *= gate, dy[i] *= gate;
      }
      dx[i] = steps.v[i] * Bdh.v[i] + D.v[i] * dy[i];
      ddt[i] = (x[i] * Bdh.v[i] + LN_2 * Ag.v[i]) * slopes.v[i];
      dbias.v[i] += ddt[i];
      dD.v[i] += dy[i] * x[i];
    }
    shared.dD[my.thread] = dD, shared.dbias[my.thread] = dbias;
    const int token = tile + (int)my.token;
    if (token < length && first_channel + (int)my.place < given.dim) {
      *begins.at(6, given.dx.token, token, my.four) = pack(dx);
      *begins.at(7, given.ddt.token, token, my.four) = pack(ddt);
      if (HAS_Z) *begins.at(8, given.dz.token, token, my.four) = pack(dz);
      if (given.y.data) *begins.at(9, given.y.token, token, my.four) = pack(y);
    }
  };
  // dB and dC of a tile, over the block's channels.
  auto add_warps = [&](int tile) {
    const Preparing my(thread);
#pragma unroll
    for (int turn = 0; turn < BC_TURNS; ++turn) {
      const unsigned i = my.thread + turn * THREADS, token = i / (2 * S), number = i % (2 * S) * 4;
      if (BC_VECTORS % THREADS && i >= BC_VECTORS) break;
      Float4 sum = {{0.f, 0.f, 0.f, 0.f}};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const Float4 part = *reinterpret_cast<const Float4*>(&shared.lines[token][w][number ^ turn_in_line(token)]);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.v[j] += part.v[j];
      }
      float* to = shared.dBC + (long long)(tile + token) * BC + number;
      if (tile + (int)token < length) *reinterpret_cast<Float4*>(to) = sum;
    }
  };

  prefetch((chunks - 1) * CHUNK, false, true);
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    const int begin = chunk * CHUNK, tiles = ((length - begin < CHUNK ? length - begin : CHUNK) + TILE - 1) / TILE;
    States h = no_states();
    {
      const Lane lane(thread);
      if (first_channel + (int)lane.column < given.dim) h = *reinterpret_cast<const States*>(kept_before(chunk, lane));
    }
#pragma unroll 1
    for (int k = 0; k < tiles; ++k) {
      wait_for_copies();
      const Marks marks = marks_until(shared.marks[slot], begin + k * TILE, length);
      prepare(marks, false);
      __syncthreads();
      if (k + 1 < tiles) {
        prefetch(begin + (k + 1) * TILE, false, false);
      } else {
        prefetch(begin + k * TILE, true, k == 0);
      }
      const Lane lane(thread);
      const Places places(lane);
#pragma unroll 1
      for (int segment = 2 * k; segment < 2 * k + 2 && segment < 2 * tiles - 1; ++segment) {
        const int first = segment % 2 * SEGMENT;
        const unsigned starts = marks.starts >> first & 0xffu;
        if (segment) *bytes_on(&shared.before[segment - 1][0], places.before) = h;
        if (starts) {
          forth_segment<true>(h, A, shared, places, first, starts);
        } else {
          forth_segment<false>(h, A, shared, places, first, 0u);
        }
      }
      if (k + 1 == tiles) *bytes_on(&shared.before[2 * k][0], places.before) = h;
      __syncthreads();
    }
#pragma unroll 1
    for (int k = tiles - 1; k >= 0; --k) {
      const int tile = begin + k * TILE, old = slot;
      wait_for_copies();
      const Marks marks = marks_until(shared.marks[slot], tile, length);
      prepare(marks, true);
      __syncthreads();
      if (k) {
        prefetch(tile - TILE, true, k == 1);
      } else if (chunk) {
        prefetch(begin - CHUNK, false, true);
      }
      const Lane lane(thread);
      const Places places(lane);
#pragma unroll 1
      for (int segment = 2 * k + 1; segment >= 2 * k; --segment) {
        const int first = segment % 2 * SEGMENT, before = segment ? segment - 1 : SEGMENTS - 2;
        const unsigned starts = marks.starts >> first & 0xffu;
        if (starts) {
          back_segment<true>(dh, dA, A, shared, lane, places, before, first, starts);
        } else {
          back_segment<false>(dh, dA, A, shared, lane, places, before, first, 0u);
        }
      }
      __syncthreads();
      add_warps(tile);
      finish(old, tile);
      __syncthreads();
    }
  }
  {
    const Lane lane(thread);
    if (first_channel + (int)lane.column < given.dim) {
      const long long to = lane.states(row, given.dim, first_channel);
      *reinterpret_cast<States*>(given.dA + to) = dA;
      *reinterpret_cast<States*>(given.dfirst + to) = dh;
    }
  }
  // Over the sixteen tokens of a tile.
  if (thread < CHANNELS && first_channel + (int)thread < given.dim) {
    float sum_D = 0.f, sum_bias = 0.f;
    for (int token = 0; token < TILE; ++token) {
      sum_D += shared.dD[token * 8 + thread / 4].v[thread % 4];
      sum_bias += shared.dbias[token * 8 + thread / 4].v[thread % 4];
    }
    const long long to = (long long)row * given.dim + first_channel + thread;
    if (given.dD) given.dD[to] = sum_D;
    if (given.dbias) given.dbias[to] = sum_bias;
  }
}
