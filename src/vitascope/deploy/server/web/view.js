// The view: one state for all pictures on the page, so that two of them show the same.

import { ANSWER } from "./answer.js";

export const view = {
  mode: "attention", // or "rollout", "class"
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

/**
 * The map over a picture: {cells, row, most}; null if it is not loaded.
 *
 * `cells` are the patches' values; `row` adds those of the other tokens, for attention and rollout.
 */
export function mapOf(answer) {
  if (view.mode === "class" || !answer.inside) {
    const cells = answer.classMap(view.method, targetOf(answer));
    return cells && { cells, row: null, most: 1 };
  }
  const query = queryOf(answer);
  const row = view.mode === "rollout" ? answer.rollout(query) : answer.weights(view.layer, view.head, query);
  if (!row) return null;
  const cells = row.subarray(answer.prefix);
  return { cells, row, most: cells.reduce((most, value) => Math.max(most, value), 0) };
}
