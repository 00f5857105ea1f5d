// Which pictures to label next: typical and different ones, then those that a classifier is unsure of, and some at random.
//
// A shorter form of analysis/labelling/order.py. Pictures are rows of directions (N, D), which were added in random order.

import { dot } from "./numbers.js";
import { rowsOf } from "./regression.js";

export const FEW = 50; // labels up to which typical pictures are offered
export const EVERY = 3; // one of so many pictures is offered at random, to judge
const SAMPLE = 2000; // the most pictures that k-means divides, whose time grows with them
const STEPS = 10; // of k-means
const ALIKE = 0.999; // the cosine of near-copies: more than that of any two of 2,500 pictures of CIFAR-10

/** Features (N, D) less their mean, at length 1. */
export function directions(features, D) {
  const [mean, N] = [new Float64Array(D), features.length / D];
  features.forEach((value, at) => (mean[at % D] += value / N));
  const unit = features.map((value, at) => value - mean[at % D]);
  for (let at = 0; at < unit.length; at += D) {
    const row = unit.subarray(at, at + D);
    const length = Math.sqrt(dot(row, row)) || 1;
    row.forEach((value, i) => (row[i] = value / length));
  }
  return unit;
}

/**
 * At most `count` rows of directions `unit`, [{id, reason, copies}]: of the open ones, and every third the next of
 * those that wait to judge. None has a near-copy among the labelled rows, or before it.
 *
 * @param kernel computes the matrix products; see numbers.js.
 * @param margins how sure a classifier is of each open row; null without one.
 */
export function next(unit, D, kernel, { open, waiting, labelled, count, margins }) {
  const judges = waiting.slice(0, count).map((id) => ({ id, reason: "at random, to measure the accuracy" }));
  const places = [...open.keys()].sort((a, b) => margins?.[a] - margins?.[b]);
  const unsure = () => places.slice(0, count).map((place) => ({ id: open[place], reason: "unsure" }));
  const chosen = margins && labelled.length >= FEW ? unsure() : typical(unit, D, kernel, open, labelled, count);
  const isJudge = (at) => (at % EVERY === EVERY - 1 && judges.length) || !chosen.length;
  const found = Array.from({ length: count }, (_, at) => (isJudge(at) ? judges : chosen).shift());
  return withCopies(unit, D, kernel, found.filter(Boolean), new Set([...open, ...waiting]), new Set(labelled));
}

/** Typical and different pictures: of each cluster without a labelled one the nearest to its centre, largest first. */
function typical(unit, D, kernel, open, labelled, count) {
  const rows = [...labelled, ...open].slice(0, labelled.length + SAMPLE);
  const x = rowsOf(unit, rows, D);
  const { cluster, distance } = clustersOf(x, D, kernel, Math.min(labelled.length + count, rows.length));
  const clusters = new Map();
  cluster.forEach((k, at) => clusters.set(k, [...(clusters.get(k) ?? []), at]));
  const without = [...clusters.values()].filter((places) => places[0] >= labelled.length);
  return without.sort((a, b) => b.length - a.length).map((places) => ({
    id: rows[places.reduce((best, at) => (distance[at] < distance[best] ? at : best))],
    reason: `typical of ${places.length} picture${places.length === 1 ? "" : "s"}`,
  }));
}

/** K-means, begun at the first k of rows x in random order: the cluster of each, and its distance to the centre. */
function clustersOf(x, D, kernel, k) {
  const N = x.length / D;
  const [centres, sizes] = [x.slice(0, k * D), new Float64Array(k)];
  const [cluster, distance] = [new Int32Array(N), new Float64Array(N)];
  for (let step = 0; step < STEPS; step++) {
    const centreOf = (c) => centres.subarray(c * D, (c + 1) * D);
    const lengths = [...sizes.keys()].map((c) => dot(centreOf(c), centreOf(c)));
    const products = kernel.product(x, N, { data: centres, outs: k, inner: D });
    distance.fill(Infinity);
    products.forEach((product, at) => {
      const [row, apart] = [Math.floor(at / k), lengths[at % k] - 2 * product];
      if (apart < distance[row]) [cluster[row], distance[row]] = [at % k, apart];
    });
    sizes.fill(0);
    for (const c of cluster) sizes[c]++;
    for (let at = 0; at < centres.length; at++) if (sizes[Math.floor(at / D)]) centres[at] = 0;
    x.forEach((value, at) => {
      const c = cluster[Math.floor(at / D)];
      centres[c * D + (at % D)] += value / sizes[c];
    });
  }
  return { cluster, distance };
}

/** The found pictures with the open near-copies of each, without copies of labelled ones and of those before. */
function withCopies(unit, D, kernel, found, open, labelled) {
  const N = unit.length / D;
  const asked = { data: rowsOf(unit, found.map(({ id }) => id), D), outs: found.length, inner: D };
  const alike = kernel.product(unit, N, asked); // (N, n)
  const gone = new Set();
  return found.flatMap(({ id, reason }, place) => {
    const copies = [...Array(N).keys()].filter((n) => n !== id && alike[n * found.length + place] > ALIKE);
    const isNew = !gone.has(id) && !copies.some((n) => labelled.has(n));
    for (const n of copies) gone.add(n);
    return isNew ? [{ id, reason, copies: copies.filter((n) => open.has(n)) }] : [];
  });
}

/** A list in a random order, always the same (Park and Miller 1988). */
export function shuffled(list) {
  let state = 20_000;
  const found = [...list];
  for (let at = found.length - 1; at > 0; at--) {
    state = (state * 48271) % 2147483647;
    const other = state % (at + 1);
    [found[at], found[other]] = [found[other], found[at]];
  }
  return found;
}
