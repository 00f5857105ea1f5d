// Which pictures to label next, as analysis/labelling/order.py: typical and different ones, then unsure ones.
//
// Pictures are rows of features of length 1 (N, D); `rows` are lists of their numbers.

import { dot, joined } from "./numbers.js";
import { rowsOf } from "./regression.js";

export const FEW = 50; // labels up to which typical pictures are offered
const ROUND = 10; // the fewest typical pictures of one k-means
const POOL = 5; // unsure pictures are chosen among so many times their number
const SAMPLE = 2000; // the most pictures that k-means divides, whose time grows with them
const STEPS = 10; // of k-means
const ALIKE = 0.999; // the cosine of near-copies, of features less their mean

/** Features (N, D) less their mean, at length 1; equal ones are zeros. */
export function directions(features, D) {
  const [mean, N] = [new Float64Array(D), features.length / D];
  features.forEach((value, at) => (mean[at % D] += value / N));
  const unit = features.map((value, at) => value - mean[at % D]);
  for (let at = 0; at < unit.length; at += D) {
    const row = unit.subarray(at, at + D);
    const length = Math.sqrt(dot(row, row));
    if (length > 1e-6) for (let i = 0; i < D; i++) row[i] /= length;
  }
  return unit;
}

export class Order {
  /**
   * @param unit directions (N, D).
   * @param kernel computes the matrix products; see numbers.js.
   */
  constructor(unit, D, kernel) {
    Object.assign(this, { unit, D, kernel });
  }

  /**
   * At most `count` of the open rows, [{id, reason, copies}]; none has a near-copy among the labelled rows, or before it.
   *
   * @param margins how sure a classifier is of each open row; null without one.
   */
  next(open, labelled, count, margins) {
    const few = Math.min(count, Math.max(0, FEW - labelled.length));
    const typical = this.typical(open, labelled, few);
    const sizes = this.sizes(open, typical);
    const found = typical.map((id, place) => ({ id, reason: `typical of ${counted(sizes[place])}` }));
    const rest = open.filter((row) => !typical.includes(row));
    const sure = new Map(open.map((row, place) => [row, margins?.[place]]));
    const others = margins ? this.unsure(rest, sure, count - found.length) : shuffled(rest);
    const reason = margins ? "unsure" : "at random";
    for (const id of others.slice(0, count - found.length)) found.push({ id, reason });
    return this.withCopies(found, new Set(open), new Set(labelled));
  }

  /** Rows of typical and different pictures: of each cluster without a known one the nearest to its centre. */
  typical(open, known, count) {
    const found = [];
    while (found.length < Math.min(count, open.length)) {
      const covered = [...known, ...found];
      const more = Math.max(ROUND, covered.length >> 1);
      const rows = [...covered, ...shuffled(open.filter((row) => !found.includes(row)))].slice(0, SAMPLE + covered.length);
      const { cluster, distance } = this.clusters(rows, covered.length + more);
      const taken = new Set(cluster.slice(0, covered.length));
      const clusters = groupsOf(rows.keys(), (at) => cluster[at]);
      const nearest = [...clusters.entries()]
        .filter(([number]) => !taken.has(number))
        .sort(([, a], [, b]) => b.length - a.length)
        .map(([, places]) => rows[places.reduce((best, at) => (distance[at] < distance[best] ? at : best))]);
      const rest = nearest.length ? nearest : rows.slice(covered.length); // the others are equal to known ones
      found.push(...rest.slice(0, more));
    }
    return found.slice(0, count);
  }

  /** Rows of small margins, of each cluster of them the least, then the others. */
  unsure(rows, sure, count) {
    const pool = [...rows].sort((a, b) => sure.get(a) - sure.get(b)).slice(0, POOL * count);
    if (!pool.length) return [];
    const { cluster } = this.clusters(pool, count);
    const first = pool.filter((_, at) => cluster.indexOf(cluster[at]) === at);
    return [...first, ...pool.filter((row) => !first.includes(row))].slice(0, count).sort((a, b) => sure.get(a) - sure.get(b));
  }

  /** How many open rows are nearest to each of the chosen ones. */
  sizes(open, chosen) {
    const sizes = chosen.map(() => 0);
    if (chosen.length) for (const place of this.nearest(open, rowsOf(this.unit, chosen, this.D)).cluster) sizes[place]++;
    return sizes;
  }

  /** The found pictures with the open near-copies of each, without copies of labelled ones and of those before. */
  withCopies(found, open, labelled) {
    const { unit, D, kernel } = this;
    const N = unit.length / D;
    const alike = kernel.product(unit, N, { data: rowsOf(unit, found.map(({ id }) => id), D), outs: found.length, inner: D });
    const gone = new Set();
    return found.flatMap((picture, place) => {
      const copies = [];
      for (let n = 0; n < N; n++) if (n !== picture.id && alike[n * found.length + place] > ALIKE) copies.push(n);
      const isNew = !gone.has(picture.id) && !copies.some((n) => labelled.has(n));
      for (const n of copies) gone.add(n);
      return isNew ? [{ ...picture, copies: copies.filter((n) => open.has(n)) }] : [];
    });
  }

  /** K-means, begun at centres far from each other (k-means++): the cluster of each row and its distance. */
  clusters(rows, k) {
    const { unit, D } = this;
    const random = randomNumbers();
    const at = (row) => unit.subarray(row * D, (row + 1) * D);
    let centres = new Float32Array(0);
    const least = rows.map(() => 2);
    for (let total = 1; centres.length < Math.min(k, rows.length) * D && total > 1e-9; ) {
      let left = random() * least.reduce((sum, value) => sum + value, 0);
      const chosen = at(rows[Math.max(0, least.findIndex((value) => value > 0 && (left -= value) <= 0))]);
      centres = joined([centres, chosen]);
      rows.forEach((row, place) => {
        const distance = 2 - 2 * dot(at(row), chosen);
        least[place] = distance > 1e-6 ? Math.min(least[place], distance) : 0;
      });
      total = least.reduce((sum, value) => sum + value, 0);
    }
    let found = this.nearest(rows, centres);
    for (let step = 0; step < STEPS; step++) {
      const sizes = new Float64Array(centres.length / D);
      const sums = new Float64Array(centres.length);
      found.cluster.forEach((cluster, place) => {
        sizes[cluster]++;
        at(rows[place]).forEach((value, i) => (sums[cluster * D + i] += value));
      });
      centres = centres.map((value, i) => (sizes[Math.floor(i / D)] ? sums[i] / sizes[Math.floor(i / D)] : value));
      found = this.nearest(rows, centres);
    }
    return found;
  }

  /** The nearest centre of each row, and its squared distance. */
  nearest(rows, centres) {
    const { unit, D, kernel } = this;
    const k = centres.length / D;
    const lengths = Array.from({ length: k }, (_, c) => dot(centres.subarray(c * D, (c + 1) * D), centres.subarray(c * D, (c + 1) * D)));
    const products = kernel.product(rowsOf(unit, rows, D), rows.length, { data: centres, outs: k, inner: D });
    const [cluster, distance] = [new Int32Array(rows.length), new Float64Array(rows.length).fill(Infinity)];
    for (let at = 0; at < products.length; at++) {
      const [place, c] = [Math.floor(at / k), at % k];
      const apart = 1 + lengths[c] - 2 * products[at];
      if (apart < distance[place]) [cluster[place], distance[place]] = [c, apart];
    }
    return { cluster, distance };
  }
}

const counted = (count) => `${count.toLocaleString("en")} picture${count === 1 ? "" : "s"}`;

function groupsOf(values, keyOf) {
  const groups = new Map();
  for (const value of values) groups.set(keyOf(value), [...(groups.get(keyOf(value)) ?? []), value]);
  return groups;
}

/** The same random numbers in [0, 1) each time (mulberry32). */
function randomNumbers() {
  let state = 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

function shuffled(rows) {
  const [random, found] = [randomNumbers(), [...rows]];
  for (let at = found.length - 1; at > 0; at--) {
    const other = Math.floor(random() * (at + 1));
    [found[at], found[other]] = [found[other], found[at]];
  }
  return found;
}
