/* The fragment of the address holds the view and its filter, so that a view can be shared:
   `#/tasks?queue=mail&status=failed`. */

/** Parse a fragment into the view, further path segments and a query. */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#?\/?/, "").split(/\?(.*)/s);
  const segments = path.split("/").filter(Boolean).map(decode);
  return { view: segments[0] ?? "overview", rest: segments.slice(1), query: readQuery(search) };
}

/** Build a fragment. Empty values are omitted, so that equal filters have equal addresses. */
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
    return segment; // A malformed escape is kept as it is.
  }
}
