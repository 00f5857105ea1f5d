// The view as a picture to share: titles, maps, the scale, the predictions.

import { css } from "./colours.js";
import { cover, drawHeat, drawNote, drawPhoto, make, outline, partOf } from "./draw.js";
import { mapOf, view, viewIn } from "./view.js";
import { guessOf, highest, lowest, noteOf, percent, titleOf } from "./words.js";

const ZOOM = 2; // pixels per unit of the layout
const WIDTH = 460;
const EDGE = 24;
const LINE = 22;
const HEAD = 3.3; // lines above a picture
const ROWS = 5;

/** Draw panels over a caption {model, command}, and download the file. */
export async function savePng(panels, caption) {
  const name = `${panels[0].name.replace(/\.[^.]*$/, "") || "picture"}-${view.mode}.png`;
  const link = make("a", { href: URL.createObjectURL(await drawn(panels, caption)), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Copy the same picture to the clipboard. */
export async function copyPng(panels, caption) {
  await navigator.clipboard.write([new ClipboardItem({ "image/png": drawn(panels, caption) })]);
}

function drawn(panels, caption) {
  return new Promise((resolve) => compose(panels, caption).toBlob(resolve, "image/png"));
}

function compose(panels, { model, command }) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const heights = panels.map(({ photo: { canvas } }) => (WIDTH * canvas.height) / canvas.width);
  const tallest = Math.max(...heights);
  const width = ZOOM * (EDGE + panels.length * (WIDTH + EDGE));
  const canvas = make("canvas", { width, height: ZOOM * (2 * EDGE + (HEAD + ROWS + 4) * LINE + tallest) });
  const context = canvas.getContext("2d");
  context.scale(ZOOM, ZOOM);
  context.fillStyle = colour("--paper");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.textBaseline = "middle";
  panels.forEach((panel, place) => {
    const [x, y] = [EDGE + place * (WIDTH + EDGE), EDGE + HEAD * LINE];
    drawPanel(context, panel, { x, y, width: WIDTH, height: heights[place] }, colour);
  });
  const [right, bottom] = [canvas.width / ZOOM - EDGE, canvas.height / ZOOM - EDGE / 2];
  context.fillStyle = colour("--muted");
  context.font = `12px ${style.fontFamily}`;
  context.textAlign = "right";
  context.fillText(cut(context, [model, "vitascope"].filter(Boolean).join(" · "), right - EDGE), right, bottom);
  context.font = `11px ${colour("--mono")}`;
  context.textAlign = "left";
  context.fillText(cut(context, command, right - EDGE), EDGE, bottom - LINE);
  return canvas;
}

function drawPanel(context, { answer, name, photo, seen }, box, colour) {
  const font = getComputedStyle(document.documentElement).fontFamily;
  const write = (text, x, y, { size = 14, weight = 400, ink = "--ink", most = WIDTH } = {}) => {
    context.font = `${weight} ${size}px ${font}`;
    context.fillStyle = colour(ink);
    context.textAlign = "left";
    context.fillText(cut(context, text, most), x, y);
  };
  const [what, whose = ""] = titleOf(answer).split(/: (.*)/s);
  write(what, box.x, EDGE + LINE / 2, { size: 15, weight: 600 });
  write(whose, box.x, EDGE + 1.5 * LINE);
  write(name, box.x, EDGE + 2.5 * LINE, { size: 13, ink: "--muted" });
  drawPhoto(context, photo, box, view.sharp ? null : seen);
  const part = partOf(photo, box);
  const map = answer.grid && mapOf(answer);
  if (map) drawHeat(context, map, answer.grid, part, view);
  if (answer.grid) cover(context, answer.grid, answer.off, part);
  drawNote(context, noteOf(answer), part, 1);
  context.textBaseline = "middle";
  const { mode, held } = viewIn(answer);
  if (map && mode !== "class" && held !== null) {
    outline(context, answer.grid, held, part, 1);
  }
  let y = box.y + box.height + LINE;
  if (map && map.kind !== "colours") drawScale(context, box, y, map, write);
  for (const index of answer.top(ROWS)) {
    y += LINE;
    context.fillStyle = colour("--bar");
    context.fillRect(box.x, y + LINE / 2 + 1, WIDTH * answer.probabilities[index], LINE - 4);
    write(guessOf(answer, index), box.x + 6, y + LINE, { most: WIDTH - 80 });
    write(percent(answer.probabilities[index]), box.x + WIDTH - 56, y + LINE, { size: 13 });
  }
}

function drawScale(context, box, y, map, write) {
  const [left, width] = [box.x + 36, 180];
  write(lowest(map), box.x, y, { size: 12, ink: "--muted" });
  for (let step = 0; step < width; step++) {
    context.fillStyle = css(step / (width - 1));
    context.fillRect(left + step, y - 5, 1.5, 10);
  }
  write(highest(map), left + width + 8, y, { size: 12, ink: "--muted" });
}

/** A text, cut to fit. */
function cut(context, text, most) {
  if (context.measureText(text).width <= most) return text;
  let length = text.length;
  while (length && context.measureText(`${text.slice(0, length)}…`).width > most) length--;
  return `${text.slice(0, length)}…`;
}
