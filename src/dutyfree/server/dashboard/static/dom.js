// Elements without markup. Whatever comes from a server, a command or a label becomes text, never HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Show items as children of a node. Children of the same key stay in place, and keep focus and selection.
export function keyed(parent, items, keyOf, create, update) {
  const known = parent.__keyed ?? (parent.__keyed = new Map());
  const seen = new Set();
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    seen.add(key);
    let node = known.get(key);
    if (!node) {
      node = create(item);
      known.set(key, node);
    }
    update?.(node, item);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
  for (const [key, node] of known) {
    if (!seen.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
}

// Call back with the width of a node now and whenever it changes.
export function onWidth(node, callback) {
  const observer = new ResizeObserver(() => {
    const width = Math.floor(node.clientWidth);
    if (width > 0 && width !== node.__width) {
      node.__width = width;
      callback(width);
    }
  });
  observer.observe(node);
  return observer;
}
