// The result for one picture: the numbers that are loaded, and those still to fetch.
//
// T tokens: `prefix` of them (class token, registers), then the patches, row by row. A query is a token's
// number, or ANSWER: the mean of the tokens that the head reads.

import { Features } from "./features.js";
import { fetchAttention, fetchHeatmap } from "./server.js";

export const ANSWER = "answer";
const KEPT_PARTS = 4;

export class Answer {
  /**
   * @param source the model that was asked: "" or the prefix of its addresses.
   * @param off the parts of it that are switched off, as in `view`.
   */
  constructor({ tensors, about }, picture, source, off) {
    Object.assign(this, { picture, source, off, about, tensors });
    this.inside = about.inside ?? null;
    this.pixels = tensors.pixels;
    this.probabilities = tensors.probabilities?.data ?? new Float32Array(0); // empty for a model without a head
    this.thresholds = tensors.thresholds?.data ?? null; // where any number of classes may apply
    this.grid = about.grid ?? null;
    this.parts = new Map(); // "layer" or "layer/head" -> {levels, scales}
    this.maps = new Map(); // "method class" -> {heatmaps, curve}
    this.coming = null; // the part that is being fetched: {name, controller, done}
    this.prefix = this.inside?.tokens.length ?? 0;
    this.tokens = this.prefix + this.cells;
    this.share = null; // of it that is computed, where that is known
    const size = this.cells;
    about.explained?.classes.forEach((target, place) => {
      const data = tensors.heatmaps.data.subarray(place * size, (place + 1) * size);
      this.maps.set(`${about.explained.method} ${target}`, { heatmaps: { data } });
    });
    this.features = tensors.features ? new Features(tensors) : null;
  }

  /** Patches of a ViT, places of a ResNet's last feature map. */
  get cells() {
    return this.grid ? this.grid[0] * this.grid[1] : 0;
  }

  /** Class numbers, the most probable first: `count` of them, or all. */
  top(count = undefined) {
    const order = Array.from(this.probabilities.keys());
    order.sort((a, b) => this.probabilities[b] - this.probabilities[a]);
    return order.slice(0, count);
  }

  /** Whether a class applies, where any number of them may. */
  applies(index) {
    return this.thresholds !== null && this.probabilities[index] >= this.thresholds[index];
  }

  /** The most probable classes, then others that apply, together at most `most`. */
  shown(count, most) {
    const others = this.top().slice(count);
    return [...this.top(count), ...others.filter((index) => this.applies(index))].slice(0, most);
  }

  label(index) {
    return this.about.class_names[index] ?? String(index);
  }

  // Attention

  /** One head's row of a query as bytes and their scale; null if it is not loaded. */
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

  /** Weights (T) of a query in a layer, of one head or of the mean of all; null if they are not loaded. */
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

  /** The flow of each token (T) into a query over all layers; null if it is not in the response. */
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

  // Classes

  /** The map (patches) of a class; null if it is not loaded. */
  classMap(method, target) {
    return this.maps.get(`${method} ${target}`)?.heatmaps.data ?? null;
  }

  /** The share of a class after 0 to L layers (L + 1), by the lens; null if it is not loaded. */
  curve(target) {
    return this.maps.get(`lens ${target}`)?.curve.data ?? null;
  }

  // Fetching

  /**
   * The part to fetch before a view can be drawn; null if everything is loaded.
   *
   * @param view the view of this answer, from `viewIn`.
   */
  missing({ mode, layer, head, method, target }) {
    if (mode === "lens") method = "lens";
    if (mode === "class" || mode === "lens") {
      return this.about.methods && !this.classMap(method, target) ? { method, target } : null;
    }
    const { carried } = this.inside;
    if (["similarity", "pca"].includes(mode)) return null;
    if (carried === "all" || carried === "none") return null;
    const part = carried === "layer" ? { layer } : { layer, head };
    return this.parts.has(Object.values(part).join("/")) ? null : part;
  }

  /** Fetch a part, or wait for its running request; all other requests are aborted. Null only aborts. */
  async bring(part) {
    const name = JSON.stringify(part);
    if (this.coming?.name !== name) {
      this.coming?.controller.abort();
      this.coming = part && this.begin(name, part);
    }
    await this.coming?.done;
  }

  begin(name, part) {
    const controller = new AbortController();
    this.share = null;
    const done = this.fetch(part, controller.signal).finally(() => {
      if (this.coming?.controller === controller) this.coming = null;
    });
    return { name, controller, done };
  }

  async fetch(part, signal) {
    const asked = { ...part, off: this.off };
    if ("method" in part) {
      const { tensors } = await fetchHeatmap(this.picture, asked, signal, this.source, (share) => {
        this.share = share;
      });
      this.maps.set(`${part.method} ${part.target}`, tensors);
      return;
    }
    const { tensors } = await fetchAttention(this.picture, asked, signal, this.source);
    this.parts.set(Object.values(part).join("/"), {
      levels: tensors.attention.data,
      scales: tensors.attention_scale.data,
    });
    if (this.parts.size > KEPT_PARTS) this.parts.delete(this.parts.keys().next().value);
  }
}
