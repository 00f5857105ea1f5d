// Dark or light: the system's choice until the reader makes one, which the browser keeps.

const KEPT = "vitascope theme";
const root = document.documentElement;

/** Use the kept theme, if there is one. */
export function applyTheme() {
  try {
    const kept = localStorage.getItem(KEPT);
    if (kept) root.dataset.theme = kept;
  } catch {
    // a browser without storage follows the system
  }
}

/** Change from dark to light or back. */
export function toggleTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const next = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
  root.dataset.theme = next;
  try {
    localStorage.setItem(KEPT, next);
  } catch {
    // as above
  }
}
