/* A client of the REST API. URLs are relative to the page, so it works under any mount path. */

const BASE = new URL("api/v1/", document.baseURI);
/** The timeout of a GET request in ms. Actions have none. */
const TIMEOUT = 20_000;

/** A failed request, with the response's problem+json. */
export class ApiError extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `The server answered ${status}.`);
    this.name = "ApiError";
    this.status = status;
    this.problem = problem;
  }

  /** Whether the viewer has to log in. */
  get unauthorised() {
    return this.status === 401;
  }
}

export class Api {
  /** `clock` is synchronised with the `X-Server-Time` header of every response. */
  constructor(clock) {
    this.clock = clock;
  }

  async get(path, query) {
    const controller = new AbortController();
    const timer = setTimeout(() => controller.abort(), TIMEOUT);
    try {
      return await this.#send("GET", path, { query, signal: controller.signal });
    } finally {
      clearTimeout(timer);
    }
  }

  post(path, body = {}) {
    return this.#send("POST", path, { body });
  }

  /** The URL of a path, for a link or a download. */
  address(path, query = {}) {
    const url = new URL(path, BASE);
    for (const [name, value] of Object.entries(query)) {
      for (const one of [value].flat()) {
        if (one !== null && one !== undefined) url.searchParams.append(name, one);
      }
    }
    return url;
  }

  async #send(method, path, { query, body, signal }) {
    const headers = { Accept: "application/json" };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const sentAt = this.clock.monotonic();
    const request = {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      cache: "no-store",
    };
    const response = await orUnreachable(fetch(this.address(path, query), request));
    this.clock.learn(response.headers.get("X-Server-Time"), sentAt);
    const answer = parseJson(await orUnreachable(response.text()));
    if (!response.ok) throw new ApiError(response.status, answer ?? {});
    return answer;
  }
}

/** Await a promise of fetch; network errors become an ApiError with status 0. */
async function orUnreachable(promise) {
  try {
    return await promise;
  } catch (error) {
    const timedOut = error.name === "AbortError";
    const detail = timedOut ? "The server does not answer." : "Could not reach the server.";
    throw new ApiError(0, { detail });
  }
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // Empty, or a proxy's error page: the status code is enough.
  }
}
