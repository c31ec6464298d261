// Tensors of tokens, as kernels read and write them: four channels at once, as float32 in registers.
//
// Given by the compiler's options: ELEMENT (0 bfloat16, 1 float16, 2 float32).

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

#if ELEMENT == 2
typedef Float4 Vector;
typedef float Element;
#else
typedef Half4 Vector;
typedef unsigned short Element;
#endif
constexpr int BYTES = sizeof(Vector);

// A tensor of tokens: channels, or states, of each are side by side; rows and tokens are so many bytes apart.
struct Tokens {
  unsigned char* data;
  long long row;
  int token;
};

__device__ __forceinline__ void unpack(const Vector& vector, float (&v)[4]) {
#if ELEMENT == 2
  for (int i = 0; i < 4; ++i) v[i] = vector.v[i];
#elif ELEMENT == 1
  v[0] = lower_half(vector.x), v[1] = upper_half(vector.x), v[2] = lower_half(vector.y), v[3] = upper_half(vector.y);
#else
  v[0] = from_bits(vector.x << 16), v[1] = from_bits(vector.x & 0xffff0000u);
  v[2] = from_bits(vector.y << 16), v[3] = from_bits(vector.y & 0xffff0000u);
#endif
}

__device__ __forceinline__ Vector pack(const float (&v)[4]) {
  Vector vector;
#if ELEMENT == 2
  for (int i = 0; i < 4; ++i) vector.v[i] = v[i];
#elif ELEMENT == 1
  vector.x = pair_of_halves(v[0], v[1]), vector.y = pair_of_halves(v[2], v[3]);
#else
  vector.x = pair_of_bfloats(v[0], v[1]), vector.y = pair_of_bfloats(v[2], v[3]);
#endif
  return vector;
}

__device__ __forceinline__ Vector nothing() {
  const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
  return pack(zeros);
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.f + exp2_fast(-x * LOG2_E)); }
