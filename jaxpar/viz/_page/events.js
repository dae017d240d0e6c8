"use strict";
// Events: mouse, touch, keys, buttons, and the reader's colours.

const itemOf = (event) => {
  const found = event.target.closest?.("[data-item]");
  return found ? Number(found.dataset.item) : null;
};

const fingers = new Map(); // pointers that are down, and where
let drag = null; // where a drag began, and whether it has moved

view.addEventListener("pointerdown", (event) => {
  fingers.set(event.pointerId, [event.clientX, event.clientY]);
  if (event.pointerType === "mouse" && event.button === 0) {
    drag = { x: event.clientX, y: event.clientY, left: view.scrollLeft, top: view.scrollTop, moved: false };
  }
});

window.addEventListener("pointermove", (event) => {
  if (fingers.has(event.pointerId) && fingers.size === 2) pinch(event);
  if (!drag || !(event.buttons & 1)) return;
  const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
  drag.moved ||= Math.hypot(dx, dy) > 4;
  if (drag.moved) view.scrollTo({ left: drag.left - dx, top: drag.top - dy, behavior: "instant" });
});

function pinch(event) {
  const spread = () => {
    const [[ax, ay], [bx, by]] = [...fingers.values()];
    return [Math.hypot(ax - bx, ay - by), (ax + bx) / 2, (ay + by) / 2];
  };
  const [before] = spread();
  fingers.set(event.pointerId, [event.clientX, event.clientY]);
  const [after, x, y] = spread(), frame = view.getBoundingClientRect();
  if (before > 0) zoom((page.scale * after) / before, x - frame.left, y - frame.top);
}

for (const name of ["pointerup", "pointercancel"]) {
  window.addEventListener(name, (event) => fingers.delete(event.pointerId));
}

svg.addEventListener("click", (event) => {
  const moved = drag?.moved;
  drag = null;
  const item = itemOf(event);
  if (!moved && item !== null) act(item);
});

svg.addEventListener("pointerover", (event) => {
  const item = itemOf(event);
  if (event.pointerType === "mouse" && !event.buttons) trace(item);
});
svg.addEventListener("pointerleave", () => trace(null));
svg.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && trace(itemOf(event)));
svg.addEventListener("focusout", () => trace(null));

view.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const frame = view.getBoundingClientRect();
  zoom(page.scale * Math.exp(-event.deltaY / 300), event.clientX - frame.left, event.clientY - frame.top);
}, { passive: false });

view.addEventListener("scroll", settle, { passive: true });

// The box that had the focus last is the one stop of the tab key.
svg.addEventListener("focusin", (event) => {
  const box = event.target.closest("[data-item]");
  if (!box) return;
  for (const other of svg.querySelectorAll("[data-item][tabindex='0']")) other.setAttribute("tabindex", -1);
  box.setAttribute("tabindex", 0);
});

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

svg.addEventListener("keydown", (event) => {
  const item = itemOf(event), way = ARROWS[event.key];
  if (item === null || event.ctrlKey || event.metaKey || event.altKey || !(way || ["Enter", " "].includes(event.key))) return;
  event.preventDefault();
  if (way) go(event.target.closest("[data-item]"), ...way);
  else act(item);
});

const KEYS = {
  "+": () => zoom(page.scale * 1.25),
  "=": () => zoom(page.scale * 1.25),
  "-": () => zoom(page.scale / 1.25),
  0: () => fit("width"),
  "/": () => $("search").focus(),
  Escape: hide,
};

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

$("search").addEventListener("input", (event) => look(event.target.value));
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
  if (event.key !== "Escape") return;
  event.target.value = "";
  look("");
});
$("level").addEventListener("change", (event) => {
  setLevel(event.target.value);
  remember(event.target.value === "start" ? "#" : undefined);
});
$("out").addEventListener("click", KEYS["-"]);
$("in").addEventListener("click", KEYS["+"]);
$("fit").addEventListener("click", () => fit("whole"));
$("flip").addEventListener("click", flip);
$("copy").addEventListener("click", copy);
$("hide").addEventListener("click", hide);
$("theme").addEventListener("click", () => {
  themes.chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme();
});

new ResizeObserver(() => {
  if (view.clientWidth && !page.started) start(); // a page in a hidden tab has no size yet
}).observe(view);

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width && page.fitted) fit(page.fitted);
  width = window.innerWidth;
});
window.addEventListener("hashchange", recall);
