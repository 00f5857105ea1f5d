// The view: one state for all pictures on the page, so that two of them show the same.

import { ANSWER } from "./answer.js";
import { coloursOf } from "./features.js";

/** The scale of attention ends at this many times the share of a uniform row, or higher. */
export const DARKEST = 4;

const NONE = [];

/** What every page begins with. */
export const FIRST = {
  mode: "attention", // or "rollout", "similarity", "pca", "class", "lens"
  layer: 0,
  head: "mean", // or a number
  held: null, // a token, or ANSWER; null follows the pointer
  pointed: null, // the patch under the pointer
  target: null, // a class; null is each picture's most probable one
  method: null, // that of a class; null is the one in which the first answer explains its class
  off: NONE, // the parts that are switched off: "head0.1", "attention0", "mlp2", "layer3", "patch7"
  strength: 0.8,
  smooth: false,
  sharp: true,
};

export const view = { ...FIRST };

let together = []; // the answers on the page, which share one scale
let used = null; // an answer of the model whose layers, heads, tokens and classes the view's numbers are
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

/** Make the model of an answer the one whose numbers the view has. */
export function use(answer) {
  if (used && used.source !== answer.source) {
    const { mode, layer, head, method, target } = viewIn(answer);
    const held = tokenIn(answer, view.held);
    used = answer;
    change({ mode, layer, head, method, held, off: NONE, pointed: null, target: view.target === null ? null : target });
  }
  used = answer;
}

/**
 * The view as an answer shows it: {mode, layer, head, method, target, query, patch, pointed, held}.
 *
 * The numbers in `view` are those of the model in use. Another model may have fewer layers and heads, another grid, other
 * tokens and classes: it shows its last layer, the mean of its heads, the patch in the same place, the token and the class
 * of the same name. `query` is the held token, else the patch under the pointer, else ANSWER; `patch` is its place in the
 * grid, null for other tokens; `pointed` and `held` are patches, or null.
 */
export function viewIn(answer) {
  const { inside, about, prefix } = answer;
  const pointed = patchIn(answer, view.pointed);
  const token = tokenIn(answer, view.held);
  const query = token ?? (pointed === null ? ANSWER : prefix + pointed);
  const placed = (one) => (one === null || one === ANSWER || one < prefix ? null : one - prefix);
  const isClass = !inside || (view.mode === "class" && about.methods);
  return {
    mode: isClass ? "class" : isOfClass(view.mode) && !about.methods ? "attention" : view.mode,
    layer: inside && Math.min(view.layer, inside.depth - 1),
    head: inside && view.head >= inside.heads ? "mean" : view.head,
    method: about.methods && !(view.method in about.methods) ? about.explained.method : view.method,
    target: classIn(answer, view.target) ?? answer.top(1)[0],
    query,
    patch: placed(query),
    pointed,
    held: placed(token),
  };
}

/** Whether a kind of map is that of a class. */
export function isOfClass(mode) {
  return mode === "class" || mode === "lens";
}

/** The parts that are off in a model. */
export function offIn(source) {
  return used && used.source !== source ? NONE : view.off;
}

/** Switch a part off, or on if it is off. */
export function toggleOff(part) {
  const others = view.off.filter((one) => one !== part);
  change({ off: others.length < view.off.length ? others : [...others, part] });
}

/** A token of the model in use as one of an answer's model; null and ANSWER stay. */
function tokenIn(answer, token) {
  if (token === null || token === ANSWER || !answer.inside || used.source === answer.source) return token;
  if (token >= used.prefix) return answer.prefix + patchIn(answer, token - used.prefix);
  const same = answer.inside.tokens.indexOf(used.inside.tokens[token]);
  return same < 0 ? ANSWER : same;
}

/** A patch of the model in use as the one in the same place of an answer's grid; null stays. */
function patchIn({ source, grid }, patch) {
  if (patch === null || used.source === source) return patch;
  const [rows, columns] = used.grid;
  const row = Math.floor(((Math.floor(patch / columns) + 0.5) / rows) * grid[0]);
  return row * grid[1] + Math.floor((((patch % columns) + 0.5) / columns) * grid[1]);
}

/** A class of the model in use as the one of the same name; null if there is none. */
function classIn(answer, target) {
  if (target === null || used.source === answer.source) return target;
  const same = answer.about.class_names.indexOf(used.label(target));
  return same < 0 ? null : same;
}

/** The query that is shown while nothing is held or pointed at, as a token of the controls. */
export function restOf({ inside }) {
  return inside.reads === inside.tokens[0] ? 0 : ANSWER;
}

/**
 * The map over a picture: {kind, cells, row, least, most}; null if it is not loaded.
 *
 * `cells` are the patches' values; the scale goes from `least` to `most`. `row` adds those of the other tokens, for the
 * kind "share" (attention and rollout). The other kinds are "evidence" (class maps), "chance" (lens), "cosine" (similarity) and "colours"
 * (principal components), which has `colours`, RGB bytes, in place of cells.
 */
export function mapOf(answer) {
  const { mode, layer, method, target, patch } = viewIn(answer);
  if (mode === "lens") {
    const maps = answer.classMap("lens", target); // of z_0 and of every layer, on one scale
    const cells = maps?.subarray((layer + 1) * answer.cells, (layer + 2) * answer.cells);
    return maps && { kind: "chance", cells, row: null, least: 0, most: maps.reduce((a, b) => Math.max(a, b)) };
  }
  if (mode === "class") {
    const cells = answer.classMap(method, target);
    return cells && { kind: "evidence", cells, row: null, least: 0, most: 1 };
  }
  if (mode === "similarity") {
    const least = Math.min(...together.filter(({ features }) => features).map(leastCosine));
    return { kind: "cosine", cells: answer.features.similarity(patch), row: null, least, most: 1 };
  }
  if (mode === "pca") {
    const alike = together.filter(({ source }) => source === answer.source);
    const colours = coloursOf(alike.map(({ features }) => features))[alike.indexOf(answer)];
    return { kind: "colours", colours, cells: null, row: null };
  }
  const row = rowOf(answer);
  if (!row) return null;
  // Relative to a uniform row, which is dark, and by which answers of different numbers of tokens can be compared.
  const most = Math.max(DARKEST, ...together.map((one) => one.tokens * largest(one))) / answer.tokens;
  return { kind: "share", cells: row.subarray(answer.prefix), row, least: 0, most };
}

/** The least cosine of the shown patch with another. */
function leastCosine(answer) {
  return Math.min(...answer.features.similarity(viewIn(answer).patch));
}

/** The shares (T) of the shown query; null if they are not loaded. */
function rowOf(answer) {
  const { mode, layer, head, query } = viewIn(answer);
  return mode === "rollout" ? answer.rollout(query) : answer.weights(layer, head, query);
}

/** The largest share of a patch in the shown row of an answer. */
function largest(answer) {
  const row = !isOfClass(viewIn(answer).mode) && rowOf(answer);
  return row ? row.subarray(answer.prefix).reduce((most, value) => Math.max(most, value), 0) : 0;
}
