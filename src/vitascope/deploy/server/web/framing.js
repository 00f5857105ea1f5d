// The part of a picture that becomes the model's input, as `Preprocess` in Python computes it.

/** `Preprocess.box`: the part of a picture that the model sees, in its pixels. */
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

/** The same where patches tile only the first H rows and W columns of the model's input. */
export function tiledBox(width, height, H, W, framing) {
  const [rows, columns] = framing.image_size;
  const whole = seenBox(width, height, rows, columns, framing);
  return { ...whole, width: (whole.width * W) / columns, height: (whole.height * H) / rows };
}

/** `Preprocess.resized_hw`: a picture's height and width after the resize to whole pixels. */
export function resizedSides(width, height, { resize, resize_to: [rows, columns], side_rounding }) {
  if (resize === "squash") return [rows, columns];
  if (side_rounding === "nearest") {
    const ratio = Math[resize === "border" ? "max" : "min"](height / rows, width / columns);
    return [height, width].map((side) => Math.max(1, toEven(side / ratio)));
  }
  const isTall = height * columns > width * rows;
  if (isTall !== (resize === "border")) return [Math.max(1, Math.floor((height * columns) / width)), columns];
  return [rows, Math.max(1, Math.floor((width * rows) / height))];
}

/** `Preprocess.crop_offset` along one side, which has `spare` pixels more than the model's input. */
export function cropOffset(spare, { crop_rounding }) {
  if (crop_rounding === "down") return Math.floor(spare / 2);
  return spare >= 0 ? toEven(spare / 2) : -Math.floor(-spare / 2);
}

/** `seenBox` by the rule of whole pixels; it may reach beyond the picture, into a border. */
function wholeBox(width, height, H, W, framing) {
  const [rows, columns] = resizedSides(width, height, framing);
  const [down, across] = [height / rows, width / columns];
  return {
    left: cropOffset(columns - W, framing) * across,
    top: cropOffset(rows - H, framing) * down,
    width: W * across,
    height: H * down,
  };
}

/** Python's `round`: a half to the even number. */
function toEven(value) {
  const down = Math.floor(value);
  return value - down === 0.5 ? down + (down % 2) : Math.round(value);
}
