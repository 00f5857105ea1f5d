// The panel: what is labelled, how good a classifier of it is, and what may be labelled without looking.

import { at, counted, fill, hundredths, make, whole, write } from "./elements.js";

const interval = ({ low, high }) => `${hundredths(low)} to ${hundredths(high)}`;
const NONE = { measure: "accuracy", reason: "Shown when two classes have a few pictures each.", acceptances: [] };

/** Draw the state; its buttons call `open(view, label)` and `accept(label, fit)`; the doubtful of `looked` are shown. */
export function drawProgress(state, open, accept, looked) {
  const { pictures, labelled, read, remaining_s: remaining, unreadable } = state;
  const { value = null, confused, ...fit } = state.fit ?? NONE;
  const time = remaining < 90 ? `${remaining} s` : `${Math.round(remaining / 60)} min`;
  const sources = [`${whole(state.looked)} looked at`, `${whole(state.accepted)} accepted`, `${whole(state.given)} given`];
  const texts = {
    count: whole(labelled),
    of: `of ${counted(pictures, "picture")}`,
    sources: state.accepted || state.given ? sources.join(", ") : "",
    read: `The model has read ${whole(read)} of ${whole(pictures)}${remaining === null ? "" : `, ${time} left`}`,
    measure: fit.measure[0].toUpperCase() + fit.measure.slice(1),
    percent: value === null ? "" : `${hundredths(value)}%`,
    interval: value === null ? "" : `${interval(fit)}%`,
    reason: value === null ? fit.reason : "",
    confused: confused ? `${confused.count} “${confused.label}” taken for “${confused.said}”` : "",
    "of-suspects": state.suspects ? whole(state.suspects) : "",
    "of-labelled": labelled ? whole(labelled) : "",
    command: state.out && `vitascope train --data ${/^[\w.,:/-]+$/.test(state.out) ? state.out : `'${state.out.replaceAll("'", "'\\''")}'`}`,
  };
  for (const [id, text] of Object.entries(texts)) write(at(id), text);
  document.title = `${whole(labelled)} of ${whole(pictures)} – vitascope label`;
  Object.assign(at("share"), { max: pictures || 1, value: labelled });
  Object.assign(at("read-share"), { max: pictures || 1, value: read });
  at("confused").onclick = () => open("suspects", confused.label);
  at("value").hidden = value === null;
  if (value !== null) {
    const [range, mark] = at("value").querySelectorAll("i");
    Object.assign(range.style, { left: `${100 * fit.low}%`, right: `${100 - 100 * fit.high}%` });
    mark.style.left = `${100 * value}%`;
  }
  const notes = [unreadable && `${counted(unreadable, "picture")} cannot be read.`, ...state.notes].filter(Boolean);
  fill(at("notes"), notes, () => notes.map((note) => make("p", {}, note)));
  const row = ({ label, count, ...shares }) => {
    const look = make("button", { onclick: () => open("doubtful", label) }, "Look at the doubtful ones");
    const take = make("button", { onclick: () => accept(label, fit.number) }, `Accept ${whole(count)}`);
    take.className = looked === label ? "primary" : "";
    const right = `${hundredths(shares.value)}% (${interval(shares)}) right`;
    return make("li", {}, make("p", {}, `Accept ${counted(count, "picture")} as “${label}”: ${right}`), look, take);
  };
  fill(at("accepted"), [fit.acceptances, fit.number, looked], () => fit.acceptances.map(row));
  const hidden = { reading: read + unreadable >= pictures, notes: !notes.length, accept: !fit.acceptances.length, end: !labelled };
  for (const [id, isHidden] of Object.entries(hidden)) at(id).hidden = isHidden;
}
