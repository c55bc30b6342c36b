/* Download files. */

import { h } from "../dom.js";

/** Download a URL. */
export function saveAs(url, name) {
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

/** Download text, given in parts. */
export function saveText(parts, name) {
  const url = URL.createObjectURL(new Blob(parts, { type: "application/x-ndjson" }));
  saveAs(url, name);
  URL.revokeObjectURL(url);
}
