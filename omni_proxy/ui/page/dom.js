// Elements and numbers. Whatever comes from outside becomes a text node or the value of a harmless attribute, never markup.

export const $ = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text nodes. `on*` are listeners, `class` is the class. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** Set a text only when it differs: selections and screen readers stay undisturbed. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Keep one child for each key, in order, made once and shown again and again; focus stays where it was. */
export function keyed(parent, items, keyOf, make, show) {
  const known = parent.known ?? (parent.known = new Map());
  const seen = new Set();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    seen.add(key);
    let child = known.get(key);
    if (!child) known.set(key, (child = make(item)));
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
    show(child, item);
  }
  for (const [key, child] of known) {
    if (!seen.has(key)) {
      child.remove();
      known.delete(key);
    }
  }
}

/** Seconds as people read them. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  return `${Math.round(value)} s`;
}

/** A count, shortened above ten thousand. */
export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10_000) return String(Math.round(value));
  if (value < 999_500) return `${(value / 1000).toFixed(value < 99_950 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(value < 99.95e6 ? 1 : 0)}M`;
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value < 10 ? value.toFixed(1) : count(value);
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}
