// The page: its pictures, their common view, and the requests for them.

import { translatePage } from "./chinese.js";
import { Controls } from "./controls.js";
import { listen } from "./keyboard.js";
import { linkOf, readLink, viewOf } from "./link.js";
import { Panel } from "./panel.js";
import { copyPng, savePng } from "./save.js";
import { fetchModel, fetchSample, fetchSamples, fetchTexts, takeToken, useToken, whenReady } from "./server.js";
import { change, FIRST, mapOf, offIn, onChange, redraw, share, use, view, viewIn } from "./view.js";
import { commandOf, placeOf, predictionOf, titleOf } from "./words.js";
import { Wall } from "./wall.js";

const at = (id) => document.getElementById(id);
const QUIET = 350; // milliseconds without a change before the view is announced and missing parts are fetched
const REPORTED = 1500; // milliseconds that a button says what it did
const BESIDE = "beside/"; // before the addresses of the second model
const FRAME = 700; // milliseconds of a layer, when all are played
const SPOKEN = 3; // classes of a prediction
const THEME = "vitascope theme"; // the key of the kept theme

const panels = [];
let active = null;
let samples = [];
let models = []; // {source, name, architecture, digest}: the server's, and the one beside it
let settled = 0;
let link = readLink(location.hash); // to follow once there is an answer
let news = ""; // to announce: the prediction for a new picture
let playing = 0;

const controls = new Controls();
const wall = new Wall(at("wall"));

const events = {
  opened(panel) {
    const isFirst = !controls.answer;
    activate(panel);
    for (const name of ["save", "copy", "link"]) at(name).disabled = false;
    news = predictionOf(panel.answer, SPOKEN);
    if (isFirst) FIRST.method = view.method;
    if (isFirst && panel.answer.inside) {
      const { depth, patches_read_last: readLast } = panel.answer.inside;
      FIRST.layer = Math.max(0, readLast ? depth - 1 : depth - 2); // the last that uses the attention of patches
      change({ layer: FIRST.layer });
    }
    if (link) follow(panel);
    redraw();
  },
  closed: removePanel,
  touched(panel) {
    if (panel.answer && panel !== active) activate(panel);
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
  panel.offerModels(models);
  arrange();
  return panel;
}

/** Make a panel the one that the controls belong to. */
function activate(panel) {
  const { answer } = panel;
  active = panel;
  use(answer);
  if (controls.answer?.source !== answer.source) controls.build(answer);
  controls.answer = answer;
  at("model").textContent = describe(answer);
  const { architecture = "", digest = "" } = modelOf(answer) ?? {};
  at("weights").textContent = `${architecture}, SHA-256 of the weights ${digest}`;
  at("engine").textContent = answer.about.model;
  redraw();
}

/** A second panel: of the same picture where there is a second model, else for another picture. */
function compare() {
  const { answer, name, sample } = active;
  const panel = addPanel();
  if (models.length < 2 || !answer) return;
  panel.source = models.find(({ source }) => source !== answer.source).source;
  panel.offerModels(models);
  panel.open(answer.picture, name, sample);
}

const modelOf = (answer) => models.find(({ source }) => source === answer.source);

function removePanel(panel) {
  panels.splice(panels.indexOf(panel), 1);
  panel.leave();
  panel.element.remove();
  if (active === panel && panels[0].answer) activate(panels[0]);
  else if (active === panel) active = panels[0];
  at("compare").focus(); // the button that was pressed may be gone
  arrange();
}

/** One picture, or two side by side. */
function arrange() {
  at("panels").dataset.count = panels.length;
  at("compare").setAttribute("aria-pressed", panels.length > 1);
  redraw();
}

function draw() {
  share(panels.map(({ answer }) => answer).filter(Boolean));
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

/** After a pause: announce the view to screen readers, write it into the address, fetch all missing parts. */
function settle() {
  if (view.pointed === null) announce();
  if (active?.answer && !link) history.replaceState(null, "", addressOf(active));
  fetchMissing(() => true);
}

/** The address of the shown view; a picture of one's own is not in it. */
function addressOf({ answer, sample }) {
  if (answer.source) return location.href; // whose layers and heads are not those of the model that a link opens
  return location.pathname + location.search + linkOf(answer, sample);
}

/** Show the view that the address names. */
function follow(panel) {
  const followed = link;
  link = null;
  try {
    change(viewOf(followed, panel.answer));
  } catch (error) {
    panel.showFault(error.message);
  }
}

/** Fetch the missing parts of the panels that are wanted now. */
function fetchMissing(isWanted) {
  for (const panel of panels) {
    if (!panel.answer?.grid) continue;
    if (panel.off !== offIn(panel.source)) {
      panel.open(panel.answer.picture, panel.name, panel.sample); // without the parts that are off now
      continue;
    }
    const part = panel.answer.missing(viewIn(panel.answer));
    if (isWanted(part)) bring(panel, part);
  }
}

function announce() {
  const map = active?.answer?.grid && mapOf(active.answer);
  if (!map) return;
  const best = map.cells ? map.cells.indexOf(Math.max(...map.cells)) : -1;
  const most = best >= 0 ? `; most at ${placeOf(active.answer, best)}` : "";
  at("spoken").textContent = `${news}${titleOf(active.answer)}${most}`;
  news = "";
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

/** The model in a few words. */
function describe(answer) {
  const { inside, pixels, grid, probabilities } = answer;
  const [, H, W] = pixels.shape;
  const count = probabilities.length;
  const classes = count ? `${count.toLocaleString("en")} classes` : "no head";
  const parts = [`${W}×${H} pixels`, classes];
  if (inside) parts.unshift(`${inside.depth} layers × ${inside.heads} heads`, `${grid[0]}×${grid[1]} patches`);
  return [modelOf(answer)?.name, ...parts].filter(Boolean).join(" · ");
}

// The model, samples, tokens, themes

async function load() {
  try {
    const wait = (reason) => panels.forEach((panel) => panel.awaitSamples(reason));
    const first = await whenReady(fetchModel, wait);
    const beside = first.beside ? [await whenReady(() => fetchModel(BESIDE), wait)] : [];
    models = [first, ...beside].map((one, at) => ({ ...one, source: at ? BESIDE : "" }));
    const known = [first.name, first.architecture].filter(Boolean);
    document.title = `${[...known, first.digest.slice(0, 8)].join(" · ")} – vitascope`;
    at("model").textContent = known.join(" · ");
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
    panel.offerModels(models);
  }
  if (!panels[0].answer && !panels[0].coming) visit();
}

/** Open the sample that the address names, or the first one; its view follows. */
function visit() {
  const [first] = panels;
  const asked = samples.find(({ name }) => name === link?.sample);
  if (link?.sample && !asked) {
    first.showFault(`The link names the sample “${link.sample}”, which this model does not have.`);
  } else if (asked || (samples.length && !first.answer)) openSample(first, (asked ?? samples[0]).name);
  else if (first.answer) follow(first);
}

function openSample(panel, name) {
  const { blob, title } = samples.find((sample) => sample.name === name);
  panel.open(blob, title, name);
}

function askForToken(again) {
  const dialog = at("token-dialog");
  if (dialog.open) return;
  dialog.onclose = () => {
    if (!at("token").value) return;
    useToken(at("token").value);
    at("token").value = "";
    again();
  };
  dialog.showModal();
}

/** Show one layer after the other, from the first, until it is stopped or another view is chosen. */
function play() {
  if (playing) return stop();
  at("play").setAttribute("aria-pressed", true);
  const mode = view.mode === "lens" ? "lens" : "attention";
  let layer = 0;
  change({ mode, layer });
  playing = setInterval(() => {
    if (view.layer !== layer || view.mode !== mode) return stop();
    if (active.answer.missing(viewIn(active.answer))) return; // it comes
    layer = (layer + 1) % active.answer.inside.depth;
    change({ layer });
  }, FRAME);
}

function stop() {
  clearInterval(playing);
  playing = 0;
  at("play").setAttribute("aria-pressed", false);
}

/** Say on a button for a moment what it did. */
async function report(button, action, done) {
  const name = button.textContent;
  button.disabled = true;
  let result = done;
  try {
    await action();
  } catch (error) {
    result = "Not allowed";
    active.showFault(`${name}: ${error.message}`);
  }
  button.textContent = result;
  setTimeout(() => Object.assign(button, { textContent: name, disabled: false }), REPORTED);
}

/** The panel for a picture that is dropped or pasted beside the panels: an empty one first. */
const target = () => panels.find((panel) => !panel.answer) ?? active ?? panels[0];

function take(transfer) {
  const file = [...transfer.files].find((one) => one.type.startsWith("image/"));
  if (file) target().open(file, file.name || "a pasted picture");
  else if (transfer.files.length) target().showFault(`${transfer.files[0].name} is not a picture.`);
}

// Dark or light: the system's choice until the reader makes one, which the browser keeps if it has storage

try {
  const kept = localStorage.getItem(THEME);
  if (kept) document.documentElement.dataset.theme = kept;
} catch {
  // no storage
}

function toggleTheme() {
  const { dataset } = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  dataset.theme = (dataset.theme ?? system) === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(THEME, dataset.theme);
  } catch {
    // no storage
  }
  redraw();
}

const help = () => at("help-dialog").showModal();
const names = () => [...new Set(shown().map(({ answer }) => modelOf(answer)?.name))].filter(Boolean).join(" and ");
const shown = () => panels.filter((panel) => panel.answer);
const caption = () => ({ model: names(), command: active.answer.grid ? commandOf(active.answer) : "" });
const save = () => active?.answer && savePng(shown(), caption());

at("compare").addEventListener("click", () => (panels.length > 1 ? removePanel(panels.at(-1)) : compare()));
at("save").addEventListener("click", save);
at("copy").addEventListener("click", () => report(at("copy"), () => copyPng(shown(), caption()), "Copied"));
at("link").addEventListener("click", () => {
  const address = new URL(addressOf(active), location.href).href;
  report(at("link"), () => navigator.clipboard.writeText(address), active.sample ? "Copied" : "Copied, without picture");
});
for (const name of ["copy", "link"]) at(name).hidden = !navigator.clipboard; // which only https and this machine have
at("play").addEventListener("click", play);
at("theme").addEventListener("click", toggleTheme);
at("help").addEventListener("click", help);
at("wall-one").addEventListener("change", () => {
  wall.wanted = at("wall-one").checked;
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

translatePage(fetchTexts);
onChange(draw);
listen({ answer: () => active?.answer, controls, open: () => target().input.click(), save, help });
window.addEventListener("hashchange", () => {
  link = readLink(location.hash);
  if (takeToken()) load();
  else visit();
});
takeToken();
addPanel();
load();
