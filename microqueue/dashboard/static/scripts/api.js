/* Talk to the REST API beside the page. Addresses are relative, so the page works wherever
   the dashboard is mounted. */

const BASE = new URL("api/v1/", document.baseURI);

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

  get(path, query, { signal } = {}) {
    return this.#send("GET", path, { query, signal });
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
    const response = await this.#reach(this.address(path, query), {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      cache: "no-store",
    });
    this.clock.learn(response.headers.get("X-Server-Time"), sentAt);
    const answer = await read(response);
    if (!response.ok) throw new ApiError(response.status, answer ?? {});
    return answer;
  }

  async #reach(url, options) {
    try {
      return await fetch(url, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { detail: "The server cannot be reached." });
    }
  }
}

async function read(response) {
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch {
    return null; // A proxy's error page: the status says enough.
  }
}
