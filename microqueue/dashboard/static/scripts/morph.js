/* Turn the tree on the page into a wanted tree in place, so that the reader's scroll position,
   focus, text selection and half-typed input stay where they are. */

import { META } from "./dom.js";

/** These are the reader's to change: what is open stays open. */
const READERS_OWN = new Set(["open"]);

/** Make the children of `container` those of `wanted`, an element or a fragment. */
export function render(container, wanted) {
  const holder = document.createDocumentFragment();
  holder.append(wanted);
  morphChildren(container, holder);
}

/** Make `current` like `wanted`; give the node that now stands there. */
export function morph(current, wanted) {
  if (!alike(current, wanted)) {
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

function alike(one, other) {
  return one.nodeName === other.nodeName && keyOf(one) === keyOf(other);
}

function keyOf(node) {
  return node[META]?.key;
}

function morphAttributes(current, wanted) {
  for (const { name } of [...current.attributes]) {
    if (!wanted.hasAttribute(name) && !READERS_OWN.has(name)) current.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (current.getAttribute(name) !== value && !READERS_OWN.has(name))
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
    // What the reader is typing wins until it is submitted.
    if (name === "value" && current === document.activeElement) continue;
    if (current[name] !== value) current[name] = value;
  }
  current[META] = after;
}

function morphChildren(current, wanted) {
  const keyed = dropVanished(current, wanted);
  let place = current.firstChild;
  for (const next of [...wanted.childNodes]) {
    const key = keyOf(next);
    const found = key === undefined ? ahead(place, next) : keyed.get(key);
    if (!found || !alike(found, next)) {
      current.insertBefore(next, place);
      continue;
    }
    if (key === undefined) place = dropUntil(place, found);
    // Only what changes its place is moved: a move would cost the row its focus.
    if (found === place) place = place.nextSibling;
    else current.insertBefore(found, place);
    morph(found, next);
  }
  dropUntil(place, null);
}

/** Remove children whose key is no longer wanted; give the others by key. */
function dropVanished(current, wanted) {
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

/** Find the next sibling that can become `wanted`, not further than the next keyed one. */
function ahead(place, wanted) {
  for (let node = place; node && keyOf(node) === undefined; node = node.nextSibling) {
    if (alike(node, wanted)) return node;
  }
  return null;
}

function dropUntil(place, end) {
  let node = place;
  while (node !== end) {
    const next = node.nextSibling;
    node.remove();
    node = next;
  }
  return end;
}
