// The page: the pictures of a view, what the user does with them, and what the engine answers.

import { Batch } from "./batch.js";
import { translatePage } from "./chinese.js";
import { classOf, drawClasses, listenToField } from "./classes.js";
import { at, counted, fill, make, whole, words, write } from "./elements.js";
import { abilities, accept, addClass, decide, skip, state, undo } from "./engine.js";
import { drawGrid, enlarge, focusCurrent } from "./grid.js";
import { drawProgress } from "./progress.js";

const VIEWS = ["next", "suspects", "labelled"];
const PAUSE = 2000; // milliseconds before an engine that is lost is asked again
const batch = new Batch();
const waiting = []; // {send, saved, dropped}: what the engine has not saved, in its order
let sending = false;
let again = null; // what `Try again` does
let known = null; // the newest state
let alike = null; // {ids, labels}: the copies of the last labelled picture

// Requests

/** Send a request after those before it; it waits until it is saved or given up. */
function request(send, saved = () => {}, dropped = () => {}) {
  waiting.push({ send, saved, dropped });
  sendAll();
}

async function sendAll() {
  if (sending) return;
  sending = true;
  await attempt(async () => {
    while (waiting.length) {
      known = await waiting[0].send();
      await waiting.shift().saved(known);
      draw();
    }
    const isDone = batch.pictures.length && !batch.left.length && batch.view !== "labelled";
    if (isDone) await batch.open(batch.view, batch.name, 1, batch.ahead);
  }, sendAll);
  sending = false;
  if (waiting.length && !again) sendAll();
}

function giveUp(count) {
  for (const { dropped } of waiting.splice(-count)) dropped();
  warn("");
  draw();
}

/** Do something; if it fails, show the error and offer to do it again. */
async function attempt(action, repeat = () => attempt(action)) {
  try {
    await action();
    warn("");
  } catch (error) {
    warn(error.message, repeat);
  }
  step();
}

function warn(text, repeat = null) {
  again = repeat;
  at("fault").hidden = !text;
  at("fault").firstElementChild.textContent = text;
  write(at("drop"), waiting.length ? `Give up ${counted(waiting.length, "answer")}` : "");
}

// What the user does

/** Label pictures: null takes their labels away, undefined skips them. */
function give(ids, labels, name, before = () => {}) {
  const done = labels ? words(labels) : labels === null ? "no label" : "skipped";
  batch.change(ids, true, (picture) => Object.assign(picture, { pending: done, draft: undefined }));
  const send = async () => {
    await before();
    return labels === undefined ? skip(ids) : decide(ids.map((id) => ({ id, labels })));
  };
  const saved = () => {
    batch.finish(ids, labels);
    at("spoken").textContent = `${name}: ${done}`;
  };
  request(send, saved, () => batch.change(ids, false, (picture) => (picture.pending = "")));
}

/** Answer for the current picture, and go on. */
function answer(labels, before) {
  const { current } = batch;
  if (!current) return;
  alike = labels && current.copies.length ? { ids: current.copies, labels } : null;
  give([current.id], labels, current.name, before);
  batch.advance();
  step();
}

/** Label the current picture with a class, or with several switch the class on or off. */
function choose(name) {
  const { current } = batch;
  const add = known.classes.some((one) => one.name === name) ? undefined : () => addClass(name);
  if (add && (known.several || !current)) request(add);
  if (!current) return;
  if (!known.several) return answer([name], add);
  const labels = current.draft ?? current.labels ?? [];
  current.draft = labels.includes(name) ? labels.filter((one) => one !== name) : [...labels, name];
  draw();
}

function take(picture = batch.current) {
  if (picture !== batch.current) show(picture);
  if (picture?.suggestion) choose(picture.suggestion.label);
}

/** Save the labels that are switched on; without any, take the suggestion. */
function save() {
  if (!batch.current?.draft) take();
  if (batch.current?.draft) answer(batch.current.draft);
}

/** Go to another picture; labels that are switched on are saved. */
function go(move) {
  const { place, current } = batch;
  if (current?.draft) answer(current.draft);
  batch.place = place;
  move();
  step();
}

function show(picture) {
  if (picture === batch.current) enlarge(picture);
  else go(() => (batch.place = batch.pictures.indexOf(picture)));
}

function clear(picture = batch.current) {
  if (picture?.labels) give([picture.id], null, picture.name);
  if (picture) picture.draft = undefined;
  draw();
}

function takeAlike() {
  if (alike) give(alike.ids, alike.labels, counted(alike.ids.length, "picture"));
  alike = null;
  draw();
}

function takeBack() {
  if (waiting.length && !sending) return giveUp(1);
  const { undo: what } = known;
  alike = null;
  const saved = ({ ids }) => {
    at("spoken").textContent = `Undone: ${what}`;
    return batch.restore(ids);
  };
  if (what) request(undo, saved);
}

const open = (view, name, times) => attempt(() => batch.open(view, name, times));
const acts = {
  suspects: (label) => open("suspects", label),
  doubtful: (label) => open("doubtful", label),
  accept: (label, fit) => request(() => accept(label, fit), () => batch.open("next")),
};

// What is shown

function draw() {
  if (!known) return;
  const { view, name, current, total } = batch;
  const isEmpty = total !== null && !current;
  at("grid").dataset.view = view;
  drawGrid(batch.pictures, current, { show, clear, take });
  drawClasses(known.classes, current, choose);
  drawProgress(known, acts, view === "doubtful" ? name : undefined);
  for (const button of at("views").children) button.ariaPressed = button.dataset.view === view;
  for (const count of at("views").querySelectorAll("b")) write(count, known[count.dataset.count] ? whole(known[count.dataset.count]) : "");
  document.title = `${whole(known.labelled)} of ${whole(known.pictures)} – vitascope label`;
  Object.assign(at("undo"), { disabled: !known.undo && !waiting.length, title: known.undo ?? "" });
  for (const one of document.querySelectorAll(".several")) one.hidden = !known.several;
  for (const one of document.querySelectorAll("[data-shown]")) one.hidden = one.dataset.shown !== (isEmpty ? `no ${view}` : view);
  at("start").hidden = view !== "next" || !current || known.classes.length;
  at("nothing").hidden = known.pictures > 0;
  at("back").hidden = view === "next";
  at("copies").hidden = !alike;
  at("copies").lastElementChild.textContent = alike ? `${alike.ids.length} alike: label all as “${words(alike.labels)}”` : "";
  const names = known.classes.map((one) => one.name);
  fill(at("only"), names, () => [new Option("All classes", ""), ...names.map((one) => make("option", { className: "name" }, one))]);
  at("only").value = name;
  at("more").hidden = view === "next" || total <= batch.pictures.length;
  batch.prepare();
}

function step() {
  draw();
  focusCurrent();
}

// Keys, buttons, and the engine's state

const KEYS = {
  " ": () => take(),
  Enter: save,
  ArrowLeft: () => go(() => batch.move(-1, 0)),
  ArrowRight: () => go(() => batch.move(1, 0)),
  ArrowUp: () => go(() => batch.move(0, -1)),
  ArrowDown: () => go(() => batch.move(0, 1)),
  0: () => known.several && answer([]),
  a: takeAlike,
  n: () => at("name").focus(),
  s: () => answer(undefined),
  u: takeBack,
  v: () => open(VIEWS[(VIEWS.indexOf(batch.view) + 1) % VIEWS.length]),
  z: () => (at("large").open ? at("large").close() : batch.current && enlarge(batch.current)),
  Backspace: () => clear(),
  Delete: () => clear(),
  "?": () => at("keys").showModal(),
};
const on = (element, kind, act) => element.addEventListener(kind, act);

on(document, "keydown", (event) => {
  if (!known || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, #keys")) return;
  if ([" ", "Enter"].includes(event.key) && event.target.closest("button:not(.picture)")) return; // which they press
  const name = classOf(event.key);
  const action = name === undefined ? KEYS[event.key] : () => choose(name);
  if (action) event.preventDefault();
  if (action && (!event.repeat || event.key.startsWith("Arrow"))) action();
});
for (const button of document.querySelectorAll("[data-key]")) on(button, "click", () => KEYS[button.dataset.key]());
for (const button of document.querySelectorAll("button[data-view]")) on(button, "click", () => open(button.dataset.view));
on(at("only"), "change", () => open("labelled", at("only").value));
on(at("more"), "click", () => open(batch.view, batch.name, batch.times + 2));
on(at("again"), "click", () => again());
on(at("drop"), "click", () => giveUp(waiting.length));
on(window, "beforeunload", (event) => waiting.length && event.preventDefault());
listenToField(choose, () => {
  at("name").blur();
  focusCurrent();
});

/** Follow the engine's state for as long as the page is open. */
async function follow() {
  for (let isLost = false; ; ) {
    try {
      const isFirst = known === null;
      known = await state(known?.version);
      draw();
      if (isFirst) await open("next");
      if (isFirst && !known.classes.length) at("name").focus();
      if (isLost) again?.();
      isLost = false;
    } catch (error) {
      warn(error.message, again ?? (() => open(batch.view, batch.name)));
      isLost = true;
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
    }
  }
}

translatePage();
abilities.begin?.({ attempt });
follow();
