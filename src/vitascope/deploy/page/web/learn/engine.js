// The engine of labelling in the page itself: its model reads the pictures, and the browser keeps them.
//
// Everything that is decided is an entry of the log: {text, time, changes: [[id, before, after]], skipped: [id]}, where a
// label before and after is {name, source, isConfirmed} or null; it is confirmed if it is given twice.

import { counted, hundredths } from "./elements.js";
import { modelFile, pageFile } from "./export.js";
import { joined } from "./numbers.js";
import { EVERY, FEW, shuffled } from "./order.js";
import { largest } from "./regression.js";
import { fetchFeatures, openTasks, pageData } from "./server.js";
import { Storage } from "./storage.js";
import { offerTools } from "./tools.js";

const [SIDE, QUALITY] = [128, 0.6]; // of thumbnails: 3 kB
const [FIRST, AHEAD] = [12, 36]; // pictures that are shown as soon as they are there, and whose order is computed at once
const AT_ONCE = 2; // pictures that are added at the same time: one is decoded while the model reads another
const PATIENCE = 20_000; // milliseconds that `state` waits for a change
const TOLD = 5; // pictures that cannot be read, by name

/** As in the engine of the server. */
export const fetchTexts = async () => pageData.texts;
/** What the engine does beside labelling. */
export const abilities = { begin: ({ attempt }) => offerTools({ attempt, add, cancel, exported }) };

const album = []; // pictures by id: {name, session, key, label, skipped, at, url}, of random keys
const hashes = new Set(); // of their files
const log = [];
const faults = []; // sentences about pictures that were not added
const waiting = []; // those who are told of a new version
let version = 0;
let adding = null; // {queue, total, done, begun, finished}
let [fit, fits, fitting, stale, failure] = [null, 0, false, false, ""];
let order = null; // the promise of the pictures to label next
const storage = new Storage();
let learner = null;
const opened = open();
opened.catch(() => {}); // every request throws it
let saving = null; // the promise of the last of what is saved one after another

async function open() {
  await storage.open(`vitascope ${pageData.learning.digest}`);
  learner = await openTasks();
  const kept = await storage.all("pictures");
  await take(kept, joined(kept.map(({ features }) => features)));
  for (const entry of await storage.all("log")) apply(entry);
  change();
}

/** Take pictures that are kept, with their features one after another. */
async function take(kept, features) {
  for (const { name, key, session, hash } of kept) {
    album.push({ name, key, session, label: null, skipped: false, at: 0 });
    hashes.add(hash);
  }
  if (kept.length) await learner.ask({ do: "keep", values: features, width: features.length / kept.length });
}

/** A new version: those who wait for it get it, and the classifier is fitted anew. */
function change(refit = true) {
  version++;
  for (const tell of waiting.splice(0)) tell();
  if (refit) refresh();
}

// The log

function apply(entry) {
  log.push(entry);
  for (const [id, , after] of entry.changes) Object.assign(album[id], { label: after, at: log.length });
  for (const id of entry.skipped) album[id].skipped = true;
}

/** Do something after all that is being saved. */
function inTurn(act) {
  const done = Promise.all([opened, saving]).then(act);
  saving = done.catch(() => {});
  return done;
}

/** Save what `of` makes in its turn, then apply it. */
function save(of) {
  return inTurn(async () => {
    const entry = { time: new Date().toISOString(), changes: [], skipped: [], ...of() };
    await storage.writeLog((kept) => kept.add(entry, log.length));
    apply(entry);
    change();
    return snapshot();
  });
}

const percent = ({ value, low, high }) => `${share(value)} (${share(low)} to ${share(high)})`;
const share = (value) => `${hundredths(value)}%`;
const several = (count) => counted(count, "picture");

/** The classes with their pictures, in the order in which they were named. */
function classes() {
  const counts = new Map();
  for (const [, , after] of log.flatMap(({ changes }) => changes)) if (after) counts.set(after.name, 0);
  for (const { label } of album) if (label) counts.set(label.name, counts.get(label.name) + 1);
  return [...counts].map(([name, count]) => ({ name, count }));
}

// What the page asks for

export async function state(after) {
  await opened;
  const changed = (resolve) => {
    waiting.push(resolve);
    setTimeout(resolve, PATIENCE);
  };
  if (after === version) await new Promise(changed);
  return snapshot();
}

export const decide = (decisions) => save(() => {
  const changes = decisions.map(({ id, labels }) => {
    const [before, name] = [album[id].label, labels?.[0].normalize("NFC").trim()];
    return [id, before, labels && { name, source: "looked", isConfirmed: before?.name === name }];
  });
  const names = new Set(changes.map(([, , after]) => after?.name ?? "label taken away"));
  return { text: `${[...names].join(", ")} (${several(changes.length)})`, changes };
});

export const skip = (ids) => save(() => ({ text: `skipped (${several(ids.length)})`, skipped: ids }));

export const accept = (name, number) => save(() => {
  if (number !== fit?.number) throw new Error("The classifier is another one by now: look at its pictures again.");
  const changes = doubtful(name).map((id) => [id, null, { name, source: "accepted" }]);
  return { text: `${name} (${several(changes.length)}, accepted)`, changes };
});

export const undo = () => inTurn(async () => {
  if (!log.length) throw new Error("There is nothing to undo.");
  await storage.writeLog((kept) => kept.delete(log.length - 1));
  const { changes, skipped } = log.pop();
  for (const [id, before] of changes) album[id].label = before;
  for (const id of skipped) album[id].skipped = false;
  change();
  return { ...snapshot(), ids: [...changes.map(([id]) => id), ...skipped] };
});

/** {pictures, total} of a view, as the server has it. */
export async function pictures(view, count, name) {
  await opened;
  const ids = { doubtful, suspects, labelled }[view]?.(name);
  const found = ids?.map((id) => ({ id })) ?? (await next(count));
  return { pictures: found.slice(0, count).map(described), total: ids ? ids.length : album.filter(({ label }) => !label).length };
}

/** The ids of pictures of a class, or all if it is empty, the newest first. */
function labelled(name) {
  const ids = [...album.keys()].filter((id) => album[id].label && (!name || album[id].label.name === name));
  return ids.sort((a, b) => album[b].at - album[a].at);
}

/** The address of a thumbnail. */
export async function thumbnail(id) {
  await opened;
  return (album[id].url ??= URL.createObjectURL(new Blob([await storage.thumbnail(id)], { type: "image/jpeg" })));
}

function described({ id, reason = "", copies = [] }) {
  const { name, label } = album[id];
  const said = answerOf(id);
  const suggestion = said && said.label !== label?.name ? said : null;
  return { id, name, reason, copies: copies.filter(isOpen), labels: label && [label.name], source: label?.source ?? "", suggestion };
}

const isOpen = (id) => !album[id].label && !album[id].skipped;
const openRows = () => [...album.keys()].filter(isOpen);

function snapshot() {
  const sources = { looked: 0, accepted: 0, given: 0 };
  for (const { label } of album) if (label) sources[label.source]++;
  const coming = adding ? adding.total - adding.done : 0;
  const each = adding?.done >= 10 && (performance.now() - adding.begun) / (adding.done - 1) / 1000; // seconds
  const other = fit?.elsewhere && `Of pictures taken at other times, ${percent(fit.elsewhere)} are answered right.`;
  const more = faults.length > TOLD && `… and ${several(faults.length - TOLD)} more`;
  return {
    ...{ version, out: "", several: false, fitting, classes: classes(), undo: log.at(-1)?.text ?? null },
    ...{ pictures: album.length + faults.length + coming, unreadable: faults.length, read: album.length },
    ...{ labelled: sources.looked + sources.accepted, ...sources, suspects: suspects().length },
    remaining_s: each ? Math.ceil(each * coming) : null,
    notes: [other, ...faults.slice(0, TOLD), more, failure].filter(Boolean),
    fit: fit && shown(),
  };
}

// The classifier, and the order of labelling

/** Fit a classifier to the pictures that were looked at. */
async function refresh() {
  stale = fitting;
  if (fitting) return;
  const names = classes().map(({ name }) => name);
  const rows = [...album.keys()].filter((id) => album[id].label?.source === "looked");
  const labels = rows.map((id) => names.indexOf(album[id].label.name));
  if (new Set(labels).size < 2) return (fit = null);
  fitting = true;
  const [before, sessions] = [new Set(pool().before), rows.map((id) => album[id].session)];
  const judges = rows.map((id) => before.has(id));
  try {
    const { tensors, ...found } = await learner.ask({ do: "fit", rows, labels, K: names.length, judges, sessions });
    const place = new Map(rows.map((id, at) => [id, at]));
    const [p, out, margins] = [tensors.probabilities.data, tensors.out.data, tensors.margins.data];
    fit = { ...found, number: ++fits, names, rows, labels, place, p, out, margins };
    failure = "";
  } catch (error) {
    failure = `The classifier was not fitted: ${error.message}`;
  }
  fitting = false;
  if (rows.length >= FEW) order = null;
  change(false);
  if (stale) refresh();
}

/** What the page shows of the classifier. */
function shown() {
  const { score, confused, sure, reason } = fit.evidence;
  const offers = fit.names.map((label) => ({ label, count: doubtful(label).length, ...sure }));
  return {
    ...{ number: fit.number, measure: "accuracy", reason },
    ...(score ?? { labels: fit.rows.length, value: null, low: null, high: null }),
    confused: confused && { ...confused, label: fit.names[confused.label], said: fit.names[confused.said] },
    acceptances: offers.filter(({ count }) => count),
  };
}

/** The probabilities of a picture (K): of a labelled one by a classifier that does not know it; null without one. */
function sharesOf(id) {
  if (!fit) return null;
  const [K, at] = [fit.names.length, fit.place.get(id)];
  const shares = at === undefined ? fit.p.subarray(id * K, (id + 1) * K) : fit.out.subarray(at * K, (at + 1) * K);
  return shares.length ? shares : null;
}

function answerOf(id) {
  const shares = sharesOf(id);
  return shares && { label: fit.names[largest(shares)], probability: shares[largest(shares)] };
}

/** Labelled pictures that contradict the classifier, the worst first, but those whose label is confirmed or changed. */
function suspects() {
  const isOne = (at) => {
    const { label } = album[fit.rows[at]];
    return label?.name === fit.names[fit.labels[at]] && !label.isConfirmed;
  };
  return fit ? fit.evidence.suspects.filter(isOne).map((at) => fit.rows[at]) : [];
}

/** The pictures that accepting a class would label, the least sure first. */
function doubtful(label) {
  if (!fit?.evidence.sure) return [];
  const answers = openRows().map((id) => ({ id, ...answerOf(id) }));
  const sure = answers.filter((one) => one.label === label && one.probability >= fit.evidence.sure.least);
  return sure.sort((a, b) => a.probability - b.probability).map(({ id }) => id);
}

/** The pictures to label next, [{id, reason, copies}], in an order that is kept until few of them are left. */
async function next(count) {
  const left = async () => (await order)?.filter(({ id }) => isOpen(id)) ?? [];
  if ((await left()).length < count) order = ordered(Math.max(count, AHEAD));
  const [first, skipped] = [await left(), [...album.keys()].filter((id) => album[id].skipped && !album[id].label)];
  const rest = openRows().filter((id) => !first.some((one) => one.id === id));
  return [...first, ...rest.map((id) => ({ id })), ...skipped.map((id) => ({ id, reason: "skipped" }))];
}

async function ordered(count) {
  const labelled = [...album.keys()].filter((id) => album[id].label);
  const { waiting, others } = pool();
  const margins = fit && others.map((id) => fit.margins[id] ?? 0);
  const found = await learner.ask({ do: "next", open: others, waiting, labelled, count, margins });
  return found.map((one) => (one.reason === "unsure" ? { ...one, reason: doubtOf(one.id) } : one));
}

/**
 * The random third of the pictures that only judge, in a random order: those `before` the first that nobody looked at, and
 * those that are `waiting`; and the `others` without a label. If all have been looked at, all judge.
 */
function pool() {
  const isNew = (id) => isOpen(id) || album[id].label?.source === "accepted";
  const isThird = (id) => album[id].key % EVERY === 0;
  const all = [...album.keys()].sort((a, b) => album[a].key - album[b].key);
  const ids = all.some(isNew) ? all.filter(isThird) : all;
  const first = ids.findIndex(isNew);
  const others = openRows().filter((id) => !isThird(id));
  return { before: ids.slice(0, first < 0 ? ids.length : first), waiting: ids.filter(isOpen), others };
}

/** The two best answers in words. */
function doubtOf(id) {
  const shares = sharesOf(id) ?? [];
  const best = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 2);
  return best.length ? `${best.map((k) => fit.names[k]).join(" or ")}, ${best.map((k) => share(shares[k])).join(" to ")}` : "new";
}

/** A file of the classifier, as a Blob: a "page" that answers, or a "run", a model for vitascope. */
export async function exported(kind) {
  await opened;
  if (!fit) throw new Error("There is no classifier yet: label pictures of two classes.");
  return { page: pageFile, run: modelFile }[kind]({ names: fit.names, ...fit.map });
}

// Pictures that are added

/** Read pictures and keep them, and call `first` with the first ones; the notes name those that cannot be read. */
export async function add(files, first = () => {}) {
  await opened;
  const isFirst = !adding;
  adding ??= { total: 0, done: 0, queue: [] };
  adding.queue = shuffled([...adding.queue, ...files]); // so that the first ones are like all
  adding.total += files.length;
  change(false);
  if (isFirst) adding.finished = finishAdding(adding, openRows().length ? () => {} : first);
  return adding.finished;
}

/** Add no more of the pictures that wait. */
export function cancel() {
  if (adding) adding.total -= adding.queue.splice(0).length;
  change(false);
}

async function finishAdding(run, first) {
  const work = async () => {
    for (let file = run.queue.pop(); file; file = run.queue.pop()) {
      await addOne(file);
      run.begun ??= performance.now(); // the first picture waits for the model
      if (++run.done === FIRST) first();
      change(false);
    }
  };
  try {
    await Promise.all(Array.from({ length: AT_ONCE }, work));
  } finally {
    run.queue.splice(0); // after an error, such as that of a full disk
    adding = order = null;
    change();
  }
  if (run.done < FIRST) first();
}

async function addOne(file) {
  const name = file.webkitRelativePath || file.name;
  const digest = await crypto.subtle.digest("SHA-256", await file.arrayBuffer());
  const [hash, key] = [new Uint8Array(digest, 0, 16).join(" "), new Uint32Array(digest)[7]];
  if (hashes.has(hash)) return; // this file is here
  hashes.add(hash);
  const found = await fetchFeatures(file, thumbnailOf).catch(({ message }) => {
    const isHeic = /\.hei[cf]$/i.test(name);
    faults.push(`${name}: ${isHeic ? "HEIC, which this browser cannot read: save it as JPEG" : message}`);
  });
  if (!found) return hashes.delete(hash);
  const picture = { name, key, hash, session: new Date(file.lastModified).toISOString().slice(0, 10) };
  const kept = inTurn(async () => {
    await storage.addPicture(album.length, { ...picture, features: found.features }, found.seen);
    await take([picture], found.features);
  });
  return kept.catch((error) => {
    hashes.delete(hash);
    throw error;
  });
}

/** A small JPEG of a picture, on white. */
async function thumbnailOf(bitmap) {
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(scale * side)));
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  Object.assign(context, { imageSmoothingQuality: "high", fillStyle: "white" }).fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", QUALITY));
  return blob.arrayBuffer();
}
