// With g the gradient by the sums before the activation, of which the same sums are made again:
//     dx_t = sum of weight_k g, over the tokens that see token t;  dweight_k = sum of g x;  dbias = sum of g.
//
// A token's dx is complete when WIDTH - 1 more real tokens of its document, or another document, have come: it is kept
// beside the token until then. After its own tokens a warp goes on until its last is complete.
//
// Given by the compiler's options, beside those of conv_common.cuh: NEED_WEIGHT, TWO.

struct BackwardArguments {
  Tokens x, dy, more, dx;     // more: if TWO, a second gradient by y, to be added to the first
  const void *weight, *bias;  // bias may be null
  const unsigned* marks;      // may be null
  float *dweight, *dbias;     // (blocks of runs, dim, WIDTH) and (blocks of runs, dim)
  int length, dim;
  int run, runs, count;       // a row is cut into so many runs of `run` tokens, a multiple of GROUP; count: of all rows
};

// The tokens before: their inputs, what their gradients are so far, and their places; -1: somebody else's.
struct Window {
  float x[OLD][4], dx[OLD][4];
  int place[OLD];

  __device__ __forceinline__ void put(int k, const Line& to, bool here) {
    if (place[k] >= 0 && here) *to.at(place[k]) = pack(dx[k]);
  }

  // The tokens before `token`, as far as they are this warp's, are the last that it has seen.
  __device__ __forceinline__ bool ends_at(int token) const {
    bool so = true;
#pragma unroll
    for (int k = 0; k < OLD; ++k) so = so && (place[k] < 0 || place[k] == token - OLD + k);
    return so;
  }

  // Nobody sees these tokens any more.
  __device__ __forceinline__ void close(const Line& to, bool here) {
#pragma unroll
    for (int k = 0; k < OLD; ++k) put(k, to, here), place[k] = -1;
    forget(x), forget(dx);
  }

  __device__ __forceinline__ void shift(const float (&new_x)[4], const float (&new_dx)[4], int new_place,
                                        const Line& to, bool here) {
    put(0, to, here);
    remember(x, new_x), remember(dx, new_dx);
#pragma unroll
    for (int k = 0; k + 1 < OLD; ++k) place[k] = place[k + 1];
    place[OLD - 1] = new_place;
  }
};

// The gradient by y, of one tensor or of two.
struct Slopes {
  Line one, two;

  __device__ __forceinline__ void read(float (&v)[4], int token, bool here) const {
    ::read(v, one, token, here);
#if TWO
    float more[4];
    ::read(more, two, token, here);
#pragma unroll
    for (int c = 0; c < 4; ++c) v[c] += more[c];
#endif
  }
};

// What has been read ahead of GROUP tokens.
struct Ahead {
  Vector x[GROUP], dy[GROUP];
#if TWO
  Vector more[GROUP];
#endif

  // What the pointers are at.
  __device__ __forceinline__ void fill(int i, const Vector* line, const Vector* one, const Vector* two) {
    x[i] = *line, dy[i] = *one;
#if TWO
    more[i] = *two;
#endif
  }

  __device__ __forceinline__ void take(int i, float (&now)[4], float (&slope)[4]) const {
    unpack(x[i], now), unpack(dy[i], slope);
#if TWO
    float second[4];
    unpack(more[i], second);
#pragma unroll
    for (int c = 0; c < 4; ++c) slope[c] += second[c];
#endif
  }
};

struct Sums {
  float weight[WIDTH][4], bias[4];
};

// A real token: to the gradients of those it sees, and, if it is this warp's own, to the sums. dx: its own so far.
__device__ __forceinline__ void add_token(Window& window, Sums& sums, const Factors& factors, const float (&x)[4],
                                          const float (&dy)[4], float (&dx)[4], bool own) {
  float sum[4], slope[4];
  copy(slope, dy);
#if SILU
  factors.convolve(sum, window.x, x);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float open = sigmoid(sum[c]);
    slope[c] *= open + sum[c] * open * (1.f - open);
  }
#endif
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    dx[c] = factors.weight[OLD][c] * slope[c];
#pragma unroll
    for (int k = 0; k < OLD; ++k) window.dx[k][c] += factors.weight[k][c] * slope[c];
    if (NEED_WEIGHT && own) {
      sums.bias[c] += slope[c];
      sums.weight[OLD][c] += slope[c] * x[c];
#pragma unroll
      for (int k = 0; k < OLD; ++k) sums.weight[k][c] += slope[c] * window.x[k][c];
    }
  }
}

__device__ __forceinline__ void one_token(Window& window, Sums& sums, const Factors& factors, const float (&x)[4],
                                          const float (&dy)[4], int token, bool own, const Line& to, bool here) {
  float dx[4];
  add_token(window, sums, factors, x, dy, dx, own);
  window.shift(x, dx, own ? token : -1, to, here);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv_backward(const BackwardArguments given) {
  const int warp = threadIdx.x / 32, number = blockIdx.y * WARPS + warp, length = given.length;
  const int row = number / given.runs, begin = number % given.runs * given.run;
  const int end = length - begin > given.run ? begin + given.run : length;
  const int channel = blockIdx.x * CHANNELS + threadIdx.x % 32 * 4;
  const bool here = channel < given.dim;
  const Factors factors(given.weight, given.bias, channel, here);
  const Marks marks(given.marks, row, length);
  const int readable = here ? channel : 0;
  const Line x(given.x, row, readable), to(given.dx, row, channel);
  const Slopes dy = {Line(given.dy, row, readable), Line(given.more, row, readable)};
  Sums sums = {};
  if (number < given.count) {
    Window window;
#pragma unroll
    for (int k = 0; k < OLD; ++k) window.place[k] = -1;
    Ahead ahead;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const int t = begin + i < length ? begin + i : begin;
      ahead.fill(i, x.at(t), dy.one.at(t), dy.two.at(t));
    }
    forget(window.dx);
    look_back(window.x, x, marks, begin, here);
    float now[4], slope[4];
#pragma unroll 1
    for (int t = begin; t < end; t += GROUP) {
      const int next = t + 2 * GROUP <= length ? t + GROUP : begin;  // what is read ahead is used whole only
      const Vector *from = x.at(next), *one = dy.one.at(next), *two = dy.two.at(next);
      if (t + GROUP <= end && !marks.any(t) && window.ends_at(t)) {
        Vector* into = to.at(t - OLD);
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
          float dx[4];
          ahead.take(i, now, slope);
          ahead.fill(i, from, one, two);
          from = after(from, x.token), one = after(one, dy.one.token), two = after(two, dy.two.token);
          add_token(window, sums, factors, now, slope, dx, true);
          if (here && (i >= OLD || window.place[i < OLD ? i : 0] >= 0)) *into = pack(window.dx[0]);
          into = after(into, to.token);
          remember(window.x, now), remember(window.dx, dx);
        }
#pragma unroll
        for (int k = 0; k < OLD; ++k) window.place[k] = t + GROUP - OLD + k;
        continue;
      }
#pragma unroll 1
      for (int i = t; i < t + GROUP && i < end; ++i) {
        const unsigned mark = marks.of(i);
        if (is_padding(mark)) {
          if (here) *to.at(i) = nothing();
          continue;
        }
        if (is_start(mark)) window.close(to, here);
        read(now, x, i, here), dy.read(slope, i, here);
        one_token(window, sums, factors, now, slope, i, true, to, here);
      }
      if (t + 2 * GROUP > length) continue;
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        ahead.fill(i, from, one, two);
        from = after(from, x.token), one = after(one, dy.one.token), two = after(two, dy.two.token);
      }
    }
    if (end + GROUP <= length && !marks.any(end)) {
#pragma unroll
      for (int i = 0; i < OLD; ++i) {
        ahead.take(i, now, slope);
        one_token(window, sums, factors, now, slope, end + i, false, to, here);
      }
    } else {
#pragma unroll 1
      for (int t = end, more = OLD; t < length && more > 0; ++t) {
        const unsigned mark = marks.of(t);
        if (is_padding(mark)) continue;
        if (is_start(mark)) break;
        --more;
        read(now, x, t, here), dy.read(slope, t, here);
        one_token(window, sums, factors, now, slope, t, false, to, here);
      }
    }
    window.close(to, here);
  }
  if (!NEED_WEIGHT) return;
  // Over the warps.
  __shared__ float all[WARPS][CHANNELS * WIDTH], all_biases[WARPS][CHANNELS];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int mine = threadIdx.x % 32 * 4 + c;
    all_biases[warp][mine] = sums.bias[c];
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) all[warp][mine * WIDTH + k] = sums.weight[k][c];
  }
  __syncthreads();
  const int first = blockIdx.x * CHANNELS, count = given.dim - first < CHANNELS ? given.dim - first : CHANNELS;
  for (int i = threadIdx.x; i < count * WIDTH; i += THREADS) {
    given.dweight[((long long)blockIdx.y * given.dim + first) * WIDTH + i] = all[0][i] + all[1][i] + all[2][i] + all[3][i];
  }
  if (threadIdx.x < count) {
    const int i = threadIdx.x;
    given.dbias[(long long)blockIdx.y * given.dim + first + i] =
        all_biases[0][i] + all_biases[1][i] + all_biases[2][i] + all_biases[3][i];
  }
}
