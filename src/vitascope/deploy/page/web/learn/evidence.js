// What answers of classifiers that did not see the pictures tell, as analysis/labelling/fit.py: how often they are right,
// which of them need no look, and which labels contradict them.
//
// Pictures that are typical, or that a classifier is unsure of, are not like the others. So only those that were offered
// at random, the `judges`, say how often answers are right.

import { countsOf, largest } from "./regression.js";

const Z = 1.959964; // of 95% intervals
const TAIL = 0.025; // below and above them
const LEAST = 0.9; // answers are accepted if the lower limit of their share of right ones is at least this

/**
 * The evidence of probabilities (n, K), each of a picture that its classifier did not see, beside the labels (n):
 * {score, confused, suspects, sure, reason}.
 *
 * @param judges whether each picture judges, (n).
 */
export function evidenceOf(probabilities, labels, K, judges) {
  const rows = Array.from(labels, (label, n) => ({ n, label, p: probabilities.subarray(n * K, (n + 1) * K) }));
  const counts = countsOf(labels, K);
  const measured = rows.filter(({ label }) => counts[label] > 1);
  if (new Set(measured.map(({ label }) => label)).size < 2) {
    const reason = "too few labels: an accuracy needs two pictures of two classes each";
    return { score: null, confused: null, suspects: [], sure: null, reason };
  }
  const judging = measured.filter(({ n }) => judges[n]);
  const isRight = ({ label, p }) => largest(p) === label;
  const answers = rows.filter(({ n }) => judges[n]).map((row) => ({ confidence: Math.max(...row.p), right: isRight(row) }));
  return {
    score: judging.length ? { ...wilson(judging.filter(isRight).length, judging.length), labels: judging.length } : null,
    confused: confusedOf(measured, K),
    suspects: suspectsOf(measured, K),
    sure: surest(answers),
    reason: judging.length ? "" : "no accuracy yet: label the next pictures that come at random",
  };
}

/** The most frequent wrong answer {label, said, count}; null without one. */
function confusedOf(rows, K) {
  const wrong = rows.filter(({ label, p }) => largest(p) !== label);
  const pairs = countsOf(wrong.map(({ label, p }) => label * K + largest(p)), K * K);
  const pair = largest(pairs);
  return wrong.length ? { label: Math.floor(pair / K), said: pair % K, count: pairs[pair] } : null;
}

/** The places of labels that may be wrong, the least probable first, as many as confident learning says (label_errors.py). */
function suspectsOf(rows, K) {
  const [counts, own] = [Array(K).fill(0), Array(K).fill(0)];
  for (const { label, p } of rows) [counts[label], own[label]] = [counts[label] + 1, own[label] + p[label]];
  const contradicts = ({ label, p }) =>
    p.some((value, k) => k !== label && counts[k] && value > 0.5 && value * counts[k] >= own[k]);
  const least = [...rows].sort((a, b) => a.p[a.label] - b.p[b.label]).slice(0, rows.filter(contradicts).length);
  return least.filter(({ label, p }) => largest(p) !== label).map(({ n }) => n);
}

/**
 * The least confidence of answers [{confidence, right}] that are accepted with the share of right ones, by Laplace's rule,
 * and its exact interval (Clopper and Pearson 1934), {least, value, low, high}; null if there is none.
 *
 * Sets of the surest answers are tested from the smallest that can pass, up to the first that does not (Angelopoulos et
 * al. 2021, Learn then Test). Of these, the largest of those with the highest lower limit is taken.
 */
export function surest(answers) {
  const falling = [...answers].sort((a, b) => b.confidence - a.confidence);
  let [right, best] = [0, null];
  for (const [at, { confidence: least, ...one }] of falling.entries()) {
    const total = at + 1;
    right += one.right;
    if (falling[total]?.confidence === least || LEAST ** total > TAIL) continue;
    const low = lowest(right, total);
    if (low < LEAST) break;
    const value = (right + 1) / (total + 2);
    if (!best || low >= best.low) best = { least, value, low, high: 1 - lowest(total - right, total) };
  }
  return best;
}

/** The share of which so many right ones of all are just improbable. */
function lowest(right, total) {
  let [low, high] = [0, right ? 1 : 0];
  for (let step = 0; step < 50; step++) {
    const middle = (low + high) / 2;
    if (atLeast(right, total, middle) > TAIL) high = middle;
    else low = middle;
  }
  return low;
}

/** The probability of at least so many right ones of all, of a share p. */
function atLeast(right, total, p) {
  let [log, sum] = [total * Math.log(p), 0];
  for (let count = total; count >= right; count--) {
    sum += Math.exp(log);
    log += Math.log((count / (total - count + 1)) * (1 / p - 1));
  }
  return sum;
}

/** A share with its 95% interval (Wilson 1927). */
export function wilson(right, total) {
  const [value, spread] = [right / total, Z ** 2 / total];
  const centre = (value + spread / 2) / (1 + spread);
  const half = (Z / (1 + spread)) * Math.sqrt((value * (1 - value)) / total + spread / (4 * total));
  return { value, low: right === 0 ? 0 : centre - half, high: right === total ? 1 : centre + half };
}
