// What a page that learns computes beside the model, in a thread of its own: classifiers and the order of labelling.

import { evidenceOf } from "./evidence.js";
import { joined, plain } from "./numbers.js";
import { directions, next } from "./order.js";
import { MOST_FOLDS, fitted, heldOut, probabilitiesOf, rowsOf } from "./regression.js";
import { simdKernel } from "./simd.js";
import { tasks } from "./worker.js";

let [kernel, D] = [plain, 0];
let blocks = []; // of features (N, D)

function all() {
  if (blocks.length !== 1) blocks = [joined(blocks)];
  return blocks[0];
}

tasks.prepare = ({ programs }) => {
  kernel = simdKernel(programs) ?? plain;
};

/** Append features (n, width). */
tasks.keep = ({ values, width }) => {
  D = width;
  blocks.push(values);
};

/**
 * Fit rows with labels below K: the classifier `map`, the `probabilities` (N, K) of all pictures, those of the rows by
 * classifiers that did not see them, `out` (n, K), and what these tell. `margins` (N) is how sure a classifier is without
 * the pictures that judge. `elsewhere` is the accuracy of classifiers that saw no picture of the same session.
 */
tasks.fit = ({ rows, labels, K, judges, sessions }) => {
  const features = all();
  const own = rowsOf(features, rows, D);
  const map = fitted(own, labels, K);
  const steering = [...rows.keys()].filter((at) => !judges[at]);
  const labelsOf = steering.map((at) => labels[at]);
  const other = new Set(labelsOf).size > 1 ? fitted(rowsOf(own, steering, D), labelsOf, K) : map;
  const [probabilities, out, p] = [probabilitiesOf(features, map), heldOut(own, labels, K), probabilitiesOf(features, other)];
  const margins = Float64Array.from({ length: p.length / K }, (_, n) => {
    const [second, most] = p.slice(n * K, (n + 1) * K).sort().slice(-2);
    return most - second;
  });
  const names = [...new Set(sessions)];
  const folds = sessions.map((session) => names.indexOf(session) % MOST_FOLDS);
  const elsewhere = names.length > 1 ? evidenceOf(heldOut(own, labels, K, folds), labels, K, judges).score : null;
  const tensors = { probabilities: { data: probabilities }, out: { data: out }, margins: { data: margins } };
  return { map, evidence: evidenceOf(out, labels, K, judges), elsewhere, tensors };
};

tasks.next = (asked) => next(directions(all(), D), D, kernel, asked);
