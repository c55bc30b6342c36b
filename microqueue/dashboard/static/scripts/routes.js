/* The address holds the view and its filter: `#/tasks?queue=mail&status=failed` can be shared. */

/** Read an address's fragment into path segments and a query. */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#?\/?/, "").split(/\?(.*)/s);
  const segments = path.split("/").filter(Boolean).map(decode);
  return { view: segments[0] ?? "overview", rest: segments.slice(1), query: readQuery(search) };
}

/** Write a fragment; empty values are left out, so that equal filters have equal addresses. */
export function href(path, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parameters.set(name, value);
  }
  const search = parameters.toString();
  const segments = [path].flat().map(encodeURIComponent);
  return `#/${segments.join("/")}${search ? `?${search}` : ""}`;
}

function readQuery(search) {
  return Object.fromEntries([...new URLSearchParams(search)].filter(([, value]) => value !== ""));
}

function decode(segment) {
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment; // A broken escape is shown as it is, and finds nothing.
  }
}
