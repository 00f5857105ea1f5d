// A picture's prediction and attention, as attention_pack.py has them: the same tensors by the same names, so that
// the explorer draws both. Here they stay in memory.

import { gradCam } from "./gradcam.js";
import { joined, sigmoid, softmax, transposed } from "./numbers.js";
import { pixelsOf } from "./pixels.js";
import { pooledAlone } from "./readout.js";

export class Answers {
  /**
   * @param vit the model.
   * @param about what the explorer gets beside the numbers, with `framing` and `inside`.
   */
  constructor(vit, about) {
    Object.assign(this, { vit, about });
  }

  /**
   * Everything about a picture, {tensors, about}, of its pixels in uint8 (C, h, w), here and below.
   *
   * @param part what is asked for, with `off`, the parts of the model to leave out.
   * @param step called with the share that is done, and awaited; it ends the work by throwing.
   */
  async explore(pixels, { off }, step) {
    const { vit, about } = this;
    vit.switchOff(off);
    const tensors = { pixels: { shape: [about.framing.channels, ...vit.options.image_hw], data: pixels } };
    const { depth, num_heads: heads } = vit.options;
    const T = vit.length;
    const all = about.inside.carried === "all";
    const levels = new Uint8Array(all ? depth * heads * T * T : 0);
    const scales = new Float32Array(all ? depth * heads * T : 0);
    const read = new Float32Array(depth * heads * T);
    let [mean, flow] = [null, null]; // of a layer's heads, and over all layers: (T, T)
    const { tokens, features, logits } = await vit.forward(this.normalized(pixels), async (layer, head, A) => {
      const place = layer * heads + head;
      if (all) quantize(A, T, levels.subarray(place * T * T), scales.subarray(place * T));
      read.set(this.readRow(A), place * T);
      if (head === 0) mean = new Float32Array(T * T);
      addShare(mean, A, 1 / heads);
      if (head < heads - 1) return;
      flow = await this.nextFlow(flow, mean);
      await step((layer + 1) / depth);
    });
    if (all) {
      tensors.attention = { shape: [depth, heads, T, T], data: levels };
      tensors.attention_scale = { shape: [depth, heads, T], data: scales };
    }
    Object.assign(tensors, quantized("answer", [depth, heads, T], read), quantized("rollout", [T, T], flow));
    tensors.rollout_answer = { shape: [T], data: this.readRow(flow) };
    const D = tokens.length / T;
    tensors.features = { shape: [vit.patches, D], data: tokens.slice(vit.options.prefix * D) };
    tensors.outputs = { shape: [logits.length], data: logits };
    if (about.methods) {
      tensors.probabilities = { shape: [logits.length], data: probabilities(logits, vit.options.outputs) };
      if (about.thresholds) tensors.thresholds = { shape: [logits.length], data: Float32Array.from(about.thresholds) };
    }
    const verdict = about.trust && this.verdict(features, tensors.probabilities.data);
    return { tensors, about, verdict };
  }

  /** What the head reads of a picture, (D): {tensors}. */
  async features(pixels) {
    this.vit.switchOff();
    const { features } = await this.vit.forward(this.normalized(pixels));
    return { tensors: { features: { shape: [features.length], data: features } } };
  }

  /** Whether the class is known, as `Verdict` in predict/selection.py. */
  verdict(features, shares) {
    const { trust, class_names: names } = this.about;
    const set = "limit" in trust ? setOf(shares, trust.limit).map((k) => names[k] ?? String(k)) : null;
    const familiarity = "familiar" in trust ? familiarityOf(this.vit, features) : null;
    const ambiguous = set?.length > 1 ? "ambiguous" : null;
    const few = familiarity === null || trust.familiar * (1 + [trust.counts].flat().reduce((a, b) => a + b)) < 1 - 1e-6;
    const reason = ambiguous ?? (few ? "unchecked" : null);
    const unknown = familiarity !== null && familiarity < trust.familiar + 1e-6 ? "unfamiliar" : reason;
    return { unknown, set, familiarity };
  }

  /** The attention of one layer, of all heads, one or their "mean", where not all is carried: {tensors}. */
  async attention(pixels, { layer, head, off }, step) {
    const { vit } = this;
    vit.switchOff(off);
    const T = vit.length;
    const found = [];
    let z = await vit.embedded(this.normalized(pixels));
    for (let each = 0; each <= layer; each++) {
      z = await vit.block(each, z, async (_, h, A) => {
        if (each !== layer) return;
        if (head !== "mean" && (head ?? h) === h) found.push(A);
        if (head !== "mean") return;
        if (h === 0) found.push(new Float32Array(T * T));
        addShare(found[0], A, 1 / vit.options.num_heads);
      });
      await step((each + 1) / (layer + 1));
    }
    return { tensors: quantized("attention", [1, found.length, T, T], joined(found)) };
  }

  /** The map of a class, largest value 1, by one of the methods in `about`: {tensors}. */
  async heatmap(pixels, { method, target, off }, step) {
    const image = this.normalized(pixels);
    this.vit.switchOff(off);
    if (method === "lens") return this.lens(image, target, step);
    const heat = await (method === "occlusion" ? this.occlusion(image, target, step) : gradCam(this.vit, image, target, step));
    const most = heat.reduce((a, b) => Math.max(a, b), 0);
    const data = heat.map((value) => (most ? Math.max(0, value) / most : 0));
    return { tensors: { heatmaps: { shape: [1, ...this.vit.options.grid], data } } };
  }

  /** The logit lens: the share of a class after 0 to L layers, of the image (L + 1) and of each patch (L + 1, N). */
  async lens(image, target, step) {
    const { vit } = this;
    const { depth, grid, embed_dim: D, prefix, outputs } = vit.options;
    const [curve, maps] = [new Float32Array(depth + 1), new Float32Array((depth + 1) * vit.patches)];
    const share = (logits) => probabilities(logits, outputs)[target];
    let z = await vit.embedded(image);
    for (let l = 0; l <= depth; l++) {
      if (l) z = await vit.block(l - 1, z, async () => {});
      const { tokens, logits } = await vit.read(z);
      curve[l] = share(logits);
      for (let n = 0; n < vit.patches; n++) {
        const y = await pooledAlone(vit, tokens.slice((prefix + n) * D, (prefix + n + 1) * D));
        maps[l * vit.patches + n] = share(await vit.classes(y));
      }
      await step((l + 1) / (depth + 1));
    }
    return { tensors: { curve: { shape: [depth + 1], data: curve }, heatmaps: { shape: [depth + 1, ...grid], data: maps } } };
  }

  /** How far the logit falls when a patch is hidden (Zeiler and Fergus 2014), one forward pass for each: (N). */
  async occlusion(image, target, step) {
    const { vit } = this;
    const [[H, W], [rows, columns]] = [vit.options.image_hw, vit.options.grid];
    const score = (await vit.forward(image)).logits[target];
    const heat = new Float32Array(rows * columns);
    for (let cell = 0; cell < heat.length; cell++) {
      const hidden = image.map((value, at) => {
        const row = Math.floor(((2 * (Math.floor(at / W) % H) + 1) * rows) / (2 * H));
        const column = Math.floor(((2 * (at % W) + 1) * columns) / (2 * W));
        return row * columns + column === cell ? 0 : value;
      });
      const isChanged = hidden.some((value, at) => value !== image[at]);
      heat[cell] = isChanged ? score - (await vit.forward(hidden)).logits[target] : 0;
      await step((cell + 1) / heat.length);
    }
    return heat;
  }

  /** The model's pixels of an ImageBitmap, uint8 (C, h, w): those that patches tile. Closes `bitmap`. */
  pixels(bitmap) {
    const { framing } = this.about;
    const pixels = pixelsOf(bitmap, framing);
    return cropped(pixels, [framing.channels, ...framing.image_size], this.vit.options.image_hw);
  }

  /** Pixels (C, H, W) as the model takes them; the same array as before for the same pixels. */
  normalized(pixels) {
    const { last } = this;
    if (last?.pixels.length === pixels.length && last.pixels.every((value, at) => value === pixels[at])) return last.image;
    const { mean, std } = this.about.framing;
    const size = pixels.length / mean.length;
    const image = Float32Array.from(pixels, (value, at) => {
      const channel = Math.floor(at / size);
      return (value / 255 - mean[channel]) / std[channel];
    });
    this.last = { pixels: pixels.slice(), image }; // a copy, because answers are handed over
    return image;
  }

  /** The mean row of the tokens that the head reads: (T, T) -> (T). */
  readRow(rows) {
    const { pool, num_pooled, prefix } = this.vit.options;
    const T = this.vit.length;
    const row = new Float32Array(T);
    const read = (from, to, share) => {
      for (let query = from; query < to; query++) {
        for (let key = 0; key < T; key++) row[key] += (share * rows[query * T + key]) / (to - from);
      }
    };
    if (pool === "cls") read(0, num_pooled, 1);
    else read(prefix, T, pool === "cls_mean" ? 1 / 2 : 1);
    if (pool === "cls_mean") read(0, 1, 1 / 2);
    return row;
  }

  /** Rollout (Abnar and Zuidema 2020): (A + I) with rows that sum to one, times the flow so far; (T, T). */
  async nextFlow(flow, mean) {
    const T = this.vit.length;
    for (let at = 0; at < mean.length; at += T + 1) mean[at] += 1;
    for (let row = 0; row < mean.length; row += T) {
      const sum = mean.subarray(row, row + T).reduce((total, value) => total + value, 0);
      for (let i = row; i < row + T; i++) mean[i] /= sum;
    }
    if (!flow) return mean;
    return this.vit.kernel.product(mean, T, { data: transposed(flow, T, T), outs: T, inner: T });
  }
}

/** Add a share of other numbers, in place. */
function addShare(sum, numbers, share) {
  for (let i = 0; i < numbers.length; i++) sum[i] += share * numbers[i];
}

/** The probability of each class: one of them applies, or any may. */
const probabilities = (logits, outputs) =>
  outputs === "independent" ? logits.map(sigmoid) : softmax(logits.slice(), logits.length);

/** The first h rows and w columns of pixels (C, H, W). */
function cropped(pixels, [C, H, W], [h, w]) {
  if (h === H && w === W) return pixels;
  const found = new Uint8Array(C * h * w);
  for (let row = 0; row < C * h; row++) {
    const from = (Math.floor(row / h) * H + (row % h)) * W;
    found.set(pixels.subarray(from, from + w), row * w);
  }
  return found;
}

/** Rows of `width` numbers of at least 0 as bytes and a scale per row, into `levels` and `scales`. */
function quantize(rows, width, levels, scales) {
  for (let row = 0; row * width < rows.length; row++) {
    const numbers = rows.subarray(row * width, (row + 1) * width);
    const scale = numbers.reduce((most, value) => Math.max(most, value), 0) / 255;
    if (!Number.isFinite(scale)) throw new Error("attention is not finite: look for NaN and infinity in the weights");
    scales[row] = scale;
    for (let i = 0; i < width; i++) levels[row * width + i] = scale ? Math.round(numbers[i] / scale) : 0;
  }
}

/** The same as tensors `NAME` and `NAME_scale`. */
function quantized(name, shape, rows) {
  const width = shape.at(-1);
  const [levels, scales] = [new Uint8Array(rows.length), new Float32Array(rows.length / width)];
  quantize(rows, width, levels, scales);
  return { [name]: { shape, data: levels }, [`${name}_scale`]: { shape: shape.slice(0, -1), data: scales } };
}

// What a calibrated model knows about an answer, as in model/trust.py.

/** The share of validation images that are less like the training images than features y (D). */
function familiarityOf({ weights, kernel }, y) {
  const [center, means, levels, steps, [images]] = ["center", "means", "levels", "steps", "images"].map((name) =>
    weights.get(`trust.${name}`),
  );
  const z = kernel.product(y.map((value, i) => value - center[i]), 1, weights.get("trust.projection.weight")); // (r)
  let nearest = Infinity;
  for (let from = 0; from < means.length; from += z.length) {
    const distance = z.reduce((sum, value, i) => sum + (value - means[from + i]) ** 2, 0);
    nearest = Math.min(nearest, distance);
  }
  const passed = steps.reduce((sum, step, i) => sum + Math.min(1, Math.max(0, (levels[i] - nearest) / step)), 0);
  return (1 + (images * passed) / steps.length) / (images + 1);
}

/** The classes that belong to the set, the most probable first, by the limit of the mass before a class, one or (K). */
function setOf(probabilities, limit) {
  const order = Array.from(probabilities.keys()).sort((a, b) => probabilities[b] - probabilities[a]);
  let before = 0;
  return order.filter((k) => {
    const belongs = before <= (Array.isArray(limit) ? limit[k] : limit);
    before += probabilities[k];
    return belongs;
  });
}
