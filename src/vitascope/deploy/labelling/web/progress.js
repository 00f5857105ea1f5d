// The panel: what is labelled, how good a classifier of it is, and what may be labelled without looking.

import { at, counted, fill, hundredths, make, whole, write } from "./elements.js";

const interval = ({ low, high }) => `${hundredths(low)} to ${hundredths(high)}`;

/** Draw the state; `act` has {suspects(label), doubtful(label), accept(label, fit)}; the doubtful of `looked` are shown. */
export function drawProgress(state, act, looked) {
  const { pictures, read, remaining_s: remaining, unreadable, fit } = state;
  at("count").textContent = whole(state.labelled);
  at("of").textContent = `of ${counted(pictures, "picture")}`;
  Object.assign(at("share"), { max: pictures || 1, value: state.labelled });
  const sources = [`${whole(state.looked)} looked at`, `${whole(state.accepted)} accepted`, `${whole(state.given)} given`];
  write(at("sources"), state.accepted || state.given ? sources.join(", ") : "");
  const time = remaining < 90 ? `${remaining} s` : `${Math.round(remaining / 60)} min`;
  at("reading").hidden = read + unreadable >= pictures;
  at("read").textContent = `The model has read ${whole(read)} of ${whole(pictures)}${remaining === null ? "" : `, ${time} left`}`;
  Object.assign(at("read-share"), { max: pictures || 1, value: read });
  drawFit(fit ?? { reason: "Shown when two classes have a few pictures each.", measure: "accuracy" }, act);
  const acceptances = fit?.acceptances ?? [];
  at("accept").hidden = !acceptances.length;
  fill(at("accepted"), [acceptances, fit?.number, looked], () => acceptances.map((one) => acceptance(one, fit.number, act, looked)));
  const notes = [unreadable && `${counted(unreadable, "picture")} cannot be read.`, ...state.notes].filter(Boolean);
  at("notes").hidden = !notes.length;
  fill(at("notes"), notes, () => notes.map((note) => make("p", {}, note)));
  at("end").hidden = !state.labelled;
  const out = /^[\w.,:/-]+$/.test(state.out) ? state.out : `'${state.out.replaceAll("'", "'\\''")}'`; // for a shell
  at("command").firstChild.textContent = `vitascope train ${out}`;
}

function drawFit({ value = null, forecast, confused, measure, reason, ...fit }, act) {
  at("measure").textContent = measure[0].toUpperCase() + measure.slice(1);
  write(at("reason"), value === null ? reason : "");
  drawScale(at("value"), value !== null && { ...fit, value });
  drawScale(at("forecast"), value !== null && forecast);
  if (value !== null) at("percent").textContent = `${hundredths(value)}%`;
  if (value !== null) at("interval").textContent = `${interval(fit)}%`;
  const later = forecast && `about ${hundredths(forecast.value)}% (${interval(forecast)})`;
  at("later").textContent = forecast ? `${counted(forecast.labels - fit.labels, "more label")}: ${later}` : "";
  write(at("confused"), confused ? `${confused.count} “${confused.label}” taken for “${confused.said}”` : "");
  at("confused").onclick = () => act.suspects(confused.label);
}

function drawScale(figure, estimate) {
  figure.hidden = !estimate;
  if (!estimate) return;
  const [range, mark] = figure.querySelectorAll("i");
  Object.assign(range.style, { left: `${100 * estimate.low}%`, right: `${100 - 100 * estimate.high}%` });
  mark.style.left = `${100 * estimate.value}%`;
}

function acceptance({ label, count, ...shares }, number, act, looked) {
  const text = `Accept ${counted(count, "picture")} as “${label}”: ${hundredths(shares.value)}% (${interval(shares)}) right`;
  const look = make("button", { type: "button", onclick: () => act.doubtful(label) }, "Look at the doubtful ones");
  const take = make("button", { type: "button", onclick: () => act.accept(label, number) }, `Accept ${whole(count)}`);
  if (looked === label) take.className = "primary";
  return make("li", {}, make("p", {}, text), look, take);
}
