// The weights of a model: the bytes of a safetensors file as base64, piece by piece, to numbers.

import { header, numbersOf } from "./pack.js";

const SCALES = ".scales"; // after the name of a matrix of int8

/**
 * Tensors by name, from the pieces of a safetensors file: float32, but the matrices (outs, inner) called `NAME.weight`
 * perhaps float16, or int8 with a float32 for each row in `NAME.weight.scales`, which comes before.
 *
 * Matrices lie where the kernel reads them. Beside them, only a piece and a tensor are in memory, never the file.
 */
export class Weights {
  constructor(kernel) {
    this.kernel = kernel;
    this.tensors = new Map();
    this.coming = null; // [name, {dtype, shape, data_offsets}] of what is not complete, in the order of the file
    this.bytes = null; // of the first of these
    this.filled = 0; // of them
  }

  /** The next piece; it has whole bytes, and the first one the whole header. */
  add(base64) {
    const piece = decoded(base64);
    let at = this.coming ? 0 : this.begin(piece.buffer);
    while (at < piece.length) {
      const [begin, end] = this.coming[0][1].data_offsets;
      this.bytes ??= new Uint8Array(end - begin);
      const part = piece.subarray(at, at + this.bytes.length - this.filled);
      this.bytes.set(part, this.filled);
      at += part.length;
      this.filled += part.length;
      if (this.filled === this.bytes.length) this.complete(...this.coming.shift());
    }
  }

  /** Read the header; the number of its bytes. */
  begin(buffer) {
    const { entries, length } = header(buffer);
    delete entries.__metadata__;
    this.coming = Object.entries(entries).sort(([, a], [, b]) => a.data_offsets[0] - b.data_offsets[0]);
    this.kernel.expect(this.coming.filter(isMatrix).map(([, { shape }]) => shape));
    return 8 + length;
  }

  complete(name, entry) {
    const data = numbersOf(entry.dtype, this.bytes.buffer);
    [this.bytes, this.filled] = [null, 0];
    this.tensors.set(name, isMatrix([name, entry]) ? this.placed(name, entry.shape, data) : data);
  }

  /** A matrix where the kernel reads it. */
  placed(name, [outs, inner], data) {
    const matrix = this.kernel.keep(outs, inner);
    const read = data instanceof Uint16Array ? (bits) => HALVES[bits] : Number;
    const scales = this.tensors.get(name + SCALES);
    for (let row = 0; row < outs; row++) {
      const factor = scales ? scales[row] : 1;
      for (let i = 0; i < inner; i++) matrix.data[row * matrix.stride + i] = factor * read(data[row * inner + i]);
    }
    return matrix;
  }

  has(name) {
    return this.tensors.has(name);
  }

  /** A vector or table as a Float32Array; a matrix as its kernel keeps it: {data, outs, inner, stride}. */
  get(name) {
    return this.tensors.get(name);
  }
}

function isMatrix([name, { shape }]) {
  return shape.length === 2 && name.endsWith(".weight");
}

function decoded(base64) {
  const letters = atob(base64);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/** The numbers that the 16 bits of a float16 stand for. */
const HALVES = new Float32Array(1 << 16).map((_, bits) => {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return exponent === 31 ? NaN : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
});
