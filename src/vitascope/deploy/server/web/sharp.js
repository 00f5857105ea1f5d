// The picture in its own pixels: the model's are few.

import { make } from "./draw.js";
import { tiledBox } from "./framing.js";

const LONGEST = 1200;
const MOST_OBLONG = 3; // as in preprocess.py
const TOLERANCE = 12; // of 255: two ways of resizing differ by less in the mean

/** The model's own pixels (C, H, W) as a canvas. */
export function asCanvas({ shape: [C, H, W], data }) {
  const image = new ImageData(W, H);
  for (let pixel = 0; pixel < H * W; pixel++) {
    for (let c = 0; c < 3; c++) image.data[4 * pixel + c] = data[(C === 3 ? c : 0) * H * W + pixel];
    image.data[4 * pixel + 3] = 255;
  }
  const canvas = make("canvas", { width: W, height: H });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/**
 * All of the picture in its own sharpness, with its padding: {canvas, box}, `box` is the part that the model sees.
 *
 * Null if that would not show the model's pixels: the picture has fewer, or the browser cannot read the file, or
 * reads it differently. Of a long strip, only the model's part is shown.
 */
export async function photograph(picture, seen, framing) {
  let bitmap;
  try {
    const orientation = framing.exif_orientation ? "from-image" : "none";
    bitmap = await createImageBitmap(picture, { imageOrientation: orientation });
  } catch {
    return null; // a format that Pillow reads and browsers do not
  }
  try {
    return drawn(bitmap, seen, framing);
  } finally {
    bitmap.close(); // 200 MB for the photograph of a telephone
  }
}

/** The same of an opened picture. */
function drawn(bitmap, seen, framing) {
  const [C, H, W] = seen.shape;
  const box = tiledBox(bitmap.width, bitmap.height, H, W, framing);
  if (Math.max(box.width / W, box.height / H) <= 1) return null;
  const { shown, size } = extent(bitmap, box, H, W);
  const canvas = make("canvas", size);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const [red, green = red, blue = red] = framing.border;
  context.fillStyle = `rgb(${red} ${green} ${blue})`;
  context.fillRect(0, 0, canvas.width, canvas.height);
  const [across, down] = [canvas.width / shown.width, canvas.height / shown.height];
  const place = [-shown.left * across, -shown.top * down, bitmap.width * across, bitmap.height * down];
  context.fillStyle = "white"; // decoding.py lays transparency over white too
  context.fillRect(...place);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, ...place);
  if (C === 1) toGrey(context);
  const part = {
    x: (box.left - shown.left) * across,
    y: (box.top - shown.top) * down,
    width: box.width * across,
    height: box.height * down,
  };
  return difference(canvas, part, seen) < TOLERANCE ? { canvas, box: part } : null;
}

/** The model's own pixels in place of the photograph. */
export function onlySeen(canvas) {
  return { canvas, box: { x: 0, y: 0, width: canvas.width, height: canvas.height } };
}

/** What is shown of a picture, in its pixels, and the size to show it with. */
function extent(bitmap, box, H, W) {
  const [left, top] = [Math.min(0, box.left), Math.min(0, box.top)];
  const whole = {
    left,
    top,
    width: Math.max(bitmap.width, box.left + box.width) - left,
    height: Math.max(bitmap.height, box.top + box.height) - top,
  };
  const isStrip = Math.max(whole.width, whole.height) > MOST_OBLONG * Math.min(whole.width, whole.height);
  const shown = isStrip ? box : whole;
  // A strip may be squashed: its part is shown in the model's proportions.
  const own = isStrip ? [W, H].map((side) => side * Math.max(box.width / W, box.height / H)) : [whole.width, whole.height];
  const zoom = Math.min(1, LONGEST / Math.max(...own));
  const [width, height] = own.map((side) => Math.max(1, Math.round(side * zoom)));
  return { shown, size: { width, height } };
}

function toGrey(context) {
  const image = context.getImageData(0, 0, context.canvas.width, context.canvas.height);
  for (let at = 0; at < image.data.length; at += 4) {
    const [red, green, blue] = image.data.subarray(at, at + 3);
    image.data.fill(0.299 * red + 0.587 * green + 0.114 * blue, at, at + 3);
  }
  context.putImageData(image, 0, 0);
}

/** The mean difference between a part of a canvas, reduced to their size, and the model's pixels. */
function difference(canvas, part, { shape: [C, H, W], data }) {
  const small = make("canvas", { width: W, height: H }).getContext("2d", { willReadFrequently: true });
  small.imageSmoothingQuality = "high";
  small.drawImage(canvas, part.x, part.y, part.width, part.height, 0, 0, W, H);
  const found = small.getImageData(0, 0, W, H).data;
  let sum = 0;
  for (let c = 0; c < C; c++) {
    for (let pixel = 0; pixel < H * W; pixel++) {
      sum += Math.abs(found[4 * pixel + c] - data[c * H * W + pixel]);
    }
  }
  return sum / (C * H * W);
}
