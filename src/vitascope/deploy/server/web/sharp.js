// The same crop in more pixels: the model's own are few.

const LONGEST = 1200;
const TOLERANCE = 12; // of 255: two ways of resizing differ by less in the mean

/** The model's own pixels (C, H, W) as a canvas. */
export function asCanvas({ shape: [C, H, W], data }) {
  const image = new ImageData(W, H);
  for (let pixel = 0; pixel < H * W; pixel++) {
    for (let c = 0; c < 3; c++) image.data[4 * pixel + c] = data[(C === 3 ? c : 0) * H * W + pixel];
    image.data[4 * pixel + 3] = 255;
  }
  const canvas = newCanvas(W, H);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/**
 * The part of the picture that the model sees, in the picture's own sharpness.
 *
 * Null if that would not show the model's pixels: the browser cannot read the file, or reads it
 * differently.
 */
export async function sharpCrop(picture, seen, framing) {
  const [C, H, W] = seen.shape;
  let bitmap;
  try {
    const orientation = framing.exif_orientation ? "from-image" : "none";
    bitmap = await createImageBitmap(picture, { imageOrientation: orientation });
  } catch {
    return null; // a format that Pillow reads and browsers do not
  }
  const box = seenBox(bitmap.width, bitmap.height, H, W, framing);
  const zoom = Math.min(Math.max(box.width / W, box.height / H), LONGEST / Math.max(H, W));
  if (zoom <= 1) return null;
  const canvas = newCanvas(Math.round(W * zoom), Math.round(H * zoom));
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const [red, green = red, blue = red] = framing.border;
  context.fillStyle = `rgb(${red} ${green} ${blue})`;
  context.fillRect(0, 0, canvas.width, canvas.height);
  const [x, y] = [-box.left * (canvas.width / box.width), -box.top * (canvas.height / box.height)];
  context.fillStyle = "white"; // decoding.py lays transparency over white too
  context.fillRect(x, y, bitmap.width * (canvas.width / box.width), bitmap.height * (canvas.height / box.height));
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, box.left, box.top, box.width, box.height, 0, 0, canvas.width, canvas.height);
  if (C === 1) toGrey(context);
  return difference(canvas, seen) < TOLERANCE ? canvas : null;
}

/** `Preprocess.fit`'s part of a picture, in its pixels. */
export function seenBox(width, height, H, W, framing) {
  const { resize, crop_pct: share } = framing;
  if (framing.resize_to) return wholeBox(width, height, H, W, framing);
  if (resize === "squash") {
    const [left, top] = [(width * (1 - share)) / 2, (height * (1 - share)) / 2];
    return { left, top, width: width - 2 * left, height: height - 2 * top };
  }
  const scale = Math.max(W / width, H / height) / share;
  const [seenWidth, seenHeight] = [Math.min(width, W / scale), Math.min(height, H / scale)];
  return {
    left: (width - seenWidth) / 2,
    top: (height - seenHeight) / 2,
    width: seenWidth,
    height: seenHeight,
  };
}

/** The same by the rule of whole pixels; it may reach beyond the picture, into a border. */
function wholeBox(width, height, H, W, { resize, resize_to, side_rounding, crop_rounding }) {
  let [rows, columns] = resize_to;
  const round = side_rounding === "down" ? Math.floor : Math.round;
  const isTall = height * columns > width * rows;
  if (resize !== "squash" && isTall !== (resize === "border")) {
    rows = Math.max(1, round((height * columns) / width));
  } else if (resize !== "squash") {
    columns = Math.max(1, round((width * rows) / height));
  }
  const offset = (spare) => {
    if (crop_rounding === "down") return Math.floor(spare / 2);
    return spare > 0 && spare % 2 ? 2 * Math.round(spare / 4) : Math.ceil(spare / 2);
  };
  const [down, across] = [height / rows, width / columns];
  return {
    left: offset(columns - W) * across,
    top: offset(rows - H) * down,
    width: W * across,
    height: H * down,
  };
}

function toGrey(context) {
  const image = context.getImageData(0, 0, context.canvas.width, context.canvas.height);
  for (let at = 0; at < image.data.length; at += 4) {
    const [red, green, blue] = image.data.subarray(at, at + 3);
    image.data.fill(0.299 * red + 0.587 * green + 0.114 * blue, at, at + 3);
  }
  context.putImageData(image, 0, 0);
}

/** The mean difference between a canvas, reduced to their size, and the model's pixels. */
function difference(canvas, { shape: [C, H, W], data }) {
  const small = newCanvas(W, H).getContext("2d", { willReadFrequently: true });
  small.imageSmoothingQuality = "high";
  small.drawImage(canvas, 0, 0, W, H);
  const found = small.getImageData(0, 0, W, H).data;
  let sum = 0;
  for (let c = 0; c < C; c++) {
    for (let pixel = 0; pixel < H * W; pixel++) {
      sum += Math.abs(found[4 * pixel + c] - data[c * H * W + pixel]);
    }
  }
  return sum / (C * H * W);
}

function newCanvas(width, height) {
  return Object.assign(document.createElement("canvas"), { width, height });
}
