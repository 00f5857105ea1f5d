// Decisions on the images of an audit's page: by buttons and keys, kept in the browser, downloaded as CSV.
"use strict";
const words = JSON.parse(document.getElementById("words").textContent);
const shown = [...document.querySelectorAll("[data-image]")]; // an image may be shown several times
const storage = `vitascope-audit-${words.audit}`;
const decisions = new Map(); // by the image's index: its choice and its new label
const steps = []; // for undo: an element, and its decision before
let current = shown[0];
let stored = true;

const decisionOn = (element) => decisions.get(element.dataset.image);
const inWords = (decision) =>
  !decision ? words.undecided : decision[0] === "relabel" ? `→ ${decision[1]}` : words.choices[decision[0]];

function show(image) {
  for (const element of shown.filter((each) => each.dataset.image === image)) {
    const decision = decisionOn(element);
    element.dataset.decision = decision?.[0] ?? "";
    element.querySelector(".state").textContent = decision ? inWords(decision) : "";
    for (const button of element.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", button.dataset.choice === decision?.[0]);
    }
  }
  const counts = { count: decisions.size, keep: 0, drop: 0, relabel: 0 };
  for (const [choice] of decisions.values()) counts[choice] += 1;
  const text = words.decided.replace(/{(\w+)}/g, (_, name) => counts[name]);
  document.getElementById("decided").textContent = stored ? text : `${text}. ${words.unsaved}`;
  document.getElementById("undo").disabled = !steps.length;
}

function change(element, decision) {
  const { image, name } = element.dataset;
  if (decision) decisions.set(image, decision);
  else decisions.delete(image);
  try {
    localStorage.setItem(storage, JSON.stringify([...decisions]));
  } catch {
    stored = false;
  }
  show(image);
  document.getElementById("spoken").textContent = `${name}: ${inWords(decision)}`;
}

function decide(element, choice, label = "") {
  steps.push([element, decisionOn(element)]);
  const complete = choice && (label || choice !== "relabel");
  change(element, complete ? [choice, label] : undefined);
}

function undo() {
  if (!steps.length) return;
  const [element, decision, count] = steps.pop();
  change(element, decision);
  if (count > 1) {
    steps.at(-1)[2] = count - 1;
    undo();
  } else go(element);
}

function acceptAll(section) { // undecided suggestions, which one undo takes back
  const least = Number(section.querySelector(".accept input").value);
  const before = steps.length;
  for (const element of section.querySelectorAll("[data-score]")) {
    const { suggested, score } = element.dataset;
    if (!decisionOn(element) && Number(score) >= least) decide(element, suggested ? "relabel" : "drop", suggested);
  }
  if (steps.length === before) return;
  steps.at(-1)[2] = steps.length - before;
  go(steps[before][0]);
}

function enter(element) { // only the current image and its buttons are reached by Tab
  if (element !== current) document.getElementById("field")?.remove();
  for (const [each, index] of [[current, -1], [element, 0]])
    for (const part of [each, ...each.querySelectorAll("button")]) part.tabIndex = index;
  current = element;
}

function go(element) {
  enter(element);
  element.focus();
}

const move = (step, from = current) => go(shown[shown.indexOf(from) + step] ?? from);

function relabel(element) { // takes the suggestion, and asks for another label
  document.getElementById("field")?.remove();
  const { suggested, label } = element.dataset;
  if (decisionOn(element)?.[0] !== "relabel" && suggested) decide(element, "relabel", suggested);
  const names = decisionOn(element)?.[1] || (words.several ? label : "");
  const chosen = words.several ? names.split(words.separator) : [names];
  const field = document.createElement("select");
  field.multiple = words.several;
  field.append(...words.classes.map((name) => new Option(name, name, false, chosen.includes(name))));
  if (!names) field.selectedIndex = -1;
  field.addEventListener("change", () => {
    decide(element, "relabel", [...field.selectedOptions].map((option) => option.value).join(words.separator));
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") move(1, element);
    else if (event.key === "Escape") go(element);
    else return;
    event.preventDefault();
  });
  const labelled = document.createElement("label");
  labelled.id = "field";
  labelled.append(words.new, field);
  element.querySelector(".choices").append(labelled);
  field.focus();
}

function decideAndMove(choice) {
  decide(current, choice);
  move(1);
}

const keys = {
  ...{ arrowright: () => move(1), n: () => move(1), arrowleft: () => move(-1), p: () => move(-1) },
  ...{ k: () => decideAndMove("keep"), d: () => decideAndMove("drop") },
  ...{ r: () => words.classes.length && relabel(current), u: undo },
};
document.addEventListener("keydown", (event) => {
  const { target } = event;
  const act = keys[event.key.toLowerCase()];
  if (!act || !current || event.ctrlKey || event.metaKey || event.altKey || target.matches("select, input")) return;
  if (target !== document.body && !target.closest("[data-image]")) return;
  event.preventDefault();
  if (target === document.body) go(current); // the first key only shows where one is
  else act();
});
document.addEventListener("focusin", ({ target }) => {
  const element = target.closest("[data-image]");
  if (element) enter(element);
});
document.addEventListener("click", ({ target }) => {
  if (target.closest("[data-accept]")) acceptAll(target.closest("section"));
  const element = target.closest("[data-image]");
  const choice = target.closest("button")?.dataset.choice;
  if (!element || target.closest("label")) return;
  if (!choice) go(element);
  else if (choice === "relabel") relabel(element);
  else decide(element, choice === decisionOn(element)?.[0] ? "" : choice); // a second click takes it back
});
document.getElementById("undo").addEventListener("click", undo);
document.getElementById("download").addEventListener("click", () => {
  const rows = [...decisions].map(([image, decision]) => {
    const { name, content } = shown.find((element) => element.dataset.image === image).dataset;
    return [name, content, ...decision];
  });
  const line = (cells) => cells.map((cell) => `"${cell.replaceAll('"', '""')}"`).join(",") + "\r\n";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([words.columns, ...rows].map(line), { type: "text/csv" }));
  link.download = "decisions.csv";
  link.click();
});

try {
  for (const [image, decision] of JSON.parse(localStorage.getItem(storage) ?? "[]")) {
    if (shown.some((element) => element.dataset.image === image)) decisions.set(image, decision);
  }
} catch {
  stored = false;
}
for (const button of document.querySelectorAll(".choices button")) button.tabIndex = -1;
new Set(["", ...decisions.keys()]).forEach(show);
if (current) enter(current);
