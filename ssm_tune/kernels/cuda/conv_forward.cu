// y_t = silu(bias + sum of weight_k x), over the last WIDTH real tokens of the document of token t.

struct ForwardArguments {
  Tokens x, y;
  const void *weight, *bias;  // bias may be null
  const unsigned* marks;      // may be null
  int length, dim;
  int run, runs, count;       // a row is cut into so many runs of `run` tokens, a multiple of GROUP; count: of all rows
};

__device__ __forceinline__ void activate(float (&sum)[4]) {
#if SILU
#pragma unroll
  for (int c = 0; c < 4; ++c) sum[c] *= sigmoid(sum[c]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv_forward(const ForwardArguments given) {
  const int warp = threadIdx.x / 32, number = blockIdx.y * WARPS + warp, length = given.length;
  const int row = number / given.runs, begin = number % given.runs * given.run;
  const int end = length - begin > given.run ? begin + given.run : length;
  const int channel = blockIdx.x * CHANNELS + threadIdx.x % 32 * 4;
  const bool here = channel < given.dim;
  if (number >= given.count) return;
  const Factors factors(given.weight, given.bias, channel, here);
  const Marks marks(given.marks, row, length);
  const Line x(given.x, row, here ? channel : 0), y(given.y, row, channel);
  Vector ahead[GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) ahead[i] = *x.at(begin + i < length ? begin + i : begin);
  float old[OLD][4];
  look_back(old, x, marks, begin, here);
#pragma unroll 1
  for (int t = begin; t < end; t += GROUP) {
    float now[4], sum[4];
    const Vector* from = x.at(t + 2 * GROUP <= length ? t + GROUP : begin);  // what is read ahead is used whole only
    if (t + GROUP <= end && !marks.any(t)) {
      Vector* into = y.at(t);
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        unpack(ahead[i], now);
        ahead[i] = *from;
        factors.convolve(sum, old, now);
        activate(sum);
        if (here) *into = pack(sum);
        remember(old, now);
        from = after(from, x.token), into = after(into, y.token);
      }
      continue;
    }
#pragma unroll 1
    for (int i = t; i < t + GROUP && i < end; ++i) {
      const unsigned mark = marks.of(i);
      if (is_padding(mark)) {
        if (here) *y.at(i) = nothing();
        continue;
      }
      if (is_start(mark)) forget(old);
      read(now, x, i, here);
      factors.convolve(sum, old, now);
      activate(sum);
      if (here) *y.at(i) = pack(sum);
      remember(old, now);
    }
    if (t + 2 * GROUP > length) continue;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) ahead[i] = *from, from = after(from, x.token);
  }
}
