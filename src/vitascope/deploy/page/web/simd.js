// The kernel for matrix products in WebAssembly, four numbers at a time. Its few instructions are assembled here.
//
// Everything lies in one memory: weights for good, then, for each product, x, perhaps w, and y. Rows are padded with
// zeros to whole vectors, so that the loops have no rest.

const PAGE = 1 << 16; // bytes by which a memory grows
const MOST_PAGES = 1 << 15; // 2 GiB
const LANES = 8; // numbers that a row is padded to: two vectors
const [ROWS, OUTS] = [2, 4]; // of x and of w that are multiplied at once

const up = (count, by) => Math.ceil(count / by) * by;

/** The kernel; null where a browser has no such instructions. */
export function simdKernel() {
  if (typeof WebAssembly === "undefined") return null;
  for (const fused of [true, false]) {
    try {
      return new SimdKernel(fused);
    } catch {
      // not these instructions, or no WebAssembly in this page: the next kernel
    }
  }
  return null;
}

class SimdKernel {
  constructor(fused) {
    this.name = "WebAssembly SIMD";
    this.memory = new WebAssembly.Memory({ initial: 1, maximum: MOST_PAGES });
    const compiled = new WebAssembly.Module(assembled(fused));
    this.multiply = new WebAssembly.Instance(compiled, { page: { memory: this.memory } }).exports.multiply;
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
    this.multiply(xAt, matrix.address ?? wAt, yAt, up(rows, ROWS), wide, 4 * stride);
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

// The instructions: https://webassembly.github.io/spec/core/appendix/index-instructions.html

const I32 = 0x7f;
const VECTOR = 0x7b;

/** A number in LEB128, without a sign. */
function leb(value) {
  return value < 0x80 ? [value] : [(value & 0x7f) | 0x80, ...leb(value >>> 7)];
}

const text = (word) => [...leb(word.length), ...new TextEncoder().encode(word)];
const list = (items) => [...leb(items.length), ...items.flat()];
const section = (id, content) => [id, ...leb(content.length), ...content];
const get = (local) => [0x20, local];
const set = (local) => [0x21, local];
const int = (value) => [0x41, value]; // 0 to 63
const [add, multiply, less, end] = [[0x6a], [0x6c], [0x49], [0x0b]];
const vector = (code, ...more) => [0xfd, ...leb(code), ...more];
const load = (offset) => vector(0x00, 4, offset);
const store = vector(0x0b, 4, 0);
const zero = vector(0x0c, ...new Array(16).fill(0));
const [vectorAdd, vectorMultiply, multiplyAdd] = [vector(0xe4), vector(0xe6), vector(0x105)];
const lanes = (...chosen) => vector(0x0d, ...chosen.flatMap((lane) => [0, 1, 2, 3].map((byte) => 4 * lane + byte)));
const increase = (local, ...by) => [...get(local), ...by.flat(), ...add, ...set(local)];
/** Repeat while a local is less than another one. */
const loop = (body, local, limit) => [
  ...[0x03, 0x40, ...body.flat()],
  ...[...get(local), ...get(limit), ...less, 0x0d, 0, ...end],
];

/**
 * The module: `multiply(x, w, y, rows, outs, stride)` writes x w^T to y. Addresses and the stride of rows count bytes;
 * rows are a multiple of 2, outs of 4, the stride of 32, and y has no padding.
 */
function assembled(fused) {
  const [x, w, y, rows, outs, stride] = [0, 1, 2, 3, 4, 5];
  const [row, out, xEnd, to] = [6, 7, 8, 9];
  const xs = [10, 11]; // the addresses of the two rows of x
  const ws = [12, 13, 14, 15]; // and of the four rows of w
  const integers = 10; // locals, from `row` on
  const held = [16, 17, 18]; // vectors: the two of x, one of w
  const sums = Array.from({ length: ROWS * OUTS }, (_, place) => 19 + place);
  const addressOf = (base, number, more) => [
    ...[...get(base), ...get(number), ...int(more), ...add],
    ...[...get(stride), ...multiply, ...add],
  ];

  const multiplied = (sum, left, right) =>
    fused
      ? [...get(left), ...get(right), ...get(sum), ...multiplyAdd, ...set(sum)]
      : [...get(sum), ...get(left), ...get(right), ...vectorMultiply, ...vectorAdd, ...set(sum)];
  const eightBytes = (offset) => [
    ...xs.flatMap((address, place) => [...get(address), ...load(offset), ...set(held[place])]),
    ...ws.flatMap((address, place) => [
      ...[...get(address), ...load(offset), ...set(held[2])],
      ...multiplied(sums[place], held[0], held[2]),
      ...multiplied(sums[OUTS + place], held[1], held[2]),
    ]),
  ];
  /** The sums of two vectors' numbers, two of each still apart: [a0 + a2, b0 + b2, a1 + a3, b1 + b3]. */
  const halves = (a, b) => [
    ...[...get(a), ...get(b), ...lanes(0, 4, 1, 5)],
    ...[...get(a), ...get(b), ...lanes(2, 6, 3, 7)],
    ...vectorAdd,
  ];
  /** Four vectors to the vector of their four sums. */
  const summed = ([a, b, c, d]) => [
    ...[...halves(a, b), ...set(held[0]), ...halves(c, d), ...set(held[1])],
    ...[...get(held[0]), ...get(held[1]), ...lanes(0, 1, 4, 5)],
    ...[...get(held[0]), ...get(held[1]), ...lanes(2, 3, 6, 7)],
    ...vectorAdd,
  ];
  const tile = [
    ...sums.flatMap((sum) => [...zero, ...set(sum)]),
    ...xs.flatMap((address, place) => [...addressOf(x, row, place), ...set(address)]),
    ...ws.flatMap((address, place) => [...addressOf(w, out, place), ...set(address)]),
    ...[...get(xs[0]), ...get(stride), ...add, ...set(xEnd)],
    ...loop(
      [eightBytes(0), eightBytes(16), ...[...xs, ...ws].map((address) => increase(address, int(32)))],
      xs[0],
      xEnd,
    ),
    // to = y + (row outs + out) 4
    ...[...get(row), ...get(outs), ...multiply, ...get(out), ...add],
    ...[...int(4), ...multiply, ...get(y), ...add, ...set(to)],
    ...[...get(to), ...summed(sums.slice(0, OUTS)), ...store],
    ...[...get(to), ...get(outs), ...int(4), ...multiply, ...add, ...summed(sums.slice(OUTS)), ...store],
    ...increase(row, int(ROWS)),
  ];
  const body = [
    ...loop([int(0), set(row), loop([tile], row, rows), increase(out, int(OUTS))], out, outs),
    ...end,
  ];
  const code = [...list([[...leb(integers), I32], [...leb(held.length + sums.length), VECTOR]]), ...body];
  return new Uint8Array([
    ...[0x00, 0x61, 0x73, 0x6d, 1, 0, 0, 0],
    ...section(1, list([[0x60, ...list(new Array(6).fill([I32])), ...list([])]])),
    ...section(2, list([[...text("page"), ...text("memory"), 2, 1, ...leb(1), ...leb(MOST_PAGES)]])),
    ...section(3, list([[0]])),
    ...section(7, list([[...text("multiply"), 0, 0]])),
    ...section(10, list([[...leb(code.length), ...code]])),
  ]);
}
