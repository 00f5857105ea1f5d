// What chinese.js of the explorer asks for: the page's texts in Chinese by the English ones.
export async function fetchTexts() {
  return (await fetch("web/chinese.json")).json();
}
