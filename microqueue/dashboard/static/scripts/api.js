/* Talk to the REST API beside the page. Addresses are relative, so the page works wherever
   the dashboard is mounted. */

const BASE = new URL("api/v1/", document.baseURI);
/** How many ms a question waits for its answer. An action takes as long as it takes. */
const PATIENCE = 20_000;

/** An answer that is not a success, as problem+json tells it. */
export class ApiError extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `The server answered ${status}.`);
    this.name = "ApiError";
    this.status = status;
    this.problem = problem;
  }

  /** Whether one has to log in first. */
  get unauthorised() {
    return this.status === 401;
  }
}

export class Api {
  /** `clock` learns the server's time from every answer that tells it. */
  constructor(clock) {
    this.clock = clock;
  }

  async get(path, query) {
    const impatience = new AbortController();
    const timer = setTimeout(() => impatience.abort(), PATIENCE);
    try {
      return await this.#send("GET", path, { query, signal: impatience.signal });
    } finally {
      clearTimeout(timer);
    }
  }

  post(path, body = {}) {
    return this.#send("POST", path, { body });
  }

  /** The address of a path, for a link or a download. */
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
    const response = await reached(fetch(this.address(path, query), request));
    this.clock.learn(response.headers.get("X-Server-Time"), sentAt);
    const answer = read(await reached(response.text()));
    if (!response.ok) throw new ApiError(response.status, answer ?? {});
    return answer;
  }
}

async function reached(answer) {
  try {
    return await answer;
  } catch (error) {
    const late = error.name === "AbortError";
    const detail = late ? "The server does not answer." : "The server cannot be reached.";
    throw new ApiError(0, { detail });
  }
}

function read(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // Nothing, or a proxy's error page: the status says enough.
  }
}
