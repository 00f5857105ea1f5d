// Equation 4: from the encoder's tokens to the representation y and its classes.

import { add, cut, dot, each, joined, softmax, sumOfRows } from "./numbers.js";

/** y of normalized tokens: (T, D) -> (D), or (2 D) if two vectors are joined; by the option `pool`. */
export async function pooled(vit, z) {
  const { pool, prefix, num_pooled, embed_dim: D } = vit.options;
  const patches = z.subarray(prefix * D); // (N, D)
  const weighted = (scores) => sumOfRows(patches, softmax(vit.ofPresent(scores, vit.patches), vit.patches));
  const mean = () => weighted(new Float32Array(vit.patches));
  if (pool === "cls") return z.slice(0, num_pooled * D); // with a distillation token, both
  if (pool === "mean") return mean();
  if (pool === "cls_mean") return joined([z.slice(0, D), mean()]);
  if (pool === "sequence") return weighted(await vit.linear("pool.score", patches));
  return afterPooling(vit, joined((await poolingHeads(vit, z)).map(({ mixed }) => mixed)));
}

/**
 * Multi-head attention pooling: one learned query attends to the patches, or to all tokens z (T, D) (Zhai et al. 2022).
 * For each head {q, k, v, A, mixed}: (hd), (n, hd) twice, its weights (n), and what it has mixed, (hd).
 */
export async function poolingHeads(vit, z) {
  const { embed_dim: D, pool_heads: H, pool_prefix, prefix } = vit.options;
  const x = pool_prefix ? z : z.subarray(prefix * D);
  const [n, hd] = [x.length / D, D / H];
  const query = await vit.linear("pool.q", vit.weights.get("pool.query")); // (D)
  const kv = await vit.linear("pool.kv", x); // (n, 2 D)
  const heads = [];
  for (let h = 0; h < H; h++) {
    const [k, v] = [0, 1].map((part) => cut(kv, 2 * D, part * D + h * hd, hd));
    const q = query.slice(h * hd, (h + 1) * hd);
    const scores = await vit.kernel.product(q.map((value) => value * hd ** -0.5), 1, { data: k, outs: n, inner: hd });
    const A = softmax(vit.ofPresent(scores, n), n);
    heads.push({ q, k, v, A, mixed: sumOfRows(v, A) });
  }
  return heads;
}

/** y of a sequence of nothing but one normalized token (D). */
export async function pooledAlone(vit, token) {
  const { pool, num_pooled, embed_dim: D } = vit.options;
  if (pool === "map") return afterPooling(vit, (await vit.linear("pool.kv", token)).slice(D));
  return joined(Array(num_pooled).fill(token));
}

/** The rest of attention pooling, of what all heads have mixed: (rows, D) -> (rows, D). */
export async function afterPooling(vit, mixed) {
  const y = await vit.linear("pool.proj", mixed);
  return add(await vit.mlp("pool.mlp", vit.norm("pool.norm", y)), y);
}

/** The head's outputs (K) of y; the representation itself without a head. */
export async function logitsOf(vit, y) {
  const { head, distillation_token, embed_dim: D } = vit.options;
  if (head === "none") return y;
  if (distillation_token) {
    const both = [await vit.linear("head.linear", y.slice(0, D)), await vit.linear("head.distillation", y.slice(D))];
    return each(add(...both), (x) => x / 2);
  }
  if (head === "linear") return vit.linear("head", y);
  if (head === "cosine") return cosines(vit, y);
  const hidden = each(await vit.linear("head.pre_logits", y), Math.tanh);
  return head === "pre_logits" ? hidden : vit.linear("head.linear", hidden);
}

/** exp(scale) cos(P y, t_k) + bias, for one vector t_k per class: (D) -> (K). */
async function cosines(vit, y) {
  const { weights } = vit;
  const features = weights.has("head.projection.weight") ? await vit.linear("head.projection", y) : y;
  const [factor, bias] = [Math.exp(weights.get("head.scale")[0]), weights.get("head.bias")[0]];
  const classes = weights.get("head.classes"); // (K, width)
  const width = features.length;
  const found = new Float32Array(classes.length / width);
  for (let k = 0; k < found.length; k++) {
    const t = classes.subarray(k * width, (k + 1) * width);
    found[k] = (factor * dot(features, t)) / (length(features) * length(t)) + bias;
  }
  return found;
}

/** The length of a vector, at least 1e-12 as in torch. */
function length(x) {
  return Math.max(1e-12, Math.sqrt(dot(x, x)));
}
