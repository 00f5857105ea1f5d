// The controls beside the picture: created once per model, and updated with the view.

import { ANSWER } from "./answer.js";
import { make } from "./draw.js";
import { change, isOfClass, offIn, restOf, toggleOff, view, viewIn } from "./view.js";
import { partName, percent, tokenName } from "./words.js";

const FOUND = 8; // search results, at most

const HOVERS = matchMedia("(hover: hover)"); // false on a screen that is only touched

const at = (id) => document.getElementById(id);

export class Controls {
  constructor() {
    this.answer = null;
    for (const button of at("modes").children) {
      button.addEventListener("click", () => change({ mode: button.dataset.mode }));
    }
    at("layer").addEventListener("input", () => change({ layer: Number(at("layer").value) }));
    at("method").addEventListener("change", () => change({ method: at("method").value }));
    at("strength").addEventListener("input", () => change({ strength: Number(at("strength").value) }));
    at("smooth").addEventListener("change", () => change({ smooth: at("smooth").checked }));
    at("raw").addEventListener("change", () => change({ sharp: !at("raw").checked }));
    at("strength").value = view.strength;
    at("search").addEventListener("input", () => this.find());
    at("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") at("found").querySelector("button")?.click();
      if (event.key === "Escape") this.endSearch();
    });
  }

  /** Fit the controls to a model. */
  build(answer) {
    const { inside, about } = answer;
    at("controls").hidden = !answer.grid && !about.missing;
    at("missing").hidden = !about.missing;
    at("missing").textContent = about.missing ?? "";
    at("modes").hidden = !inside;
    for (const button of at("modes").children) if (isOfClass(button.dataset.mode)) button.hidden = !about.methods;
    if (!inside && answer.grid) change({ mode: "class" });
    if (!about.methods && isOfClass(view.mode)) change({ mode: "attention" });
    document.querySelector(".looks").hidden = !answer.grid;
    const methods = Object.entries(about.methods ?? {}).map(([name, title]) => new Option(title, name));
    at("method").replaceChildren(...methods);
    if (about.methods && !(view.method in about.methods)) change({ method: about.explained.method });
    if (inside) this.buildHeads(answer);
  }

  buildHeads({ inside, prefix }) {
    at("layer").max = inside.depth - 1;
    const heads = ["mean", ...Array.from({ length: inside.heads }, (_, head) => head)];
    at("heads").replaceChildren(
      ...heads.map((head) => {
        const name = head === "mean" ? "Mean of the heads" : `Head ${head}`;
        return chip(head, { head }, () => change({ mode: "attention", head }), name);
      }),
    );
    const queries = HOVERS.matches ? [[null, "follow the pointer"]] : [];
    if (inside.reads !== inside.tokens[0]) queries.push([ANSWER, inside.reads]);
    for (let token = 0; token < prefix; token++) queries.push([token, inside.tokens[token]]);
    at("queries").replaceChildren(
      ...queries.map(([held, name]) => chip(name, { held }, () => change({ held, pointed: null }))),
      chip("", { patch: true }, () => {
        at("queries").firstElementChild.focus(); // this one disappears
        change({ held: null });
      }),
      at("query-hint"),
    );
  }

  /** Show the current view. */
  draw() {
    const { answer } = this;
    if (!answer) return;
    for (const button of at("modes").children) press(button, button.dataset.mode === view.mode);
    at("class-row").hidden = !answer.grid || (!isOfClass(view.mode) && Boolean(answer.inside));
    at("method").value = view.method;
    for (const one of [at("method"), at("method").labels[0]]) one.hidden = view.mode === "lens";
    const byHead = view.mode === "attention" && Boolean(answer.inside);
    const byQuery = Boolean(answer.inside) && ["attention", "rollout", "similarity"].includes(view.mode);
    at("layer-row").hidden = !byHead && (view.mode !== "lens" || !answer.inside);
    at("head-row").hidden = !byHead;
    at("queries").hidden = !byQuery;
    at("switch-row").hidden = !answer.inside;
    this.drawCurve(answer);
    at("wall-figure").hidden = !byQuery;
    for (const hint of at("hints").children) hint.hidden = hint.dataset.mode !== (answer.inside ? view.mode : "class");
    if (!answer.inside) return;
    if (Number(at("layer").value) !== view.layer) at("layer").value = view.layer;
    at("layer-value").textContent = `${view.layer} of 0–${answer.inside.depth - 1}`;
    at("unread").hidden = answer.inside.patches_read_last || view.layer < answer.inside.depth - 1 || !byHead;
    for (const button of at("heads").children) press(button, button.choice.head === view.head);
    const held = HOVERS.matches ? view.held : (view.held ?? restOf(answer));
    const patch = view.held !== null && view.held !== ANSWER && view.held >= answer.prefix;
    for (const button of at("queries").querySelectorAll("button:not(.hint)")) {
      if (!button.choice.patch) press(button, button.choice.held === held);
      else {
        button.hidden = !patch;
        if (patch) button.textContent = `${tokenName(answer, view.held)} ×`;
        press(button, patch);
      }
    }
    this.drawSwitches(answer);
  }

  /** The class as it is read after each layer. */
  drawCurve(answer) {
    const { mode, layer, target } = viewIn(answer);
    const curve = mode === "lens" ? answer.curve(target) : null;
    at("curve-figure").hidden = !curve;
    if (!curve) return;
    const nameOf = (place) => (place ? `after layer ${place - 1}` : "before the layers");
    fill(at("curve"), `${curve.join()}`, () => Array.from(curve, (share, place) => {
      const bar = chip("", { layer: place - 1 }, () => change({ layer: place - 1 }), `${nameOf(place)}: ${percent(share)}`);
      bar.title = bar.getAttribute("aria-label");
      bar.disabled = !place; // where no patch has been attended to
      bar.style.setProperty("--share", share);
      return bar;
    }));
    for (const bar of at("curve").children) press(bar, bar.choice.layer === layer);
    const number = curve[layer + 1];
    at("curve-note").textContent = `“${answer.label(target)}” ${nameOf(layer + 1)}: ${percent(number)}`;
  }

  /** The parts that can be switched off: those of the shown layer, the held patch, and those that are off. */
  drawSwitches(answer) {
    const { layer, head, held } = viewIn(answer);
    const off = offIn(answer.source);
    const [patches, others] = [true, false].map((isOne) => off.filter((part) => part.startsWith("patch") === isOne));
    const parts = ["attention", "mlp", "layer"].map((kind) => `${kind}${layer}`);
    if (head !== "mean") parts.unshift(`head${layer}.${head}`);
    if (held !== null) parts.unshift(`patch${held}`);
    const shown = [...new Set([...parts, ...(patches.length > 1 ? others : off)])];
    fill(at("switches"), `${shown} ${patches}`, () => [
      ...shown.map((part) => chip(partName(answer, part), { part }, () => toggleOff(part))),
      ...(patches.length > 1 ? [chip(`${patches.length} patches ×`, {}, () => change({ off: others }))] : []),
    ]);
    for (const button of at("switches").children) press(button, !button.choice.part || off.includes(button.choice.part));
  }

  /** List the classes whose name or number matches the search. */
  find() {
    const text = at("search").value.trim().toLowerCase();
    const found = [];
    const count = this.answer.probabilities.length;
    for (let index = 0; text && index < count && found.length < FOUND; index++) {
      const label = this.answer.label(index);
      if (label.toLowerCase().includes(text) || String(index) === text) found.push([index, label]);
    }
    at("found").replaceChildren(
      ...found.map(([index, label]) => make("li", {}, chip(label, { target: index }, () => this.choose(index)))),
    );
    at("found").hidden = !found.length;
  }

  choose(index) {
    change({ mode: view.mode === "lens" ? "lens" : "class", target: index });
    this.endSearch();
  }

  endSearch() {
    at("search").value = "";
    at("found").hidden = true;
  }

  /** Move to the next layer or head, up to the last. */
  step(name, by) {
    const { depth, heads } = this.answer.inside;
    const last = (name === "layer" ? depth : heads) - 1;
    const from = view[name] === "mean" ? (by > 0 ? -1 : last + 1) : view[name];
    change({ mode: name === "layer" && view.mode === "lens" ? "lens" : "attention", [name]: Math.min(last, Math.max(0, from + by)) });
  }
}

function chip(text, choice, chosen, label = "") {
  const button = make("button", { type: "button", textContent: text, choice });
  if (label) button.setAttribute("aria-label", label);
  button.addEventListener("click", chosen);
  return button;
}

/** Give an element other buttons where its key has changed; the place that has the focus keeps it. */
function fill(element, key, buttons) {
  if (element.dataset.key === key) return;
  const focused = [...element.children].indexOf(document.activeElement);
  element.dataset.key = key;
  element.replaceChildren(...buttons());
  element.children[focused]?.focus();
}

function press(button, pressed) {
  button.setAttribute("aria-pressed", pressed);
}
