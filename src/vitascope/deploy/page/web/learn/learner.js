// What a page that learns computes beside the model, in a thread of its own: classifiers and the order of labelling.

import { joined, plain } from "./numbers.js";
import { Order, directions } from "./order.js";
import { fitted, heldOut, judged, probabilitiesOf, rowsOf } from "./regression.js";
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
 * Fit the rows that were looked at, with labels below K: the classifier, the `probabilities` (N, K) of all pictures, and
 * those of the rows by the other folds, `heldOut` (n, K), with what they tell.
 */
tasks.fit = ({ rows, labels, K }) => {
  const own = rowsOf(all(), rows, D);
  const map = fitted(own, labels, K);
  const out = heldOut(own, labels, K);
  const tensors = { probabilities: { data: probabilitiesOf(features, map) }, heldOut: { data: out } };
  return { ...map, judged: judged(out, labels, K), tensors };
};

tasks.next = ({ open, labelled, count, margins }) => {
  return new Order(directions(all(), D), D, kernel).next(open, labelled, count, margins);
};
