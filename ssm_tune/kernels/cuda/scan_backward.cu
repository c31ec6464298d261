// The gradients of the scan, chunk by chunk from the last, from the state before each that the forward pass kept.
//
// A chunk is done twice. Forward, to have the state before each segment of 8 tokens in shared memory; then segment by
// segment from the last: forward once more, states and decays of all 8 tokens in registers, and back. With dh the
// gradient by h_t, and dy that by the output before the gate:
//     dh += dy C;  dC = dy h_t;  dB = dt x dh;  dx = dt (B dh) + D dy;  u = exp(dt A) dh;  g = u h_{t-1};
//     dA += dt g;  ddt = x (B dh) + A g;  dh = u.
// dB and dC are summed over the eight channels of a warp by the tensor cores, over warps in shared memory, and over
// blocks by the caller. Sums over states go through shuffles, sums over tokens stay in registers.

struct BackwardArguments {
  Tokens x, dt, z, B, C, dy, dx, ddt, dz, y;  // y, the outputs again, may be null
  const float *A, *D, *bias;   // D and bias may be null
  const unsigned* marks;       // may be null
  const float *kept, *dlast;   // dlast, the gradient by the state after the row, may be null
  float* dBC;                  // (blocks, rows, length, BC)
  float *dA, *dfirst;          // (rows, dim, STATES)
  float *dD, *dbias;           // (rows, dim); may be null
  int length, dim;
};

constexpr int SEGMENT = 8, SEGMENTS = CHUNK / SEGMENT;
constexpr int PLANE = TILE * CHANNELS + 8;  // so that three planes of eight channels lie in different banks

struct Shared {
  States before[SEGMENTS - 1][THREADS];  // the state before each segment but the first; each thread's own
  float planes[3 * PLANE];               // dt, dt x, dy; after a token is done B dh, A g, C h
  alignas(16) float wide[TILE * BC];
  alignas(16) float sums[WARPS][TILE * BC];
  Vector raw[2][4][THREADS];
  Vector raw_BC[BC_VECTORS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the caller reserves another amount of shared memory");

// Where a lane of four that share a channel works: its numbers in `planes` and `wide`.
struct Lane {
  float* planes;
  const float* wide;
  float* sums;  // of its warp
  int index, q;
  float picked[4][2];  // the right factor that picks lane m
};

// Sums over the eight channels of a warp, of 2 S numbers a token (S of dB, S of dC), for TOKENS tokens together.
//
// The numbers of a lane are up to 16, in fours. A tensor core sums each over the four lanes that differ in their two
// lowest bits, and puts four m into the hands of lane m of the four; what is left is to add those of the lanes that
// differ in the third bit, and to share the work. What is not picked is multiplied by zero, which a
// number that is infinite or none spoils: tokens of two documents are never summed together.
template <int TOKENS>
struct ChannelSums {
  float numbers[16], total[4];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < 16; ++i) numbers[i] = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = 0.f;
  }

  // Takes a token's numbers, the `index`-th.
  __device__ __forceinline__ void add(const States& dB, const States& dC, int index, const float (&picked)[4][2]) {
    const int before = index * 2 * S, after = before + 2 * S;
#pragma unroll
    for (int j = 0; j < S; ++j) numbers[before + j] = dB.v[j], numbers[before + S + j] = dC.v[j];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const bool complete = 4 * m + 4 <= after || index == TOKENS - 1;
      if (4 * m + 4 <= before || 4 * m >= after || !complete) continue;
      float four[4] = {numbers[4 * m], numbers[4 * m + 1], numbers[4 * m + 2], numbers[4 * m + 3]};
#if ELEMENT == 2
      // What TF32 cuts off is summed as well.
      float coarse[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) coarse[i] = from_bits(to_bits(four[i]) & 0xffffe000u), four[i] -= coarse[i];
      multiply_add(total, coarse, picked[m][0], picked[m][1]);
#endif
      multiply_add(total, four, picked[m][0], picked[m][1]);
    }
  }

  // The sums to `to`, BC numbers a token, the last token first taken.
  __device__ __forceinline__ void end(float* to, int lane) const {
    const bool upper = lane & 4;
    // A lane has the first, the third, the second and the fourth of its four.
    const float one = (upper ? total[1] : total[0]) + exchange(upper ? total[0] : total[1], 4);
    const float two = (upper ? total[3] : total[2]) + exchange(upper ? total[2] : total[3], 4);
    const int number = lane % 4 * 4 + (upper ? 2 : 0), token = number / (2 * S), of_token = number % (2 * S);
    if (16 > TOKENS * 2 * S && token >= TOKENS) return;
    float* place = to + (TOKENS - 1 - token) * BC + of_token / S * STATES + lane / 8 * S + of_token % S;
    if (S > 1) {
      *reinterpret_cast<Float2*>(place) = Float2{{one, two}};
    } else {
      place[0] = one, place[STATES] = two;
    }
  }
};

// Three sums over the four lanes of a channel: lane 0 gets the first, 1 the second, 2 the third.
__device__ __forceinline__ float sum_states(float first, float second, float third, int q) {
  bool upper = q & 2, odd = q & 1;
  float one = (upper ? third : first) + exchange(upper ? first : third, 16);
  float other = (upper ? 0.f : second) + exchange(upper ? second : 0.f, 16);
  return (odd ? other : one) + exchange(odd ? one : other, 8);
}

// `before` holds the state before the segment, here and again after it was overwritten by nobody: it is read twice.
template <bool STARTS>
__device__ __forceinline__ void back_segment(States& dh, States& dA, const States& A, const States* before,
                                             const Lane& lane, int first, unsigned starts) {
  States decay[SEGMENT], h[SEGMENT];
  const float* planes = lane.planes + first * CHANNELS;
  const float* wide = lane.wide + first * BC;
  {
    States state = *before;
#pragma unroll
    for (int i = 0; i < SEGMENT; ++i) {
      const float dt = planes[i * CHANNELS], dtx = planes[PLANE + i * CHANNELS];
      const States B = *reinterpret_cast<const States*>(wide + i * BC);
      if (STARTS && (starts >> i & 1u)) state = no_states();
#pragma unroll
      for (int j = 0; j < S; ++j) {
        decay[i].v[j] = exp2_fast(dt * A.v[j]);
        state.v[j] = decay[i].v[j] * state.v[j] + dtx * B.v[j];
      }
      h[i] = state;
    }
  }
  constexpr int TOKENS = STARTS ? 1 : 8 / S;
  ChannelSums<TOKENS> sums;
#pragma unroll
  for (int i = SEGMENT - 1; i >= 0; --i) {
    const int index = (SEGMENT - 1 - i) % TOKENS;
    if (index == 0) sums.begin();
    const float dt = planes[i * CHANNELS], dtx = planes[PLANE + i * CHANNELS], dy = planes[2 * PLANE + i * CHANNELS];
    const States B = *reinterpret_cast<const States*>(wide + i * BC);
    const States C = *reinterpret_cast<const States*>(wide + i * BC + STATES);
    const bool start = STARTS && (starts >> i & 1u);
    States previous = start ? no_states() : i ? h[i ? i - 1 : 0] : *before;
    States dB, dC;
    float Bdh = 0.f, Ag = 0.f, Ch = 0.f;
#pragma unroll
    for (int j = 0; j < S; ++j) {
      const float gradient = dy * C.v[j] + dh.v[j];
      Bdh += B.v[j] * gradient;
      dB.v[j] = dtx * gradient;
      dC.v[j] = dy * h[i].v[j];
      if (HAS_Z) Ch += C.v[j] * h[i].v[j];
      dh.v[j] = decay[i].v[j] * gradient;
      const float g = dh.v[j] * previous.v[j];
      Ag += A.v[j] * g;
      dA.v[j] += dt * g;
    }
    if (start) dh = no_states();
    sums.add(dB, dC, index, lane.picked);
    if (index == TOKENS - 1) sums.end(lane.sums + (first + i) * BC, lane.index);
    const float sum = sum_states(Bdh, Ag, Ch, lane.q);
    if (lane.q < 3) lane.planes[lane.q * PLANE + (first + i) * CHANNELS] = sum;
  }
}

// One segment forward.
template <bool STARTS>
__device__ __forceinline__ void forth_segment(States& h, const States& A, const Lane& lane, int first,
                                                unsigned starts) {
#pragma unroll
  for (int i = 0; i < SEGMENT; ++i) {
    const float dt = lane.planes[(first + i) * CHANNELS], dtx = lane.planes[PLANE + (first + i) * CHANNELS];
    const States B = *reinterpret_cast<const States*>(lane.wide + (first + i) * BC);
    if (STARTS && (starts >> i & 1u)) h = no_states();
#pragma unroll
    for (int j = 0; j < S; ++j) h.v[j] = exp2_fast(dt * A.v[j]) * h.v[j] + dtx * B.v[j];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) scan_backward(const BackwardArguments given) {
  DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);

  const int thread = threadIdx.x, index = thread % 32, warp = thread / 32, row = blockIdx.y, length = given.length;
  // As one of 128 that prepare numbers: a token of the tile and four channels of it.
  const int mine = thread / 8, place = thread % 8 * 4, channel = blockIdx.x * CHANNELS + place;
  const bool here = channel < given.dim;
  // As one of four that share a channel.
  const int q = index / 8, column = warp * 8 + index % 8, my_channel = blockIdx.x * CHANNELS + column;
  const bool active = my_channel < given.dim;
  const long long my_states = (long long)my_channel * STATES + q * S;
  const long long my_row = (long long)row * given.dim * STATES + my_states;
  Lane lane = {shared.planes + column, shared.wide + q * S, shared.sums[warp], index, q, {}};
  const int chunks = (length + CHUNK - 1) / CHUNK;

  States A = no_states(), dA = no_states(), dh = no_states();
  if (active) {
    A = *reinterpret_cast<const States*>(given.A + my_states);
    if (given.dlast) dh = *reinterpret_cast<const States*>(given.dlast + my_row);
  }
#pragma unroll
  for (int j = 0; j < S; ++j) A.v[j] *= LOG2_E;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    lane.picked[m][0] = index / 4 == 2 * m ? 1.f : 0.f;
    lane.picked[m][1] = index / 4 == 2 * m + 1 ? 1.f : 0.f;
  }
  float dD[4] = {0.f, 0.f, 0.f, 0.f}, dbias[4] = {0.f, 0.f, 0.f, 0.f};

  int slot = 1;  // of `raw`, that was filled last
  unsigned next_marks = 0u;
  auto prefetch = [&](int tile, bool back) {
    slot ^= 1;
    bool valid = here && tile + mine < length;
    const int token = tile + mine;
    copy_later<BYTES>(&shared.raw[slot][0][thread], at(given.x, row, token, channel), valid);
    copy_later<BYTES>(&shared.raw[slot][1][thread], at(given.dt, row, token, channel), valid);
    if (back) copy_later<BYTES>(&shared.raw[slot][2][thread], at(given.dy, row, token, channel), valid);
    if (HAS_Z && back) copy_later<BYTES>(&shared.raw[slot][3][thread], at(given.z, row, token, channel), valid);
    copy_BC(shared.raw_BC, given.B, given.C, row, tile, length, back, thread);
    next_marks = read_marks(given.marks, row, tile, length);
  };
  // From what was copied to float32 for all: dt, dt x, B, C and, if `back`, dy.
  auto prepare = [&](const Marks& marks, bool back) {
    const bool real = !(marks.padding >> mine & 1u);
    float x[4], dt[4];
    Float4 step, input;
    unpack(shared.raw[slot][0][thread], x), unpack(shared.raw[slot][1][thread], dt);
    const Float4 bias = read_vector(given.bias, channel, here);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      step.v[i] = real ? step_size(dt[i] + bias.v[i]) : 0.f;
      input.v[i] = real ? step.v[i] * x[i] : 0.f;
    }
    float* to = shared.planes + mine * CHANNELS + place;
    *reinterpret_cast<Float4*>(to) = step;
    *reinterpret_cast<Float4*>(to + PLANE) = input;
    if (back) {
      float z[4];
      Float4 dy;
      unpack(shared.raw[slot][2][thread], dy.v), unpack(shared.raw[slot][3][thread], z);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (HAS_Z) dy.v[i] *= z[i] * sigmoid(z[i]);
        if (!real) dy.v[i] = 0.f;
      }
      *reinterpret_cast<Float4*>(to + 2 * PLANE) = dy;
    }
    widen_BC(shared.wide, shared.raw_BC, marks.padding, thread);
  };
  // From the sums over states to the gradients by four channels of a token.
  auto finish = [&](int from, int tile, bool real) {
    const Float4 bias = read_vector(given.bias, channel, here), D = read_vector(given.D, channel, here);
    const float* planes = shared.planes + mine * CHANNELS + place;
    const Float4 Bdh = *reinterpret_cast<const Float4*>(planes), Ag = *reinterpret_cast<const Float4*>(planes + PLANE);
    const Float4 Ch = *reinterpret_cast<const Float4*>(planes + 2 * PLANE);
    float x[4], dt[4], z[4], dy[4], dx[4], ddt[4], dz[4], out[4];
    unpack(shared.raw[from][0][thread], x), unpack(shared.raw[from][1][thread], dt);
    unpack(shared.raw[from][2][thread], dy), unpack(shared.raw[from][3][thread], z);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float slope, ungated = dy[i];
      const float step = step_size(dt[i] + bias.v[i], &slope);
      if (HAS_Z) {
        const float open = sigmoid(z[i]), y = Ch.v[i] + D.v[i] * x[i];
        ungated *= z[i] * open;
        out[i] = real ? y * z[i] * open : 0.f;
        dz[i] = real ? dy[i] * y * open * (1.f + z[i] * (1.f - open)) : 0.f;
      }
      dx[i] = real ? step * Bdh.v[i] + D.v[i] * ungated : 0.f;
      ddt[i] = real ? (x[i] * Bdh.v[i] + LN_2 * Ag.v[i]) * slope : 0.f;
      dbias[i] += ddt[i];
      if (real) dD[i] += ungated * x[i];
    }
    if (here && tile + mine < length) {
      *at(given.dx, row, tile + mine, channel) = pack(dx);
      *at(given.ddt, row, tile + mine, channel) = pack(ddt);
      if (HAS_Z) *at(given.dz, row, tile + mine, channel) = pack(dz);
      if (HAS_Z && given.y.data) *at(given.y, row, tile + mine, channel) = pack(out);
    }
  };

  prefetch((chunks - 1) * CHUNK, false);
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    const int begin = chunk * CHUNK, tiles = ((length - begin < CHUNK ? length - begin : CHUNK) + TILE - 1) / TILE;
    const States* kept = reinterpret_cast<const States*>(
        given.kept + ((long long)row * chunks + chunk) * given.dim * STATES + my_states);
    States h = active ? *kept : no_states();
    for (int k = 0; k < tiles; ++k) {
      wait_for_copies();
      const Marks marks = marks_until(next_marks, begin + k * TILE, length);
      prepare(marks, false);
        if (k + 1 < tiles) {
        prefetch(begin + (k + 1) * TILE, false);
      } else {
        prefetch(begin + k * TILE, true);
      }
      __syncthreads();
#pragma unroll 1
      for (int segment = 2 * k; segment < 2 * k + 2 && segment < 2 * tiles - 1; ++segment) {
        const int first = segment % 2 * SEGMENT;
        const unsigned starts = marks.starts >> first & 0xffu;
        if (segment) shared.before[segment - 1][thread] = h;
        if (starts) {
          forth_segment<true>(h, A, lane, first, starts);
        } else {
          forth_segment<false>(h, A, lane, first, 0u);
        }
      }
      if (k + 1 == tiles) shared.before[2 * k][thread] = h;
      __syncthreads();
    }
    for (int k = tiles - 1; k >= 0; --k) {
      const int tile = begin + k * TILE;
      wait_for_copies();
      const Marks marks = marks_until(next_marks, tile, length);
      prepare(marks, true);
      const int from = slot;
      if (k) {
        prefetch(tile - TILE, true);
      } else if (chunk) {
        prefetch(begin - CHUNK, false);
      }
      __syncthreads();
#pragma unroll 1
      for (int segment = 2 * k + 1; segment >= 2 * k; --segment) {
        const int first = segment % 2 * SEGMENT;
        const unsigned starts = marks.starts >> first & 0xffu;
        if (!segment) shared.before[0][thread] = active ? *kept : no_states();  // the second segment's is not needed
        const States* before = &shared.before[segment ? segment - 1 : 0][thread];
        if (starts) {
          back_segment<true>(dh, dA, A, before, lane, first, starts);
        } else {
          back_segment<false>(dh, dA, A, before, lane, first, 0u);
        }
      }
      __syncthreads();
      finish(from, tile, !(marks.padding >> mine & 1u));
#pragma unroll
      for (int turn = 0; turn < BC_TURNS; ++turn) {
        const int i = thread + turn * THREADS;
        if (BC_VECTORS % THREADS && i >= BC_VECTORS) break;
        Float4 sum = {{0.f, 0.f, 0.f, 0.f}};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          const Float4 part = *reinterpret_cast<const Float4*>(shared.sums[w] + 4 * i);
#pragma unroll
          for (int j = 0; j < 4; ++j) sum.v[j] += part.v[j];
        }
        const int token = tile + i / (2 * S);
        long long to = ((long long)blockIdx.x * gridDim.y + row) * length + token;
        if (token < length) *reinterpret_cast<Float4*>(given.dBC + to * BC + i % (2 * S) * 4) = sum;
      }
    }
  }
  if (active) {
    *reinterpret_cast<States*>(given.dA + my_row) = dA;
    *reinterpret_cast<States*>(given.dfirst + my_row) = dh;
  }
  // Over the sixteen tokens of a tile.
  for (int which = 0; which < 2; ++which) {
    float* to = which ? given.dbias : given.dD;
    if (!to) continue;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.planes[mine * CHANNELS + place + i] = which ? dbias[i] : dD[i];
    __syncthreads();
    const int at_channel = blockIdx.x * CHANNELS + thread;
    if (thread < CHANNELS && at_channel < given.dim) {
      float sum = 0.f;
      for (int token = 0; token < TILE; ++token) sum += shared.planes[token * CHANNELS + thread];
      to[(long long)row * given.dim + at_channel] = sum;
    }
  }
}
