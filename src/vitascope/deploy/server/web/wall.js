// The wall: a small attention map of the query for every head of every layer. A click chooses one.

import { ANSWER } from "./answer.js";
import { RAMP } from "./colours.js";
import { fitted } from "./draw.js";
import { change, DARKEST, offIn, toggleOff, view, viewIn } from "./view.js";

const LARGEST = 104; // a tile's longer side, CSS pixels
const SMALLEST = 36; // of a tile on a phone
const MARGIN = 22; // for the numbers of layers and heads
const GAP = 3;
const BELOW = 110; // the controls below it
const BESIDE = matchMedia("(min-width: 60rem)"); // as in style.css: the controls beside the pictures

const PIXELS = pixels();
const scratch = document.createElement("canvas");

export class Wall {
  constructor(canvas) {
    this.canvas = canvas;
    this.wanted = false; // one layer only
    this.over = null;
    canvas.addEventListener("pointermove", (event) => this.hover(this.tileAt(event)));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("click", (event) => {
      const tile = this.tileAt(event);
      if (tile && event.shiftKey) toggleOff(`head${tile.layer}.${tile.head}`);
      else if (tile) change({ mode: "attention", layer: tile.layer, head: tile.head });
    });
  }

  /** Lay out the tiles, in CSS pixels: as large as possible, layers down or across. */
  arrange(answer) {
    const { depth, heads } = answer.inside;
    const [, H, W] = answer.pixels.shape;
    const [longer, width] = [Math.max(H, W), this.canvas.parentElement.clientWidth - MARGIN];
    const height = this.room(width);
    const isNarrow = !BESIDE.matches && Math.min(width / heads, width / depth) < SMALLEST;
    this.oneLayer = this.wanted || isNarrow; // whose heads wrap
    const shapes = this.oneLayer
      ? [2, 3, 4, 6, 8].map((columns) => [Math.ceil(heads / columns), columns, false])
      : [[depth, heads, false], [heads, depth, true]];
    const fits = shapes.map(([rows, columns, turned]) => {
      const across = width / columns / (W / longer);
      const down = height / rows / (H / longer);
      return { rows, columns, turned, side: Math.min(across, down, LARGEST) };
    });
    const best = fits.reduce((a, b) => (b.side > a.side + 0.5 ? b : a));
    const [tileWidth, tileHeight] = [(best.side * W) / longer, (best.side * H) / longer];
    Object.assign(this, { ...best, tileWidth, tileHeight, answer });
    const needed = `${Math.round(MARGIN + best.rows * tileHeight)}px`;
    if (this.canvas.style.height !== needed) this.canvas.style.height = needed;
  }

  /** The largest height: the rest of a wide window; on a phone, the width. */
  room(width) {
    if (!BESIDE.matches) return width;
    const top = this.canvas.getBoundingClientRect().top + window.scrollY + MARGIN;
    return Math.max(width / 2, window.innerHeight - top - BELOW);
  }

  /** The order of the tiles, and whether some are not loaded. */
  get caption() {
    const { carried } = this.answer.inside;
    const isWhole = carried === "all" || viewIn(this.answer).query === ANSWER;
    const rest = isWhole ? "" : carried === "layer" ? "; choose a layer to load it" : "; not all fit into a response";
    if (this.oneLayer) return `layer ${view.layer}${rest}`;
    return `${this.turned ? "layers across, heads down" : "layers down, heads across"}${rest}`;
  }

  /** The layer and head at a place in the wall; null if there is none. */
  tileOf(row, column) {
    const { depth, heads } = this.answer.inside;
    if (row < 0 || column < 0 || row >= this.rows || column >= this.columns) return null;
    if (this.oneLayer) {
      const head = row * this.columns + column;
      return head < heads ? { layer: view.layer, head } : null;
    }
    const [layer, head] = this.turned ? [column, row] : [row, column];
    return layer < depth && head < heads ? { layer, head } : null;
  }

  tileAt(event) {
    if (!this.answer) return null;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - MARGIN) / this.tileWidth);
    return this.tileOf(Math.floor((event.clientY - box.top - MARGIN) / this.tileHeight), column);
  }

  hover(tile) {
    this.canvas.style.cursor = tile ? "pointer" : "";
    this.canvas.title = tile ? `layer ${tile.layer}, head ${tile.head}` : "";
  }

  draw(answer) {
    this.arrange(answer);
    const { width, height, zoom } = fitted(this.canvas);
    if (!width || !height) return;
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    context.imageSmoothingEnabled = view.smooth;
    this.paint(answer);
    const off = offIn(answer.source);
    const style = getComputedStyle(this.canvas);
    const [h, w] = answer.grid;
    for (let row = 0; row < this.rows; row++) {
      for (let column = 0; column < this.columns; column++) {
        const tile = this.tileOf(row, column);
        if (!tile) continue;
        const box = this.boxOf(row, column, zoom);
        const parts = [`head${tile.layer}.${tile.head}`, `layer${tile.layer}`, `attention${tile.layer}`];
        context.globalAlpha = parts.some((part) => off.includes(part)) ? 0.15 : 1;
        context.drawImage(scratch, column * w, row * h, w, h, box.x, box.y, box.width, box.height);
        context.globalAlpha = 1;
        if (tile.layer === view.layer && (tile.head === view.head || view.head === "mean")) {
          this.mark(context, box, zoom, style.getPropertyValue("--accent"));
        }
      }
    }
    this.number(context, zoom, style);
  }

  /** A tile's place in the canvas's pixels. */
  boxOf(row, column, zoom) {
    const at = (place, size, gap) => Math.round((MARGIN + place * size - gap) * zoom);
    const [x, right] = [at(column, this.tileWidth, 0), at(column + 1, this.tileWidth, GAP)];
    const [y, bottom] = [at(row, this.tileHeight, 0), at(row + 1, this.tileHeight, GAP)];
    return { x, y, width: right - x, height: bottom - y };
  }

  /** All tiles side by side on the scratch canvas, one pixel per patch; each from 0 to the end of its own scale. */
  paint(answer) {
    const [h, w] = answer.grid;
    const { query } = viewIn(answer);
    const image = new ImageData(this.columns * w, this.rows * h);
    const pixels = new Uint32Array(image.data.buffer);
    for (let row = 0; row < this.rows; row++) {
      for (let column = 0; column < this.columns; column++) {
        const tile = this.tileOf(row, column);
        const found = tile && answer.row(tile.layer, tile.head, query);
        if (!found) continue;
        const cells = found.levels.subarray(answer.prefix);
        let most = Math.max(1, DARKEST / answer.tokens / found.scale); // as in the picture
        for (const level of cells) if (level > most) most = level;
        for (let cell = 0; cell < cells.length; cell++) {
          const at = (row * h + Math.floor(cell / w)) * image.width + column * w + (cell % w);
          pixels[at] = PIXELS[Math.round((255 * cells[cell]) / most)];
        }
      }
    }
    Object.assign(scratch, { width: image.width, height: image.height });
    scratch.getContext("2d").putImageData(image, 0, 0);
  }

  mark(context, { x, y, width, height }, zoom, colour) {
    context.strokeStyle = colour;
    context.lineWidth = 2 * zoom;
    context.strokeRect(x - zoom, y - zoom, width + 2 * zoom, height + 2 * zoom);
  }

  /** The numbers of rows and columns. */
  number(context, zoom, style) {
    context.fillStyle = style.color;
    context.font = `${11 * zoom}px ${style.fontFamily}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    if (this.oneLayer) return;
    const half = (MARGIN / 2) * zoom;
    for (let column = 0; column < this.columns; column++) {
      context.fillText(column, (MARGIN + (column + 0.5) * this.tileWidth) * zoom, half);
    }
    for (let row = 0; row < this.rows; row++) {
      context.fillText(row, half, (MARGIN + (row + 0.5) * this.tileHeight) * zoom);
    }
  }
}

/** The scale's colours as pixels, in this machine's byte order. */
function pixels() {
  const bytes = new Uint8ClampedArray(4 * 256).fill(255);
  for (let step = 0; step < 256; step++) bytes.set(RAMP.subarray(3 * step, 3 * step + 3), 4 * step);
  return new Uint32Array(bytes.buffer);
}
