"use strict";
// A picture on which nothing moves: its colours, and the height of the frame around it.

setTheme();
try {
  if (window.frameElement?.matches("[data-jaxpar]")) {
    const high = document.documentElement.scrollHeight + 4;
    window.frameElement.style.height = `${Math.min(760, Math.max(160, high))}px`;
  }
} catch {
  // another origin: the frame keeps its height
}
