// Grad-CAM (Selvaraju et al. 2017) where patches are read for the last time, as explain/gradcam.py has it: a patch's
// activations times the mean gradient of the class's logit over the patches.

const STEP = 0.02; // of the size of a number, for a gradient by differences

/** The evidence of each patch, (N), not scaled. */
export function gradCam(vit, image, target, step) {
  return vit.options.pool === "cls" ? ofClassToken(vit, image, target, step) : ofMean(vit, image, target);
}

/** A linear head on the mean of the patches: its gradient is the class's weights over N. */
async function ofMean(vit, image, target) {
  const { options, kernel, patches: N, weights } = vit;
  const { embed_dim: D, prefix } = options;
  const { tokens } = await vit.forward(image);
  const head = weights.matrix("head.weight"); // (K, D), or (K, 2 D) with the class token's part first
  const rows = new Float32Array(N * head.inner);
  for (let n = 0; n < N; n++) {
    rows.set(tokens.subarray((prefix + n) * D, (prefix + n + 1) * D), (n + 1) * head.inner - D);
  }
  const parts = await kernel.product(rows, N, head); // (N, K)
  return Float32Array.from({ length: N }, (_, n) => parts[n * head.outs + target]);
}

/**
 * The class token (and the distillation token) read the patches in the last block, as keys k and values v. With the
 * gradient g of the logit with respect to what they have mixed, A v, of a head:
 *
 *   dv_j = A_j g,   dk_j = A_j (g v_j - sum_i A_i g v_i) q / sqrt(hd)
 *
 * k_j and v_j are linear in the activations a_j, so a_j times its mean gradient is k_j times the mean of dk plus v_j
 * times the mean of dv, less the biases.
 */
async function ofClassToken(vit, image, target, step) {
  const { num_heads: H, head_dim: hd, embed_dim: D, depth, num_pooled: read, prefix: P } = vit.options;
  const [T, N, last] = [vit.length, vit.patches, depth - 1];
  let z = await vit.embedded(image);
  for (let l = 0; l < last; l++) z = await vit.block(l, z, async () => {});
  const qkv = await vit.qkv(last, z);
  let attention = null; // (H, T, T)
  const mixed = await vit.mixed(last, qkv, async (_, A) => (attention = A));
  const gradient = await slopes(vit, z.slice(0, read * D), mixed.slice(0, read * H * hd), target, step);
  const bias = vit.weights.vector(`encoder.blocks.${last}.attention.qkv.bias`) ?? new Float32Array(3 * H * hd);
  const heat = new Float32Array(N);
  for (let h = 0; h < H; h++) {
    const [q, k, v] = vit.ofHead(qkv, h);
    const queries = vit.placed(last, h, "q", q);
    const [dk, dv] = [new Float32Array(T * hd), new Float32Array(hd)]; // of every key as placed; of values, the mean
    for (let token = 0; token < read; token++) {
      const A = attention.subarray((h * T + token) * T, (h * T + token + 1) * T);
      const g = gradient.subarray((token * H + h) * hd, (token * H + h + 1) * hd);
      const dA = Float32Array.from({ length: T }, (_, j) => g.reduce((sum, value, i) => sum + value * v[j * hd + i], 0));
      const centre = A.reduce((sum, weight, j) => sum + weight * dA[j], 0);
      for (let j = P; j < T; j++) {
        const dS = A[j] * (dA[j] - centre) * hd ** -0.5;
        for (let i = 0; i < hd; i++) {
          dk[j * hd + i] += dS * queries[token * hd + i];
          dv[i] += (A[j] * g[i]) / N;
        }
      }
    }
    const turned = vit.turned(last, h, dk, -1); // the gradient of a turned key is turned back
    const mean = new Float32Array(hd);
    for (let j = P; j < T; j++) for (let i = 0; i < hd; i++) mean[i] += turned[j * hd + i] / N;
    for (let n = 0; n < N; n++) {
      for (let i = 0; i < hd; i++) {
        const at = (P + n) * hd + i;
        heat[n] += mean[i] * (k[at] - bias[(H + h) * hd + i]) + dv[i] * (v[at] - bias[(2 * H + h) * hd + i]);
      }
    }
  }
  return heat;
}

/**
 * The gradient of a logit with respect to what the read tokens have mixed, (read, H hd), by central differences: only
 * these tokens' rows of the last block are computed again, all at once.
 */
async function slopes(vit, z, mixed, target, step) {
  const [size, D] = [mixed.length, z.length];
  const unit = STEP * Math.sqrt(mixed.reduce((sum, value) => sum + value * value, 0) / size) || STEP;
  const [rows, moved] = [new Float32Array(2 * size * D), new Float32Array(2 * size * size)];
  for (let place = 0; place < 2 * size; place++) {
    rows.set(z, place * D);
    moved.set(mixed, place * size);
    moved[place * size + (place >> 1)] += place % 2 ? -unit : unit;
  }
  const after = await vit.afterMixing(vit.options.depth - 1, rows, moved);
  const found = new Float32Array(size);
  for (let place = 0; place < size; place++) {
    const [up, down] = await Promise.all(
      [2 * place, 2 * place + 1].map(async (at) => (await vit.read(after.slice(at * D, (at + 1) * D))).logits[target]),
    );
    found[place] = (up - down) / (2 * unit);
    if (place % 64 === 0) await step(place / size);
  }
  return found;
}
