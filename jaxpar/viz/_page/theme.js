"use strict";
// The colours of the reader.

const themes = { chosen: null, plot: document.documentElement.dataset.plot ?? null };

// The reader's own choice, then the theme of the plot, of the notebook around it, of the system.
function setTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = themes.chosen ?? themes.plot ?? notebookTheme() ?? system;
}

function notebookTheme() {
  try {
    const { body, documentElement: html } = window.parent.document;
    if (window.parent === window) return undefined;
    if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "true" ? "light" : "dark"; // JupyterLab
    if (body.dataset.vscodeThemeKind) return body.dataset.vscodeThemeKind.includes("light") ? "light" : "dark";
    return html.getAttribute("theme") ?? undefined; // Colab
  } catch {
    return undefined; // another origin
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setTheme);
try {
  if (window.parent !== window) new MutationObserver(setTheme).observe(window.parent.document.body, { attributes: true });
} catch {
  // another origin
}
