// Drawing: a picture under its map, and the scale of the map.

import { heatImage } from "./colours.js";

const scratch = make("canvas");

/** An element with properties and children. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

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

/**
 * Draw a photograph {canvas, box} over a place: the model's part bright, the rest in dark grey.
 *
 * @param seen the model's own pixels, to be drawn instead of its part; or null.
 */
export function drawPhoto(context, photo, place, seen) {
  drawPicture(context, photo.canvas, place);
  const part = partOf(photo, place);
  if (part.width < place.width - 1 || part.height < place.height - 1) {
    dim(context, place);
    context.fillStyle = "rgb(150 150 150)"; // a line around the part
    context.fillRect(part.x - 1, part.y - 1, part.width + 2, part.height + 2);
    const { x, y, width, height } = photo.box;
    context.drawImage(photo.canvas, x, y, width, height, part.x, part.y, part.width, part.height);
  }
  if (seen) drawPicture(context, seen, part);
}

/** The place of the model's part of a photograph that is drawn over a place. */
export function partOf({ canvas, box }, place) {
  const [across, down] = [place.width / canvas.width, place.height / canvas.height];
  return {
    x: place.x + box.x * across,
    y: place.y + box.y * down,
    width: box.width * across,
    height: box.height * down,
  };
}

function dim(context, { x, y, width, height }) {
  context.save();
  context.globalCompositeOperation = "saturation";
  context.fillStyle = "black"; // has none
  context.fillRect(x, y, width, height);
  context.globalCompositeOperation = "source-over";
  context.fillStyle = "rgb(0 0 0 / .7)";
  context.fillRect(x, y, width, height);
  context.restore();
}

/** Write a note across the middle of a box. */
export function drawNote(context, text, { x, y, width, height }, zoom) {
  if (!text) return;
  context.font = `600 ${14 * zoom}px ${getComputedStyle(document.documentElement).fontFamily}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const wide = Math.min(width, context.measureText(text).width + 20 * zoom);
  const [across, down] = [x + width / 2, y + height / 2];
  context.fillStyle = "rgb(0 0 0 / .75)";
  context.fillRect(across - wide / 2, down - 15 * zoom, wide, 30 * zoom);
  context.fillStyle = "white";
  context.fillText(text, across, down, width);
}

/** Draw a map over a box, cell by cell or smoothly. */
export function drawHeat(context, map, grid, { x, y, width, height }, { strength, smooth }) {
  Object.assign(scratch, { width: grid[1], height: grid[0] });
  scratch.getContext("2d").putImageData(heatImage(map, grid, strength), 0, 0);
  context.imageSmoothingEnabled = smooth;
  context.imageSmoothingQuality = "high";
  context.drawImage(scratch, x, y, width, height);
}

function cellOf([rows, columns], patch, { x, y, width, height }) {
  const cell = { width: width / columns, height: height / rows };
  return { left: x + (patch % columns) * cell.width, top: y + Math.floor(patch / columns) * cell.height, cell };
}

/** Cover patches that are switched off. */
export function cover(context, grid, off, box) {
  context.fillStyle = "#444";
  for (const part of off.filter((name) => name.startsWith("patch"))) {
    const { left, top, cell } = cellOf(grid, Number(part.slice(5)), box);
    context.fillRect(left, top, cell.width, cell.height);
  }
}

/** Frame a patch: light within dark, visible on any colour. */
export function outline(context, grid, patch, box, zoom, dashed = false) {
  const { left, top, cell } = cellOf(grid, patch, box);
  const line = 2 * zoom;
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
