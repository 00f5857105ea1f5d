// The choice of the kernel for matrix products.

import { plain } from "./numbers.js";
import { simdKernel } from "./simd.js";
import { gpuKernel } from "./webgpu.js";

const TOLERANCE = 1e-3; // of sums of numbers around 1
const FASTER = 2; // times as fast as the others a graphics card must be, because it has other work too

/**
 * The fastest kernel that this browser has, for products of the given shape; or one by its name, "gpu", "simd" or
 * "plain", or the next that there is.
 *
 * A graphics card is used if a product of this shape is right there, and faster.
 */
export async function bestKernel(name, shape) {
  const other = (name !== "plain" && simdKernel()) || plain;
  if (name === "plain" || name === "simd") return other;
  try {
    const gpu = await gpuKernel(other);
    return gpu && (name === "gpu" || (await isBetter(gpu, other, shape))) ? gpu : other;
  } catch {
    return other; // a graphics card that begins and fails
  }
}

/** Whether a kernel computes a product (rows, inner) (outs, inner)^T as another one does, in less time. */
export async function isBetter(kernel, other, { rows, outs, inner }) {
  const wave = (length, step) => Float32Array.from({ length }, (_, place) => Math.sin(step * place));
  const [x, w] = [wave(rows * inner, 0.7), wave(outs * inner, 0.3)];
  const found = [];
  for (const each of [kernel, other]) {
    const matrix = each.keep(outs, inner);
    for (let row = 0; row < outs; row++) {
      matrix.data.set(w.subarray(row * inner, (row + 1) * inner), row * matrix.stride);
    }
    await each.product(x, rows, matrix); // the first one also prepares
    const begun = performance.now();
    const y = await each.product(x, rows, matrix);
    found.push({ y, time: performance.now() - begun });
  }
  const [own, expected] = found;
  const isRight = own.y.every((value, place) => Math.abs(value - expected.y[place]) < TOLERANCE * Math.sqrt(inner));
  return isRight && FASTER * own.time < expected.time;
}
