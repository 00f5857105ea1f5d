// Grad-CAM (Selvaraju et al. 2017) where patches are read for the last time, as explain/gradcam.py has it: a patch's
// activations times the mean gradient of the class's logit over the patches.

import { cut, dot, normGradient } from "./numbers.js";
import { afterPooling, pooled, poolingHeads } from "./readout.js";

const STEP = 0.02; // of the size of a number, for a gradient by differences

/** The evidence of each patch, (N), not scaled. */
export function gradCam(vit, image, target, step) {
  const { pool } = vit.options;
  if (pool === "cls") return ofClassToken(vit, image, target, step);
  return pool === "map" ? ofAttentionPooling(vit, image, target, step) : ofSum(vit, image, target, step);
}

/**
 * The head reads the mean of the patches, or a sum by the softmax of a linear score, whose shares stay if all patches
 * move alike: with either, their mean gradient is that of the sum, over N.
 */
async function ofSum(vit, image, target, step) {
  const { embed_dim: D, prefix: P } = vit.options;
  const { tokens } = await vit.forward(image);
  const y = await pooled(vit, tokens); // (D), or (2 D) with the class token's part first
  const gradient = await slopes(y, (rows) => rows, async (row) => (await vit.classes(row))[target], step);
  const g = gradient.subarray(y.length - D);
  return Float32Array.from({ length: vit.patches }, (_, n) => dot(g, tokens.subarray((P + n) * D, (P + n + 1) * D)));
}

/** The learned query of attention pooling reads the patches as keys and values. */
async function ofAttentionPooling(vit, image, target, step) {
  const { embed_dim: D, pool_heads: H } = vit.options;
  const heads = await poolingHeads(vit, (await vit.forward(image)).tokens);
  const mixed = Float32Array.from(heads.flatMap((head) => [...head.mixed])); // (D)
  const after = (rows) => afterPooling(vit, rows);
  const gradient = await slopes(mixed, after, async (row) => (await vit.classes(row))[target], step);
  const bias = vit.weights.get("pool.kv.bias") ?? new Float32Array(2 * D);
  const [heat, hd] = [new Float32Array(vit.patches), D / H];
  for (const [h, head] of heads.entries()) {
    const g = gradient.subarray(h * hd, (h + 1) * hd);
    const biases = [h, H + h].map((at) => bias.subarray(at * hd, (at + 1) * hd));
    addEvidence(heat, { ...head, g, biases, unplaced: (dk) => dk });
  }
  return heat;
}

/** The class token (and the distillation token) read the patches in the last block, as keys and values. */
async function ofClassToken(vit, image, target, step) {
  const { num_heads: H, head_dim: hd, embed_dim: D, depth, num_pooled: read } = vit.options;
  const [T, last] = [vit.length, depth - 1];
  let z = await vit.embedded(image);
  for (let l = 0; l < last; l++) z = await vit.block(l, z, async () => {});
  const qkv = await vit.qkv(last, z);
  const attention = []; // of each head (read, T)
  const mixed = await vit.mixed(last, qkv, async (_, h, A) => (attention[h] = A.slice(0, read * T)));
  const readers = z.slice(0, read * D);
  const after = (rows) => vit.afterMixing(last, repeated(readers, rows.length / (read * H * hd)), rows);
  const classes = async (row) => (await vit.read(row)).logits[target];
  const gradient = await slopes(mixed.slice(0, read * H * hd), after, classes, step);
  const bias = vit.weights.get(`encoder.blocks.${last}.attention.qkv.bias`) ?? new Float32Array(3 * H * hd);
  const heat = new Float32Array(vit.patches);
  for (let h = 0; h < H; h++) {
    const [q, k, v] = vit.ofHead(qkv, h);
    addEvidence(heat, {
      q: vit.placed(last, h, "q", q).subarray(0, read * hd),
      k,
      v,
      A: attention[h],
      g: cut(gradient, H * hd, h * hd, hd),
      biases: [H + h, 2 * H + h].map((at) => bias.subarray(at * hd, (at + 1) * hd)),
      unplaced: (dk) => unplaced(vit, last, h, k, dk),
    });
  }
  return heat;
}

/**
 * Add the evidence of the patches, the last rows of a head's keys k and values v, (T, hd) each, to `heat`.
 *
 * Queries q (n, hd) have read them with weights A (n, T). With the gradient g (n, hd) of the logit with respect to what
 * they have mixed, A v:
 *
 *   dv_j = A_j g,   dk_j = A_j (g v_j - sum_i A_i g v_i) q / sqrt(hd)
 *
 * k_j and v_j are linear in the activations a_j, so a_j times its mean gradient is k_j times the mean of dk plus v_j
 * times the mean of dv, less the biases. `unplaced` makes dk that of keys without their norm and rotation.
 */
function addEvidence(heat, { q, k, v, A, g, biases: [bk, bv], unplaced }) {
  const hd = bk.length;
  const [N, T] = [heat.length, k.length / hd];
  const P = T - N;
  const [dk, dv] = [new Float32Array(T * hd), new Float32Array(hd)]; // of every key as placed; of values, the mean
  for (let token = 0; token * hd < q.length; token++) {
    const weights = A.subarray(token * T, (token + 1) * T);
    const [query, slope] = [q, g].map((x) => x.subarray(token * hd, (token + 1) * hd));
    const dA = weights.map((_, j) => dot(slope, v.subarray(j * hd, (j + 1) * hd)));
    const centre = dot(weights, dA);
    for (let j = P; j < T; j++) {
      const dS = weights[j] * (dA[j] - centre) * hd ** -0.5;
      for (let i = 0; i < hd; i++) {
        dk[j * hd + i] += dS * query[i];
        dv[i] += (weights[j] * slope[i]) / N;
      }
    }
  }
  const own = unplaced(dk);
  const mean = new Float32Array(hd);
  for (let j = P; j < T; j++) for (let i = 0; i < hd; i++) mean[i] += own[j * hd + i] / N;
  for (let n = 0; n < N; n++) {
    for (let i = 0; i < hd; i++) {
      const at = (P + n) * hd + i;
      heat[n] += mean[i] * (k[at] - bk[i]) + dv[i] * (v[at] - bv[i]);
    }
  }
}

/** The gradient of keys k (T, hd) of a head, from that of the same keys with their norm and turned. */
function unplaced(vit, l, h, k, gradient) {
  const turned = vit.turned(l, h, gradient, -1); // the gradient of a turned key is turned back
  const { qk_norm, norm_type, norm_eps } = vit.options;
  if (!qk_norm) return turned;
  const weight = vit.weights.get(`encoder.blocks.${l}.attention.qk_norm.k.weight`);
  return normGradient(k, turned, weight, norm_eps, norm_type);
}

/**
 * The gradient of a logit with respect to x, by central differences.
 *
 * @param after what follows, for all rows (2 size, size) at once: rows of any width.
 * @param logit of one of these rows.
 */
async function slopes(x, after, logit, step) {
  const size = x.length;
  const unit = STEP * Math.sqrt(dot(x, x) / size) || STEP;
  const moved = repeated(x, 2 * size);
  for (let place = 0; place < 2 * size; place++) moved[place * size + (place >> 1)] += place % 2 ? -unit : unit;
  const rows = await after(moved);
  const width = rows.length / (2 * size);
  const found = new Float32Array(size);
  for (let place = 0; place < size; place++) {
    const [up, down] = await Promise.all(
      [2 * place, 2 * place + 1].map((at) => logit(rows.slice(at * width, (at + 1) * width))),
    );
    found[place] = (up - down) / (2 * unit);
    if (place % 64 === 0) await step(place / size);
  }
  return found;
}

/** x, several times. */
function repeated(x, times) {
  const all = new Float32Array(times * x.length);
  for (let at = 0; at < all.length; at += x.length) all.set(x, at);
  return all;
}
