// From a decoded picture to the model's pixels, as `Preprocess` in Python does it: white under transparency, grey
// for a model of one channel, resized by Pillow's filters, and cropped.

import { cropOffset, resizedSides, seenBox } from "./framing.js";

const STRIP = 1 << 22; // pixels that are read from the browser at a time
const MOST_RESIZED = 1 << 26; // as in preprocess.py
const BITS = 22; // of Pillow's weights, which are whole numbers

/** The pixels of a picture for a model: Uint8Array (C, H, W) of the model's own H and W. Closes `bitmap`. */
export function pixelsOf(bitmap, framing) {
  try {
    return fit({ width: bitmap.width, height: bitmap.height, read: readerOf(bitmap) }, framing);
  } finally {
    bitmap.close();
  }
}

/** A function from a part of a picture to its RGBA, over white. */
function readerOf(bitmap) {
  let canvas = newCanvas(1, 1);
  return (left, top, width, height) => {
    if (canvas.width < width || canvas.height < height) canvas = newCanvas(width, height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.fillStyle = "white";
    context.fillRect(0, 0, width, height);
    context.drawImage(bitmap, left, top, width, height, 0, 0, width, height);
    return context.getImageData(0, 0, width, height).data;
  };
}

function newCanvas(width, height) {
  if (typeof OffscreenCanvas !== "undefined") return new OffscreenCanvas(width, height);
  return Object.assign(document.createElement("canvas"), { width, height });
}

/** `Preprocess.fit`: {width, height, read(left, top, width, height)}, which gives RGBA, to Uint8Array (C, H, W). */
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

/**
 * Pillow's `resize` of a box, in whole numbers as there: Uint8Array (C, H, W). The bytes between the two axes are
 * rounded, so their order matters; since version 13 the height comes first if it shrinks by far more.
 */
function resampled(source, box, [H, W], C, interpolation) {
  const across = weightsOf(source.width, box.left, box.left + box.width, W, interpolation);
  const down = weightsOf(source.height, box.top, box.top + box.height, H, interpolation);
  const [left, right] = extent(across);
  const [top, bottom] = extent(down);
  const [width, height] = [right - left, bottom - top]; // of the pixels that matter
  if (source.height > H && source.height - H > 2 * (source.width - W)) {
    const low = new Uint8Array(C * H * width);
    const strip = Math.max(1, Math.floor(STRIP / height));
    for (let x = 0; x < width; x += strip) {
      const count = Math.min(strip, width - x);
      const planes = planesOf(source.read(left + x, top, count, height), C);
      const columns = alongColumns(planes, C, height, count, down, top); // (C, H, count)
      for (let row = 0; row < C * H; row++) {
        low.set(columns.subarray(row * count, (row + 1) * count), row * width + x);
      }
    }
    return alongRows(low, C * H, width, across, left);
  }
  const narrow = new Uint8Array(C * height * W);
  const strip = Math.max(1, Math.floor(STRIP / width));
  for (let y = 0; y < height; y += strip) {
    const count = Math.min(strip, height - y);
    const planes = planesOf(source.read(left, top + y, width, count), C);
    const rows = alongRows(planes, C * count, width, across, left); // (C, count, W)
    for (let c = 0; c < C; c++) narrow.set(rows.subarray(c * count * W, (c + 1) * count * W), (c * height + y) * W);
  }
  return alongColumns(narrow, C, height, W, down, top);
}

/** The first pixel that any weight is for, and the one after the last. */
function extent(weights) {
  const last = weights.at(-1);
  return [weights[0].first, last.first + last.weights.length];
}

/** RGBA to planes (C, pixels); for one channel the luma (ITU-R 601, in Pillow's whole numbers). */
function planesOf(data, C) {
  const pixels = data.length / 4;
  const planes = new Uint8Array(C * pixels);
  for (let pixel = 0; pixel < pixels; pixel++) {
    const at = 4 * pixel;
    const red = data[at], green = data[at + 1], blue = data[at + 2];
    if (C === 1) {
      planes[pixel] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
    } else {
      planes[pixel] = red;
      planes[pixels + pixel] = green;
      planes[2 * pixels + pixel] = blue;
    }
  }
  return planes;
}

/** Resize each row: (rows, width) -> (rows, places); `start` is the number of the first pixel in a row. */
function alongRows(planes, rows, width, places, start) {
  const found = new Uint8Array(rows * places.length);
  for (let row = 0; row < rows; row++) {
    for (let x = 0; x < places.length; x++) {
      const { first, weights } = places[x];
      const from = row * width + first - start;
      let sum = 0;
      for (let i = 0; i < weights.length; i++) sum += weights[i] * planes[from + i];
      found[row * places.length + x] = eightBits(sum);
    }
  }
  return found;
}

/** Resize each column: (C, height, width) -> (C, places, width). */
function alongColumns(planes, C, height, width, places, start) {
  const found = new Uint8Array(C * places.length * width);
  for (let c = 0; c < C; c++) {
    for (let y = 0; y < places.length; y++) {
      const { first, weights } = places[y];
      for (let x = 0; x < width; x++) {
        const from = (c * height + first - start) * width + x;
        let sum = 0;
        for (let i = 0; i < weights.length; i++) sum += weights[i] * planes[from + i * width];
        found[(c * places.length + y) * width + x] = eightBits(sum);
      }
    }
  }
  return found;
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
