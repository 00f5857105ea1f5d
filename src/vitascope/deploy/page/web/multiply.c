// Matrix products for `simd.js`, four numbers at a time: two rows of x by four of w at once.
//
// python -m ziglang cc -target wasm32-freestanding -O3 -msimd128 -nostdlib -Wl,--no-entry -Wl,--import-memory
//     -Wl,--strip-all -Wl,--initial-memory=65536 -Wl,-z,stack-size=0 multiply.c -o multiply.wasm
// With -mrelaxed-simd, which adds products in one instruction: multiply-fused.wasm. (pip install ziglang)
// The memory is that of `simd.js` from its first byte on: a stack would be written over.

#include <wasm_simd128.h>

#ifdef __wasm_relaxed_simd__
#define ADD_PRODUCT(sum, a, b) wasm_f32x4_relaxed_madd(a, b, sum)
#else
#define ADD_PRODUCT(sum, a, b) wasm_f32x4_add(sum, wasm_f32x4_mul(a, b))
#endif
#define SHUFFLE wasm_i32x4_shuffle
#define ROWS 2
#define OUTS 4

// The sums of two vectors' numbers, two of each still apart: [a0 + a2, b0 + b2, a1 + a3, b1 + b3].
static v128_t halves(v128_t a, v128_t b) {
  return wasm_f32x4_add(SHUFFLE(a, b, 0, 4, 1, 5), SHUFFLE(a, b, 2, 6, 3, 7));
}

// Four vectors to the vector of their four sums.
static v128_t summed(const v128_t *v) {
  v128_t low = halves(v[0], v[1]), high = halves(v[2], v[3]);
  return wasm_f32x4_add(SHUFFLE(low, high, 0, 1, 4, 5), SHUFFLE(low, high, 2, 3, 6, 7));
}

// y = x w^T of x (rows, stride) and w (outs, stride): rows are a multiple of 2, outs of 4, the stride of 8.
__attribute__((export_name("multiply")))
void multiply(const float *x, const float *w, float *y, int rows, int outs, int stride) {
  for (int out = 0; out < outs; out += OUTS) {
    for (int row = 0; row < rows; row += ROWS) {
      v128_t sums[ROWS][OUTS];
      for (int r = 0; r < ROWS; r++) for (int o = 0; o < OUTS; o++) sums[r][o] = wasm_f32x4_const_splat(0);
      for (int i = 0; i < stride; i += 4) {
        for (int o = 0; o < OUTS; o++) {
          v128_t of_w = wasm_v128_load(w + (out + o) * stride + i);
          for (int r = 0; r < ROWS; r++) {
            sums[r][o] = ADD_PRODUCT(sums[r][o], wasm_v128_load(x + (row + r) * stride + i), of_w);
          }
        }
      }
      for (int r = 0; r < ROWS; r++) wasm_v128_store(y + (row + r) * outs + out, summed(sums[r]));
    }
  }
}
