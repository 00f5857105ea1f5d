// From a picture's file to the model's pixels, as `Preprocess` in Python does it: decoded, white under
// transparency, grey for a model of one channel, resized by Pillow's filters, and cropped.

import { cropOffset, resizedSides, seenBox } from "./framing.js";

const STRIP = 1 << 22; // pixels that are read from the browser at a time
const MOST_RESIZED = 1 << 26; // as in preprocess.py
const BITS = 22; // of Pillow's weights, which are whole numbers
const PNG = [0x89, 0x50, 0x4e, 0x47];

/** The pixels of a picture's file for a model: Uint8Array (C, H, W) of the model's own H and W. */
export async function pixelsOf(picture, framing) {
  await checkBits(picture, framing);
  const bitmap = await decoded(picture, framing);
  try {
    return fit({ width: bitmap.width, height: bitmap.height, rows: rowsOf(bitmap) }, framing);
  } finally {
    bitmap.close();
  }
}

async function decoded(picture, { exif_orientation: upright }) {
  try {
    return await createImageBitmap(picture, {
      imageOrientation: upright ? "from-image" : "none",
      colorSpaceConversion: "none",
      premultiplyAlpha: "none",
    });
  } catch {
    throw new Error("not a picture that this browser can read, or one that is too large for it");
  }
}

/** A browser reads 8 bits per value, so where the model has levels for more it would be wrong. */
async function checkBits(picture, { levels }) {
  if (!levels) return;
  const start = new Uint8Array(await picture.slice(0, 26).arrayBuffer());
  if (PNG.every((byte, place) => start[place] === byte) && start[24] === 16) {
    throw new Error("a picture of 16 bits, which a browser reduces to 8; use `vitascope predict`");
  }
}

/** A function from a first row and a number of rows to their RGBA, over white. */
function rowsOf(bitmap) {
  const count = Math.max(1, Math.min(bitmap.height, Math.floor(STRIP / bitmap.width)));
  const canvas = newCanvas(bitmap.width, count);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  return (first, number) => {
    context.fillStyle = "white";
    context.fillRect(0, 0, bitmap.width, number);
    context.drawImage(bitmap, 0, first, bitmap.width, number, 0, 0, bitmap.width, number);
    return context.getImageData(0, 0, bitmap.width, number).data;
  };
}

function newCanvas(width, height) {
  if (typeof OffscreenCanvas !== "undefined") return new OffscreenCanvas(width, height);
  return Object.assign(document.createElement("canvas"), { width, height });
}

/** `Preprocess.fit`: {width, height, rows} to Uint8Array (C, H, W). */
export function fit(source, framing) {
  const { image_size: [H, W], channels: C, interpolation, resize_to, border } = framing;
  const { width, height } = source;
  if (!resize_to) return resampled(source, seenBox(width, height, H, W, framing), [H, W], C, interpolation);
  const [rows, columns] = resizedSides(width, height, framing);
  if (rows * columns > MOST_RESIZED) {
    throw new Error(`${height}x${width} pixels would be resized to ${rows}x${columns}, which is too large`);
  }
  const whole = resampled(source, { left: 0, top: 0, width, height }, [rows, columns], C, interpolation);
  const [top, left] = [cropOffset(rows - H, framing), cropOffset(columns - W, framing)];
  const pixels = new Uint8Array(C * H * W);
  for (let c = 0; c < C; c++) {
    for (let y = 0; y < H; y++) {
      for (let x = 0; x < W; x++) {
        const [row, column] = [y + top, x + left];
        const inside = row >= 0 && row < rows && column >= 0 && column < columns;
        pixels[(c * H + y) * W + x] = inside ? whole[(c * rows + row) * columns + column] : border[c];
      }
    }
  }
  return pixels;
}

/** Pillow's `resize` of a box, in whole numbers as there: across first, then down; Uint8Array (C, H, W). */
function resampled(source, box, [H, W], C, interpolation) {
  const across = weightsOf(source.width, box.left, box.left + box.width, W, interpolation);
  const down = weightsOf(source.height, box.top, box.top + box.height, H, interpolation);
  const [top, last] = [down[0].first, down[H - 1]];
  const bottom = last.first + last.weights.length;
  const narrow = new Uint8Array(C * (bottom - top) * W); // the rows that matter, as wide as the result
  const strip = Math.max(1, Math.floor(STRIP / source.width));
  for (let start = top; start < bottom; start += strip) {
    const number = Math.min(strip, bottom - start);
    const data = coloured(source.rows(start, number), C);
    for (let y = 0; y < number; y++) {
      const row = y * source.width * 4;
      for (let x = 0; x < W; x++) {
        const { first, weights } = across[x];
        for (let c = 0; c < C; c++) {
          let sum = 0;
          for (let i = 0; i < weights.length; i++) sum += weights[i] * data[row + 4 * (first + i) + c];
          narrow[(c * (bottom - top) + start - top + y) * W + x] = eightBits(sum);
        }
      }
    }
  }
  const pixels = new Uint8Array(C * H * W);
  for (let c = 0; c < C; c++) {
    for (let y = 0; y < H; y++) {
      const { first, weights } = down[y];
      for (let x = 0; x < W; x++) {
        let sum = 0;
        for (let i = 0; i < weights.length; i++) {
          sum += weights[i] * narrow[(c * (bottom - top) + first - top + i) * W + x];
        }
        pixels[(c * H + y) * W + x] = eightBits(sum);
      }
    }
  }
  return pixels;
}

/** RGBA with, for one channel, the luma in the first byte (ITU-R 601, in Pillow's whole numbers). */
function coloured(data, C) {
  if (C === 1) {
    for (let at = 0; at < data.length; at += 4) {
      data[at] = (data[at] * 19595 + data[at + 1] * 38470 + data[at + 2] * 7471 + 0x8000) >> 16;
    }
  }
  return data;
}

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));

/** Pillow's filters: how far they reach, and their value at a distance. */
const FILTERS = {
  bilinear: [1, (x) => 1 - Math.abs(x)],
  bicubic: [
    2,
    (x) => {
      const [a, d] = [-0.5, Math.abs(x)]; // Keys 1981
      return d < 1 ? ((a + 2) * d - (a + 3)) * d * d + 1 : (((d - 5) * d + 8) * d - 4) * a;
    },
  ],
  lanczos: [3, (x) => sinc(x) * sinc(x / 3)],
};

/** For each of `count` pixels between two places along a side: the first pixel there, and the weight of each. */
function weightsOf(size, from, to, count, interpolation) {
  [from, to] = [Math.fround(from), Math.fround(to)]; // Pillow's boxes are float32
  const scale = Math.fround(to - from) / count;
  if (interpolation === "nearest") {
    return Array.from({ length: count }, (_, place) => {
      const first = Math.min(size - 1, Math.floor(from + (place + 0.5) * scale));
      return { first, weights: [1 << BITS] };
    });
  }
  const [reach, filter] = FILTERS[interpolation];
  const widened = Math.max(1, scale); // so that a smaller picture is an average: antialiasing
  return Array.from({ length: count }, (_, place) => {
    const centre = from + (place + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - reach * widened + 0.5));
    const end = Math.min(size, Math.trunc(centre + reach * widened + 0.5));
    const shares = Array.from({ length: end - first }, (__, i) => {
      const x = (first + i - centre + 0.5) / widened;
      return Math.abs(x) < reach ? filter(x) : 0;
    });
    const sum = shares.reduce((total, share) => total + share, 0);
    const weights = shares.map((share) => Math.sign(share) * Math.floor(Math.abs(share / sum) * (1 << BITS) + 0.5));
    return { first, weights };
  });
}

/** A sum of bytes and weights as a byte. */
function eightBits(sum) {
  return Math.min(255, Math.max(0, Math.floor((sum + (1 << (BITS - 1))) / (1 << BITS))));
}
