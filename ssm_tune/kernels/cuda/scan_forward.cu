// y_t = (C_t h_t + D x_t) silu(z_t), h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t.

struct ForwardArguments {
  Tokens x, dt, z, B, C, y;    // in this order
  const float *A, *D, *bias;   // D and bias may be null
  const unsigned* marks;       // may be null
  const float* first;          // the state before each piece of each row, or null: zero
  float *kept, *last;          // the state before every CHUNK tokens, and after the row; may be null
  long long first_row, first_piece;
  int length, dim, piece;  // piece: tokens of a piece, whole chunks; blockIdx.z counts them
};

constexpr int ROW = CHANNELS + 8;  // so that four tokens of eight channels lie in different banks

// Where a lane of four that share a channel works.
struct Lane {
  float *steps, *inputs;
  const float* wide;
  int q;
};

// The sums over the four lanes of a channel: lane q gets that of token q.
__device__ __forceinline__ float sum_states(const float (&y)[4], int q) {
  bool upper = q & 2, odd = q & 1;
  float first = (upper ? y[2] : y[0]) + exchange(upper ? y[0] : y[2], 16);
  float second = (upper ? y[3] : y[1]) + exchange(upper ? y[1] : y[3], 16);
  return (odd ? second : first) + exchange(odd ? first : second, 8);
}

// Four tokens of a tile, from token t.
template <bool STARTS>
__device__ __forceinline__ void four_tokens(States& h, const States& A, const Lane& lane, int t, unsigned starts) {
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float dt = lane.steps[(t + i) * ROW], dtx = lane.inputs[(t + i) * ROW];
    const States B = *reinterpret_cast<const States*>(lane.wide + (t + i) * BC);
    const States C = *reinterpret_cast<const States*>(lane.wide + (t + i) * BC + STATES);
    if (STARTS && (starts >> (t + i) & 1u)) h = no_states();
    y[i] = 0.f;
#pragma unroll
    for (int j = 0; j < S; ++j) {
      h.v[j] = exp2_fast(dt * A.v[j]) * h.v[j] + dtx * B.v[j];
      y[i] += C.v[j] * h.v[j];
    }
  }
  lane.steps[(t + lane.q) * ROW] = sum_states(y, lane.q);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) scan_forward(const ForwardArguments given) {
  __shared__ __align__(16) float steps[TILE * ROW];  // dt; after a token is done, y
  __shared__ __align__(16) float inputs[TILE * ROW];  // dt x
  __shared__ __align__(16) float wide[TILE * BC];
  __shared__ __align__(16) Vector raw[3][THREADS];
  __shared__ __align__(16) Vector raw_BC[BC_VECTORS];
  __shared__ Begins<6> begins;
  __shared__ unsigned all_marks[2];  // of every second tile

  const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int row = blockIdx.y;
  const int length = given.length, begin = blockIdx.z * given.piece;
  const int end = length - begin > given.piece ? begin + given.piece : length;
  // As one of 128 that prepare numbers: a token of the tile and four channels of it.
  const int mine = thread / 8, place = thread % 8 * 4, channel = blockIdx.x * CHANNELS + place;
  const bool here = channel < given.dim;
  const Float4 bias = read_vector(given.bias, channel, here), D = read_vector(given.D, channel, here);
  // As one of four that share a channel.
  const int q = lane / 8, column = warp * 8 + lane % 8, my_channel = blockIdx.x * CHANNELS + column;
  const bool active = my_channel < given.dim;
  const long long my_states = (long long)my_channel * STATES + q * S;

  States A = no_states(), h = no_states();
  if (active) {
    A = *reinterpret_cast<const States*>(given.A + my_states);
    if (given.first) {
      h = *reinterpret_cast<const States*>(given.first + row * given.first_row + blockIdx.z * given.first_piece +
                                           my_states);
    }
  }
#pragma unroll
  for (int j = 0; j < S; ++j) A.v[j] *= LOG2_E;

  begins.find(&given.x, 3, row, blockIdx.x * CHANNELS, thread);
  __syncthreads();
  auto prefetch = [&](int tile) {
    bool valid = here && tile + mine < end;
    const int token = tile + (int)mine;
    const Vector *x = begins.at(0, given.x.token, token, thread % 8), *z = begins.at(2, given.z.token, token, thread % 8);
    const Vector* dt = begins.at(1, given.dt.token, token, thread % 8);
    const BCPart BC_part(begins, 3, given.B.token, given.C.token, tile, thread);
    copy_later<BYTES>(&raw[0][thread], x, valid);
    copy_later<BYTES>(&raw[1][thread], dt, valid);
    if (HAS_Z) copy_later<BYTES>(&raw[2][thread], z, valid);
    BC_part.copy(raw_BC, tile, end, true, thread);
    copy_marks(all_marks + tile / TILE % 2, given.marks, row, tile, length);
  };

  prefetch(begin);
  for (int tile = begin; tile < end; tile += TILE) {
    wait_for_copies();
    const Marks marks = marks_until(given.marks ? all_marks[tile / TILE % 2] : 0u, tile, end);
    const bool real = !(marks.padding >> mine & 1u);
    const Vector x_given = raw[0][thread], z_given = raw[2][thread];
    {
      float x[4], dt[4];
      Float4 step, input;
      unpack(x_given, x), unpack(raw[1][thread], dt);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        step.v[i] = real ? step_size(dt[i] + bias.v[i]) : 0.f;
        input.v[i] = real ? step.v[i] * x[i] : 0.f;
      }
      *reinterpret_cast<Float4*>(steps + mine * ROW + place) = step;
      *reinterpret_cast<Float4*>(inputs + mine * ROW + place) = input;
      widen_BC(wide, raw_BC, marks.padding, thread);
    }
    if (tile + TILE < end) prefetch(tile + TILE);
    if (given.kept && tile % CHUNK == 0 && active) {
      long long chunks = (length + CHUNK - 1) / CHUNK;
      float* kept = given.kept + (row * chunks + tile / CHUNK) * given.dim * STATES + my_states;
      *reinterpret_cast<States*>(kept) = h;
    }
    __syncthreads();
    const Lane of_lane = {steps + column, inputs + column, wide + q * S, q};
    if (marks.starts) {
#pragma unroll 1
      for (int t = 0; t < TILE; t += 4) four_tokens<true>(h, A, of_lane, t, marks.starts);
    } else {
#pragma unroll
      for (int t = 0; t < TILE; t += 4) four_tokens<false>(h, A, of_lane, t, 0u);
    }
    __syncthreads();
    if (here && tile + mine < end) {
      float x[4], z[4], y[4];
      unpack(x_given, x), unpack(z_given, z);
      const Float4 scanned = *reinterpret_cast<const Float4*>(steps + mine * ROW + place);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = scanned.v[i] + D.v[i] * x[i];
        if (HAS_Z) y[i] *= z[i] * sigmoid(z[i]);
        if (!real) y[i] = 0.f;
      }
      *begins.at(5, given.y.token, tile + mine, thread % 8) = pack(y);
    }
  }
  if (given.last && active && end == length) {
    *reinterpret_cast<States*>(given.last + (long long)row * given.dim * STATES + my_states) = h;
  }
}
