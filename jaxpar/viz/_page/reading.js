"use strict";
// Reading: the data of the page as objects, and questions about them.

function read(data) {
  const root = data.nodes.length;
  const net = { ...data, root, sideways: data.direction === "right", parent: new Map(), sizes: [] };
  net.nodes = data.nodes.map(([w, h, kind, oval, fill, ink, texts, tip, more, line], at) => {
    net.sizes[at] = [w, h];
    const lines = tip.split("\n"), source = lines[line] ?? "", weights = tip.match(/^weights (.*)$/m)?.[1] ?? "";
    return { kind, oval, fill, ink, texts, tip, find: [lines[0], source, weights, more].join(" "), source };
  });
  net.blocks = data.blocks.map(([w, h, titleWidth, label, texts, tip, fill, ink, layout, items, firsts, lines, sends], at) => {
    net.sizes[root + at] = [w, h];
    for (const item of items) net.parent.set(item, root + at);
    const kind = ["block", label.endsWith(" (backward)") && "backward", sends && "sends"].filter(Boolean).join(" ");
    const found = { kind, titleWidth, label, texts, tip, fill, ink, layout, items, firsts, find: label };
    found.lines = lines.map(([tail, head, tailPort, headPort, kind, text, keys]) => (
      { tail, head, tailPort, headPort, kind: kind || "forward", label: text, keys }));
    return found;
  });
  net.readers = data.nodes.map(() => []);
  net.sources = data.nodes.map(() => []);
  for (let at = 0; at < data.edges.length; at += 2) {
    net.readers[data.edges[at]].push(data.edges[at + 1]);
    net.sources[data.edges[at + 1]].push(data.edges[at]);
  }
  return net;
}

// The blocks around an item, from the inside out, without the whole network.
function around(net, item) {
  const found = [];
  while ((item = net.parent.get(item)) !== undefined && item !== net.root) found.push(item);
  return found;
}

function nodesIn(net, item) {
  return item < net.root ? [item] : net.blocks[item - net.root].items.flatMap((inner) => nodesIn(net, inner));
}

function level(net, block) {
  return around(net, block).length + 1;
}

function allBlocks(net) {
  return net.blocks.map((_, at) => net.root + at).slice(1);
}

function deepest(net) {
  return Math.max(0, ...allBlocks(net).map((block) => level(net, block)));
}

function upTo(net, depth) {
  return new Set(allBlocks(net).filter((block) => level(net, block) <= depth));
}

// Of these open blocks as many as fit into the room, in points. The deepest and fullest close first.
function thatFit(net, open, room, flipped) {
  const items = (block) => net.blocks[block - net.root].items.length;
  const order = [...open].sort((a, b) => level(net, a) - level(net, b) || items(a) - items(b));
  const fits = (count) => {
    const { w, h } = place(net, net.root, new Set(order.slice(0, count)), flipped);
    return w <= room.w && h <= room.h;
  };
  let most = order.length, least = 0;
  for (let count = most; least < most; count = Math.ceil((least + most) / 2)) {
    if (fits(count)) least = count;
    else most = count - 1;
  }
  return new Set(order.slice(0, least));
}

// Every node from which one can come to `starts`, or to which one can come from there.
function path(net, starts) {
  const reach = (next) => {
    const found = new Set(starts), work = [...starts];
    while (work.length) for (const node of next[work.pop()]) if (!found.has(node)) found.add(node) && work.push(node);
    return found;
  };
  return { before: reach(net.sources), after: reach(net.readers) };
}

// Whether a line of a block carries an array along the path.
function isOnPath(net, { line, block }, { before, after }) {
  const goes = (node) => {
    const blocks = around(net, node);
    if (line.head >= 0) return node === line.head || blocks.includes(line.head);
    return block !== net.root && !blocks.includes(block);
  };
  const both = (node, other) => (before.has(node) && before.has(other)) || (after.has(node) && after.has(other));
  return line.keys.some((node) => net.readers[node].some((reader) => both(node, reader) && goes(reader)));
}

// The nodes and blocks whose name, kind or source has all of these words.
function search(net, text) {
  const wanted = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return [];
  const fits = (it) => wanted.every((word) => it.find.toLowerCase().includes(word));
  const nodes = net.nodes.flatMap((node, at) => (fits(node) ? [at] : []));
  return [...nodes, ...allBlocks(net).filter((block) => fits(net.blocks[block - net.root]))];
}
