/* Save something as a file. */

import { h } from "../dom.js";

/** Save what an address answers. */
export function saveAs(url, name) {
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

/** Save pieces of text. */
export function saveText(pieces, name) {
  const url = URL.createObjectURL(new Blob(pieces, { type: "application/x-ndjson" }));
  saveAs(url, name);
  URL.revokeObjectURL(url);
}
