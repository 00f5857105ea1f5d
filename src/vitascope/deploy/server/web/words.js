// The shown map in words: for the caption, the screen reader, the saved picture and the command line.

import { ANSWER } from "./answer.js";
import { mapOf, patchOf, queryOf, targetOf, view } from "./view.js";

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

/** The title of the shown map. */
export function titleOf(answer) {
  if (!answer.grid) return "Prediction";
  if (view.mode === "class" || !answer.inside) {
    return `${answer.about.methods[view.method]}: ${evidenceOf(answer)}`;
  }
  if (view.mode === "pca") return "Principal components: equal colours mean similar features";
  const query = queryOf(answer);
  if (view.mode === "similarity") {
    const patch = patchOf(answer);
    return `Similarity to the ${patch === null ? "mean of all patches" : tokenName(answer, query)}`;
  }
  const name = tokenName(answer, query);
  const whose = name.startsWith("all ") ? name : `the ${name}`;
  if (view.mode === "rollout") return `Rollout: flow into ${whose}, over all layers`;
  const isOne = query !== ANSWER || name === answer.inside.tokens[0];
  return `Layer ${view.layer}, ${headName()}: where ${whose} ${isOne ? "looks" : "look"}`;
}

/** A class map's content, `evidence for “dog”` or `no evidence for “dog”`. */
function evidenceOf(answer) {
  return `${isBlank(answer) ? "no " : ""}evidence for “${answer.label(targetOf(answer))}”`;
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
  return map.kind === "share" ? percent(map.cells[patch]) : map.cells[patch].toFixed(2);
}

/** The upper end of a map's scale. */
export function highest({ kind, most, row }) {
  if (kind === "share") return `${percent(most)}, ${(most * row.length).toFixed(1)} × uniform`;
  return { evidence: "most", cosine: "1", colours: "" }[kind];
}

/** The prediction as a sentence, for screen readers; empty for a model without a head. */
export function predictionOf(answer, count) {
  const classes = answer.top(count).map((index) => `${answer.label(index)} ${percent(answer.probabilities[index])}`);
  return classes.length ? `Prediction: ${classes.join(", ")}. ` : "";
}

/** `head 3`, or the mean. */
export function headName() {
  return view.head === "mean" ? "mean of the heads" : `head ${view.head}`;
}

/** The command that draws the same map; empty if there is none. */
export function commandOf(answer) {
  const parts = ["vitascope explain MODEL PICTURE"];
  if (view.mode === "class" || !answer.inside) {
    parts.push(`--method ${view.method} --target ${quoted(answer.label(targetOf(answer)))}`);
    return parts.join(" ");
  }
  if (["similarity", "pca"].includes(view.mode)) return "";
  const query = queryOf(answer);
  const isAnswer = query === ANSWER || (query === 0 && answer.inside.reads === answer.inside.tokens[0]);
  if (view.mode === "rollout") return isAnswer ? `${parts[0]} --method rollout` : "";
  if (!isAnswer && query < answer.prefix) return "";
  const patch = query - answer.prefix;
  const columns = answer.grid[1];
  parts.push(
    isAnswer ? "--method attention" : `--method patch --patch ${Math.floor(patch / columns)} ${patch % columns}`,
  );
  parts.push(`--layer ${view.layer}`);
  if (view.head !== "mean") parts.push(`--head ${view.head}`);
  return parts.join(" ");
}

/** A word, quoted for a shell if necessary. */
function quoted(text) {
  return /^[\w.,:/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
