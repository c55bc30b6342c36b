/* Update the DOM in place to match a new tree, which keeps scroll position, focus, text selection
   and half-typed input. */

import { META } from "./dom.js";

/** Attributes that the user changes: an open element stays open. */
const USER_CONTROLLED = new Set(["open"]);

/** Make the children of `container` those of `wanted`, an element or a fragment. */
export function render(container, wanted) {
  const holder = document.createDocumentFragment();
  holder.append(wanted);
  morphChildren(container, holder);
}

/** Make `current` equal to `wanted`; return the node that is in the document now. */
export function morph(current, wanted) {
  if (!canMorph(current, wanted)) {
    current.replaceWith(wanted);
    return wanted;
  }
  if (current.nodeType === Node.TEXT_NODE) {
    if (current.data !== wanted.data) current.data = wanted.data;
    return current;
  }
  morphAttributes(current, wanted);
  morphChildren(current, wanted);
  morphBehaviour(current, wanted);
  return current;
}

function canMorph(one, other) {
  return one.nodeName === other.nodeName && keyOf(one) === keyOf(other);
}

function keyOf(node) {
  return node[META]?.key;
}

function morphAttributes(current, wanted) {
  for (const { name } of [...current.attributes]) {
    if (!wanted.hasAttribute(name) && !USER_CONTROLLED.has(name)) current.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (current.getAttribute(name) !== value && !USER_CONTROLLED.has(name))
      current.setAttribute(name, value);
  }
}

function morphBehaviour(current, wanted) {
  const before = current[META];
  const after = wanted[META];
  if (!after) return;
  for (const name of Object.keys(before?.handlers ?? {})) {
    if (!(name in after.handlers)) current[name] = null;
  }
  Object.assign(current, after.handlers);
  for (const [name, value] of Object.entries(after.properties)) {
    // Do not overwrite a field that the user is typing in.
    if (name === "value" && current === document.activeElement) continue;
    if (current[name] !== value) current[name] = value;
  }
  current[META] = after;
}

function morphChildren(current, wanted) {
  const keyed = removeUnwanted(current, wanted);
  let place = current.firstChild;
  for (const next of [...wanted.childNodes]) {
    const key = keyOf(next);
    const found = key === undefined ? findAhead(place, next) : keyed.get(key);
    if (!found || !canMorph(found, next)) {
      current.insertBefore(next, place);
      continue;
    }
    if (key === undefined) place = removeUntil(place, found);
    // Move a node only if its position changed: a move would lose the focus.
    if (found === place) place = place.nextSibling;
    else current.insertBefore(found, place);
    morph(found, next);
  }
  removeUntil(place, null);
}

/** Remove children whose key is not in `wanted`; return the others by key. */
function removeUnwanted(current, wanted) {
  const wantedKeys = new Set([...wanted.childNodes].map(keyOf));
  const keyed = new Map();
  for (const child of [...current.childNodes]) {
    const key = keyOf(child);
    if (key === undefined) continue;
    if (wantedKeys.has(key)) keyed.set(key, child);
    else child.remove();
  }
  return keyed;
}

/** Find the next sibling that can become `wanted`, up to the next keyed one. */
function findAhead(place, wanted) {
  for (let node = place; node && keyOf(node) === undefined; node = node.nextSibling) {
    if (canMorph(node, wanted)) return node;
  }
  return null;
}

function removeUntil(place, end) {
  let node = place;
  while (node !== end) {
    const next = node.nextSibling;
    node.remove();
    node = next;
  }
  return end;
}
