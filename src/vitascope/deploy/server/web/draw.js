// Drawing: a picture under its map, and the scale of the map.

import { heatImage, RAMP } from "./colours.js";

const scratch = document.createElement("canvas");

/** Fit a canvas's pixels to its size on the screen; returns the sizes in pixels and the factor. */
export function fitted(canvas) {
  const zoom = window.devicePixelRatio || 1;
  const box = canvas.getBoundingClientRect();
  const [width, height] = [Math.round(box.width * zoom), Math.round(box.height * zoom)];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  return { width, height, zoom };
}

/** Draw a picture over a box; small ones keep their pixels. */
export function drawPicture(context, picture, { x, y, width, height }) {
  context.imageSmoothingEnabled = width < 6 * picture.width;
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, x, y, width, height);
}

/** Draw a map {cells, most} over a box, cell by cell or smoothly. */
export function drawHeat(context, map, grid, { x, y, width, height }, { strength, smooth }) {
  scratch.width = grid[1];
  scratch.height = grid[0];
  scratch.getContext("2d").putImageData(heatImage(map.cells, grid, map.most, strength), 0, 0);
  context.imageSmoothingEnabled = smooth;
  context.imageSmoothingQuality = "high";
  context.drawImage(scratch, x, y, width, height);
}

/** Frame a patch: light within dark, visible on any colour. */
export function outline(context, grid, patch, { x, y, width, height }, zoom, dashed = false) {
  const [cell, line] = [{ width: width / grid[1], height: height / grid[0] }, 2 * zoom];
  const left = x + (patch % grid[1]) * cell.width;
  const top = y + Math.floor(patch / grid[1]) * cell.height;
  context.save();
  context.setLineDash([]);
  for (const [colour, inset] of [["rgb(0 0 0 / .75)", 0], ["white", line / 2]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    if (dashed && colour === "white") context.setLineDash([4 * zoom, 4 * zoom]);
    const [w, h] = [Math.max(1, cell.width - 2 * inset), Math.max(1, cell.height - 2 * inset)];
    context.strokeRect(left + inset, top + inset, w, h);
  }
  context.restore();
}

/** Draw the colours of the scale, from left to right. */
export function drawRamp(canvas) {
  const image = new ImageData(256, 1);
  for (let step = 0; step < 256; step++) {
    image.data.set(RAMP.subarray(3 * step, 3 * step + 3), 4 * step);
    image.data[4 * step + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}
