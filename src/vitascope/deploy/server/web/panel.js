// One picture: from choosing and sending it to its maps and prediction.

import { Answer } from "./answer.js";
import { css } from "./colours.js";
import { cover, drawHeat, drawNote, drawPhoto, fitted, make, outline, partOf } from "./draw.js";
import { fetchAttention, whenReady } from "./server.js";
import { asCanvas, onlySeen, photograph } from "./sharp.js";
import { change, isOfClass, mapOf, offIn, redraw, toggleOff, view, viewIn } from "./view.js";
import { guessOf, highest, lowest, noteOf, percent, placeOf, titleOf, tokenName, valueOf } from "./words.js";

const TICK = 250; // milliseconds between two looks at the clock
const SHOWN = 5; // classes of a prediction
const MOST = 12; // with those that apply, where any number of classes may

export class Panel {
  /** @param events {opened, closed, touched, failed}: callbacks of the page. */
  constructor(events) {
    this.events = events;
    this.answer = null;
    this.failed = null; // the part that could not be fetched, or was cancelled, as JSON
    this.sample = null; // the name of the shown sample
    this.source = ""; // the model to ask
    this.off = []; // its parts that are left out in the last request
    this.again = null; // the action of "Try again"
    this.name = "";
    this.element = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.canvas = this.find(".picture");
    this.input = this.find("input[type=file]");
    const colours = Array.from({ length: 33 }, (_, step) => css(step / 32));
    this.find(".ramp").style.background = `linear-gradient(90deg, ${colours})`;
    this.listen();
    new ResizeObserver(redraw).observe(this.canvas);
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  listen() {
    for (const button of this.element.querySelectorAll(".choose")) {
      button.addEventListener("click", () => this.input.click());
    }
    this.input.addEventListener("change", () => {
      if (this.input.files.length) this.open(this.input.files[0], this.input.files[0].name);
      this.input.value = "";
    });
    this.find(".close").addEventListener("click", () => this.events.closed(this));
    this.find(".cancel").addEventListener("click", () => this.cancel());
    const stage = this.find(".stage");
    stage.addEventListener("dragover", (event) => {
      event.preventDefault();
      stage.classList.add("over");
    });
    stage.addEventListener("dragleave", () => stage.classList.remove("over"));
    stage.addEventListener("drop", (event) => {
      event.preventDefault();
      stage.classList.remove("over");
      const file = event.dataTransfer.files[0];
      if (file) this.open(file, file.name);
    });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.press(event));
    this.canvas.addEventListener("pointerup", (event) => this.release(event));
    this.canvas.addEventListener("pointerleave", () => change({ pointed: null }));
    this.canvas.addEventListener("focus", () => this.events.touched(this));
  }

  // Opening a picture

  /** Send a picture, and draw the result; `sample` is its name among the samples. */
  async open(picture, name, sample = null) {
    this.coming?.abort();
    const coming = (this.coming = new AbortController());
    const off = (this.off = offIn(this.source));
    const old = this.answer?.picture === picture && this.answer.source === this.source ? this.answer : null;
    this.setBusy(true);
    this.showFault("");
    this.failed = null;
    let kept = picture;
    try {
      if (!old) kept = await inMemory(picture);
      const request = () => fetchAttention(kept, { off }, coming.signal, this.source);
      const reply = await whenReady(request, (reason) => this.setBusy(true, reason), coming.signal);
      const answer = new Answer(reply, kept, this.source, off);
      answer.whole = old && (old.off.length ? old.whole : old.probabilities); // of the model with all its parts
      const seen = old ? this.seen : asCanvas(answer.pixels);
      const photo = old ? this.photo : ((await photograph(kept, answer.pixels, answer.about.framing)) ?? onlySeen(seen));
      if (coming.signal.aborted) return;
      this.answer?.bring(null);
      this.stopClock();
      Object.assign(this, { answer, name, sample, seen, photo });
      this.show();
      this.events.opened(this);
    } catch (error) {
      if (error.name === "AbortError") return;
      const again = () => this.open(kept, name, sample);
      this.showFault(`${name}: ${error.message}`, again);
      this.events.failed(error, again);
    } finally {
      if (coming === this.coming) this.setBusy(false);
    }
  }

  /** Abort the requests of a removed panel. */
  leave() {
    this.coming?.abort();
    this.answer?.bring(null);
    this.stopClock();
  }

  /** Show in an empty panel why the samples are not there yet. */
  awaitSamples(reason) {
    this.find(".coming").hidden = !reason;
    this.find(".coming").lastChild.textContent = waiting(reason);
  }

  /** Offer models, {source, name, architecture, digest}, if there is a choice. */
  offerModels(models) {
    const select = this.find(".which");
    const isOne = new Set(models.map(({ name }) => name)).size === models.length;
    const labelOf = ({ name, architecture, digest }) => (isOne ? name : `${name || architecture} · ${digest.slice(0, 8)}`);
    select.replaceChildren(...models.map((model) => new Option(labelOf(model), model.source)));
    select.value = this.source;
    select.hidden = models.length < 2;
    select.onchange = () => {
      this.source = select.value;
      if (this.answer) this.open(this.answer.picture, this.name, this.sample);
    };
  }

  /** Offer samples. */
  offer(samples, open) {
    this.awaitSamples("");
    this.find(".or-try").hidden = !samples.length;
    const buttons = samples.map(({ name, title, url }) => {
      const button = make("button", { type: "button", title }, make("img", { src: url, alt: "" }));
      button.dataset.sample = name;
      button.setAttribute("aria-label", `Sample: ${title}`);
      button.addEventListener("click", () => open(this, name, title));
      return button;
    });
    this.find(".samples").replaceChildren(...buttons);
  }

  show() {
    this.element.style.setProperty("--ratio", this.photo.canvas.width / this.photo.canvas.height);
    this.element.classList.add("full");
    this.find(".name").textContent = this.name;
    this.find(".name").title = this.name;
    this.find(".empty").hidden = true;
    for (const button of this.find(".samples").children) {
      button.setAttribute("aria-pressed", button.dataset.sample === this.sample);
    }
    this.find(".result").hidden = false;
    this.fillPredictions();
    redraw();
  }

  setBusy(busy, reason = "") {
    this.find(".busy").hidden = !busy;
    this.find(".busy").lastChild.textContent = reason ? waiting(reason) : "The model is looking …";
    this.element.setAttribute("aria-busy", busy);
  }

  /** Show an error, with "Try again" if there is an action; an empty text hides it. */
  showFault(fault, again = null) {
    const [text, button] = this.find(".fault").children;
    text.textContent = fault;
    button.hidden = !again;
    button.onclick = again;
    this.again = again;
    this.find(".fault").hidden = !fault;
  }

  // The pointer

  /** The patch at an event's place; null in what the model does not see. */
  patchAt(event) {
    const { x, y, width, height } = partOf(this.photo, this.canvas.getBoundingClientRect());
    const [rows, columns] = this.answer.grid;
    const row = Math.floor(((event.clientY - y) / height) * rows);
    const column = Math.floor(((event.clientX - x) / width) * columns);
    return row >= 0 && row < rows && column >= 0 && column < columns ? row * columns + column : null;
  }

  point(event) {
    if (!this.answer?.grid) return;
    this.events.touched(this);
    change({ pointed: this.patchAt(event) });
  }

  press(event) {
    this.point(event);
    this.pressed = view.pointed;
    if (event.pointerType !== "mouse") this.canvas.setPointerCapture(event.pointerId);
  }

  release(event) {
    if (!this.answer?.inside) return;
    const patch = this.patchAt(event);
    if (patch === null) return;
    const token = this.answer.prefix + patch;
    if (event.shiftKey) toggleOff(`patch${patch}`);
    else if (event.pointerType !== "mouse") change({ held: token });
    else if (patch === this.pressed) change({ held: view.held === token ? null : token });
  }

  // Drawing

  draw() {
    if (!this.answer) return;
    const { width, height, zoom } = fitted(this.canvas);
    if (!width || !height) return;
    const place = { x: 0, y: 0, width, height };
    const box = partOf(this.photo, place);
    const context = this.canvas.getContext("2d");
    context.drawImage(this.backdrop(place), 0, 0);
    const map = this.answer.grid && mapOf(this.answer);
    if (map) drawHeat(context, map, this.answer.grid, box, view);
    if (this.answer.grid) cover(context, this.answer.grid, this.answer.off, box);
    drawNote(context, noteOf(this.answer), box, zoom);
    if (this.answer.grid) this.drawPatches(context, box, zoom);
    this.showWait();
    this.canvas.setAttribute("aria-label", `${this.name}. ${titleOf(this.answer)}`);
    this.showNumbers(map);
  }

  /** Show the part that is being fetched, and for how long. */
  showWait() {
    const part = this.answer.grid && !this.failed && this.answer.missing(viewIn(this.answer));
    this.find(".wait").hidden = !part;
    const name = part && JSON.stringify(part);
    if (name !== this.waiting?.name) this.stopClock();
    if (part) this.waiting ??= this.startClock(name, part);
  }

  startClock(name, part) {
    const title = { ...this.answer.about.methods, lens: "the lens" }[part.method];
    const what = title ? `Computing ${title}` : `Fetching layer ${part.layer}`;
    const began = performance.now();
    this.find(".wait .what").textContent = `${what} …`;
    const show = () => {
      const seconds = Math.round((performance.now() - began) / 1000);
      const { share } = this.answer;
      const parts = [share === null ? "" : `${Math.round(100 * share)}%`, seconds ? `${seconds} s` : ""];
      this.find(".wait .seconds").textContent = parts.filter(Boolean).join(", ");
    };
    show();
    const clock = setInterval(show, TICK);
    return { name, what, clock };
  }

  stopClock() {
    clearInterval(this.waiting?.clock);
    this.waiting = null;
  }

  /** Give up the part that is being fetched. */
  cancel() {
    const { name, what } = this.waiting;
    this.answer.bring(null);
    this.failed = name;
    this.showFault(`Cancelled: ${what}.`, () => {
      this.failed = null;
      this.showFault("");
      redraw();
    });
    this.canvas.focus(); // the button is gone
    redraw();
  }

  /** The picture at the canvas's size, scaled only when either changes, because pointer moves must be fast. */
  backdrop(place) {
    const { photo } = this;
    const seen = view.sharp ? null : this.seen;
    const old = this.scaled;
    const { width, height } = place;
    if (old?.photo !== photo || old.seen !== seen || old.canvas.width !== width || old.canvas.height !== height) {
      const canvas = make("canvas", { width, height });
      drawPhoto(canvas.getContext("2d"), photo, place, seen);
      this.scaled = { photo, seen, canvas };
    }
    return this.scaled.canvas;
  }

  drawPatches(context, box, zoom) {
    const { grid } = this.answer;
    const { mode, held, pointed } = viewIn(this.answer);
    if (!isOfClass(mode) && held !== null) outline(context, grid, held, box, zoom);
    if (pointed !== null && pointed !== held) outline(context, grid, pointed, box, zoom, view.held !== null);
  }

  /** The numbers beside the map. */
  showNumbers(map) {
    const answer = this.answer;
    this.find(".title").textContent = titleOf(answer);
    this.find(".scale").hidden = !answer.grid || map?.kind === "colours";
    this.find(".low").textContent = map && map.kind !== "colours" ? lowest(map) : "0";
    this.find(".high").textContent = map && map.kind !== "colours" ? highest(map) : tooMany(answer) ? "too many tokens to show" : "…";
    const { pointed } = viewIn(answer);
    const here = map && pointed !== null ? [placeOf(answer, pointed), valueOf(map, pointed)] : [];
    this.find(".here").textContent = here.filter(Boolean).join(": ");
    this.showTokens(map);
    this.markTarget();
  }

  /** The shares of the patches together, and of each other token. */
  showTokens(map) {
    const list = this.find(".tokens");
    list.hidden = !map?.row || !this.answer.prefix;
    if (!map?.row) return;
    const patches = map.cells.reduce((sum, value) => sum + value, 0);
    const shares = [["all patches", patches, ""]];
    for (let token = 0; token < this.answer.prefix; token++) {
      shares.push([tokenName(this.answer, token), map.row[token], css(map.row[token] / (map.most || 1))]);
    }
    list.replaceChildren(
      ...shares.map(([name, share, colour]) => {
        const swatch = make("i");
        swatch.style.background = colour;
        return make("li", {}, swatch, make("span", {}, name), make("b", {}, percent(share)));
      }),
    );
  }

  // The prediction

  /** The most probable classes, and the class of the shown map if it is none of them. */
  fillPredictions() {
    const { thresholds, whole, off } = this.answer;
    const shown = this.answer.shown(SHOWN, MOST);
    const { target } = viewIn(this.answer);
    if (target !== undefined && !shown.includes(target)) shown.push(target);
    this.filledFor = target;
    const items = shown.map((index) => {
      const probability = this.answer.probabilities[index];
      const bar = make("i");
      bar.style.width = `${100 * probability}%`;
      const before = off.length && whole ? `${percent(whole[index])} → ` : "";
      const [label, number] = [guessOf(this.answer, index), before + percent(probability)];
      const looks = { type: "button", disabled: !this.answer.grid, title: this.answer.label(index) };
      const button = make("button", looks, bar, make("span", {}, label), make("b", {}, number));
      button.dataset.index = index;
      const marks = before ? whole : thresholds;
      if (marks) {
        const mark = make("i", { className: "threshold" });
        mark.style.left = `${100 * marks[index]}%`;
        bar.after(mark);
      }
      if (thresholds) button.title += `, applies from ${percent(thresholds[index])}`;
      button.addEventListener("click", () => {
        this.events.touched(this);
        change({ mode: view.mode === "lens" ? "lens" : "class", target: index });
      });
      return make("li", {}, button);
    });
    this.find(".none").hidden = !thresholds || shown.some((index) => this.answer.applies(index));
    for (const reason of ["ambiguous", "unfamiliar", "unchecked"]) {
      this.find(`.${reason}`).hidden = this.answer.about.verdict?.unknown !== reason;
    }
    this.find(".predictions").hidden = !items.length;
    this.find(".predictions").replaceChildren(...items);
  }

  markTarget() {
    const { mode, target } = viewIn(this.answer);
    if (this.filledFor !== target) this.fillPredictions();
    const shown = this.answer.grid && isOfClass(mode) ? target : null;
    for (const button of this.find(".predictions").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", Number(button.dataset.index) === shown);
    }
  }
}

/** A server's reason to wait as a line of its own. */
function waiting(reason) {
  return reason && `${reason[0].toUpperCase()}${reason.slice(1)} …`;
}

/** A copy of a picture in memory, which can be sent again if its file is gone. */
async function inMemory(picture) {
  try {
    return new Blob([await picture.arrayBuffer()], { type: picture.type });
  } catch {
    throw new Error("The picture's file cannot be read. Choose it again.");
  }
}

function tooMany({ inside }) {
  return !isOfClass(view.mode) && inside?.carried === "none";
}
