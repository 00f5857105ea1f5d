// What a page that learns computes beside the model, in a thread of its own: classifiers and the order of labelling.

import { evidenceOf } from "./evidence.js";
import { joined, plain } from "./numbers.js";
import { Order, directions } from "./order.js";
import { FOLDS, fitted, heldOut, probabilitiesOf, rowsOf } from "./regression.js";
import { simdKernel } from "./simd.js";
import { tasks } from "./worker.js";

let [kernel, features, D] = [plain, new Float32Array(0), 0]; // features (N, D), in blocks until they are read
let blocks = [];

function all() {
  if (blocks.length) features = joined([features, ...blocks]);
  blocks = [];
  return features;
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
 * classifiers that did not see them, `out` (n, K), and what these tell. `elsewhere` is the accuracy of classifiers that
 * saw no picture of the same session.
 */
tasks.fit = ({ rows, labels, K, judges, sessions }) => {
  const own = rowsOf(all(), rows, D);
  const map = fitted(own, labels, K);
  const out = heldOut(own, labels, K);
  const tensors = { probabilities: { data: probabilitiesOf(features, map) }, out: { data: out } };
  const names = [...new Set(sessions)];
  const folds = sessions.map((session) => names.indexOf(session) % FOLDS);
  const elsewhere = names.length > 1 ? evidenceOf(heldOut(own, labels, K, folds), labels, K, judges).score : null;
  return { map, evidence: evidenceOf(out, labels, K, judges), elsewhere, tensors };
};

tasks.next = ({ open, labelled, count, margins }) => {
  return new Order(directions(all(), D), D, kernel).next(open, labelled, count, margins);
};
