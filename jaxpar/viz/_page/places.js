"use strict";
// Places: where everything is when some blocks are open. Nothing here touches the document.
//
// Each block has a layout of its own, made with its blocks closed. An open block is larger than a closed one, so the
// layout around it is stretched, by one map of x and one of y. Both only grow, so that nothing comes to overlap.

const PAD = 12; // around what is in an open block
const TITLE = 26; // above it

// A map of one coordinate that makes each [from, to] at least as long as needed, and nothing shorter.
function stretch(parts) {
  const cuts = [...new Set(parts.flatMap(([from, to]) => [from, to]))].sort((a, b) => a - b);
  const lengths = cuts.slice(1).map((cut, at) => cut - cuts[at]);
  const greed = ([from, to, needed]) => needed / (to - from);
  for (const [from, to, needed] of [...parts].sort((a, b) => greed(b) - greed(a))) {
    const first = cuts.indexOf(from), last = cuts.indexOf(to);
    const now = lengths.slice(first, last).reduce((sum, length) => sum + length, 0);
    for (let at = first; now < needed && at < last; at++) lengths[at] *= needed / now;
  }
  const starts = [cuts[0]];
  lengths.forEach((length, at) => starts.push(starts[at] + length));
  return (value) => {
    if (!cuts.length || value <= cuts[0]) return value;
    let at = cuts.findIndex((cut) => cut >= value) - 1;
    if (at < 0) return value + starts[starts.length - 1] - cuts[cuts.length - 1];
    return starts[at] + ((value - cuts[at]) * lengths[at]) / (cuts[at + 1] - cuts[at]);
  };
}

// Numbers [x, y, x, y, ...] as points, turned over where the network flows up or to the left.
function points(numbers, turned) {
  const found = [];
  for (let at = 0; at < numbers.length; at += 2) found.push(turned(numbers[at], numbers[at + 1]));
  return found;
}

// Turned over along the flow where it is `flipped`, and across it where it is `mirrored`.
function oriented(layout, sideways, flipped, mirrored) {
  const [overX, overY] = sideways ? [flipped, mirrored] : [mirrored, flipped];
  const turned = (x, y) => [overX ? layout.w - x : x, overY ? layout.h - y : y];
  return {
    w: layout.w,
    h: layout.h,
    items: points(layout.items, turned),
    ports: points(layout.ports, turned),
    lines: layout.lines.map((line) => points(line, turned)),
    labels: layout.labels.map((label) => label && turned(...label)),
  };
}

// Where everything in a block is when the blocks in `open` are, from its own left and top.
function place(net, item, open, flipped, mirrored = false) {
  const block = net.blocks[item - net.root];
  const layout = oriented(net.layouts[block.layout], net.sideways, flipped, mirrored);
  const inner = new Map();
  for (const child of block.items) {
    if (open.has(child)) inner.set(child, place(net, child, open, flipped, crosses(net, block, layout, child)));
  }
  const [mapX, mapY] = maps(net, block, layout, inner);
  const content = { w: mapX(layout.w), h: mapY(layout.h) };
  const isRoot = item === net.root;
  const width = Math.max(content.w + 2 * PAD, isRoot ? 0 : block.titleWidth);
  const left = (width - content.w) / 2, top = isRoot ? PAD : TITLE;
  const found = { item, w: width, h: content.h + top + PAD, inner };
  const map = ([x, y]) => [mapX(x) + left, mapY(y) + top];
  found.boxes = new Map(block.items.map((child, at) => [child, box(net, child, map, layout.items[at], inner)]));
  found.ports = layout.ports.map((port, at) => border(net, found, map(port), block.firsts[at], flipped));
  found.lines = block.lines.map((line, at) => bent(net, found, line, layout, at, map));
  found.axis = axis(net, found);
  return found;
}

// Whether most lines would cross that lead from one side into a block, as each layout is made without the others.
// Never for a block with a backward pass, which is to the right of the forward pass.
function crosses(net, block, layout, child) {
  const { layout: inside, firsts, lines } = net.blocks[child - net.root], across = net.sideways ? 1 : 0, ends = [];
  if (lines.some((line) => line.kind === "pair" || line.kind === "back")) return false;
  const within = oriented(net.layouts[inside], net.sideways).ports;
  for (const { tail, head, tailPort, headPort } of block.lines) {
    for (const [item, port, other, otherPort] of [[tail, tailPort, head, headPort], [head, headPort, tail, tailPort]]) {
      if (item !== child || port < 0) continue;
      const from = other < 0 ? layout.ports[otherPort] : layout.items[block.items.indexOf(other)];
      ends.push([firsts[port], from[across], within[port][across]]);
    }
  }
  let order = 0;
  for (const [side, from, to] of ends) {
    for (const [otherSide, otherFrom, otherTo] of ends) {
      if (side === otherSide) order += Math.sign((from - otherFrom) * (to - otherTo));
    }
  }
  return order < 0;
}

function maps(net, block, layout, inner) {
  const across = [], along = [];
  block.items.forEach((child, at) => {
    const open = inner.get(child);
    if (!open) return;
    const [w, h] = net.sizes[child];
    const [middle, depth] = net.sideways ? [...layout.items[at]].reverse() : layout.items[at];
    const [size, thick] = net.sideways ? [h, w] : [w, h];
    const [openSize, openThick] = net.sideways ? [open.h, open.w] : [open.w, open.h];
    across.push([middle - size / 2, middle, open.axis], [middle, middle + size / 2, openSize - open.axis]);
    along.push([depth - thick / 2, depth + thick / 2, openThick]);
  });
  const found = [stretch(across), stretch(along)];
  return net.sideways ? found.reverse() : found;
}

// A closed box keeps its size. An open one is where its main port meets the line that came to the middle.
function box(net, child, map, centre, inner) {
  const [x, y] = map(centre), open = inner.get(child);
  const [w, h] = open ? [open.w, open.h] : net.sizes[child];
  if (!open) return { x: x - w / 2, y: y - h / 2, w, h, centre };
  const [cw, ch] = net.sizes[child];
  const middle = (from, to) => (from + to) / 2;
  const low = map([centre[0] - cw / 2, centre[1] - ch / 2]), high = map([centre[0] + cw / 2, centre[1] + ch / 2]);
  if (net.sideways) return { x: middle(low[0], high[0]) - w / 2, y: y - open.axis, w, h, centre };
  return { x: x - open.axis, y: middle(low[1], high[1]) - h / 2, w, h, centre };
}

// The point on the border of a block at which the line of a port goes on, and the port itself.
function border(net, found, [x, y], isFirst, flipped) {
  const low = Boolean(isFirst) !== flipped;
  return { inside: [x, y], outside: net.sideways ? [low ? 0 : found.w, y] : [x, low ? 0 : found.h] };
}

// The coordinate of a block across the flow that stays where the middle of the closed block was.
function axis(net, found) {
  const at = found.ports.map((port) => port.outside[net.sideways ? 1 : 0]).sort((a, b) => a - b);
  if (!at.length) return (net.sideways ? found.h : found.w) / 2;
  return (at[Math.floor((at.length - 1) / 2)] + at[Math.floor(at.length / 2)]) / 2;
}

// A line of a layout after the stretching, with its ends on the boxes as they are now.
function bent(net, found, line, layout, at, map) {
  const before = layout.lines[at];
  const spline = (found.inner.size ? refined(before) : before).map(map);
  const [tail, head] = [[line.tail, line.tailPort, 0], [line.head, line.headPort, before.length - 1]].map(
    ([item, port, end]) => {
      if (item < 0) return found.ports[port].inside;
      const box = found.boxes.get(item), open = found.inner.get(item);
      if (open && port >= 0) return [box.x + open.ports[port].outside[0], box.y + open.ports[port].outside[1]];
      const [x, y] = before[end];
      return [box.x + box.w / 2 + x - box.centre[0], box.y + box.h / 2 + y - box.centre[1]];
    },
  );
  pull(spline, 0, 1, tail);
  pull(spline, spline.length - 1, -1, head);
  const label = layout.labels[at] && carried(before, spline, layout.labels[at]);
  if (line.tail < 0) spline.unshift(...straight(found.ports[line.tailPort].outside, tail).slice(0, 3));
  if (line.head < 0) spline.push(...straight(head, found.ports[line.headPort].outside).slice(1));
  return { spline, label };
}

function straight(from, to) {
  const part = (share) => [from[0] + (to[0] - from[0]) * share, from[1] + (to[1] - from[1]) * share];
  return [from, part(1 / 3), part(2 / 3), to];
}

// Move an end of a spline. The points near it follow, so that it stays smooth and arrives as it did.
function pull(spline, end, step, [x, y]) {
  const [oldX, oldY] = spline[end];
  const dx = x - oldX, dy = y - oldY, reach = Math.max(40, 2.5 * Math.hypot(dx, dy));
  for (let at = end, count = 0; spline[at]; at += step, count++) {
    const [px, py] = spline[at], far = Math.hypot(px - oldX, py - oldY);
    const share = count < 2 ? 1 : Math.max(0, 1 - far / reach);
    if (at !== spline.length - 1 - end) spline[at] = [px + dx * share, py + dy * share];
  }
}

// The same curve with each piece in two, so that it bends where the map does.
function refined(spline) {
  const found = [spline[0]], middle = (a, b) => [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2];
  for (let at = 0; at + 3 < spline.length; at += 3) {
    const [a, b, c, d] = spline.slice(at, at + 4);
    const ab = middle(a, b), bc = middle(b, c), cd = middle(c, d), abc = middle(ab, bc), bcd = middle(bc, cd);
    found.push(ab, abc, middle(abc, bcd), bcd, cd, d);
  }
  return found;
}

// Where a label goes with its line: as far from the same place on it as before.
function carried(before, after, [x, y]) {
  let best = [Infinity];
  for (let step = 0; step <= 16; step++) {
    const [px, py] = on(before, step / 16), far = Math.hypot(px - x, py - y);
    if (far < best[0]) best = [far, step / 16, x - px, y - py];
  }
  const [px, py] = on(after, best[1]);
  return [px + best[2], py + best[3]];
}

// The point of a spline at a share of its pieces.
function on(spline, share) {
  const pieces = (spline.length - 1) / 3, piece = Math.min(Math.floor(share * pieces), pieces - 1);
  const t = share * pieces - piece, s = 1 - t, p = spline.slice(piece * 3, piece * 3 + 4);
  const mix = (axis) => s ** 3 * p[0][axis] + 3 * s * s * t * p[1][axis] + 3 * s * t * t * p[2][axis] + t ** 3 * p[3][axis];
  return [mix(0), mix(1)];
}
