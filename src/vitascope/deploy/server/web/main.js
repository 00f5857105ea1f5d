// The page: its pictures, their common view, and the requests for them.

import { translatePage } from "./chinese.js";
import { Controls } from "./controls.js";
import { listen } from "./keyboard.js";
import { Panel } from "./panel.js";
import { savePng } from "./save.js";
import { fetchModel, fetchSample, fetchSamples, takeToken, useToken, whenReady } from "./server.js";
import { change, mapOf, onChange, redraw, targetOf, view } from "./view.js";
import { commandOf, placeOf, titleOf } from "./words.js";
import { Wall } from "./wall.js";

const at = (id) => document.getElementById(id);
const QUIET = 350; // milliseconds without a change before the view is announced and missing parts are fetched

const panels = [];
let active = null;
let samples = [];
let model = ""; // its name
let settled = 0;

const controls = new Controls();
const wall = new Wall(at("wall"), () => {});

const events = {
  opened(panel) {
    const isFirst = !controls.answer;
    active = panel;
    controls.build(panel.answer);
    at("save").disabled = false;
    at("model").textContent = describe(panel.answer);
    if (isFirst && panel.answer.inside) change({ layer: firstLayer(panel.answer.inside) });
    redraw();
  },
  closed(panel) {
    removePanel(panel);
  },
  touched(panel) {
    if (panel.answer && panel !== active) {
      active = panel;
      redraw();
    }
  },
  failed(error, again) {
    if (error.status === 401) askForToken(again);
  },
};

function addPanel() {
  const panel = new Panel(events);
  panels.push(panel);
  active ??= panel;
  at("panels").append(panel.element);
  panel.offer(samples, openSample);
  arrange();
  return panel;
}

function removePanel(panel) {
  panels.splice(panels.indexOf(panel), 1);
  panel.leave();
  panel.element.remove();
  if (active === panel) active = panels[0];
  arrange();
}

/** One picture, or two side by side. */
function arrange() {
  at("panels").dataset.count = panels.length;
  at("compare").setAttribute("aria-pressed", panels.length > 1);
  redraw();
}

function draw() {
  for (const panel of panels) panel.draw();
  fetchMissing((part) => !part || "method" in part); // layers wait until the slider rests
  controls.draw();
  const command = active?.answer?.grid ? commandOf(active.answer) : "";
  at("command").hidden = !command;
  at("command").firstChild.textContent = command;
  if (active?.answer?.inside) {
    wall.draw(active.answer);
    at("wall").setAttribute("aria-label", `Every head, of the same query. ${titleOf(active.answer)}`);
    at("wall-note").textContent = wall.caption;
  }
  clearTimeout(settled);
  settled = setTimeout(settle, QUIET);
}

/** After a pause: announce the view to screen readers, and fetch all missing parts. */
function settle() {
  if (view.pointed === null) announce();
  fetchMissing(() => true);
}

/** Fetch the missing parts of the panels that are wanted now. */
function fetchMissing(isWanted) {
  for (const panel of panels) {
    if (!panel.answer?.grid) continue;
    const part = panel.answer.missing(view, targetOf(panel.answer));
    if (isWanted(part)) bring(panel, part);
  }
}

function announce() {
  const map = active?.answer?.grid && mapOf(active.answer);
  if (!map) return;
  const best = map.cells.indexOf(map.most);
  const most = best >= 0 ? `; most at ${placeOf(active.answer, best)}` : "";
  at("spoken").textContent = `${titleOf(active.answer)}${most}`;
}

/** Fetch a missing part of a picture; requests for parts that are no longer shown are aborted. */
async function bring(panel, part) {
  const { answer } = panel;
  const name = JSON.stringify(part);
  if (name === panel.failed) return; // until it is tried again
  if (panel.failed) panel.showFault("");
  panel.failed = null;
  try {
    await answer.bring(part);
    if (part) redraw();
  } catch (error) {
    if (error.name === "AbortError" || answer !== panel.answer) return;
    const again = () => {
      panel.failed = null;
      panel.showFault("");
      redraw();
    };
    panel.failed = name;
    panel.showFault(error.message, again);
    redraw();
    events.failed(error, again);
  }
}

/** The last layer in which the attention of patches is used. */
function firstLayer({ depth, patches_read_last: readLast }) {
  return Math.max(0, readLast ? depth - 1 : depth - 2);
}

/** The model in a few words. */
function describe({ about, inside, pixels, grid, probabilities }) {
  const [, H, W] = pixels.shape;
  const classes = probabilities.length ? `${probabilities.length} classes` : "no head";
  const parts = [`${W}×${H} pixels`, classes];
  if (inside) parts.unshift(`${inside.depth} layers × ${inside.heads} heads`, `${grid[0]}×${grid[1]} patches`);
  return [model, ...parts, about.model].filter(Boolean).join(" · ");
}

// The model, samples, tokens, themes

async function load() {
  try {
    const wait = (reason) => panels.forEach((panel) => panel.awaitSamples(reason));
    introduce(await whenReady(fetchModel, wait));
    const listed = await whenReady(fetchSamples, wait);
    samples = await Promise.all(
      listed.map(async ({ name, title }) => {
        const blob = await whenReady(() => fetchSample(name), wait);
        return { name, title, blob, url: URL.createObjectURL(blob) };
      }),
    );
  } catch (error) {
    if ([null, load].includes(panels[0].again)) panels[0].showFault(error.message, load); // else it shows a picture's error
    events.failed(error, load);
    return;
  }
  for (const panel of panels) {
    if (panel.again === load) panel.showFault("");
    panel.offer(samples, openSample);
  }
}

/** Name the model in the title and on the page. */
function introduce({ name, architecture, digest }) {
  model = name;
  const known = [name, architecture, digest.slice(0, 8)].filter(Boolean).join(" · ");
  document.title = `${known} – vitascope`;
  at("model").textContent = [name, architecture].filter(Boolean).join(" · ");
  at("model").title = `${architecture}\nSHA-256 of the weights: ${digest}`;
}

function openSample(panel, name, title) {
  panel.open(samples.find((sample) => sample.name === name).blob, title);
}

function askForToken(again) {
  const dialog = at("token-dialog");
  if (dialog.open) return;
  dialog.addEventListener(
    "close",
    () => {
      if (!at("token").value) return;
      useToken(at("token").value);
      at("token").value = "";
      again();
    },
    { once: true },
  );
  dialog.showModal();
}

function toggleTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
  redraw();
}

/** The panel for a picture that is dropped or pasted beside the panels: an empty one first. */
function target() {
  return panels.find((panel) => !panel.answer) ?? active ?? panels[0];
}

function take(transfer) {
  const file = [...transfer.files].find((one) => one.type.startsWith("image/"));
  if (file) target().open(file, file.name || "a pasted picture");
}

const help = () => at("help-dialog").showModal();
const save = () => active?.answer && savePng(panels.filter((panel) => panel.answer));

at("compare").addEventListener("click", () => {
  if (panels.length > 1) removePanel(panels.at(-1));
  else addPanel();
});
at("save").addEventListener("click", save);
at("theme").addEventListener("click", toggleTheme);
at("help").addEventListener("click", help);
at("wall-one").addEventListener("change", () => {
  wall.oneLayer = at("wall-one").checked;
  redraw();
});
document.addEventListener("paste", (event) => take(event.clipboardData));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  if (event.defaultPrevented) return;
  event.preventDefault();
  take(event.dataTransfer);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe(at("wall-figure"));

translatePage();
onChange(draw);
listen({ answer: () => active?.answer, controls, open: () => target().input.click(), save, help });
window.addEventListener("hashchange", () => takeToken() && load()); // a link with a token, opened in this page
takeToken();
addPanel();
load();
