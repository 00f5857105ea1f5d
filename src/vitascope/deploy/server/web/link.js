// The view in the address, so that it can be sent, kept and reloaded: #sample=dog&layer=3&head=1&patch=2,5

import { ANSWER } from "./answer.js";
import { FIRST, isOfClass, view } from "./view.js";

const PARTS = /^((head\d+\.|attention|mlp|layer|patch)\d+(,(?=.)|$))+$/; // which the model checks itself

/** The view as the fragment of an address; what every page begins with is left out. */
export function linkOf(answer, sample) {
  const parts = { sample, mode: view.mode, layer: view.layer, head: view.head, off: view.off };
  const { inside, prefix } = answer;
  if (inside && view.held !== null) {
    if (view.held === ANSWER) parts.query = inside.reads;
    else if (view.held < prefix) parts.query = inside.tokens[view.held];
    else parts.patch = `${Math.floor((view.held - prefix) / answer.grid[1])},${(view.held - prefix) % answer.grid[1]}`;
  }
  if (isOfClass(view.mode) || !inside) Object.assign(parts, { method: view.method, class: view.target });
  const kept = Object.entries(parts).filter(([name, value]) => value !== null && `${value}` !== `${FIRST[name]}`);
  return kept.length ? `#${new URLSearchParams(kept)}` : "";
}

/** The parts of a link by name, as text. */
export function readLink(fragment) {
  return Object.fromEntries(new URLSearchParams(fragment.slice(1)));
}

/**
 * The changes of the view that a link asks of an answer.
 *
 * Throws an error that names the part if the model has no such layer, head, patch, token, method or class.
 */
export function viewOf(link, answer) {
  const { inside, about, grid, prefix } = answer;
  const wanted = {};
  const modes = [...(inside ? ["attention", "rollout", "similarity", "pca"] : []), ...(about.methods ? ["class"] : [])];
  if (inside && about.methods) modes.push("lens");
  if ("mode" in link) wanted.mode = oneOf("mode", link.mode, modes);
  if ("layer" in link) wanted.layer = below("layer", link.layer, inside?.depth ?? 0);
  if ("head" in link) wanted.head = link.head === "mean" ? "mean" : below("head", link.head, inside?.heads ?? 0);
  if ("patch" in link) {
    const [row, column = ""] = link.patch.split(",");
    const [rows, columns] = inside ? grid : [0, 0];
    wanted.held = prefix + below("row", row, rows) * columns + below("column", column, columns);
  }
  if ("query" in link) {
    const token = inside ? inside.tokens.indexOf(link.query) : -1;
    if (token < 0) oneOf("query", link.query, inside ? [...inside.tokens, inside.reads] : []);
    wanted.held = token < 0 ? ANSWER : token;
  }
  if ("off" in link) wanted.off = PARTS.test(link.off) ? link.off.split(",") : oneOf("parts", link.off, ["mlp0"]);
  if ("method" in link) wanted.method = oneOf("method", link.method, Object.keys(about.methods ?? {}));
  if ("class" in link) wanted.target = below("class", link.class, answer.probabilities.length);
  return wanted;
}

function below(name, text, count) {
  const value = /^\d+$/.test(text) ? Number(text) : NaN;
  if (value < count) return value;
  const range = count ? `they are 0 to ${count - 1}` : "it has none";
  throw new Error(`The link names ${name} ${text}, which this model does not have: ${range}.`);
}

function oneOf(name, text, known) {
  if (known.includes(text)) return text;
  throw new Error(`The link names the ${name} “${text}”, which this model does not have; it has ${known.join(", ") || "none"}.`);
}
