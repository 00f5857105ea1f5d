// The pictures on the page, one of which is the current one.

import { SIDE } from "./batch.js";
import { at, fill, hundredths, words, write } from "./elements.js";
import { thumbnail } from "./engine.js";

const LARGE = 1600; // pixels

/** Draw the pictures; `act` has {show, clear, take}, functions of a picture. */
export function drawGrid(pictures, current, act) {
  const cardOf = (picture) => at(`card-${picture.id}`) ?? newCard(picture, act);
  fill(at("grid"), pictures.map(({ id }) => id), () => pictures.map(cardOf));
  for (const picture of pictures) drawCard(cardOf(picture), picture, picture === current);
  if (at("large").open && current) enlarge(current);
}

/** Move the focus to the current picture, unless it is in a field, the panel or a dialog. */
export function focusCurrent() {
  const isElsewhere = document.activeElement.closest("input, select, aside, dialog");
  if (!isElsewhere) document.querySelector(".picture[aria-current=true]")?.focus();
}

/** Show a picture as large as the window. */
export function enlarge(picture) {
  const [image, caption] = at("large").querySelectorAll("img, .name");
  if (image.dataset.id !== `${picture.id}`) load(image, picture, LARGE);
  caption.textContent = picture.name;
  if (!at("large").open) at("large").showModal();
}

async function load(image, { id, name }, side) {
  image.dataset.id = id;
  Object.assign(image, { src: await thumbnail(id, side), alt: name });
}

function newCard(picture, act) {
  const card = at("card").content.cloneNode(true).firstElementChild;
  const [shown, image, label, suggestion] = card.querySelectorAll("button, img");
  Object.assign(card, { id: `card-${picture.id}`, title: picture.name });
  image.onerror = () => card.classList.add("broken");
  load(image, picture, SIDE);
  shown.onclick = () => act.show(picture);
  label.onclick = () => act.clear(picture);
  suggestion.onclick = () => act.take(picture);
  return card;
}

function drawCard(card, { labels, pending, draft, skipped, suggestion, copies, reason }, isCurrent) {
  const [shown, label, likely] = card.querySelectorAll("button");
  const given = draft ?? labels;
  const text = pending || (given ? words(given) : skipped ? "skipped" : "");
  card.classList.toggle("saved", !pending && !draft);
  Object.assign(shown, { ariaCurrent: isCurrent, tabIndex: isCurrent ? 0 : -1 });
  label.hidden = !text;
  Object.assign(label.firstChild, { className: given?.length ? "name" : "", textContent: text });
  likely.hidden = !suggestion || Boolean(text);
  likely.firstChild.textContent = suggestion?.label ?? "";
  likely.lastChild.textContent = suggestion ? `${hundredths(suggestion.probability)}%` : "";
  write(card.querySelector(".reason"), reason);
  write(card.querySelector(".alike"), copies.length ? `${copies.length} alike` : "");
}
