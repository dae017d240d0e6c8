"use strict";
// The page: what a reader's clicks, keys and words do.

const net = read(JSON.parse(document.getElementById("data").textContent));
const $ = (id) => document.getElementById(id);
const LEAST = 0.6; // the scale at which words can still be read
const view = $("view"), svg = $("svg"), panel = $("panel");
const page = { open: new Set(), flipped: net.direction === "up", scale: 1, size: { w: 1, h: 1 }, drawn: { w: 1, h: 1 }, found: [], at: -1 };

function redraw(anchor) {
  const before = anchor !== undefined && rectangle(anchor);
  const focused = document.activeElement?.closest?.("[data-item]")?.dataset.item;
  const placed = place(net, net.root, page.open, page.flipped);
  page.size = { w: placed.w + 2 * PAD, h: placed.h + PAD };
  svg.replaceChildren(...draw(net, placed));
  zoom(page.scale);
  mark();
  if (before) {
    const after = rectangle(anchor);
    view.scrollBy(after.left - before.left, net.sideways || !page.flipped ? after.top - before.top : after.bottom - before.bottom);
  }
  const stop = element(focused) ?? svg.querySelector("[data-item]");
  stop?.setAttribute("tabindex", 0);
  if (focused !== undefined) stop?.focus({ preventScroll: true });
}

// An arrow key goes to the next box that way, and along a line where one goes that way. Across the flow only a line to
// the side does: most lines have a part that goes there.
function go(from, dx, dy) {
  const middle = (box) => {
    const { left, top, width, height } = box.getBoundingClientRect();
    return [left + width / 2, top + height / 2];
  };
  const [x, y] = middle(from);
  const way = (box) => {
    const [bx, by] = middle(box);
    return { box, along: (bx - x) * dx + (by - y) * dy, aside: Math.abs((bx - x) * dy) + Math.abs((by - y) * dx) };
  };
  const nodes = (box) => nodesIn(net, Number(box.dataset.item));
  const joined = new Set(nodes(from).flatMap((node) => [...net.sources[node], ...net.readers[node]]));
  const isAcross = net.sideways ? dy : dx;
  const isJoined = ({ box, along, aside }) => (!isAcross || along >= aside) && box.matches(".box") && nodes(box).some((node) => joined.has(node));
  const ways = [...svg.querySelectorAll("[data-item]")].map(way).filter(({ box, along }) => box !== from && along > 1);
  const lines = ways.filter(isJoined), far = ({ along, aside }) => along + 2 * aside;
  const [next] = (lines.length ? lines : ways).sort((a, b) => far(a) - far(b));
  next?.box.focus();
}

function element(item) {
  return svg.querySelector(`[data-item="${item}"]`);
}

function rectangle(item) {
  return (svg.querySelector(`[data-frame="${item}"]`) ?? element(item))?.getBoundingClientRect();
}

// Draw at a scale. The point of the picture that is under (x, y) of the view stays there.
function zoom(scale, x = view.clientWidth / 2, y = view.clientHeight / 2, isFit = false) {
  if (!isFit && scale !== page.scale) page.fitted = undefined; // the reader's own scale stays when the width changes
  const margin = (room, size) => Math.max(0, (room - size * page.scale) / 2);
  const px = (view.scrollLeft + x - margin(view.clientWidth, page.drawn.w)) / page.scale;
  const py = (view.scrollTop + y - margin(view.clientHeight, page.drawn.h)) / page.scale;
  page.scale = Math.min(4, Math.max(0.04, scale));
  page.drawn = page.size;
  svg.setAttribute("viewBox", `${-PAD} 0 ${page.size.w} ${page.size.h}`);
  svg.setAttribute("width", page.size.w * page.scale);
  svg.setAttribute("height", page.size.h * page.scale);
  const left = px * page.scale + margin(view.clientWidth, page.size.w) - x;
  view.scrollTo({ left, top: py * page.scale + margin(view.clientHeight, page.size.h) - y, behavior: "instant" });
  settle();
  $("scale").textContent = `${Math.round(page.scale * 100)} %`;
}

function settle() {
  const [left, top] = [view.scrollLeft / page.scale - PAD, view.scrollTop / page.scale];
  stick(svg.querySelectorAll(".bar"), left, top);
}

// "whole": all of it is in the view. "width": it is as wide as the view at most, and all of it where that can be read.
function fit(what) {
  const wide = (view.clientWidth - 2) / page.size.w, high = (view.clientHeight - 2) / page.size.h;
  page.fitted = what;
  const whole = Math.min(1, wide, high), across = Math.min(1, Math.max(LEAST, net.sideways ? high : wide));
  zoom(what === "whole" || whole >= LEAST ? whole : across, undefined, undefined, true);
}

function show(open, anchor) {
  page.open = open;
  redraw(anchor);
}

function toggle(block) {
  const open = new Set(page.open);
  if (!open.delete(block)) open.add(block);
  show(open, block);
  remember();
  announce(`${net.blocks[block - net.root].label} ${open.has(block) ? "opened" : "closed"}`);
}

function announce(text) {
  $("status").textContent = text;
}

// What the picture has open. Where the reader did not ask for that, less in a narrow or low view, which may be scrolled.
function startOpen() {
  const room = { w: Math.max(340, view.clientWidth - 2) / LEAST - 2 * PAD, h: Math.max(480, view.clientHeight - 2) / LEAST - PAD };
  return net.asked ? new Set(net.open) : thatFit(net, net.open, room, page.flipped);
}

// The link of the page says what is open. A frame may have none.
function remember(link = `#open=${[...page.open].join()}`) {
  try {
    history.replaceState(null, "", link);
  } catch {}
}

function recall() {
  const open = /^#open=([\d,]*)$/.exec(location.hash)?.[1].split(",").map(Number);
  if (!open) return;
  show(new Set(allBlocks(net).filter((block) => open.includes(block))));
  fit("width");
}

function setLevel(value) {
  show(value === "start" ? startOpen() : value === "all" ? new Set(allBlocks(net)) : upTo(net, Number(value)));
  fit("width");
  if (!net.sideways) view.scrollTop = page.flipped ? view.scrollHeight : 0;
}

// Search: what matches is marked, and the blocks that contain it open.
function look(text) {
  page.kept ??= page.open;
  page.found = search(net, text);
  page.at = -1;
  const more = page.found.slice(0, 50).flatMap((item) => around(net, item));
  show(new Set([...page.kept, ...more]));
  if (!text) page.kept = undefined;
  step(1);
}

function step(by) {
  const count = page.found.length;
  page.at = count ? (page.at + by + count) % count : -1;
  $("count").textContent = $("search").value ? `${page.at + 1}/${count}` : "";
  if (count) reveal(page.found[page.at]);
  mark();
}

function reveal(item) {
  const missing = around(net, item).filter((block) => !page.open.has(block));
  if (missing.length) show(new Set([...page.open, ...missing]));
  const box = rectangle(item), frame = view.getBoundingClientRect();
  if (!box) return;
  view.scrollBy(box.left + box.width / 2 - frame.left - frame.width / 2, box.top + box.height / 2 - frame.top - frame.height / 2);
}

function mark() {
  const found = new Set(page.found.map(String));
  for (const box of svg.querySelectorAll("[data-item]")) {
    box.classList.toggle("found", found.has(box.dataset.item));
    box.classList.toggle("current", page.at >= 0 && box.dataset.item === String(page.found[page.at]));
    box.classList.toggle("chosen", box.dataset.item === String(page.chosen));
  }
}

// The path of a node: all that it depends on, and all that depends on it.
function trace(item) {
  svg.classList.toggle("tracing", item !== null);
  if (item === null) return;
  const ways = path(net, nodesIn(net, item));
  const isLit = (box) => nodesIn(net, Number(box.dataset.item)).some((node) => ways.before.has(node) || ways.after.has(node));
  for (const box of svg.querySelectorAll(".box")) box.classList.toggle("lit", isLit(box));
  for (const group of svg.querySelectorAll(".line")) group.classList.toggle("lit", isOnPath(net, group.line, ways));
}

// The panel: everything that is known of a node, and its line of source.
function tell(item) {
  const node = net.nodes[item];
  page.chosen = item;
  const lines = node.tip.split("\n");
  $("name").textContent = lines[0];
  $("facts").textContent = lines.slice(1).filter((line) => line !== node.source).join("\n");
  $("source").hidden = !node.source;
  const known = /^(\/.*|[A-Za-z]:[\\/].*):(\d+)/.exec(node.source);
  const place = document.createElement(known ? "a" : "code");
  place.textContent = node.source;
  if (known) place.href = `vscode://file/${encodeURI(known[1].replace(/^\//, ""))}:${known[2]}`;
  $("line").replaceChildren(place);
  panel.hidden = false;
  mark();
}

function hide() {
  panel.hidden = true;
  page.chosen = undefined;
  mark();
}

async function copy() {
  const text = net.nodes[page.chosen].source.replace(/ in .*$/, "");
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const range = document.createRange(); // a frame may not copy: select the text for the reader
    range.selectNodeContents($("line"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    announce("The source line is selected. Press Ctrl+C.");
    return;
  }
  announce("copied");
}

function flip() {
  page.flipped = !page.flipped;
  redraw();
  fit("width");
}

function act(item) {
  if (item >= net.root) toggle(item);
  else tell(item);
}

function start() {
  page.started = true;
  document.body.classList.remove("still"); // until here the page shows Graphviz's picture
  $("nothing").hidden = net.nodes.length > 0;
  const levels = ["start", ...Array.from({ length: deepest(net) }, (_, at) => String(at)), "all"];
  const name = (value) => ({ start: "Overview", all: "All open", 0: "All closed" })[value] ?? `Level ${value}`;
  const choices = deepest(net) ? levels : ["start"];
  $("level").replaceChildren(...choices.map((value) => new Option(name(value), value)));
  $("level").parentNode.hidden = !deepest(net);
  setTheme();
  grow();
  setLevel("start");
  recall();
}

// As high as what is shown at first, where the frame around the page is in reach.
function grow() {
  try {
    const frame = window.frameElement;
    if (!frame?.matches("[data-jaxpar]")) return;
    frame.style.height = "760px"; // as high as it may be: what is open depends on that
    const { w, h } = place(net, net.root, startOpen(), page.flipped);
    const high = h * Math.min(1, view.clientWidth / w) + view.offsetTop + 40;
    frame.style.height = `${Math.round(Math.min(760, Math.max(320, high)))}px`;
  } catch {
    // another origin: the frame keeps its height
  }
}
