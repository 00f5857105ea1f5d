// The page in Chinese, where the browser's language is: texts are replaced as they appear in the document.
//
// Names of classes and files, commands, errors and what is drawn on canvases stay as they are. chinese.json has the
// translations by the texts; one that begins with ^ is a pattern, whose parts in ‹› are translated themselves. It is made
// from the catalog translations/zh.po.

const KEPT = ".name, .predictions *, #found *, #command *, .fault span"; // names, commands, errors
const ATTRIBUTES = ["aria-label", "aria-roledescription", "placeholder", "title"];

let texts = {};
let patterns = [];

/** A text in Chinese; what has no translation remains as it is. */
function inChinese(text) {
  if (Object.hasOwn(texts, text)) return texts[text];
  for (const [pattern, words] of patterns) {
    const found = pattern.exec(text);
    if (!found) continue;
    const filled = words.replace(/\$(\d)/g, (_, place) => found[place] ?? "");
    return filled.replace(/‹([^›]*)›/gs, (_, part) => inChinese(part));
  }
  return text;
}

const isKept = (element) => element.closest(KEPT) !== null;

function translateText(node) {
  const text = node.data.replace(/\s+/g, " ").trim();
  const said = text && !isKept(node.parentElement ?? document.body) ? inChinese(text) : text;
  if (said !== text) node.data = node.data.replace(/\S.*\S|\S/s, () => said);
}

function translateAttribute(element, name) {
  const text = element.getAttribute(name);
  const said = text && !isKept(element) ? inChinese(text) : text;
  if (said !== text) element.setAttribute(name, said);
}

/** An element, or a fragment, with all that it contains. */
function translateAll(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
  for (let node = root; node; node = walker.nextNode()) {
    if (node.nodeType === Node.TEXT_NODE) translateText(node);
    for (const name of node.attributes ? ATTRIBUTES : []) translateAttribute(node, name);
    if (node instanceof HTMLTemplateElement) translateAll(node.content);
  }
}

/** Translate the page, and what is changed in it, by what is fetched, in a browser whose language is Chinese. */
export async function translatePage(fetchTexts) {
  if (!navigator.language.startsWith("zh")) return;
  texts = await fetchTexts();
  patterns = Object.entries(texts).filter(([text]) => text.startsWith("^"));
  patterns = patterns.map(([pattern, words]) => [new RegExp(pattern, "s"), words]);
  document.documentElement.lang = "zh-CN";
  translateAll(document.documentElement);
  const changed = new MutationObserver((records) => {
    for (const { type, target, addedNodes, attributeName } of records) {
      if (type === "characterData") translateText(target);
      else if (type === "attributes") translateAttribute(target, attributeName);
      else addedNodes.forEach(translateAll);
    }
  });
  const everything = { subtree: true, childList: true, characterData: true, attributes: true };
  changed.observe(document.documentElement, { ...everything, attributeFilter: ATTRIBUTES });
}
