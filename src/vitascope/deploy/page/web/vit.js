// The Vision Transformer of Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", equations 1 to 8, for one
// picture. It has the options, and the names of weights, of vitascope's model/vit.py.
//
// T tokens: P of them before the N patches (class token, registers). D channels; H heads of hd channels.

import { ACTIVATIONS, add, cut, each, joined, normed, softmax, swiglu, transposed } from "./numbers.js";
import { logitsOf, pooled } from "./readout.js";
import { patches } from "./stems.js";

export class VisionTransformer {
  /**
   * @param options those of the model, with `grid`, `prefix` (P), `head_dim` and `final_norm`.
   * @param weights {get(name), has(name)}; see weights.js.
   * @param kernel computes the matrix products; see numbers.js.
   */
  constructor(options, weights, kernel) {
    Object.assign(this, { options, weights, kernel });
    this.patches = options.grid[0] * options.grid[1]; // N
    this.length = options.prefix + this.patches; // T
    this.switchOff();
  }

  /** Leave out parts, as model/intervention.py does: "head0.1", "attention0", "mlp2", "layer3", "patch7". */
  switchOff(parts = []) {
    this.off = new Set(parts);
    this.absent = []; // patches
    for (const part of this.off) {
      const [, kind, place, head] = /^([a-z]+)(\d+)\.?(\d*)$/.exec(part);
      const isHere = place < (kind === "patch" ? this.patches : this.options.depth) && head < this.options.num_heads;
      if (!isHere) throw new Error(`this model has no ${kind} ${part.slice(kind.length)}`);
      if (kind === "patch") this.absent.push(Number(place));
    }
    if (this.absent.length === this.patches) throw new Error(`all ${this.patches} patches are off: leave at least one`);
  }

  /** Scores, rows of `width` of which the last N are those of the patches, -Infinity where one is absent. */
  ofPresent(scores, width) {
    for (let end = width; end <= scores.length; end += width) {
      for (const patch of this.absent) scores[end - this.patches + patch] = -Infinity;
    }
    return scores;
  }

  /**
   * A normalized image (C, H, W) to {tokens, logits}: z_L (T, D) after its norm, and the classes (K).
   *
   * @param attended called with the numbers of each layer and head and its attention weights (T, T), and awaited.
   */
  async forward(image, attended = async () => {}) {
    let z = await this.embedded(image);
    for (let l = 0; l < this.options.depth; l++) z = await this.block(l, z, attended);
    return this.read(z);
  }

  /** Equation 4: z_L (T, D), or the tokens alone that the class token's pooling reads, to {tokens, features, logits}. */
  async read(z) {
    if (this.options.final_norm === "before") z = this.norm("norm", z);
    const features = this.normed(await pooled(this, z));
    return { tokens: z, features, logits: await logitsOf(this, features) };
  }

  /** The classes (K) of what is pooled, y. */
  classes(y) {
    return logitsOf(this, this.normed(y));
  }

  normed(y) {
    return this.options.final_norm === "after" ? this.norm("pool_norm", y) : y;
  }

  /** z_0 = [x_class; x_p E] + E_pos, equation 1: (C, H, W) -> (T, D). */
  async embedded(image) {
    const { weights, last } = this;
    if (last?.image === image) return last.z;
    const prefix = ["class_token", "distillation_token", "registers"].filter((name) => weights.has(name));
    let z = joined([...prefix.map((name) => weights.get(name)), await patches(this, image)]);
    if (weights.has("positions")) {
      const positions = weights.get("positions"); // (T, D), or (N, D) if the prefix has none
      add(z.subarray(z.length - positions.length), positions);
    }
    if (this.options.embedding_norm) z = this.norm("embedding_norm", z);
    this.last = { image, z }; // for the next question about this image
    return z;
  }

  /** z_l of z_(l-1), equations 2 and 3: (T, D) -> (T, D). */
  async block(l, z, attended) {
    return this.afterMixing(l, z, await this.mixed(l, await this.qkv(l, z), attended));
  }

  /** [q, k, v] = LN(z) U_qkv, equation 5: (T, D) -> (T, 3 H hd). */
  qkv(l, z) {
    const name = `encoder.blocks.${l}`;
    const x = this.options.norm === "pre" ? this.norm(`${name}.norm1`, z) : z;
    return this.linear(`${name}.attention.qkv`, x);
  }

  /** [SA_1(z); ...; SA_H(z)], equations 6 and 7: (T, 3 H hd) -> (T, H hd). */
  async mixed(l, qkv, attended) {
    const { num_heads: H, head_dim: hd } = this.options;
    const T = this.length;
    const mixed = new Float32Array(T * H * hd);
    for (let h = 0; h < H; h++) {
      const [q, k, v] = this.ofHead(qkv, h); // (T, hd) each
      const A = await this.weightsOf(l, h, this.placed(l, h, "q", q), this.placed(l, h, "k", k));
      await attended(l, h, A);
      if (this.off.has(`head${l}.${h}`)) continue;
      const columns = { data: transposed(v, T, hd), outs: hd, inner: T };
      const head = await this.kernel.product(A, T, columns); // A v, equation 7
      for (let t = 0; t < T; t++) mixed.set(head.subarray(t * hd, (t + 1) * hd), (t * H + h) * hd);
    }
    return mixed;
  }

  /** The queries, keys and values of a head: (T, 3 H hd) -> three of (T, hd). */
  ofHead(qkv, h) {
    const { num_heads: H, head_dim: hd } = this.options;
    return [0, 1, 2].map((part) => cut(qkv, 3 * H * hd, (part * H + h) * hd, hd));
  }

  /** The rest of a block, token by token: U_msa, the sum of equation 2, and 3: (n, D), (n, H hd) -> (n, D). */
  async afterMixing(l, z, mixed) {
    const name = `encoder.blocks.${l}`;
    const [norm1, norm2] = [1, 2].map((n) => (x) => this.norm(`${name}.norm${n}`, x));
    const [scale1, scale2] = ["attention", "mlp"].map((kind, at) => (x) => {
      return this.off.has(`${kind}${l}`) ? x.fill(0) : this.scaled(`${name}.scale${at + 1}`, x);
    });
    if (this.off.has(`layer${l}`)) return z;
    const inner = this.options.inner_norm === "all" ? this.norm(`${name}.attention.norm`, mixed) : mixed;
    const msa = await this.linear(`${name}.attention.proj`, inner);
    const mlp = (x) => this.mlp(`${name}.mlp`, x);
    if (this.options.norm === "post") {
      z = norm1(add(scale1(msa), z));
      return norm2(add(scale2(await mlp(z)), z));
    }
    if (this.options.norm === "branch") {
      z = add(scale1(norm1(msa)), z);
      return add(scale2(norm2(await mlp(z))), z);
    }
    z = add(scale1(msa), z); // equation 2
    return add(scale2(await mlp(norm2(z))), z); // equation 3
  }

  /** A = softmax(q k^T / sqrt(hd) + bias), equation 6: (T, hd), (T, hd) -> (T, T). */
  async weightsOf(l, h, q, k) {
    const { head_dim: hd } = this.options;
    const T = this.length;
    const root = hd ** -0.5;
    const scores = await this.kernel.product(each(q, (x) => x * root), T, { data: k, outs: T, inner: hd });
    const bias = this.ofBlock("bias", l); // (H, T, T)
    if (bias) add(scores, bias.subarray(h * T * T, (h + 1) * T * T));
    return softmax(this.ofPresent(scores, T), T);
  }

  /** Queries or keys (T, hd) with their norm and, for rotary positions, turned. */
  placed(l, h, which, x) {
    const name = `encoder.blocks.${l}.attention.qk_norm.${which}`;
    return this.turned(l, h, this.options.qk_norm ? this.norm(name, x) : x, 1);
  }

  /** Rotary positions: the patches of x (T, hd) as x cos + [-right, left] sin, or turned back with `sign` -1. */
  turned(l, h, x, sign) {
    const { num_heads: H, head_dim: hd, prefix: P } = this.options;
    const cos = this.ofBlock("rotation.cos", l); // (N, H or 1, hd)
    if (!cos) return x;
    const sin = this.ofBlock("rotation.sin", l);
    const each = cos.length / (this.patches * hd) === H ? H : 1;
    const turned = x.slice();
    for (let n = 0; n < this.patches; n++) {
      const [at, table] = [(P + n) * hd, (n * each + (h % each)) * hd];
      for (let i = 0; i < hd; i++) {
        const other = i < hd / 2 ? -x[at + i + hd / 2] : x[at + i - hd / 2];
        turned[at + i] = x[at + i] * cos[table + i] + sign * other * sin[table + i];
      }
    }
    return turned;
  }

  /** The MLP of a block or of the pooling, (rows, D) -> (rows, D). */
  async mlp(name, x) {
    const { mlp } = this.options;
    let hidden = await this.linear(`${name}.fc1`, x);
    if (mlp === "swiglu") hidden = swiglu(hidden, this.weights.get(`${name}.fc2.weight`).inner);
    else each(hidden, ACTIVATIONS[mlp]);
    if (this.weights.has(`${name}.norm.weight`)) hidden = this.norm(`${name}.norm`, hidden);
    return this.linear(`${name}.fc2`, hidden);
  }

  /** x W^T + b: (rows, inputs) -> (rows, outputs). */
  async linear(name, x) {
    const matrix = this.weights.get(`${name}.weight`);
    const y = await this.kernel.product(x, x.length / matrix.inner, matrix);
    return this.weights.has(`${name}.bias`) ? add(y, this.weights.get(`${name}.bias`)) : y;
  }

  /** LayerNorm or RMSNorm of each row. */
  norm(name, x) {
    const [weight, bias] = ["weight", "bias"].map((kind) => this.weights.get(`${name}.${kind}`));
    return normed(x, { weight, bias }, this.options.norm_eps, this.options.norm_type);
  }

  /** A branch times its learned factor per channel, if there is one. */
  scaled(name, x) {
    const gamma = this.weights.get(`${name}.gamma`);
    return gamma ? x.map((value, at) => value * gamma[at % gamma.length]) : x;
  }

  /** A table that all blocks share, or that of block l; undefined if the model has none. */
  ofBlock(name, l) {
    const own = [name, `${name}.${l}`].find((each) => this.weights.has(each));
    return own && this.weights.get(own);
  }
}
