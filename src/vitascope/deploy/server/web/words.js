// The shown map in words: for the caption, the screen reader, the saved picture and the command line.

import { ANSWER } from "./answer.js";
import { mapOf, viewIn } from "./view.js";

/** `12.3%`, with the digits that matter. */
export function percent(share) {
  const value = 100 * share;
  if (value >= 99.95) return "100%";
  if (value >= 9.95) return `${value.toFixed(1)}%`;
  return value >= 0.005 ? `${value.toFixed(2)}%` : "0%";
}

/** A class in the prediction, with a check mark if it is one of several that apply. */
export function guessOf(answer, index) {
  return `${answer.applies(index) ? "✓ " : ""}${answer.label(index)}`;
}

/** A place in the grid, counted from 0 as everywhere in vitascope. */
export function placeOf(answer, patch) {
  const columns = answer.grid[1];
  return `row ${Math.floor(patch / columns)}, column ${patch % columns}`;
}

/** A token's name. */
export function tokenName(answer, query) {
  if (query === ANSWER) return answer.inside.reads;
  if (query < answer.prefix) return answer.inside.tokens[query];
  return `patch in ${placeOf(answer, query - answer.prefix)}`;
}

/** A part that can be switched off, by its name in the view. */
export function partName(answer, part) {
  const [, kind, place, head] = /^([a-z]+)(\d+)\.?(\d*)$/.exec(part);
  if (kind === "patch") return tokenName(answer, answer.prefix + Number(place));
  if (kind === "head") return `layer ${place}, head ${head}`;
  return `${{ attention: "attention of ", mlp: "MLP of ", layer: "" }[kind]}layer ${place}`;
}

/** The title of the shown map. */
export function titleOf(answer) {
  if (!answer.grid) return "Prediction";
  const { mode, layer, head, method, query, patch, target } = viewIn(answer);
  if (mode === "lens") return `After layer ${layer}: “${answer.label(target)}” as read from each patch`;
  if (mode === "class") return `${answer.about.methods[method]}: ${evidenceOf(answer)}`;
  if (mode === "pca") return "Principal components: equal colours mean similar features";
  const name = tokenName(answer, query);
  if (mode === "similarity") return `Similarity to the ${patch === null ? "mean of all patches" : name}`;
  const whose = name.startsWith("all ") ? name : `the ${name}`;
  if (mode === "rollout") return `Rollout: flow into ${whose}, over all layers`;
  const isOne = query !== ANSWER || name === answer.inside.tokens[0];
  const whichHead = head === "mean" ? "mean of the heads" : `head ${head}`;
  return `Layer ${layer}, ${whichHead}: where ${whose} ${isOne ? "looks" : "look"}`;
}

/** A class map's content, `evidence for “dog”` or `no evidence for “dog”`. */
function evidenceOf(answer) {
  return `${isBlank(answer) ? "no " : ""}evidence for “${answer.label(viewIn(answer).target)}”`;
}

/** The note across a class map that is zero everywhere; empty for any other map. */
export function noteOf(answer) {
  return isBlank(answer) ? evidenceOf(answer) : "";
}

function isBlank(answer) {
  const map = answer.grid && mapOf(answer);
  return map?.kind === "evidence" && map.cells.every((value) => value === 0);
}

/** A patch's value in a map; empty where colours have none. */
export function valueOf(map, patch) {
  if (map.kind === "colours") return "";
  return ["share", "chance"].includes(map.kind) ? percent(map.cells[patch]) : map.cells[patch].toFixed(2);
}

/** The lower end of a map's scale. */
export function lowest({ kind, least }) {
  return kind === "cosine" ? least.toFixed(2) : "0";
}

/** The upper end of a map's scale. */
export function highest({ kind, most, row }) {
  if (kind === "share") return `${percent(most)}, ${(most * row.length).toFixed(1)} × uniform`;
  return { evidence: "most", cosine: "1.00", chance: percent(most) }[kind];
}

/** The prediction as a sentence, for screen readers; empty for a model without a head. */
export function predictionOf(answer, count) {
  const classes = answer.top(count).map((index) => `${answer.label(index)} ${percent(answer.probabilities[index])}`);
  return classes.length ? `Prediction: ${classes.join(", ")}. ` : "";
}

/** The command that draws the same map; empty if there is none. */
export function commandOf(answer) {
  const { mode, layer, head, method, target, query, patch } = viewIn(answer);
  const parts = ["vitascope explain MODEL PICTURE"];
  if (mode === "class") return [...parts, `--method ${method} --target ${quoted(answer.label(target))}`].join(" ");
  if (["similarity", "pca", "lens"].includes(mode) || answer.off.length) return "";
  const isAnswer = query === ANSWER || (query === 0 && answer.inside.reads === answer.inside.tokens[0]);
  if (mode === "rollout") return isAnswer ? `${parts[0]} --method rollout` : "";
  if (!isAnswer && patch === null) return "";
  const columns = answer.grid[1];
  parts.push(
    isAnswer ? "--method attention" : `--method patch --patch ${Math.floor(patch / columns)} ${patch % columns}`,
  );
  parts.push(`--layer ${layer}`);
  if (head !== "mean") parts.push(`--head ${head}`);
  return parts.join(" ");
}

/** A word, quoted for a shell if necessary. */
function quoted(text) {
  return /^[\w.,:/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
