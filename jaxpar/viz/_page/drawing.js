"use strict";
// Drawing: from places to SVG. All words are set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const MOST_NAMES = 8; // of the boxes before and after one that are read out

function make(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function words(text, attributes) {
  const element = make("text", attributes);
  element.textContent = text;
  return element;
}

// The groups of an SVG with everything that is in sight, from back to front.
function draw(net, placed) {
  const groups = { frames: make("g", {}), lines: make("g", {}), boxes: make("g", {}), labels: make("g", {}), bars: make("g", {}) };
  drawBlock(net, placed, 0, 0, 0, groups);
  return Object.values(groups);
}

function drawBlock(net, placed, x, y, level, groups) {
  const block = net.blocks[placed.item - net.root];
  if (level) {
    const style = level % 2 ? "odd" : "even", box = { x, y, width: placed.w, height: placed.h, rx: 8 };
    groups.frames.append(make("g", { class: `frame ${style}`, "data-frame": placed.item }, make("rect", box)));
    groups.bars.prepend(bar(block, placed, x, y, level, style));
  }
  block.lines.forEach((line, at) => drawLine(net, placed, line, at, x, y, groups));
  for (const [item, box] of placed.boxes) {
    const open = placed.inner.get(item);
    if (open) drawBlock(net, open, x + box.x, y + box.y, level + 1, groups);
    else groups.boxes.append(closed(net, item, x + box.x, y + box.y, groups));
  }
}

// The title of an open block, which closes it.
function bar(block, placed, x, y, level, style) {
  const group = make("g", { class: `bar ${style}`, "data-item": placed.item, ...button(`Close ${block.label}`, true) });
  group.append(make("rect", { x: 1, y: 1, width: block.titleWidth - 2, height: TITLE - 2, rx: 7 }), sign(14, TITLE / 2, false));
  group.append(words(block.label, { x: 26, y: TITLE / 2 + 4, class: "title" }), hint(block.tip));
  group.at = { x, y, right: x + placed.w - block.titleWidth, bottom: y + placed.h - TITLE, under: (level - 1) * TITLE };
  return group;
}

// Titles stay in sight while a part of their block is. `left` and `top` are where the sight begins.
function stick(bars, left, top) {
  for (const bar of bars) {
    const at = bar.at;
    const x = Math.min(Math.max(at.x, left), at.right), y = Math.min(Math.max(at.y, top + at.under), at.bottom);
    bar.style.transform = `translate(${x}px, ${y}px)`;
    bar.classList.toggle("stuck", y > at.y || x > at.x);
  }
}

function button(label, isOpen) {
  return { role: "button", tabindex: -1, "aria-label": label, ...(isOpen === null ? {} : { "aria-expanded": isOpen }) };
}

// What a box reads and what reads it, for those who do not see the lines.
function neighbours(net, item) {
  const inside = new Set(nodesIn(net, item));
  const names = (next) => {
    const outside = new Set([...inside].flatMap((node) => next[node]).filter((node) => !inside.has(node)));
    const found = [...outside].map((node) => net.nodes[node].tip.split("\n")[0]), more = found.length - MOST_NAMES;
    return found.slice(0, MOST_NAMES).join(", ") + (more > 0 ? ` and ${more} more` : "");
  };
  const [from, to] = [names(net.sources), names(net.readers)];
  return (from && `, from ${from}`) + (to && `, to ${to}`);
}

function hint(text) {
  const element = make("title", {});
  element.textContent = text;
  return element;
}

// A plus or a minus in a circle.
function sign(x, y, isPlus) {
  const path = `M${x - 3.5} ${y}h7` + (isPlus ? `M${x} ${y - 3.5}v7` : "");
  return make("g", { class: "sign" }, make("circle", { cx: x, cy: y, r: 6 }), make("path", { d: path }));
}

function closed(net, item, x, y, groups) {
  const [w, h] = net.sizes[item];
  const isBlock = item >= net.root;
  const it = isBlock ? net.blocks[item - net.root] : net.nodes[item];
  const group = make("g", { class: `box ${it.kind}`, transform: `translate(${x} ${y})`, "data-item": item });
  const label = isBlock ? `Open ${it.label}, ${it.texts[1][0]}` : it.tip.split("\n")[0];
  for (const [key, value] of Object.entries(button(label + neighbours(net, item), isBlock ? false : null))) group.setAttribute(key, value);
  if (isBlock) groups.frames.append(make("rect", { x: x + 3, y: y - 3, width: w, height: h, rx: 8, class: "behind" }));
  if (it.oval) group.append(make("ellipse", { cx: w / 2, cy: h / 2, rx: w / 2, ry: h / 2, fill: it.fill }));
  else group.append(make("rect", { width: w, height: h, rx: 8, ...(it.fill ? { fill: it.fill } : {}) }));
  let at = (h - it.texts.reduce((sum, [, size]) => sum + size * 1.15, 0)) / 2;
  for (const [text, size, bold] of it.texts) {
    const place = { x: (w - (isBlock ? 16 : 0)) / 2, y: at + size * 0.93, "font-size": size };
    group.append(words(text, { ...place, ...(bold ? { "font-weight": 600 } : {}), ...(it.ink ? { fill: it.ink } : {}) }));
    at += size * 1.15;
  }
  if (isBlock) group.append(sign(w - 13, h / 2, true));
  group.append(hint(it.tip));
  return group;
}

function drawLine(net, placed, line, at, x, y, groups) {
  const { spline, label } = placed.lines[at];
  const moved = spline.map(([px, py]) => [px + x, py + y]);
  const text = (point) => point.map((value) => value.toFixed(1)).join(" ");
  const pieces = moved.slice(1).map(text).join(" ");
  const group = make("g", { class: `line ${line.kind}` });
  group.append(make("path", { d: `M${text(moved[0])}C${pieces}` }));
  if (line.head >= 0 && line.kind !== "pair" && !placed.inner.has(line.head)) group.append(arrow(moved));
  group.line = { line, block: placed.item };
  groups.lines.append(group);
  if (!label) return;
  const place = { x: (label[0] + x).toFixed(1), y: (label[1] + y + (net.sideways ? -1 : 3.5)).toFixed(1), class: "shape" };
  groups.labels.append(words(line.label, place));
}

function arrow(spline) {
  const [x, y] = spline[spline.length - 1];
  const [fromX, fromY] = spline[spline.length - 2];
  const turn = (Math.atan2(y - fromY, x - fromX) * 180) / Math.PI;
  return make("path", { class: "head", d: "M0 0L-7 3L-7 -3Z", transform: `translate(${x} ${y}) rotate(${turn})` });
}
