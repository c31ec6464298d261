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

// A channel's place in `sums`, by the token: so that four tokens of eight channels lie in different banks.
__device__ __forceinline__ unsigned place_in_sums(unsigned channel, unsigned token) { return channel ^ token % 4 * 8; }

// The sums over the four lanes of a channel: lane q gets that of token q.
__device__ __forceinline__ float sum_states(const float (&y)[4], unsigned q) {
  bool upper = q & 2, odd = q & 1;
  float first = (upper ? y[2] : y[0]) + exchange(upper ? y[0] : y[2], 16);
  float second = (upper ? y[3] : y[1]) + exchange(upper ? y[1] : y[3], 16);
  return (odd ? second : first) + exchange(odd ? first : second, 8);
}

// Four tokens of a tile, from token t; `steps`: dt and dt x of the lane's channel, `wide`: B and C of its states.
template <bool STARTS>
__device__ __forceinline__ float four_tokens(States& h, const States& A, const Float2 (*steps)[CHANNELS],
                                             const float* wide, unsigned q, int t, unsigned starts) {
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Float2 step = steps[t + i][0];
    const States B = *reinterpret_cast<const States*>(wide + (t + i) * BC);
    const States C = *reinterpret_cast<const States*>(wide + (t + i) * BC + STATES);
    if (STARTS && (starts >> (t + i) & 1u)) h = no_states();
    y[i] = 0.f;
#pragma unroll
    for (int j = 0; j < S; ++j) {
      h.v[j] = exp2_fast(step.v[0] * A.v[j]) * h.v[j] + step.v[1] * B.v[j];
      y[i] += C.v[j] * h.v[j];
    }
  }
  return sum_states(y, q);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) scan_forward(const ForwardArguments given) {
  __shared__ __align__(16) Float2 steps[TILE][CHANNELS];  // dt and dt x
  __shared__ __align__(16) float sums[TILE][CHANNELS];    // over states: y before D and the gate
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
  const unsigned mine = thread / 8, place = thread % 8 * 4;
  const int channel = blockIdx.x * CHANNELS + (int)place;
  const bool here = channel < given.dim;
  const Float4 bias = read_vector(given.bias, channel, here), D = read_vector(given.D, channel, here);
  // As one of four that share a channel.
  const unsigned q = lane / 8, column = warp * 8 + lane % 8;
  const int my_channel = blockIdx.x * CHANNELS + (int)column;
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
  const unsigned* of_row = marks_of_row(given.marks, row, length);
  auto prefetch = [&](int tile) {
    bool valid = here && tile + (int)mine < end;
    const int token = tile + (int)mine;
    const Vector *x = begins.at(0, given.x.token, token, thread % 8), *z = begins.at(2, given.z.token, token, thread % 8);
    const Vector* dt = begins.at(1, given.dt.token, token, thread % 8);
    const BCPart BC_part(begins, 3, given.B.token, given.C.token, tile, thread);
    copy_later<BYTES>(&raw[0][thread], x, valid);
    copy_later<BYTES>(&raw[1][thread], dt, valid);
    if (HAS_Z) copy_later<BYTES>(&raw[2][thread], z, valid);
    BC_part.copy(raw_BC, tile, end, true, thread);
    if (of_row) copy_marks(all_marks + tile / TILE % 2, of_row, tile);
  };

  prefetch(begin);
  for (int tile = begin; tile < end; tile += TILE) {
    wait_for_copies();
    const Marks marks = marks_until(given.marks ? all_marks[tile / TILE % 2] : 0u, tile, end);
    const bool padding = marks.padding >> mine & 1u;
    if (padding) raw[0][thread] = raw[2][thread] = nothing(), raw[1][thread] = no_step();
    const Vector x_given = raw[0][thread], z_given = raw[2][thread];
    {
      float x[4], dt[4];
      unpack(x_given, x), unpack(raw[1][thread], dt);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        float one = step_size(dt[i] + bias.v[i]), two = step_size(dt[i + 1] + bias.v[i + 1]);
        if (!SOFTPLUS && padding) one = two = 0.f;
        *reinterpret_cast<Float4*>(&steps[mine][place + i]) = Float4{{one, one * x[i], two, two * x[i + 1]}};
      }
      Vector BC_given[BC_TURNS];
      read_BC(BC_given, raw_BC, thread);
      widen_BC(wide, BC_given, marks.padding, thread);
    }
    if (tile + TILE < end) prefetch(tile + TILE);
    if (given.kept && tile % CHUNK == 0 && active) {
      long long chunks = (length + CHUNK - 1) / CHUNK;
      float* kept = given.kept + (row * chunks + tile / CHUNK) * given.dim * STATES + my_states;
      *reinterpret_cast<States*>(kept) = h;
    }
    __syncthreads();
    const Float2(*my_steps)[CHANNELS] = reinterpret_cast<const Float2(*)[CHANNELS]>(&steps[0][column]);
    float* my_sums = &sums[q][place_in_sums(column, q)];
    if (marks.starts) {
#pragma unroll 1
      for (int t = 0; t < TILE; t += 4) {
        my_sums[t * CHANNELS] = four_tokens<true>(h, A, my_steps, wide + q * S, q, t, marks.starts);
      }
    } else {
#pragma unroll
      for (int t = 0; t < TILE; t += 4) {
        my_sums[t * CHANNELS] = four_tokens<false>(h, A, my_steps, wide + q * S, q, t, 0u);
      }
    }
    __syncthreads();
    float* scanned_here = &sums[mine][place_in_sums(place, mine)];
    if (padding) *reinterpret_cast<Float4*>(scanned_here) = Float4{{0.f, 0.f, 0.f, 0.f}};
    if (here && tile + (int)mine < end) {
      float x[4], z[4], y[4];
      unpack(x_given, x), unpack(z_given, z);
      const Float4 scanned = *reinterpret_cast<const Float4*>(scanned_here);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = scanned.v[i] + D.v[i] * x[i];
        if (HAS_Z) y[i] *= z[i] * sigmoid(z[i]);
      }
      *begins.at(5, given.y.token, tile + (int)mine, thread % 8) = pack(y);
    }
  }
  if (given.last && active && end == length) {
    *reinterpret_cast<States*>(given.last + (long long)row * given.dim * STATES + my_states) = h;
  }
}
