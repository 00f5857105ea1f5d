// The view: one state for all pictures on the page, so that two of them show the same.

import { ANSWER } from "./answer.js";
import { coloursOf } from "./features.js";

/** The scale of attention ends at this many times the share of a uniform row, or higher. */
export const DARKEST = 4;

/** What every page begins with. */
export const FIRST = {
  mode: "attention", // or "rollout", "similarity", "pca", "class"
  layer: 0,
  head: "mean", // or a number
  held: null, // a token, or ANSWER; null follows the pointer
  pointed: null, // the patch under the pointer
  target: null, // a class; null is each picture's most probable one
  method: "grad-cam",
  strength: 0.8,
  smooth: false,
  sharp: true,
};

export const view = { ...FIRST };

let together = []; // the answers on the page, which share one scale
const listeners = [];
let waiting = false;

/** Call `draw` after each change, at most once per frame. */
export function onChange(draw) {
  listeners.push(draw);
}

/** Change the view, and draw everything that depends on it before the next frame. */
export function change(values) {
  if (Object.keys(values).every((name) => Object.is(view[name], values[name]))) return;
  Object.assign(view, values);
  redraw();
}

/** Draw everything before the next frame. */
export function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const draw of listeners) draw();
  });
}

/** Set the answers whose maps share one scale. */
export function share(answers) {
  together = answers;
}

/** The query whose attention is shown: the held token, else the patch under the pointer, else ANSWER. */
export function queryOf(answer) {
  if (view.held !== null) return view.held;
  return view.pointed === null ? ANSWER : answer.prefix + view.pointed;
}

/** The query that is shown while nothing is held or pointed at, as a token of the controls. */
export function restOf({ inside }) {
  return inside.reads === inside.tokens[0] ? 0 : ANSWER;
}

/** Hold a patch, or release it if it is held. */
export function toggleHold(answer, patch) {
  const token = answer.prefix + patch;
  change({ held: view.held === token ? null : token });
}

/** The class of a picture's class map. */
export function targetOf(answer) {
  return view.target ?? answer.top(1)[0];
}

/** The patch whose similarity to the others is shown; null for the mean of all. */
export function patchOf(answer) {
  const query = queryOf(answer);
  return query === ANSWER || query < answer.prefix ? null : query - answer.prefix;
}

/**
 * The map over a picture: {kind, cells, row, most}; null if it is not loaded.
 *
 * `cells` are the patches' values, from 0 to `most`, where the scale ends. `row` adds those of the other tokens, for the
 * kind "share" (attention and rollout). The other kinds are "evidence" (class maps), "cosine" (similarity) and "colours"
 * (principal components), which has `colours`, RGB bytes, in place of cells.
 */
export function mapOf(answer) {
  if (view.mode === "class" || !answer.inside) {
    const cells = answer.classMap(view.method, targetOf(answer));
    return cells && { kind: "evidence", cells, row: null, most: 1 };
  }
  if (view.mode === "similarity") {
    return { kind: "cosine", cells: answer.features.similarity(patchOf(answer)), row: null, most: 1 };
  }
  if (view.mode === "pca") {
    const colours = coloursOf(together.map(({ features }) => features))[together.indexOf(answer)];
    return { kind: "colours", colours, cells: null, row: null, most: 1 };
  }
  const row = rowOf(answer);
  if (!row) return null;
  const least = DARKEST / answer.tokens; // so that a row that looks everywhere is not shown as if it looked somewhere
  return { kind: "share", cells: row.subarray(answer.prefix), row, most: Math.max(least, ...together.map(largest)) };
}

/** The shares (T) of the shown query; null if they are not loaded. */
function rowOf(answer) {
  const query = queryOf(answer);
  return view.mode === "rollout" ? answer.rollout(query) : answer.weights(view.layer, view.head, query);
}

/** The largest share of a patch in the shown row of an answer. */
function largest(answer) {
  const row = answer.inside && rowOf(answer);
  return row ? row.subarray(answer.prefix).reduce((most, value) => Math.max(most, value), 0) : 0;
}
