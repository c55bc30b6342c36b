/* Build elements. Text is always a text node: data never becomes markup. */

const SVG = "http://www.w3.org/2000/svg";

/** The key, handlers and properties of an element, for `morph`. */
export const META = Symbol("meta");

/**
 * Build an HTML element.
 *
 * Attributes: `key` names a child among its siblings, `onclick` and the like are handlers,
 * `.checked` with a leading dot sets a property, `true` an empty attribute; `null`, `undefined`
 * and `false` omit it. Children may be nodes, text, numbers, null, or lists of these.
 */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Build an SVG element. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Group children without an element around them. */
export function fragment(...children) {
  const node = document.createDocumentFragment();
  append(node, children);
  return node;
}

function fill(node, attributes, children) {
  const meta = { key: undefined, handlers: {}, properties: {} };
  node[META] = meta;
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "key") meta.key = String(value);
    else if (name.startsWith("on")) meta.handlers[name] = value;
    else if (name.startsWith(".")) meta.properties[name.slice(1)] = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, String(value));
  }
  append(node, children);
  // After the children: the value of a <select> needs its options.
  Object.assign(node, meta.handlers, meta.properties);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(node, child);
    else if (child instanceof Node) node.append(child);
    else if (child !== null && child !== undefined && child !== false && child !== "")
      node.append(document.createTextNode(String(child)));
  }
}
