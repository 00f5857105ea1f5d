// Numbers in plain arrays: matrices (rows, columns) are Float32Arrays, row by row.

/** The kernel in plain arrays. Every kernel has these: `name`, `expect`, `keep` and `product`. */
export const plain = {
  name: "plain arrays",

  /** Make room at once for all matrices [outs, inner] of weights that are going to be kept. */
  expect() {},

  /** Room for a matrix (outs, inner) of weights, to be filled: {data, outs, inner, stride}, a row every `stride`. */
  keep(outs, inner) {
    return { data: new Float32Array(outs * inner), outs, inner, stride: inner };
  },

  /** x w^T: (rows, inner), (outs, inner) -> (rows, outs). */
  product(x, rows, { data: w, outs, inner, stride = inner }) {
    const y = new Float32Array(rows * outs);
    for (let at = 0; at < y.length; at++) {
      const [from, weights] = [Math.floor(at / outs) * inner, (at % outs) * stride];
      let sum = 0;
      for (let i = 0; i < inner; i++) sum += x[from + i] * w[weights + i];
      y[at] = sum;
    }
    return y;
  },
};

/** Add b (width) to each row, or b (rows, width); x is changed. */
export function add(x, b) {
  for (let i = 0, j = 0; i < x.length; i++) {
    x[i] += b[j];
    if (++j === b.length) j = 0;
  }
  return x;
}

/**
 * Each row over its root mean square, times the weight (RMSNorm, Zhang and Sennrich 2019); of the type "layer" less its mean
 * before, and plus the bias (Ba et al. 2016).
 */
export function normed(x, { weight, bias }, epsilon, type) {
  const [y, width] = [new Float32Array(x.length), weight.length];
  for (let at = 0; at < x.length; at += width) {
    const { mean, factor } = scaleOf(x, at, width, epsilon, type);
    for (let i = 0; i < width; i++) y[at + i] = (x[at + i] - mean) * factor * weight[i] + (bias ? bias[i] : 0);
  }
  return y;
}

/** What a norm subtracts from a row, and what it multiplies the rest by. */
function scaleOf(x, at, width, epsilon, type) {
  let [mean, variance] = [0, 0];
  if (type !== "rms") for (let i = 0; i < width; i++) mean += x[at + i] / width;
  for (let i = 0; i < width; i++) variance += (x[at + i] - mean) ** 2 / width;
  return { mean, factor: 1 / Math.sqrt(variance + epsilon) };
}

/** The gradient of rows x from that of their norm, of the type "rms" or "layer". */
export function normGradient(x, gradient, weight, epsilon, type) {
  const [y, width] = [new Float32Array(x.length), weight.length];
  for (let at = 0; at < x.length; at += width) {
    const { mean, factor } = scaleOf(x, at, width, epsilon, type);
    let [level, along] = [0, 0]; // the gradient's mean, and its part along the normed row
    for (let i = 0; i < width; i++) {
      const weighted = (gradient[at + i] * weight[i]) / width;
      if (type !== "rms") level += weighted;
      along += weighted * (x[at + i] - mean) * factor;
    }
    for (let i = 0; i < width; i++) {
      y[at + i] = factor * (gradient[at + i] * weight[i] - level - along * (x[at + i] - mean) * factor);
    }
  }
  return y;
}

/** The softmax of each row of `width` numbers, in place. */
export function softmax(x, width) {
  for (let at = 0; at < x.length; at += width) {
    let [most, sum] = [-Infinity, 0];
    for (let i = at; i < at + width; i++) if (x[i] > most) most = x[i];
    for (let i = at; i < at + width; i++) sum += x[i] = Math.exp(x[i] - most);
    for (let i = at; i < at + width; i++) x[i] /= sum;
  }
  return x;
}

export const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const silu = (x) => x * sigmoid(x);

/** The activations of a number, by the names of the options `mlp` and `tokenizer_activation`. */
export const ACTIVATIONS = {
  relu: (x) => Math.max(0, x),
  gelu: (x) => (x * (1 + erf(x * Math.SQRT1_2))) / 2,
  gelu_tanh: (x) => (x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)))) / 2,
  quick_gelu: (x) => x * sigmoid(1.702 * x),
};

/** The error function to 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26). */
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const polynomial = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  const positive = 1 - polynomial * Math.exp(-x * x);
  return x < 0 ? -positive : positive;
}

/** Apply a function to every number, in place. */
export function each(x, f) {
  for (let i = 0; i < x.length; i++) x[i] = f(x[i]);
  return x;
}

/** Rows of a gate and a value side by side, (rows, 2 width), to silu(gate) * value, (rows, width). */
export function swiglu(x, width) {
  const y = new Float32Array(x.length / 2);
  for (let i = 0; i < y.length; i++) {
    const at = Math.floor(i / width) * 2 * width + (i % width);
    y[i] = silu(x[at]) * x[at + width];
  }
  return y;
}

/** (rows, columns) -> (columns, rows). */
export function transposed(x, rows, columns) {
  const y = new Float32Array(x.length);
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) y[c * rows + r] = x[r * columns + c];
  return y;
}

/** Columns `from` to `from + width` of x, whose rows have `columns` numbers: (rows, width). */
export function cut(x, columns, from, width) {
  const y = new Float32Array((x.length / columns) * width);
  for (let at = 0, to = 0; at < x.length; at += columns, to += width) {
    y.set(x.subarray(at + from, at + from + width), to);
  }
  return y;
}

/** The weighted sum of rows: (rows, width), (rows) -> (width). */
export function sumOfRows(x, shares) {
  const [y, width] = [new Float32Array(x.length / shares.length), x.length / shares.length];
  for (let at = 0; at < x.length; at++) y[at % width] += shares[Math.floor(at / width)] * x[at];
  return y;
}

/** The scalar product of two arrays. */
export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

/** Arrays one after another. */
export function joined(parts) {
  const y = new Float32Array(parts.reduce((length, part) => length + part.length, 0));
  let at = 0;
  for (const part of parts) {
    y.set(part, at);
    at += part.length;
  }
  return y;
}
