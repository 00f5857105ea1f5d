// Elements of the document, and numbers as texts.

export const at = (id) => document.getElementById(id);
/** Set an element's text; without one it is hidden. */
export const write = (element, text) => Object.assign(element, { textContent: text, hidden: !text });

export function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Replace what an element contains if `content` is another one: else the focus stays in it. */
export function fill(element, content, made) {
  const text = JSON.stringify(content);
  if (element.dataset.content !== text) element.replaceChildren(...made());
  element.dataset.content = text;
}

export const whole = (count) => count.toLocaleString("en");
export const counted = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
export const hundredths = (share) => Math.min(Math.round(100 * share), share < 1 ? 99 : 100); // 100 is of 1 itself
export const words = (labels) => labels.join(", ") || "none of these";
