// What both directions of the short causal convolution have in common.
//
// A warp works on 128 channels of one row, four a lane, and goes through a run of tokens with the tokens before in
// registers: what a token sees are the last real ones of its own document, however far apart they stand. All lanes are
// at the same token, so that documents and padding are branches for all; GROUP plain tokens in a row have a path without
// them. There a token's place in registers is filled with the one GROUP tokens later as soon as it is used, so that the
// memory always has something to do. Lanes beyond the last channel read the first ones, and write nothing.
//
// Given by the compiler's options, beside those of tokens.cuh: WIDTH (2, 3, 4), SILU, WEIGHT (as ELEMENT: of weights),
// BLOCKS (of a multiprocessor, at least).

constexpr int WARPS = 4, THREADS = 128, CHANNELS = 128, GROUP = 4, TILE = 16, OLD = WIDTH - 1;

#if WEIGHT == 2
typedef float Weight;
#else
typedef unsigned short Weight;
#endif

// The factors of a channel, read at once where there are four.
struct __align__(WIDTH == 4 ? 4 * sizeof(Weight) : sizeof(Weight)) ChannelWeights {
  Weight of[WIDTH];
};

__device__ __forceinline__ float widen(Weight weight) {
#if WEIGHT == 2
  return weight;
#elif WEIGHT == 1
  return lower_half(weight);
#else
  return from_bits((unsigned)weight << 16);
#endif
}

// The factors of four channels, the newest token's last, and what is added.
struct Factors {
  float weight[WIDTH][4], bias[4];

  __device__ __forceinline__ Factors(const void* weights, const void* biases, int channel, bool here) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      ChannelWeights found = {};
      if (here) found = static_cast<const ChannelWeights*>(weights)[channel + c];
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) weight[k][c] = widen(found.of[k]);
      bias[c] = biases && here ? widen(static_cast<const Weight*>(biases)[channel + c]) : 0.f;
    }
  }

  // Of a token, before the activation.
  __device__ __forceinline__ void convolve(float (&sum)[4], const float (&old)[OLD][4], const float (&x)[4]) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      sum[c] = bias[c] + weight[OLD][c] * x[c];
#pragma unroll
      for (int k = 0; k < OLD; ++k) sum[c] += weight[k][c] * old[k][c];
    }
  }
};

// Which tokens of a row are a document's first, and which are padding: of every 16 tokens 32 bits, starts below padding.
struct Marks {
  const unsigned* tiles;  // of the row; null: all are plain

  __device__ __forceinline__ Marks(const unsigned* marks, int row, int length)
      : tiles(marks ? marks + (long long)row * ((length + TILE - 1) / TILE) : nullptr) {}

  __device__ __forceinline__ unsigned of(int token) const { return tiles ? tiles[token / TILE] >> token % TILE : 0u; }
  // Some of GROUP tokens from a multiple of GROUP are marked.
  __device__ __forceinline__ bool any(int token) const { return of(token) & ((1u << GROUP) - 1u) * 0x10001u; }
};

__device__ __forceinline__ bool is_start(unsigned marks) { return marks & 1u; }
__device__ __forceinline__ bool is_padding(unsigned marks) { return marks >> 16 & 1u; }

// A warp's channels of a row, from a tensor of tokens.
struct Line {
  unsigned char* begin;
  int token;

  __device__ __forceinline__ Line(const Tokens& tensor, int row, int channel)
      : begin(tensor.data + (row * tensor.row + channel * (long long)sizeof(Element))), token(tensor.token) {}
  __device__ __forceinline__ Vector* at(int t) const {
    return reinterpret_cast<Vector*>(begin + (long long)t * token);
  }
};

// What lies so many bytes further.
__device__ __forceinline__ const Vector* after(const Vector* place, int bytes) {
  return reinterpret_cast<const Vector*>(reinterpret_cast<const unsigned char*>(place) + bytes);
}

__device__ __forceinline__ Vector* after(Vector* place, int bytes) {
  return reinterpret_cast<Vector*>(reinterpret_cast<unsigned char*>(place) + bytes);
}

__device__ __forceinline__ void read(float (&v)[4], const Line& line, int token, bool here) {
  Vector vector = nothing();
  if (here) vector = *line.at(token);
  unpack(vector, v);
}

__device__ __forceinline__ void copy(float (&to)[4], const float (&from)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) to[c] = from[c];
}

// The inputs that token `begin` sees beside itself, unless it starts a document; zeros where there are none.
// `begin`: a multiple of GROUP. Where nothing is marked they are read at once.
__device__ __forceinline__ void look_back(float (&old)[OLD][4], const Line& x, const Marks& marks, int begin, bool here) {
  if (begin >= GROUP && !marks.any(begin - GROUP)) {
#pragma unroll
    for (int k = 0; k < OLD; ++k) read(old[k], x, begin - OLD + k, here);
    return;
  }
  int t = begin;
  bool more = true;
#pragma unroll
  for (int k = OLD - 1; k >= 0; --k) {
#pragma unroll
    for (int c = 0; c < 4; ++c) old[k][c] = 0.f;
    if (!more) continue;
    do --t;
    while (t >= 0 && is_padding(marks.of(t)));
    more = t >= 0;
    if (!more) continue;
    read(old[k], x, t, here);
    more = !is_start(marks.of(t));
  }
}

__device__ __forceinline__ void forget(float (&old)[OLD][4]) {
#pragma unroll
  for (int k = 0; k < OLD; ++k) {
#pragma unroll
    for (int c = 0; c < 4; ++c) old[k][c] = 0.f;
  }
}

__device__ __forceinline__ void remember(float (&old)[OLD][4], const float (&x)[4]) {
#pragma unroll
  for (int k = 0; k + 1 < OLD; ++k) copy(old[k], old[k + 1]);
  copy(old[OLD - 1], x);
}
