// The patches' features: how similar they are to one of them, and colours of their principal components.

const COMPONENTS = 3; // red, green, blue
const ROUNDS = 100; // of the power iteration, at most
const SETTLED = 1e-5;

export class Features {
  /** @param tensors `features` (N, D), as numbers or as int8 with `features_scale` (N). */
  constructor({ features, features_scale: scales = null }) {
    const [N, D] = features.shape;
    Object.assign(this, { N, D, last: null });
    const scaleOf = (at) => (scales ? scales.data[Math.floor(at / D)] : 1);
    this.rows = Float32Array.from(features.data, (level, at) => level * scaleOf(at));
    this.lengths = Float32Array.from({ length: N }, (_, patch) => Math.hypot(...this.row(patch)));
  }

  row(patch) {
    return this.rows.subarray(patch * this.D, (patch + 1) * this.D);
  }

  /** The cosine of every patch (N) with one patch; with the mean of all if `patch` is null. */
  similarity(patch) {
    if (this.last?.patch !== patch) {
      const to = patch === null ? mean([this]) : this.row(patch);
      const length = Math.hypot(...to) || 1;
      const cells = this.lengths.map((own, other) => dot(this.row(other), to) / (own * length || 1));
      this.last = { patch, cells };
    }
    return this.last.cells;
  }
}

const painted = []; // {of, colours}: the last ones
const KEPT = 2; // a page has at most two models

/**
 * The colours of each picture's patches, RGB bytes (N * 3): the first three principal components of all patches of
 * all pictures, each from its least to its largest value, so that equal colours mean similar features.
 */
export function coloursOf(pictures) {
  const isSame = ({ of }) => pictures.length === of.length && pictures.every((one, at) => one === of[at]);
  let found = painted.find(isSame);
  if (!found) {
    found = { of: pictures, colours: paint(pictures) };
    painted.unshift(found);
    painted.length = Math.min(painted.length, KEPT);
  }
  return found.colours;
}

function paint(pictures) {
  const middle = mean(pictures);
  const centred = pictures.flatMap((one) =>
    Array.from({ length: one.N }, (_, patch) => one.row(patch).map((value, at) => value - middle[at])),
  );
  const colours = new Uint8ClampedArray(3 * centred.length);
  for (let component = 0; component < COMPONENTS; component++) {
    const axis = principal(centred);
    const scores = centred.map((row) => dot(row, axis));
    centred.forEach((row, at) => row.forEach((_, d) => (row[d] -= scores[at] * axis[d])));
    const [least, largest] = [Math.min(...scores), Math.max(...scores)];
    const range = largest - least || 1;
    // The sign of a component means nothing: the score furthest from zero becomes the bright end.
    const turned = -least > largest;
    scores.forEach((score, at) => {
      colours[3 * at + component] = (255 * (turned ? largest - score : score - least)) / range;
    });
  }
  let begin = 0;
  return pictures.map(({ N }) => colours.subarray(3 * begin, 3 * (begin += N)));
}

/** The direction (D) in which centred rows vary most, by power iteration on their covariance. */
function principal(rows) {
  let axis = unit(rows.reduce((a, b) => (dot(b, b) > dot(a, a) ? b : a)));
  for (let round = 0; round < ROUNDS; round++) {
    const next = new Float32Array(axis.length);
    for (const row of rows) {
      const score = dot(row, axis);
      for (let d = 0; d < next.length; d++) next[d] += score * row[d];
    }
    const turned = unit(next);
    const moved = 1 - Math.abs(dot(turned, axis));
    axis = turned;
    if (moved < SETTLED * SETTLED) break;
  }
  return axis;
}

function mean(pictures) {
  const sum = new Float32Array(pictures[0].D);
  let count = 0;
  for (const one of pictures) {
    for (let at = 0; at < one.rows.length; at++) sum[at % one.D] += one.rows[at];
    count += one.N;
  }
  return sum.map((value) => value / count);
}

function unit(vector) {
  const length = Math.sqrt(dot(vector, vector)) || 1;
  return vector.map((value) => value / length);
}

function dot(a, b) {
  let sum = 0;
  for (let at = 0; at < a.length; at++) sum += a[at] * b[at];
  return sum;
}
