// The kernel for matrix products in WebAssembly, four numbers at a time; its program is multiply.c.
//
// Everything lies in one memory: weights for good, then, for each product, x, perhaps w, and y. Rows are padded with
// zeros to whole vectors, so that the loops have no rest.

const PAGE = 1 << 16; // bytes by which a memory grows
const MOST_PAGES = 1 << 15; // 2 GiB
const LANES = 8; // numbers that a row is padded to: two vectors
const [ROWS, OUTS] = [2, 4]; // of x and of w that are multiplied at once

const up = (count, by) => Math.ceil(count / by) * by;

/** The kernel of the first of some programs (base64) whose instructions a browser has; null if it has none. */
export function simdKernel(programs) {
  for (const program of programs) {
    try {
      return new SimdKernel(Uint8Array.from(atob(program), (letter) => letter.charCodeAt(0)));
    } catch {
      // not these instructions, or no WebAssembly in this page
    }
  }
  return null;
}

class SimdKernel {
  constructor(program) {
    this.name = "WebAssembly SIMD";
    this.memory = new WebAssembly.Memory({ initial: 1, maximum: MOST_PAGES });
    const env = { memory: this.memory };
    this.multiply = new WebAssembly.Instance(new WebAssembly.Module(program), { env }).exports.multiply;
    this.used = 0; // bytes of weights
  }

  /** As in numbers.js: where a memory that grows is copied, it is so once, while it is small. */
  expect(shapes) {
    this.reserve(shapes.reduce((bytes, [outs, inner]) => bytes + bytesOf(outs, inner), this.used));
  }

  /** As in numbers.js. `data` is valid until the next call. */
  keep(outs, inner) {
    const [stride, address] = [up(inner, LANES), this.used];
    this.used += bytesOf(outs, inner);
    this.reserve(this.used);
    return { data: new Float32Array(this.memory.buffer, address, outs * stride), address, outs, inner, stride };
  }

  /** As in numbers.js. */
  product(x, rows, matrix) {
    const { outs, inner } = matrix;
    const [stride, wide] = [up(inner, LANES), up(outs, OUTS)];
    const xAt = this.used;
    const wAt = xAt + 4 * stride * up(rows, ROWS);
    const yAt = matrix.address === undefined ? wAt + 4 * stride * wide : wAt;
    this.reserve(yAt + 4 * wide * up(rows, ROWS));
    const all = new Float32Array(this.memory.buffer);
    place(all, xAt / 4, x, inner, stride);
    if (matrix.address === undefined) place(all, wAt / 4, matrix.data, inner, stride);
    this.multiply(xAt, matrix.address ?? wAt, yAt, up(rows, ROWS), wide, stride);
    const y = new Float32Array(rows * outs);
    for (let row = 0; row < rows; row++) {
      y.set(all.subarray(yAt / 4 + row * wide, yAt / 4 + row * wide + outs), row * outs);
    }
    return y;
  }

  reserve(bytes) {
    const missing = bytes - this.memory.buffer.byteLength;
    if (missing > 0) this.memory.grow(Math.ceil(missing / PAGE));
  }
}

/** The bytes of a matrix with its padding. */
function bytesOf(outs, inner) {
  return 4 * up(inner, LANES) * up(outs, OUTS);
}

/** Copy rows of `inner` numbers to rows of `stride`, with zeros behind. */
function place(all, at, x, inner, stride) {
  if (inner === stride) {
    all.set(x, at);
    return;
  }
  for (let from = 0; from < x.length; from += inner, at += stride) {
    all.set(x.subarray(from, from + inner), at);
    all.fill(0, at + inner, at + stride);
  }
}
