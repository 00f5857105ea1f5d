// One picture's answer: which numbers there are, and which have still to be fetched.
//
// T tokens: `prefix` of them (class token, registers), then the patches, row by row. A query is a token's
// number, or ANSWER: the mean of the tokens that the head reads.

import { fetchAttention, fetchHeatmap } from "./server.js";

export const ANSWER = "answer";
const KEPT_PARTS = 4;

export class Answer {
  constructor({ tensors, about }, picture) {
    this.picture = picture;
    this.about = about;
    this.inside = about.inside ?? null;
    this.pixels = tensors.pixels;
    this.probabilities = tensors.probabilities?.data ?? new Float32Array(0); // none of a model without a head
    this.grid = about.grid ?? null;
    this.tensors = tensors;
    this.parts = new Map(); // "layer" or "layer/head" -> {levels, scales}
    this.maps = new Map(); // "method class" -> Float32Array of the patches
    this.pending = new Map();
    const size = this.cells;
    about.explained?.classes.forEach((target, place) => {
      const map = tensors.heatmaps.data.subarray(place * size, (place + 1) * size);
      this.maps.set(`${about.explained.method} ${target}`, map);
    });
    if (this.inside) {
      this.prefix = this.inside.tokens.length;
      this.tokens = this.prefix + size;
    }
  }

  /** Patches of a ViT, places of a ResNet's last feature map. */
  get cells() {
    return this.grid ? this.grid[0] * this.grid[1] : 0;
  }

  /** Class numbers, the most probable first. */
  top(count) {
    const order = Array.from(this.probabilities.keys());
    order.sort((a, b) => this.probabilities[b] - this.probabilities[a]);
    return order.slice(0, count);
  }

  label(index) {
    return this.about.class_names[index] ?? String(index);
  }

  // Attention

  /** One head's row of a query as bytes and their scale; null where it is not here. */
  row(layer, head, query) {
    const { heads, carried } = this.inside;
    const T = this.tokens;
    const cut = (levels, scales, place) => ({
      levels: levels.subarray(place * T, (place + 1) * T),
      scale: scales[place],
    });
    if (query === ANSWER) {
      return cut(this.tensors.answer.data, this.tensors.answer_scale.data, layer * heads + head);
    }
    if (carried === "all") {
      const place = (layer * heads + head) * T + query;
      return cut(this.tensors.attention.data, this.tensors.attention_scale.data, place);
    }
    const whole = this.parts.get(String(layer));
    if (whole) return cut(whole.levels, whole.scales, head * T + query);
    const one = this.parts.get(`${layer}/${head}`);
    return one ? cut(one.levels, one.scales, query) : null;
  }

  /** Weights (T) of a query in a layer, of one head or of the mean of all; null where they are not here. */
  weights(layer, head, query) {
    const mean = new Float32Array(this.tokens);
    const ready = head === "mean" ? this.parts.get(`${layer}/mean`) : null;
    if (ready && query !== ANSWER) {
      return mean.map((_, key) => ready.levels[query * this.tokens + key] * ready.scales[query]);
    }
    const heads = head === "mean" ? Array.from({ length: this.inside.heads }, (_, one) => one) : [head];
    for (const one of heads) {
      const row = this.row(layer, one, query);
      if (!row) return null;
      const scale = row.scale / heads.length;
      for (let key = 0; key < mean.length; key++) mean[key] += row.levels[key] * scale;
    }
    return mean;
  }

  /** How much of each token (T) flows into a query over all layers; null where that is not carried. */
  rollout(query) {
    if (query === ANSWER) return this.tensors.rollout_answer.data;
    if (!this.tensors.rollout) return null;
    const T = this.tokens;
    const scale = this.tensors.rollout_scale.data[query];
    return Float32Array.from(
      this.tensors.rollout.data.subarray(query * T, (query + 1) * T),
      (level) => level * scale,
    );
  }

  /** Fetch what `weights` needs of a layer and is not here; true where something came. */
  async bring(layer, head) {
    const { carried } = this.inside;
    if (carried === "all" || carried === "none") return false;
    const key = carried === "layer" ? String(layer) : `${layer}/${head}`;
    if (this.parts.has(key)) return false;
    return this.once(`attention ${key}`, async () => {
      const part = carried === "layer" ? { layer } : { layer, head };
      const { tensors } = await fetchAttention(this.picture, part);
      this.parts.set(key, { levels: tensors.attention.data, scales: tensors.attention_scale.data });
      if (this.parts.size > KEPT_PARTS) this.parts.delete(this.parts.keys().next().value);
    });
  }

  // Classes

  /** The map (patches) of a class; null where it has not been fetched. */
  classMap(method, target) {
    return this.maps.get(`${method} ${target}`) ?? null;
  }

  /** Fetch the map of a class; true where it came. */
  async bringClassMap(method, target) {
    if (!this.about.methods || this.classMap(method, target)) return false;
    return this.once(`${method} ${target}`, async () => {
      const { tensors } = await fetchHeatmap(this.picture, method, target);
      this.maps.set(`${method} ${target}`, tensors.heatmaps.data);
    });
  }

  /** Do one thing at a time once: who asks again meanwhile waits for the same. */
  async once(name, work) {
    if (!this.pending.has(name)) this.pending.set(name, work().finally(() => this.pending.delete(name)));
    await this.pending.get(name);
    return true;
  }
}
