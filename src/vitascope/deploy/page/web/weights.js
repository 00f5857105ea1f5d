// The weights of a model: base64, piece by piece, to the bytes of a safetensors file, and these to numbers.

import { tensorsOf } from "./pack.js";

const SCALES = ".scales"; // after the name of a matrix of int8

/** Joins pieces of base64 into one buffer; a piece has whole bytes. */
export class Pieces {
  constructor(size) {
    this.bytes = new Uint8Array(size);
    this.filled = 0;
  }

  add(base64) {
    const part = atob(base64);
    for (let i = 0; i < part.length; i++) this.bytes[this.filled + i] = part.charCodeAt(i);
    this.filled += part.length;
  }
}

/**
 * Tensors by name, from the bytes of a safetensors file: float32, but the matrices (outs, inner) called `NAME.weight`
 * perhaps float16, or int8 with a float32 for each row in `NAME.weight.scales`.
 *
 * Matrices lie where the kernel reads them. The buffer is not kept.
 */
export class Weights {
  constructor(buffer, kernel) {
    this.tensors = new Map();
    const found = tensorsOf(buffer);
    for (const [name, { shape, data }] of Object.entries(found)) {
      if (name.endsWith(SCALES)) continue;
      if (shape.length !== 2 || !name.endsWith(".weight")) {
        this.tensors.set(name, data.slice());
        continue;
      }
      const [outs, inner] = shape;
      const matrix = kernel.keep(outs, inner);
      const read = data instanceof Uint16Array ? fromHalf : Number;
      const scales = found[name + SCALES]?.data;
      for (let row = 0; row < outs; row++) {
        const factor = scales ? scales[row] : 1;
        for (let i = 0; i < inner; i++) matrix.data[row * matrix.stride + i] = factor * read(data[row * inner + i]);
      }
      this.tensors.set(name, matrix);
    }
  }

  has(name) {
    return this.tensors.has(name);
  }

  /** A vector or table as a Float32Array. */
  vector(name) {
    return this.tensors.get(name);
  }

  /** A matrix as its kernel keeps it: {data, outs, inner, stride}. */
  matrix(name) {
    return this.tensors.get(name);
  }
}

const HALVES = new Float32Array(1 << 16).map((_, bits) => {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return exponent === 31 ? NaN : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
});

/** The number that the 16 bits of a float16 stand for. */
function fromHalf(bits) {
  return HALVES[bits];
}
