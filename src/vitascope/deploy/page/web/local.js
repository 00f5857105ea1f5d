// In place of server.js, in a page that holds the models itself: the same functions, answered by workers.
//
// `source` is "" for the page's model, or what the explorer calls the one beside it. Each has a thread of its own.

import { threadHere } from "./worker.js";

export const pageData = JSON.parse(document.getElementById("model-data").textContent);
const { models, programs, samples, texts, learning } = pageData;
document.getElementById("arriving").remove();
let reporting = () => {}; // of the request that begins

/** A thread and what it is asked. */
class Requests {
  pending = new Map(); // id -> {resolve, reject, report}
  numbers = 0;
  thread = null;

  async open() {
    this.thread = await openThread((message) => this.receive(message));
  }

  receive({ id, share, result, error }) {
    const request = this.pending.get(id);
    if (share !== undefined) return request.report(share);
    this.pending.delete(id);
    if (error === undefined) request.resolve(result);
    else request.reject(new Error(error));
  }

  /** Ask the thread; `signal` ends the request, and what is `handed` to the thread leaves the page. */
  ask(message, signal, report = () => {}, handed = []) {
    const id = this.numbers++;
    return new Promise((resolve, reject) => {
      signal?.throwIfAborted();
      signal?.addEventListener("abort", () => {
        this.thread.send({ id, do: "abort" });
        reject(signal.reason);
      });
      this.pending.set(id, { resolve, reject, report });
      this.thread.send({ id, ...message }, handed);
    });
  }
}

/** A model in the document, which leaves it when it is first asked, unless the page is going to export it. */
class Model extends Requests {
  pixels = new WeakMap(); // picture -> the promise of the model's pixels
  reports = []; // of those that wait for the model
  started = null; // the promise of the model

  constructor({ options, about, described }, place) {
    super();
    Object.assign(this, { options, about, described });
    this.pieces = `script[type='text/base64'][data-model='${place}']`;
  }

  /** Start the model if it is not started, and wait for it. */
  async ready(report) {
    this.reports.push(report);
    await (this.started ??= this.start());
    this.reports = [];
  }

  /** Hand the weights to the thread, piece by piece; each piece leaves the page's memory. */
  async start() {
    const { options, about } = this;
    await this.open();
    this.kernel = await this.ask({ do: "begin", options, about, programs });
    const pieces = document.querySelectorAll(this.pieces).length;
    const next = () => document.querySelector(this.pieces); // a list of them would keep them all
    for (let [piece, place] = [next(), 0]; piece; [piece, place] = [next(), place + 1]) {
      for (const report of this.reports) report(`unpacking the model, ${Math.round((100 * place) / pieces)}%`);
      await this.ask({ do: "piece", base64: piece.textContent });
      if (learning) piece.dataset.model += " unpacked";
      else piece.remove();
    }
    about.model = `${this.computing()}, ${about.model}`;
  }

  /** What computes, once the model is unpacked. */
  computing() {
    return `${this.kernel} in this browser${this.thread.where}`;
  }

  /** The model's pixels of a picture, computed once. */
  pixelsOf(picture) {
    if (!this.pixels.has(picture)) {
      this.pixels.set(picture, this.seen(picture));
      this.pixels.get(picture).catch(() => this.pixels.delete(picture)); // so that `Try again` does
    }
    return this.pixels.get(picture);
  }

  async seen(picture) {
    const bitmap = await decoded(picture, this.about.framing);
    return this.ask({ do: "pixels", bitmap }, undefined, undefined, [bitmap]);
  }
}

const [own, beside] = models.map((model, place) => new Model(model, place));
const modelOf = (source) => (source ? beside : own);

/** A new thread's message function: a worker's or, where the browser gives none, the page's own. */
async function openThread(receive) {
  try {
    const program = document.getElementById("model-program").textContent;
    const worker = new Worker(URL.createObjectURL(new Blob([program], { type: "text/javascript" })));
    await new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => {
        if (data.ready) return resolve();
        worker.terminate();
        reject(new Error("a worker that cannot read pixels"));
      };
      worker.onerror = (event) => reject(new Error(event.message));
    });
    worker.onmessage = ({ data }) => receive(data);
    return { send: (message, handed) => worker.postMessage(message, handed), where: "" };
  } catch {
    return { send: threadHere(receive), where: ", in the page itself, because this browser gives it no worker" };
  }
}

/** What computes a model, which is unpacked then. */
export async function computing(source = "") {
  await modelOf(source).ready(reporting);
  return modelOf(source).computing();
}

// There are no tokens here.
export const useToken = () => {};
export const takeToken = () => false;

/** Run a request, which reports what it is doing. */
export function whenReady(request, report) {
  reporting = report;
  try {
    return request(); // it takes the report before it awaits anything
  } finally {
    reporting = () => {};
  }
}

/** A picture's prediction and attention, or one layer's attention if `part` names one. */
export async function fetchAttention(picture, part = {}, signal = undefined, source = "") {
  const [model, told] = [modelOf(source), reporting];
  const report = (reason) => signal?.aborted || told(reason); // its panel may wait for the other model meanwhile
  await model.ready(report);
  const isWhole = part.layer === undefined;
  const asked = { do: "answer", what: isWhole ? "explore" : "attention", pixels: await model.pixelsOf(picture), part };
  const found = await model.ask(asked, signal, (share) => {
    if (isWhole) report(`the model is looking, ${Math.round(100 * share)}%`);
  });
  return isWhole ? { ...found, about: { ...model.about, verdict: found.verdict } } : found;
}

/** The map of a class: `part` is {method, target}; `report` gets the share that is done. */
export async function fetchHeatmap(picture, part, signal, source, report) {
  const model = modelOf(source);
  const pixels = await model.pixelsOf(picture);
  return model.ask({ do: "answer", what: "heatmap", pixels, part }, signal, report);
}

/** The features (D) of a picture, and what `look` makes of it once it is decoded: {features, seen}. */
export async function fetchFeatures(picture, look) {
  const bitmap = await decoded(picture, own.about.framing);
  const seen = await look(bitmap);
  await own.ready(reporting);
  const pixels = await own.ask({ do: "pixels", bitmap }, undefined, undefined, [bitmap]);
  const { tensors } = await own.ask({ do: "answer", what: "features", pixels });
  return { features: tensors.features.data, seen };
}

/** A thread without a model, which answers the `tasks` of its modules. */
export async function openTasks() {
  const thread = new Requests();
  await thread.open();
  await thread.ask({ do: "prepare", programs });
  return thread;
}

/** A model: its name, architecture and digest. The one beside the page's own is not unpacked before it is compared. */
export async function fetchModel(source = "") {
  if (!source) await own.ready(reporting);
  return { ...modelOf(source).described, beside: beside !== undefined };
}

/** The page's texts in Chinese by the English ones. */
export const fetchTexts = async () => texts;

/** The names and titles of the samples. */
export const fetchSamples = async () => samples;

/** A sample's encoded picture. */
export async function fetchSample(name) {
  const { base64, type } = samples.find((sample) => sample.name === name);
  return new Blob([Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0))], { type });
}

// The page decodes pictures, because in a file from the disk WebKit (Safari) reads no blob in a worker.

const PNG = [0x89, 0x50, 0x4e, 0x47];

/** The decoded picture, which can be handed to a worker; an error if it is none or has more bits than 8. */
async function decoded(picture, framing) {
  await checkBits(picture, framing);
  try {
    return await createImageBitmap(picture, {
      imageOrientation: framing.exif_orientation ? "from-image" : "none",
      colorSpaceConversion: "none",
      premultiplyAlpha: "none",
    });
  } catch {
    throw new Error("not a picture that this browser can read, or one that is too large for it");
  }
}

/** A browser reads 8 bits per value, so where the model has levels for more it would be wrong. */
async function checkBits(picture, { levels }) {
  if (!levels) return;
  const start = new Uint8Array(await picture.slice(0, 26).arrayBuffer());
  if (PNG.every((byte, place) => start[place] === byte) && start[24] === 16) {
    throw new Error("a picture of 16 bits, which a browser reduces to 8; use `vitascope predict`");
  }
}
