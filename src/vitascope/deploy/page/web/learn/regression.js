// Multinomial logistic regression, the `LogisticRegression` of training/linear/classifiers.py: the same standardized
// features and the same objective, |W|^2 / 2 + C (sum of the losses), whose only minimum is found by L-BFGS.
//
// N pictures, D features, K classes; labels are numbers below K. Matrices are arrays row by row.

import { dot, softmax } from "./numbers.js";

const [EXACT, ROUGH] = [1e-6, 1e-3]; // the second for folds: probabilities within a few thousandths
const MOST_STEPS = 1000;
const MEMORY = 10; // steps that L-BFGS remembers
export const MOST_FOLDS = 10;
const MANY = 1000; // labels from which on half the folds do
const STRENGTH = 0.1; // C: a search for it on 20 labels often ends at answers of one class

/**
 * Fit features (N, D) of pictures with labels (N): {weight (K, D), bias (K)} of raw features.
 *
 * The bias of a class without pictures is -Infinity.
 */
export function fitted(features, labels, K, tolerance = EXACT) {
  const [N, D] = [labels.length, features.length / labels.length];
  const counts = countsOf(labels, K);
  const present = [...counts.keys()].filter((k) => counts[k]);
  const [weight, bias] = [new Float64Array(K * D), new Float64Array(K).fill(-Infinity)];
  if (present.length === 1) bias[present[0]] = 0;
  if (present.length < 2) return { weight, bias };
  const { mean, scale, X } = standardized(features, N, D);
  const C = present.length === 2 ? STRENGTH / 2 : STRENGTH; // two weights share the penalty of one
  const places = Int32Array.from(labels, (label) => present.indexOf(label));
  const solution = solved(X, places, present.map((k) => counts[k] / N), C, tolerance);
  present.forEach((k, place) => {
    const own = weight.subarray(k * D, (k + 1) * D);
    own.forEach((_, i) => (own[i] = solution[place * D + i] / scale[i]));
    bias[k] = solution[present.length * D + place] - dot(own, mean);
  });
  return { weight, bias };
}

/** The probabilities (n, K) of features (n, D). */
export function probabilitiesOf(features, { weight, bias }) {
  const [K, D] = [bias.length, weight.length / bias.length];
  const p = new Float64Array((features.length / D) * K);
  for (let row = 0; row * K < p.length; row++) logits(features, row, weight, bias, p.subarray(row * K, (row + 1) * K));
  return softmax(p, K);
}

/** The probabilities (N, K) of labelled pictures, each by a regression of the other folds. */
export function heldOut(features, labels, K, folds = foldsOf(labels, K)) {
  const [D, found] = [features.length / labels.length, new Float64Array(labels.length * K)];
  for (const fold of new Set(folds)) {
    const [out, others] = [[], []];
    folds.forEach((other, n) => (other === fold ? out : others).push(n));
    const map = fitted(rowsOf(features, others, D), others.map((n) => labels[n]), K, ROUGH);
    const p = probabilitiesOf(rowsOf(features, out, D), map);
    out.forEach((n, row) => found.set(p.subarray(row * K, (row + 1) * K), n * K));
  }
  return found;
}

/** A fold for each picture (N): the pictures of a class, in their order, in turn. */
export function foldsOf(labels, K) {
  const count = labels.length < MANY ? MOST_FOLDS : MOST_FOLDS / 2;
  const next = countsOf(labels, K).map((_, k) => k); // small classes begin in different folds
  return Array.from(labels, (label) => next[label]++ % count);
}

/** The place of the largest number. */
export const largest = (numbers) => numbers.reduce((best, value, at) => (value > numbers[best] ? at : best), 0);

/** Some rows (n, D) of features. */
export function rowsOf(features, rows, D) {
  const found = new Float32Array(rows.length * D);
  rows.forEach((row, place) => found.set(features.subarray(row * D, (row + 1) * D), place * D));
  return found;
}

/** How many labels there are of each class (K). */
export function countsOf(labels, K) {
  const counts = Array(K).fill(0);
  for (const label of labels) counts[label]++;
  return counts;
}

/** Features as {mean (D), scale (D), X (N, D)}; a constant one has an infinite scale, and is 0. */
function standardized(features, N, D) {
  const [mean, scale, X] = [new Float64Array(D), new Float64Array(D), Float64Array.from(features)];
  for (let at = 0; at < X.length; at++) mean[at % D] += X[at] / N;
  for (let at = 0; at < X.length; at++) scale[at % D] += (X[at] -= mean[at % D]) ** 2 / N;
  // The deviation of a constant feature may be a rounding error of its mean.
  scale.forEach((square, i) => (scale[i] = Math.sqrt(square) > 1e-7 * Math.abs(mean[i]) ? Math.sqrt(square) : Infinity));
  for (let at = 0; at < X.length; at++) X[at] /= scale[at % D];
  return { mean, scale, X };
}

/** The weights and biases (K D + K) of standardized features X, started at the shares of the classes (K). */
function solved(X, labels, shares, C, tolerance) {
  const [N, K] = [labels.length, shares.length];
  const D = X.length / N;
  const start = new Float64Array(K * D + K);
  start.set(shares.map(Math.log), K * D);

  function loss(w) {
    const [weight, bias, slope] = [w.subarray(0, K * D), w.subarray(K * D), w.slice().fill(0, K * D)];
    const p = new Float64Array(K);
    let value = dot(weight, weight) / 2;
    for (let n = 0; n < N; n++) {
      softmax(logits(X, n, weight, bias, p), K);
      value -= C * Math.log(p[labels[n]]);
      p[labels[n]] -= 1;
      for (let k = 0; k < K; k++) {
        const residual = C * p[k];
        slope[K * D + k] += residual;
        for (let i = 0, from = n * D, to = k * D; i < D; i++) slope[to + i] += residual * X[from + i];
      }
    }
    return { value, slope };
  }

  return minimum(loss, start, tolerance);
}

/** W x + b of a row x of features, into p (K). */
function logits(features, row, weight, bias, p) {
  const D = weight.length / bias.length;
  for (let k = 0, w = 0; k < bias.length; k++) {
    p[k] = bias[k];
    for (let at = row * D; at < (row + 1) * D; at++) p[k] += weight[w++] * features[at];
  }
  return p;
}

/** The minimum of a convex function by L-BFGS (Liu and Nocedal 1989), until a step would hardly lower it. */
function minimum(loss, x, tolerance) {
  const steps = [];
  let { value, slope } = loss(x);
  for (let count = 0; count < MOST_STEPS; count++) {
    const direction = descent(slope, steps);
    const fall = dot(slope, direction);
    let [length, next, found] = [2, null, null];
    do {
      length /= 2;
      if (-fall < tolerance ** 2 || length < 1e-9) return x; // the latter where rounding allows no lower value
      next = x.map((value, at) => value + length * direction[at]);
      found = loss(next);
    } while (!(found.value <= value + 1e-4 * length * fall));
    const [s, y] = [next.map((value, at) => value - x[at]), found.slope.map((value, at) => value - slope[at])];
    if (dot(s, y) > 0) steps.push({ s, y, curvature: dot(s, y) });
    if (steps.length > MEMORY) steps.shift();
    [x, value, slope] = [next, found.value, found.slope];
  }
  return x;
}

/** The negative gradient times the inverse Hessian, estimated from the last steps. */
function descent(slope, steps) {
  let d = slope.map((value) => -value);
  const shares = new Map();
  for (const step of steps.toReversed()) {
    const share = dot(step.s, d) / step.curvature;
    shares.set(step, share);
    d = d.map((value, i) => value - share * step.y[i]);
  }
  const last = steps.at(-1);
  const size = last ? last.curvature / dot(last.y, last.y) : 1 / Math.sqrt(dot(slope, slope));
  d = d.map((value) => size * value);
  for (const step of steps) {
    const factor = shares.get(step) - dot(step.y, d) / step.curvature;
    d = d.map((value, i) => value + factor * step.s[i]);
  }
  return d;
}
