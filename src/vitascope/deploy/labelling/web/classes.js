// The classes as buttons with keys, and the field that adds a class, or finds one by the beginning of its name.

import { at, fill, make, whole, write } from "./elements.js";

const KEYS = 9; // classes that have a key
const folded = (text) => text.normalize("NFC").trim().toLowerCase();
let names = [];

/** The class of a key, if it is one of a class. */
export const classOf = (key) => (key >= 1 && key <= KEYS ? names[key - 1] : undefined);

/** Draw the buttons: pressed for the labels of the current picture, marked for its suggestion. */
export function drawClasses(classes, picture, choose) {
  names = classes.map(({ name }) => name);
  at("name").placeholder = names.length > KEYS ? "New class, or find one" : names.length ? "New class" : "First class, such as cat";
  const labels = picture?.draft ?? picture?.labels ?? [];
  const suggested = picture?.suggestion?.label;
  const button = ({ name, count }, place) => {
    const looks = { type: "button", ariaPressed: labels.includes(name), className: name === suggested ? "suggested" : "" };
    const key = place < KEYS ? [make("kbd", {}, `${place + 1}`)] : [];
    const parts = [...key, make("span", { className: "name" }, name), make("b", {}, whole(count))];
    return make("button", { ...looks, onclick: () => choose(name) }, ...parts);
  };
  fill(at("classes"), [classes, labels, suggested], () => classes.map(button));
}

/** The class of a text: with many classes the first that begins with it, else that of this name, which may be new. */
function meant(text) {
  const begin = names.filter((name) => folded(name).startsWith(folded(text)));
  const same = begin.find((name) => folded(name) === folded(text));
  return same ?? (names.length > KEYS ? begin[0] : null) ?? text;
}

/** Listen to the field: `choose(name)` gets a class, which may be new; `leave()` ends the typing. */
export function listenToField(choose, leave) {
  const typed = () => at("name").value.normalize("NFC").trim();
  const show = () => {
    const [kind, name, other] = at("enter").children;
    at("enter").hidden = !typed();
    name.textContent = meant(typed());
    kind.textContent = names.includes(meant(typed())) ? "Enter:" : "Enter: new class";
    write(other, folded(meant(typed())) === folded(typed()) ? "" : `⇧ Enter: new class “${typed()}”`);
    other.onclick = () => end(typed());
  };
  const end = (name) => {
    at("name").value = "";
    show();
    leave();
    if (name) choose(name);
  };
  at("name").oninput = show;
  at("name").onkeydown = (event) => {
    const isNew = event.key === "Enter" && event.shiftKey;
    if (!isNew && event.key !== "Escape") return;
    event.preventDefault();
    end(isNew ? typed() : "");
  };
  at("adding").onsubmit = (event) => {
    event.preventDefault();
    end(typed() && meant(typed()));
  };
}
