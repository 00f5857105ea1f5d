// The page: the pictures of a view, what the user does with them, and what the engine answers.

import { Batch } from "./batch.js";
import { translatePage } from "./chinese.js";
import { classOf, drawClasses, listenToField } from "./classes.js";
import { at, counted, fill, make, words, write } from "./elements.js";
import { abilities, accept, decide, fetchTexts, skip, state, undo } from "./engine.js";
import { drawGrid, enlarge, focusCurrent } from "./grid.js";
import { drawProgress } from "./progress.js";

const VIEWS = ["next", "suspects", "labelled"];
const PAUSE = 2000; // milliseconds before an engine that is lost is asked again
const batch = new Batch();
const waiting = []; // {send, saved, dropped}: what the engine has not saved, in its order
let sending = false;
let again = null; // what `Try again` does
let known = null; // the newest state
let undoing = false; // until it is known which picture is the current one again
let alike = null; // {ids, labels}: the copies of the last labelled picture

/** Send a request after those before it; it waits until it is saved or given up. */
function request(send, saved, dropped = () => {}) {
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
  attempt(() => {});
}

/** Do something, and draw; if it fails, show the error and offer to do it again. */
async function attempt(action, repeat = () => attempt(action)) {
  try {
    await action();
    if (!waiting.length) warn("", null);
  } catch (error) {
    warn(error.message, repeat);
  }
  draw();
  focusCurrent();
}

function warn(text, repeat) {
  again = repeat;
  at("fault").hidden = !text;
  at("fault").firstElementChild.textContent = text;
}

/** Label pictures: null takes their labels away, undefined skips them. */
function give(ids, labels, name) {
  const done = labels ? words(labels) : labels === null ? "no label" : "skipped";
  const send = () => (labels === undefined ? skip(ids) : decide(ids.map((id) => ({ id, labels }))));
  const saved = () => {
    at("spoken").textContent = `${name}: ${done}`;
    batch.change(ids, labels !== null, (picture) => {
      picture.past.push({ labels: picture.labels, skipped: picture.skipped });
      Object.assign(picture, { pending: "", labels: labels ?? null, skipped: labels === undefined });
    });
  };
  batch.change(ids, true, (picture) => Object.assign(picture, { pending: done, draft: undefined }));
  request(send, saved, () => batch.change(ids, false, (picture) => (picture.pending = "")));
}

/** Answer for the current picture, and go on. */
function answer(labels) {
  const { current } = batch;
  if (!current || undoing) return;
  alike = labels && current.copies.length ? { ids: current.copies, labels } : null;
  give([current.id], labels, current.name);
  go(() => batch.advance());
}

/** Label the current picture with a class, or with several switch the class on or off. */
function choose(name) {
  const { current } = batch;
  if (!current) return;
  if (!known.several) return answer([name]);
  const labels = current.draft ?? current.labels ?? [];
  current.draft = labels.includes(name) ? labels.filter((one) => one !== name) : [...labels, name];
  draw();
}

function take(picture = batch.current) {
  if (picture !== batch.current) choosePlace(picture);
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
  draw();
  focusCurrent();
}

const choosePlace = (picture) => go(() => (batch.place = batch.pictures.indexOf(picture)));
const show = (picture) => (picture === batch.current ? enlarge(picture) : choosePlace(picture));

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
  if (!what || undoing) return;
  [alike, undoing] = [null, true];
  const saved = ({ ids }) => {
    at("spoken").textContent = `Undone: ${what}`;
    undoing = false;
    return batch.restore(ids);
  };
  request(undo, saved, () => (undoing = false));
}

const open = (view, name, times) => attempt(() => batch.open(view, name, times));
const acceptAll = (label, fit) => request(() => accept(label, fit), () => batch.open("next"));

function draw() {
  if (!known) return;
  const { view, name, current, total } = batch;
  const { several, pictures, classes } = known;
  const shown = total === null || current ? view : `no ${pictures ? view : "pictures"}`;
  Object.assign(document.body.dataset, { shown, several, classes: classes.length }); // style.css hides by them
  drawGrid(batch.pictures, current, { show, clear, take });
  drawClasses(classes, current, choose);
  drawProgress(known, open, acceptAll, view === "doubtful" ? name : undefined);
  for (const button of at("views").children) button.ariaPressed = button.dataset.view === view;
  Object.assign(at("undo"), { disabled: !known.undo && !waiting.length, title: known.undo ?? "" });
  write(at("copies"), alike ? `${alike.ids.length} alike: label all as “${words(alike.labels)}”` : "");
  write(at("drop"), waiting.length ? `Give up ${counted(waiting.length, "answer")}` : "");
  const option = (one) => make("option", { className: "name" }, one.name);
  fill(at("only"), classes.map((one) => one.name), () => [new Option("All classes", ""), ...classes.map(option)]);
  at("only").value = name;
  at("more").hidden = view === "next" || total <= batch.pictures.length;
  batch.prepare();
}

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const KEYS = {
  " ": () => take(),
  Enter: save,
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

document.onkeydown = (event) => {
  const { key, target } = event;
  if (!known || event.ctrlKey || event.metaKey || event.altKey || target.closest("input, select, #keys")) return;
  if ([" ", "Enter"].includes(key) && target.closest("button:not(.picture)")) return; // which they press
  const name = classOf(key);
  const action = name !== undefined ? () => choose(name) : key in MOVES ? () => go(() => batch.move(...MOVES[key])) : KEYS[key];
  if (action) event.preventDefault();
  if (action && (!event.repeat || key in MOVES)) action();
};
for (const button of document.querySelectorAll("[data-key]")) button.onclick = () => KEYS[button.dataset.key]();
for (const button of document.querySelectorAll("button[data-view]")) button.onclick = () => open(button.dataset.view);
at("only").onchange = () => open("labelled", at("only").value);
at("more").onclick = () => open(batch.view, batch.name, batch.times + 2);
at("again").onclick = () => again();
at("drop").onclick = () => giveUp(waiting.length);
window.onbeforeunload = () => (waiting.length ? "not saved" : null); // asks before what is not saved is lost
listenToField(choose, () => {
  at("name").blur();
  focusCurrent();
});

/** Follow the engine's state for as long as the page is open. */
async function follow() {
  for (let isLost = true; ; ) {
    try {
      known = await state(known?.version);
      draw();
      if (isLost) await (again ?? start)();
      isLost = false;
    } catch (error) {
      if (!again) warn(error.message, start); // else it is said already
      isLost = true;
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
    }
  }
}

async function start() {
  await open(batch.view, batch.name);
  if (!known.classes.length) at("name").focus();
}

translatePage(fetchTexts);
abilities.begin?.({ attempt });
follow();
