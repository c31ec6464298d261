// y_t = silu(bias + sum of weight_k x), over the last WIDTH real tokens of the document of token t.

struct ForwardArguments {
  Tokens x, y;
  const void *weight, *bias;  // bias may be null
  const unsigned* marks;      // may be null
  int length, dim;
};

__device__ __forceinline__ void put(const Line& y, int token, float (&sum)[4], bool here) {
#if SILU
#pragma unroll
  for (int c = 0; c < 4; ++c) sum[c] *= sigmoid(sum[c]);
#endif
  if (here) *y.at(token) = pack(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) conv_forward(const ForwardArguments given) {
  const int warp = threadIdx.x / 32, row = blockIdx.z, length = given.length;
  const int channel = blockIdx.x * CHANNELS + threadIdx.x % 32 * 4, begin = (blockIdx.y * WARPS + warp) * RUN;
  const int end = length - begin > RUN ? begin + RUN : length;
  const bool here = channel < given.dim;
  if (begin >= length) return;
  const Factors factors(given.weight, given.bias, channel, here);
  const Marks marks(given.marks, row, length);
  const Line x(given.x, row, channel), y(given.y, row, channel);
  float old[OLD][4];
  look_back(old, x, marks, begin, here);
#pragma unroll 1
  for (int t = begin; t < end; t += GROUP) {
    float now[GROUP][4], sum[4];
    if (t + GROUP <= end && !marks.any(t)) {
#pragma unroll
      for (int i = 0; i < GROUP; ++i) read(now[i], x, t + i, here);
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        factors.convolve(sum, old, now[i]);
        put(y, t + i, sum, here);
        remember(old, now[i]);
      }
      continue;
    }
    for (int i = t; i < t + GROUP && i < end; ++i) {
      const unsigned mark = marks.of(i);
      if (is_padding(mark)) {
        if (here) *y.at(i) = nothing();
        continue;
      }
      if (is_start(mark)) forget(old);
      read(now[0], x, i, here);
      factors.convolve(sum, old, now[0]);
      put(y, i, sum, here);
      remember(old, now[0]);
    }
  }
}
