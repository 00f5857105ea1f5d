// The keys: everything that a pointer can do.

import { ANSWER } from "./answer.js";
import { change, toggleOff, view, viewIn } from "./view.js";

const TYPED_IN = "input[type=search], input[type=password], select, dialog[open] *";
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/**
 * Listen to the keys.
 *
 * @param page {answer(), controls, open(), save(), help()}: the shown result, and the actions of keys.
 */
export function listen(page) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest(TYPED_IN)) return;
    if (event.key in MOVES && event.target.matches("input")) return; // a slider uses them itself
    if (act(event.key, page)) event.preventDefault();
  });
}

/** Run a key's action; false if it has none. */
function act(key, page) {
  const general = { o: page.open, s: page.save, "?": page.help };
  if (key in general) {
    general[key]();
    return true;
  }
  const answer = page.answer();
  if (!answer?.grid) return false;
  if (key === "g" && answer.about.methods) {
    change({ mode: "class", method: answer.about.explained.method });
    return true;
  }
  if (!answer.inside) return false;
  if (key in MOVES) {
    movePatch(answer, ...MOVES[key]);
    return true;
  }
  const shown = viewIn(answer).pointed ?? viewIn(answer).held; // a patch
  const inside = {
    "[": () => page.controls.step("layer", -1),
    "]": () => page.controls.step("layer", 1),
    ",": () => page.controls.step("head", -1),
    ".": () => page.controls.step("head", 1),
    m: () => change({ mode: "attention", head: "mean" }),
    c: () => change({ held: answer.inside.tokens[0] === "class token" ? 0 : ANSWER, pointed: null }),
    l: () => answer.about.methods && change({ mode: "lens" }),
    x: () => shown !== null && toggleOff(`patch${shown}`),
    f: () => change({ held: null }),
    Escape: () => change({ held: null }),
    a: () => change({ mode: "attention" }),
    r: () => change({ mode: "rollout" }),
    i: () => change({ mode: "similarity" }),
    p: () => change({ mode: "pca" }),
  };
  inside[key]?.();
  return key in inside;
}

/** Hold the next patch in a direction, from the held or pointed one, or from the middle. */
function movePatch({ grid: [rows, columns], prefix }, down, right) {
  const held = view.held !== null && view.held !== ANSWER && view.held >= prefix;
  const middle = Math.floor((rows - 1) / 2) * columns + Math.floor((columns - 1) / 2);
  const from = held ? view.held - prefix : (view.pointed ?? middle);
  const isFirst = !held && view.pointed === null;
  const row = Math.floor(from / columns) + (isFirst ? 0 : down);
  const column = (from % columns) + (isFirst ? 0 : right);
  if (row < 0 || column < 0 || row >= rows || column >= columns) return;
  change({
    held: prefix + row * columns + column,
    pointed: null,
    mode: ["class", "pca"].includes(view.mode) ? "attention" : view.mode,
  });
}
